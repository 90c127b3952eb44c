"""The guard on the lab: real Docker, real processes, the real peer service over the rails; a small program is
the rank.

Order, counts and end states are asserted; times are rows of the bench.
"""

from __future__ import annotations

import functools
import json
import re
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
GIB = 1 << 30
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


def when(node: str, text: str, since: str) -> float:
    """Time of the first line of the guard's journal with this text (both nodes have one clock)."""
    lines = on(node, "journalctl", "-u", GUARD, "--no-pager", "-o", "short-unix", f"--since=@{since}")
    return next(float(line.split()[0]) for line in lines.splitlines() if text in line)


def record(node: str) -> dict[str, Any]:
    """The newest record of the guard."""
    name = on(node, "sh", "-c", f"ls -t /var/lib/sparkfleet/guard/{REPLICA}-* | head -1")
    return dict(json.loads(on(node, "cat", name)))


def samples(node: str) -> int:
    text = on(node, "cat", "/run/sparkfleet/guard.prom")
    return int(re.search(r"^sparkfleet_guard_samples_total (\d+)", text, re.M).group(1))  # type: ignore[union-attr]


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
    trips = {node: state(node)["trips"] for node in NODES}
    fault.switch(instance(), "sink-memory", sinking, value="3")
    both_end()
    lines = said(sinking, pair[sinking])
    assert lines.count("stopping rank") == 1 and "2 samples under the redline of 4 GiB: 3.00, 3.00" in lines
    wait_for(lambda: f"redline on {sinking}" in said(other, pair[other]), 10, f"{other} to say why")
    assert when(sinking, "stopping rank", pair[sinking]) < when(other, "stopped for its peer", pair[other])
    assert "stopping rank" not in said(other, pair[other]), "its own memory was fine"
    kept = record(sinking)
    low = [value < 4 * GIB for _age, value in kept["samples"]]
    assert low[-2:] == [True, True] and low.count(True) == 2, "at the second low sample, not later"
    assert (kept["cause"], kept["action"], kept["peers"][0]["name"]) == ("redline", "terminate", other)
    fault.heal(instance())
    for node, cause in ((sinking, "redline"), (other, "peer")):
        wait_for(lambda node=node: state(node)["state"] == "tripped", 20, f"{node} to say that it tripped")  # type: ignore[misc]
        assert (state(node)["cause"], state(node)["trips"]) == (cause, trips[node] + 1)
        assert "restarts are off" in state(node)["restart"]
    assert on(sinking, "docker", "inspect", "-f", "{{.State.ExitCode}}", NAME) == "0", (
        "it was asked, not killed"
    )


@pytest.mark.field("B35")
def test_one_sample_below_ends_nothing(pair: dict[str, str]) -> None:
    """Eight seconds between two samples, so that one low reading can be made for one of them alone."""
    slow = ["--limit", "spark-1", "-e", "guard_interval_s=8"]
    assert play("tests/proof/guard.yml", inventory(), extra=slow).rc == 0
    try:
        wait_for(lambda: state("spark-1").get("state") == "watching", 40, "the new guard to hold the rank")
        begun, count = now("spark-1"), samples("spark-1")
        wait_for(lambda: samples("spark-1") > count, 30, "a sample")
        fault.switch(instance(), "sink-memory", "spark-1", value="3")
        wait_for(lambda: state("spark-1")["available"] == 3 * GIB, 30, "a low sample")
        fault.switch(instance(), "sink-memory", "spark-1", on=False)
        count = samples("spark-1")
        wait_for(lambda: samples("spark-1") >= count + 2, 60, "two samples more")
        seen = state("spark-1")
        assert (seen["low"], seen["trips"], seen["state"]) == (3 * GIB, 0, "watching")
        assert seen["available"] > 4 * GIB
        assert running("spark-1") and running("spark-2")
        lines = said("spark-1", begun)
        assert "stopping rank" not in lines and "3.00 GiB available, the redline is 4" in lines
    finally:
        assert play("tests/proof/guard.yml", inventory(), extra=["--limit", "spark-1"]).rc == 0


@pytest.mark.parametrize(("victim", "other"), [("spark-1", "spark-2"), ("spark-2", "spark-1")])
def test_a_rank_that_is_killed_by_others_is_no_trip(pair: dict[str, str], victim: str, other: str) -> None:
    """Ending the other rank then is the agents' work; the guards see an end, and no reason to stop anything."""
    trips = {node: state(node)["trips"] for node in NODES}
    on(victim, "kill", "-9", on(victim, "docker", "inspect", "-f", "{{.State.Pid}}", NAME))
    wait_for(lambda: not state(victim)["running"], 20, "the guard to see the end")
    before = float(state(other)["at"])
    wait_for(lambda: float(state(other)["at"]) > before + 5, 30, "some samples")
    assert running(other) and state(other)["state"] == "watching"
    assert {node: state(node)["trips"] for node in NODES} == trips
    assert "stopping rank" not in said(victim, pair[victim]) + said(other, pair[other])


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
    assert "after it was told to end" in lines, "the reason of the second signal"


def test_far_below_kills_at_once(pair: dict[str, str]) -> None:
    fault.switch(instance(), "sink-memory", "spark-2", value="1")
    both_end()
    assert on("spark-2", "docker", "inspect", "-f", "{{.State.ExitCode}}", NAME) == "137"
    lines = said("spark-2", pair["spark-2"])
    assert "killing rank 1: 2 samples under the redline" in lines and "stopping rank" not in lines


def test_a_restarted_or_stopped_guard_ends_nothing(pair: dict[str, str]) -> None:
    since = [on(node, "docker", "inspect", "-f", "{{.State.StartedAt}}", NAME) for node in NODES]
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
    wait_for(lambda: state("spark-2").get("state") == "watching", 30, "the guard of spark-2 to be back")
    assert [on(node, "docker", "inspect", "-f", "{{.State.StartedAt}}", NAME) for node in NODES] == since
    assert not any("stopping rank" in said(node, pair[node]) for node in NODES)


def test_cut_rails_end_both_ranks(pair: dict[str, str]) -> None:
    fault.switch(instance(), "cut-rail")
    both_end()
    for node, other in (NODES, NODES[::-1]):
        lines = said(node, pair[node])
        assert lines.count("stopping rank") == 1 and f"{other} has not answered on any rail for" in lines
        told = functools.partial(said, node, pair[node])
        wait_for(lambda told=told: "was not told to stop" in told(), 20, "a cut cable to be said")  # type: ignore[misc]
        wait_for(lambda node=node: state(node)["state"] == "tripped", 20, f"{node} to say that it tripped")  # type: ignore[misc]
        assert state(node)["cause"] == "silence"


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
        assert "spark-2 has not answered on any rail" in said("spark-1", pair["spark-1"])
        wait_for(lambda: state("spark-1")["state"] == "tripped", 20, "spark-1 to say that it tripped")
        assert state("spark-1")["cause"] == "silence"
        assert record("spark-1")["cause"] == "silence"
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
