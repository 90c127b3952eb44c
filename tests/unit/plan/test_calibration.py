"""What a first start measured: stored once, renewed when what runs is another, and never from odd readings."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkfleet.serving.plugins.module_utils import calibration as ca
from ansible_collections.sparkfleet.serving.plugins.module_utils.budget import GIB, BudgetError
from hypothesis import given
from hypothesis import strategies as some

from tests.unit.fake_host import FakeHost

MODULE = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.calibration")
TERMS = {"rank_file": 90.0, "vision": 1.0, "kv": 0.5, "rope": 0.25, "dip": 4.9, "chunk": 0.0}
PLAN, BUILD, IMAGE = "p" * 64, "b" * 64, "sha256:1"


def reading(before: float, idle: float, lowest: float | None = None) -> dict[str, Any]:
    return {
        "before": int(before * GIB),
        "idle": int(idle * GIB),
        "lowest": None if lowest is None else int(lowest * GIB),
    }


HEALTHY = [reading(118, 23.25, 23.0), reading(118, 24.0, 23.9)]


def params(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "replica": "pair-1", "directory": "/var/lib/sparkfleet/calibration", "plan": PLAN, "engine_build": BUILD,
        "image_content": IMAGE, "terms": [TERMS, TERMS], "readings": HEALTHY, "starting": False, "busy": 0,
        "renew": False,
    }  # fmt: skip
    return {**values, **changes}


def ensure(host: FakeHost, *, now: str = "t1", check: bool = False, **changes: Any) -> dict[str, Any]:
    return ca.ensure(host, params(**changes), now=now, check=check)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def test_a_first_start_is_stored_once_and_used(host: FakeHost) -> None:
    first = ensure(host)
    assert first["changed"] and first["ranks"] == {"0": {"overhead": 3.0}, "1": {"overhead": 2.25}}
    text = host.read(first["path"])
    assert text is not None and first["diff"][0]["after"] == text
    # Memory moves from run to run; what is kept does not.
    again = ensure(host, now="t2", readings=[reading(118, 20.0), reading(118, 20.0)])
    assert not again["changed"] and host.read(first["path"]) == text and again["ranks"] == first["ranks"]
    assert ca.choose(ca.parse(text), PLAN, BUILD) == (first["ranks"], "")
    assert ca.choose(ca.parse(text), PLAN) == (first["ranks"], ""), "without a replica no build is known"


@pytest.mark.parametrize(
    "change", [{"plan": "q" * 64}, {"engine_build": "c" * 64}, {"image_content": "sha256:2"}]
)
def test_what_is_another_is_measured_anew(host: FakeHost, change: dict[str, Any]) -> None:
    ensure(host)
    assert ensure(host, check=True, **change)["changed"]
    assert ensure(host, **change)["changed"]
    assert not ensure(host, **change)["changed"]


def test_what_is_kept_counts_for_nothing_else(host: FakeHost) -> None:
    document = ca.parse(host.read(ensure(host)["path"]) or "")
    for plan, build, words in (
        (PLAN, "x", "another build"),
        ("x", BUILD, "another model, engine or settings"),
    ):
        constants, why = ca.choose(document, plan, build)
        assert constants == {} and words in why
    assert "format" in ca.choose({**document, "format": "sparkfleet-calibration/2"}, PLAN, BUILD)[1]


def test_check_mode_predicts_a_start_and_reads_a_running_rank(host: FakeHost) -> None:
    bare = ensure(host, check=True, starting=True, readings=[], image_content="")
    assert bare["changed"] and host.read(bare["path"]) is None
    assert bare["diff"][0]["before_header"] == bare["path"]
    running = ensure(host, check=True, image_content="")
    assert running["changed"] and host.read(bare["path"]) is None
    ensure(host)
    assert not ensure(host, check=True, starting=True, readings=[], image_content="")["changed"]


def test_a_dip_counts_where_it_is_worse_or_was_measured_under_load(host: FakeHost) -> None:
    deep = [reading(118, 23.25, 17.0), reading(118, 24.0, 23.9)]
    assert ensure(host, readings=deep)["ranks"] == {
        "0": {"overhead": 3.0, "dip": 6.25},
        "1": {"overhead": 2.25},
    }
    renewed = ensure(host, readings=HEALTHY, renew=True, now="t2")
    assert renewed["changed"] and renewed["ranks"]["0"] == {"overhead": 3.0, "dip": 0.25}
    kept = json.loads(host.read(renewed["path"]) or "")
    assert kept["under_load"] is True and kept["at"] == "t2"
    assert kept["readings_gib"]["0"] == {"before": 118.0, "idle": 23.25, "lowest": 23.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"readings": [reading(118, 23.25)]}, "every rank"),
        (
            {"readings": [{"before": None, "idle": 5, "lowest": None}, reading(118, 24)]},
            "memory before: was not",
        ),
        ({"readings": [{}, {}]}, "memory before and idle"),
        ({"readings": [reading(118, 30), reading(118, 24)]}, "cannot be of this rank alone"),
        ({"readings": [reading(118, 118.5), reading(118, 24)]}, "idle must lie under"),
        ({"readings": [reading(190, 23), reading(118, 24)]}, "cannot be of this rank alone"),
        ({"busy": 2}, "2 requests run"),
    ],
)
def test_odd_readings_are_told_and_not_kept(host: FakeHost, changes: dict[str, Any], words: str) -> None:
    told = ensure(host, **changes)
    assert not told["changed"] and told["ranks"] == {} and words in told["why_not"]
    assert host.read(told["path"]) is None
    with pytest.raises((ca.CalibrationError, BudgetError)):
        ensure(host, **changes, renew=True)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"0": 1}', '{"0": {}}', '{"x": {"dip": 1}}', '{"0": {"overhead": true}}', '{"0": {"overhead": NaN}}',
     '{"0": {"speed": 1}}', '{"format": "other", "ranks": {}}', '{"format": "sparkfleet-calibration/1"}'],
)  # fmt: skip
def test_what_is_no_calibration_is_refused_by_name(host: FakeHost, text: str) -> None:
    with pytest.raises(ca.CalibrationError):
        ca.parse(text)
    path = "/var/lib/sparkfleet/calibration/pair-1.json"
    host.write(path, text)
    assert ensure(host)["changed"], "a damaged file is measured anew"


LEAVES = some.none() | some.booleans() | some.floats() | some.text(max_size=3)


@given(some.recursive(LEAVES, lambda inner: some.dictionaries(some.text(max_size=9), inner), max_leaves=8))
def test_nothing_else_is_raised(document: Any) -> None:
    with contextlib.suppress(ca.CalibrationError):
        ca.choose(ca.parse(json.dumps(document)), PLAN, BUILD)


def test_plain_constants_by_rank_count_everywhere() -> None:
    plain = {"0": {"overhead": 2.5, "dip": 1.0}}
    assert ca.choose(ca.parse(json.dumps(plain)), PLAN, BUILD) == (plain, "")
    assert ca.choose({}, PLAN, BUILD) == ({}, "")


def test_the_module_warns_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(**changes: Any) -> dict[str, Any]:
        values = params(directory=str(tmp_path), **changes)
        with patch_module_args(values), pytest.raises(SystemExit):
            MODULE.main()
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert "requests run" in call(busy=1)["why_not"]
    assert call(busy=1, renew=True)["failed"]
    assert call()["changed"] and (tmp_path / "pair-1.json").is_file()
    assert not call()["changed"]
    assert call(replica="../x")["failed"]
