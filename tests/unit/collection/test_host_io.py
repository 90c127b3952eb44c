"""How a module ends: with a result, its warnings said, or with its refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal, finish


class Module:
    """What a module calls when it ends."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.result: dict[str, Any] = {}

    def warn(self, text: str) -> None:
        self.said.append(text)

    def exit_json(self, **result: Any) -> None:
        self.result = result
        raise SystemExit(0)

    def fail_json(self, **result: Any) -> None:
        self.result = {"failed": True, **result}
        raise SystemExit(1)


def ended(act: Callable[[], dict[str, Any]]) -> Module:
    module = Module()
    try:
        finish(module, act)
    except SystemExit:
        return module
    raise AssertionError("it did not end")


def test_warnings_are_said_and_are_no_result() -> None:
    """Ansible takes a key `warnings` of a result away in 2.23."""
    module = ended(lambda: {"path": "/x", "warnings": ["a disk is slow"]})
    assert module.said == ["a disk is slow"]
    assert module.result == {"changed": False, "path": "/x"}


def test_a_refusal_fails_with_its_parts() -> None:
    def act() -> dict[str, Any]:
        raise Refusal("no room", "1 GiB", "2 GiB", "free some")

    module = ended(act)
    assert module.result["failed"]
    assert module.result["msg"].endswith("no room; found: 1 GiB; wanted: 2 GiB; remedy: free some")
