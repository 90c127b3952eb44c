"""The life of a rank, from gate to saved log, with a fake Docker and peers that say what a test wants."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import peer_wire
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal, meminfo

from node.sparkfleet_node import common, logs, peer, rank
from tests.unit.node.conftest import INSTALL, TreeHost, launch_of, put_launch
from tests.unit.node.fake_docker import FakeDocker

NAME = "dsv41-1017-exl3-tf"
OURS = {"sparkfleet.install": INSTALL, "sparkfleet.replica": "spark-a"}


class Peers:
    """What the other rank answers; ``state`` may be changed while the rank runs."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "alive": True,
            "phase": "running",
            "message": "",
            "since": 0,
            "exit": None,
            "run": "r1",
            "partners": {},
        }
        self.differences: list[str] = []
        self.silent = False

    def ask(self, _addresses: Any, _port: int, _key: bytes, _replica: str, op: str, _body: Any = None) -> Any:
        if self.silent:
            raise peer_wire.PeerUnreachable("10.77.0.2: timed out")
        if op == "contract":
            return {"differences": self.differences}
        return dict(self.state)


class Run:
    """A rank in a thread."""

    def __init__(
        self, node: TreeHost, api: DockerApi, peers: Peers, launch: dict[str, Any] | None = None
    ) -> None:
        self.node = node
        self.rank = rank.Rank(node, api, launch or launch_of(0), ask=peers.ask, every_s=0.1)
        self.rank.wait_s = lambda: 0.4  # type: ignore[method-assign]
        self.code: int | None = None
        self.thread = threading.Thread(target=self.go, daemon=True)
        self.thread.start()

    def go(self) -> None:
        self.code = self.rank.run()

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.node.read("/run/sparkfleet/spark-a/rank.json") or "{}")
        return value

    def until(self, what: Callable[[dict[str, Any]], bool], seconds: float = 10) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if what(self.status()):
                return self.status()
            time.sleep(0.02)
        raise AssertionError(f"never: {self.status()}")

    def running(self) -> dict[str, Any]:
        return self.until(lambda status: status.get("phase") == "running")

    def end(self, seconds: float = 10) -> int:
        self.thread.join(seconds)
        assert self.code is not None, f"still there: {self.status()}"
        return self.code


@pytest.fixture
def peers() -> Peers:
    return Peers()


def saved_logs(node: TreeHost) -> list[str]:
    return node.listdir("/var/lib/sparkfleet/logs")


