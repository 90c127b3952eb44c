"""Values that several roles share are judged by sight, before any node is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.filter.fleet import value_refusals


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sparkfleet_context": 524288, "sparkfleet_parallel": "4", "sparkfleet_drafts": "false"},
        {"sparkfleet_context": "", "sparkfleet_drafts": True},
    ],
)
def test_what_can_be_meant_passes(values: dict[str, object]) -> None:
    assert value_refusals(values) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sparkfleet_context", "abc"),
        ("sparkfleet_context", "-1"),
        ("sparkfleet_context", "0"),
        ("sparkfleet_parallel", "abc"),
        ("sparkfleet_parallel", "4.5"),
        ("sparkfleet_parallel", 0),
        ("sparkfleet_drafts", "maybe"),
        ("sparkfleet_drafts", None),
    ],
)
def test_the_value_is_named(name: str, value: object) -> None:
    (text,) = value_refusals({name: value})
    assert name in text and (repr(value) in text or str(value) in text)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (text,) = value_refusals({"sparkfleet_hub_token_file": str(tmp_path / "token")})
    assert "sparkfleet_hub_token_file" in text
    (tmp_path / "token").write_text("x")
    assert value_refusals({"sparkfleet_hub_token_file": str(tmp_path / "token")}) == []
