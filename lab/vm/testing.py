"""Handles for tests that need the virtual machines, which must run (``python -m lab.vm up``)."""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass

from ..config import instance
from ..testing import Result
from . import machine as machines_of


@dataclass(frozen=True)
class Vm:
    """A virtual machine; ``run`` is root's. A round trip takes a second or more where it is emulated."""

    machine: machines_of.Machine

    def run(self, script: str, timeout: float = 600) -> Result:
        """Run a shell script as root: its exit status and both streams."""
        done = machines_of.ssh(self.machine, "sudo", "sh", "-c", shlex.quote(script), timeout=timeout)
        return Result(done.returncode, done.stdout + done.stderr)

    def write(self, path: str, data: bytes) -> None:
        """A file of root's, of any size: a command line holds 128 KiB."""
        script = shlex.quote(f"base64 -d >{shlex.quote(path)}")
        given = base64.encodebytes(data).decode()
        done = machines_of.ssh(self.machine, "sudo", "sh", "-c", script, timeout=600, text=given)
        assert done.returncode == 0, f"{self.machine.name}: {path}: {done.stderr}"

    def text(self, script: str, timeout: float = 600) -> str:
        """Output of a script that must succeed, without the line end."""
        done = self.run(script, timeout)
        assert done.status == 0, f"{self.machine.name}: {script}: {done.text}"
        return done.text.rstrip("\n")


def pair() -> tuple[Vm, Vm]:
    """Both machines of the instance under test; fails when they are down."""
    lab = instance()
    found = machines_of.machines(lab)
    assert (lab.directory / "vm/up.json").exists() and all(one.pid for one in found), (
        f"the virtual machines of the lab {lab.name} are down; `python -m lab.vm up` starts them"
    )
    first, second = (Vm(one) for one in found)
    return first, second


def inventory() -> str:
    return str(instance().directory / "vm/inventory")
