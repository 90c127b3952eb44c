"""The guard's decisions, on series of samples: when, how hard, and never for the wrong reason."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import meminfo
from ansible_collections.sparkfleet.serving.plugins.module_utils.memory_guard import (
    GIB,
    KILL,
    NONE,
    RECORD,
    TERMINATE,
    ApiView,
    Decision,
    History,
    PeerView,
    Policy,
    PolicyError,
    decide,
    earlyoom_floor,
    judge_killer,
    memory_verdict,
    prometheus,
    restart_due,
    unaccounted,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fake_host import fixture

POLICY = Policy()


def play(policy: Policy, series: list[float], **more: Any) -> list[Decision]:
    """Decisions after each sample (GiB), half a second apart."""
    history, found = History(), []
    for number, value in enumerate(series):
        now = number * policy.interval_s
        history.observe(now, int(value * GIB), policy.redline_gib * GIB)
        found.append(decide(policy, history, now, rank_running=True, **more))
    return found


@pytest.mark.field("B35")
def test_two_samples_in_a_row_stop_the_rank() -> None:
    actions = [d.action for d in play(POLICY, [10, 6, 3.9, 3.8])]
    assert actions == [NONE, NONE, NONE, TERMINATE]


def test_one_sample_below_does_not() -> None:
    assert {d.action for d in play(POLICY, [10, 3.9, 4.1, 3.9, 10])} == {NONE}


def test_far_below_kills_at_once() -> None:
    last = play(POLICY, [10, 1.5, 1.2])[-1]
    assert (last.action, last.cause) == (KILL, "redline")
    assert "redline of 4 GiB" in last.reason and "1.20" in last.reason


def test_escalation_by_time_and_by_memory() -> None:
    history = History()
    history.observe(0.0, 3 * GIB, 4 * GIB)
    assert decide(POLICY, history, 5.0, rank_running=True, terminated_at=0.0).action == NONE
    late = decide(POLICY, history, 10.0, rank_running=True, terminated_at=0.0)
    assert (late.action, late.cause) == (KILL, "grace")
    history.observe(5.5, GIB, 4 * GIB)
    assert decide(POLICY, history, 5.5, rank_running=True, terminated_at=0.0).cause == "hard"


@pytest.mark.field("B47")
def test_a_legal_low_of_a_long_prompt_passes_with_a_lower_redline() -> None:
    """A run of 479k tokens touched 2.67 GiB and went on; 4 GiB would have ended it."""
    series = [8, 5, 3.2, 2.67, 2.9, 5]
    assert TERMINATE in [d.action for d in play(POLICY, series)]
    assert {d.action for d in play(Policy(redline_gib=2.5, hard_gib=1.5), series)} == {NONE}


def test_record_only_never_touches_and_says_each_cause_once() -> None:
    policy = Policy(action="record")
    assert [d.action for d in play(policy, [3, 3, 3])] == [NONE, RECORD, RECORD]
    assert play(policy, [3, 3, 3], recorded=frozenset({"redline"}))[-1].action == NONE


def test_nothing_happens_without_a_rank() -> None:
    history = History()
    history.observe(0, 0, 4 * GIB)
    history.observe(1, 0, 4 * GIB)
    assert decide(POLICY, history, 1, rank_running=False).action == NONE


def test_silence_counts_only_after_the_peer_was_heard() -> None:
    silent = PeerView("spark-2", heard=0.0, alive=True)
    assert play(POLICY, [50], peers=[PeerView("spark-2")])[-1].action == NONE
    history = History()
    history.observe(100.0, 50 * GIB, 4 * GIB)
    assert decide(POLICY, history, 29.0, rank_running=True, peers=[silent]).action == NONE
    found = decide(POLICY, history, 31.0, rank_running=True, peers=[silent])
    assert (found.action, found.cause) == (TERMINATE, "silence") and "spark-2" in found.reason
    off = Policy(silence_s=0)
    assert decide(off, history, 9999.0, rank_running=True, peers=[silent]).action == NONE


def test_a_restarting_guard_is_not_a_dead_peer() -> None:
    history = History()
    history.observe(0.0, 50 * GIB, 4 * GIB)
    peer = PeerView("spark-2", heard=100.0, alive=True, guard="silent")
    assert decide(POLICY, history, 101.0, rank_running=True, peers=[peer]).action == NONE


def test_stall_is_running_requests_with_frozen_counters() -> None:
    history = History()
    history.observe(0.0, 50 * GIB, 4 * GIB)

    def at(now: float, api: ApiView) -> str:
        return decide(POLICY, history, now, rank_running=True, api=api).action

    assert at(899.0, ApiView(2, 0.0)) == NONE
    assert at(901.0, ApiView(2, 0.0)) == TERMINATE
    assert at(901.0, ApiView(0, 0.0)) == NONE
    assert at(901.0, ApiView(None, None)) == NONE


@pytest.mark.field("B46")
def test_kernel_lines_about_memory_are_no_input() -> None:
    """NV_ERR_NO_MEMORY comes in healthy starts too. The guard reads MemAvailable and nothing else."""
    assert "NV_ERR_NO_MEMORY" in fixture("kernel-nvrm-nv_err_no_memory.txt")
    import inspect

    assert "NV_ERR" not in inspect.getsource(decide) and "kernel" not in inspect.signature(decide).parameters


def test_recorded_load_of_a_pair_trips_nothing() -> None:
    """117 to 25 GiB in half a minute is a warm load, not an accident."""
    rows = [
        row.split("\t")
        for row in fixture("mem-watch-both-nodes-load-and-serve.tsv").splitlines()[1:]
        if row.strip()
    ]
    for column in (1, 3):
        series = [int(row[column]) / 1024 for row in rows]
        assert {d.action for d in play(POLICY, series)} == {NONE}


@pytest.mark.field("B45")
def test_history_keeps_the_low_water_mark_and_a_bounded_ring() -> None:
    history = History()
    for number in range(5000):
        history.observe(number / 2, (30 * GIB) - number * (1 << 20), 4 * GIB)
    assert vars(history)["low"] == (4999 / 2, (30 * GIB) - 4999 * (1 << 20)) and len(history.ring) == 1200
    history.restart()
    assert vars(history)["low"] is None and len(history.ring) == 1200


@given(st.lists(st.floats(0.1, 120), min_size=1, max_size=40))
def test_never_without_two_lows_in_a_row_and_always_with(series: list[float]) -> None:
    found = play(POLICY, series)
    for number, decision in enumerate(found):
        low = number > 0 and all(int(v * GIB) < 4 * GIB for v in series[number - 1 : number + 1])
        assert (decision.action != NONE) == low


@pytest.mark.field("B43")
def test_restarts_are_off_bounded_and_wait_for_memory() -> None:
    common: dict[str, Any] = {"ended_at": 100.0, "memory_back": True}
    assert not restart_due(POLICY, 1e6, [90.0], restarts=[], **common)[0]
    policy = Policy(restarts=2, restart_backoff_s=60)
    assert not restart_due(policy, 159.0, [90.0], restarts=[], **common)[0]
    assert restart_due(policy, 161.0, [90.0], restarts=[], **common)[0]
    assert not restart_due(policy, 161.0, [90.0], restarts=[], ended_at=100.0, memory_back=False)[0]
    assert not restart_due(policy, 210.0, [90.0], restarts=[50.0], **common)[0], "the wait doubles"
    assert restart_due(policy, 221.0, [90.0], restarts=[50.0], **common)[0]
    due, why = restart_due(policy, 9999.0, [90.0], restarts=[50.0, 60.0], **common)
    assert not due and "limit" in why
    assert not restart_due(policy, 9999.0, [], restarts=[], **common)[0]


def test_memory_that_the_driver_keeps_is_named() -> None:
    memory = meminfo(fixture("mem-meminfo-after-stop-driver-retains-80G.txt"))
    assert 70 < unaccounted(memory) / GIB < 85
    back, why = memory_verdict(POLICY, memory, 10.0)
    assert not back and "waiting" in why
    back, why = memory_verdict(POLICY, memory, 121.0)
    assert not back and "no category" in why and "reboot" in why
    assert memory_verdict(POLICY, meminfo(fixture("mem-meminfo-short-a.txt")), 1.0)[0]


@pytest.mark.parametrize(
    "values",
    [
        {"redline": 4},
        {"redline_gib": "4"},
        {"redline_gib": True},
        {"redline_gib": 1, "hard_gib": 2},
        {"warn_gib": 3},
        {"action": "panic"},
        {"samples": 0},
        {"interval_s": 0},
        {"grace_s": -1},
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error(values: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Policy.from_mapping(values)


@pytest.mark.field("B41")
def test_other_killers_are_compared_with_the_redline() -> None:
    total = 127_600_524 * 1024
    assert earlyoom_floor("-r 3600", total) == pytest.approx(12.17, abs=0.01)
    assert earlyoom_floor("-m 2,1 -s 100", total) == pytest.approx(2.43, abs=0.01)
    assert earlyoom_floor("-M 2097152", total) == pytest.approx(2.0)
    assert earlyoom_floor("-m 10 -M 2097152", total) == pytest.approx(2.0), "the lower one counts"
    assert earlyoom_floor("-m 1 -M 2097152", total) == pytest.approx(1.217, abs=0.01)
    assert earlyoom_floor("-M 8388608 -M 2097152,1048576", total) == pytest.approx(2.0), "the last one"
    assert (
        "before the redline"
        in judge_killer("earlyoom.service", argv=["earlyoom", "-r", "60"], total_bytes=total).conflict
    )
    assert not judge_killer("earlyoom.service", argv=["earlyoom", "-m", "2,1"], total_bytes=total).conflict
    assert not judge_killer("systemd-oomd.service", managed=["user@1000.service"]).conflict
    assert "system.slice" in judge_killer("systemd-oomd.service", managed=["system.slice"]).conflict
    assert judge_killer("dgx-anti-oom.service").conflict


def test_metrics_are_well_formed() -> None:
    text = prometheus(
        {
            "available": 30 * GIB,
            "samples": 7,
            "replicas": {'a"b\\': {"redline": 4 * GIB, "low": None, "running": 1, "trips": 0, "silent": 0}},
        }
    )
    for row in text.splitlines():
        assert row.startswith("#") or float(row.rsplit(" ", 1)[1]) >= 0
    assert 'replica="a\\"b\\\\"' in text and "memory_low_bytes{" not in text
