"""Our writer of rank files against the lab engine's own tool, which shares no code with it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import rank_file, rank_writer
from ansible_collections.sparkfleet.serving.plugins.module_utils.safetensors import PlanError, read_header

from tests.unit.plan.small import Small, config, inventories
from tools.plan_fullsize import write_sparse

from .conftest import ROOT, run_module

TOOL = ROOT / "lab/engine/context/bin/tf-dsv41-rank-cache"
CHECKPOINTS = {
    "four layers": Small(),
    "wide, odd blocks, two drafts": Small(width=2304, heads=8, groups=8, drafts=2, vocab=1280, experts=5),
}


def tool(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LAB_ENGINE_SHAPES": "any"},
    )


def checkpoint(folder: Path, numbers: Small) -> Path:
    """A small checkpoint whose every byte is random, so that its F16 tensors hold NaNs of both kinds."""
    write_sparse(folder, inventories(numbers), json.dumps(config(numbers)).encode())
    source = random.Random(1017)  # noqa: S311 - repeatable
    for path in sorted(folder.glob("*.safetensors")):
        begin = 8 + read_header(path).length
        with path.open("r+b") as shard:
            shard.seek(begin)
            shard.write(source.randbytes(path.stat().st_size - begin))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: checkpoint(tmp_path_factory.mktemp("model"), one) for name, one in CHECKPOINTS.items()}


def ours(model: Path, out: Path, rank: int, world: int, *flags: str) -> tuple[Path, str]:
    out.mkdir(exist_ok=True)
    layout, sources = rank_writer.plan_rank(model, world, rank, flags)
    digest = rank_writer.write_rank_file(model, out, layout, sources)
    return out / layout.file_name, digest


@pytest.mark.parametrize(
    "case",
    [
        *((name, world, ()) for name in CHECKPOINTS for world in (1, 2)),
        *((name, 2, ("--no-dspark",)) for name in CHECKPOINTS),
        ("wide, odd blocks, two drafts", 4, ()),
        ("wide, odd blocks, two drafts", 4, ("--parity",)),
    ],
)
def test_every_byte_is_the_engines(
    models: dict[str, Path],
    tmp_path: Path,
    case: tuple[str, int, tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, world, flags = case
    # Small blocks, so that every way of reading comes up: many blocks of one tensor, cut rows over several.
    monkeypatch.setattr(rank_writer, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(rank_writer, "FLUSH_EVERY", 100_000)
    model = models[name]
    for rank in range(world):
        theirs = tmp_path / f"theirs-{rank}"
        done = tool(model, theirs, rank, world, *flags)
        assert done.returncode == 0, done.stderr
        (wanted,) = theirs.glob("*.bin")
        found, digest = ours(model, tmp_path / f"ours-{rank}", rank, world, *flags)
        assert found.name == wanted.name
        assert found.read_bytes() == wanted.read_bytes()
        assert [item.name for item in found.parent.iterdir()] == [found.name]
        assert rank_file.check_frame(found) > 0
        assert digest == hashlib.sha256(wanted.read_bytes()).hexdigest()
    index = tool(model, "/nowhere", world - 1, world, *flags, "--index-only").stdout
    assert rank_writer.plan_rank(model, world, world - 1, flags)[0].index_text == index


def test_widening_is_exact_and_quiets_a_signalling_nan() -> None:
    every = struct.pack("<65536H", *range(1 << 16))
    found = struct.unpack("<65536I", rank_writer.widen(every, rank_writer.quiet_widening()))
    for half in range(1 << 16):
        value = struct.unpack("<e", struct.pack("<H", half))[0]
        if math.isnan(value):
            sign, fraction = half >> 15 << 31, half & 0x3FF
            assert found[half] == sign | 0x7FC00000 | fraction << 13, hex(half)
        else:
            assert struct.pack("<I", found[half]) == struct.pack("<f", value), hex(half)


def test_the_last_file_in_byte_order_wins_as_in_the_engine(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", Small())
    first = sorted(model.glob("*.safetensors"))[0]
    shutil.copy(first, model / "zz.safetensors")
    with (model / "zz.safetensors").open("r+b") as shard:
        shard.seek(-4096, os.SEEK_END)
        shard.write(bytes(4096))
    tool(model, tmp_path / "theirs", 0, 2)
    (wanted,) = (tmp_path / "theirs").glob("*.bin")
    found, _digest = ours(model, tmp_path / "ours", 0, 2)
    assert found.read_bytes() == wanted.read_bytes()


def test_a_shard_that_ends_while_it_is_read_leaves_nothing(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", Small())
    layout, sources = rank_writer.plan_rank(model, 2, 1, ())
    last = sorted(model.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 100)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OSError, match="rehash") as caught:
        rank_writer.write_rank_file(model, out, layout, sources)
    assert caught.value.filename == last.name
    assert list(out.iterdir()) == []


def test_a_gate_that_cannot_be_converted_is_refused_before_a_byte(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", Small())
    layout, sources = rank_writer.plan_rank(model, 2, 0, ())
    gate = next(name for name in sources if name.endswith("ffn.gate.weight"))
    sources[gate] = sources[gate]._replace(meta=sources[gate].meta._replace(dtype="BF16"))
    with pytest.raises(PlanError, match="UnsupportedConversion"):
        rank_writer.write_rank_file(model, tmp_path, layout, sources)
    assert not list(tmp_path.glob("*rank0of2*"))


@pytest.mark.parametrize(
    ("flags", "rank", "text"), [(["--verbose"], 0, "no flag of the writer"), ([], 2, "no rank of this world")]
)
def test_what_it_does_not_know_it_does_not_do(tmp_path: Path, flags: list[str], rank: int, text: str) -> None:
    model = checkpoint(tmp_path / "model", Small())
    with pytest.raises(PlanError, match=text):
        rank_writer.plan_rank(model, 2, rank, flags)


MEMORY = """
import resource, sys
from pathlib import Path
from ansible_collections.sparkfleet.serving.plugins.module_utils import rank_writer
model, out = Path(sys.argv[1]), Path(sys.argv[2])
layout, sources = rank_writer.plan_rank(model, 2, 0, ())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rank_writer.write_rank_file(model, out, layout, sources)
print(layout.file_bytes, before * 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    numbers = Small(hidden=1024, width=2048, experts=16, vocab=16384)
    model = tmp_path / "model"
    write_sparse(model, inventories(numbers), json.dumps(config(numbers)).encode())
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(model), str(out)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
    )
    size, before, after = map(int, done.stdout.split())
    assert size > 8 * rank_writer.BLOCK_BYTES
    assert after - before < 4 * rank_writer.BLOCK_BYTES


