"""Fixtures of the plan's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import ModelLock
from ansible_collections.sparkfleet.serving.plugins.module_utils.split import RankLayout, Split, plan_split

from tests.unit.plan.small import EXL3, lay_out_exl3
from tools.plan_fullsize import full_size_lock

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "plan"


@pytest.fixture(scope="session")
def full_lock() -> ModelLock:
    return full_size_lock()


@pytest.fixture(scope="session")
def full_pair(full_lock: ModelLock) -> Split:
    return plan_split(full_lock, "tensorfold_native", 2)


@pytest.fixture(scope="session")
def full_one(full_lock: ModelLock) -> RankLayout:
    return plan_split(full_lock, "tensorfold_native", 1).ranks[0]


@pytest.fixture(scope="session")
def exl3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("exl3")
    return {path.name: lay_out_exl3(path.name, base) for path in sorted(EXL3.iterdir()) if path.is_dir()}
