"""The rank-file tool of the lab engine: golden values, file format, refusals and exit codes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import model_lock, split

from lab.engine.context.lib.dsv41 import modelconfig, rankfile, shards
from lab.engine.context.lib.dsv41 import split as engine_split
from tests.unit.lab_engine.conftest import CONFIG
from tests.unit.lab_engine.harness import BIN, Inputs, environment, tool

GOLDEN = {
    # Index of the first 2.9 bpw pack, printed by the real tool: (entries, data, index bytes, sha256).
    (0, 1): (
        144286,
        209612534088,
        13521696,
        "4eabdce2c54f4e7db952b35bb0417bbe8ebd9511e96b50f47b51a95d69d1b9c3",
    ),
    (0, 2): (
        143770,
        106107109192,
        13353615,
        "274304f92f5400805bf984da522a74c307988624c29054cc4719ddcf24c7a259",
    ),
}
TOOL = "tf-dsv41-rank-cache"
USAGE = "usage: tf-dsv41-rank-cache MODEL_DIR OUT_DIR RANK WORLD [--parity] [--no-dspark] [--index-only]\n"


def index(model: Path, *args: object) -> Any:
    result = tool(TOOL, model, "/nonexistent/out", *args, "--index-only")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rows = json.loads(result.stdout)
    assert json.dumps(rows) == result.stdout
    return rows


def test_golden_index_of_the_full_size_inventory(full_size: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAB_ENGINE_SHAPES", raising=False)
    config = modelconfig.read(str(full_size))
    tensors = shards.scan(str(full_size))
    for (rank, world), (entries, data, nbytes, sha256) in GOLDEN.items():
        planned = engine_split.entries(config, rank, world, parity=False, dspark=True)
        rows = list(rankfile.layout(planned, tensors))
        text = rankfile.index_text(rows)
        assert (len(rows), rows[-1].offset + rows[-1].nbytes, len(text)) == (entries, data, nbytes)
        assert hashlib.sha256(text).hexdigest() == sha256


def test_no_dspark_is_a_prefix(inputs: Inputs) -> None:
    with_drafts, without = index(inputs.model, 1, 2), index(inputs.model, 1, 2, "--no-dspark")
    assert with_drafts[: len(without)] == without
    assert all(row[0].startswith("mtp.") for row in with_drafts[len(without) :])


def full_size_keys(folder: Path, rank: int, parity: bool) -> tuple[set[str], int]:
    """Keys of trellis and plain rows of a four-node file at full size, and the number of rows."""
    config = modelconfig.read(str(folder))
    keys, rows = set(), 0
    for entry in engine_split.entries(config, rank, 4, parity, dspark=True):
        if isinstance(entry, engine_split.Plain):
            keys.add(entry.key)
            rows += 1
        else:
            keys.add(entry.key("tr"))
            rows += 3
    return keys, rows


def test_four_nodes_at_full_size(tmp_path: Path) -> None:
    shutil.copy(CONFIG, tmp_path / "config.json")
    assert "head|(0, 32384)|None|tr" in full_size_keys(tmp_path, 0, False)[0]
    keys, rows = full_size_keys(tmp_path, 2, False)
    assert "head|(32384, 64640)|None|tr" in keys
    assert "layers.3.ffn.experts.7.w1|(640, 1152)|None|tr" in keys
    assert "layers.3.attn.wo_b|(2560, 5120)|(0, 4096)|tr" in keys
    assert "layers.14.engram.wkv|(12800, 25600)|(0, 3072)|tr" in keys
    keys, rows_with_rest = full_size_keys(tmp_path, 2, True)
    # The ninth block of an expert is one pair's: by number, and the shared expert's is pair 1's.
    assert rows_with_rest - rows == 40 * (192 + 1) * 6
    assert "layers.3.ffn.experts.7.w1|(1024, 1152)|None|tr" in keys
    assert "layers.3.ffn.experts.8.w1|(1024, 1152)|None|tr" not in keys
    # Draft blocks stay cut for two ranks.
    assert "mtp.0.ffn.experts.5.w1|(0, 1152)|None|tr" in keys
    keys, _ = full_size_keys(tmp_path, 3, True)
    assert "layers.3.attn.wo_a.slice.6|None|None|tr" in keys
    assert "layers.3.ffn.shared_experts.w3|(2176, 2304)|None|tr" in keys
    assert "mtp.1.attn.wo_b|None|(4096, 8192)|tr" in keys


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "no-dspark"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_plan_of_the_collection_agrees(inputs: Inputs, world: int, drafts: bool) -> None:
    lock = model_lock.from_directory(inputs.model)
    plan = split.plan_split(lock, "tensorfold_native", 2, drafts=drafts) if world == 2 else None
    for rank in range(world):
        rows = index(inputs.model, rank, world, *([] if drafts else ["--no-dspark"]))
        if plan is not None:
            split.compare_index(plan.ranks[rank], json.dumps(rows))


def test_written_file_and_its_contents(inputs: Inputs, tmp_path: Path) -> None:
    out = tmp_path / "new/parents"
    result = tool(TOOL, inputs.model, out, 1, 2)
    document = json.loads(result.stdout)
    assert list(document) == [
        "file", "entries", "data_bytes", "index_bytes", "rank", "world", "parity", "dspark"
    ]  # fmt: skip
    assert result.stdout.endswith("}\n")
    path = Path(document["file"])
    assert [entry.name for entry in out.iterdir()] == [path.name]
    rows = index(inputs.model, 1, 2)
    text = json.dumps(rows).encode()
    assert path.name == f"rank1of2-{hashlib.sha256(text).hexdigest()[:20]}.bin"
    data = path.read_bytes()
    length = rows[-1][3] + rows[-1][4]
    assert data[length:] == text + struct.pack("<Q", length) + b"TFDSRK01"
    assert data == (inputs.rank_files[1] / path.name).read_bytes()
    stored = {key: data[offset : offset + nbytes] for key, _, _, offset, nbytes in rows}
    tensors = {}
    for shard in inputs.model.glob("*.safetensors"):
        raw = shard.read_bytes()
        head = struct.unpack("<Q", raw[:8])[0]
        for name, entry in json.loads(raw[8 : 8 + head]).items():
            begin, end = entry["data_offsets"]
            tensors[name] = (entry, raw[8 + head + begin : 8 + head + end])
    # Second half of the head's columns: tiles of every row, by hand.
    entry, trellis = tensors["head.trellis"]
    high, wide, words = entry["shape"]
    line, piece = wide * words * 2, wide // 2 * words * 2
    by_hand = b"".join(trellis[row * line + piece : (row + 1) * line] for row in range(high))
    assert stored["head|(512, 1024)|None|tr"] == by_hand
    assert stored["layers.0.attn.wo_b|None|(256, 512)|suh"] == tensors["layers.0.attn.wo_b.suh"][1][512:]
    # F16 sources of float32 rows are widened exactly.
    entry, bias = tensors["layers.2.ffn.gate.bias"]
    assert entry["dtype"] == "F16"
    wide_bias = struct.pack("<6f", *struct.unpack("<6e", bias))
    assert stored["layers.2.ffn.gate.bias|torch.float32"] == wide_bias


def test_widening_covers_every_float16() -> None:
    table = rankfile._widened()
    for bits in range(65536):
        value = struct.unpack("<e", struct.pack("<H", bits))[0]
        if not math.isnan(value):
            assert table[bits] == struct.unpack("<I", struct.pack("<f", value))[0]
        else:
            assert table[bits] == (bits >> 15 << 31 | 0x7FC00000 | (bits & 0x3FF) << 13)


def test_not_idempotent_by_itself(inputs: Inputs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("rank10of2-x.bin", "rank0of4-x.bin", "rank0of2-x.bin.tmp", ".rank0of2.partial"):
        (out / name).write_text("not in the way")
    (out / "rank0of2-folder.bin").mkdir()
    assert tool(TOOL, inputs.model, out, 0, 2).returncode == 0
    again = tool(TOOL, inputs.model, out, 0, 2)
    name = next(path.name for path in out.iterdir() if path.stat().st_size > 1 << 20)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"{out} already holds {name}: remove it or name an empty OUT_DIR\n"
    (out / "rank0of2-.bin").touch()
    assert tool(TOOL, inputs.model, out, 0, 2).stderr == "error: SeveralRankCaches\n"
    assert tool(TOOL, inputs.model, inputs.token_map, 0, 2).stderr == "error: NotDir\n"


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        ([], 1), (["m"], 1), (["m", "o", "0"], 1), (["m", "o", "0", "2", "--help"], 1),
        (["m", "o", "0", "3"], 2), (["m", "o", "0", "8"], 2), (["m", "o", "0", "0"], 2),
        (["m", "o", "2", "2"], 2), (["m", "o", "0", "2", "--parity"], 2),
    ],
)  # fmt: skip
def test_usage(args: list[str], lines: int) -> None:
    result = tool(TOOL, *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith(USAGE)
    assert (len(result.stderr), result.stderr.count("\n")) == ((96, 1) if lines == 1 else (154, 2))


@pytest.mark.parametrize(
    ("rank", "name"),
    [("x", "InvalidCharacter"), ("2.0", "InvalidCharacter"), ("-1", "Overflow"), (1 << 32, "Overflow")],
)
def test_numbers(inputs: Inputs, rank: object, name: str) -> None:
    assert tool(TOOL, inputs.model, "o", rank, 2).stderr == f"error: {name}\n"
    assert index(inputs.model, "+1", "02") == index(inputs.model, 1, 2)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a shard's header and leave its data."""
    raw = path.read_bytes()
    head = struct.unpack("<Q", raw[:8])[0]
    document = json.loads(raw[8 : 8 + head])
    changed = change(document)
    text = (
        changed
        if isinstance(changed, bytes)
        else json.dumps(document if changed is None else changed).encode()
    )
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + head :])


