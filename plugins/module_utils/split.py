# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From a model lock and an engine's scheme to what every rank holds, tensor by tensor.

An engine is data (`SCHEMES`): which models it reads, which world sizes, how each dimension is divided. Two
forms:

* TensorFold native writes rank files. Its parts have a fixed order, and the index of a rank file follows the
engine's
  own tool byte for byte, so that name and size of the file are known before it is written. World 1 and 2 cut
  evenly; world 4 is a 2D split: inputs are cut as at world 2, outputs are cut again between two pairs of
  nodes in whole 128-blocks, and draft blocks stay at world 2.
* Plain tensor parallelism cuts uneven whole 128-blocks and has no rank file. It estimates other engines and
models.

EXL3 stores 16x16 tiles, but its rotation works on blocks of 128: a cut elsewhere decodes without an error
and is wrong (relative error 0.68 to 1.89, measured on really quantized files). So every cut must be on 128.
Widths in bits and both dimensions of a matrix are read from its trellis, never from the config: real packs
mix and pad them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .model_lock import LockTensor, ModelLock
from .safetensors import PlanError, tensor_bytes

#: EXL3 rotates inputs and outputs in blocks of this many values; a cut is valid only between blocks.
BLOCK = 128
#: EXL3 stores tiles of this many rows and columns.
TILE = 16
#: The last 16 bytes of a rank file: little-endian length of the data, then this.
RANK_FILE_MAGIC = b"TFDSRK01"
RANK_FILE_FOOTER = 8 + len(RANK_FILE_MAGIC)
#: Hex digits of the index hash that a rank file's name carries.
NAME_DIGITS = 20

#: dtype names of the engine's index; what is not here cannot be in a rank file.
TORCH_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
}

Range = tuple[int, int]


class SplitError(PlanError):
    """A checkpoint or a world size that cannot be cut."""


class Item(NamedTuple):
    """One line of an architecture: a matrix or tensor by name template, how it is cut, and its class.

    ``rule``: whole, column:DIM, row:DIM, group:DIM, or rowof0:DIM (cut along axis 0 of a plain tensor).
    ``out``: the output dimension of a row-cut matrix (a 2D split cuts it too). ``when``: a condition on the
    layer.
    """

    name: str
    kind: str
    rule: str
    cls: str
    convert: str = ""
    out: str = ""
    when: str = ""


class Part(NamedTuple):
    """What one rank takes of one matrix or tensor. Columns are outputs, rows are inputs; None is all of
    them."""

    name: str
    kind: str
    mode: str
    cols: Range | None
    rows: Range | None
    convert: str
    cls: str


@dataclass(frozen=True)
class World:
    """How a world size divides: ``inputs`` ranks share inputs and heads, ``outputs`` groups share outputs."""

    inputs: int
    outputs: int = 1
    parity: bool = False


@dataclass(frozen=True)
class Scheme:
    """One engine's way to cut a model. ``worlds`` None: any world size, in uneven whole 128-blocks."""

    name: str
    models: tuple[str, ...]
    worlds: dict[int, World] | None
    rank_file: bool
    quant_methods: tuple[str, ...] = ("exl3",)
    codebooks: tuple[str, ...] = ("mul1", "mcg", "")
    #: The engine's own fixed-shape check as data: where a checkpoint differs, that engine refuses to load it.
    fixed_shapes: dict[str, int] = field(default_factory=dict)
    launchable: bool = True


#: TensorFold's checkShapes (error UnsupportedShapes): the one shape its kernels are built for. Layer lists
#: and the n-gram size are not part of it.
_DSV41_SHAPES = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "vocab_size": 129280,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "dspark_markov_rank": 256,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
}

SCHEMES: dict[str, Scheme] = {
    "tensorfold_native": Scheme(
        "tensorfold_native",
        ("deepseek_v41",),
        {1: World(1), 2: World(2), 4: World(2, 2, parity=True)},
        rank_file=True,
        codebooks=("mul1",),
        fixed_shapes=_DSV41_SHAPES,
    ),
    "plain_tp": Scheme(
        "plain_tp", ("deepseek_v41", "deepseek_v4", "llama"), None, rank_file=False, launchable=False
    ),
}

# --- architecture of DeepSeek-V4.1 in load order (the engine's own plan)

