"""Engram tables behind a user-space file system: refused by its type, and by its time when somebody vouches for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.testing import Node, eventually, lab, nodes
from tests.proof.ask import ask
from tests.proof.tables import script

pytestmark = pytest.mark.lab
NEAR, FAR, UNIT = "/var/lib/sparkfleet/near", "/var/lib/sparkfleet/far", "lab-far.service"


@pytest.fixture
def node() -> Iterator[Node]:
    one = nodes()[0]
    one.text("mkdir", "-p", NEAR, FAR)
    one.text("python3", "-c", script(NEAR))
    one.write("/root/fuse_far.py", (Path(__file__).parent / "fuse_far.py").read_text())
    one.text("systemd-run", f"--unit={UNIT}", "python3", "/root/fuse_far.py", NEAR, FAR)
    eventually(lambda: one.run("mountpoint", "-q", FAR).status == 0, "the file system to be mounted")
    yield one
    one.text("umount", FAR)
    one.text("rm", "-r", NEAR, FAR, "/root/fuse_far.py")


@pytest.mark.field("B60")
def test_tables_behind_a_process_are_refused_by_type_and_by_time(node: Node) -> None:
    inventory = str(lab().directory / "inventory")
    kind = ask(inventory, node.name, "engram_check", path=FAR, layers=[1])
    assert kind["failed"]
    assert "lies on fuse" in kind["msg"]
    assert "around 90 µs a read on a local NVMe, around 940 µs over a network" in kind["msg"]
    slow = ask(inventory, node.name, "engram_check", path=FAR, layers=[1], extra_fstypes=["fuse"])
    assert slow["failed"]
    found = re.search(r"a 4 KiB random read takes (\d+) µs", slow["msg"])
    assert found and int(found[1]) >= 940, slow["msg"]
    assert "local NVMe class is around 90 µs, network class around 940 µs, the limit is 400 µs" in slow["msg"]
    near = ask(inventory, node.name, "engram_check", path=NEAR, layers=[1], latency_limit_us=1e9)
    assert (near["failed"], near["fstype"]) == (False, "ext4")