def shard(model: Path, number: int) -> Path:
    return model / f"model-{number:05d}-of-00006.safetensors"


def config(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = model / "config.json"
    document = json.loads(path.read_text())
    changed = change(document)
    path.write_text(
        changed if isinstance(changed, str) else json.dumps(document if changed is None else changed)
    )


def header(number: int, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda model: rewrite_header(shard(model, number), change)


def cut(number: int, nbytes: int) -> Callable[[Path], object]:
    return lambda model: os.truncate(shard(model, number), shard(model, number).stat().st_size - nbytes)


def _engram_shard(model: Path) -> None:
    shutil.copy(shard(model, 1), model / "model-00047-of-00048.safetensors")
    rewrite_header(
        model / "model-00047-of-00048.safetensors",
        lambda document: document["embed.weight"].update(dtype="F8_E4M3"),
    )


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def _dangling(model: Path) -> None:
    shard(model, 2).unlink()
    shard(model, 2).symlink_to("gone")


WQ_A = "layers.1.attn.wq_a"
CASES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no config": (lambda m: (m / "config.json").unlink(), 1, "error: FileNotFound"),
    "no shards": (
        lambda m: _remove(*m.glob("*.safetensors")), 1, "embed.weight|None: MissingTensor"),
    "missing shard": (
        lambda m: shard(m, 2).unlink(), 1, "layers.1.hc_attn_fn|torch.float32: MissingTensor"),
    "dangling link": (
        _dangling, 1, "error: FileNotFound"),
    "folder with the suffix": (lambda m: (m / "x.safetensors").mkdir(), 1, "error: IsDir"),
    "one byte short": (cut(3, 1), 1, "error: BadSafetensors"),
    "empty": (lambda m: shard(m, 3).write_bytes(b""), 1, "error: BadSafetensors"),
    "git lfs pointer": (
        lambda m: shard(m, 3).write_text("version https://git-lfs.github.com/spec/v1\n"),
        1, "error: BadSafetensors"),
    "shape against offsets": (
        header(2, lambda d: d[f"{WQ_A}.suh"].update(shape=[255])), 1, "error: BadSafetensors"),
    "header no JSON": (header(2, lambda _: b"{]"), 1, "error: SyntaxError"),
    "header a list": (header(2, lambda _: []), -6, ""),
    "no dtype": (header(2, lambda d: d[f"{WQ_A}.suh"].pop("dtype") and None), -6, ""),
    "duplicate name": (
        header(2, lambda d: json.dumps(d).encode().replace(b".attn.q_norm", b".attn_norm", 1)
               .replace(b"layers.1.attn_norm.weight", b"layers.1.ffn_norm.weight", 1)),
        1, "error: DuplicateField"),
    "unknown dtype": (
        header(2, lambda d: d[f"{WQ_A}.mul1"].update(dtype="F4")), 1, "error: UnsupportedDType"),
    "engram shard": (_engram_shard, 1, "error: UnsupportedDType"),
    "dtype without a place": (
        header(2, lambda d: d["layers.1.attn_norm.weight"].update(dtype="U16")),
        1, "layers.1.attn_norm.weight|None: UnsupportedDType"),
    "five dims": (
        header(2, lambda d: d[f"{WQ_A}.suh"].update(shape=[1, 1, 1, 1, 256])), 1, "error: RankTooHigh"),
    "trellis of another shape": (
        header(2, lambda d: d[f"{WQ_A}.trellis"].update(shape=[16, 4, 160])),
        1, f"{WQ_A}|None|None|tr: the checkpoint's i16 {{ 16, 4, 160 }} is not the split's"),
    "suh as bf16": (
        header(2, lambda d: d[f"{WQ_A}.suh"].update(dtype="BF16")),
        1, f"{WQ_A}|None|None|suh: the checkpoint's bf16 {{ 256 }} is not the split's"),
    "model prefix": (
        header(1, lambda d: {f"model.{k}": v for k, v in d.items()}), 1, "embed.weight|None: MissingTensor"),
    "codebook": (
        lambda m: config(m, lambda d: d["quantization_config"].update(codebook="mcg")),
        1, "error: UnsupportedQuantization"),
    "not quantized": (
        lambda m: config(m, lambda d: d.pop("quantization_config") and None),
        1, "error: UnsupportedQuantization"),
    "other model": (
        lambda m: config(m, lambda d: d.update(model_type="deepseek_v4")), 1, "error: NotDeepSeekV41"),
    "too few ratios": (
        lambda m: config(m, lambda d: d["text_config"].update(compress_ratios=[0] * 5)),
        1, "error: BadConfig"),
    "ratio 3": (
        lambda m: config(m, lambda d: d["text_config"].update(compress_ratios=[3] * 6)),
        1, "error: BadConfig"),
    "missing key": (
        lambda m: config(m, lambda d: d["text_config"].pop("hc_mult") and None), 1, "error: BadConfig"),
    "config a list": (lambda m: config(m, lambda _: "[]"), -6, ""),
    "config cut": (lambda m: config(m, lambda d: json.dumps(d)[:200]), 1, "error: UnexpectedEndOfInput"),
    "config too long": (
        lambda m: config(m, lambda d: json.dumps(d) + " " * (4 << 20)), 1, "error: StreamTooLong"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(copied: Inputs, case: str) -> None:
    damage, code, last = CASES[case]
    damage(copied.model)
    result = tool(TOOL, copied.model, "unused", 0, 2, "--index-only")
    assert (result.returncode, result.stdout) == (code, "")
    assert not last or result.stderr.splitlines()[-1] == last


def test_reasons_stand_before_the_name(copied: Inputs) -> None:
    config(copied.model, lambda d: d["text_config"].pop("hc_mult") and None)
    assert (
        tool(TOOL, copied.model, "o", 0, 2).stderr == "error: config.json has no hc_mult\nerror: BadConfig\n"
    )


def test_fixed_shapes_hold_without_the_lab_s_switch(inputs: Inputs) -> None:
    result = tool(TOOL, inputs.model, "o", 0, 2, shapes=False)
    assert result.stderr.splitlines()[-1] == "error: UnsupportedShapes"


def test_what_the_tool_does_not_notice(copied: Inputs) -> None:
    before = index(copied.model, 0, 2)
    with shard(copied.model, 1).open("ab") as file:
        file.write(b"more")
    (copied.model / "model.safetensors.index.json").unlink()
    rewrite_header(shard(copied.model, 2), lambda d: {k: v for k, v in d.items() if not k.endswith(".mul1")})
    assert index(copied.model, 0, 2) == before


def test_the_last_file_in_byte_order_wins(copied: Inputs) -> None:
    name = "layers.1.attn_norm.weight"
    text = json.dumps({name: {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    overlay = struct.pack("<Q", len(text)) + text + bytes(1024)
    for file, wins in (("model-00002-of-00006-ablit.safetensors", False), ("zz.safetensors", True)):
        (copied.model / file).write_bytes(overlay)
        rows = {row[0]: row[1] for row in index(copied.model, 0, 2)}
        assert (rows[f"{name}|None"] == "float32") == wins


def test_conversion_is_only_found_out_while_writing(copied: Inputs, tmp_path: Path) -> None:
    before = index(copied.model, 0, 2)
    rewrite_header(shard(copied.model, 2), lambda d: d["layers.1.ffn.gate.weight"].update(dtype="BF16"))
    assert index(copied.model, 0, 2) == before
    result = tool(TOOL, copied.model, tmp_path / "out", 0, 2)
    assert (result.returncode, result.stderr) == (1, "error: UnsupportedConversion\n")
    assert not list((tmp_path / "out").iterdir())


def test_stdout_that_is_a_regular_file_is_written_from_its_start(inputs: Inputs, tmp_path: Path) -> None:
    path = tmp_path / "f"
    command = [str(BIN / TOOL), str(inputs.model), "o", "0", "2", "--index-only"]
    with path.open("w") as out:
        out.write("first line\n")
        out.flush()
        subprocess.run(command, env=environment(), stdout=out, check=True)
    assert path.read_text().startswith('[["embed.weight|None"')
    with path.open("a") as out:
        subprocess.run(command, env=environment(), stdout=out, check=True)
    assert path.read_text().count('["embed.weight|None"') == 2
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (1, b"error: WriteFailed\n")


def test_check(copied: Inputs) -> None:
    folder = copied.rank_files[0]
    path = next(folder.iterdir())
    good = tool("tf-dsv41-check", copied.model, folder, 0, 2, "--bytes", 1)
    document = json.loads(good.stdout)
    assert (good.returncode, document["ok"], document["compared"]) == (0, True, document["entries"])
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    assert tool("tf-dsv41-check", copied.model, folder, 0, 2).returncode == 0
    wrong = tool("tf-dsv41-check", copied.model, folder, 0, 2, "--bytes", 1)
    assert wrong.returncode == 1
    assert json.loads(wrong.stdout.splitlines()[-1])["byte_mismatches"] == 1
    drafts = tool("tf-dsv41-check", copied.model, folder, 0, 2, "--no-dspark")
    document = json.loads(drafts.stdout.splitlines()[-1])
    assert (drafts.returncode, document["mismatches"], document["ok"]) == (1, 0, False)
    path.write_bytes(raw[:-1])
    assert tool("tf-dsv41-check", copied.model, folder, 0, 2).stderr == "error: BadRankCache\n"
    path.unlink()
    assert tool("tf-dsv41-check", copied.model, folder, 0, 2).stderr == "error: NoRankCache\n"
    assert tool("tf-dsv41-check", copied.model, "/nonexistent", 0, 2).stderr == "error: FileNotFound\n"
