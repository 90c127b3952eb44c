"""The split: golden values of the engine's own tool, cuts that tile every tensor, and refusals by number."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import split as sp
from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import (
    Inventory,
    ModelLock,
    from_directory,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.safetensors import tensor_bytes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as some

from tests.unit.plan.conftest import FIXTURES
from tests.unit.plan.small import EXL3, Small, config, inventories, lock_of, small_lock

NATIVE = "tensorfold_native"


# --- golden values of the engine's own tool
#: First digits of the index hashes of a small checkpoint; test_lab_agrees.py holds them against another code.
SMALL_NAMES = {
    (1, False): ["56d17a0be0ca"],
    (2, False): ["bb6cac0d5e03", "af77fa0e35ee"],
    (4, False): ["b01d6b6a7c75", "50a440aeaeda", "fbf949424be4", "12038a6fb3f6"],
    (4, True): ["e41ddabad6f6", "cae571beb9cc", "d85ed473794a", "a5d177719f9a"],
}


def test_small_indexes_do_not_move() -> None:
    lock = small_lock(Small(width=2304, heads=8, groups=8, vocab=1280, experts=3))
    for (world, parity), names in SMALL_NAMES.items():
        split = sp.plan_split(lock, NATIVE, world, parity=parity)
        assert [rank.index_sha256[:12] for rank in split.ranks] == names
        assert all(sum(rank.classes.values()) == rank.data_bytes for rank in split.ranks)
        assert split.vision_bytes == 0
        assert {rank.uneven for rank in split.ranks} == {world == 4}


# -------------------------------------------------------------------


def test_rank_0_of_2_is_the_engines_index_byte_for_byte(full_pair: sp.Split) -> None:
    rank = full_pair.ranks[0]
    assert rank.index_text == gzip.decompress((FIXTURES / "index-rank0of2.json.gz").read_bytes()).decode()
    assert rank.file_name == "rank0of2-274304f92f5400805bf9.bin"
    assert rank.index_sha256 == "274304f92f5400805bf984da522a74c307988624c29054cc4719ddcf24c7a259"
    assert (rank.entries, rank.index_bytes, rank.file_bytes) == (143_770, 13_353_615, 106_120_462_823)
    assert [layout.data_bytes for layout in full_pair.ranks] == [106_107_109_192] * 2
    assert full_pair.vision_bytes == 970_524_716


def test_rank_0_of_1(full_one: sp.RankLayout) -> None:
    assert (full_one.entries, full_one.data_bytes, full_one.index_bytes) == (
        144_286,
        209_612_534_088,
        13_521_696,
    )
    assert full_one.index_sha256 == "4eabdce2c54f4e7db952b35bb0417bbe8ebd9511e96b50f47b51a95d69d1b9c3"


def test_class_totals_of_rank_0_of_2(full_pair: sp.Split) -> None:
    found = {name: round(size / 2**30, 4) for name, size in full_pair.ranks[0].classes.items()}
    assert found == {
        "routed": 91.5051, "mtp routed": 3.1775, "embed": 1.2329, "wq_b": 0.4896, "wo_b": 0.4890,
        "shared": 0.3998, "wo_a": 0.3922, "mtp other": 0.2699, "head": 0.2313, "latents": 0.2156,
        "router": 0.1465, "hc": 0.1465, "engram": 0.0828,
        "indexer": 0.0296, "compressor": 0.0108, "norms": 0.0009,
    }  # fmt: skip


@pytest.mark.parametrize(("world", "rows"), [(1, 3638), (2, 3602)])
def test_without_drafts_the_index_is_a_strict_prefix(
    full_lock: ModelLock, full_pair: sp.Split, full_one: sp.RankLayout, world: int, rows: int
) -> None:
    whole = full_one if world == 1 else full_pair.ranks[0]
    dims = sp.read_dims(full_lock.config)
    scheme = sp.SCHEMES[NATIVE]
    parts = sp.native_parts(scheme, dims, world, 0, drafts=False)
    short = sp.lay_out(scheme, parts, full_lock.tensors, world, 0)
    assert whole.entries - short.entries == rows
    assert whole.index_text.startswith(short.index_text[:-1])
    assert whole.data_bytes - whole.draft_bytes == short.data_bytes


def test_world_4_is_a_2d_split_and_parity_evens_it(full_lock: ModelLock) -> None:
    scheme, dims = sp.SCHEMES[NATIVE], sp.read_dims(full_lock.config)
    plain = list(sp.native_parts(scheme, dims, 4, 2))
    cuts = {part.name: (part.cols, part.rows) for part in plain}
    assert cuts["head"] == ((32_384, 64_640), None)
    assert {part.mode for part in plain if part.cols} == {"grid", "column"}
    assert next(part.mode for part in plain if part.name == "head") == "grid"
    assert cuts["layers.0.attn.wq_b"] == ((8192, 16_384), None)
    assert cuts["layers.0.attn.wo_b"] == ((2560, 5120), (0, 4096))
    assert cuts["layers.0.ffn.experts.0.w1"] == ((640, 1152), None)
    assert cuts["layers.0.ffn.experts.0.w2"] == ((2560, 5120), (0, 1152))
    assert cuts["layers.1.engram.wkv"] == ((12_800, 25_600), (0, 3072))
    assert cuts["mtp.0.ffn.experts.0.w1"] == ((0, 1152), None)
    slices = [name for name in cuts if name.startswith("layers.0.attn.wo_a")]
    assert slices == ["layers.0.attn.wo_a.slice.2", "layers.0.attn.wo_a.slice.3"]
    even = [list(sp.native_parts(scheme, dims, 4, rank, parity=True)) for rank in (0, 1, 2)]
    assert len(even[0]) - len(plain) == 40 * 192 * 2
    assert len(even[2]) - len(plain) == 40 * 193 * 2
    own = [part.cols for part in even[1] if part.name == "layers.5.ffn.experts.4.w1"]
    assert own == [(1152, 1664), (2176, 2304)]
    rank = sp.lay_out(scheme, iter(even[0]), full_lock.tensors, 4, 0)
    assert rank.data_bytes == 56_193_362_760, "published as about 56 GB a node"


def test_parity_needs_a_2d_split() -> None:
    with pytest.raises(sp.SplitError, match="needs a 2D split"):
        sp.plan_split(small_lock(), NATIVE, 2, parity=True)


def test_every_rank_of_2_has_its_own_index(full_pair: sp.Split) -> None:
    assert full_pair.ranks[1].file_name == "rank1of2-f4b9c7e9bd4f6316d1b4.bin"
    assert full_pair.ranks[1].index_bytes == 13_780_800
    shown = full_pair.ranks[1].as_dict()["classes"]
    assert list(shown.values()) == sorted(shown.values(), reverse=True)


def test_the_index_hangs_on_layout_alone(full_lock: ModelLock) -> None:
    """F16 in place of F32 for what is converted anyway changes nothing; a bit width changes the name."""
    small = small_lock()
    name = sp.plan_split(small, NATIVE, 2).ranks[0].file_name
    other = inventories(Small())
    for inventory in other.values():
        for tensor in inventory:
            if tensor.endswith((".ffn.gate.bias", ".attn.attn_sink")):
                inventory[tensor] = ("F16", inventory[tensor][1])
    assert sp.plan_split(lock_of(other, config(Small())), NATIVE, 2).ranks[0].file_name == name
    assert sp.plan_split(small_lock(Small(bits=4)), NATIVE, 2).ranks[0].file_name != name
    assert not sp.fixed_shape_differences(sp.SCHEMES[NATIVE], full_lock.config)
    assert "hidden_size: found 256, wanted 5120" in sp.fixed_shape_differences(
        sp.SCHEMES[NATIVE], small.config
    )


# --- tiling


def cover(split: sp.Split, lock: ModelLock, skip: str = "nothing") -> None:
    """Every element of every matrix is on the ranks equally often: cut parts tile, the rest is on all of
    them."""
    seen: dict[str, list[tuple[int, int, int, int]]] = {}
    plain: dict[str, list[sp.Range | None]] = {}
    for layout in split.ranks:
        for part, _size in layout.parts:
            if skip in part.name:
                continue
            if part.kind != "exl3":
                plain.setdefault(part.name, []).append(part.rows)
                continue
            depth, breadth, _last = lock.tensors[part.name + ".trellis"].shape
            low, high = part.cols or (0, breadth * 16)
            top, bottom = part.rows or (0, depth * 16)
            assert low % 128 == 0
            assert top % 128 == 0
            seen.setdefault(part.name, []).append((low, high, top, bottom))
    for name, rectangles in seen.items():
        depth, breadth, _last = lock.tensors[name + ".trellis"].shape
        blocks: dict[tuple[int, int], int] = {}
        for low, high, top, bottom in rectangles:
            for column in range(low // 128, -(-high // 128)):
                for row in range(top // 128, -(-bottom // 128)):
                    blocks[column, row] = blocks.get((column, row), 0) + 1
        assert len(blocks) == -(-breadth // 8) * -(-depth // 8), name
        assert len(set(blocks.values())) == 1, name
        area = sum((high - low) * (bottom - top) for low, high, top, bottom in rectangles)
        assert area == depth * breadth * 256 * next(iter(blocks.values())), name
    for name, rows in plain.items():
        cuts = [cut for cut in rows if cut is not None]
        if cuts:
            assert sorted(cuts)[0][0] == 0
            assert sum(high - low for low, high in cuts) == lock.tensors[name].shape[0]
    read = set(seen) | set(plain)
    for tensor in lock.tensors:
        prefix = tensor.rpartition(".")[0]
        if skip in tensor or (tensor.startswith("mtp.") and not split.drafts):
            continue
        assert tensor in read or prefix in read or tensor in split.unplaced or "engram.embed" in tensor, (
            tensor
        )


SMALLS = some.builds(
    Small,
    hidden=some.sampled_from([256, 384, 512]),
    heads=some.sampled_from([4, 6, 8, 12]),
    groups=some.sampled_from([2, 3, 4, 6, 8]),
    o_lora=some.sampled_from([128, 256]),
    width=some.sampled_from([256, 384, 512, 1152]),
    vocab=some.sampled_from([512, 640, 1280]),
    experts=some.integers(1, 4),
    drafts=some.integers(0, 2),
    ngram=some.integers(2, 4),
    engram_heads=some.sampled_from([2, 4]),
    bits=some.integers(1, 8),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    SMALLS,
    some.sampled_from([1, 2, 3, 4, 6, 8]),
    some.sampled_from([NATIVE, "plain_tp"]),
    some.booleans(),
    some.booleans(),
)
def test_parts_tile_every_tensor_or_the_world_is_refused(
    numbers: Small, world: int, engine: str, drafts: bool, parity: bool
) -> None:
    assume((numbers.heads * 128) % numbers.groups == 0 and (numbers.heads * 128 // numbers.groups) % 128 == 0)
    lock = small_lock(numbers)
    try:
        split = sp.plan_split(
            lock, engine, world, drafts=drafts, parity=parity and world == 4 and engine == NATIVE
        )
    except sp.SplitError as error:
        assert error.fault in ("bad-world", "bad-cut"), error
        return
    assert len(split.ranks) == world
    cover(split, lock)
    assert set(split.unplaced) <= {n for n in lock.tensors if n.startswith("mtp.")}


def test_full_size_tiles(full_lock: ModelLock, full_pair: sp.Split) -> None:
    cover(full_pair, full_lock, skip=".ffn.experts.")


@pytest.mark.parametrize(
    "name",
    [
        "tiny-dsv4-exl3-3.0bpw",
        "tiny-llama-exl3-2.5bpw",
        "tiny-llama-exl3-3.0bpw",
        "tiny-llama-pad-exl3-2.0bpw",
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_really_quantized_checkpoints_tile(exl3: dict[str, Path], name: str, world: int) -> None:
    lock = from_directory(exl3[name])
    split = sp.plan_split(lock, "plain_tp", world)
    assert split.unplaced == []
    cover(split, lock)
    if world == 1:
        markers = 4 * lock.matrices
        assert split.ranks[0].data_bytes == lock.data_bytes - markers


def test_bits_and_bytes_of_real_matrices_come_from_the_trellis(exl3: dict[str, Path]) -> None:
    proof = json.loads((EXL3 / "proof-per-matrix.json").read_text())
    checked = 0
    for model, matrices in proof.items():
        tensors = from_directory(exl3[model]).tensors
        for name, known in matrices.items():
            shape = tensors[name + ".trellis"].shape
            assert (shape[0] * 16, shape[1] * 16, sp.bits_of(shape)) == (known["k"], known["n"], known["K"])
            parts = [
                tensors[t]
                for t in (f"{name}.{leaf}" for leaf in ("trellis", "suh", "svh", "mul1", "mcg", "bias"))
                if t in tensors
            ]
            stored = sum(tensor_bytes(entry.dtype, entry.shape) for entry in parts)
            assert stored == sp.matrix_bytes(known["k"], known["n"], known["K"], bias=bool(known["bias"]))
            checked += 1
    assert checked == 143


def test_uneven_blocks_kv_of_one_block_and_biases(exl3: dict[str, Path]) -> None:
    dsv4 = sp.plan_split(from_directory(exl3["tiny-dsv4-exl3-3.0bpw"]), "plain_tp", 2)
    width = [next(p.cols for p, _s in r.parts if p.name.endswith("experts.0.w1")) for r in dsv4.ranks]
    assert width == [(0, 256), (256, 384)]
    assert {rank.as_dict()["uneven"] for rank in dsv4.ranks} == {True}
    padded = sp.plan_split(from_directory(exl3["tiny-llama-pad-exl3-2.0bpw"]), "plain_tp", 2)
    modes = [{p.name: p.mode for p, _s in rank.parts} for rank in padded.ranks]
    assert modes[0]["model.layers.0.self_attn.k_proj"] == "replicated"
    assert modes[0]["model.layers.0.self_attn.o_proj.bias"] == "first"
    assert "model.layers.0.self_attn.o_proj.bias" not in modes[1]
    assert modes[1]["model.layers.0.self_attn.q_proj.bias"] == "column"
    down = [next(p.rows for p, _s in r.parts if p.name.endswith("0.mlp.down_proj")) for r in padded.ranks]
    assert down == [(0, 384), (384, 768)], "704 of the config are stored as 768"


def test_numbers_that_follow_from_others() -> None:
    llama = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1, "vocab_size": 512}
    one = sp.read_dims({**llama, "num_attention_heads": 1, "intermediate_size": 512})
    assert (one.head_dim, one.kv_heads) == (256, 1)
    four = sp.read_dims({**llama, "num_attention_heads": 4, "intermediate_size": 512})
    assert (four.head_dim, four.kv_heads) == (64, 4)
    for ngram, columns in ((0, 0), (1, 0), (2, 2)):
        assert sp.read_dims(config(Small(ngram=ngram))).engram_columns == columns


# --- refusals


def test_world_3_names_heads_and_groups(full_lock: ModelLock) -> None:
    for engine in (NATIVE, "plain_tp"):
        with pytest.raises(sp.SplitError) as error:
            sp.plan_split(full_lock, engine, 3)
        assert "num_attention_heads 64 = 3 x 21 + 1" in str(error.value)
        assert "o_groups 8 = 3 x 2 + 2" in str(error.value)


@pytest.mark.parametrize(
    ("world", "text"),
    [(0, "no world size"), (6, "64 = 6 x 10"), (8, "does not know it"), (1025, "no world size")],
)
def test_other_worlds(full_lock: ModelLock, world: int, text: str) -> None:
    with pytest.raises(sp.SplitError, match=text):
        sp.plan_split(full_lock, NATIVE, world)


def test_a_world_the_engine_lacks_can_be_estimated() -> None:
    lock = small_lock(Small(width=2304, heads=8, groups=8, experts=1, engram_heads=4, vocab=1024))
    with pytest.raises(sp.SplitError, match="does not know it"):
        sp.plan_split(lock, NATIVE, 8)
    split = sp.plan_split(lock, "plain_tp", 8)
    name = "layers.0.ffn.experts.0.w1"
    widths = [next(p.cols or (0, 0) for p, _s in r.parts if p.name == name) for r in split.ranks]
    assert [high - low for low, high in widths] == [384, 384, 256, 256, 256, 256, 256, 256]
    assert split.ranks[0].file_name == ""
    assert not sp.SCHEMES["plain_tp"].launchable


Change = Callable[[dict[str, Inventory], dict[str, Any]], None]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _tensor(name: str, spec: tuple[str, tuple[int, ...]] | None, shard: str = FIRST) -> Change:
    def change(shards: dict[str, Inventory], _config: dict[str, Any]) -> None:
        shards[shard].pop(name, None)
        if spec is not None:
            shards[shard][name] = spec

    return change


def _config(key: str, value: object, *, top: bool = False) -> Change:
    def change(_shards: dict[str, Inventory], body: dict[str, Any]) -> None:
        target = body if top else body["text_config"]
        if value is None:
            del target[key]
        else:
            target[key] = value

    return change


BROKEN: dict[str, tuple[Change, str, str]] = {
    "a tensor is missing": (
        _tensor("layers.2.ffn.experts.1.w3.suh", None),
        "missing-tensor",
        "MissingTensor",
    ),
    "a plain tensor is missing": (_tensor("norm.weight", None, SECOND), "missing-tensor", "norm.weight|None"),
    "gate in BF16": (
        _tensor("layers.0.ffn.gate.weight", ("BF16", (4, 256))),
        "bad-gate",
        "found BF16; wanted F16",
    ),
    "sink in BF16": (_tensor("layers.0.attn.attn_sink", ("BF16", (4,))), "bad-conversion", "F16 or F32"),
    "short svh": (_tensor("layers.0.attn.wq_b.svh", ("F16", (256,))), "bad-matrix", "svh [256]"),
    "suh in BF16": (_tensor("layers.0.attn.wq_b.suh", ("BF16", (128,))), "bad-matrix", "suh BF16"),
    "trellis of two dims": (
        _tensor("layers.0.attn.wq_b.trellis", ("I16", (8, 48))),
        "bad-matrix",
        "I16 [8, 48]",
    ),
    "bits": (_tensor("layers.0.attn.wq_a.trellis", ("I16", (16, 8, 9))), "bad-bits", "9/16"),
    "a sixteenth of a bit": (
        _tensor("layers.0.attn.wq_a.trellis", ("I16", (16, 8, 17))),
        "bad-bits",
        "17/16",
    ),
    "half a bit": (_tensor("layers.0.attn.wq_a.trellis", ("I16", (16, 16, 8))), "bad-bits", "8/16"),
    "more than 8 bits": (_tensor("layers.0.attn.wq_a.trellis", ("I16", (16, 16, 136))), "bad-bits", "136/16"),
    "engram shard in the folder": (
        _tensor("layers.1.engram.embed.weight", ("F8_E4M3", (4, 128))),
        "foreign-shard",
        "UnsupportedDType",
    ),
    "dtype outside the cache": (_tensor("norm.weight", ("F64", (256,)), SECOND), "unsupported-dtype", "F64"),
    "codebook": (
        _config("quantization_config", {"quant_method": "exl3", "codebook": "mcg"}, top=True),
        "wrong-quantization",
        "mcg",
    ),
    "no quantization": (_config("quantization_config", None, top=True), "wrong-quantization", "None"),
    "other model": (_config("model_type", "deepseek_v4", top=True), "wrong-model", "wanted deepseek_v41"),
    "unknown model": (_config("model_type", "gpt_oss", top=True), "unknown-architecture", "found gpt_oss"),
    "no model": (_config("model_type", None, top=True), "unknown-architecture", "found nothing"),
    "ratios": (_config("compress_ratios", [0, 2]), "bad-config", "compress_ratios"),
    "a text ratio": (_config("compress_ratios", ["0"] * 5), "bad-config", "compress_ratios"),
    "no heads": (_config("num_attention_heads", None), "bad-config", "num_attention_heads"),
    "vocab wider than stored": (_config("vocab_size", 1024), "bad-cut", "512 columns"),
    "width wider than stored": (_config("moe_intermediate_size", 512), "bad-cut", "256 columns"),
    "width not on blocks": (_config("moe_intermediate_size", 320), "bad-cut", "whole blocks of 128"),
}


@pytest.mark.parametrize(("change", "fault", "text"), BROKEN.values(), ids=BROKEN.keys())
def test_a_checkpoint_that_cannot_be_cut_is_refused(change: Change, fault: str, text: str) -> None:
    shards, body = inventories(Small()), copy.deepcopy(config(Small()))
    change(shards, body)
    with pytest.raises(sp.SplitError) as error:
        sp.plan_split(lock_of(shards, body), NATIVE, 2)
    assert error.value.fault == fault
    assert text in str(error.value)


def test_unknown_engine_and_unknown_tensor() -> None:
    with pytest.raises(sp.SplitError, match="no scheme is known"):
        sp.plan_split(small_lock(), "llama.cpp", 2)
    shards = inventories(Small())
    shards[FIRST]["layers.0.new_thing.weight"] = ("BF16", (4,))
    lock = lock_of(shards, config(Small()))
    with pytest.raises(sp.SplitError, match=r"layers\.0\.new_thing\.weight: 1 tensors have no rule"):
        sp.plan_split(lock, "plain_tp", 2)
    assert any("new_thing" in text for text in sp.plan_split(lock, NATIVE, 2).warnings)


def test_vision_is_what_nothing_else_reads() -> None:
    shards, body = inventories(Small()), config(Small())
    shards[SECOND]["vision.blocks.0.weight"] = ("BF16", (10, 10))
    shards[SECOND]["layers.0.ffn.gate.bias_vl"] = ("F32", (4,))
    body["vision_config"] = {"hidden_size": 10}
    for engine in (NATIVE, "plain_tp"):
        split = sp.plan_split(lock_of(shards, body), engine, 2)
        assert (split.vision_bytes, split.unplaced) == (200, ["vision.blocks.0.weight"])


def test_an_overlay_is_told() -> None:
    shards = inventories(Small())
    shards["zz-overlay.safetensors"] = {"norm.weight": ("BF16", (256,))}
    warnings = sp.plan_split(lock_of(shards, config(Small())), NATIVE, 2).warnings
    assert len(warnings) == 1
    assert "norm.weight is read from zz-overlay.safetensors, not from" in warnings[0]


def test_on_a_node_the_engines_index_decides() -> None:
    layout = sp.plan_split(small_lock(), NATIVE, 2).ranks[0]
    sp.compare_index(layout, layout.index_text)
    other = sp.plan_split(small_lock(Small(bits=4)), NATIVE, 2).ranks[0]
    with pytest.raises(sp.SplitError, match=r"row 13 of the engine's index is not the plan's"):
        sp.compare_index(layout, other.index_text)
    short = sp.plan_split(small_lock(), NATIVE, 2, drafts=False).ranks[0]
    with pytest.raises(sp.SplitError, match="another length"):
        sp.compare_index(layout, short.index_text)
    for text in ("error: MissingTensor", "{}"):
        with pytest.raises(sp.SplitError) as error:
            sp.compare_index(layout, text)
        assert error.value.fault == "bad-index"


def test_deepseek_v4_flash_at_full_size_has_its_published_parameters() -> None:
    """Numbers of the public config; names of the quantized V4 sample. 43 layers: 2 windows, 21 ratio 4, 20
    ratio 128."""
    from tools.plan_fullsize import matrix

    hidden, width, experts, heads, head_dim = 4096, 2048, 256, 64, 512
    ratios = [0, 0] + [4, 128] * 20 + [4]
    out: Inventory = {"embed.weight": ("BF16", (129_280, hidden)), "norm.weight": ("BF16", (hidden,))}
    matrix(out, "head", hidden, 129_280, 6)
    for layer, ratio in enumerate(ratios):
        p = f"layers.{layer}"
        for leaf, k, n in (("w1", hidden, width), ("w2", width, hidden), ("w3", hidden, width)):
            for base in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
                matrix(out, f"{p}.ffn.{base}.{leaf}", k, n, 3)
        out[f"{p}.ffn.gate.weight"] = ("F16", (experts, hidden))
        matrix(out, f"{p}.attn.wq_a", hidden, 1024, 5)
        matrix(out, f"{p}.attn.wq_b", 1024, heads * head_dim, 5)
        matrix(out, f"{p}.attn.wkv", hidden, head_dim, 5)
        matrix(out, f"{p}.attn.wo_b", 8 * 1024, hidden, 5)
        for group in range(8):
            matrix(out, f"{p}.attn.wo_a.slice.{group}", heads * head_dim // 8, 1024, 5)
        if ratio == 4:
            matrix(out, f"{p}.attn.indexer.wq_b", 1024, 64 * 128, 5)
    body = {
        "model_type": "deepseek_v4", "hidden_size": hidden, "num_hidden_layers": 43,
        "num_attention_heads": heads, "head_dim": head_dim,
        "vocab_size": 129_280, "moe_intermediate_size": width, "o_groups": 8,
        "o_lora_rank": 1024, "n_routed_experts": experts, "compress_ratios": ratios,
        "quantization_config": {"quant_method": "exl3", "codebook": "mul1"},
    }  # fmt: skip
    lock = lock_of({"model.safetensors": out}, body)
    weights = sum(e.shape[0] * e.shape[1] * 256 for n, e in lock.tensors.items() if n.endswith(".trellis"))
    assert weights + 129_280 * hidden == pytest.approx(284e9, rel=0.005), "published: 284 B"
    placed, unplaced = sp.classify(lock, sp.read_dims(body))
    assert unplaced == []
    for rank in range(2):
        for part in sp.family_parts(placed[:60], lock.tensors, sp.read_dims(body), 2, rank):
            assert part.mode in ("replicated", "row", "column")
    with pytest.raises(sp.SplitError, match="does not read it"):
        sp.plan_split(lock, NATIVE, 2)
    body["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(sp.SplitError, match="does not read this quantization"):
        sp.plan_split(lock, "plain_tp", 2)
