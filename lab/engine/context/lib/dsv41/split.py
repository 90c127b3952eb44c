"""Which entries the rank file of one rank holds, in the engine's load order.

World 1 and 2 cut experts by width, heads by column, outputs by row. World 4 is two such pairs: inputs stay
cut as at world 2 and outputs are cut once more between the pairs, in whole 128-column blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .modelconfig import ModelConfig

BLOCK = 128
TILE = 16
Range = tuple[int, int]


@dataclass(frozen=True)
class Plain:
    """A tensor taken whole; `convert` is None, "torch.float32" or "torch.float16"."""

    name: str
    convert: str | None

    @property
    def key(self) -> str:
        return f"{self.name}|{self.convert}"


@dataclass(frozen=True)
class Matrix:
    """An EXL3 matrix, cut to output columns and input rows (None: whole).

    `k` and `n` are the dimensions that the engine compares with the trellis (None: not compared).
    """

    name: str
    cols: Range | None
    rows: Range | None
    k: int | None
    n: int | None

    def key(self, part: str) -> str:
        return f"{self.name}|{self.cols}|{self.rows}|{part}"


Entry = Plain | Matrix


@dataclass(frozen=True)
class Cuts:
    """The ranges of one rank for one kind of block."""

    wq_b: Range
    slices: Range
    wo_b_cols: Range | None
    wo_b_rows: Range
    up: Range
    down_cols: Range | None
    down_rows: Range
    engram_cols: Range | None
    engram_rows: Range
    rest: Range | None
    pair: int


def part(total: int, world: int, rank: int) -> Range:
    return rank * total // world, (rank + 1) * total // world


def halve(span: Range, pair: int) -> Range:
    """One pair's share of a range: whole blocks, the first pair takes the odd one."""
    blocks = (span[1] - span[0]) // BLOCK
    middle = span[0] + (blocks + 1) // 2 * BLOCK
    return (span[0], middle) if pair == 0 else (middle, span[1])


def plain_cuts(config: ModelConfig, rank: int, world: int) -> Cuts:
    up = part(config.width, world, rank)
    return Cuts(
        wq_b=part(config.heads * config.head_dim, world, rank),
        slices=part(config.groups, world, rank),
        wo_b_cols=None,
        wo_b_rows=part(config.groups * config.o_rank, world, rank),
        up=up,
        down_cols=None,
        down_rows=up,
        engram_cols=None,
        engram_rows=part(config.hash_columns * config.engram_dim, world, rank),
        rest=None,
        pair=0,
    )


def pair_cuts(config: ModelConfig, rank: int, pair: int, parity: bool) -> Cuts:
    base = plain_cuts(config, rank, 2)
    up, rest = halve(base.up, pair), None
    if parity:
        blocks = (base.up[1] - base.up[0]) // BLOCK
        each = blocks // 2 * BLOCK
        up = (base.up[0] + pair * each, base.up[0] + (pair + 1) * each)
        if blocks % 2:
            rest = (base.up[0] + 2 * each, base.up[1])
    slices = part(base.slices[1] - base.slices[0], 2, pair)
    return Cuts(
        wq_b=halve(base.wq_b, pair),
        slices=(base.slices[0] + slices[0], base.slices[0] + slices[1]),
        wo_b_cols=halve((0, config.hidden), pair),
        wo_b_rows=base.wo_b_rows,
        up=up,
        down_cols=halve((0, config.hidden), pair),
        down_rows=base.down_rows,
        engram_cols=halve((0, (config.mult + 1) * config.hidden), pair),
        engram_rows=base.engram_rows,
        rest=rest,
        pair=pair,
    )


