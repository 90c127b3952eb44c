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
    if not all(serves(node) for node in pair.values()):
        done = play("site.yml", inventory())
        assert done.rc == 0, done.output[-4000:]
    done = play("tests/proof/guard.yml", inventory(), extra=["-e", "guard_stall_s=10"])
    assert done.rc == 0, done.output[-4000:]
    return pair


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
    worker.text("docker", "pause", NAME)
    url = "http://127.0.0.1:8888/v1/chat/completions"
    ask = ["curl", "-s", "-m", "120", "-H", "content-type: application/json", "-d", QUESTION, url]
    head.run("systemd-run", "--unit=asks", "--collect", *ask)
    eventually(lambda: ended(head) and ended(worker), "both ranks to end", 120)
    assert "stall" in message(head) and "no counter has moved" in message(head)


@pytest.mark.parametrize("victim", [HEAD, WORKER])
def test_a_killed_rank_is_no_trip_of_the_guard(pair: dict[str, Node], victim: str) -> None:
    before = {name: guard(node)["trips"] for name, node in pair.items()}
    pair[victim].text("docker", "kill", NAME)
    eventually(lambda: all(ended(node) for node in pair.values()), "both ranks to end", 90)
    assert guard(pair[victim])["trips"] == before[victim]
    assert "exit code 137" in message(pair[victim])