def test_a_rank_from_gate_to_saved_log(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    docker.on_start = lambda row: row.update(log=b"hello\n")
    run = Run(node, api, peers)
    status = run.running()
    assert status["memory_before"] == meminfo(node.read("/proc/meminfo") or "")["MemAvailable"]
    body = docker.bodies[NAME]
    assert "NCCL_IB_GID_INDEX=3" in body["Env"] and status["gid_index"] == 3
    assert body["HostConfig"]["Devices"][0]["PathOnHost"] == "/dev/infiniband"
    assert (node.root / "var/lib/sparkfleet/cache").is_dir()
    run.rank.stop.set()
    assert run.end() == 0
    assert docker.containers == {}
    assert run.status()["phase"] == "stopped"
    (name,) = saved_logs(node)
    assert gzip.decompress((node.root / "var/lib/sparkfleet/logs" / name).read_bytes()) == b"hello\n"
    assert run.status()["log"].endswith(name)


def test_ready_is_told_to_systemd(  # noqa: PLR0917
    node: TreeHost,
    api: DockerApi,
    docker: FakeDocker,
    peers: Peers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        run = Run(node, api, peers)
        run.running()
        heard = b""
        while b"READY=1" not in heard:
            heard = systemd.recv(4096)
        run.rank.stop.set()
        run.end()


@pytest.mark.field("B82")
def test_a_switch_mismatch_is_refused_before_anything_runs(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    peers.differences = ["switch idx_split: None here, '1' there"]
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "idx_split" in run.status()["message"] and "spark-2" in run.status()["message"]
    assert docker.containers == {}


def test_an_unreachable_peer_is_refused_in_bounded_time(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    peers.silent = True
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "cannot be reached on the rails" in run.status()["message"]
    assert docker.containers == {}


@pytest.mark.field("B78")
def test_rank_0_waits_for_rank_1(node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers) -> None:
    peers.state.update({"alive": False, "phase": "stopped"})
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "rank 1 on spark-2 must run first" in run.status()["message"]
    assert docker.containers == {}


def test_rank_1_waits_for_nobody(node: TreeHost, api: DockerApi, peers: Peers) -> None:
    launch = launch_of(1)
    launch["rails"] = launch_of(0)["rails"]
    launch["rank_file"] = launch_of(0)["rank_file"]
    peers.state.update({"alive": False, "phase": "none"})
    run = Run(node, api, peers, launch)
    run.running()
    time.sleep(0.6)
    assert run.status()["phase"] == "running", "a peer that never lived is waited for"
    run.rank.stop.set()
    assert run.end() == 0


def test_a_peer_that_failed_meanwhile_ends_the_rank(node: TreeHost, api: DockerApi, peers: Peers) -> None:
    run = Run(node, api, peers)
    run.running()
    peers.state.update(
        {"alive": False, "phase": "failed", "since": time.time() + 5, "message": "exit code 1"}
    )
    assert run.end() == rank.EXIT_PEER_LOST
    assert "rank 1 on spark-2 is gone: exit code 1" in run.status()["message"]


def test_a_peer_that_was_stopped_ends_the_rank_in_peace(node: TreeHost, api: DockerApi, peers: Peers) -> None:
    run = Run(node, api, peers)
    run.running()
    time.sleep(0.3)
    peers.state.update({"alive": False, "phase": "stopped", "exit": 0, "message": "stopped on request"})
    assert run.end() == 0


@pytest.mark.field("B78")
def test_a_peer_that_came_back_is_another_one(node: TreeHost, api: DockerApi, peers: Peers) -> None:
    """It was silent while its node restarted; its new rank would never answer this one."""
    run = Run(node, api, peers)
    run.running()
    peers.silent = True
    time.sleep(0.3)
    peers.silent = False
    peers.state.update({"run": "r2", "phase": "checking"})
    assert run.end() == rank.EXIT_PEER_LOST
    assert "it was started anew" in run.status()["message"]


@pytest.mark.field("B77")
def test_a_rank_of_an_earlier_run_is_not_joined(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    """After a restart of the head alone, the worker's rank still waits for the head that is gone."""
    peers.state["partners"] = {"0": "an earlier run"}
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "still belongs to an earlier run" in run.status()["message"]
    assert docker.containers == {}


def test_a_rank_does_not_wait_for_its_peer_for_ever(node: TreeHost, api: DockerApi, peers: Peers) -> None:
    launch = launch_of(1)
    launch["rails"], launch["rank_file"] = launch_of(0)["rails"], launch_of(0)["rank_file"]
    launch["gates"]["ready"] = {**launch["gates"]["ready"], "timeout_s": 0.5}
    peers.state.update({"alive": False, "phase": "failed", "message": "no memory"})
    run = Run(node, api, peers, launch)
    assert run.end() == rank.EXIT_PEER_LOST
    assert "did not start within 0.5 s: no memory" in run.status()["message"]


def test_a_silent_peer_is_left_alone(node: TreeHost, api: DockerApi, peers: Peers) -> None:
    run = Run(node, api, peers)
    run.running()
    peers.silent = True
    time.sleep(1)
    assert run.status()["phase"] == "running"
    run.rank.stop.set()
    assert run.end() == 0


def test_the_end_of_the_engine_is_named(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    run = Run(node, api, peers)
    run.running()
    docker.end(NAME, 1, "loading\nerror: ShortRopeTable\n")
    assert run.end() == rank.EXIT_ENDED
    assert "exit code 1: ShortRopeTable" in run.status()["message"]
    assert run.status()["tail"][-1] == "error: ShortRopeTable"
    assert docker.containers == {} and len(saved_logs(node)) == 1


@pytest.mark.parametrize("said", ["is stopping: stopped on request", "does not answer"])
def test_an_engine_that_is_sent_home_was_stopped_in_order(
    said: str, node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    """The engine of one rank tells the others before the agents do: not a failure, and it says whose stop."""
    run = Run(node, api, peers)
    run.running()
    peers.state.update({"phase": "stopping", "message": "stopped on request"})
    peers.silent = said == "does not answer"
    docker.end(NAME, 0, "bye\n")
    assert run.end() == 0
    assert run.status()["phase"] == "stopped"
    assert f"exit code 0: a stop in order; rank 1 on spark-2 {said}" in run.status()["message"]


@pytest.mark.field("T10", "T15", "T16", "T18", "T19", "T20", "T21", "T22", "T23", "T24", "E01")
def test_the_errors_that_the_engine_is_known_for_are_named(
    node: TreeHost, api: DockerApi, docker: FakeDocker
) -> None:
    """The name leads to the cause; a pile of log lines does not. Nothing tries again by itself."""
    launch = launch_of(0)
    wanted = {
        *("ShortRopeTable", "NoRankCache", "MissingEngramTable", "NoEngramTables", "BadEngramTable"),
        *("NoTokenMap", "AioUnavailable", "ReadFailed", "EndOfFile", "NoVisionKit", "NoKernelImages"),
        *("MissingTritonVariant", "NCCL error"),
    }
    assert wanted <= set(launch["gates"]["errors"])
    for name in launch["gates"]["errors"]:
        docker.containers.clear()
        one = rank.Rank(node, api, launch)
        one.container = docker.add(NAME, OURS, running=False, log=f"loading\nerror: {name} 2\n")
        one.exit_code = 1
        assert one.end_text() == f"the container ended with exit code 1: {name}"


def test_an_engine_that_ends_at_once_never_was_ready(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    docker.on_start = lambda row: docker.end(row["Id"], 2, "BadArgument: --pool\n")
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_ENDED
    assert "exit code 2: BadArgument" in run.status()["message"]


def test_an_oom_kill_is_named(node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers) -> None:
    run = Run(node, api, peers)
    run.running()
    docker.end(NAME, 137, oom=True)
    assert run.end() == rank.EXIT_ENDED
    assert "the kernel killed it for memory" in run.status()["message"]


@pytest.mark.field("T13")
def test_the_guards_reason_is_named(node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers) -> None:
    run = Run(node, api, peers)
    run.running()
    assert peer.kill_rank(node, api, "spark-a", "2.9 GiB available, redline 4", "guard")
    assert run.end() == rank.EXIT_ENDED
    assert "2.9 GiB available, redline 4 (by guard)" in run.status()["message"]


@pytest.mark.field("B78")
def test_a_restart_by_hand_ends_the_rank(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    run = Run(node, api, peers)
    run.running()
    docker.restart_by_hand(NAME)
    assert run.end() == rank.EXIT_ENDED
    assert "restarted by hand" in run.status()["message"]
    assert docker.containers == {}


def test_a_removal_by_hand_ends_the_rank(node: TreeHost, api: DockerApi, peers: Peers) -> None:
    run = Run(node, api, peers)
    run.running()
    api.container_remove(NAME, force=True)
    assert run.end() == rank.EXIT_ENDED


def test_a_stale_container_of_ours_is_replaced_and_its_log_saved(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    docker.add(NAME, OURS, running=True, log="old\n")
    run = Run(node, api, peers)
    run.running()
    assert len(docker.containers) == 1 and len(saved_logs(node)) == 1
    run.rank.stop.set()
    run.end()


def test_a_foreign_container_is_left_alone(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    theirs = docker.add(NAME, {"sparkfleet.install": "other", "sparkfleet.replica": "spark-a"})
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "not ours" in run.status()["message"]
    assert docker.containers[theirs]["State"]["Running"]


@pytest.mark.field("B20")
def test_rails_at_different_indexes_start_nothing(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    from tests.unit.node.conftest import add_gid

    (node.root / "sys/class/infiniband/roceP2p1s0f0/ports/1/gids/3").unlink()
    add_gid(node.root, "roceP2p1s0f0", 4, "10.77.0.5", "enP2p1s0f0np0")
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "rocep1s0f0 has 3, roceP2p1s0f0 has 4" in run.status()["message"]
    assert docker.containers == {}


@pytest.mark.field("B19")
def test_each_start_resolves_the_index_anew(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    from tests.unit.node.conftest import add_gid

    for index in (3, 6):
        for hca, netdev, address in (
            ("rocep1s0f0", "enp1s0f0np0", "10.77.0.1"),
            ("roceP2p1s0f0", "enP2p1s0f0np0", "10.77.0.5"),
        ):
            (node.root / f"sys/class/infiniband/{hca}/ports/1/gids/3").unlink(missing_ok=True)
            add_gid(node.root, hca, index, address, netdev)
        run = Run(node, api, peers)
        run.running()
        assert f"NCCL_IB_GID_INDEX={index}" in docker.bodies[NAME]["Env"]
        run.rank.stop.set()
        run.end()


def test_docker_that_does_not_answer_is_no_success(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers
) -> None:
    docker.denied = True
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "Docker does not answer" in run.status()["message"]


def test_stop_while_it_waits(node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers) -> None:
    peers.silent = True
    run = Run(node, api, peers)
    run.until(lambda status: status.get("phase") == "waiting")
    run.rank.stop.set()
    run.end()
    assert docker.containers == {}


def test_a_full_disk_does_not_keep_a_rank_alive(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "KEEP_FREE", 1 << 62)
    run = Run(node, api, peers)
    run.running()
    run.rank.stop.set()
    assert run.end() == 0
    assert "the log was not saved" in run.status()["log_warning"]
    assert docker.containers == {}


def test_logs_are_kept_by_number(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    identity = docker.add(NAME, OURS, running=False, log="x\n")
    for _turn in range(4):
        path, warning = logs.save(node, api, identity, directory="/logs", replica="spark-a", rank=0, keep=2)
        assert path and not warning
    assert len(node.listdir("/logs")) == 2
    node.write("/logs/spark-a-20200101-000000-rank1.log.gz", "the other rank's")
    logs.save(node, api, identity, directory="/logs", replica="spark-a", rank=0, keep=2)
    assert len(node.listdir("/logs")) == 3
    assert logs.save(node, api, identity, directory="/none", replica="spark-a", rank=0, keep=0) == ("", "")


def test_a_launch_of_another_schema_is_refused(node: TreeHost) -> None:
    put_launch(node, {**launch_of(0), "schema": 99})
    with pytest.raises(Refusal, match="another schema"):
        common.load_launch(node, "spark-a")


def test_the_boot_is_over_before_a_rank_starts(node: TreeHost) -> None:
    from node.sparkfleet_node import boot

    assert boot.begin(node, "spark-a") == 0
    asked = [call for call in node.calls if call[0] == "systemctl"]
    assert asked[0] == ["systemctl", "is-system-running", "--wait"]
    assert asked[-1] == ["systemctl", "start", "--no-block", "sparkfleet-rank@spark-a.service"]
    assert node.exists("/run/sparkfleet/spark-a/boot.json")


def test_the_boot_leaves_a_rank_alone_that_somebody_started(node: TreeHost) -> None:
    from node.sparkfleet_node import boot

    node.unit("sparkfleet-rank@spark-a.service")["ActiveState"] = "activating"
    assert boot.begin(node, "spark-a") == 0
    assert not [call for call in node.calls if "--no-block" in call]
    assert not node.exists("/run/sparkfleet/spark-a/boot.json"), "a note would count for the next start"


def at_boot(node: TreeHost, release: str | None) -> None:
    node.write("/run/sparkfleet/spark-a/boot.json", "{}")
    if release is not None:
        marker = {"schema": 1, "replica": "spark-a", "current": {"launch_hash": release}, "previous": None}
        node.write("/var/lib/sparkfleet/releases/spark-a.json", json.dumps(marker))


@pytest.mark.parametrize("marker", [None, "another launch"])
def test_only_a_committed_release_starts_at_boot(
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers, marker: str | None
) -> None:
    at_boot(node, marker)
    run = Run(node, api, peers)
    assert run.end() == rank.EXIT_REFUSED
    assert "not the committed release" in run.status()["message"]
    assert (marker or "no release in") in run.status()["message"]
    assert docker.containers == {}
    by_hand = Run(node, api, peers)
    by_hand.running()
    by_hand.rank.stop.set()
    by_hand.end()


@pytest.mark.parametrize(
    ("state", "starts"),
    [
        ({"alive": True, "phase": "running", "partners": {}}, True),
        ({"alive": True, "phase": "running", "partners": {"0": "an earlier run"}}, False),
        ({"alive": False, "phase": "none", "up_s": 20.0}, True),
        ({"alive": False, "phase": "none", "up_s": 90000.0}, False),
        ({"alive": False, "phase": "failed", "message": "rank 0 is gone", "up_s": 90000.0}, False),
        ({"alive": False, "phase": "failed", "message": "no memory", "up_s": 20.0}, False),
    ],
)
def test_nobody_starts_half_a_replica_at_boot(  # noqa: PLR0917
    node: TreeHost, api: DockerApi, docker: FakeDocker, peers: Peers, state: dict[str, Any], starts: bool
) -> None:
    """A node that restarts alone finds its peer's rank ended, or bound to the run that is gone."""
    at_boot(node, launch_of(0)["hash"])
    launch = {**launch_of(0), "waves": {"start": [[0], [1]], "stop": [[0], [1]]}}
    peers.state.update(state)
    run = Run(node, api, peers, launch)
    if starts:
        run.running()
        run.rank.stop.set()
    assert run.end() == (0 if starts else rank.EXIT_REFUSED)
    if not starts:
        assert "rank 1 on spark-2 does not start with this node" in run.status()["message"]
        assert docker.containers == {}


def test_waiting_has_an_end() -> None:
    now = [0.0]

    def never() -> None:
        raise Refusal("not yet")

    with pytest.raises(Refusal, match="not yet"):
        common.until(never, 5, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    assert 5 <= now[0] < 7


def test_a_start_at_boot_waits_longer_than_one_that_somebody_waits_for(
    node: TreeHost, api: DockerApi, peers: Peers
) -> None:
    node.write("/proc/uptime", "42.0 1.0\n")
    by_hand = rank.Rank(node, api, launch_of(0))
    assert by_hand.wait_s() == rank.WAIT_S, "however young the node is"
    at_boot(node, launch_of(0)["hash"])
    run = Run(node, api, peers)
    run.running()
    run.rank.stop.set()
    run.end()
    assert rank.Rank.wait_s(run.rank) == rank.BOOT_WAIT_S
    assert os.getpid() == by_hand.status.values["pid"]


def test_the_age_of_a_boot_is_of_its_services(node: TreeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1e6)  # this machine may have just booted
    node.write("/proc/uptime", "42.0 1.0\n")
    assert common.since_boot(node) == 42
    node.userspace = str(int((time.monotonic() - 5000) * 1e6))
    assert common.since_boot(node) == 5000, "what systemd says goes before the kernel's clock"