def test_the_module_writes_with_it_and_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "ansible_collections.sparkfleet.serving.plugins.modules.rank_inputs"
    monkeypatch.setattr(f"{module}.available_memory", lambda: 8 << 30)
    model = checkpoint(tmp_path / "model", Small())
    layout, _sources = rank_writer.plan_rank(model, 2, 1, ())
    given: dict[str, Any] = {
        "ranks": [
            {
                "rank": 1,
                "file_name": layout.file_name,
                "file_bytes": layout.file_bytes,
                "root": str(tmp_path / "r"),
            }
        ],
        "variant": "v1",
        "model_dir": str(model),
        "data_dir": str(tmp_path),
        "reserve_bytes": 0,
        "writer": "ours",
        "docker_socket": "/nonexistent/docker.sock",
    }
    predicted = run_module("rank_inputs", given, check=True)
    assert (predicted["changed"], (tmp_path / "r").exists()) == (True, False), predicted
    other = {**given, "ranks": [{**given["ranks"][0], "file_name": "rank1of2-" + "0" * 20 + ".bin"}]}
    for check in (True, False):
        refused = run_module("rank_inputs", other, check=check)
        assert "our writer would write " + layout.file_name in refused["msg"]
    made = run_module("rank_inputs", given)
    assert made["changed"], made
    assert made["ranks"][0]["files"][0]["size"] == layout.file_bytes
    assert run_module("rank_inputs", given)["changed"] is False
    engine = run_module("rank_inputs", {**given, "writer": "engine"})
    assert engine["changed"] is False, "one file, whoever wrote it"