_HEAD: tuple[Item, ...] = (
    Item("embed.weight", "plain", "whole", "embed"),
    Item("norm.weight", "plain", "whole", "norms"),
    Item("head", "exl3", "column:vocab", "head"),
)
_BLOCK: tuple[Item, ...] = (
    *(
        Item(f"{{p}}.hc_{part}_{leaf}", "plain", "whole", "hc", "F32")
        for part in ("attn", "ffn")
        for leaf in ("fn", "scale", "base")
    ),
    Item("{p}.attn_norm.weight", "plain", "whole", "norms"),
    Item("{p}.ffn_norm.weight", "plain", "whole", "norms"),
    Item("{p}.attn.wq_a", "exl3", "whole", "latents"),
    Item("{p}.attn.q_norm.weight", "plain", "whole", "norms"),
    Item("{p}.attn.wq_b", "exl3", "column:heads", "wq_b"),
    Item("{p}.attn.wkv", "exl3", "whole", "latents"),
    Item("{p}.attn.kv_norm.weight", "plain", "whole", "norms"),
    Item("{p}.attn.attn_sink", "plain", "whole", "norms", "F32"),
    Item("{p}.attn.wo_a.slice.{g}", "exl3", "group:o_groups", "wo_a"),
    Item("{p}.attn.wo_b", "exl3", "row:o_width", "wo_b", out="hidden"),
    Item("{p}.attn.compressor.wkv", "exl3", "whole", "compressor", when="kv"),
    Item("{p}.attn.compressor.norm.weight", "plain", "whole", "compressor", when="kv"),
    Item("{p}.attn.compressor.wgate", "exl3", "whole", "compressor", when="kv ratio"),
    Item("{p}.attn.indexer.wq_b", "exl3", "whole", "indexer", when="index"),
    Item("{p}.attn.indexer.weights_proj.weight", "plain", "whole", "indexer", "F32", when="index"),
    Item("{p}.attn.indexer.wk", "exl3", "whole", "indexer", when="index kv"),
    Item("{p}.attn.indexer.k_norm.weight", "plain", "whole", "indexer", when="index kv"),
    Item("{p}.ffn.gate.weight", "plain", "whole", "router", "F16"),
    Item("{p}.ffn.gate.bias", "plain", "whole", "router", "F32"),
    Item("{p}.ffn.experts.{e}", "expert", "width", "routed"),
    Item("{p}.ffn.shared_experts", "expert", "width", "shared"),
    Item("{p}.engram.wkv", "exl3", "row:engram_rows", "engram", out="engram_out", when="engram"),
    Item("{p}.engram.q_weight", "plain", "whole", "engram", "F32", when="engram"),
    Item("{p}.engram.k_weight", "plain", "whole", "engram", "F32", when="engram"),
)
_DRAFT_TAIL: tuple[Item, ...] = (
    Item("mtp.{first}.main_proj", "exl3", "whole", "mtp other"),
    Item("mtp.{first}.main_norm.weight", "plain", "whole", "mtp other"),
    Item("mtp.{last}.norm.weight", "plain", "whole", "mtp other"),
    Item("mtp.{last}.markov_head.embed.weight", "plain", "whole", "mtp other"),
    Item("mtp.{last}.markov_head.head.weight", "plain", "whole", "mtp other"),
    Item("mtp.{last}.confidence_head.proj.weight", "plain", "whole", "mtp other"),
)


