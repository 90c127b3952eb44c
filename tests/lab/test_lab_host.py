"""The machine before and after a lab: equal, but for the images and caches that `lab down` keeps."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import instance
from lab.config import Instance
from lab.config import instance as named
from lab.testing import engine

pytestmark = pytest.mark.lab
# Values that count what happens on the machine; everything else under these trees is a setting.
COUNTERS = (
    *("random/", "ns_last_pid", "pty/nr", "dentry-state", "file-nr", "inode-nr", "inode-state", "aio-nr"),
    *("quota/", "epoll/", "hostname", "stat_refresh", "keys/", "sem_next_id", "msg_next_id", "shm_next_id"),
)


def settings(root: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.stat().st_mode & 0o400 and not any(name in str(path) for name in COUNTERS):
            try:
                found[str(path)] = path.read_bytes()
            except OSError:
                found[str(path)] = b"unreadable"
    return found


def host() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in ("vm", "kernel", "fs"):
        found |= settings(Path("/proc/sys") / name)
    for queue in Path("/sys/block").glob("*/queue"):
        found |= {str(path): path.read_bytes() for path in queue.glob("read_ahead_kb")}
    modules = Path("/proc/modules")
    names = (
        sorted(line.split()[0] for line in modules.read_text(encoding="ascii").splitlines())
        if modules.exists()
        else []
    )
    return found | {"modules": " ".join(names).encode()}


def traces(lab: Instance) -> list[str]:
    """What is left of an instance on the machine: containers, volumes, networks, mounts, firewall rules."""
    client = engine()
    mine = {"label": f"sparkfleet.lab={lab.name}"}
    found = [str(each.name) for each in client.containers.list(all=True, filters=mine)]
    found += [str(each.name) for each in client.volumes.list(filters=mine)]
    found += [str(each.name) for each in client.networks.list(filters=mine)]
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=False).stdout
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    prefix = lab.subnet.rpartition(".")[0] + "."
    return found + [line for line in (rules + routes).splitlines() if prefix in line]


@pytest.fixture
def lab() -> Iterator[Instance]:
    """An instance of this test's own, so that the one under test lives on."""
    made = named(f"{named().name[:12]}-host")
    yield made
    instance.down(made)


def test_a_lab_leaves_its_machine_as_it_was(lab: Instance) -> None:
    before, clock = host(), time.time() - time.monotonic()
    instance.up(lab)
    assert len(traces(lab)) > 4 + 6 + 1
    assert host() == before
    # The hub's link and both nodes', which the engine cannot find again.
    mine = {"label": f"sparkfleet.lab={lab.name}"}
    ends = instance.link_ends(engine().networks.list(filters=mine))
    assert len(ends) == 3 and all(Path("/sys/class/net", end).exists() for end in ends)
    # Whatever is still in a node's network keeps it, and with it the link, alive after the container.
    pid = engine().containers.get(lab.container("spark-1")).attrs["State"]["Pid"]
    with subprocess.Popen(["nsenter", "-t", str(pid), "-n", "sleep", "120"]) as lingering:
        try:
            instance.down(lab)
        finally:
            lingering.kill()
    assert traces(lab) == []
    assert not any(Path("/sys/class/net", end).exists() for end in ends)
    assert not lab.up_file.exists()
    assert host() == before
    assert abs(time.time() - time.monotonic() - clock) < 1
