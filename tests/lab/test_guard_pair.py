"""The guard beside a replica that serves: what it ends, the agents end in order, and `start` brings it back.

Needs a lab that serves (``site.yml`` ran); brings it up itself otherwise. Short times by
``tests/proof/guard.yml``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lab.testing import Node, eventually, lab, nodes
from tests.proof.prove import play

pytestmark = pytest.mark.lab

REPLICA, NAME, GUARD = "lab", "dsv41-1017-exl3-tf", "sparkfleet-guard.service"
UNIT = f"sparkfleet-rank@{REPLICA}.service"
HEAD, WORKER = "spark-1", "spark-2"
# The replica has a key, so that its health page hides what the guard judges a stall by.
KEY = "a-key-for-the-lab-only"
SITE = ["-e", f"ranks_api_key={KEY}"]
QUESTION = json.dumps(
    {
        "model": "DeepSeek-V4.1-Flash-1017",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 4000,
        "ignore_eos": True,
    }
)


def inventory() -> str:
    return str(lab().directory / "inventory")


def serves(node: Node) -> bool:
    return NAME in node.run("docker", "ps", "--format", "{{.Names}}").text


def ended(node: Node) -> bool:
    return node.run("systemctl", "is-active", UNIT).text.strip() in ("failed", "inactive") and not serves(
        node
    )


def guard(node: Node) -> dict[str, object]:
    found = node.run("cat", f"/run/sparkfleet/{REPLICA}/guard.json")
    return dict(json.loads(found.text)) if found.status == 0 else {}


def message(node: Node) -> str:
    return str(json.loads(node.read(f"/run/sparkfleet/{REPLICA}/rank.json"))["message"])


@pytest.fixture(scope="module")
def guarded() -> dict[str, Node]:
    pair = {node.name: node for node in nodes()}
    done = play("site.yml", inventory(), extra=SITE)
    assert done.rc == 0, done.output[-4000:]
    guard_with()
    return pair


def guard_with(**settings: float) -> None:
    """The guard with short times."""
    extra = [word for name, value in settings.items() for word in ("-e", f"guard_{name}={value}")]
    done = play("tests/proof/guard.yml", inventory(), extra=["-e", "guard_stall_s=10", *extra])
    assert done.rc == 0, done.output[-4000:]


def container(node: Node) -> tuple[str, str]:
    """Id and start of the rank's container."""
    identity, started = node.text("docker", "inspect", "-f", "{{.Id}} {{.State.StartedAt}}", NAME).split()
    return identity, started


def said(node: Node, since: str) -> str:
    return node.text("journalctl", "-u", GUARD, "--no-pager", "-o", "cat", f"--since=@{since}")


@pytest.fixture
def pair(guarded: dict[str, Node]) -> Iterator[dict[str, Node]]:
    if not all(serves(node) for node in guarded.values()):
        done = play("playbooks/start.yml", inventory())
        assert done.rc == 0, done.output[-4000:]
    for node in guarded.values():
        eventually(lambda node=node: guard(node).get("state") == "watching", f"the guard of {node.name}", 40)  # type: ignore[misc]
    yield guarded
    done = play("playbooks/start.yml", inventory())
    assert done.rc == 0, done.output[-4000:]


@pytest.mark.field("B35", "B45")
@pytest.mark.parametrize(("sinking", "other"), [(HEAD, WORKER), (WORKER, HEAD)])
def test_sinking_memory_ends_the_replica_with_one_line_that_says_why(
    pair: dict[str, Node], sinking: str, other: str
) -> None:
    with pair[sinking].fault("sink-memory", "3"):
        eventually(lambda: ended(pair[sinking]) and ended(pair[other]), "both ranks to end", 60)
    assert "redline" in message(pair[sinking]) and "guard of this node" in message(pair[sinking])
    # A head that ends in order sends its worker home, which then ends with 0; its guard learns why from the
    # other.
    words = ("redline on", "is gone", "exit code 0")
    assert any(word in message(pair[other]) for word in words)
    eventually(lambda: "redline on" in str(guard(pair[other]).get("reason")), f"the reason on {other}", 20)
    assert pair[sinking].text("ls", "/var/lib/sparkfleet/logs")
    assert "redline" in pair[sinking].text("ls", "/var/lib/sparkfleet/guard")


