"""One word for a rank, one for a replica, and what a run has to do."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_state import (
    EXIT_CODES,
    decide,
    owned,
    rank_verdict,
    replica_verdict,
    serving_verdict,
)


def view(container: str, unit: str = "active", launch: str | None = "L", **more: Any) -> dict[str, Any]:
    return {
        "launch": launch,
        "unit": {"active": unit},
        "agent": {},
        "container": {"state": container, "launch": "L", "started_at": "t1"},
        **more,
    }


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (view("running"), "running"),
        (view("running", "activating"), "starting"),
        (view("absent", "activating"), "starting"),
        (view("running", "inactive"), "stale"),
        (view("running", launch="other"), "stale"),
        (view("running", agent={"container_started": "t0"}), "stale"),
        (view("stopped", "inactive"), "stopped"),
        (view("absent", "failed"), "failed"),
        (view("absent", "inactive"), "stopped"),
        (view("absent", "deactivating"), "stopping"),
        (view("foreign", "inactive"), "foreign"),
        (view("unknown"), "unknown"),
        (view("absent", "inactive", None), "absent"),
        (view("foreign", "inactive", None), "foreign"),
    ],
)
def test_a_rank_in_one_word(seen: dict[str, Any], word: str) -> None:
    assert rank_verdict(seen) == word


@pytest.mark.field("B76")
@pytest.mark.parametrize(
    ("words", "whole"),
    [
        (["running", "running"], "running"),
        (["running", "stopped"], "half"),
        (["stopped", "running"], "half"),
        (["running", "failed"], "half"),
        (["running", "stale"], "half"),
        (["running", "absent"], "half"),
        (["running", "starting"], "starting"),
        (["stopped", "stopped"], "stopped"),
        (["failed", "stopped"], "failed"),
        (["absent", "absent"], "absent"),
        (["running", "unknown"], "unknown"),
        (["foreign", "running"], "foreign"),
        ([], "absent"),
    ],
)
def test_a_replica_is_a_function_of_all_its_ranks(words: list[str], whole: str) -> None:
    assert replica_verdict(words) == whole
    assert (EXIT_CODES[whole] == 0) == (whole == "running")


@pytest.mark.field("B80")
def test_running_ranks_are_not_yet_a_serving_replica() -> None:
    both = [{"verdict": "running", "rank": 0}, {"verdict": "running", "rank": 1}]
    assert serving_verdict(both) == "running"
    assert serving_verdict([{**both[0], "serving": "stalled"}, both[1]]) == "stalled"
    assert serving_verdict([{**both[0], "serving": "serving"}, both[1]]) == "serving"
    assert serving_verdict([{**both[0], "serving": "serving"}, {"verdict": "failed", "rank": 1}]) == "half"
    assert EXIT_CODES["stalled"] not in (0, EXIT_CODES["half"])


def test_a_name_does_not_make_a_container_ours() -> None:
    assert owned({"sparkfleet.install": "i", "sparkfleet.replica": "a"}, "a", "i")
    assert not owned({"sparkfleet.install": "i", "sparkfleet.replica": "b"}, "a", "i")
    assert not owned({"sparkfleet.replica": "a"}, "a", "i")
    assert not owned({"sparkfleet.install": "", "sparkfleet.replica": "a"}, "a", "")
    assert not owned(None, "a", "i")


def planned(name: str, **more: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "verdict": "running",
        "launch_wanted": "L",
        "launch_now": "L",
        "contract": "C",
        "changes": [],
        "agent_present": True,
        "key": "K",
        "secrets": [],
        "container_name": "n",
    }
    row.update(more)
    return row


def test_nothing_to_do() -> None:
    found = decide([planned("a"), planned("b")])
    assert not found["restart"] and not found["write"] and not found["key"] and not found["problems"]


@pytest.mark.parametrize(
    ("row", "restart", "write"),
    [
        ({"launch_wanted": "M"}, True, True),
        ({"verdict": "stopped", "launch_now": None}, True, True),
        ({"verdict": "stale"}, True, True),
        ({"changes": ["/etc/systemd/system/x"]}, False, True),
        ({"agent_present": False}, False, True),
        ({"key": ""}, False, True),
        ({"key": "", "secrets": ["api_key"]}, True, True),
    ],
)
def test_one_rank_decides_for_the_whole_replica(row: dict[str, Any], restart: bool, write: bool) -> None:
    found = decide([planned("a"), planned("b", **row)])
    assert found["restart"] == restart and found["write"] == write


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"verdict": "unknown", "error": "permission denied"}, "permission denied"),
        ({"verdict": "foreign"}, "foreign container has the name n"),
        ({"contract": "D"}, "different contracts (a C, b D)"),
    ],
)
def test_what_must_not_be_started_is_a_problem(row: dict[str, Any], words: str) -> None:
    assert words in "; ".join(decide([planned("a"), planned("b", **row)])["problems"])
