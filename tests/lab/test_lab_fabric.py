"""The rails of the lab: netplan and networkd for real, a cable to cut, GID tables that follow addresses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from lab import instance
from lab.testing import Node, eventually, nodes

pytestmark = pytest.mark.lab
FIRST, SECOND = "enp1s0f0np0", "enP2p1s0f0np0"
NETPLAN = "/etc/netplan/90-lab-test.yaml"
# Not those of the inventory: a lab that serves meanwhile is left alone by its addresses, not by its links.
ADDRESSES = {"spark-1": ("10.99.0.1", "10.99.0.5"), "spark-2": ("10.99.0.2", "10.99.0.6")}
GIDS = "/sys/class/infiniband/rocep1s0f0/ports/1"


def netplan(node: Node) -> str:
    lines = ["network:", "  version: 2", "  ethernets:"]
    for netdev, address in zip((FIRST, SECOND), ADDRESSES[node.name], strict=True):
        lines += [
            f"    {netdev}:",
            "      dhcp4: false",
            "      link-local: []",
            "      mtu: 9000",
            f"      addresses: [{address}/30]",
        ]
    return "\n".join(lines) + "\n"


def pings(node: Node, size: int, rail: int) -> bool:
    peer = ADDRESSES["spark-2" if node.name == "spark-1" else "spark-1"][rail]
    return node.run("ping", "-c1", "-W1", "-M", "do", "-s", str(size), peer).status == 0


def await_rails(node: Node) -> None:
    eventually(lambda: pings(node, 8972, 0) and pings(node, 8972, 1), "both rails", 30)


def lost(node: Node, netdev: str = SECOND) -> bool:
    return node.read(f"/sys/class/net/{netdev}/carrier") == "0"


def gid_rows(node: Node) -> list[tuple[str, str]]:
    """(GID, type) of the used slots and ("hole", "") for the empty ones before the last used one."""
    row = "echo $(cat gids/$i) $(cat gid_attrs/types/$i 2>/dev/null)"
    script = f"cd {GIDS}; for i in 0 1 2 3 4 5 6; do {row}; done"
    rows = []
    for line in node.text("sh", "-c", script).splitlines():
        gid, _, kind = line.partition(" ")
        rows.append((gid, kind) if kind else ("hole", ""))
    while rows and rows[-1][0] == "hole":
        rows.pop()
    return rows


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    both = nodes()
    for node in both:
        node.write(NETPLAN, netplan(node), 0o600)
        node.text("netplan", "apply")
    await_rails(both[0])
    yield both
    for node in both:
        node.text("rm", NETPLAN)
        node.text("netplan", "apply")


def test_jumbo_frames_pass_and_no_larger_ones(pair: tuple[Node, Node]) -> None:
    for rail in (0, 1):
        assert pings(pair[0], 8972, rail)
        assert not pings(pair[0], 8973, rail)


def test_networkd_owns_the_rails_and_leaves_the_management_interface_alone(pair: tuple[Node, Node]) -> None:
    for node in pair:
        rows = [line.split() for line in node.text("networkctl", "--no-legend").splitlines()]
        states = {row[1]: row[-1] for row in rows}
        assert states[FIRST] == states[SECOND] == "configured"
        assert states["enP7s7"] == "unmanaged"


def test_sysfs_names_port_speed_and_pci_device(pair: tuple[Node, Node]) -> None:
    expected = {
        FIRST: ("p0", "200000", "0000:01:00.0"),
        SECOND: ("p0", "200000", "0002:01:00.0"),
        "enp1s0f1np1": ("p1", "-1", "0000:01:00.1"),
        "enP2p1s0f1np1": ("p1", "-1", "0002:01:00.1"),
    }
    for node in pair:
        for netdev, (port, speed, pci) in expected.items():
            base = f"/sys/class/net/{netdev}"
            assert (node.read(f"{base}/phys_port_name"), node.read(f"{base}/speed")) == (port, speed)
            assert node.text("realpath", f"{base}/device").endswith(pci)


def test_rdma_devices_map_to_their_netdevs(pair: tuple[Node, Node]) -> None:
    node = pair[0]
    for rdma, netdev, pci in (
        ("rocep1s0f0", FIRST, "0000:01:00.0"),
        ("roceP2p1s0f0", SECOND, "0002:01:00.0"),
    ):
        base = f"/sys/class/infiniband/{rdma}"
        assert node.text("realpath", f"{base}/device").endswith(pci)
        assert node.text("ls", f"{base}/device/net") == netdev
        assert node.read(f"{base}/ports/1/state") == "4: ACTIVE"
        assert node.read(f"{base}/ports/1/link_layer") == "Ethernet"
        assert node.read(f"{base}/ports/1/gid_attrs/ndevs/0") == netdev
    assert node.read("/sys/class/infiniband/rocep1s0f1/ports/1/state") == "1: DOWN"


def test_gid_table_follows_the_address(pair: tuple[Node, Node]) -> None:
    rows = gid_rows(pair[0])
    assert [kind for _, kind in rows] == ["IB/RoCE v1", "RoCE v2"] * 2
    assert rows[3][0] == "0000:0000:0000:0000:0000:ffff:0a63:0001"
    assert rows[1][0].startswith("fe80:")
    empty = pair[0].run("cat", f"{GIDS}/gid_attrs/types/9")
    assert empty.status != 0
    assert "Invalid argument" in empty.text
    assert set(pair[0].read(f"{GIDS}/gids/9")) == {"0", ":"}


def test_gid_faults(pair: tuple[Node, Node]) -> None:
    node, mapped = pair[0], "0000:0000:0000:0000:0000:ffff:0a63:0001"
    with node.fault("gid-drift"):
        eventually(
            lambda: gid_rows(node)[-1] == (mapped, "RoCE v2") and len(gid_rows(node)) == 5, "the drift"
        )
        assert gid_rows(node)[2:4] == [(mapped, "IB/RoCE v1"), ("hole", "")]
    with node.fault("gid-hole"):
        eventually(lambda: len(gid_rows(node)) == 2, "the hole")
    with node.fault("gid-shift"):
        eventually(lambda: gid_rows(node)[4:] == [(mapped, "IB/RoCE v1"), (mapped, "RoCE v2")], "the shift")
    eventually(
        lambda: gid_rows(node)[2:] == [(mapped, "IB/RoCE v1"), (mapped, "RoCE v2")], "the table as it was"
    )


def test_a_late_gid_appears_after_its_address(pair: tuple[Node, Node]) -> None:
    node = pair[0]
    with node.fault("gid-late", "3"):
        assert len(gid_rows(node)) == 4, "lateness takes no entry away"
        node.text("ip", "address", "del", f"{ADDRESSES[node.name][0]}/30", "dev", FIRST)
        eventually(lambda: len(gid_rows(node)) == 2, "the entry to go")
        node.text("ip", "address", "add", f"{ADDRESSES[node.name][0]}/30", "dev", FIRST)
        assert len(gid_rows(node)) == 2
        eventually(lambda: len(gid_rows(node)) == 4, "the late entry")


def test_bytes_of_a_rail_count_on_its_port(pair: tuple[Node, Node]) -> None:
    node = pair[0]
    counter = "/sys/class/infiniband/roceP2p1s0f0/ports/1/counters/port_xmit_data"
    before = int(node.read(counter))
    assert pings(node, 8000, 1)
    eventually(lambda: int(node.read(counter)) - before >= 2000, "the counter (four-byte words)")


def test_a_cut_rail_loses_its_carrier_on_both_nodes(pair: tuple[Node, Node]) -> None:
    with pair[0].fault("cut-rail", "1"):
        for node in pair:
            eventually(partial(lost, node), "the carrier to drop")
            assert node.read(f"/sys/class/net/{FIRST}/carrier") == "1"
            assert node.read("/sys/class/infiniband/roceP2p1s0f0/ports/1/state") == "1: DOWN"
    eventually(lambda: pings(pair[0], 8972, 1), "rail 1 again")


def test_without_a_cable_the_functions_are_absent(pair: tuple[Node, Node]) -> None:
    node = pair[1]
    with node.fault("no-cable"):
        eventually(lambda: node.run("test", "-e", f"/sys/class/net/{FIRST}").status != 0, "the netdevs to go")
        eventually(lambda: node.text("ls", "/sys/class/infiniband") == "", "the RDMA devices to go")
        assert node.run("test", "-e", "/sys/bus/pci/devices/0000:01:00.0").status != 0
        eventually(
            lambda: pair[0].read(f"/sys/class/net/{FIRST}/carrier") == "0", "the neighbour's carrier to drop"
        )
    await_rails(pair[0])


def test_mtu_fault_leaves_only_small_frames(pair: tuple[Node, Node]) -> None:
    with pair[1].fault("mtu"):
        assert pings(pair[0], 1000, 1)
        assert not pings(pair[0], 8972, 1)
        assert pings(pair[0], 8972, 0)
    assert pings(pair[0], 8972, 1)


def test_rails_come_back_after_a_restart_and_the_neighbour_keeps_its_own(pair: tuple[Node, Node]) -> None:
    index = pair[0].read(f"/sys/class/net/{FIRST}/ifindex")
    boot = pair[1].read("/proc/sys/kernel/random/boot_id")
    pair[1].text("nvidia-smi", "-lgc", "0,2000")
    pair[1].restart()
    await_rails(pair[0])
    assert pair[0].read(f"/sys/class/net/{FIRST}/ifindex") == index
    assert pair[1].read("/proc/sys/kernel/random/boot_id") != boot
    assert pair[1].text("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits") == "2418"


def test_a_node_can_reboot_itself(pair: tuple[Node, Node]) -> None:
    node = pair[1]
    boot = node.read("/proc/sys/kernel/random/boot_id")
    node.run("systemctl", "reboot")
    # Not by a command in the node: one that runs while systemd ends all processes would hold it up.
    eventually(lambda: not instance.accepts(node.address, 22), "sshd to go", 60)
    eventually(lambda: instance.accepts(node.address, 22), "sshd again", 60)
    assert node.read("/proc/sys/kernel/random/boot_id") != boot
    await_rails(pair[0])
