"""The bench ends badly when a line is missed."""

from __future__ import annotations

import pytest

from bench import transfer

GOOD = {
    transfer.RAW: 1.0,
    transfer.SHARE: 0.97,
    transfer.PROVEN: 0.96,
    transfer.AFTERWARDS: 0.7,
    transfer.SSH: 0.8,
}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, 0),
        ({transfer.SHARE: 0.94}, 1),
        ({transfer.PROVEN: 0.89}, 1),
        ({transfer.SSH: 0.96}, 1),
        ({transfer.SHARE: 0.9, transfer.PROVEN: 0.7}, 3),
    ],
)
def test_a_missed_line_is_said(change: dict[str, float], lines: int) -> None:
    assert len(transfer.missed({**GOOD, **change})) == lines
