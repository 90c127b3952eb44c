# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The memory budget of a node: what is left while the model loads, idles and works hardest.

    load       = rank file + vision (rank 0) + runtime + KV pool + RoPE tables
    idle after = available - load - growth
    worst      = idle after - dip - chunk - drift

set against the redline under which the guard stops the replica. Rank file, vision, KV and RoPE follow from
headers and config (exact). Runtime, growth, dip and drift were measured on other builds of the engine and
are transferred: they warn, and refuse only after a first start on this very replica has replaced them
(`calibrate`). The engine's own admission rule and the start gate are exact and refuse.

All memory is /proc/meminfo's MemAvailable in GiB (2^30 bytes): nvidia-smi knows no totals on a GB10.

Sources are named as docs/plan-residuals.md names them (JAY, SOUM, SFX, ZACK).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .safetensors import PlanError
from .split import Dims

GIB = 1 << 30
#: Every request takes whole steps of the engine's pool, so contexts are judged and advised in them.
POOL_STEP = 2048


class BudgetError(PlanError):
    """A budget that cannot be computed: an impossible number, or a model whose cache is not known."""


class Constant(NamedTuple):
    """A number with its origin. confidence: exact, measured (on this kind of node), transferred, assumed."""

    value: float
    unit: str
    confidence: str
    source: str


#: Every number of the memory budget that is not derived from headers and config.
CONSTANTS: dict[str, Constant] = {
    "runtime_gib": Constant(1.0, "GiB", "transferred", "JAY budget.zig: CUDA and NCCL, +-0.5"),
    "growth_head_gib": Constant(
        1.9, "GiB", "transferred", "JAY budget.zig Serve.measured, head after the load"
    ),
    "growth_worker_gib": Constant(1.7, "GiB", "transferred", "JAY budget.zig Serve.measured, worker"),
    "dip_head_gib": Constant(
        4.9, "GiB", "transferred", "JAY budget.zig Serve.measured, head, 4 x 1M prefills"
    ),
    "dip_worker_gib": Constant(4.2, "GiB", "transferred", "JAY budget.zig Serve.measured, worker"),
    "chunk_gib": Constant(
        1.133, "GiB a chunk of 2048", "transferred", "JAY budget.zig: 0.533 device + 0.6 host"
    ),
    "drift_gib": Constant(
        0.0, "GiB", "assumed", "0 to 2.1 in long runs (SOUM MEMORY.md: +2.13 GiB in 2 h 49 min)"
    ),
    "margin_gib": Constant(1.0, "GiB", "assumed", "the error of the transferred constants together"),
    "redline_gib": Constant(4.0, "GiB", "measured", "seed: MEMGUARD_GIB=4; JAY and ZACK hard floor 4"),
    "reserve_least_gib": Constant(4.0, "GiB", "exact", "engine cuda_memory.zig: max(4 GiB, total/10)"),
    "reserve_share": Constant(0.1, "of MemTotal", "exact", "engine cuda_memory.zig: max(4 GiB, total/10)"),
    "mem_total_gib": Constant(121.0, "GiB", "measured", "MemTotal 126,877,032 kB (JAY kv/budget.zig test)"),
    "available_head_gib": Constant(114.0, "GiB", "assumed", "SFX free-preboot.txt: idle desktop head"),
    "available_worker_gib": Constant(116.0, "GiB", "assumed", "SFX free-preboot.txt: idle worker"),
    "available_headless_gib": Constant(
        117.0, "GiB", "assumed", "a head without its desktop: 111 seen with about 6 GiB of other software"
    ),
    "desktop_gib": Constant(6.0, "GiB", "measured", "seed: GNOME and background tools consume about 6 GB"),
    "prepare_gib": Constant(
        5.0, "GiB", "measured", "the engine's rank-file tool: 4.2 GB of memory while writing"
    ),
    "floor_least_gib": Constant(2.5, "GiB", "measured", "SOUM: the lowest engine floor in the field"),
}
CHUNK = 2048
#: Digits of results, and of the terms that a later judgement starts from.
DIGITS, TERM_DIGITS = 3, 6
#: An admission that passes by less than this is told (GiB).
TIGHT_GIB = 0.5
#: No smaller prefill chunk is advised.
LEAST_CHUNK = 512
#: A lever that buys less is not listed (GiB).
LEAST_GAIN = 0.005

