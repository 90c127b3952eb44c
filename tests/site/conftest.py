"""The whole job on the lab. These files run in the order of their names, on one lab instance that starts bare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from lab import instance as lab_instance
from lab.config import NODES, Instance
from lab.config import instance as chosen

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MODEL = "DeepSeek-V4.1-Flash-1017"
CONTAINER = "dsv41-1017-exl3-tf"


class Lab:
    """One lab instance and what the tests ask of it."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.inventory = (
            str(ROOT / "inventory/lab") if instance.name == "lab" else str(instance.directory / "inventory")
        )
        self.api = f"http://{instance.address(NODES[0])}:8888/v1"

    def on(self, node: str, *command: str, ok: bool = True) -> str:
        """Output of a command in a node, as root."""
        done = subprocess.run(
            ["docker", "exec", self.instance.container(node), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not ok, f"{node}: {command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def containers(self) -> dict[str, dict[str, Any]]:
        """Id, start time and state of the rank container on each node."""
        found = {}
        for node in NODES:
            text = self.on(node, "docker", "inspect", CONTAINER, ok=False)
            rows = json.loads(text) if text else []
            if rows:
                found[node] = {
                    "id": rows[0]["Id"],
                    "started": rows[0]["State"]["StartedAt"],
                    "running": rows[0]["State"]["Running"],
                }
        return found

    def play(
        self, playbook: str, *extra: str, inventory: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """ansible-playbook from the root of the repository; nothing is raised."""
        return subprocess.run(
            [str(BIN / "ansible-playbook"), playbook, "-i", inventory or self.inventory, *extra],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            capture_output=True,
            text=True,
            check=False,
        )

    def client(self) -> OpenAI:
        return OpenAI(base_url=self.api, api_key="unused", timeout=60, max_retries=0)

    def ask(self, text: str = "Explain tensor parallelism briefly.") -> str:
        reply = self.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=64, temperature=0
        )
        return str(reply.choices[0].message.content)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} within {seconds:g} s"
        time.sleep(0.5)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The instance named by LAB_NAME, up. The first file of this folder expects it bare (`tests/run` sees to that)."""
    found = Lab(chosen())
    lab_instance.up(found.instance)
    yield found
