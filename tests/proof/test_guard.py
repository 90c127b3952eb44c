"""The guard on the lab: real Docker, real processes, the real peer service over the rails; a small program is
the rank.

Order, counts and end states are asserted; times are rows of the bench.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from lab import fault
from lab.config import NODES, instance
from tests.proof.prove import play
from tests.proof.test_host import inventory, on, wait_for

pytestmark = pytest.mark.lab

REPLICA, NAME, IMAGE = "guarded", "guarded-rank", "hub.lab:5000/lab/base:1"
NETDEVS = ("enp1s0f0np0", "enP2p1s0f0np0")
ADDRESSES = {"spark-1": ("10.77.0.1", "10.77.0.5"), "spark-2": ("10.77.0.2", "10.77.0.6")}
GUARD = "sparkfleet-guard.service"
OBEYS = "import signal,sys,time; signal.signal(15, lambda *_: sys.exit(0)); time.sleep(9999)"
IGNORES = "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(9999)"


def launch(node: str) -> dict[str, Any]:
    """As much of a launch file as the guard and the peer service read."""
    rank = NODES.index(node)
    other = NODES[1 - rank]
    return {
        "schema": 1,
        "replica": REPLICA,
        "rank": rank,
        "node": node,
        "hash": "h" * 16,
        "install_id": "guard-test",
        "container": {"name": NAME},
        "contract": {"digest": "c"},
        "rails": [
            {"address": f"{address}/30", "netdev": netdev, "rdma": ""}
            for address, netdev in zip(ADDRESSES[node], NETDEVS, strict=True)
        ],
        "peers": [{"name": other, "rank": 1 - rank, "addresses": list(ADDRESSES[other])}],
        "peer_port": 29750,
        "ports": {"api": None},
        "health": {},
    }


def put(node: str, path: str, text: str, mode: str = "644") -> None:
    folder = path.rpartition("/")[0]
    command = f"mkdir -p {folder}; printf %s {shlex.quote(text)} > {path}; chmod {mode} {path}"
    on(node, "sh", "-c", command)


def start(node: str, program: str = OBEYS) -> None:
    on(node, "docker", "rm", "-f", NAME, ok=False)
    labels = {"sparkfleet.install": "guard-test", "sparkfleet.replica": REPLICA, "sparkfleet.rank": "0"}
    options = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
    on(node, "docker", "run", "-d", "--name", NAME, *options, IMAGE, "python3", "-c", program)


def running(node: str) -> bool:
    return on(node, "docker", "inspect", "-f", "{{.State.Running}}", NAME, ok=False) == "true"


def state(node: str) -> dict[str, Any]:
    text = on(node, "cat", f"/run/sparkfleet/{REPLICA}/guard.json", ok=False)
    return dict(json.loads(text)) if text else {}


def said(node: str, since: str) -> str:
    return on(node, "journalctl", "-u", GUARD, "--no-pager", "-o", "cat", f"--since=@{since}")


def now(node: str) -> str:
    return on(node, "date", "+%s")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    run = play("tests/proof/guard.yml", inventory())
    assert run.rc == 0, run.output[-3000:]
    for node in NODES:
        for address, netdev in zip(ADDRESSES[node], NETDEVS, strict=True):
            on(node, "ip", "link", "set", netdev, "up")
            on(node, "ip", "addr", "replace", f"{address}/30", "dev", netdev)
        put(node, f"/etc/sparkfleet/replicas/{REPLICA}/launch.json", json.dumps(launch(node)))
        put(node, f"/etc/sparkfleet/replicas/{REPLICA}/peer.key", "k" * 64, "600")
        agent = on(node, "sh", "-c", "ls -t /usr/local/lib/sparkfleet/*/sparkfleet-node | head -1")
        on(node, "systemd-run", "--unit=guard-test-peer", agent, "peer")
        on(node, "docker", "pull", "-q", IMAGE)
    yield
    for node in NODES:
        on(node, "docker", "rm", "-f", NAME, ok=False)
        on(node, "systemctl", "stop", "guard-test-peer.service", ok=False)
        on(node, "rm", "-rf", f"/etc/sparkfleet/replicas/{REPLICA}", f"/run/sparkfleet/{REPLICA}")


@pytest.fixture
def pair(installed: None) -> Iterator[dict[str, str]]:
    """Both ranks run and both guards have heard the other node; the value is when that was, by node."""
    fault.heal(instance())
    for node in NODES:
        start(node)
    for node in NODES:
        identity = on(node, "docker", "inspect", "-f", "{{.Id}}", NAME)[:12]
        wait_for(
            lambda node=node, identity=identity: (
                state(node).get("generation") == identity  # type: ignore[misc]
                and state(node)["state"] == "watching"
            ),
            40,
            f"the guard of {node} to watch",
        )
    yield {node: now(node) for node in NODES}
    fault.heal(instance())


def both_end(seconds: float = 60) -> None:
    wait_for(lambda: not any(running(node) for node in NODES), seconds, "both ranks to end")


@pytest.mark.field("B35")
@pytest.mark.parametrize(("sinking", "other"), [("spark-1", "spark-2"), ("spark-2", "spark-1")])
def test_sinking_memory_on_either_node_ends_both_ranks(
    pair: dict[str, str], sinking: str, other: str
) -> None:
    fault.switch(instance(), "sink-memory", sinking, value="3")
    both_end()
    lines = said(sinking, pair[sinking])
    assert lines.count("stopping rank") == 1 and "2 samples under the redline of 4 GiB: 3.00, 3.00" in lines
    wait_for(lambda: f"redline on {sinking}" in said(other, pair[other]), 10, f"{other} to say why")
    assert "redline" in on(sinking, "sh", "-c", f"ls /var/lib/sparkfleet/guard | grep {REPLICA} | tail -1")
    assert on(sinking, "docker", "inspect", "-f", "{{.State.ExitCode}}", NAME) == "0", (
        "it was asked, not killed"
    )


def test_a_rank_that_ignores_the_signal_is_killed(pair: dict[str, str]) -> None:
    start("spark-1", IGNORES)
    identity = on("spark-1", "docker", "inspect", "-f", "{{.Id}}", NAME)[:12]
    wait_for(lambda: state("spark-1").get("generation") == identity, 30, "the new rank to be watched")
    begun = now("spark-1")
    fault.switch(instance(), "sink-memory", "spark-1", value="3")
    both_end()
    assert on("spark-1", "docker", "inspect", "-f", "{{.State.ExitCode}}", NAME) == "137"
    lines = said("spark-1", begun)
    assert lines.index("stopping rank") < lines.index("killing rank")


def test_far_below_kills_at_once(pair: dict[str, str]) -> None:
    fault.switch(instance(), "sink-memory", "spark-2", value="1")
    both_end()
    assert on("spark-2", "docker", "inspect", "-f", "{{.State.ExitCode}}", NAME) == "137"


def test_a_restarted_or_stopped_guard_ends_nothing(pair: dict[str, str]) -> None:
    on("spark-1", "systemctl", "restart", GUARD)
    wait_for(lambda: "holding rank" in said("spark-1", pair["spark-1"]), 20, "the new guard to hold the rank")
    on("spark-2", "systemctl", "stop", GUARD)
    try:
        wait_for(
            lambda: "is silent; its node answers" in said("spark-1", pair["spark-1"]),
            40,
            "the silence to be seen",
        )
        assert running("spark-1") and running("spark-2")
    finally:
        on("spark-2", "systemctl", "start", GUARD)


def test_cut_rails_end_both_ranks(pair: dict[str, str]) -> None:
    fault.switch(instance(), "cut-rail")
    both_end()
    for node in NODES:
        assert "has not answered on any rail" in said(node, pair[node])


def test_one_cut_rail_is_not_silence(pair: dict[str, str]) -> None:
    fault.switch(instance(), "cut-rail", value="0")
    before = float(state("spark-1")["at"])
    wait_for(lambda: float(state("spark-1")["at"]) > before + 12, 40, "longer than the silence")
    assert running("spark-1") and running("spark-2")


def test_a_forged_heartbeat_is_silence(pair: dict[str, str]) -> None:
    """A node with another key cannot speak for the peer."""
    key = f"/etc/sparkfleet/replicas/{REPLICA}/peer.key"
    put("spark-2", key, "f" * 64, "600")
    try:
        both_end()
        assert "silence" in said("spark-1", pair["spark-1"]) or "has not answered" in said(
            "spark-1", pair["spark-1"]
        )
        assert state("spark-1")["refused"]
    finally:
        put("spark-2", key, "k" * 64, "600")


def test_memory_that_does_not_come_back_is_said(pair: dict[str, str]) -> None:
    fault.switch(instance(), "sink-memory", "spark-1", value="38")
    on("spark-1", "docker", "kill", NAME)
    wait_for(lambda: state("spark-1").get("state") == "memory held", 40, "memory held")
    assert "memory has not come back" in said("spark-1", pair["spark-1"])
    assert "GiB available" in state("spark-1")["memory"]


def test_a_foreign_container_of_the_name_is_left_alone(pair: dict[str, str]) -> None:
    on("spark-1", "docker", "rm", "-f", NAME)
    on("spark-1", "docker", "run", "-d", "--name", NAME, IMAGE, "python3", "-c", OBEYS)
    fault.switch(instance(), "sink-memory", "spark-1", value="1")
    before = float(state("spark-1")["at"])
    wait_for(lambda: float(state("spark-1")["at"]) > before + 5, 30, "some samples")
    assert running("spark-1")
