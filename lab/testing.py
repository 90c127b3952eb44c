"""Handles for tests that need a lab: run commands in a node, set faults, wait.

The instance is that of ``LAB_NAME``; it must be up (``make lab-up``). A lab that is down is a failure, not a
skip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from docker.models.containers import Container

from . import fault, instance
from .config import NODES, Instance
from .config import instance as chosen


@dataclass(frozen=True)
class Result:
    """Exit status and output (both streams) of a command."""

    status: int
    text: str


class Node:
    """A lab node. ``run`` is root's, ``user`` is that of the ordinary user."""

    def __init__(self, lab: Instance, name: str) -> None:
        self.lab = lab
        self.name = name
        self.address = lab.address(name)

    @property
    def container(self) -> Container:
        container: Container = engine().containers.get(self.lab.container(self.name))
        return container

    def run(self, *command: str, user: str = "root") -> Result:
        return Result(*instance.run_in(self.container, *command, user=user))

    def user(self, *command: str) -> Result:
        return self.run(*command, user="spark")

    def text(self, *command: str) -> str:
        """Output of a command that must succeed, without the line end."""
        result = self.run(*command)
        assert result.status == 0, f"{self.name}: {' '.join(command)}: {result.text}"
        return result.text.rstrip("\n")

    def read(self, path: str) -> str:
        return self.text("cat", path)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        instance.put(self.container, [instance.File(path, text, mode)])

    def restart(self) -> None:
        instance.restart(self.lab, self.name)

    @contextmanager
    def fault(self, name: str, value: str | None = None) -> Iterator[None]:
        """A fault switch that is on inside the block."""
        fault.switch(self.lab, name, self.name, True, value)
        try:
            yield
        finally:
            fault.switch(self.lab, name, self.name, False)


@cache
def engine() -> Any:
    return instance.connect()


def lab() -> Instance:
    """The instance under test; fails when it is down."""
    found = chosen()
    assert found.up_file.exists(), f"the lab {found.name} is down; `make lab-up` brings it up"
    return found


def nodes() -> tuple[Node, Node]:
    first, second = (Node(lab(), name) for name in NODES)
    return first, second


def eventually(check: Callable[[], bool], what: str, seconds: float = 15) -> None:
    """Wait for what takes a moment, such as a carrier that drops."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.2)
