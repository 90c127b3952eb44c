"""Planner and lab engine know the rank file's index from the same facts, by two codes: they must print one
text.

Two readers of one format that agree prove more than one. The lab's tool imports nothing from the collection.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.split import compare_index, plan_split

from tests.unit.plan.conftest import ROOT
from tests.unit.plan.small import Small, config, inventories, small_lock
from tools.plan_fullsize import write_sparse

TOOL = ROOT / "lab" / "engine" / "context" / "bin" / "tf-dsv41-rank-cache"
CHECKPOINTS = {
    "four layers": Small(),
    "two drafts, wide, odd blocks": Small(width=2304, heads=8, groups=8, drafts=2, vocab=1280, experts=5),
    "other sources": Small(
        ratios=(0, 2, 2, 1, 1), kv=(1, 2, 3), index=(1, 2, 3, 4), engram=(0, 2), hidden=512
    ),
}


def engine_index(folder: Path, rank: int, world: int, *flags: str) -> str:
    command = [
        sys.executable,
        str(TOOL),
        str(folder),
        str(folder / "out"),
        str(rank),
        str(world),
        "--index-only",
        *flags,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LAB_ENGINE_SHAPES": "any"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("numbers", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_text_from_two_codes(tmp_path: Path, numbers: Small, world: int) -> None:
    write_sparse(tmp_path, inventories(numbers), json.dumps(config(numbers)).encode())
    lock = small_lock(numbers)
    for flags, options in (([], {}), (["--no-dspark"], {"drafts": False}), (["--parity"], {"parity": True})):
        if "parity" in options and (world != 4 or numbers.width < 512):
            continue
        try:
            split = plan_split(lock, "tensorfold_native", world, **options)
        except ValueError as error:
            assert world == 4, error
            continue
        rank = world - 1
        compare_index(split.ranks[rank], engine_index(tmp_path, rank, world, *flags))
        assert split.ranks[rank].index_text == engine_index(tmp_path, rank, world, *flags)
