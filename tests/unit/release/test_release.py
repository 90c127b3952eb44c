"""The release marker: stable while nothing changes, and never without an identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import release
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal

from tests.unit.fake_host import FakeHost

ONE = {"image_content": "i1", "model_lock": "m1", "rank_file": "rank0of2-aa.bin", "launch_hash": "l1"}
TWO = {**ONE, "launch_hash": "l2"}


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def commit(host: FakeHost, what: dict[str, str] | None, now: str, check: bool = False) -> dict:  # type: ignore[type-arg]
    return release.ensure(host, release.DIRECTORY, "pair-1", what, now=now, check=check)


def test_committing_what_is_current_changes_nothing(host: FakeHost) -> None:
    first = commit(host, ONE, "2026-01-01T00:00:00Z")
    text = host.read(first["path"])
    again = commit(host, ONE, "2026-02-02T00:00:00Z")
    assert first["changed"] and not again["changed"] and again["diff"] == []
    assert host.read(first["path"]) == text
    assert again["current"]["committed_at"] == "2026-01-01T00:00:00Z"


def test_previous_is_kept_and_going_back_swaps(host: FakeHost) -> None:
    commit(host, ONE, "t1")
    second = commit(host, TWO, "t2")
    assert second["previous"]["launch_hash"] == "l1" and second["current"]["launch_hash"] == "l2"
    back = commit(host, {k: v for k, v in second["previous"].items() if k != "committed_at"}, "t3")
    assert back["current"]["launch_hash"] == "l1" and back["previous"]["launch_hash"] == "l2"


def test_check_mode_writes_nothing(host: FakeHost) -> None:
    predicted = commit(host, ONE, "t1", check=True)
    assert predicted["changed"] and predicted["diff"] and not host.exists(predicted["path"])


def test_a_release_without_identity_is_refused(host: FakeHost) -> None:
    with pytest.raises(Refusal, match="without identity"):
        commit(host, {**ONE, "image_content": ""}, "t1")


@pytest.mark.parametrize("name", ["../../etc/passwd", "", ".hidden", "a/b", "x" * 65])
def test_a_name_cannot_leave_the_directory(name: str) -> None:
    with pytest.raises(Refusal):
        release.marker_path(release.DIRECTORY, name)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"schema": 9, "current": {}})])
def test_a_damaged_marker_is_refused(host: FakeHost, text: str) -> None:
    host.write(release.marker_path(release.DIRECTORY, "pair-1"), text)
    with pytest.raises(Refusal):
        commit(host, ONE, "t1")


def test_absent(host: FakeHost) -> None:
    commit(host, ONE, "t1")
    assert commit(host, None, "t2")["changed"]
    assert not commit(host, None, "t3")["changed"]


def test_paths_are_kept_without_being_identity(host: FakeHost) -> None:
    path = release.marker_path(release.DIRECTORY, "pair-1")
    commit(host, ONE, "t1")
    learned = release.ensure(
        host, release.DIRECTORY, "pair-1", {**ONE, "paths": ["/d/b", "/d/a", "/d/b"]}, now="t2", check=False
    )
    assert learned["changed"] and learned["previous"] is None
    assert learned["current"]["paths"] == ["/d/a", "/d/b"]
    assert learned["current"]["committed_at"] == "t1"
    text = host.read(path)
    again = release.ensure(
        host, release.DIRECTORY, "pair-1", {**ONE, "paths": ["/d/b", "/d/a"]}, now="t3", check=False
    )
    assert not again["changed"] and host.read(path) == text
    second = release.ensure(
        host, release.DIRECTORY, "pair-1", {**TWO, "paths": ["/d/c"]}, now="t4", check=False
    )
    assert (second["current"]["paths"], second["previous"]["paths"]) == (["/d/c"], ["/d/a", "/d/b"])
