"""The answer of one module of the collection on one host of an inventory, without a playbook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.proof.prove import ROOT


def ask(inventory: str, host: str, module: str, **arguments: Any) -> dict[str, Any]:
    """Run a module as root; ``failed`` is set when it refused."""
    ansible = str(Path(sys.executable).parent / "ansible")
    done = subprocess.run(
        [
            ansible,
            host,
            "-i",
            inventory,
            "-b",
            "-m",
            f"sparkfleet.serving.{module}",
            "-a",
            json.dumps(arguments),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_LOAD_CALLBACK_PLUGINS": "false",
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "=> {" in done.stdout, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(
        done.stdout[done.stdout.index("=> {") + 3 : done.stdout.rindex("}") + 1]
    )
    return {**answer, "failed": done.returncode != 0}
