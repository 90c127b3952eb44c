from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.sparkfleet.serving.plugins.filter import preflight as preflight_filter
from ansible_collections.sparkfleet.serving.plugins.module_utils import disk_budget, disk_needs, preflight
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe import storage
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.reader import Reader
from ansible_collections.sparkfleet.serving.plugins.module_utils.rails import Refusal

GB = 10**9
DATA = "/var/lib/sparkfleet"
MODEL, ENGRAM = "o/exl3@" + "a" * 40, "o/orig@" + "b" * 40
MODEL_DIR = f"{DATA}/models/o--exl3/{'a' * 40}"
ENGRAM_DIR = f"{DATA}/engram/o--orig/{'b' * 40}"
RANK_DIR = f"{DATA}/rank-files/{'a' * 40}/{'c' * 20}"
MEMBERS = [{"name": f"spark-{rank + 1}", "rank": rank} for rank in (0, 1)]


def plan() -> dict[str, Any]:
    def row(rank: int) -> dict[str, Any]:
        items = disk_budget.components(
            rank=rank,
            world=2,
            checkpoint_bytes=210 * GB,
            engram_bytes=203 * GB,
            rank_file_bytes=[106 * GB] * 2,
            builds_all=True,
        )
        return disk_budget.judge_disk(items, None, rank=rank)

    ranks = [{"rank": rank, "index_sha256": "c" * 64} for rank in (0, 1)]
    return {"disk": [row(0), row(1)], "ranks": ranks}


def needs() -> list[dict[str, Any]]:
    return preflight_filter.disk_needs(plan(), MEMBERS, DATA, model=MODEL, engram=ENGRAM)


def probe(available: int, held: dict[str, int] | None = None, image: int = 0) -> dict[str, Any]:
    names = {DATA, f"{DATA}/rank-files", "/var/lib/docker", MODEL_DIR, ENGRAM_DIR, RANK_DIR}
    paths = {
        name: {"mountpoint": "/", "available_bytes": available, "held_bytes": (held or {}).get(name)}
        for name in names
    }
    return {"disk": {"paths": paths}, "docker": {"known": True, "image_bytes": image}}


def judged(first: dict[str, Any], second: dict[str, Any] | None = None) -> list[Refusal]:
    options = preflight.Options(disk_needs=tuple(needs()))
    seen = {"spark-1": first, "spark-2": second or probe(10**13)}
    return preflight.disk_refusals(MEMBERS, seen, options)


def test_paths_and_bytes_of_a_pair() -> None:
    head = {row["what"]: (row["path"], row["bytes"]) for row in needs() if row["node"] == "spark-1"}
    assert head["checkpoint"] == (MODEL_DIR, 210 * GB)
    assert head["engram tables"] == (ENGRAM_DIR, 203 * GB)
    assert head["rank file"] == (RANK_DIR, 106 * GB)
    assert head["rank files of the others, for a while"] == (f"{DATA}/rank-files", 106 * GB)
    assert head["image"] == ("/var/lib/docker", disk_budget.IMAGE_BYTES)
    worker = {row["what"] for row in needs() if row["node"] == "spark-2"}
    assert "checkpoint" not in worker and "engram tables" in worker
    loose = preflight_filter.disk_needs(plan(), MEMBERS, DATA)
    assert {row["path"] for row in loose if row["what"] == "rank file"} == {f"{DATA}/rank-files"}


@pytest.mark.field("B67")
def test_a_bare_head_needs_all_of_it_and_the_worker_less() -> None:
    total = sum(row["bytes"] for row in needs() if row["node"] == "spark-1")
    assert [row.check for row in judged(probe(total))] == ["disk-rollback"]
    rows = judged(probe(total - 1))
    assert [(row.check, row.node, row.warnable) for row in rows] == [("disk", "spark-1", True)]
    assert "checkpoint 195.6 GiB" in rows[0].wanted
    worker = judged(probe(10**13), probe(total - 300 * GB))
    assert [(row.check, row.node, row.level) for row in worker] == [("disk-rollback", "spark-2", "warn")]


