"""Subcommand ``guard``: stop the rank of this node while the machine still answers. One process a node.

Twice a second it reads MemAvailable and asks ``memory_guard.decide``. Everything that can be slow (Docker,
peers, the health page, the disk) is done by other threads, so that nothing keeps the next sample waiting; the
process of the rank is held by a pidfd from its start on, so that stopping it needs neither Docker nor a
process table.

Files: ``/etc/sparkfleet/guard.json`` (settings), ``/run/sparkfleet/<replica>/guard.json`` (what it thinks
now; the peer service hands it to the other nodes), ``/run/sparkfleet/guard.prom`` (metrics),
the folder of records (``records_dir`` of the settings).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ansible_collections.sparkfleet.serving.plugins.module_utils import peer_wire
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi, DockerError
from ansible_collections.sparkfleet.serving.plugins.module_utils.endpoint import Activity
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, Refusal, meminfo
from ansible_collections.sparkfleet.serving.plugins.module_utils.memory_guard import (
    GIB,
    KILL,
    NONE,
    RECORD,
    RECORDS,
    ApiView,
    Decision,
    History,
    PeerView,
    Policy,
    PolicyError,
    decide,
    gib,
    memory_verdict,
    policies,
    prometheus,
    records_dir,
    restart_due,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_report import local_endpoint
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_state import (
    REPLICAS,
    container_view,
    launch_path,
    rank_unit,
    read_json,
)

from .common import sd_notify

LOG = logging.getLogger(__name__)
HELP = "stop the rank of this node before memory runs out (for systemd)"

CONFIG = "/etc/sparkfleet/guard.json"
RUN = "/run/sparkfleet"
METRICS = f"{RUN}/guard.prom"

#: Seconds between looks at Docker, at the peers, at the health page, and between two writings of the state.
ATTACH_S = 2.0
PEERS_S = 2.0
API_S = 5.0
WRITE_S = 2.0
#: Seconds that one question to a peer or the health page may take.
ASK_S = 2.0
#: How long after its end a rank's reason may be learned from a peer, and how near the two ends have to be.
LEARN_S = 60.0
TOGETHER_S = 20.0
#: Records kept a replica, and samples in one.
KEEP = 20
SAMPLES = 240
#: Exit code of a configuration that cannot be used; the unit does not restart on it.
EXIT_CONFIG = 2
#: What changes in a sentence that stays the same.
NUMBER = re.compile(r"[\d.]+")
#: mlockall(2): what is mapped now and later.
MCL_CURRENT_FUTURE = 3

Json = dict[str, Any]


class Process:
    """A process held by a pidfd: signalling it later can never hit another that got its number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def alive(self) -> bool:
        return not self._poll.poll(0)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        os.close(self.fd)


class Watch:
    """What the guard knows of one replica on this node. Fields are replaced whole, so threads see old or
    new."""

    def __init__(self, replica: str, launch: Json, policy: Policy) -> None:
        self.replica = replica
        self.launch = launch
        self.policy = policy
        self.history = History()
        self.process: Process | None = None
        self.container = ""
        self.peers: dict[int, PeerView] = {}
        self.refused: dict[int, str] = {}
        self.api = ApiView()
        self.counters: tuple[Any, ...] | None = None
        self.unjudged = ""
        self.terminated_at: float | None = None
        self.killed = False
        self.cause = ""
        self.reason = ""
        self.trips: list[float] = []
        self.restarts: list[float] = []
        self.restart_note = ""
        self.ready = False
        self.unready: dict[str, str] | None = None
        self.ended_at: float | None = None
        self.memory_back = True
        self.memory_note = ""
        self.memory_said = False
        self.warned = False
        self.recorded: frozenset[str] = frozenset()

    @property
    def running(self) -> bool:
        return self.process is not None

    def attach(self, process: Process, container: str) -> None:
        """A new run of the rank: nothing of the old one counts."""
        self.history.restart()
        self.peers = {int(p["rank"]): PeerView(str(p["name"])) for p in self.launch.get("peers", [])}
        self.refused = {}
        self.api, self.counters, self.unjudged = ApiView(), None, ""
        self.terminated_at, self.killed = None, False
        self.cause = self.reason = self.memory_note = self.restart_note = ""
        self.memory_said, self.recorded, self.ended_at = False, frozenset(), None
        self.ready, self.unready = False, None
        self.container = container
        self.process = process


