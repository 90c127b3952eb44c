"""A lab node keeps its hands off its machine: one test for each thing that it must not reach."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lab.testing import Node, nodes

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def node() -> Node:
    return nodes()[0]


def test_the_clock_cannot_be_set(node: Node) -> None:
    before = time.time()
    result = node.run("date", "--set", "2020-01-01")
    assert result.status != 0
    assert "Operation not permitted" in result.text
    assert time.time() >= before


def test_no_kernel_module_can_be_loaded(node: Node) -> None:
    # The refusal is the kernel's: even a module that exists would be refused for want of CAP_SYS_MODULE.
    program = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); libc.syscall(313, 0, b'', 0)"
    program += "; print(os.strerror(ctypes.get_errno()))"
    assert node.run("modprobe", "dummy").status != 0
    # A kernel built without modules has no such call at all.
    assert node.text("python3", "-c", program) in ("Operation not permitted", "Function not implemented")


def test_the_host_disk_cannot_be_opened(node: Node) -> None:
    device = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    numbers = [line.split()[2] for line in device.splitlines() if line.split()[4] == "/"]
    major, minor = (numbers[0] if not numbers[0].startswith("0:") else "8:0").split(":")
    node.run("rm", "-f", "/root/disk")
    node.text("mknod", "/root/disk", "b", major, minor)
    for options in (
        ["if=/root/disk", "of=/dev/null", "count=1"],
        ["if=/dev/zero", "of=/root/disk", "count=1", "conv=notrunc"],
    ):
        assert (
            "Operation not permitted" in node.run("dd", *options).text
            or "Permission denied" in node.run("dd", *options).text
        )
    node.text("rm", "/root/disk")


def test_the_device_list_cannot_be_widened(node: Node) -> None:
    allow = Path("/sys/fs/cgroup/devices/devices.allow")
    if allow.parent.exists():
        result = node.run("sh", "-c", f"echo a > {allow}")
        assert result.status != 0
    listed = node.run("cat", "/sys/fs/cgroup/devices/devices.list").text
    assert "a *:* rwm" not in listed
    assert not [line for line in listed.splitlines() if line.startswith("b") and not line.endswith(" m")]


def test_block_device_settings_cannot_be_written(node: Node) -> None:
    paths = node.text("find", "/sys/devices", "-path", "*/block/*/queue/read_ahead_kb").split()
    paths += node.text("sh", "-c", "ls -d /sys/block/*/queue/read_ahead_kb").split()
    assert len(paths) > 1
    for path in paths:
        result = node.run("sh", "-c", f"cat {path} > /tmp/value && cat /tmp/value > {path}")
        assert "Read-only file system" in result.text


@pytest.mark.parametrize("name", ["vm/swappiness", "kernel/pid_max", "fs/file-max"])
def test_sysctls_that_are_not_namespaced_stay_in_the_node(node: Node, name: str) -> None:
    host = Path("/proc/sys", name).read_text(encoding="ascii")
    before = node.read(f"/proc/sys/{name}")
    changed = str(int(before) - 1)
    node.text("sysctl", "--quiet", "--write", f"{name.replace('/', '.')}={changed}")
    assert node.read(f"/proc/sys/{name}") == changed
    assert Path("/proc/sys", name).read_text(encoding="ascii") == host
    node.text("sysctl", "--quiet", "--write", f"{name.replace('/', '.')}={before}")


@pytest.mark.parametrize(
    "path", ["/proc/sysrq-trigger", "/sys/power/state", "/sys/kernel/mm/transparent_hugepage/enabled"]
)
def test_the_kernels_levers_are_out_of_reach(node: Node, path: str) -> None:
    assert node.run("sh", "-c", f"echo x > {path}").status != 0


@pytest.mark.parametrize(
    "name", ["sys_time", "sys_module", "sys_rawio", "sys_boot", "sys_resource", "syslog"]
)
def test_capabilities_that_reach_the_host_are_absent(node: Node, name: str) -> None:
    numbers = {
        "sys_module": 16,
        "sys_rawio": 17,
        "sys_boot": 22,
        "sys_resource": 24,
        "sys_time": 25,
        "syslog": 34,
    }
    status = node.read("/proc/1/status")
    bounding = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd"))
    assert not int(bounding, 16) >> numbers[name] & 1
