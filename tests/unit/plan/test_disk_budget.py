"""The disk budget: published sums, rollback room, and network storage under Engram tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import disk_budget as db
from ansible_collections.sparkfleet.serving.plugins.module_utils.replica_plan import (
    Request,
    engram_table_bytes,
    make_plan,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.split import text_config

from tests.unit.plan.small import small_lock

#: model.md section 6
CHECKPOINT, ENGRAM, RANK_FILE = 210_679_295_530, 203_080_551_181, 106_120_462_823
REAL: dict[str, Any] = {
    "world": 2, "checkpoint_bytes": CHECKPOINT, "engram_bytes": ENGRAM, "rank_file_bytes": [RANK_FILE] * 2,
}  # fmt: skip


def one(rank: int, **changes: Any) -> int:
    return int(
        db.judge_disk(db.components(rank=rank, **{**REAL, **changes}), None, rank=rank)["one_release_bytes"]
    )


def test_published_sums() -> None:
    assert round(one(0, image_bytes=0, other_bytes=0) / 1e9, 1) == 519.9
    assert round(one(0, other_bytes=0) / 1e9, 1) == 544.8
    assert round(one(1, image_bytes=0, other_bytes=0) / 1e9, 1) == 309.2
    assert round(one(1, other_bytes=0) / 1e9, 1) == 334.1


def test_engram_tables_by_the_config(full_lock: Any) -> None:
    assert engram_table_bytes(text_config(full_lock.config)) == 202_758_032_400
    assert engram_table_bytes({}) == 0


def test_second_release_adds_rank_file_image_and_checkpoint() -> None:
    judged = db.judge_disk(db.components(rank=0, **REAL), None, rank=0)
    extra = judged["two_releases_bytes"] - judged["one_release_bytes"]
    assert extra == CHECKPOINT + RANK_FILE + db.IMAGE_BYTES
    same = db.judge_disk(db.components(rank=0, new_checkpoint=False, **REAL), None, rank=0)
    assert same["two_releases_bytes"] - same["one_release_bytes"] == RANK_FILE + db.IMAGE_BYTES
    assert judged["passing_bytes"] == db.IMAGE_BYTES
    assert judged["keeps_rollback"] is None


def test_head_that_builds_all_rank_files_and_a_staged_image() -> None:
    items = {item.name: item for item in db.components(rank=0, builds_all=True, staged_image=True, **REAL)}
    assert items["rank files of the others"].passing == RANK_FILE
    assert items["staged image archive"].first == db.IMAGE_BYTES
    worker = {item.name for item in db.components(rank=1, builds_all=True, **REAL)}
    assert "rank files of the others" not in worker
    assert "checkpoint" not in worker


def disk(
    available_gb: float, kind: str = "ext4", locations: tuple[str, ...] = db.LOCATIONS, held: int = 0
) -> db.Filesystem:
    return db.Filesystem("/", int(available_gb * 1e9), kind, locations, held)


@pytest.mark.parametrize(
    ("available", "verdict", "rollback"),
    [(500, "does_not_fit", False), (600, "fits_with_warning", False), (1000, "fits", True)],
)
def test_room_for_one_and_for_two(available: float, verdict: str, rollback: bool) -> None:
    judged = db.judge_disk(db.components(rank=0, **REAL), [disk(available)], rank=0)
    assert judged["verdict"] == verdict
    assert judged["keeps_rollback"] is rollback
    if verdict == "fits_with_warning":
        assert "no rollback" in judged["warnings"][0]


def test_what_lies_there_already_counts_as_room() -> None:
    judged = db.judge_disk(
        db.components(rank=0, **REAL), [disk(100, held=CHECKPOINT + ENGRAM + RANK_FILE)], rank=0
    )
    assert judged["verdict"] == "fits_with_warning"


@pytest.mark.field("B67")
def test_each_filesystem_is_judged_by_itself() -> None:
    items = db.components(rank=0, **REAL)
    split = [disk(900, locations=("models", "engram", "rank_files", "data")), disk(40, locations=("docker",))]
    judged = db.judge_disk(items, split, rank=0)
    assert judged["refusals"] == ["/: docker need 49.8 GB, 39.6 GB are free"]
    with pytest.raises(db.DiskError, match="no filesystem is known"):
        db.judge_disk(items, split[:1], rank=0)


@pytest.mark.field("B60")
def test_engram_on_network_storage_is_refused() -> None:
    judged = db.judge_disk(db.components(rank=1, **REAL), [disk(2000, "nfs4")], rank=1)
    assert "must be on local storage" in judged["refusals"][0]


def test_bad_rank_and_bad_paths() -> None:
    for rank in (-1, 2):
        with pytest.raises(db.DiskError):
            db.components(rank=rank, **REAL)
    with pytest.raises(db.DiskError, match="is no location"):
        db.probe_filesystems({"cellar": "/"})
    with pytest.raises(db.DiskError, match="is no location"):
        db.probe_filesystems({"models": "relative"})


def test_probe_finds_the_filesystem_of_a_folder_to_come(tmp_path: Path) -> None:
    found = db.probe_filesystems(
        {"models": str(tmp_path / "a" / "b"), "engram": str(tmp_path)}, {"models": 5}
    )
    assert len(found) == 1
    assert found[0].locations == ("engram", "models")
    assert found[0].held == 5
    assert found[0].available > 0
    assert found[0].kind


def test_the_controller_judges_probed_filesystems() -> None:
    plan, _split = make_plan(small_lock(), Request(context=2048))
    row = {"name": "/data", "available_bytes": 10**12, "type": "xfs", "locations": list(db.LOCATIONS)}
    assert db.disk_for_node(plan, 1, [row])["verdict"] == "fits"
    assert db.disk_for_node(plan, 1, None)["verdict"] == "unknown"
    with pytest.raises(db.DiskError):
        db.disk_for_node(plan, 5, [row])