def load_settings(host: Host) -> tuple[Callable[[str], Policy], str]:
    """From the configuration: the policy of a replica by its name, and where records go. Raises
    ``PolicyError``."""
    try:
        config = read_json(host, CONFIG) or {}
    except Refusal as refusal:
        raise PolicyError(refusal.message) from refusal
    base, made = policies(config)
    return (lambda name: made.get(name, base)), records_dir(config)


class Guard:
    """The loop and its helpers. ``ask``, ``clock`` and ``docker`` are parameters for tests."""

    def __init__(
        self,
        host: Host,
        docker: DockerApi,
        policy_of: Callable[[str], Policy],
        *,
        records: str = RECORDS,
        ask: Callable[..., Json] = peer_wire.ask,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.docker = docker
        self.policy_of = policy_of
        self.records = records
        self.ask = ask
        self.clock = clock
        self.watches: dict[str, Watch] = {}
        self.stop = threading.Event()
        self.samples = 0
        self.available = 0
        self.started = time.time()
        self.interval = policy_of("").interval_s

    # -- looking: slow things, each in a thread of its own
    # -------------------------------------------------------

    def attach(self) -> None:
        """Find launches and running containers; hold the process of each."""
        for replica in self.host.listdir(REPLICAS):
            try:
                launch = read_json(self.host, launch_path(replica))
            except Refusal as refusal:
                LOG.warning("guard: %s", refusal.message)
                continue
            if launch is None:
                continue
            watch = self.watches.get(replica)
            if watch is None:
                watch = Watch(replica, launch, self.policy_of(replica))
                watch.restarts = self._earlier_restarts(replica)
                self.watches = {**self.watches, replica: watch}
            if watch.running:
                continue
            watch.launch = launch
            self._attach_one(watch)
        for replica in set(self.watches) - set(self.host.listdir(REPLICAS)):
            if not self.watches[replica].running:
                self.watches = {name: one for name, one in self.watches.items() if name != replica}

    def _earlier_restarts(self, replica: str) -> list[float]:
        """Restarts that a guard before this one made: their limit is the node's, not a process's."""
        try:
            state = read_json(self.host, f"{RUN}/{replica}/guard.json") or {}
        except Refusal:
            return []
        shift = self.clock() - time.time()
        return [float(when) + shift for when in state.get("restarts") or []]

    def _attach_one(self, watch: Watch) -> None:
        name = str((watch.launch.get("container") or {}).get("name", ""))
        view = container_view(self.docker, name, watch.replica, str(watch.launch.get("install_id", "")))
        if view["state"] != "running":
            return
        try:
            pid = int(self.docker.container_inspect(view["id"])["State"].get("Pid") or 0)
            process = Process(pid) if pid > 0 else None
            # Between the answer and the pidfd the process may have ended and its number been given away.
            again = self.docker.container_inspect(view["id"])["State"]
        except (DockerError, OSError):
            return
        if process is None:
            return
        if int(again.get("Pid") or 0) != pid or not again.get("Running"):
            process.close()
            return
        watch.attach(process, view["id"])
        LOG.info("guard: %s: holding rank %s, process %d", watch.replica, watch.launch.get("rank"), pid)

    def look_at_peers(self) -> None:
        """Ask the peer services of a running rank. Only a sealed answer counts as heard."""
        for watch in list(self.watches.values()):
            if not watch.running:
                self._learn(watch)
                self._gather(watch)
                continue
            for other in watch.launch.get("peers", []):
                number = int(other["rank"])
                view = watch.peers.get(number) or PeerView(str(other["name"]))
                try:
                    state = self._state_of(watch, other)
                except (peer_wire.PeerRefused, Refusal) as error:
                    if watch.refused.get(number) != str(error):
                        LOG.warning("guard: %s: %s: %s", watch.replica, view.name, error)
                    watch.refused[number] = str(error)
                    continue
                except peer_wire.PeerUnreachable:
                    continue
                watch.refused.pop(number, None)
                seen = state.get("guard") or {}
                fresh = abs(float(state.get("now") or 0) - float(seen.get("at") or 0)) < 5 * WRITE_S
                guard = str(seen.get("state", "unknown")) if fresh else "silent"
                if guard == "silent" and view.guard != "silent" and view.heard is not None:
                    LOG.warning(
                        "guard: %s: the guard of %s is silent; its node answers", watch.replica, view.name
                    )
                watch.peers = {
                    **watch.peers,
                    number: replace(view, heard=self.clock(), alive=bool(state.get("alive")), guard=guard),
                }

    def _state_of(self, watch: Watch, other: dict[str, Any]) -> dict[str, Any]:
        """What a peer's node says of its rank and guard. Raises ``PeerRefused``, ``PeerUnreachable``, ``Refusal``."""
        key = peer_wire.read_key(self.host, watch.replica)
        port = int(watch.launch["peer_port"])
        return self.ask(other["addresses"], port, key, watch.replica, "state", timeout=ASK_S)

    def _learn(self, watch: Watch) -> None:
        """Why our rank ended, from a peer that tripped at the same time. A head that is told to end sends its
        workers home first, so a worker may be gone, in good order, before anybody asks for it."""
        ended = watch.ended_at
        if ended is None or watch.reason or self.clock() - ended > LEARN_S:
            return
        for other in watch.launch.get("peers", []):
            try:
                state = self._state_of(watch, other)
            except (peer_wire.PeerRefused, peer_wire.PeerUnreachable, Refusal):
                continue
            seen = state.get("guard") or {}
            if not seen.get("tripped_at") or not seen.get("reason"):
                continue
            # Ages, not times: the clocks of two nodes need not agree.
            age = float(state.get("now") or 0) - float(seen["tripped_at"])
            if abs(age - (self.clock() - ended)) < TOGETHER_S:
                watch.cause, watch.reason = (
                    "peer",
                    f"{seen.get('cause')} on {other['name']}: {seen['reason']}",
                )
                watch.trips.append(ended)
                LOG.warning("guard: %s: the rank ended with its peer: %s", watch.replica, watch.reason)
                return

    def _gather(self, watch: Watch) -> None:
        """Which nodes are not ready to start their ranks again, and why. An agent waits for the ranks before
        its own for a minute only, and memory may take longer to come back there."""
        if not watch.ready:
            return
        unready: dict[str, str] = {}
        for other in watch.launch.get("peers", []):
            name = str(other["name"])
            try:
                state = self._state_of(watch, other)
            except (peer_wire.PeerRefused, peer_wire.PeerUnreachable, Refusal) as error:
                unready[name] = str(error)
                continue
            seen = state.get("guard") or {}
            fresh = abs(float(state.get("now") or 0) - float(seen.get("at") or 0)) < 5 * WRITE_S
            if not state.get("alive") and not (fresh and seen.get("ready")):
                unready[name] = str(seen.get("restart") or "its guard has no restart to make")
        watch.unready = unready

    def look_at_api(self) -> None:
        """Read the head's counters; the time of the last movement of any of them is what counts."""
        for watch in list(self.watches.values()):
            port = (watch.launch.get("ports") or {}).get("api")
            health = watch.launch.get("health") or {}
            if not watch.running or not port or not health.get("path"):
                continue
            try:
                seen = local_endpoint(self.host, watch.launch, ASK_S).activity(health)
            except (OSError, ValueError):  # nobody answers: what was known stays, and its clock runs on
                continue
            if not isinstance(seen, Activity):
                if seen != watch.unjudged:
                    LOG.warning("guard: %s: a stall cannot be seen: %s", watch.replica, seen)
                watch.api, watch.unjudged = ApiView(), seen
                continue
            watch.unjudged = ""
            # A page without running requests is progress too: a stall begins with a request.
            moved = seen.counters != watch.counters or seen.running == 0
            watch.counters = seen.counters
            since = self.clock() if moved else (watch.api.progress_at or self.clock())
            watch.api = ApiView(seen.running, since)

    # -- deciding: the loop
    # --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One sample, one decision a replica."""
        now = self.clock()
        memory = meminfo(self.host.read("/proc/meminfo") or "")
        if "MemAvailable" not in memory:
            raise RuntimeError("/proc/meminfo has no MemAvailable")
        self.available = memory["MemAvailable"]
        self.samples += 1
        for watch in self.watches.values():
            watch.history.observe(now, self.available, watch.policy.redline_gib * GIB)
            if watch.process is not None and not watch.process.alive():
                self._ended(watch, now)
            if watch.process is None:
                self._after(watch, now, memory)
                continue
            self._warn(watch)
            decision = decide(
                watch.policy,
                watch.history,
                now,
                rank_running=True,
                peers=tuple(watch.peers.values()),
                api=watch.api,
                terminated_at=watch.terminated_at,
                recorded=watch.recorded,
            )
            if decision.action != NONE:
                self._act(watch, decision, now, memory)

    def _warn(self, watch: Watch) -> None:
        """Say once that memory is low, and again only after it was a GiB above."""
        warn = watch.policy.warn_gib * GIB
        if self.available < warn and not watch.warned:
            watch.warned = True
            LOG.warning(
                "guard: %s: %s GiB available, the redline is %g",
                watch.replica,
                gib(self.available),
                watch.policy.redline_gib,
            )
        elif self.available > warn + GIB:
            watch.warned = False

    def _act(self, watch: Watch, decision: Decision, now: float, memory: Mapping[str, int]) -> None:
        process = watch.process
        if process is None or (decision.action == KILL and watch.killed):
            return
        if decision.action == RECORD:
            watch.recorded |= {decision.cause}
            LOG.warning("guard: %s: would stop the replica: %s", watch.replica, decision.reason)
            self._spawn(self.record, watch, decision, dict(memory), watch.history.last(SAMPLES))
            return
        first = watch.terminated_at is None
        if first:
            # The agent reads this note when its container ends, and says it in its status.
            self._note(watch, decision)
            watch.terminated_at = now
            watch.cause, watch.reason = decision.cause, decision.reason
            watch.trips.append(now)
        if decision.action == KILL:
            watch.killed = True
            process.send(signal.SIGKILL)
            self._spawn(self.thaw, watch.container)
        else:
            process.send(signal.SIGTERM)
        word = "killing" if decision.action == KILL else "stopping"
        LOG.error("guard: %s: %s rank %s: %s", watch.replica, word, watch.launch.get("rank"), decision.reason)
        if first:
            self._spawn(self.tell_peers, watch, decision)
            self._spawn(self.record, watch, decision, dict(memory), watch.history.last(SAMPLES))

    @staticmethod
    def _spawn(target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _note(self, watch: Watch, decision: Decision) -> None:
        note = {
            "reason": f"{decision.cause}: {decision.reason}",
            "by": "the guard of this node",
            "at": round(time.time(), 1),
            "container": watch.container,
        }
        with contextlib.suppress(OSError):
            self.host.write(f"{RUN}/{watch.replica}/trip.json", json.dumps(note) + "\n", 0o600)

    def _ended(self, watch: Watch, now: float) -> None:
        """The process of the rank is gone; whoever ended it."""
        if watch.process is not None:
            watch.process.close()
        watch.process = None
        watch.ended_at = now
        watch.memory_back = False
        if watch.terminated_at is not None:
            LOG.info(
                "guard: %s: the rank ended %.1f s after it was told to",
                watch.replica,
                now - watch.terminated_at,
            )
            return
        trip = self._trip_of(watch)
        if trip:
            watch.cause, watch.reason = "peer", trip
            watch.trips.append(now)
            LOG.warning("guard: %s: the rank was stopped for its peer: %s", watch.replica, trip)

    def _trip_of(self, watch: Watch) -> str:
        try:
            note = read_json(self.host, f"{RUN}/{watch.replica}/trip.json") or {}
        except Refusal:
            return ""
        return str(note.get("reason", "")) if note.get("container") == watch.container else ""

    def _after(self, watch: Watch, now: float, memory: Mapping[str, int]) -> None:
        """No rank runs: does memory come back, and is a restart wanted?"""
        if watch.ended_at is None:
            return
        if not watch.memory_back:
            watch.memory_back, watch.memory_note = memory_verdict(watch.policy, memory, now - watch.ended_at)
            if (
                not watch.memory_back
                and now - watch.ended_at >= watch.policy.return_s
                and not watch.memory_said
            ):
                watch.memory_said = True
                LOG.error("guard: %s: memory has not come back: %s", watch.replica, watch.memory_note)
        if not watch.trips or watch.trips[-1] < watch.ended_at - watch.policy.restart_window_s:
            return
        # A rank that somebody stopped on purpose, or started again, is not restarted.
        if not watch.cause:
            return
        due, why = restart_due(
            watch.policy,
            now,
            watch.trips,
            ended_at=watch.ended_at,
            memory_back=watch.memory_back,
            restarts=watch.restarts,
        )
        watch.ready = due
        if due:
            others = watch.unready
            if others is None:
                due, why = False, "waiting for the other nodes"
            elif others:
                told = "; ".join(f"{name} ({reason})" for name, reason in sorted(others.items()))
                due, why = False, f"waiting for {told}"
        if not due:
            # The seconds left change with every sample; what is said is said once.
            if NUMBER.sub("", why) != NUMBER.sub("", watch.restart_note):
                LOG.warning("guard: %s: not started again: %s", watch.replica, why)
            watch.restart_note = why
            return
        watch.cause = ""
        watch.restarts.append(now)
        watch.restart_note = why
        LOG.warning("guard: %s: %s after: %s", watch.replica, why, watch.reason)
        self._spawn(self.start_rank, watch)

    # -- acting: slow things again
    # -------------------------------------------------------------------------------

    def start_rank(self, watch: Watch) -> None:
        """Start the unit; the agents of all nodes order themselves."""
        unit = rank_unit(watch.replica)
        self.host.run(["systemctl", "reset-failed", unit])
        answer = self.host.run(["systemctl", "start", "--no-block", unit])
        if not answer.ok:
            LOG.error("guard: %s: cannot start %s: %s", watch.replica, unit, answer.text)

    def thaw(self, container: str) -> None:
        """A container that somebody paused takes no signal, not even this one, until it is thawed (cgroup
        v1)."""
        with contextlib.suppress(DockerError):
            self.docker.post(f"/containers/{container}/unpause")

    def tell_peers(self, watch: Watch, decision: Decision) -> None:
        """Ask the other nodes to stop their ranks: half a replica serves nobody and holds its memory."""
        body = {
            "reason": f"{decision.cause} on {watch.launch.get('node')}: {decision.reason}",
            "by": f"the guard of {watch.launch.get('node')}",
        }
        for other in watch.launch.get("peers", []):
            try:
                key = peer_wire.read_key(self.host, watch.replica)
                self.ask(
                    other["addresses"],
                    int(watch.launch["peer_port"]),
                    key,
                    watch.replica,
                    "stop",
                    body,
                    timeout=ASK_S,
                )
            except (peer_wire.PeerRefused, peer_wire.PeerUnreachable, Refusal) as error:
                LOG.warning(
                    "guard: %s: %s was not told to stop (%s); it ends by itself when it sees this rank gone",
                    watch.replica,
                    other["name"],
                    error,
                )

    def record(
        self,
        watch: Watch,
        decision: Decision,
        memory: Mapping[str, int],
        samples: Sequence[tuple[float, int]],
    ) -> None:
        """Write down what was seen: reason, samples up to the one that decided, memory by category, peers,
        settings."""
        now, wall = self.clock(), time.time()
        low = watch.history.low
        text = json.dumps(
            {
                "replica": watch.replica,
                "rank": watch.launch.get("rank"),
                "node": watch.launch.get("node"),
                "launch": watch.launch.get("hash"),
                "container": watch.container,
                "action": decision.action,
                "cause": decision.cause,
                "reason": decision.reason,
                "at": round(wall, 1),
                "low_bytes": low[1] if low else None,
                "samples": [[round(when - now, 2), value] for when, value in samples],
                "meminfo": dict(memory),
                "peers": [asdict(peer) for peer in watch.peers.values()],
                "policy": asdict(watch.policy),
            },
            indent=1,
        )
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall))
        try:
            self.host.write(f"{self.records}/{watch.replica}-{stamp}-{decision.cause}.json", text + "\n")
            mine = [name for name in self.host.listdir(self.records) if name.startswith(f"{watch.replica}-")]
            for name in mine[:-KEEP]:
                self.host.remove(f"{self.records}/{name}")
        except OSError as error:
            LOG.warning("guard: %s: no record: %s", watch.replica, error)

    def state(self, watch: Watch) -> Json:
        """What is handed to the other nodes and to status."""
        low = watch.history.low
        now = self.clock()
        silence = watch.policy.silence_s or float("inf")
        silent = [
            p.name for p in watch.peers.values() if p.heard is not None and now - p.heard >= min(silence, 10)
        ]
        if watch.running:
            word = "stopping" if watch.terminated_at is not None else "watching"
        elif watch.ended_at is None:
            word = "idle"
        elif not watch.memory_back and watch.memory_said:
            word = "memory held"
        else:
            word = "tripped" if watch.trips and watch.reason else "idle"
        return {
            "state": word,
            "at": round(time.time(), 1),
            "pid": os.getpid(),
            "generation": watch.container[:12],
            "running": watch.running,
            "available": self.available,
            "low": low[1] if low else None,
            "redline": int(watch.policy.redline_gib * GIB),
            "warning": watch.running and watch.warned,
            "action": watch.policy.action,
            "trips": len(watch.trips),
            "tripped_at": round(time.time() - (now - watch.trips[-1]), 1) if watch.trips else None,
            "cause": watch.cause,
            "reason": watch.reason,
            "memory": watch.memory_note,
            "restart": watch.restart_note,
            "ready": watch.ready,
            "unjudged": watch.unjudged,
            "silent": silent,
            "refused": sorted(watch.refused.values()),
            "since": round(self.started, 1),
            "restarts": [round(time.time() - (now - when), 1) for when in watch.restarts],
        }

    def write(self) -> None:
        """State of each replica and the metrics. A full /run must not end the guard."""
        states = {replica: self.state(watch) for replica, watch in self.watches.items()}
        with contextlib.suppress(OSError):
            for replica, state in states.items():
                self.host.write(f"{RUN}/{replica}/guard.json", json.dumps(state) + "\n", 0o600)
            shown = {
                name: {**state, "running": int(state["running"]), "silent": len(state["silent"])}
                for name, state in states.items()
            }
            text = prometheus({"available": self.available, "samples": self.samples, "replicas": shown})
            self.host.write(METRICS, text)

    # -- running
    # -------------------------------------------------------------------------------------------------

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while not self.stop.is_set():
            try:
                work()
            except Exception:  # a helper that fails is said and tried again; the sampling goes on
                LOG.exception("guard: %s", work.__name__)
            self.stop.wait(seconds)

    def run(self) -> int:
        """Sample until stopped."""
        helpers = ((ATTACH_S, self.attach), (PEERS_S, self.look_at_peers), (API_S, self.look_at_api))
        for seconds, work in (*helpers, (WRITE_S, self.write)):
            threading.Thread(
                target=self._every, args=(seconds, work), name=work.__name__, daemon=True
            ).start()
        ready = False
        while not self.stop.is_set():
            begun = self.clock()
            self.tick()
            with contextlib.suppress(OSError):
                sd_notify(*(["READY=1"] if not ready else []), "WATCHDOG=1", f"STATUS={self.line()}")
            ready = True
            self.stop.wait(max(0.01, self.interval - (self.clock() - begun)))
        return 0

    def line(self) -> str:
        """For `systemctl status`."""
        words = [f"{name}: {self.state(watch)['state']}" for name, watch in sorted(self.watches.items())]
        return f"{gib(self.available)} GiB available; {', '.join(words) or 'no replica here'}"


def lock_memory() -> bool:
    """Keep the guard's own pages in memory. Only where nothing limits it: under a limit, the lock on later
    pages would make the guard's own allocations fail."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return False
    return bool(ctypes.CDLL(None, use_errno=True).mlockall(MCL_CURRENT_FUTURE) == 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="read the settings, say what they are, and end")


def main(args: argparse.Namespace) -> int:
    """Guard until SIGTERM. Ending the guard stops no rank."""
    host = Host()
    try:
        policy_of, records = load_settings(host)
    except PolicyError as error:
        sys.stderr.write(f"guard: {CONFIG}: {error}\n")
        return EXIT_CONFIG
    if args.check:
        sys.stdout.write(json.dumps(asdict(policy_of("")), indent=1) + "\n")
        return 0
    guard = Guard(host, DockerApi(timeout=10.0), policy_of, records=records)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: guard.stop.set())
    # Threads share one small stack size: eight megabytes each would be locked memory for nothing.
    threading.stack_size(512 * 1024)
    locked = lock_memory()
    LOG.info(
        "guard: redline %g GiB, %s",
        policy_of("").redline_gib,
        "pages locked" if locked else "pages not locked",
    )
    return guard.run()