def _block(config: ModelConfig, index: int, cuts: Cuts) -> Iterator[Entry]:
    draft = index >= config.layers
    p = f"mtp.{index - config.layers}" if draft else f"layers.{index}"
    hidden = config.hidden
    for name in ("attn", "ffn"):
        for tail in ("fn", "scale", "base"):
            yield Plain(f"{p}.hc_{name}_{tail}", "torch.float32")
    yield Plain(f"{p}.attn_norm.weight", None)
    yield Plain(f"{p}.ffn_norm.weight", None)
    yield Matrix(f"{p}.attn.wq_a", None, None, hidden, config.q_rank)
    yield Plain(f"{p}.attn.q_norm.weight", None)
    yield Matrix(f"{p}.attn.wq_b", cuts.wq_b, None, config.q_rank, None)
    yield Matrix(f"{p}.attn.wkv", None, None, hidden, config.head_dim)
    yield Plain(f"{p}.attn.kv_norm.weight", None)
    yield Plain(f"{p}.attn.attn_sink", "torch.float32")
    slice_inputs = config.heads // config.groups * config.head_dim
    for group in range(*cuts.slices):
        yield Matrix(f"{p}.attn.wo_a.slice.{group}", None, None, slice_inputs, config.o_rank)
    yield Matrix(f"{p}.attn.wo_b", cuts.wo_b_cols, cuts.wo_b_rows, None, hidden)
    if index in config.kv_sources:
        yield Matrix(f"{p}.attn.compressor.wkv", None, None, hidden, None)
        yield Plain(f"{p}.attn.compressor.norm.weight", None)
        if config.ratios[index] > 1:
            yield Matrix(f"{p}.attn.compressor.wgate", None, None, hidden, None)
    if index in config.index_sources:
        yield Matrix(f"{p}.attn.indexer.wq_b", None, None, config.q_rank, None)
        yield Plain(f"{p}.attn.indexer.weights_proj.weight", "torch.float32")
        if index in config.kv_sources:
            yield Matrix(f"{p}.attn.indexer.wk", None, None, config.head_dim, config.index_dim)
            yield Plain(f"{p}.attn.indexer.k_norm.weight", None)
    yield Plain(f"{p}.ffn.gate.weight", "torch.float16")
    yield Plain(f"{p}.ffn.gate.bias", "torch.float32")
    experts = config.draft_experts if draft else config.experts
    for number in range(experts + 1):
        shared = number == experts
        e = f"{p}.ffn.shared_experts" if shared else f"{p}.ffn.experts.{number}"
        yield Matrix(f"{e}.w1", cuts.up, None, hidden, None)
        yield Matrix(f"{e}.w3", cuts.up, None, hidden, None)
        yield Matrix(f"{e}.w2", cuts.down_cols, cuts.down_rows, None, hidden)
        # The odd block of a parity split belongs to one pair an expert: by number, the shared one to pair 1.
        if cuts.rest is not None and cuts.pair == (1 if shared else number % 2):
            yield Matrix(f"{e}.w1", cuts.rest, None, hidden, None)
            yield Matrix(f"{e}.w3", cuts.rest, None, hidden, None)
    if index in config.engram_layers:
        yield Matrix(f"{p}.engram.wkv", cuts.engram_cols, cuts.engram_rows, None, None)
        yield Plain(f"{p}.engram.q_weight", "torch.float32")
        yield Plain(f"{p}.engram.k_weight", "torch.float32")


def entries(config: ModelConfig, rank: int, world: int, parity: bool, dspark: bool) -> Iterator[Entry]:
    """Every entry of the rank file of `rank` of `world`, in order."""
    if world == 4:
        half, pair = rank % 2, rank // 2
        cuts, draft_cuts = pair_cuts(config, half, pair, parity), plain_cuts(config, half, 2)
        head = halve(part(config.vocab, 2, half), pair)
    else:
        cuts = draft_cuts = plain_cuts(config, rank, world)
        head = part(config.vocab, world, rank)
    yield Plain("embed.weight", None)
    yield Plain("norm.weight", None)
    yield Matrix("head", head, None, config.hidden, None)
    for index in range(config.layers):
        yield from _block(config, index, cuts)
    if not dspark:
        return
    for index in range(config.layers, config.blocks):
        yield from _block(config, index, draft_cuts)
    last = config.drafts - 1
    yield Matrix("mtp.0.main_proj", None, None, config.taps * config.hidden, config.hidden)
    yield Plain("mtp.0.main_norm.weight", None)
    yield Plain(f"mtp.{last}.norm.weight", None)
    yield Plain(f"mtp.{last}.markov_head.embed.weight", None)
    yield Plain(f"mtp.{last}.markov_head.head.weight", None)
    yield Plain(f"mtp.{last}.confidence_head.proj.weight", None)