@dataclass(frozen=True)
class Dims:
    """The numbers of one model, all from its config (and none hard-coded)."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    head_dim: int
    vocab: int
    width: int
    o_groups: int = 0
    o_width: int = 0
    experts: int = 0
    draft_layers: int = 0
    draft_experts: int = 0
    ratios: tuple[int, ...] = ()
    kv_sources: tuple[int, ...] = ()
    index_sources: tuple[int, ...] = ()
    engram_layers: tuple[int, ...] = ()
    engram_columns: int = 0
    engram_rows: int = 0
    engram_out: int = 0
    kv_heads: int = 1

    def size(self, name: str) -> int:
        """A dimension by the name that rules use."""
        if name == "heads":
            return self.heads * self.head_dim
        value: int = getattr(self, name)
        return value

    def pieces(self, name: str) -> tuple[str, int]:
        """What must stay whole along a dimension, and how many of them there are: (config key, count)."""
        return {
            "heads": ("num_attention_heads", self.heads),
            "o_groups": ("o_groups", self.o_groups),
            "o_width": ("o_groups", self.o_groups),
            "engram_rows": ("engram hash columns", self.engram_columns),
        }.get(name, (name, self.size(name) // BLOCK))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def model_type(config: dict[str, Any]) -> str:
    """model_type at top level (the text part's own type carries a suffix)."""
    return str(config.get("model_type", ""))


def _number(text: dict[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SplitError(
            "bad-config", "is missing or no whole number", file="config.json", tensor=key, found=value
        )
    return value


def _numbers(text: dict[str, Any], key: str) -> tuple[int, ...]:
    value = text.get(key)
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise SplitError(
            "bad-config",
            "is missing or no list of whole numbers",
            file="config.json",
            tensor=key,
            found=value,
        )
    return tuple(value)


def read_dims(config: dict[str, Any]) -> Dims:
    """Dimensions from config.json. Raises SplitError naming the key that is missing, or the unknown
    architecture."""
    kind, text = model_type(config), text_config(config)
    if kind == "llama":
        heads = _number(text, "num_attention_heads")
        hidden = _number(text, "hidden_size")
        head_dim = _number(text, "head_dim") if "head_dim" in text else hidden // max(1, heads)
        return Dims(
            kind,
            hidden,
            _number(text, "num_hidden_layers"),
            heads,
            head_dim,
            _number(text, "vocab_size"),
            _number(text, "intermediate_size"),
            kv_heads=_number(text, "num_key_value_heads") if "num_key_value_heads" in text else heads,
        )
    if kind not in ("deepseek_v41", "deepseek_v4"):
        raise SplitError(
            "unknown-architecture",
            "no rules are known for this architecture",
            file="config.json",
            tensor="model_type",
            found=kind or "nothing",
            wanted="deepseek_v41, deepseek_v4 or llama",
            remedy="nothing is guessed: its cut rules must be added to the planner first",
        )
    hidden, layers = _number(text, "hidden_size"), _number(text, "num_hidden_layers")
    groups = _number(text, "o_groups")
    common: dict[str, Any] = {
        "model_type": kind,
        "hidden": hidden,
        "layers": layers,
        "heads": _number(text, "num_attention_heads"),
        "head_dim": _number(text, "head_dim"),
        "vocab": _number(text, "vocab_size"),
        "width": _number(text, "moe_intermediate_size"),
        "o_groups": groups,
        "o_width": groups * _number(text, "o_lora_rank"),
        "experts": _number(text, "n_routed_experts"),
        "ratios": _numbers(text, "compress_ratios"),
    }
    if kind == "deepseek_v4":
        return Dims(**common)
    drafts = _number(text, "num_nextn_predict_layers")
    ratios = common["ratios"]
    if len(ratios) != layers + drafts:
        raise SplitError(
            "bad-config",
            "has another length than layers and draft blocks",
            file="config.json",
            tensor="compress_ratios",
            found=len(ratios),
            wanted=layers + drafts,
        )
    engram = _numbers(text, "engram_layer_ids")
    columns = max(0, _number(text, "engram_max_ngram_size") - 1) * _number(text, "engram_n_heads")
    return Dims(
        **common,
        draft_layers=drafts,
        draft_experts=_number(text, "dspark_n_routed_experts"),
        kv_sources=_numbers(text, "kv_source_layer_ids"),
        index_sources=_numbers(text, "index_source_layer_ids"),
        engram_layers=engram,
        engram_columns=columns,
        engram_rows=columns * _number(text, "engram_head_dim"),
        engram_out=(_number(text, "hc_mult") + 1) * hidden,
    )


def scheme_named(name: str) -> Scheme:
    """The scheme of an engine. Raises SplitError for an unknown name."""
    if name not in SCHEMES:
        raise SplitError(
            "unknown-engine",
            "no scheme is known for this engine",
            tensor="engine",
            found=name,
            wanted=", ".join(SCHEMES),
        )
    return SCHEMES[name]


def fixed_shape_differences(scheme: Scheme, config: dict[str, Any]) -> list[str]:
    """Where the engine's own fixed-shape check would refuse (UnsupportedShapes); empty where it would not."""
    text = text_config(config)
    return [
        f"{key}: found {text.get(key)}, wanted {wanted}"
        for key, wanted in scheme.fixed_shapes.items()
        if text.get(key) != wanted
    ]


# --- division


def block_bounds(size: int, world: int, rank: int) -> Range:
    """Uneven whole 128-blocks: the first (blocks mod world) ranks take one more. The last block may be
    short."""
    blocks = -(-size // BLOCK)
    base, extra = divmod(blocks, world)
    first = rank * base + min(rank, extra)
    last = first + base + (1 if rank < extra else 0)
    return first * BLOCK, min(last * BLOCK, size)


def _check_cut(cut: Range, size: int, what: str, rank: int) -> Range:
    low, high = cut
    if low % BLOCK or (high % BLOCK and high != size) or high <= low:
        raise SplitError(
            "bad-cut",
            f"rank {rank} would take [{low}, {high}) of {size}",
            tensor=what,
            found=high - low,
            wanted=f"whole blocks of {BLOCK}, at least one a rank",
            remedy="choose a world size that divides it",
        )
    return cut


def refuse_world(scheme: Scheme, dims: Dims, world: int) -> None:
    """Raise SplitError where a world size cannot work, naming every dimension and number that fails."""
    names = ["heads"]
    if dims.o_groups:
        names.append("o_groups")
    if dims.engram_layers:
        names.append("engram_rows")
    if not 1 <= world <= 1024:
        raise SplitError("bad-world", "is no world size", tensor="world", found=world, wanted="1 or more")
    known = scheme.worlds
    ways = world if known is None or world not in known else known[world].inputs
    failing = []
    for name in names:
        key, count = dims.pieces(name)
        if count % ways:
            failing.append(f"{key} {count} = {ways} x {count // ways} + {count % ways}")
    if failing:
        raise SplitError(
            "bad-world",
            f"world {world} does not divide {'; '.join(failing)}",
            tensor="world",
            found=world,
            wanted="whole heads and groups on every rank",
            remedy=f"use world {', '.join(map(str, known))}"
            if known
            else "use a world size that divides them",
        )
    if known is not None and world not in known:
        raise SplitError(
            "bad-world",
            f"engine {scheme.name} does not know it",
            tensor="world",
            found=world,
            wanted=", ".join(map(str, known)),
            remedy="--engine plain_tp estimates it, nothing can launch it",
        )


class _Cutter:
    """Cuts of one rank in an engine's grid: world, rank, and where this rank stands in it."""

    def __init__(self, scheme: Scheme, dims: Dims, world: int, rank: int) -> None:
        self.dims = dims
        self.world, self.rank = world, rank
        self.grid = World(world) if scheme.worlds is None else scheme.worlds[world]
        self.row_rank = rank % self.grid.inputs
        self.pair = rank // self.grid.inputs
        self.even = scheme.worlds is not None

    def inputs(self, name: str) -> Range:
        """This rank's share of a dimension that ranks divide first."""
        size = self.dims.size(name)
        _key, count = self.dims.pieces(name)
        if name == "o_groups":
            return self.row_rank * count // self.grid.inputs, (self.row_rank + 1) * count // self.grid.inputs
        if self.even or name in ("heads", "o_width", "engram_rows"):
            cut = (self.row_rank * size // self.grid.inputs, (self.row_rank + 1) * size // self.grid.inputs)
            if size % self.grid.inputs:
                raise SplitError(
                    "bad-cut",
                    f"does not divide by {self.grid.inputs}",
                    tensor=name,
                    found=size,
                    wanted=f"a multiple of {self.grid.inputs * BLOCK}",
                )
        else:
            cut = block_bounds(size, self.grid.inputs, self.row_rank)
        return _check_cut(cut, size, name, self.rank)

    def outputs(self, cut: Range, name: str, whole: int) -> Range:
        """The pair's share of an output range, in whole 128-blocks, the first pair taking the odd one."""
        if self.grid.outputs == 1:
            return cut
        low, high = cut
        first, last = block_bounds(high - low, self.grid.outputs, self.pair)
        return _check_cut((low + first, low + last), whole, name, self.rank)

    def column(self, name: str, *, draft: bool) -> Range:
        """COLS of a matrix whose outputs are cut by a dimension."""
        cut = self.inputs(name)
        if draft:
            return cut
        cut = self.outputs(cut, name, self.dims.size(name))
        if name == "heads" and (cut[0] % self.dims.head_dim or cut[1] % self.dims.head_dim):
            raise SplitError(
                "bad-cut",
                "would cut inside a head",
                tensor="num_attention_heads",
                found=f"[{cut[0]}, {cut[1]})",
                wanted=f"multiples of {self.dims.head_dim}",
            )
        return cut

    def groups(self, *, draft: bool) -> range:
        """Output groups of this rank."""
        low, high = self.inputs("o_groups")
        if self.grid.outputs > 1 and not draft:
            if (high - low) % self.grid.outputs:
                raise SplitError(
                    "bad-cut",
                    "does not divide between the pairs",
                    tensor="o_groups",
                    found=high - low,
                    wanted=f"a multiple of {self.grid.outputs}",
                )
            each = (high - low) // self.grid.outputs
            low, high = low + self.pair * each, low + (self.pair + 1) * each
        return range(low, high)


def _block_parts(cutter: _Cutter, prefix: str, number: int, *, draft: bool, parity: bool) -> Iterator[Part]:
    """Parts of one layer or draft block in the engine's order."""
    dims = cutter.dims
    ratio = dims.ratios[number]
    marks = set()
    if number in dims.kv_sources:
        marks.add("kv")
        if ratio > 1:
            marks.add("ratio")
    if number in dims.index_sources:
        marks.add("index")
    if number in dims.engram_layers:
        marks.add("engram")
    grid = cutter.grid.outputs > 1 and not draft
    columns = cutter.column("heads", draft=draft)
    width = cutter.inputs("width")
    hidden = cutter.outputs((0, dims.hidden), "hidden", dims.hidden) if grid else None
    rest: Range | None = None
    if grid and parity:
        # The pairs keep an equal number of whole blocks; an odd last one goes to the owner of each expert.
        each = (width[1] - width[0]) // BLOCK // cutter.grid.outputs * BLOCK
        low = width[0] + cutter.pair * each
        main = _check_cut((low, low + each), dims.width, "width", cutter.rank)
        if width[0] + cutter.grid.outputs * each < width[1]:
            rest = (width[0] + cutter.grid.outputs * each, width[1])
    elif grid:
        main = cutter.outputs(width, "width", dims.width)
    else:
        main = width
    row_mode, column_mode = ("grid", "grid") if grid else ("row", "column")
    for item in _BLOCK:
        if item.when and not set(item.when.split()) <= marks:
            continue
        name = item.name.replace("{p}", prefix)
        cls = item.cls
        if draft:
            cls = {"routed": "mtp routed", "shared": "shared"}.get(cls, "mtp other")
        rule, _colon, dim = item.rule.partition(":")
        if rule == "whole":
            yield Part(name, item.kind, "replicated", None, None, item.convert, cls)
        elif rule == "column":
            yield Part(name, item.kind, column_mode, columns, None, "", cls)
        elif rule == "row":
            rows = cutter.inputs(dim)
            out = None
            if grid:
                out = (
                    hidden
                    if item.out == "hidden"
                    else cutter.outputs((0, dims.engram_out), item.out, dims.engram_out)
                )
            yield Part(name, item.kind, row_mode, out, rows, "", cls)
        elif rule == "group":
            for group in cutter.groups(draft=draft):
                yield Part(name.replace("{g}", str(group)), item.kind, "group", None, None, "", cls)
        else:
            count = (dims.draft_experts if draft else dims.experts) if "{e}" in name else 1
            for expert in range(count):
                base = name.replace("{e}", str(expert))
                for leaf in ("w1", "w3"):
                    yield Part(f"{base}.{leaf}", "exl3", column_mode, main, None, "", cls)
                yield Part(f"{base}.w2", "exl3", row_mode, hidden, width, "", cls)
                owner = expert % cutter.grid.outputs if "{e}" in name else cutter.grid.outputs - 1
                if rest is not None and owner == cutter.pair:
                    for leaf in ("w1", "w3"):
                        yield Part(f"{base}.{leaf}", "exl3", "grid", rest, None, "", cls)


def native_parts(
    scheme: Scheme, dims: Dims, world: int, rank: int, *, drafts: bool = True, parity: bool = False
) -> Iterator[Part]:
    """Every part of one rank in the order of the engine's rank file."""
    cutter = _Cutter(scheme, dims, world, rank)
    for item in _HEAD:
        cols = cutter.column("vocab", draft=False) if item.rule.startswith("column") else None
        mode = "replicated" if cols is None else ("grid" if cutter.grid.outputs > 1 else "column")
        yield Part(item.name, item.kind, mode, cols, None, item.convert, item.cls)
    for number in range(dims.layers):
        yield from _block_parts(cutter, f"layers.{number}", number, draft=False, parity=parity)
    if not drafts or not dims.draft_layers:
        return
    for number in range(dims.draft_layers):
        yield from _block_parts(cutter, f"mtp.{number}", dims.layers + number, draft=True, parity=False)
    for item in _DRAFT_TAIL:
        name = item.name.replace("{first}", "0").replace("{last}", str(dims.draft_layers - 1))
        yield Part(name, item.kind, "replicated", None, None, item.convert, item.cls)


# --- plain tensor parallelism: rules over the names that the headers really hold


class Rule(NamedTuple):
    """A name pattern of a model family (prefix without the EXL3 suffix), the cut, and the class."""

    pattern: str
    rule: str
    cls: str


_V4_COMMON: tuple[Rule, ...] = (
    Rule(r"embed\.weight", "rowof0:vocab", "embed"),
    Rule(r"norm\.weight", "whole", "norms"),
    Rule(r"head", "column:vocab", "head"),
    Rule(r"P\.hc_(attn|ffn)_(fn|scale|base)", "whole", "hc"),
    Rule(r"P\.(attn_norm|ffn_norm|attn\.q_norm|attn\.kv_norm)\.weight", "whole", "norms"),
    Rule(r"P\.attn\.attn_sink", "whole", "norms"),
    Rule(r"P\.attn\.(wq_a|wkv)", "whole", "latents"),
    Rule(r"P\.attn\.wq_b", "column:heads", "wq_b"),
    Rule(r"P\.attn\.wo_a\.slice\.(?P<group>\d+)", "group:o_groups", "wo_a"),
    Rule(r"P\.attn\.wo_b", "row:o_width", "wo_b"),
    Rule(r"P\.attn\.compressor\..+", "whole", "compressor"),
    Rule(r"P\.attn\.indexer\..+", "whole", "indexer"),
    Rule(r"P\.ffn\.gate\.(weight|bias|tid2eid)", "whole", "router"),
    Rule(r"P\.ffn\.experts\.\d+\.(w1|w3)", "column:width", "routed"),
    Rule(r"P\.ffn\.experts\.\d+\.w2", "row:width", "routed"),
    Rule(r"P\.ffn\.shared_experts\.(w1|w3)", "column:width", "shared"),
    Rule(r"P\.ffn\.shared_experts\.w2", "row:width", "shared"),
)

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "deepseek_v41": (
        *_V4_COMMON,
        Rule(r"P\.engram\.wkv", "row:engram_rows", "engram"),
        Rule(r"P\.engram\.(q_weight|k_weight)", "whole", "engram"),
        Rule(r"mtp\.\d+\.(main_proj|(main_norm|norm)\.weight)", "whole", "mtp other"),
        Rule(r"mtp\.\d+\.(markov_head|confidence_head)\..+\.weight", "whole", "mtp other"),
    ),
    "deepseek_v4": (
        *_V4_COMMON,
        Rule(r"hc_head_(fn|base|scale)", "whole", "hc"),
        Rule(
            r"mtp\.\d+\.(e_proj|h_proj|(enorm|hnorm|norm)\.weight|hc_head_(fn|base|scale))",
            "whole",
            "mtp other",
        ),
    ),
    "llama": (
        Rule(r"model\.embed_tokens\.weight", "rowof0:vocab", "embed"),
        Rule(r"model\.norm\.weight", "whole", "norms"),
        Rule(r"lm_head", "column:vocab", "head"),
        Rule(r"model\.layers\.\d+\.(input|post_attention)_layernorm\.weight", "whole", "norms"),
        Rule(r"model\.layers\.\d+\.self_attn\.q_proj", "column:heads", "attention"),
        Rule(r"model\.layers\.\d+\.self_attn\.(k|v)_proj", "column:kv", "attention"),
        Rule(r"model\.layers\.\d+\.self_attn\.o_proj", "row:heads", "attention"),
        Rule(r"model\.layers\.\d+\.mlp\.(gate|up)_proj", "column:width", "mlp"),
        Rule(r"model\.layers\.\d+\.mlp\.down_proj", "row:width", "mlp"),
    ),
}


def _cut_by(dims: Dims, rule: str, dim: str, size: int, *, world: int, rank: int, name: str) -> Range | None:
    """Range of one real dimension (its size comes from the trellis). None: every rank takes all of it."""
    if dim == "kv":
        each = size // world
        if dims.kv_heads % world or size % world or each % BLOCK:
            # One block cannot be cut: every rank keeps all KV heads and uses those of its own queries.
            return None
        return rank * each, (rank + 1) * each
    if dim in ("heads", "o_width", "engram_rows"):
        key, count = dims.pieces(dim)
        if size % world or size % count or count % world:
            raise SplitError(
                "bad-cut",
                f"{key} {count} does not divide by {world}",
                tensor=name,
                found=size,
                wanted=f"a multiple of {world}",
            )
        cut = (rank * size // world, (rank + 1) * size // world)
    else:
        cut = block_bounds(size, world, rank)
    if rule == "rowof0":
        return cut
    return _check_cut(cut, size, name, rank)


class Placed(NamedTuple):
    """A tensor (or one of an EXL3 matrix, by its leaf) with the rule that names it."""

    name: str
    leaf: str
    entry: LockTensor
    mode: str
    dim: str
    cls: str
    group: int


def classify(lock: ModelLock, dims: Dims, *, drafts: bool = True) -> tuple[list[Placed], list[str]]:
    """Rules over the names that the headers hold: placed tensors, and those that no rule names."""
    rules = [
        (re.compile(rule.pattern.replace("P\\.", r"(?:layers|mtp)\.\d+\.")), rule)
        for rule in FAMILIES[dims.model_type]
    ]
    placed: list[Placed] = []
    unplaced: list[str] = []
    tensors = lock.tensors
    for tensor, entry in tensors.items():
        prefix, _dot, leaf = tensor.rpartition(".")
        exl3 = leaf in _EXL3_LEAVES and prefix + ".trellis" in tensors
        if exl3 and leaf not in ("trellis", "bias"):
            continue
        name = prefix if exl3 else tensor
        if name.startswith("mtp.") and not drafts:
            continue
        for pattern, rule in rules:
            match = pattern.fullmatch(name)
            if match:
                mode, _colon, dim = rule.rule.partition(":")
                cls = "mtp routed" if rule.cls == "routed" and name.startswith("mtp.") else rule.cls
                group = int(match["group"]) if mode == "group" else 0
                placed.append(Placed(name, leaf if exl3 else "", entry, mode, dim, cls, group))
                break
        else:
            unplaced.append(tensor)
    return placed, unplaced


_EXL3_LEAVES = frozenset(("trellis", "suh", "svh", "mul1", "mcg", "bias"))


def family_parts(
    placed: list[Placed], tensors: dict[str, LockTensor], dims: Dims, world: int, rank: int
) -> Iterator[Part]:
    """Plain tensor parallelism: parts of one rank."""
    for item in placed:
        yield from _family_part(item, tensors, dims, world, rank)


def _family_part(
    item: Placed, tensors: dict[str, LockTensor], dims: Dims, world: int, rank: int
) -> Iterator[Part]:
    name, leaf, entry, mode, dim, cls, group = item
    kind = "exl3" if leaf == "trellis" else "plain"
    tensor = f"{name}.{leaf}" if leaf == "bias" else name
    if mode == "group":
        if group // (dims.o_groups // world) == rank:
            yield Part(tensor, kind, "group", None, None, "", cls)
        return
    if mode == "rowof0":
        cut = _cut_by(dims, mode, dim, entry.shape[0], world=world, rank=rank, name=name)
        if cut is not None and cut[1] > cut[0]:
            yield Part(tensor, kind, "row", None, cut, "", cls)
        return
    shape = tensors[name + ".trellis"].shape if leaf else ()
    if mode == "whole" or not leaf:
        if mode != "whole":
            raise SplitError(
                "not-quantized",
                f"must be cut by {dim}, but is no EXL3 matrix",
                file=entry.file,
                tensor=name,
                found=entry.dtype,
                wanted="trellis, suh and svh",
            )
        yield Part(tensor, kind, "replicated", None, None, "", cls)
        return
    axis = 1 if mode == "column" else 0
    cut = _cut_by(dims, mode, dim, shape[axis] * TILE, world=world, rank=rank, name=name)
    if cut is None:
        yield Part(tensor, kind, "replicated", None, None, "", cls)
    elif leaf == "bias":
        if mode == "column":
            yield Part(tensor, "plain", "column", None, cut, "", cls)
        elif rank == 0:
            # Row-parallel partial sums are added up: a bias on every rank would count several times.
            yield Part(tensor, "plain", "first", None, None, "", cls)
    else:
        yield Part(
            tensor, kind, mode, cut if mode == "column" else None, cut if mode == "row" else None, "", cls
        )


# --- layout


@dataclass
class RankLayout:
    """What one rank holds. Bytes count data alone; ``file_bytes`` adds index and footer where there is a
    rank file."""

    rank: int
    world: int
    entries: int
    data_bytes: int
    draft_bytes: int
    classes: dict[str, int]
    index_bytes: int = 0
    index_sha256: str = ""
    file_name: str = ""
    file_bytes: int = 0
    uneven: bool = False
    parts: list[tuple[Part, int]] = field(default_factory=list)
    index_text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The rank's row of the plan."""
        return {
            "rank": self.rank,
            "entries": self.entries,
            "data_bytes": self.data_bytes,
            "draft_bytes": self.draft_bytes,
            "index_bytes": self.index_bytes,
            "index_sha256": self.index_sha256,
            "file_bytes": self.file_bytes,
            "file_name": self.file_name,
            "classes": dict(sorted(self.classes.items(), key=lambda item: -item[1])),
            "uneven": self.uneven,
        }


def _missing(key: str, name: str) -> SplitError:
    remedy = "fetch the shard that holds it"
    return SplitError(
        "missing-tensor", f"is missing (the engine says {key}: MissingTensor)", tensor=name, remedy=remedy
    )


#: One row of a rank file's index without what changes from tensor to tensor: the end of its key, dtype and shape as
#: the index writes them, bytes.
Row = tuple[str, str, int]
#: Rows by shapes and cut: an expert has the rows of every other expert.
Seen = dict[tuple[Any, ...], list[Row]]


def _matrix(part: Part, tensors: dict[str, LockTensor], seen: Seen) -> list[Row]:
    """The three rows of an EXL3 matrix."""
    name, cols, rows = part.name, part.cols, part.rows
    try:
        trellis, suh, svh = tensors[name + ".trellis"], tensors[name + ".suh"], tensors[name + ".svh"]
    except KeyError as error:
        raise _missing(f"{name}|{cols}|{rows}|tr", str(error.args[0])) from None
    what = (trellis.dtype, trellis.shape, suh.dtype, suh.shape, svh.dtype, svh.shape, cols, rows)
    if what not in seen:
        seen[what] = _matrix_rows(part, trellis, suh, svh)
    return seen[what]


def _matrix_rows(part: Part, trellis: LockTensor, suh: LockTensor, svh: LockTensor) -> list[Row]:
    """Check a matrix and its cut, and say its rows. Raises SplitError."""
    name, cols, rows = part.name, part.cols, part.rows
    if trellis.dtype != "I16" or len(trellis.shape) != 3 or suh.dtype != "F16" or svh.dtype != "F16":
        raise SplitError(
            "bad-matrix",
            "is no EXL3 matrix",
            file=trellis.file,
            tensor=name,
            found=f"{trellis.dtype} {list(trellis.shape)}, suh {suh.dtype}, svh {svh.dtype}",
            wanted="I16 [k/16, n/16, 16*K], F16, F16",
        )
    depth, breadth, last = trellis.shape
    k, n = depth * TILE, breadth * TILE
    if suh.shape != (k,) or svh.shape != (n,):
        raise SplitError(
            "bad-matrix",
            "suh or svh does not fit its trellis",
            file=trellis.file,
            tensor=name,
            found=f"suh {list(suh.shape)}, svh {list(svh.shape)}",
            wanted=f"[{k}] and [{n}]",
        )
    if cols is not None:
        if cols[1] > n:
            raise SplitError(
                "bad-cut",
                "is narrower than the config says",
                file=trellis.file,
                tensor=name,
                found=f"{n} columns",
                wanted=f"{cols[1]} or more",
            )
        n, breadth = cols[1] - cols[0], (cols[1] - cols[0]) // TILE
    if rows is not None:
        if rows[1] > k:
            raise SplitError(
                "bad-cut",
                "is shorter than the config says",
                file=trellis.file,
                tensor=name,
                found=f"{k} rows",
                wanted=f"{rows[1]} or more",
            )
        k, depth = rows[1] - rows[0], (rows[1] - rows[0]) // TILE
    cut = f"|{cols}|{rows}|"
    return [
        (cut + "tr", f'"int16", [{depth}, {breadth}, {last}]', depth * breadth * last * 2),
        (cut + "suh", f'"float16", [{k}]', k * 2),
        (cut + "svh", f'"float16", [{n}]', n * 2),
    ]


def _plain(part: Part, tensors: dict[str, LockTensor], *, rank_file: bool) -> list[Row]:
    """The one row of a plain tensor."""
    end = f"|torch.{TORCH_NAMES[part.convert]}" if part.convert else "|None"
    entry = tensors.get(part.name)
    if entry is None:
        raise _missing(part.name + end, part.name)
    dtype = part.convert or entry.dtype
    if rank_file and dtype not in TORCH_NAMES:
        raise SplitError(
            "unsupported-dtype",
            "cannot be in a rank file",
            file=entry.file,
            tensor=part.name,
            found=dtype,
            wanted=" ".join(TORCH_NAMES),
        )
    shape = list(entry.shape)
    if part.rows is not None:
        shape[0] = part.rows[1] - part.rows[0]
    return [(end, f'"{TORCH_NAMES.get(dtype, dtype)}", {shape}', tensor_bytes(dtype, tuple(shape)))]


def lay_out(
    scheme: Scheme, parts: Iterator[Part], tensors: dict[str, LockTensor], world: int, rank: int
) -> RankLayout:
    """Entries, bytes, index and file name of one rank, from its parts."""
    quote = json.encoder.encode_basestring_ascii
    index: list[str] = []
    seen: Seen = {}
    classes: dict[str, int] = {}
    table: list[tuple[Part, int]] = []
    offset = entries = draft_bytes = 0
    for part in parts:
        if part.kind == "exl3":
            found = _matrix(part, tensors, seen)
        else:
            found = _plain(part, tensors, rank_file=scheme.rank_file)
        before = offset
        for end, text, count in found:
            if scheme.rank_file:
                index.append(f"[{quote(part.name + end)}, {text}, {offset}, {count}]")
            offset += count
        size = offset - before
        entries += len(found)
        table.append((part, size))
        classes[part.cls] = classes.get(part.cls, 0) + size
        if part.name.startswith("mtp."):
            draft_bytes += size
    layout = RankLayout(rank, world, entries, offset, draft_bytes, classes, file_bytes=offset, parts=table)
    if scheme.rank_file:
        # As Python's json writes a list of lists, in a third of its time.
        text = f"[{', '.join(index)}]"
        raw = text.encode()
        layout.index_text = text
        layout.index_bytes = len(raw)
        layout.index_sha256 = hashlib.sha256(raw).hexdigest()
        layout.file_name = f"rank{rank}of{world}-{layout.index_sha256[:NAME_DIGITS]}.bin"
        layout.file_bytes = offset + len(raw) + RANK_FILE_FOOTER
    return layout


@dataclass
class Split:
    """All ranks of a replica, and what the checkpoint holds beside the language model."""

    engine: str
    world: int
    drafts: bool
    parity: bool
    dims: Dims
    ranks: list[RankLayout]
    vision_bytes: int
    unplaced: list[str]
    warnings: list[str]

    def parts_of(self, rank: int) -> list[tuple[Part, int]]:
        """(part, bytes) of one rank in load order."""
        return self.ranks[rank].parts


def _beside(lock: ModelLock, used: set[str], *, drafts: bool) -> list[str]:
    """Tensors that no part reads: vision, mostly. Markers, Engram tables and image routing are known and
    left out."""
    left = []
    for name in lock.tensors:
        prefix, _dot, leaf = name.rpartition(".")
        if name in used or (leaf in ("trellis", "suh", "svh", "mul1", "mcg") and prefix in used):
            continue
        if ".engram.embed." in name or leaf == "bias_vl" or (name.startswith("mtp.") and not drafts):
            continue
        left.append(name)
    return left


def plan_split(
    lock: ModelLock, engine: str, world: int, *, drafts: bool = True, parity: bool = False
) -> Split:
    """Cut a checkpoint for every rank of a replica. Raises SplitError with the dimension or tensor that
    fails."""
    # Hundreds of thousands of rows and no cycles: the collector would only walk them again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _plan_split(lock, engine, world, drafts=drafts, parity=parity)
    finally:
        if collecting:
            gc.enable()


def _plan_split(
    lock: ModelLock, engine: str, world: int, *, drafts: bool = True, parity: bool = False
) -> Split:
    """Cut a checkpoint for every rank of a replica. Raises SplitError with the dimension or tensor that
    fails."""
    scheme = scheme_named(engine)
    kind = model_type(lock.config)
    dims = read_dims(lock.config)
    if kind not in scheme.models:
        raise SplitError(
            "wrong-model",
            f"engine {engine} does not read it",
            file="config.json",
            tensor="model_type",
            found=kind,
            wanted=", ".join(scheme.models),
        )
    quant = lock.config.get("quantization_config")
    quant = quant if isinstance(quant, dict) else text_config(lock.config).get("quantization_config")
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    codebook = quant.get("codebook", "") if isinstance(quant, dict) else None
    books = " or ".join(filter(None, scheme.codebooks))
    if method not in scheme.quant_methods or codebook not in scheme.codebooks:
        raise SplitError(
            "wrong-quantization",
            f"engine {engine} does not read this quantization",
            file="config.json",
            tensor="quantization_config",
            found=f"{method} {codebook}",
            wanted=f"{' or '.join(scheme.quant_methods)} with codebook {books}",
        )
    refuse_world(scheme, dims, world)
    if parity and not (scheme.worlds and scheme.worlds[world].parity):
        raise SplitError(
            "bad-parity", "needs a 2D split", tensor="parity", found=f"world {world}", wanted="world 4"
        )
    tensors = lock.tensors
    warnings = audit(lock)
    ranks: list[RankLayout] = []
    placed: list[Placed] = []
    unplaced: list[str] = []
    if not scheme.rank_file:
        placed, unplaced = classify(lock, dims, drafts=drafts)
    for rank in range(world):
        if scheme.rank_file:
            parts = native_parts(scheme, dims, world, rank, drafts=drafts, parity=parity)
        else:
            parts = family_parts(placed, tensors, dims, world, rank)
        ranks.append(lay_out(scheme, parts, tensors, world, rank))
    if scheme.rank_file:
        used = {part.name for layout in ranks for part, _size in layout.parts}
        unplaced = _beside(lock, used, drafts=drafts)
    else:
        unplaced = [n for n in unplaced if ".engram.embed." not in n and not n.endswith("bias_vl")]
    vision = isinstance(lock.config.get("vision_config"), dict)
    if unplaced and not vision:
        if not scheme.rank_file:
            raise SplitError(
                "unknown-tensor",
                f"{len(unplaced)} tensors have no rule for {kind}",
                file=tensors[unplaced[0]].file,
                tensor=unplaced[0],
                found=tensors[unplaced[0]].dtype,
                remedy="nothing is guessed: add the rule to the planner",
            )
        warnings.append(f"{len(unplaced)} tensors are read by nothing, the first is {unplaced[0]}")
    vision_bytes = sum(tensor_bytes(tensors[n].dtype, tensors[n].shape) for n in unplaced) if vision else 0
    sizes = {layout.data_bytes for layout in ranks}
    for layout in ranks:
        layout.uneven = len(sizes) > 1
    return Split(engine, world, drafts, parity, dims, ranks, vision_bytes, unplaced, warnings)


# --- what the engine's own tool does not see


def audit(lock: ModelLock) -> list[str]:
    """Faults of a checkpoint that the engine's index mode accepts and that hurt later; warnings, one line
    each.

    Refusals (raised) are: a router gate that is not F16, a tensor that cannot become F32, bit widths EXL3
    lacks.
    """
    warnings: list[str] = []
    tensors = lock.tensors
    shadowed = lock.shadowed
    if shadowed:
        tensor, loser = min(shadowed)
        warnings.append(
            f"{len(shadowed)} tensors are in several shards, the last in byte order wins: "
            f"{tensor} is read from {tensors[tensor].file}, not from {loser}"
        )
    foreign = sorted({entry.file for entry in tensors.values() if entry.dtype.startswith("F8_")})
    if foreign and model_type(lock.config) == "deepseek_v41":
        raise SplitError(
            "foreign-shard",
            "holds F8 tensors; the engine refuses the whole folder (UnsupportedDType)",
            file=foreign[0],
            found="F8",
            wanted="EXL3 shards only",
            remedy="keep Engram tables in another folder",
        )
    exl3 = _is_exl3(lock)
    for name, entry in tensors.items():
        if exl3 and entry.dtype != "F16" and name.endswith(".ffn.gate.weight"):
            raise SplitError(
                "bad-gate",
                "the router gate cannot be converted (the engine fails after writing for minutes)",
                file=entry.file,
                tensor=name,
                found=entry.dtype,
                wanted="F16",
            )
        if exl3 and entry.dtype not in ("F16", "F32") and name.endswith(_F32_NAMES):
            raise SplitError(
                "bad-conversion",
                "cannot be widened to F32",
                file=entry.file,
                tensor=name,
                found=entry.dtype,
                wanted="F16 or F32",
            )
        if (
            name.endswith(".trellis")
            and entry.shape
            and (entry.shape[-1] % 8 or not 16 <= entry.shape[-1] <= 128)
        ):
            raise SplitError(
                "bad-bits",
                "has a bit width that EXL3 does not have",
                file=entry.file,
                tensor=name,
                found=f"{entry.shape[-1]}/16",
                wanted="1 to 8 bits in halves",
            )
    return warnings


#: Plain tensors that the engine keeps as F32 (its own plan).
_F32_NAMES = (
    ".hc_attn_fn", ".hc_attn_scale", ".hc_attn_base", ".hc_ffn_fn", ".hc_ffn_scale", ".hc_ffn_base",
    ".attn_sink", ".indexer.weights_proj.weight", ".ffn.gate.bias", ".engram.q_weight", ".engram.k_weight",
)  # fmt: skip


def _is_exl3(lock: ModelLock) -> bool:
    quant = lock.config.get("quantization_config")
    return (
        isinstance(quant, dict) and quant.get("quant_method") == "exl3" and model_type(lock.config) != "llama"
    )


def bits_of(trellis: tuple[int, ...]) -> float:
    """Bits a weight of an EXL3 matrix, from the shape of its trellis."""
    return trellis[2] / TILE


def matrix_bytes(k: int, n: int, bits: float, *, bias: bool = False) -> int:
    """Stored bytes of one EXL3 matrix with its marker: k*n*K/8 + 2(k+n) + 4, and 2n with a bias."""
    return int(k * n * bits / 8) + 2 * (k + n) + 4 + (2 * n if bias else 0)


def parse_index(text: str) -> list[list[Any]]:
    """The rows of an index as the engine's tool prints it. Raises SplitError."""
    try:
        rows = json.loads(text)
    except ValueError:
        raise SplitError("bad-index", "the engine's index is not JSON", found=text[:60]) from None
    if not isinstance(rows, list):
        raise SplitError("bad-index", "the engine's index is no list", found=type(rows).__name__)
    return rows


def compare_index(layout: RankLayout, engine_text: str, node: str = "") -> None:
    """On a node the engine's ``--index-only`` decides: raise SplitError at the first row that differs."""
    if engine_text == layout.index_text:
        return
    ours, theirs = parse_index(layout.index_text), parse_index(engine_text)
    for number, (wanted, found) in enumerate(zip(ours, theirs)):
        if wanted != found:
            raise SplitError(
                "index-mismatch",
                f"row {number} of the engine's index is not the plan's",
                file=node,
                tensor=str(wanted[0]),
                found=found,
                wanted=wanted,
                remedy="the engine's build and this collection disagree: do not write the rank file",
            )
    raise SplitError(
        "index-mismatch",
        "the engine's index has another length",
        file=node,
        found=len(theirs),
        wanted=len(ours),
    )
