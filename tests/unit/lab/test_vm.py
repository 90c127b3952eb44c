"""The virtual machines' archives, ports and pids, without any machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lab.config import Instance
from lab.vm import machine
from lab.vm.image import Image
from lab.vm.seed import Directory, File, archive


def unpack(data: bytes) -> dict[str, tuple[int, int, bytes]]:
    """Name -> (mode, owner, data), read by the rules of the format."""
    found: dict[str, tuple[int, int, bytes]] = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * number : at + 14 + 8 * number], 16) for number in range(13)]
        size, length = fields[6], fields[11]
        name = data[at + 110 : at + 110 + length - 1].decode()
        start = (at + 110 + length + 3) // 4 * 4
        if name == "TRAILER!!!":
            assert start == len(data)
            return found
        found[name] = (fields[1], fields[2], data[start : start + size])
        at = (start + size + 3) // 4 * 4


def test_an_archive_has_every_parent_before_its_file_and_keeps_modes() -> None:
    found = unpack(
        archive(
            [
                File("/seed/etc/hostname", b"vm-1\n"),
                File("/seed/home/spark/.ssh/authorized_keys", b"key", 0o600, owner=1000),
                File("/bin/x", bytes(range(7)), 0o755),
                Directory("/proc"),
            ]
        )
    )
    names = list(found)
    for name in names:
        for parent in Path(name).parents[:-1]:
            assert names.index(str(parent)) < names.index(name)
    assert found["seed/etc/hostname"] == (0o100644, 0, b"vm-1\n")
    assert found["seed/home/spark/.ssh"] == (0o040700, 1000, b"")
    assert found["seed/home/spark/.ssh/authorized_keys"] == (0o100600, 1000, b"key")
    assert found["seed/home"] == found["proc"] == (0o040755, 0, b"")
    assert found["bin/x"] == (0o100755, 0, bytes(range(7)))


def test_a_pid_that_is_somebody_elses_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instance, "directory", tmp_path)
    one = machine.machines(Instance("x", 80))[0]
    one.directory.mkdir()
    with subprocess.Popen(["sleep", "60"]) as other:  # it names no pid file of ours
        one.pid_file.write_text(f"{other.pid}\n")
        assert [one.pid] == [None]
        with pytest.raises(SystemExit, match="vm-1 does not run"):
            one.pause()
        one.stop()
        assert other.poll() is None
        assert not one.pid_file.exists()
        other.kill()
    waiter = [
        sys.executable,
        "-c",
        "print('up', flush=True); __import__('time').sleep(60)",
        str(one.pid_file),
    ]
    with subprocess.Popen(waiter, stdout=subprocess.PIPE) as ours:
        assert ours.stdout is not None
        assert ours.stdout.readline() == b"up\n"
        one.pid_file.write_text(f"{ours.pid}\n")
        assert one.pid == ours.pid
        one.stop()
        assert ours.wait() == -9


def test_ports_are_free_and_different() -> None:
    ports = machine.free_ports(socket.SOCK_STREAM, 5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_the_accelerator_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_VM_ACCEL", "tcg")
    assert machine.accelerator(Image(Path("/nowhere"))) == "tcg"
