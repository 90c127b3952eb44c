"""The tree that lab-hardware.service serves, built from a given state of the network."""

from __future__ import annotations

import errno
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.node.parts import FUNCTIONS, mac


class FuseError(OSError):
    def __init__(self, number: int) -> None:
        super().__init__(number, "")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The module with the FUSE library replaced (Debian's package, present in the node only) and no fault."""
    library = types.ModuleType("fusepy")
    vars(library).update(Operations=object, FuseOSError=FuseError, FUSE=None)
    monkeypatch.setitem(sys.modules, "fusepy", library)
    found = importlib.import_module("lab.node.hardware")
    faults: dict[str, str] = {}
    monkeypatch.setattr(found, "fault", faults.get)
    monkeypatch.setattr(found, "claims", lambda: [(7, 1024, "tensorfold")])
    vars(found)["test_faults"] = faults
    yield found
    del sys.modules["lab.node.hardware"]


def link(function: Any, *, up: bool = True, address: str = "10.77.0.1") -> dict[str, Any]:
    return {
        "ifname": function.netdev,
        "address": mac(1, function.mac_offset),
        "flags": ["UP", "LOWER_UP"] if up else [],
        "addr_info": [{"local": address}] if up else [],
        "stats64": {"tx": {"bytes": 4000, "packets": 5}, "rx": {"bytes": 8, "packets": 1}},
    }


def network() -> dict[str, dict[str, Any]]:
    return {function.netdev: link(function, up=function.cage == 0) for function in FUNCTIONS}


def test_a_cabled_port_and_an_empty_one(module: Any) -> None:
    tree = module.Hardware().build(network(), 0.0)
    port = tree["infiniband"]["rocep1s0f0"]["ports"]["1"]
    assert (port["state"], port["phys_state"], port["rate"]) == (
        "4: ACTIVE\n",
        "5: LinkUp\n",
        "200 Gb/sec (2X NDR)\n",
    )
    assert port["gids"]["3"] == "0000:0000:0000:0000:0000:ffff:0a4d:0001\n"
    assert port["gid_attrs"]["types"]["3"] == "RoCE v2\n"
    assert port["gid_attrs"]["ndevs"]["3"] == "enp1s0f0np0\n"
    assert port["gid_attrs"]["types"]["4"] == errno.EINVAL
    assert port["counters"]["port_xmit_data"] == "1000\n"
    assert tree["infiniband"]["rocep1s0f1"]["ports"]["1"]["state"] == "1: DOWN\n"
    assert (tree["net"]["enp1s0f0np0"]["speed"], tree["net"]["enp1s0f1np1"]["speed"]) == ("200000\n", "-1\n")


@pytest.mark.parametrize(("value", "indexes"), [("6", (6, 6)), ("6:1", (3, 6)), ("5:0", (5, 3))])
def test_an_index_drifts_on_both_rails_or_on_one(module: Any, value: str, indexes: tuple[int, int]) -> None:
    module.test_faults["gid-drift"] = value
    devices = module.Hardware().build(network(), 0.0)["infiniband"]
    for hca, index in zip(("rocep1s0f0", "roceP2p1s0f0"), indexes, strict=True):
        port = devices[hca]["ports"]["1"]
        assert port["gids"][str(index)].endswith("ffff:0a4d:0001\n"), hca
        assert port["gid_attrs"]["types"][str(index)] == "RoCE v2\n"


def test_all_functions_share_one_asic(module: Any) -> None:
    devices = module.Hardware().build(network(), 0.0)["infiniband"].values()
    assert len({device["sys_image_guid"] for device in devices}) == 1
    assert len({device["node_guid"] for device in devices}) == 4


def test_pci_devices_lead_to_netdev_and_rdma_device(module: Any) -> None:
    pci = module.Hardware().build(network(), 0.0)["pci"]
    assert list(pci["0002:01:00.0"]["net"]) == ["enP2p1s0f0np0"]
    assert list(pci["0002:01:00.0"]["infiniband"]) == ["roceP2p1s0f0"]
    assert pci["0000:01:00.0"]["current_link_speed"] == "32.0 GT/s PCIe\n"
    assert pci["0000:01:00.0"]["current_link_width"] == "4\n"


def test_absent_functions_have_no_devices(module: Any) -> None:
    tree = module.Hardware().build({}, 0.0)
    assert tree["infiniband"] == {}
    assert sorted(tree["pci"]) == ["0004:01:00.0", "0007:01:00.0", "000f:01:00.0"]
    module.test_faults["half-missing"] = ""
    half = module.Hardware().build(network(), 0.0)
    assert sorted(half["infiniband"]) == ["rocep1s0f0", "rocep1s0f1"]


def test_the_file_system_answers_as_sysfs_does(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_network", network)
    files = module.FileSystem(module.Hardware())
    port = "/infiniband/rocep1s0f0/ports/1"
    assert files.read(f"{port}/gids/9", 4096, 0, 0) == b"0000:0000:0000:0000:0000:0000:0000:0000\n"
    assert files.read(f"{port}/state", 2, 3, 0) == b"AC"
    assert files.readlink("/infiniband/rocep1s0f0/device") == "/sys/bus/pci/devices/0000:01:00.0"
    assert files.getattr(f"{port}/state")["st_size"] == 4096
    assert b"MemTotal:" in files.read("/meminfo", 4096, 0, 0)
    for path, number in (
        (f"{port}/gid_attrs/types/9", errno.EINVAL),
        (port, errno.EISDIR),
        ("/nothing", errno.ENOENT),
    ):
        with pytest.raises(FuseError) as refused:
            files.read(path, 4096, 0, 0)
        assert refused.value.errno == number


def test_memory_counts_the_ranks_claims(module: Any) -> None:
    assert module.memory_state().claimed == 1024
    module.test_faults["sink-memory"] = "2.5"
    assert module.memory_state().sink == int(2.5 * 1024 * 1024)
