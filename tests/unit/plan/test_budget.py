"""The memory budget: published figures, exact rules that refuse, transferred constants that warn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import budget as bu
from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import ModelLock
from ansible_collections.sparkfleet.serving.plugins.module_utils.split import Dims, read_dims, text_config
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.unit.plan.small import Small
from tests.unit.plan.small import config as small_config

GIB = 1 << 30
RANK_FILE = 106_120_462_823
VISION = 970_524_716


@pytest.fixture(scope="module")
def dims(full_lock: ModelLock) -> Dims:
    return read_dims(full_lock.config)


@pytest.fixture(scope="module")
def shape(full_lock: ModelLock, dims: Dims) -> bu.CacheShape:
    return bu.cache_shape(dims, text_config(full_lock.config))


# --- caches


@pytest.mark.parametrize(
    ("context", "slots", "rows"),
    [
        (1_048_576, 4, 1_056_768),
        (524_288, 4, 532_480),
        (8_650_752, 32, 8_716_288),
        (2048, 1, 4096),
        (2020, 1, 2048),
    ],
)
def test_rows_of_the_shared_pool(context: int, slots: int, rows: int) -> None:
    assert bu.pool_rows(context, slots) == rows


@pytest.mark.parametrize(("context", "pool", "rope"), [(524_288, 0.470, 0.250), (1_048_576, 0.909, 0.500)])
def test_fp4_pool_and_rope(shape: bu.CacheShape, context: int, pool: float, rope: float) -> None:
    cache = bu.caches(shape, "fp4", context, 4)
    assert round(cache.kv_bytes / GIB, 3) == pool
    assert cache.rope_bytes / GIB == rope


def test_fp4_pool_to_the_byte(shape: bu.CacheShape) -> None:
    """SOUM capacity.py: 356 * sum(cap/ratio + 2) + slots * (5,898,240 + 786,432) + 8 * cap."""
    rows = 1_056_768
    expected = 356 * (3 * (rows // 2 + 2) + rows + 2) + 4 * (5_898_240 + 786_432) + 8 * rows
    assert bu.caches(shape, "fp4", 1_048_576, 4) == bu.Caches(rows, expected, 512 * 1_048_576)


@pytest.mark.parametrize(
    ("kind", "row", "index", "token"),
    [
        ("fp4", 288, 68, 890),
        ("fp8", 584, 132, 1790),
        ("fp8_split", 292, 132, 1060),
        ("bf16", 1024, 256, 3200),
    ],
)
def test_bytes_of_rows_and_tokens(shape: bu.CacheShape, kind: str, row: int, index: int, token: int) -> None:
    assert bu.kv_row_bytes(kind, 512, 128) == (row, index)
    assert sum((row + index) / ratio for ratio in shape.ratios) == token
    with pytest.raises(bu.BudgetError, match="is no cache format"):
        bu.kv_row_bytes("int3", 512, 128)


def test_caches_of_other_models() -> None:
    llama = read_dims(
        {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
         "head_dim": 64, "vocab_size": 1024, "intermediate_size": 768, "num_key_value_heads": 2}
    )  # fmt: skip
    shape = bu.cache_shape(llama, {"max_position_embeddings": 4096})
    one, two, three = (bu.caches(shape, "bf16", 2020, 1, world).kv_bytes for world in (1, 2, 3))
    assert one == 2 * 2048 * 3 * 2 * 64 * 2 == 2 * two == three
    assert bu.caches(shape, "bf16", 2020, 1) == bu.Caches(2048, one, 0)
    assert bu.caches(shape, "bf16", 1, 1).rows == 2048
    with pytest.raises(bu.BudgetError, match="max_position_embeddings"):
        bu.cache_shape(llama, {})


def test_v4_keeps_a_cache_in_every_compressing_layer(exl3: dict[str, Any]) -> None:
    from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import from_directory

    lock = from_directory(exl3["tiny-dsv4-exl3-3.0bpw"])
    shape = bu.cache_shape(read_dims(lock.config), text_config(lock.config))
    assert (shape.ratios, shape.indexed) == ((4, 128), (True, False))
    # head 128, index 128, window 128 in 3 layers; 2048 rows; two compressing layers
    pool = (2048 / 4 + 2) * (64 + 64 * 2 + 8 + 132) + (2048 / 128 + 2) * (64 + 64 * 2 + 8)
    slot = 3 * 144 * 128 * 2 + 2 * 2 * 64 * 128 * 4
    assert bu.caches(shape, "fp8", 2020, 1) == bu.Caches(2048, int(pool) + slot + 8 * 2048, 4 * 2020 * 32 * 4)


def test_numbers_that_cannot_be(shape: bu.CacheShape, dims: Dims, full_lock: ModelLock) -> None:
    for context, slots in ((0, 1), (1, 0)):
        with pytest.raises(bu.BudgetError):
            bu.caches(shape, "fp4", context, slots)
    text = copy.deepcopy(text_config(full_lock.config))
    text["index_head_dim"] = "128"
    with pytest.raises(bu.BudgetError, match="index_head_dim"):
        bu.cache_shape(dims, text)
    broken = small_config(Small(kv=(0, 3)))
    with pytest.raises(bu.BudgetError, match="does not compress"):
        bu.cache_shape(read_dims(broken), text_config(broken))


def test_pool_rows_at_the_edge_of_a_step() -> None:
    edge = 2048 * 10 - 2 * 28 - 2047
    assert (bu.pool_rows(edge, 2), bu.pool_rows(edge + 1, 2)) == (20_480, 22_528)
    assert bu.pool_rows(2048 * 10 - 28, 1) == 20_480


def test_a_model_without_a_window(full_lock: ModelLock, dims: Dims) -> None:
    text = {**text_config(full_lock.config), "sliding_window": 0}
    assert bu.cache_shape(dims, text).window == 0


# --- vLLM


def test_vllm_fp8_pool_of_the_published_command(shape: bu.CacheShape) -> None:
    pool = bu.vllm_pool(shape, 3_029_185_024, 524_288, 4096)
    assert pool.block_bytes == 46_080
    assert (pool.blocks, pool.per_request) == (65_737, 26_116)
    assert pool.tokens == 1_319_693
    assert round(pool.concurrency, 2) == 2.52


def test_vllm_groups_of_three(shape: bu.CacheShape) -> None:
    pool = bu.vllm_pool(shape, 6_442_450_944, 327_680, 8192, group=3, drafts=0)
    assert pool.block_bytes == 138_240
    assert pool.blocks == 46_603
    assert pool.per_request == 5120 + 2560 + 14 * 259 + 1
    assert pool.tokens == 1_350_567
    assert pool.blocks * 327_680 // 7894 == 1_934_490, (
        "published; that image's window charge (214) is unknown"
    )


def test_the_smallest_vllm_pool(shape: bu.CacheShape) -> None:
    """One token, batch 1: 127 + 2 in flight are 3 pages and one more, in 43 layers."""
    pool = bu.vllm_pool(shape, 1, 1, 1)
    assert (pool.blocks, pool.per_request) == (0, 1 + 3 + 43 * 4 + 3)
    assert bu.vllm_pool(shape, 138_240, 1, 1, group=3).blocks == 1


def test_vllm_pool_in_the_budget(full_lock: ModelLock, dims: Dims, shape: bu.CacheShape) -> None:
    request = bu.VllmRequest(3_029_185_024, 4096)
    plan = replica(full_lock, dims, vllm=request)
    assert (plan["kv_bytes"], plan["kv_rows"], plan["kv_format"]) == (3_029_185_024, 1_319_693, "vllm_fp8")
    assert plan["vllm"]["per_request"] == 26_116
    assert not {"context", "parallel"} & {row["lever"] for row in plan["levers"]}
    tight = bu.VllmRequest(46_080 * 26_116, 4096)
    assert replica(full_lock, dims, vllm=tight)["verdict"] == "fits"
    assert bu.vllm_longest(shape, tight, 3) == 524_288
    less = replica(full_lock, dims, vllm=bu.VllmRequest(46_080 * 26_116 - 1, 4096))
    assert less["verdict"] == "does_not_fit"
    assert less["largest_context"] == 522_240
    assert bu.vllm_longest(shape, bu.VllmRequest(1, 1), 3) == 0
    fewer = replica(full_lock, dims, vllm=request, drafts=False)["vllm"]["per_request"]
    assert fewer == 26_116 - 3 * 131
    llama = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    other = read_dims({**llama, "vocab_size": 1024, "intermediate_size": 768})
    with pytest.raises(bu.BudgetError, match="layout of it is not known"):
        replica(full_lock, other, vllm=request)


def test_vllm_pages() -> None:
    assert bu.vllm_page(64, 584) == 37_440
    assert bu.vllm_page(64, 132) == 8_640
    assert 22 * bu.vllm_page(64, 584) + 20 * bu.vllm_page(2, 584) + 21 * bu.vllm_page(64, 132) == 1_039_680


def test_vllm_numbers_that_cannot_be(shape: bu.CacheShape) -> None:
    for group, size, context, batch in ((0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)):
        with pytest.raises(bu.BudgetError):
            bu.vllm_pool(shape, size, context, batch, group=group)


# --- one node


def terms(shape: bu.CacheShape, context: int = 524_288, rank: int = 0, chunk: int = 2048) -> dict[str, float]:
    cache = bu.caches(shape, "fp4", context, 4)
    return bu.node_terms(rank, file_bytes=RANK_FILE, vision_bytes=VISION, cache=cache, chunk=chunk)


LIMITS: dict[str, float | None] = {"redline_gib": 4.0, "reserve_gib": 8.0, "min_avail_gib": None}


@pytest.mark.parametrize(
    ("available", "context", "worst"),
    [(111.0, 524_288, 2.76), (111.0, 1_048_576, 2.07), (117.0, 524_288, 8.8), (109.0, 524_288, 0.8)],
)
def test_worst_point_of_the_published_cases(
    shape: bu.CacheShape, available: float, context: int, worst: float
) -> None:
    """model.md 5.3: head, 4 slots, chunk 2048, drift 0."""
    node = bu.judge_node(terms(shape, context), LIMITS, rank=0, available_gib=available)
    assert node["worst_gib"] == pytest.approx(worst, abs=0.06)


@pytest.mark.parametrize(("context", "needed"), [(262_144, 111.9), (524_288, 112.2), (1_048_576, 112.9)])
def test_memory_a_start_needs(shape: bu.CacheShape, context: int, needed: float) -> None:
    node = bu.judge_node(terms(shape, context), LIMITS, rank=0, available_gib=120.0)
    assert node["required_available_gib"] == pytest.approx(needed, abs=0.06)


def test_the_terms_of_head_and_worker(shape: bu.CacheShape) -> None:
    head, worker = terms(shape), terms(shape, rank=1)
    assert (head["growth"], head["dip"], head["runtime"]) == (1.9, 4.9, 1.0)
    assert (worker["growth"], worker["dip"], worker["vision"]) == (1.7, 4.2, 0.0)
    assert round(head["vision"], 2) == 0.90
    assert terms(shape, chunk=4096)["chunk"] == pytest.approx(1.133)
    assert terms(shape, chunk=1024)["chunk"] == pytest.approx(-0.5665)
    assert (
        bu.node_terms(0, file_bytes=0, vision_bytes=0, cache=bu.Caches(0, 0, 0), chunk=2048, drift_gib=2.1)[
            "drift"
        ]
        == 2.1
    )


def judge(shape: bu.CacheShape, available: float, **changes: Any) -> dict[str, Any]:
    limits = {**LIMITS, **changes.pop("limits", {})}
    return bu.judge_node(terms(shape), limits, rank=0, available_gib=available, **changes)


@pytest.mark.field("B47")
def test_verdicts(shape: bu.CacheShape) -> None:
    assert judge(shape, 117.0)["verdict"] == "fits"
    near = judge(shape, 112.8)
    assert near["verdict"] == "fits_with_warning"
    assert "near the redline" in near["reason"]
    under = judge(shape, 111.0)
    assert under["verdict"] == "fits_with_warning", "transferred constants warn"
    assert "transferred" in under["reason"]
    assert under["short_by_gib"] == pytest.approx(1.25, abs=0.02)


def test_exact_rules_refuse(shape: bu.CacheShape) -> None:
    gate = judge(shape, 117.0, limits={"min_avail_gib": 118.0})
    assert gate["verdict"] == "does_not_fit"
    assert "start gate wants 118.00" in gate["reason"]
    assert gate["required_available_gib"] == 118.0
    admission = judge(shape, 110.0, limits={"reserve_gib": 12.0})
    assert (
        "the engine refuses a rank file of 98.83 GiB: available 110.00 less reserve 12.00"
        in admission["reason"]
    )
    bare = judge(shape, 104.0, limits={"reserve_gib": 2.0})
    assert "weights and caches alone leave 3.5" in bare["reason"]
    tight = judge(shape, 107.0, limits={"reserve_gib": 8.0, "redline_gib": 0.0})
    assert "admission passes by" in tight["reason"]


def test_the_engines_own_reserve() -> None:
    assert bu.default_reserve(121.69) == pytest.approx(12.169)
    assert bu.default_reserve(30.0) == 4.0


def test_default_reserve_counts_the_nodes_own_total(shape: bu.CacheShape) -> None:
    node = judge(shape, 111.1, limits={"reserve_gib": None}, mem_total_gib=121.69)
    assert node["verdict"] == "fits_with_warning"
    assert (
        judge(shape, 110.9, limits={"reserve_gib": None}, mem_total_gib=121.69)["verdict"] == "does_not_fit"
    )


def test_calibration_replaces_transferred_constants_and_then_refuses(shape: bu.CacheShape) -> None:
    own = bu.calibrate(terms(shape), before_gib=111.0, idle_gib=8.0, lowest_gib=2.67)
    assert own["overhead"] == pytest.approx(111.0 - 8.0 - 100.456, abs=0.01)
    assert own["dip"] == pytest.approx(5.33)
    node = judge(shape, 111.0, calibration=own)
    assert node["worst_gib"] == pytest.approx(2.67)
    assert node["idle_after_gib"] == pytest.approx(8.0)
    assert node["verdict"] == "does_not_fit"
    assert "calibrated" in node["reason"]
    assert judge(shape, 114.0, calibration=own)["verdict"] == "fits"
    half = bu.calibrate(terms(shape), before_gib=111.0, idle_gib=8.0)
    assert "dip" not in half
    with pytest.raises(bu.BudgetError):
        bu.calibrate(terms(shape), before_gib=8.0, idle_gib=111.0)


def test_a_running_replica_a_restart_and_a_preparation(shape: bu.CacheShape) -> None:
    live = judge(shape, 117.0)["idle_after_gib"]
    running = judge(shape, live, situation="running")
    restart = judge(shape, live, situation="restart")
    assert running["verdict"] == restart["verdict"] == "fits"
    assert restart["effective_available_gib"] == pytest.approx(117.0, abs=0.01)
    assert judge(shape, live, situation="start")["verdict"] == "does_not_fit"
    assert judge(shape, 9.5, situation="prepare")["verdict"] == "fits"
    refused = judge(shape, 8.5, situation="prepare")
    assert "writing a rank file takes 5.0 GiB and leaves 3.50" in refused["reason"]
    with pytest.raises(bu.BudgetError):
        judge(shape, 117.0, situation="whatever")


def test_no_gate_no_reserve_and_no_weights_is_no_refusal() -> None:
    nothing = dict.fromkeys(
        ("rank_file", "vision", "kv", "rope", "runtime", "growth", "dip", "chunk", "drift"), 0.0
    )
    limits: dict[str, float | None] = {"redline_gib": 0.0, "reserve_gib": 0.0}
    node = bu.judge_node(nothing, limits, rank=0, available_gib=0.0)
    assert node["refusals"] == []
    assert bu.calibrate(nothing, before_gib=0.0, idle_gib=0.0, lowest_gib=1.0) == {
        "overhead": 0.0,
        "dip": 0.0,
    }


def test_digits_of_results(shape: bu.CacheShape) -> None:
    node = judge(shape, 117.00049)
    keys = ("available", "effective_available", "load", "idle_after", "worst", "required_available", "room")
    for key in keys:
        assert node[f"{key}_gib"] == round(node[f"{key}_gib"], 3)
    assert node["available_gib"] == 117.0
    assert node["short_by_gib"] == 0.0
    assert node["terms_gib"]["kv"] == round(terms(shape)["kv"], 6)


def test_an_admission_that_just_passes_is_told(shape: bu.CacheShape) -> None:
    room = terms(shape)["rank_file"] + 8.0
    for spare, told in ((0.49, True), (0.52, False)):
        node = judge(shape, room + spare, limits={"redline_gib": 0.0})
        assert any("admission" in text for text in node["warnings"]) is told


def test_the_deciding_node() -> None:
    def node(verdict: str, worst: float) -> dict[str, Any]:
        return {"verdict": verdict, "worst_gib": worst, "redline_gib": 4.0}

    calm, warned, refused = node("fits", 1.0), node("fits_with_warning", 9.0), node("does_not_fit", 99.0)
    assert bu.worst_of([calm, warned]) is warned
    assert bu.worst_of([refused, warned]) is refused
    assert bu.worst_of([node("fits", 9.0), calm]) is calm


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_no_amount_of_memory(shape: bu.CacheShape, value: float) -> None:
    with pytest.raises(bu.BudgetError):
        judge(shape, value)


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["redline_gib", "reserve_gib", "min_avail_gib", "mem_total_gib"])
def test_no_limit_that_compares_with_nothing(shape: bu.CacheShape, name: str, value: float) -> None:
    """Against NaN everything fits."""
    changes: dict[str, Any] = {name: value} if name == "mem_total_gib" else {"limits": {name: value}}
    with pytest.raises(bu.BudgetError, match=f"{name}: is no amount of memory"):
        judge(shape, 117.0, **changes)


# --- the replica


def replica(full_lock: ModelLock, dims: Dims, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "dims": dims,
        "text": text_config(full_lock.config),
        "ranks": [{"rank": r, "file_bytes": RANK_FILE, "draft_bytes": 3_728_271_496} for r in range(2)],
        "vision_bytes": VISION,
        "kv_format": "fp4",
        "context": 524_288,
        "parallel": 4,
        "chunk": 2048,
        "limits": LIMITS,
        "available_gib": [117.0, 118.0],
    }
    return bu.plan_budget(**{**values, **changes})


@pytest.mark.field("B35")
def test_the_worst_node_decides(full_lock: ModelLock, dims: Dims) -> None:
    plan = replica(full_lock, dims, available_gib=[117.0, 103.0])
    assert plan["verdict"] == "does_not_fit"
    assert plan["reason"].startswith("rank 1: ")
    assert [node["verdict"] for node in plan["nodes"]] == ["fits", "does_not_fit"]
    assert replica(full_lock, dims)["verdict"] == "fits"
    assert replica(full_lock, dims, available_gib=[117.0])["nodes"][1]["available_gib"] == 117.0
    with pytest.raises(bu.BudgetError, match="one a rank"):
        replica(full_lock, dims, available_gib=[1.0, 2.0, 3.0])


def test_without_measured_memory_the_answer_is_a_warning(full_lock: ModelLock, dims: Dims) -> None:
    plan = replica(full_lock, dims, available_gib=None)
    assert plan["verdict"] == "fits_with_warning"
    assert [node["available_gib"] for node in plan["nodes"]] == [114.0, 116.0]
    assert {node["available_source"] for node in plan["nodes"]} == {"assumed"}


@pytest.mark.parametrize(
    ("available", "longest"), [(120.0, 1_048_576), (112.0, 327_680), (111.6, 24_576), (111.0, 0)]
)
def test_largest_context(full_lock: ModelLock, dims: Dims, available: float, longest: int) -> None:
    plan = replica(full_lock, dims, available_gib=[available, 118.0])
    assert plan["largest_context"] == longest
    if 0 < longest < 1_048_576:
        assert (
            replica(full_lock, dims, available_gib=[available, 118.0], context=longest)["nodes"][0][
                "worst_gib"
            ]
            >= 4.0
        )
        more = replica(full_lock, dims, available_gib=[available, 118.0], context=longest + 2048)
        assert more["nodes"][0]["worst_gib"] < 4.0


@pytest.mark.field("B44")
def test_levers_come_in_order_of_gain(full_lock: ModelLock, dims: Dims) -> None:
    plan = replica(full_lock, dims, available_gib=[109.0, 118.0])
    gains = [(row["lever"], row["gain_gib"]) for row in plan["levers"]]
    assert [gain for _name, gain in gains] == sorted((gain for _name, gain in gains), reverse=True)
    assert dict(gains) == pytest.approx(
        {"headless": 6.0, "drafts": 3.472, "redline": 1.5, "vision": 0.904, "chunk": 0.567, "context": 0.342,
         "parallel": 0.024}, abs=0.002,
    )  # fmt: skip
    details = {row["lever"]: row["detail"] for row in plan["levers"]}
    assert details["chunk"] == "prefill chunk 1024"
    assert details["context"] == "context 262144"
    assert details["parallel"] == "parallel 1 instead of 4"
    small = replica(full_lock, dims, chunk=513, parallel=2)
    assert {"chunk", "parallel"} <= {row["lever"] for row in small["levers"]}
    assert replica(full_lock, dims, chunk=1)["nodes"][0]["terms_gib"]["chunk"] < -1.0
    few = {"vision_bytes": 0, "chunk": 512, "parallel": 1, "context": 2048}
    lean = replica(full_lock, dims, available_gib=[118.0], **few)
    assert [row["lever"] for row in lean["levers"]] == ["drafts", "redline"]


def test_each_lever_gains_what_it_says(full_lock: ModelLock, dims: Dims) -> None:
    base = replica(full_lock, dims)
    gains = {row["lever"]: row["gain_gib"] for row in base["levers"]}
    changes: dict[str, dict[str, Any]] = {
        "vision": {"vision_bytes": 0},
        "chunk": {"chunk": 1024},
        "context": {"context": 262_144},
        "parallel": {"parallel": 1},
    }
    for name, change in changes.items():
        after = replica(full_lock, dims, **change)
        assert after["nodes"][0]["worst_gib"] - base["nodes"][0]["worst_gib"] == pytest.approx(
            gains[name], abs=0.002
        )


def test_context_beyond_the_model_and_no_chunk(full_lock: ModelLock, dims: Dims) -> None:
    with pytest.raises(bu.BudgetError, match="longer than the model's; found 1048577; wanted 1048576"):
        replica(full_lock, dims, context=1_048_577)
    with pytest.raises(bu.BudgetError, match="chunk"):
        replica(full_lock, dims, chunk=0)


def test_the_controller_judges_live_memory(full_lock: ModelLock, dims: Dims) -> None:
    plan = {"budget": replica(full_lock, dims)}
    node = bu.budget_for_node(plan, 0, 117.0)
    assert node["worst_gib"] == plan["budget"]["nodes"][0]["worst_gib"]
    assert bu.budget_for_node(plan, 1, 103.0)["verdict"] == "does_not_fit"
    assert bu.budget_for_node(plan, 0, 13.0, situation="restart")["verdict"] == "fits"
    cut: list[dict[str, Any]] = [{}, {"budget": {"terms": []}}]
    for broken in cut:
        with pytest.raises(bu.BudgetError):
            bu.budget_for_node(broken, 0, 117.0)
    own = {"0": {"overhead": 9.0}}
    stored = {"budget": replica(full_lock, dims, calibration=own)}
    assert bu.budget_for_node(stored, 0, 117.0)["calibrated"]
    assert not bu.budget_for_node(stored, 1, 117.0)["calibrated"]


def test_second_published_sum() -> None:
    assert bu.needed_by_second_formula(98.83, 1_048_576, 0, 4.0) == pytest.approx(
        98.83 + 2 + 1862 / 1024 + 2 + 5, abs=1e-6
    )
    assert bu.needed_by_second_formula(98.83, 0, 1, 4.0) == pytest.approx(106.83)


def test_every_constant_has_source_and_confidence() -> None:
    for name, constant in bu.CONSTANTS.items():
        assert constant.confidence in ("exact", "measured", "transferred", "assumed"), name
        assert len(constant.source) > 10, name


@settings(max_examples=200, deadline=None)
@given(
    available=some.floats(0, 130),
    redline=some.floats(0, 10),
    reserve=some.floats(2, 20),
    gate=some.floats(0, 125),
)
def test_more_memory_never_makes_it_worse(
    shape: bu.CacheShape, available: float, redline: float, reserve: float, gate: float
) -> None:
    limits: dict[str, float | None] = {"redline_gib": redline, "reserve_gib": reserve, "min_avail_gib": gate}
    order = {"fits": 0, "fits_with_warning": 1, "does_not_fit": 2}
    now = bu.judge_node(terms(shape), limits, rank=0, available_gib=available)
    more = bu.judge_node(terms(shape), limits, rank=0, available_gib=available + 1.0)
    assert order[more["verdict"]] <= order[now["verdict"]]
    enough = bu.judge_node(terms(shape), limits, rank=0, available_gib=now["required_available_gib"] + 0.001)
    assert enough["verdict"] != "does_not_fit"


def test_without_a_measured_dip_only_idle_refuses(shape: bu.CacheShape) -> None:
    """The dip of a first start saw no load, so the transferred one goes on warning."""
    own = bu.calibrate(terms(shape), before_gib=111.0, idle_gib=8.0)
    warned = judge(shape, 111.0, calibration=own)
    assert warned["verdict"] == "fits_with_warning" and warned["idle_after_gib"] == pytest.approx(8.0)
    assert "the dip under load is transferred" in warned["reason"]
    refused = judge(shape, 106.9, calibration=own)
    assert refused["verdict"] == "does_not_fit"
    assert refused["reason"].startswith("3.90 GiB left when idle") and "calibrated" in refused["reason"]


def test_the_kits_rope_tables_bound_the_context(full_lock: ModelLock, dims: Dims) -> None:
    fits = replica(full_lock, dims, rope_rows=524_288 + 17)
    assert fits["max_context"] == fits["largest_context"] == 524_288
    assert fits["rope_rows"] == 524_305
    with pytest.raises(bu.BudgetError, match=r"ShortRopeTable.*found 524288; wanted at most 524287") as error:
        replica(full_lock, dims, rope_rows=524_288 + 16)
    assert error.value.fault == "short-rope"
    assert replica(full_lock, dims, rope_rows=1 << 21)["max_context"] == 1_048_576
    assert replica(full_lock, dims)["rope_rows"] is None
    with pytest.raises(bu.BudgetError):
        replica(full_lock, dims, rope_rows=0)


def test_half_a_replica_that_runs_is_judged_by_halves(full_lock: ModelLock, dims: Dims) -> None:
    """Rank 0 serves and holds its memory; the node of rank 1 is free. Neither may be judged as the other."""
    left = replica(full_lock, dims)["nodes"][0]["idle_after_gib"]
    half = replica(full_lock, dims, available_gib=[left, 118.0], situation=["running", "start"])
    assert [node["effective_available_gib"] for node in half["nodes"]] == pytest.approx(
        [117.0, 118.0], abs=0.01
    )
    assert half["verdict"] == "fits"
    assert replica(full_lock, dims, available_gib=[left, 118.0])["verdict"] == "does_not_fit"
    with pytest.raises(bu.BudgetError, match="one a rank"):
        replica(full_lock, dims, situation=["running"] * 3)


def test_what_runs_and_goes_on_is_never_refused(shape: bu.CacheShape) -> None:
    """After days a rank may hold more than it started with: what a restart would meet is told, and nothing stops."""
    running = judge(shape, 4.5, situation="running", limits={"reserve_gib": 12.0})
    assert running["verdict"] == "fits_with_warning" and running["refusals"] == []
    assert running["reason"].startswith(
        "a restart now would be refused: the engine refuses a rank file of 98.83 GiB"
    )
    assert judge(shape, 4.5, situation="restart", limits={"reserve_gib": 12.0})["verdict"] == "does_not_fit"
