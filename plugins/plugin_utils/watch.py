# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Lines on the controller while a module works for long on a node.

The module writes how far it is into a small world-readable file under ``/run/sparkfleet/progress``; a thread
here reads that file over a connection of its own and prints a plain line. Nothing depends on it: a reading
that fails is skipped, and a module that ends within a few seconds is never looked at.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Mapping
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

FOLDER = "/run/sparkfleet/progress"
#: Seconds before the first line, and between lines: the pause grows so that an hour gives a page, not a book.
FIRST, STEP, LONGEST = 4.0, 1.5, 30.0
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """``1.50 GiB``."""
    value = float(count)
    for unit in UNITS:
        if value < 1024 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def span(seconds: float) -> str:
    """``45 s``, ``12 min``, ``1 h 20 min``."""
    whole = int(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def line(host: str, state: Mapping[str, Any]) -> str:
    """One plain line of progress."""
    done, total = int(state.get("done") or 0), int(state.get("total") or 0)
    parts = []
    if total:
        parts.append(f"{size(done)} of {size(total)} ({100 * min(done, total) // total} %)")
    elif done:
        parts.append(size(done))
    if state.get("rate"):
        parts.append(f"{size(float(state['rate']))}/s")
    if state.get("left") is not None and total:
        parts.append(f"{span(float(state['left']))} left")
    if state.get("line"):
        parts.append(str(state["line"]))
    return f"{host}: {state.get('what') or 'at work'}: {', '.join(parts) or 'begun'}"


class Watch:
    """Context manager that prints progress of what runs inside it."""

    def __init__(self, connection: Any, host: str, path: str) -> None:
        self._connection = copy.copy(connection)
        self._host = host
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._said = ""

    def _loop(self) -> None:
        pause = FIRST
        while not self._stop.wait(pause):
            pause = min(pause * STEP, LONGEST)
            with contextlib.suppress(Exception):
                code, out, _err = self._connection.exec_command(
                    f"cat {self._path}", in_data=None, sudoable=False
                )
                text = line(self._host, json.loads(out)) if code == 0 else ""
                if text and text != self._said and not self._stop.is_set():
                    self._said = text
                    Display().display(text)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2)


class WatchedAction(ActionBase):  # type: ignore[misc]
    """Runs the module of the same name and prints its progress."""

    MODULE = ""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """One module call."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        result.update(self.watched(dict(self._task.args), task_vars))
        return result

    def watched(self, args: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        """Call the module; outside check mode, watch its progress."""
        variables = task_vars or {}
        host = str(variables.get("inventory_hostname", "node"))
        name = f"sparkfleet.serving.{self.MODULE}"
        watched = not self._task.check_mode and not args.get("progress_file")
        path = f"{FOLDER}/{self._task._uuid}.json"
        with Watch(self._connection, host, path) if watched else contextlib.nullcontext():
            found: dict[str, Any] = self._execute_module(
                module_name=name,
                module_args=dict(args, progress_file=path) if watched else args,
                task_vars=task_vars,
            )
        return found