@pytest.mark.field("B67")
def test_what_lies_there_is_not_asked_for_again() -> None:
    whole = {MODEL_DIR: 210 * GB, ENGRAM_DIR: 203 * GB, RANK_DIR: 106 * GB}
    # All is there: a nearly full disk is no reason to refuse a second run.
    assert judged(probe(GB, whole, image=24 * GB)) == []
    assert "for a while" in judged(probe(GB, {**whole, RANK_DIR: 0}, image=24 * GB))[0].wanted
    begun = {**whole, MODEL_DIR: 100 * GB}
    assert "checkpoint 102.4 GiB" in judged(probe(107 * GB, begun, image=24 * GB))[0].wanted
    assert "image 23.2 GiB" in judged(probe(23 * GB, whole))[0].wanted


def test_more_than_planned_does_not_pay_for_something_else() -> None:
    assert judged(probe(150 * GB, {MODEL_DIR: 900 * GB, ENGRAM_DIR: 203 * GB}, image=1)) != []


def test_refusals_of_bad_input() -> None:
    with pytest.raises(AnsibleFilterError, match="no disk row for rank 2"):
        preflight_filter.disk_needs(plan(), [{"name": "x", "rank": 2}], DATA)
    with pytest.raises(AnsibleFilterError, match="absolute"):
        preflight_filter.disk_needs(plan(), MEMBERS, "data")
    bad = plan()
    bad["disk"][0]["components"][0]["location"] = "moon"
    with pytest.raises(disk_needs.NeedsError, match="moon"):
        disk_needs.disk_needs(bad, MEMBERS, DATA)


def test_the_report_is_softened_by_the_variable() -> None:
    seen = {"spark-1": {"probe": probe(GB)}, "spark-2": {}}
    options = {"disk_needs": needs()}
    assert preflight_filter.disk_report(MEMBERS, seen, options)["failed"] is True
    report = preflight_filter.disk_report(MEMBERS, seen, {**options, "warn": ["disk"]})
    assert (report["failed"], len(report["rows"])) == (False, 1)


def test_bytes_below_a_path_are_counted_only_where_asked(tmp_path: Path) -> None:
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/sub/a").write_bytes(b"x" * 10000)
    (tmp_path / "d/link").symlink_to("/")
    with (tmp_path / "d/hole").open("wb") as stream:
        stream.truncate(10**9)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n")
    reader = Reader(root=str(tmp_path))
    counted = storage.held_bytes(reader, "/d")
    assert counted is not None and 10000 <= counted < 100000
    assert storage.held_bytes(reader, "/absent") == 0
    paths = storage.read(reader, ["/d", "/absent", "/"], ["/d", "/absent"])["paths"]
    assert (paths["/d"]["held_bytes"], paths["/absent"]["held_bytes"], paths["/"]["held_bytes"]) == (
        counted,
        0,
        None,
    )


def test_too_much_to_count_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_ENTRIES", 3)
    for number in range(5):
        (tmp_path / str(number)).touch()
    assert storage.held_bytes(Reader(root=str(tmp_path)), "/") is None


@pytest.mark.parametrize(
    ("available", "held", "told"),
    [
        (10**13, {}, ""),
        (1000 * GB, {}, "disk-rollback"),
        (500 * GB, {}, "disk"),
        # An upgrade: the tables lie there, and so does the release that stays to go back to.
        (800 * GB, {ENGRAM_DIR: 203 * GB}, ""),
    ],
)
def test_a_node_that_cannot_keep_a_second_release_is_told_at_first(
    available: int, held: dict[str, int], told: str
) -> None:
    rows = [row for row in judged(probe(available, held)) if row.node == "spark-1"]
    assert [row.check for row in rows] == ([told] if told else [])
    assert all(row.level == ("warn" if told == "disk-rollback" else "fail") for row in rows)
