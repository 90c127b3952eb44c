"""Subcommand ``rank``: be the rank of a replica on this node, from gate to saved log.

Run by ``sparkfleet-rank@<replica>.service`` (Type=notify). In order: the gate; the launch contract of every
peer; the ranks of earlier waves; the GID index; the container. READY means that the container runs and has
stayed up for the wave gate's time; that the model answers is asked elsewhere. Then it waits: for the
container, for SIGTERM, for a peer that is gone. A rank whose peer has ended serves nobody and holds a
hundred gigabytes, so it ends too; a peer that is merely silent is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.sparkfleet.serving.plugins.module_utils import peer_wire, release
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import (
    DockerApi,
    DockerError,
    DockerNotFound,
    DockerUnreachable,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.endpoint import rail_bytes
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, Refusal, meminfo
from ansible_collections.sparkfleet.serving.plugins.module_utils.launch import create_body
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_state import (
    boot_note,
    container_view,
    read_json,
)

from . import gate, gid, logs
from .common import Status, load_launch, sd_notify, until

LOG = logging.getLogger(__name__)
HELP = "run the rank of a replica (for systemd)"

#: Exit codes. 0 is a stop that was asked for.
EXIT_REFUSED = 20
EXIT_DOCKER = 21
EXIT_ENDED = 22
EXIT_PEER_LOST = 70

#: Seconds after its boot in which a peer may still start its rank.
BOOT_S = 900.0
#: Seconds to wait for peers, rails and Docker: of a start at boot, and of one that somebody waits for.
BOOT_WAIT_S = 600.0
WAIT_S = 60.0
#: Seconds that a start at boot gives a peer to show that it comes along.
COMPANY_S = 30.0
#: Seconds between two questions to a peer, and how many answers in a row make it gone.
PEER_EVERY_S = 5.0
PEER_COUNT = 3


class Ended(Exception):
    """The rank is over: ``code`` for systemd, and a sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Rank:
    """One run of one rank. ``ask`` and ``clock`` are parameters for tests."""

    def __init__(
        self,
        host: Host,
        docker: DockerApi,
        launch: Mapping[str, Any],
        *,
        ask: Callable[..., dict[str, Any]] = peer_wire.ask,
        every_s: float = PEER_EVERY_S,
    ) -> None:
        self.host = host
        self.docker = docker
        self.launch = launch
        self.replica = str(launch["replica"])
        self.rank = int(launch["rank"])
        self.ask = ask
        self.every_s = every_s
        self.status = Status(host, self.replica)
        self.stop = threading.Event()
        self.started_at = time.time()
        self.at_boot = False
        self.container = ""
        self.exit_code: int | None = None
        self.exit_note = ""
        self.ended = threading.Event()
        self.partners: dict[int, str] = {}
        self.gone: dict[int, int] = {}

    # -- before the container ------------------------------------------------------------------------------

    def wait_s(self) -> float:
        """How long to wait for what may come: longer at boot, when peers, rails and Docker come up too."""
        return BOOT_WAIT_S if self.at_boot else WAIT_S

    def say(self, phase: str, message: str, **more: Any) -> None:
        LOG.info("rank %d of %s: %s", self.rank, self.replica, message)
        self.status.set(phase, message, **more)
        with contextlib.suppress(OSError):
            sd_notify(f"STATUS={message}")

    def check_stop(self) -> None:
        if self.stop.is_set():
            raise Ended(0, "stopped before the container was created")

    def key(self) -> bytes:
        return peer_wire.read_key(self.host, self.replica)

    def question(
        self, other: Mapping[str, Any], op: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Ask one peer; unreachable and refused become refusals that name it."""
        try:
            return self.ask(
                other["addresses"], int(self.launch["peer_port"]), self.key(), self.replica, op, body
            )
        except peer_wire.PeerUnreachable as error:
            raise Refusal(
                f"peer {other['name']} (rank {other['rank']}) cannot be reached on the rails",
                str(error),
                f"its peer service on {', '.join(other['addresses'])} port {self.launch['peer_port']}",
                "check the cable, the rails and sparkfleet-peer.service on that node",
            ) from error
        except peer_wire.PeerRefused as error:
            raise Refusal(
                f"peer {other['name']} (rank {other['rank']}) does not accept this node",
                str(error),
                "the same peer key on all nodes of the replica",
                "run site.yml for all members of the replica",
            ) from error

    def agree(self) -> None:
        """Every peer has the same launch contract."""
        for other in self.launch["peers"]:
            answer = until(
                lambda other=other: self.question(  # type: ignore[misc]
                    other, "contract", {"contract": self.launch["contract"]}
                ),
                self.wait_s(),
                stopped=self.stop.is_set,
            )
            self.check_stop()
            if answer["differences"]:
                raise Refusal(
                    f"rank {self.rank} and rank {other['rank']} on {other['name']} differ, which would hang",
                    "; ".join(answer["differences"]),
                    "equal launch contracts",
                    "run site.yml for all members of the replica together",
                )

    def take_boot_note(self) -> bool:
        """Whether the boot asks for this start; the note counts once."""
        note = boot_note(self.replica)
        found = self.host.exists(note)
        if found:
            with contextlib.suppress(OSError):
                self.host.remove(note)
        return found

    def committed(self) -> None:
        """This launch is the release that passed the gates: nobody watches a start at boot."""
        directory = str(self.launch.get("release_dir") or release.DIRECTORY)
        marker = release.read(self.host, directory, self.replica) or {}
        current = (marker.get("current") or {}).get("launch_hash")
        if current != self.launch["hash"]:
            raise Refusal(
                "this launch is not the committed release, so it is not started at boot",
                f"release {current}" if current else f"no release in {directory}",
                f"release {self.launch['hash']}",
                "run site.yml, which commits what passes its gates, or start it yourself (playbook start)",
            )

    def company(self) -> None:
        """Every peer starts with this node: it boots too, or its rank waits for this one.

        A node that restarts alone finds its peers ended, or about to. Its rank would load and wait for them,
        and half a replica serves nobody.
        """
        for other in self.launch["peers"]:
            end, patience = time.monotonic() + self.wait_s(), min(COMPANY_S, self.wait_s())
            staying: float | None = None
            while True:
                try:
                    state = self.question(other, "state")
                except Refusal:
                    # It may be booting: longer than a node takes that answers and does not come.
                    staying = None
                    if time.monotonic() >= end:
                        raise
                else:
                    if self.comes(state):
                        break
                    staying = time.monotonic() if staying is None else staying
                    if time.monotonic() - staying >= patience:
                        raise Refusal(
                            f"rank {other['rank']} on {other['name']} does not start with this node",
                            f"{state['phase']}: {state['message']}",
                            "a node that boots too, or a rank that waits for this one",
                            "start the replica as a whole (playbook start)",
                        )
                self.check_stop()
                time.sleep(min(1.0, patience))

    def comes(self, state: Mapping[str, Any]) -> bool:
        """Whether a peer in this state starts with this node."""
        if state["alive"]:
            return (state.get("partners") or {}).get(str(self.rank)) in (None, self.status.values["run"])
        return bool(state["phase"] == "none" and float(state.get("up_s", BOOT_S)) < BOOT_S)

    def turn(self) -> None:
        """The ranks of earlier waves run."""
        earlier: set[int] = set()
        for wave in self.launch["waves"]["start"]:
            if self.rank in wave:
                break
            earlier |= set(wave)
        for other in self.launch["peers"]:
            if other["rank"] not in earlier:
                continue

            def running(other: Mapping[str, Any] = other) -> None:
                state = self.question(other, "state")
                if not (state["alive"] and state["phase"] == "running"):
                    raise Refusal(
                        f"rank {other['rank']} on {other['name']} must run first",
                        f"{state['phase']}: {state['message']}",
                        "running",
                        "start the replica as a whole (playbook start), not one rank",
                    )
                bound = (state.get("partners") or {}).get(str(self.rank))
                if bound not in (None, self.status.values["run"]):
                    raise Refusal(
                        f"rank {other['rank']} on {other['name']} still belongs to an earlier run of this rank",
                        "it runs since before this start, and would never answer this one",
                        "a rank that was started for this run",
                        "start the replica as a whole (playbook restart)",
                    )
                self.bind(int(other["rank"]), state)

            until(running, self.wait_s(), stopped=self.stop.is_set)
            self.check_stop()

    def bind(self, number: int, state: Mapping[str, Any]) -> None:
        """Remember which life of a peer this rank belongs to; ranks never survive a restart of each other."""
        run = str(state.get("run") or "")
        if run and self.partners.get(number) != run:
            self.partners[number] = run
            self.status.set(
                str(self.status.values.get("phase", "checking")),
                str(self.status.values.get("message", "")),
                partners={str(key): value for key, value in self.partners.items()},
            )

    def clear(self) -> None:
        """Remove a container of ours that an earlier run left behind; its log is saved first."""
        view = container_view(
            self.docker, self.launch["container"]["name"], self.replica, self.launch["install_id"]
        )
        if view["state"] not in ("running", "stopped"):
            return
        self.say("starting", f"removing a container left behind ({view['state']})")
        if view["running"]:
            self.docker.container_stop(view["id"], int(self.launch["container"]["stop_grace"]))
        self.save(view["id"])
        self.docker.container_remove(view["id"], force=True)

    def start(self) -> None:
        """Create and start the container, and see it stay up."""
        index = gid.resolve(self.host, self.launch)
        devices = [path for path in self.launch["container"]["devices"] if self.host.exists(path)]
        for mount in self.launch["container"]["mounts"]:
            if not mount["read_only"]:
                self.host.path(mount["source"]).mkdir(parents=True, exist_ok=True)
        self.clear()
        self.check_stop()
        for note in ("trip.json",):
            with contextlib.suppress(OSError):
                self.host.remove(f"/run/sparkfleet/{self.replica}/{note}")
        self.say(
            "starting",
            "creating the container",
            gid_index=index,
            rail_bytes=rail_bytes(self.host, self.launch),
            # What was available before this rank: with what is left when it idles, the replica's own constants.
            memory_before=meminfo(self.host.read("/proc/meminfo") or "").get("MemAvailable"),
        )
        self.container = self.docker.container_create(
            self.launch["container"]["name"], create_body(self.launch, index, devices)
        )
        self.docker.container_start(self.container)
        threading.Thread(target=self.follow, name="wait", daemon=True).start()
        stable = float((self.launch["gates"].get("wave") or {}).get("stable_s", 0))
        end = time.monotonic() + stable
        while not self.ended.is_set() and not self.stop.is_set() and time.monotonic() < end:
            self.ended.wait(0.1)
        if self.ended.is_set():
            raise Ended(EXIT_ENDED, self.end_text())
        state = self.docker.container_inspect(self.container)["State"]
        self.say(
            "running",
            f"container {self.container[:12]} runs",
            container=self.container,
            container_started=str(state.get("StartedAt", "")),
            launch=self.launch["hash"],
            contract=self.launch["contract"]["digest"],
        )
        with contextlib.suppress(OSError):
            sd_notify("READY=1", f"STATUS=container {self.container[:12]} runs")

    # -- while it runs -------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Thread: wait for the container's end, also over a restart of the Docker daemon."""
        first = str(self.docker.container_inspect(self.container)["State"].get("StartedAt", ""))
        silent_since: float | None = None
        while True:
            try:
                self.docker.container_wait(self.container)
                state = self.docker.container_inspect(self.container)["State"]
                if state.get("Running") and str(state.get("StartedAt", "")) == first:
                    silent_since = None
                    continue
                if state.get("Running"):
                    self.exit_note = "it was restarted by hand, which its peers do not survive"
                self.exit_code = int(state.get("ExitCode", 0))
                if state.get("OOMKilled"):
                    self.exit_note = "the kernel killed it for memory"
            except DockerNotFound:
                self.exit_note = "it was removed by hand"
            except DockerUnreachable as error:
                now = time.monotonic()
                silent_since = now if silent_since is None else silent_since
                if now - silent_since < 120:
                    time.sleep(1)
                    continue
                self.exit_note = f"Docker has not answered for 120 s: {error}"
            except DockerError as error:
                self.exit_note = str(error)
            self.ended.set()
            return

    def end_text(self) -> str:
        """Why the container ended, in one sentence."""
        text = "the container ended" + ("" if self.exit_code is None else f" with exit code {self.exit_code}")
        try:
            trip = read_json(self.host, f"/run/sparkfleet/{self.replica}/trip.json")
        except Refusal:
            trip = None
        if trip and trip.get("container") == self.container:
            return f"{text}: {trip.get('reason')} (by {trip.get('by')})"
        lines = logs.tail(self.docker, self.container)
        self.status.values["tail"] = lines
        known = [
            name for name in self.launch["gates"].get("errors", []) if any(name in line for line in lines)
        ]
        if known:
            text += f": {known[0]}"
        return f"{text}: {self.exit_note}" if self.exit_note else text

    def look_at_peers(self) -> None:
        """Raise ``Ended`` when a peer that lived has ended; its silence counts for nothing."""
        for other in self.launch["peers"]:
            number = int(other["rank"])
            try:
                state = self.question(other, "state")
            except Refusal:
                self.gone[number] = 0
                continue
            known = self.partners.get(number)
            if state["alive"] and known in (None, state.get("run")):
                self.bind(number, state)
                self.gone[number] = 0
                continue
            if state["alive"]:
                raise Ended(
                    EXIT_PEER_LOST,
                    f"rank {number} on {other['name']} is gone: it was started anew, which its peers do not survive",
                )
            died = state["phase"] == "failed" and float(state.get("since") or 0) > self.started_at
            if known is None and not died:
                limit = float(self.launch["gates"]["ready"]["timeout_s"])
                if time.time() - self.started_at > limit:
                    raise Ended(
                        EXIT_PEER_LOST,
                        f"rank {number} on {other['name']} did not start within {limit:g} s: {state['message']}",
                    )
                continue
            self.gone[number] = self.gone.get(number, 0) + 1
            if self.gone[number] < PEER_COUNT:
                continue
            asked = state["phase"] == "stopped" and state.get("exit") == 0
            how = "was stopped" if asked else "is gone"
            raise Ended(
                0 if asked else EXIT_PEER_LOST,
                f"rank {number} on {other['name']} {how}: {state['message']}",
            )

    def watch(self) -> None:
        """Until the end. Raises ``Ended`` always."""
        while True:
            waited = time.monotonic() + self.every_s
            while time.monotonic() < waited:
                if self.stop.is_set():
                    raise Ended(0, "stopped on request")
                if self.ended.wait(0.2):
                    in_order = self.exit_code == 0 and not self.exit_note
                    text = self.end_text()
                    if in_order and self.launch["peers"]:
                        text += f": {self.sent_home()}"
                    raise Ended(0 if in_order else EXIT_ENDED, text)
            self.look_at_peers()

    def sent_home(self) -> str:
        """Whose stop ended this engine: rank 0 sends the others home, before its own agent can say so."""
        told = []
        for other in self.launch["peers"]:
            try:
                state = self.question(other, "state")
                how = f"is {state['phase']}: {state['message']}"
            except Refusal:
                how = "does not answer, as a node that is shut down"
            told.append(f"rank {other['rank']} on {other['name']} {how}")
        return f"a stop in order; {', '.join(told)}"

    # -- the end -------------------------------------------------------------------------------------------

    def save(self, container: str) -> None:
        where = self.launch["logs"]
        path, warning = logs.save(
            self.host,
            self.docker,
            container,
            directory=str(where["dir"]),
            replica=self.replica,
            rank=self.rank,
            keep=int(where["keep"]),
        )
        if path:
            self.status.values["log"] = path
        if warning:
            LOG.warning("%s", warning)
            self.status.values["log_warning"] = warning

    def finish(self, ended: Ended) -> int:
        """Stop what runs, save its log, remove it, say how it ended."""
        if self.container:
            self.say("stopping", str(ended))
            try:
                if not self.ended.is_set() or "by hand" in self.exit_note:
                    self.docker.container_stop(self.container, int(self.launch["container"]["stop_grace"]))
                if not self.status.values.get("tail"):
                    self.status.values["tail"] = logs.tail(self.docker, self.container)
                self.save(self.container)
                self.docker.container_remove(self.container, force=True)
            except DockerNotFound:
                pass
            except DockerError as error:
                self.say("failed", f"{ended}; and Docker: {error}", exit=EXIT_DOCKER)
                return EXIT_DOCKER
        self.say("stopped" if ended.code == 0 else "failed", str(ended), exit=ended.code)
        return ended.code

    def run(self) -> int:
        """The whole life of the rank; returns the exit code."""
        try:
            self.at_boot = self.take_boot_note()
            self.say("checking", "checking the node")
            if self.at_boot:
                self.committed()
            gate.check(self.host, self.docker, self.launch, self.gate_wait(), self.stop.is_set)
            self.check_stop()
            self.say("waiting", "comparing the launch with the peers")
            self.agree()
            if self.at_boot:
                self.company()
            self.turn()
            self.start()
            self.watch()
        except Ended as ended:
            return self.finish(ended)
        except Refusal as refusal:
            return self.finish(Ended(EXIT_REFUSED, str(refusal.as_failure(self.launch["node"])["msg"])))
        except DockerError as error:
            return self.finish(Ended(EXIT_DOCKER, str(error)))
        return 0

    def gate_wait(self) -> float:
        return max(self.wait_s(), float(self.launch["memory"].get("wait_s", 0)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replica", required=True)


def main(args: argparse.Namespace) -> int:
    """Be the rank; SIGTERM and SIGINT stop it."""
    host = Host()
    try:
        launch = load_launch(host, args.replica)
    except Refusal as refusal:
        message = refusal.as_failure()["msg"]
        Status(host, args.replica).set("failed", message, exit=EXIT_REFUSED)
        sys.stderr.write(message + "\n")
        return EXIT_REFUSED
    rank = Rank(host, DockerApi(), launch)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: rank.stop.set())
    return rank.run()