def test_a_hung_rank_is_a_stall_and_ends_the_replica(pair: dict[str, Node]) -> None:
    head, worker = pair[HEAD], pair[WORKER]
    since = head.text("date", "+%s")
    assert json.loads(head.text("curl", "-s", "http://127.0.0.1:8888/health")) == {"ok": True}
    assert guard(head)["unjudged"] == "", "the metrics page shows what the key hides"
    worker.text("docker", "pause", NAME)
    url = "http://127.0.0.1:8888/v1/chat/completions"
    headers = ["-H", "content-type: application/json", "-H", f"authorization: Bearer {KEY}"]
    ask = ["curl", "-s", "-m", "120", *headers, "-d", QUESTION, url]
    head.run("systemd-run", "--unit=asks", "--collect", *ask)
    eventually(lambda: ended(head) and ended(worker), "both ranks to end", 120)
    assert "stall" in message(head) and "no counter has moved" in message(head)
    assert said(head, since).count("stopping rank 0: 1 requests run and no counter has moved") == 1
    assert "stopping rank" not in said(worker, since), "the worker was told by the head"
    for node in (head, worker):
        kept = "/run/sparkfleet /var/lib/sparkfleet/guard /etc/sparkfleet/guard.json"
        found = node.run(
            "sh", "-c", f"journalctl -b -u {GUARD} | cat - $(find {kept} -type f) | grep -c '{KEY}'"
        )
        assert found.text.strip() == "0", "the key is nowhere that the guard writes"


@pytest.mark.parametrize("victim", [HEAD, WORKER])
def test_a_killed_rank_is_no_trip_of_the_guard(pair: dict[str, Node], victim: str) -> None:
    before = {name: guard(node)["trips"] for name, node in pair.items()}
    pair[victim].text("docker", "kill", NAME)
    eventually(lambda: all(ended(node) for node in pair.values()), "both ranks to end", 90)
    assert guard(pair[victim])["trips"] == before[victim]
    assert "exit code 137" in message(pair[victim])


@pytest.mark.field("B43")
def test_restarts_are_opt_in_ordered_and_end_at_their_limit(pair: dict[str, Node]) -> None:
    head, worker = pair[HEAD], pair[WORKER]
    guard_with(restarts=1, restart_backoff_s=4)
    try:
        for node in (head, worker):
            eventually(lambda node=node: guard(node).get("state") == "watching", "the new guards", 40)  # type: ignore[misc]
        since, before = head.text("date", "+%s"), {name: container(node) for name, node in pair.items()}
        with worker.fault("sink-memory", "3"):
            eventually(lambda: ended(head) and ended(worker), "both ranks to end", 60)
            eventually(
                lambda: "memory has not come back" in str(guard(worker).get("restart")), "the wait", 30
            )
            assert not serves(worker), "no start into memory that is not there"
        eventually(
            lambda: all(
                serves(node) and container(node) != before[name] and guard(node)["state"] == "watching"
                for name, node in pair.items()
            ),
            "the replica to be back",
            120,
        )
        assert container(worker)[1] < container(head)[1], "the worker first, as the profile has it"
        for node in (head, worker):
            lines = said(node, since)
            assert lines.count("restart 1 of 1 after:") == 1 and "not started again: waiting" in lines
            assert len(guard(node)["restarts"]) == 1  # type: ignore[arg-type]
        assert play("playbooks/verify.yml", inventory(), extra=SITE).rc == 0

        with worker.fault("sink-memory", "3"):
            eventually(lambda: ended(head) and ended(worker), "both ranks to end", 60)
        for node in (head, worker):
            eventually(lambda node=node: "are the limit" in str(guard(node).get("restart")), "the limit", 30)  # type: ignore[misc]
        assert ended(head) and ended(worker)
        assert said(worker, since).count("not started again: 1 restarts in 24 h are the limit") == 1
    finally:
        guard_with()


@pytest.mark.field("B44")
def test_the_desktop_off_and_on_leaves_a_serving_replica_alone(pair: dict[str, Node]) -> None:
    """No target wants a rank's unit, and `systemctl isolate` stops what no target wants."""
    before = {name: container(node) for name, node in pair.items()}
    pids = {name: node.text("systemctl", "show", "-p", "MainPID", UNIT) for name, node in pair.items()}
    for wanted, state in (("desktop", "active"), ("headless", "inactive")):
        extra = ["-e", f"headless_state={wanted}", "-e", "headless_now=true"]
        done = play("tests/proof/desktop.yml", inventory(), extra=extra)
        assert done.rc == 0, done.output[-3000:]
        for node in pair.values():
            assert node.run("systemctl", "is-active", "graphical.target").text.strip() == state
    assert {name: container(node) for name, node in pair.items()} == before
    assert {
        name: node.text("systemctl", "show", "-p", "MainPID", UNIT) for name, node in pair.items()
    } == pids
    assert all(guard(node)["state"] == "watching" for node in pair.values())
