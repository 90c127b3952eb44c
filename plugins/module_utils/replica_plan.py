# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The plan of a replica, computed before anything is touched: split, memory and disk from a model lock."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from . import budget, disk_budget
from .calibration import choose
from .model_lock import ModelLock
from .split import Split, fixed_shape_differences, plan_split, scheme_named, text_config

#: The cache format an engine keeps. TensorFold native: FP4; others are judged as vLLM's FP8.
KV_OF_ENGINE = {"tensorfold_native": "fp4", "plain_tp": "fp8"}


@dataclass
class Request:
    """What a replica shall be. ``context`` has no default: the plan advises, it never chooses."""

    context: int
    world: int = 2
    engine: str = "tensorfold_native"
    parallel: int = 4
    drafts: bool = True
    vision: bool = True
    parity: bool = False
    chunk: int = budget.CHUNK
    kv_format: str = ""
    redline_gib: float | None = None
    reserve_gib: float | None = None
    min_avail_gib: float | None = None
    mem_available_gib: list[float] | None = None
    mem_total_gib: float | None = None
    drift_gib: float | None = None
    #: Constants by rank number (``budget.calibrate``), or a kept document (`calibration`), which counts only for the
    #: plan and the engine build that it was measured with.
    calibration: dict[str, Any] = field(default_factory=dict)
    engine_build: str = ""
    rope_rows: int | None = None
    #: One of `budget.SITUATIONS`, or one a rank.
    situation: str | list[str] = "start"
    engram_bytes: int | None = None
    #: Ranks whose nodes get a copy of the Engram tables of their own. None: all.
    engram_ranks: list[int] | None = None
    vllm: budget.VllmRequest | None = None
    image_bytes: int = disk_budget.IMAGE_BYTES
    worker_checkpoint_bytes: int = 0
    builds_all: bool = False


def engram_table_bytes(text: dict[str, Any]) -> int:
    """Bytes of the Engram tables by the config: rows x (values + one scale for 32 values). 0 without Engram.

    Of a full-size model 202,758,032,400: rows 384,006,168 and 384,016,682, 256 F8_E4M3 values and 8 F8_E8M0
    scales.
    """
    rows, dim = text.get("engram_num_embeddings"), text.get("engram_head_dim")
    if not isinstance(rows, list) or not isinstance(dim, int):
        return 0
    return sum(int(count) for count in rows) * (dim + dim // 32)


def _digest(request: Request, lock: ModelLock, ranks: list[dict[str, Any]]) -> str:
    """sha256 of what decides how ranks are cut and launched; live memory is left out."""
    body = {
        "lock": lock.digest,
        "engine": request.engine,
        "world": request.world,
        "context": request.context,
        "parallel": request.parallel,
        "drafts": request.drafts,
        "vision": request.vision,
        "parity": request.parity,
        "chunk": request.chunk,
        "ranks": [[row["rank"], row["data_bytes"], row["index_sha256"]] for row in ranks],
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def make_plan(lock: ModelLock, request: Request) -> tuple[dict[str, Any], Split]:
    """The whole plan as plain data, and the split with its tables. Raises PlanError for bad input."""
    scheme = scheme_named(request.engine)
    split = plan_split(lock, request.engine, request.world, drafts=request.drafts, parity=request.parity)
    text = text_config(lock.config)
    ranks = [layout.as_dict() for layout in split.ranks]
    limits = {
        "redline_gib": request.redline_gib,
        "reserve_gib": request.reserve_gib,
        "min_avail_gib": request.min_avail_gib,
    }
    digest = _digest(request, lock, ranks)
    calibration, why_not = choose(request.calibration, digest, request.engine_build)
    # What runs is known to be this plan by what it measured. Anything else that runs will be started again.
    same = bool(calibration) and "format" in request.calibration
    given = [request.situation] * request.world if isinstance(request.situation, str) else request.situation
    memory = budget.plan_budget(
        dims=split.dims,
        text=text,
        ranks=ranks,
        vision_bytes=split.vision_bytes if request.vision else 0,
        kv_format=request.kv_format or KV_OF_ENGINE[request.engine],
        context=request.context,
        parallel=request.parallel,
        chunk=request.chunk,
        limits=limits,
        available_gib=request.mem_available_gib,
        mem_total_gib=request.mem_total_gib,
        calibration=calibration,
        drift_gib=request.drift_gib,
        situation=["restart" if one == "running" and not same else one for one in given],
        vllm=request.vllm,
        drafts=request.drafts,
        rope_rows=request.rope_rows if scheme.rank_file else None,
    )
    engram = engram_table_bytes(text) if request.engram_bytes is None else request.engram_bytes
    sizes = [row["file_bytes"] for row in ranks]
    disk = [
        disk_budget.judge_disk(
            disk_budget.components(
                rank=rank,
                world=request.world,
                checkpoint_bytes=lock.total_bytes,
                engram_bytes=engram if request.engram_ranks is None or rank in request.engram_ranks else 0,
                rank_file_bytes=sizes if scheme.rank_file else [0] * request.world,
                image_bytes=request.image_bytes,
                worker_checkpoint_bytes=request.worker_checkpoint_bytes,
                builds_all=request.builds_all,
            ),
            None,
            rank=rank,
        )
        for rank in range(request.world)
    ]
    differences = fixed_shape_differences(scheme, lock.config)
    plan = {
        "engine": request.engine,
        "launchable": scheme.launchable,
        "world": request.world,
        "context": request.context,
        "parallel": request.parallel,
        "drafts": request.drafts,
        "vision": request.vision,
        "parity": request.parity,
        "chunk": request.chunk,
        "lock": {"digest": lock.digest, "content_digest": lock.content_digest, "source": dict(lock.source)},
        "checkpoint": {
            "shards": len(lock.shards),
            "tensors": len(lock.tensors),
            "exl3_matrices": lock.matrices,
            "file_bytes": lock.file_bytes,
            "data_bytes": lock.data_bytes,
            "total_bytes": lock.total_bytes,
            "vision_bytes": split.vision_bytes,
            "engram_bytes": engram,
        },
        "ranks": ranks,
        "budget": memory,
        "disk": disk,
        "engine_shape": {"matches": not differences, "differences": differences},
        "warnings": [*lock.warnings, *split.warnings, *([why_not] if why_not else [])],
        "digest": digest,
    }
    return plan, split


def engram_differences(config: dict[str, Any], tables: dict[int, tuple[int, int]]) -> list[str]:
    """Where found Engram tables are not those of the config: layers and rows, one line each."""
    text = text_config(config)
    layers, rows = text.get("engram_layer_ids"), text.get("engram_num_embeddings")
    if not isinstance(layers, list) or not isinstance(rows, list):
        return ["the config knows no Engram tables"]
    wanted = dict(zip(layers, rows))
    found = {layer: count for layer, (count, _bytes) in tables.items()}
    return [
        f"Engram layer {layer}: found {found.get(layer, 'no')} rows, wanted {wanted.get(layer, 'none')}"
        for layer in sorted(set(wanted) | set(found))
        if wanted.get(layer) != found.get(layer)
    ]
