"""What the controller prints while a node works for long."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.utils.display import Display
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import Progress
from ansible_collections.sparkfleet.serving.plugins.plugin_utils import watch


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"what": "copy", "done": 3 << 30, "total": 12 << 30, "rate": 1 << 30, "left": 9},
            "n: copy: 3.00 GiB of 12.00 GiB (25 %), 1.00 GiB/s, 9 s left",
        ),
        ({"what": "built", "line": "Step 3/9 : RUN make"}, "n: built: Step 3/9 : RUN make"),
        ({}, "n: at work: begun"),
        ({"what": "x", "done": 5, "total": 4, "left": 5400}, "n: x: 5 B of 4 B (100 %), 1 h 30 min left"),
    ],
)
def test_a_line_is_plain(state: dict[str, Any], text: str) -> None:
    assert watch.line("n", state) == text


class Node:
    """A connection whose node has a progress file, and answers only every second time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = 0

    def exec_command(self, command: str, in_data: object, sudoable: bool) -> tuple[int, bytes, bytes]:
        assert command == f"cat {self.path}"
        assert (in_data, sudoable) == (None, False)
        self.asked += 1
        if self.asked % 2:
            raise OSError("the line broke")
        return 0, self.path.read_bytes(), b""


def test_lines_come_while_it_works_and_a_broken_line_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(watch, "FIRST", 0.01)
    monkeypatch.setattr(watch, "LONGEST", 0.01)
    monkeypatch.setattr(Display, "display", lambda _self, text: said.append(text))
    path = tmp_path / "progress/x.json"
    progress = Progress(path, "copy", 100)
    progress.add(50)
    with watch.Watch(Node(path), "n", str(path)):
        for _ in range(400):
            if said:
                break
            time.sleep(0.01)
    progress.close()
    assert said
    assert said[0].startswith("n: copy: 50 B of 100 B (50 %)")
    assert len(set(said)) == len(said)
    assert json.loads(json.dumps(said))