# --- caches

#: Rows a decode round takes beyond the prompt (engine: R).
DECODE_ROWS = 16
#: Extra rows a slot keeps (SOUM capacity.py).
SLOT_ROWS = 12
#: RoPE: four tables (plain and compressed, cos and sin) of F32.
ROPE_TABLES = 4
#: Rows of a kit's RoPE tables beyond the context: those of a round and one (the engine says ShortRopeTable).
ROPE_EXTRA_ROWS = DECODE_ROWS + 1
_F32 = 4
_BF16 = 2
#: Rows of a window ring beyond the window, and rows of raw compressor input a slot (SOUM capacity.py).
_RING_EXTRA = 16
_COMPRESSOR_ROWS = 64
_TOKEN_ID = 8

KV_FORMATS = ("fp4", "fp8", "fp8_split", "bf16")


def kv_row_bytes(kind: str, head_dim: int, index_dim: int, rope_dim: int = 64) -> tuple[int, int]:
    """Bytes of a compressed KV row and of an index row.

    fp4: E2M1 codes with an E4M3 scale for 16 values, index E2M1 with an E8M0 scale for 32. fp8: vLLM's
    fp8_ds_mla, RoPE part in BF16 and 8 bytes of scales; index 128 codes and an F32 scale.
    """
    if kind == "fp4":
        return head_dim // 2 + head_dim // 16, index_dim // 2 + index_dim // 32
    if kind == "fp8":
        return head_dim - rope_dim + rope_dim * 2 + 8, index_dim + 4
    if kind == "fp8_split":
        return (head_dim - rope_dim + rope_dim * 2 + 8) // 2, index_dim + 4
    if kind == "bf16":
        return head_dim * 2, index_dim * 2
    raise BudgetError("bad-kv", "is no cache format", tensor="kv", found=kind, wanted=", ".join(KV_FORMATS))


