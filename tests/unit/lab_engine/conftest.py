"""One generated model for all tests of the lab engine, its rank files, and pairs of ranks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.checkpoint import repos
from lab.checkpoint.config import load_config
from lab.checkpoint.inventory import first_pack_bits
from tests.unit.lab_engine.harness import CONTEXT, Inputs, Pair, environment, tool

CONFIG = Path(__file__).resolve().parents[2] / "fixtures/lab_engine/deepseek-v41-flash.config.json"
PairFactory = Callable[..., Pair]


@pytest.fixture(scope="session")
def hub_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three repositories, as the Hub stand-in serves them."""
    root = tmp_path_factory.mktemp("hub")
    repos.generate(root, seed=1017, context=8192)
    return root


def newest(root: Path, name: str) -> Path:
    return root / name / (root / name / "refs/main").read_text().strip()


@pytest.fixture(scope="session")
def inputs(hub_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Rank files of world 2 and the token map, made by the engine's own programs."""
    model = newest(hub_root, repos.CHECKPOINT)
    work = tmp_path_factory.mktemp("inputs")
    folders = [work / f"rank{rank}" for rank in (0, 1)]
    for rank, folder in enumerate(folders):
        result = tool("tf-dsv41-rank-cache", model, folder, rank, 2)
        assert result.returncode == 0, result.stderr
    token_map = work / "dsv41_token_map.json"
    import subprocess

    script = CONTEXT / "tools/make_token_map.py"
    subprocess.run([sys.executable, str(script), str(model), str(token_map)], env=environment(), check=True)
    return Inputs(
        model, newest(hub_root, repos.ORIGINAL), newest(hub_root, repos.KIT) / "kit", folders, token_map
    )


@pytest.fixture
def copied(inputs: Inputs, tmp_path: Path) -> Inputs:
    """The inputs as private copies, for tests that damage them."""

    def copy(path: Path, name: str) -> Path:
        target = tmp_path / name
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copy(path, target)
        return target

    return Inputs(
        copy(inputs.model, "model"),
        copy(inputs.engram, "engram"),
        copy(inputs.kit, "kit"),
        [copy(folder, f"rank-file-{rank}") for rank, folder in enumerate(inputs.rank_files)],
        copy(inputs.token_map, "map.json"),
    )


@pytest.fixture
def make_pair(inputs: Inputs, tmp_path: Path) -> Iterator[PairFactory]:
    """Pairs of ranks by keyword arguments of `Pair`; all are ended with the test."""
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        options.setdefault("inputs", inputs)
        pairs.append(Pair(work=tmp_path / f"pair{len(pairs)}", **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.stop()


@pytest.fixture(scope="session")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The first 2.9 bpw pack at full size, as sparse files with headers only (20 MB on disk)."""
    folder = tmp_path_factory.mktemp("full")
    repos.full_headers(folder, load_config(CONFIG), first_pack_bits)
    yield folder
    shutil.rmtree(folder)
