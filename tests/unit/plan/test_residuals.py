"""The page of residuals is the command's, and no prediction drifts from what it explains."""

from __future__ import annotations

from ansible_collections.sparkfleet.serving.plugins.module_utils import split as sp
from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import ModelLock

from tools import plan_residuals


def test_page_is_what_the_command_writes(
    full_lock: ModelLock, full_pair: sp.Split, full_one: sp.RankLayout
) -> None:
    scheme = sp.SCHEMES["tensorfold_native"]
    parts = sp.native_parts(scheme, full_pair.dims, 4, 0, parity=True)
    four = sp.lay_out(scheme, parts, full_lock.tensors, 4, 0)
    text = plan_residuals.page(full_lock, full_pair, full_one.data_bytes, four)
    assert plan_residuals.PAGE.read_text() == text, "run: python tools/plan_residuals.py"
    for row in plan_residuals.rows(full_lock, full_pair, full_one.data_bytes, four):
        if row.unit == "B" and row.kind == "predicted" and not row.what.startswith("header"):
            assert row.observed == row.predicted, row
        if row.what.startswith("header"):
            assert abs(row.observed - row.predicted) < 1, row