def pool_rows(context: int, slots: int) -> int:
    """Rows of TensorFold's shared pool: context plus what slots need to start anywhere, in steps of 2048."""
    rows = context + slots * (DECODE_ROWS + SLOT_ROWS) + (slots - 1) * (POOL_STEP - 1)
    return -(-rows // POOL_STEP) * POOL_STEP


@dataclass(frozen=True)
class CacheShape:
    """What a model caches, from its config: rows a token per source layer, and the fixed part of a slot."""

    head_dim: int
    index_dim: int
    rope_dim: int
    window: int
    layers: int
    ratios: tuple[int, ...]
    max_positions: int
    kv_heads: int = 0
    indexed: tuple[bool, ...] = ()


def _int(text: dict[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BudgetError(
            "bad-config", "is missing or no whole number", file="config.json", tensor=key, found=value
        )
    return value


def cache_shape(dims: Dims, text: dict[str, Any]) -> CacheShape:
    """The cache of a model. Raises BudgetError naming the config key that is missing."""
    longest = _int(text, "max_position_embeddings")
    if dims.model_type == "llama":
        return CacheShape(dims.head_dim, 0, dims.head_dim, 0, dims.layers, (), longest, dims.kv_heads)
    index_dim, rope = _int(text, "index_head_dim"), _int(text, "qk_rope_head_dim")
    window = _int(text, "sliding_window")
    if dims.model_type == "deepseek_v4":
        # V4 keeps a compressed cache in every layer that compresses; only ratio 4 has an indexer (headers of
        # the quantized sample: indexer.* exists there alone).
        ratios = tuple(ratio for ratio in dims.ratios if ratio)
        shown = tuple(ratio == 4 for ratio in ratios)
        return CacheShape(dims.head_dim, index_dim, rope, window, dims.layers, ratios, longest, 0, shown)
    ratios = tuple(dims.ratios[layer] for layer in dims.kv_sources if layer < len(dims.ratios))
    if len(ratios) != len(dims.kv_sources) or not all(ratios):
        raise BudgetError(
            "bad-config",
            "names a layer that does not compress",
            file="config.json",
            tensor="kv_source_layer_ids",
            found=list(dims.kv_sources),
        )
    return CacheShape(
        dims.head_dim, index_dim, rope, window, dims.layers, ratios, longest, 0, tuple(True for _ in ratios)
    )


class Caches(NamedTuple):
    """KV pool rows, KV bytes and RoPE table bytes of one rank."""

    rows: int
    kv_bytes: int
    rope_bytes: int


def caches(shape: CacheShape, kind: str, context: int, slots: int, world: int = 1) -> Caches:
    """Bytes of KV pool and RoPE tables on every rank (replicated: one latent serves all heads)."""
    if context < 1 or slots < 1:
        raise BudgetError(
            "bad-number", "must be 1 or more", tensor="context, parallel", found=f"{context}, {slots}"
        )
    rows = pool_rows(context, slots)
    if shape.kv_heads:
        heads = shape.kv_heads // world if shape.kv_heads % world == 0 else shape.kv_heads
        return Caches(rows, 2 * rows * slots * shape.layers * heads * shape.head_dim * _BF16, 0)
    row, index = kv_row_bytes(kind, shape.head_dim, shape.index_dim, shape.rope_dim)
    pool = 0.0
    for ratio, indexed in zip(shape.ratios, shape.indexed):
        pool += (rows / ratio + 2) * (row + (index if indexed else 0))
    compressing = sum(1 for ratio in shape.ratios if ratio > 1)
    slot = shape.layers * (shape.window + _RING_EXTRA) * shape.head_dim * _BF16
    slot += compressing * 2 * _COMPRESSOR_ROWS * shape.head_dim * _F32
    rope = ROPE_TABLES * context * (shape.rope_dim // 2) * _F32
    return Caches(rows, math.ceil(pool) + slots * slot + _TOKEN_ID * rows, rope)


# --- vLLM's block layouts

#: Rows of a page and the alignment of its bytes (they give V4-Flash's block of 1,039,680 B too).
VLLM_PAGE_ROWS = 64
VLLM_ALIGN = 576
#: Steps in flight that a sliding window is billed for. Inferred.
VLLM_IN_FLIGHT = 2


def vllm_page(rows: int, row_bytes: int) -> int:
    """Bytes of one page, aligned."""
    return -(-rows * row_bytes // VLLM_ALIGN) * VLLM_ALIGN


class VllmRequest(NamedTuple):
    """A vLLM pool as its command line gives it: KV bytes, max batched tokens, layers that share a block."""

    pool_bytes: int
    batch: int
    group: int = 1


class VllmPool(NamedTuple):
    """A vLLM KV pool: block size, number of blocks, blocks of one full request, tokens, requests at once."""

    block_bytes: int
    blocks: int
    per_request: int
    tokens: int
    concurrency: float


def vllm_pool(
    shape: CacheShape, pool_bytes: int, context: int, batch: int, *, group: int = 1, drafts: int = 3
) -> VllmPool:
    """vLLM's FP8 pool in groups of ``group`` layers (1: no padding; 3: the ratio-1 group is padded).

    tokens = floor(blocks / blocks of a request * context), as its log prints it.
    """
    if group < 1 or pool_bytes < 1 or context < 1 or batch < 1:
        raise BudgetError(
            "bad-number", "must be 1 or more", tensor="vllm pool", found=(group, pool_bytes, context)
        )
    row, index = kv_row_bytes("fp8", shape.head_dim, shape.index_dim, shape.rope_dim)
    page = vllm_page(VLLM_PAGE_ROWS, row) + vllm_page(VLLM_PAGE_ROWS, index)
    block = group * page
    window = -(-(shape.window - 1 + VLLM_IN_FLIGHT * batch) // VLLM_PAGE_ROWS) + 1
    request = 0
    for ratio in sorted(set(shape.ratios)):
        groups = -(-shape.ratios.count(ratio) // group)
        request += groups * -(-context // (VLLM_PAGE_ROWS * ratio))
        if ratio > 1:
            request += groups
    request += -(-(shape.layers + drafts) // group) * window
    blocks = pool_bytes // block
    return VllmPool(block, blocks, request, blocks * context // request, blocks / request)


# --- one node
def vllm_longest(shape: CacheShape, request: VllmRequest, drafts: int) -> int:
    """The longest context of which one request fits the pool: a multiple of 2048, 0 where none does."""
    low, high = 0, shape.max_positions // POOL_STEP
    while low < high:
        middle = (low + high + 1) // 2
        pool = vllm_pool(
            shape, request.pool_bytes, middle * POOL_STEP, request.batch, group=request.group, drafts=drafts
        )
        if pool.per_request <= pool.blocks:
            low = middle
        else:
            high = middle - 1
    return low * POOL_STEP


# ----------------------------------------------------------------------------------------------------


def default_reserve(mem_total_gib: float) -> float:
    """The engine's reserve when none is set: max(4 GiB, MemTotal / 10)."""
    return max(CONSTANTS["reserve_least_gib"].value, mem_total_gib * CONSTANTS["reserve_share"].value)


def node_terms(
    rank: int,
    *,
    file_bytes: int,
    vision_bytes: int,
    cache: Caches,
    chunk: int,
    drift_gib: float | None = None,
) -> dict[str, float]:
    """The terms of one rank in GiB: rank_file, vision, kv, rope (exact); runtime, growth, dip, chunk,
    drift."""
    side = "head" if rank == 0 else "worker"
    return {
        "rank_file": file_bytes / GIB,
        "vision": vision_bytes / GIB if rank == 0 else 0.0,
        "kv": cache.kv_bytes / GIB,
        "rope": cache.rope_bytes / GIB,
        "runtime": CONSTANTS["runtime_gib"].value,
        "growth": CONSTANTS[f"growth_{side}_gib"].value,
        "dip": CONSTANTS[f"dip_{side}_gib"].value,
        "chunk": CONSTANTS["chunk_gib"].value * (chunk / CHUNK - 1),
        "drift": CONSTANTS["drift_gib"].value if drift_gib is None else drift_gib,
    }


EXACT_TERMS = ("rank_file", "vision", "kv", "rope")
_ALL_TERMS = (*EXACT_TERMS, "runtime", "growth", "dip", "chunk", "drift")


def calibrate(
    terms: dict[str, float], *, before_gib: float, idle_gib: float, lowest_gib: float | None = None
) -> dict[str, float]:
    """From a measured first start to this replica's own constants of one rank, in GiB.

    ``before``: MemAvailable before the start; ``idle``: after readiness; ``lowest``: the low-water mark
    under load. Keys: overhead (stands for runtime + growth) and, when a low-water mark is known, dip (stands
    for dip + chunk).
    """
    if not 0 <= idle_gib <= before_gib:
        raise BudgetError(
            "bad-calibration",
            "idle must lie under the value before the start",
            tensor="calibration",
            found=f"before {before_gib}, idle {idle_gib}",
        )
    result = {"overhead": before_gib - idle_gib - sum(terms[name] for name in EXACT_TERMS)}
    if lowest_gib is not None:
        result["dip"] = max(0.0, idle_gib - lowest_gib)
    return result


SITUATIONS = ("start", "restart", "running", "prepare")


def judge_node(
    terms: dict[str, float],
    limits: dict[str, float | None],
    *,
    rank: int,
    available_gib: float,
    mem_total_gib: float | None = None,
    calibration: dict[str, float] | None = None,
    situation: str = "start",
    measured: bool = True,
) -> dict[str, Any]:
    """Judge one node. Pure; the same function serves planner, module and controller.

    ``limits``: redline_gib, reserve_gib (None: the engine's rule), min_avail_gib (None: no gate).
    ``situation``: start (nothing of ours runs), restart (our rank runs now and will be started again, so what it
    holds counts as available), running (it runs and goes on: nothing refuses), prepare (it goes on serving while the
    next rank file is written).
    """
    if situation not in SITUATIONS:
        raise BudgetError(
            "bad-situation", "is no situation", tensor="situation", found=situation, wanted=SITUATIONS
        )
    _amount("mem_available_gib", available_gib)
    calibrated = bool(calibration)
    own = dict(terms)
    if calibration:
        own["runtime"], own["growth"] = (
            float(calibration.get("overhead", own["runtime"] + own["growth"])),
            0.0,
        )
        if "dip" in calibration:
            own["dip"], own["chunk"] = float(calibration["dip"]), 0.0
    exact = sum(own[name] for name in EXACT_TERMS)
    load = exact + own["runtime"]
    held = load + own["growth"]
    total = (
        CONSTANTS["mem_total_gib"].value if mem_total_gib is None else _amount("mem_total_gib", mem_total_gib)
    )
    redline = _limit(limits, "redline_gib", CONSTANTS["redline_gib"].value)
    reserve = _limit(limits, "reserve_gib", default_reserve(total))
    gate = _limit(limits, "min_avail_gib", 0.0)
    live = available_gib
    effective = live + held if situation in ("restart", "running", "prepare") else live
    idle = effective - held
    worst = idle - own["dip"] - own["chunk"] - own["drift"]
    under_load = sum(own[name] for name in _ALL_TERMS)
    required = max(under_load + redline, own["rank_file"] + reserve, gate)
    refusals: list[str] = []
    warnings: list[str] = []
    if situation == "prepare":
        left = live - CONSTANTS["prepare_gib"].value
        if left < redline:
            refusals.append(
                f"writing a rank file takes {CONSTANTS['prepare_gib'].value:.1f} GiB and leaves {left:.2f}, "
                f"under the redline of {redline:.2f}"
            )
    else:
        _judge_start(
            refusals, warnings, own, effective=effective, reserve=reserve, gate=gate, redline=redline
        )
        if worst < redline:
            text = f"{worst:.2f} GiB left at the worst point, under the redline of {redline:.2f}"
            if calibration and "dip" in calibration:
                refusals.append(f"{text} (calibrated on this replica)")
            elif calibrated and idle < redline:
                refusals.append(
                    f"{idle:.2f} GiB left when idle, under the redline of {redline:.2f} (calibrated on this replica)"
                )
            elif calibrated:
                warnings.append(f"{text} (idle is calibrated, the dip under load is transferred, +-1 GiB)")
            else:
                warnings.append(f"{text} (by transferred constants, +-1 GiB: calibrate with a first start)")
        elif worst < redline + CONSTANTS["margin_gib"].value:
            warnings.append(f"{worst:.2f} GiB left at worst, near the redline of {redline:.2f}")
    if situation == "running":
        # Nothing is started, so nothing is refused: what a restart would meet is told.
        warnings = [*(f"a restart now would be refused: {text}" for text in refusals), *warnings]
        refusals = []
    if not measured:
        warnings.append(f"available memory is assumed ({available_gib:.1f} GiB), not measured")
    verdict = "does_not_fit" if refusals else ("fits_with_warning" if warnings else "fits")
    return {
        "rank": rank,
        "situation": situation,
        "verdict": verdict,
        "reason": (refusals or warnings or [f"{worst:.2f} GiB left at the worst point"])[0],
        "refusals": refusals,
        "warnings": warnings,
        "available_gib": round(live, DIGITS),
        "available_source": "measured" if measured else "assumed",
        "effective_available_gib": round(effective, DIGITS),
        "load_gib": round(load, DIGITS),
        "idle_after_gib": round(idle, DIGITS),
        "worst_gib": round(worst, DIGITS),
        "required_available_gib": round(required, DIGITS),
        "short_by_gib": round(max(0.0, required - effective), DIGITS),
        "redline_gib": redline,
        "reserve_gib": round(reserve, DIGITS),
        "room_gib": round(effective - reserve, DIGITS),
        "calibrated": calibrated,
        "terms_gib": {name: round(value, TERM_DIGITS) for name, value in own.items()},
    }


def _amount(name: str, value: float) -> float:
    """A number of GiB. Raises BudgetError for one that compares with nothing or is under 0."""
    if not math.isfinite(value) or value < 0:
        raise BudgetError("bad-number", "is no amount of memory", tensor=name, found=value)
    return float(value)


def _limit(limits: dict[str, float | None], name: str, default: float) -> float:
    value = limits.get(name)
    return default if value is None else _amount(name, value)


def _judge_start(
    refusals: list[str],
    warnings: list[str],
    own: dict[str, float],
    *,
    effective: float,
    reserve: float,
    gate: float,
    redline: float,
) -> None:
    """The exact rules of a start: the gate, the engine's admission, and what the exact terms alone leave."""
    if effective < gate:
        refusals.append(f"{effective:.2f} GiB available, the start gate wants {gate:.2f}")
    room = effective - reserve
    if own["rank_file"] > room:
        refusals.append(
            f"the engine refuses a rank file of {own['rank_file']:.2f} GiB: available {effective:.2f} "
            f"less reserve {reserve:.2f} leaves {room:.2f}"
        )
    left = effective - sum(own[name] for name in EXACT_TERMS)
    if left < redline:
        refusals.append(f"weights and caches alone leave {left:.2f} GiB, under the redline of {redline:.2f}")
    if 0 <= room - own["rank_file"] < TIGHT_GIB and not refusals:
        warnings.append(f"the engine's admission passes by {room - own['rank_file']:.2f} GiB only")


def budget_for_node(
    plan: dict[str, Any],
    rank: int,
    mem_available_gib: float,
    mem_total_gib: float | None = None,
    *,
    situation: str = "start",
    calibration: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Judge live MemAvailable of one node against a finished plan (the ``plan`` of tensor_plan or sparkplan
    --json).

    On the controller: ``budget_for_node(plan, 1, 116.4)["verdict"]``. Raises BudgetError for an unknown rank.
    """
    try:
        terms = plan["budget"]["terms"][rank]
        limits = plan["budget"]["limits"]
        stored = plan["budget"].get("calibration") or {}
    except (KeyError, IndexError, TypeError):
        raise BudgetError(
            "bad-plan", "the plan has no budget for this rank", tensor="rank", found=rank
        ) from None
    own = calibration if calibration is not None else stored.get(str(rank))
    return judge_node(
        terms,
        limits,
        rank=rank,
        available_gib=mem_available_gib,
        mem_total_gib=mem_total_gib,
        calibration=own,
        situation=situation,
    )


# --- the replica

_ORDER = ("fits", "fits_with_warning", "does_not_fit")


def worst_of(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """The node that decides: the worst verdict, then the least left over its redline."""
    return max(
        nodes, key=lambda node: (_ORDER.index(node["verdict"]), node["redline_gib"] - node["worst_gib"])
    )


def largest_context(
    shape: CacheShape, kind: str, slots: int, *, world: int, spare_gib: list[float], current: Caches
) -> int:
    """The longest context (a multiple of 2048, at most the model's) that keeps every node over its redline.

    ``spare_gib``: worst minus redline of every node with the ``current`` caches. 0: not even 2048 tokens fit.
    """
    room = min(spare_gib) * GIB + current.kv_bytes + current.rope_bytes
    low, high = 0, shape.max_positions // POOL_STEP
    while low < high:
        middle = (low + high + 1) // 2
        cache = caches(shape, kind, middle * POOL_STEP, slots, world)
        if cache.kv_bytes + cache.rope_bytes <= room:
            low = middle
        else:
            high = middle - 1
    return low * POOL_STEP


def levers(
    node: dict[str, Any],
    *,
    context: int,
    parallel: int,
    chunk: int,
    draft_bytes: int,
    smaller: dict[str, Caches],
    current: Caches,
) -> list[dict[str, Any]]:
    """What buys memory on the deciding node, in order of gain (GiB)."""
    found: list[dict[str, Any]] = []

    def add(name: str, gain: float, detail: str) -> None:
        if gain >= LEAST_GAIN:
            found.append({"lever": name, "gain_gib": round(gain, DIGITS), "detail": detail})

    desktop = min(
        CONSTANTS["desktop_gib"].value,
        CONSTANTS["available_headless_gib"].value - node["effective_available_gib"],
    )
    add("headless", desktop, "stop the desktop and other software (measured elsewhere: about 6 GiB)")
    add("vision", node["terms_gib"]["vision"], "serve without the vision tower (rank 0)")
    add("drafts", draft_bytes / GIB, "serve without draft blocks: slower decoding")
    if chunk > LEAST_CHUNK:
        add(
            "chunk",
            CONSTANTS["chunk_gib"].value * (chunk - chunk // 2) / CHUNK,
            f"prefill chunk {chunk // 2}",
        )
    bytes_now = current.kv_bytes + current.rope_bytes
    for name, cache in smaller.items():
        detail = f"context {context // 2}" if name == "context" else f"parallel 1 instead of {parallel}"
        add(name, (bytes_now - cache.kv_bytes - cache.rope_bytes) / GIB, detail)
    least = CONSTANTS["floor_least_gib"].value
    add("redline", node["redline_gib"] - least, f"redline {least}: less warning before the node freezes")
    return sorted(found, key=lambda row: (-row["gain_gib"], row["lever"]))


def plan_budget(
    *,
    dims: Dims,
    text: dict[str, Any],
    ranks: list[dict[str, Any]],
    vision_bytes: int,
    kv_format: str,
    context: int,
    parallel: int,
    chunk: int,
    limits: dict[str, float | None],
    available_gib: list[float] | None = None,
    mem_total_gib: float | None = None,
    calibration: dict[str, dict[str, float]] | None = None,
    drift_gib: float | None = None,
    situation: str | Sequence[str] = "start",
    vllm: VllmRequest | None = None,
    drafts: bool = True,
    rope_rows: int | None = None,
) -> dict[str, Any]:
    """The budget of a replica: terms, nodes, verdict, largest context, levers.

    ``ranks``: rows with rank, file_bytes and draft_bytes. ``situation``: one, or one a rank (half of a replica may
    run). ``calibration``: by rank number as text, of `calibrate`. ``vllm``: its pool in place of the engine's own
    (the bytes are given, the tokens follow). ``rope_rows``: rows of the RoPE tables that the engine is given; None
    where they are not known.
    Raises BudgetError where a number cannot be.
    """
    if chunk < 1:
        raise BudgetError("bad-number", "must be 1 or more", tensor="chunk", found=chunk)
    world = len(ranks)
    if available_gib is not None and len(available_gib) not in (1, world):
        raise BudgetError(
            "bad-number",
            "needs one value, or one a rank",
            tensor="mem_available_gib",
            found=len(available_gib),
            wanted=world,
        )
    situations = [situation] * world if isinstance(situation, str) else list(situation)
    if len(situations) != world:
        raise BudgetError(
            "bad-situation",
            "needs one, or one a rank",
            tensor="situation",
            found=len(situations),
            wanted=world,
        )
    shape = cache_shape(dims, text)
    if context > shape.max_positions:
        raise BudgetError(
            "bad-context",
            "is longer than the model's",
            tensor="context",
            found=context,
            wanted=shape.max_positions,
        )
    if rope_rows is not None:
        most = rope_rows - ROPE_EXTRA_ROWS
        if context > most:
            raise BudgetError(
                "short-rope",
                f"the kit's RoPE tables of {rope_rows} rows are too short (the engine says ShortRopeTable)",
                tensor="context",
                found=context,
                wanted=f"at most {most}",
                remedy=f"lower the context to {most}, or name a kit with longer tables",
            )
        shape = replace(shape, max_positions=min(shape.max_positions, most))
    cache = caches(shape, kv_format, context, parallel, world)
    pool = None
    draft_layers = dims.draft_layers if drafts else 0
    if vllm is not None:
        if not dims.kv_sources:
            raise BudgetError(
                "bad-kv", "vLLM's layout of it is not known", tensor="model_type", found=dims.model_type
            )
        pool = vllm_pool(shape, vllm.pool_bytes, context, vllm.batch, group=vllm.group, drafts=draft_layers)
        cache = Caches(pool.tokens, vllm.pool_bytes, cache.rope_bytes)
        kv_format = "vllm_fp8"
    terms, nodes = [], []
    for row in ranks:
        rank = int(row["rank"])
        term = node_terms(
            rank,
            file_bytes=row["file_bytes"],
            vision_bytes=vision_bytes,
            cache=cache,
            chunk=chunk,
            drift_gib=drift_gib,
        )
        terms.append({name: round(value, TERM_DIGITS) for name, value in term.items()})
        if available_gib is None:
            available = CONSTANTS["available_head_gib" if rank == 0 else "available_worker_gib"].value
        else:
            available = available_gib[rank % len(available_gib)]
        nodes.append(
            judge_node(
                term,
                limits,
                rank=rank,
                available_gib=available,
                mem_total_gib=mem_total_gib,
                calibration=(calibration or {}).get(str(rank)),
                situation=situations[rank],
                measured=available_gib is not None,
            )
        )
    decides = worst_of(nodes)
    verdict, reason = decides["verdict"], f"rank {decides['rank']}: {decides['reason']}"
    smaller = {}
    if vllm is not None and pool is not None:
        longest = vllm_longest(shape, vllm, draft_layers)
        if pool.per_request > pool.blocks:
            verdict = "does_not_fit"
            reason = (
                f"one request of {context} tokens needs {pool.per_request} blocks, the pool has {pool.blocks}"
            )
    else:
        longest = largest_context(
            shape,
            kv_format,
            parallel,
            world=world,
            spare_gib=[node["worst_gib"] - node["redline_gib"] for node in nodes],
            current=cache,
        )
        if context >= 2 * POOL_STEP:
            smaller["context"] = caches(shape, kv_format, context // 2, parallel, world)
        if parallel > 1:
            smaller["parallel"] = caches(shape, kv_format, context, 1, world)
    return {
        "verdict": verdict,
        "reason": reason,
        "kv_format": kv_format,
        "kv_rows": cache.rows,
        "kv_bytes": cache.kv_bytes,
        "rope_bytes": cache.rope_bytes,
        "vllm": None if pool is None else pool._asdict(),
        "largest_context": longest,
        "max_context": shape.max_positions,
        "rope_rows": rope_rows,
        "nodes": nodes,
        "levers": levers(
            decides,
            context=context,
            parallel=parallel,
            chunk=chunk,
            draft_bytes=int(ranks[decides["rank"]]["draft_bytes"]),
            smaller=smaller,
            current=cache,
        ),
        "terms": terms,
        "limits": limits,
        "calibration": calibration or {},
    }


def needed_by_second_formula(rank_file_gib: float, context: int, rank: int, redline_gib: float) -> float:
    """The other published sum, for the residual page: available GiB that a start needs."""
    return rank_file_gib + 2.0 + 1862 * context / GIB + (2.0 if rank == 0 else 1.0) + redline_gib + 1.0
