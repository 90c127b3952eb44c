# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Counts what a run cost each node, and writes what it changed as data."""

from __future__ import annotations

DOCUMENTATION = r"""
name: summary
type: aggregate
short_description: remote tasks and changes of a run, a line a node
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Prints at the end of a run how many tasks each node was asked to carry out and how many changed something.
  - A task that runs on the controller only (an assertion, an include, a computed fact) costs a node nothing and
    is not counted.
  - With O(record) it also writes the names of the changed tasks a node as JSON. The proofs of check mode compare
    two such files.
options:
  record:
    description: A file on the controller that receives the record of the run.
    type: path
    env:
      - name: SPARKFLEET_RECORD
    ini:
      - section: callback_summary
        key: record
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

# Actions that never open a connection to a node.
CONTROLLER_ONLY = frozenset(
    {
        "add_host",
        "assert",
        "debug",
        "fail",
        "group_by",
        "import_playbook",
        "import_role",
        "import_tasks",
        "include_role",
        "include_tasks",
        "include_vars",
        "meta",
        "pause",
        "set_fact",
        "set_stats",
        "validate_argument_spec",
    }
)


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Aggregates over all plays of one ansible-playbook command."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "sparkfleet.serving.summary"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.remote_tasks: Counter[str] = Counter()
        self.changed: dict[str, list[str]] = {}
        self.tasks: list[dict[str, Any]] = []

    def _count(self, result: Any) -> None:
        """One finished module call of one host; delegated calls are counted where they ran."""
        task, host = result.task, result.host.get_name()
        data = result.result
        action = str(task.action).rsplit(".", 1)[-1]
        if action in CONTROLLER_ONLY:
            return
        where = (data.get("_ansible_delegated_vars") or {}).get("ansible_delegated_host") or host
        if where != "localhost" and not data.get("skipped"):
            self.remote_tasks[where] += 1
        if data.get("changed"):
            self.changed.setdefault(host, []).append(task.get_name())
            self.tasks.append(
                {
                    "host": host,
                    "task": task.get_name(),
                    "action": action,
                    "diff": data.get("diff"),
                    "path": data.get("dest") or data.get("path"),
                }
            )

    def v2_runner_on_ok(self, result: Any) -> None:
        # The items of a loop were counted one by one.
        if not result.task.loop:
            self._count(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        if not result.task.loop:
            self._count(result)

    def v2_runner_item_on_ok(self, result: Any) -> None:
        self._count(result)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        self._count(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        hosts = sorted(stats.processed)
        for host in hosts:
            if self.remote_tasks[host]:
                changed = len(self.changed.get(host, []))
                self._display.display(
                    f"{host:<24} {self.remote_tasks[host]:>4} remote tasks, {changed:>3} changed"
                )
        record = self.get_option("record")
        if record:
            summary = {host: stats.summarize(host) for host in hosts}
            Path(record).write_text(
                json.dumps(
                    {
                        "remote_tasks": dict(self.remote_tasks),
                        "changed": self.changed,
                        "tasks": self.tasks,
                        "stats": summary,
                    },
                    indent=1,
                    sort_keys=True,
                    default=str,
                )
            )
