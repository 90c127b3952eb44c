"""Fault switches of the lab: files `fault-NAME` in the folder that a lab node binds into every container.

Read each time they are asked for; absent (always, outside a lab) means off. The text is the value.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from .errors import say


def value(name: str) -> str | None:
    """The text of a switch that is on, None when it is off."""
    try:
        return Path(os.environ.get("LAB_MEMORY_DIR", "/run/lab/memory"), f"fault-{name}").read_text().strip()
    except OSError:
        return None


def once(name: str) -> bool:
    """Whether a switch is on; asking turns it off."""
    path = Path(os.environ.get("LAB_MEMORY_DIR", "/run/lab/memory"), f"fault-{name}")
    found = path.exists()
    path.unlink(missing_ok=True)
    return found


def seconds(name: str, unit: float) -> float:
    """A duration: the switch's number times `unit`; 0 when it is off."""
    text = value(name)
    return float(text or 0) * unit if text is not None else 0.0


def loading(rank: int) -> None:
    """`engine-load` (seconds) makes the load slow; `engine-crash` with "load" ends it."""
    time.sleep(seconds("engine-load", 1))
    if value("engine-crash") == "load":
        crash(rank)


def crash(rank: int) -> None:
    """Die as a process that was killed for its memory."""
    say(f"rank {rank}: killed")
    os._exit(137)
