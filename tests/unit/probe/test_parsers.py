"""Every parser of the probe against recordings of real GB10 hosts (tests/fixtures/gb10/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe import (
    gpu,
    kernel,
    memory,
    net,
    netplan,
    services,
    storage,
    system,
)

GB10 = Path(__file__).resolve().parents[2] / "fixtures" / "gb10"
FOUR = ["enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f0np0", "enP2p1s0f1np1"]


def text(name: str) -> str:
    return (GB10 / name).read_text(encoding="utf-8")


@pytest.mark.field("B48")
def test_meminfo_of_a_healthy_6_17_kernel() -> None:
    info = memory.parse_meminfo(text("mem-meminfo-6.17-healthy-cma-128M.txt"))
    assert info["CmaTotal"] == 131072 * 1024
    assert info["CmaFree"] < info["CmaTotal"]
    assert info["SwapTotal"] == 33554428 * 1024


@pytest.mark.field("B48")
def test_meminfo_of_a_broken_7_0_kernel_with_the_reporters_units() -> None:
    info = memory.parse_meminfo(text("mem-meminfo-kho-broken-excerpt.txt"))
    assert (info["CmaTotal"], info["CmaFree"]) == (0, 940604 * 1024)
    assert info["MemFree"] == 88 * 1024**3


def test_memory_that_the_driver_keeps_is_unaccounted() -> None:
    info = memory.parse_meminfo(text("mem-meminfo-after-stop-driver-retains-80G.txt"))
    kept = memory.unaccounted(info)
    assert kept is not None
    assert 78 * 1024**3 < kept < 82 * 1024**3
    assert memory.unaccounted({"MemTotal": 1}) is None


@pytest.mark.parametrize("name", ["mem-meminfo-short-a.txt", "mem-meminfo-short-b.txt"])
def test_both_populations_of_memtotal(name: str) -> None:
    total = memory.parse_meminfo(text(name))["MemTotal"] / 1024**3
    assert 121.6 < total < 121.8


def test_swaps_and_buddyinfo() -> None:
    rows = memory.parse_swaps("Filename\tType\tSize\tUsed\tPriority\n/swap.img file 16777212 1992294 -2\n")
    assert rows == [
        {"name": "/swap.img", "type": "file", "size_bytes": 17179865088, "used_bytes": 2040109056}
    ]
    zones = memory.parse_buddyinfo("Node 0, zone   Normal   1   2   3\nnoise\n")
    assert zones == [{"node": 0, "zone": "Normal", "free_blocks": [1, 2, 3]}]


@pytest.mark.parametrize(
    ("name", "ota", "platform"),
    [
        ("host-dgx-release-7.3.1-kvm-platform.txt", "7.3.1", "DGX Server for KVM"),
        ("host-dgx-release-7.5.0-unquoted-hp.txt", "7.5.0", "HP ZGX Nano G1n AI Station"),
        ("host-dgx-release-7.6.0-ota-history-quoted.txt", "7.6.0", "GX10"),
    ],
)
def test_dgx_release_last_version_wins_and_the_serial_number_stays(
    name: str, ota: str, platform: str
) -> None:
    found = system.parse_dgx_release(text(name))
    assert (found["ota"], found["platform"]) == (ota, platform)
    assert "XXXX" not in json.dumps(found)


def test_os_release() -> None:
    found = system.parse_assignments(text("host-os-release-full-24.04.4.txt"))
    assert (found["ID"], found["VERSION_ID"]) == ("ubuntu", "24.04")


def test_dpkg_status_keeps_what_matters() -> None:
    found = system.parse_dpkg_status(
        "Package: linux-image-6.17.0-1032-nvidia\nStatus: hold ok installed\nVersion: 6.17.0-1032.32\n\n"
        "Package: bash\nStatus: install ok installed\nVersion: 5\n\n"
        "Package: mlnx-fw-updater\nStatus: deinstall ok config-files\nVersion: 26\n"
    )
    assert found == {
        "linux-image-6.17.0-1032-nvidia": {"version": "6.17.0-1032.32", "installed": True, "held": True},
        "mlnx-fw-updater": {"version": "26", "installed": False, "held": False},
    }


GRUB = """
set default="0"
menuentry 'Ubuntu' --class ubuntu $menuentry_id_option 'gnulinux-simple-1' {
	linux	/boot/vmlinuz-7.0.0-1019-nvidia root=UUID=x ro  console=tty0
}
submenu 'Advanced' $menuentry_id_option 'gnulinux-advanced-1' {
	menuentry 'Ubuntu, with Linux 6.17.0-1032-nvidia' $menuentry_id_option 'gnulinux-6.17' {
		linux	/boot/vmlinuz-6.17.0-1032-nvidia root=UUID=x ro kho=off
	}
}
"""


@pytest.mark.field("B49")
def test_the_kernel_of_the_next_boot() -> None:
    first = kernel.parse_grub(GRUB)
    assert first == {"release": "7.0.0-1019-nvidia", "cmdline": "root=UUID=x ro  console=tty0"}
    chosen = kernel.parse_grub(GRUB, "gnulinux-advanced-1>gnulinux-6.17")
    assert chosen and chosen["release"] == "6.17.0-1032-nvidia"
    assert kernel.parse_grub("") is None
    assert kernel.parse_grubenv("# GRUB Environment Block\nsaved_entry=x\n")["saved_entry"] == "x"


@pytest.mark.field("B37", "B100")
def test_nvidia_smi_rows_with_na() -> None:
    row = gpu.parse_query(text("smi-query-name-cap-driver-memory.csv"), ("name", "cap", "driver", "memory"))
    assert row == {"name": "NVIDIA GB10", "cap": "12.1", "driver": "580.159.03", "memory": None}
    last = text("smi-query-memory-na-580.173.02.csv").splitlines()[-1]
    fields = tuple("abcdef")
    assert gpu.parse_query(last, fields) == {
        "a": None,
        "b": None,
        "c": None,
        "d": "0 %",
        "e": "11.17 W",
        "f": "35",
    }
    assert gpu.number("11.17 W") == 11.17
    assert gpu.number(None) is None


def test_no_devices_is_no_row() -> None:
    assert gpu.parse_query(text("smi-no-devices-found.txt")) is None


def test_compute_processes() -> None:
    rows = gpu.parse_apps(text("smi-compute-apps-vram.csv"))
    assert [row["pid"] for row in rows] == [168864, 169094, 169489]
    assert rows[0]["used_bytes"] == 24420 * 1024**2


def test_clock_units() -> None:
    found = gpu.parse_clock_unit("[Service]\nExecStart=/usr/bin/nvidia-smi -lgc 0,2200\n")
    assert found and (found["min_mhz"], found["max_mhz"]) == (0, 2200)
    assert gpu.parse_clock_unit("ExecStart=/bin/true\n") is None


@pytest.mark.field("B10", "C09")
def test_active_mtu_of_each_port() -> None:
    four = net.parse_ibv_devinfo(text("rdma-ibv_devinfo-4ports-active-mtu1024.txt"))
    assert {row["active_mtu"] for row in four.values()} == {1024}
    mixed = net.parse_ibv_devinfo(text("rdma-ibv_devinfo-f1-active-mtu4096.txt"))
    assert {name: (row["state"], row["active_mtu"]) for name, row in mixed.items()} == {
        "rocep1s0f0": ("PORT_DOWN", 1024),
        "rocep1s0f1": ("PORT_ACTIVE", 4096),
        "roceP2p1s0f0": ("PORT_DOWN", 1024),
        "roceP2p1s0f1": ("PORT_ACTIVE", 4096),
    }
    assert mixed["rocep1s0f1"]["fw_ver"] == "28.45.4028"


@pytest.mark.parametrize(
    ("ethernet", "rdma"), [(1500, 1024), (4200, 4096), (9000, 4096), (9216, 4096), (100, 0)]
)
def test_rdma_mtu_from_ethernet_mtu(ethernet: int, rdma: int) -> None:
    assert net.roce_mtu(ethernet) == rdma


@pytest.mark.parametrize(
    ("gid", "ipv4"),
    [
        ("0000:0000:0000:0000:0000:ffff:c0a8:640a", "192.168.100.10"),
        ("fe80:0000:0000:0000:0200:00ff:fe00:0001", None),
        ("garbage", None),
    ],
)
def test_ipv4_of_a_gid(gid: str, ipv4: str | None) -> None:
    assert net.gid_ipv4(gid) == ipv4


def test_pci_addresses_from_names() -> None:
    assert net.pci_from_name("enP2p1s0f1np1") == "0002:01:00.1"
    assert net.pci_from_name("enp1s0f0np0") == "0000:01:00.0"
    assert net.pci_from_name("eth0") is None


def test_state_files() -> None:
    assert net.leading_state("4: ACTIVE") == "ACTIVE"
    assert net.leading_state(None) is None
    assert net.leading_number("100 Gb/sec (2X NDR)") == 100


def test_ip_json() -> None:
    out = json.dumps(
        [
            {
                "ifname": "e0",
                "addr_info": [
                    {
                        "family": "inet",
                        "local": "10.0.0.1",
                        "prefixlen": 30,
                        "scope": "global",
                        "dynamic": True,
                    },
                    {"family": "inet6"},
                ],
            },
            {},
        ]
    )
    assert net.parse_ip_addresses(out)["e0"][0]["cidr"] == "10.0.0.1/30"
    assert net.parse_ip_addresses("not json") == {}
    assert net.parse_ip_routes("[") == []
    assert (
        net.parse_ip_routes('[{"dst":"10.0.0.0/30","dev":"e0","flags":["linkdown"]}]')[0]["linkdown"] is True
    )


@pytest.mark.field("B08")
@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("net-netplan-40-cx7-mtu9000-nolinklocal.yaml", ["enp1s0f1np1", "enP2p1s0f1np1"]),
        ("net-netplan-40-cx7-nm-renderer.yaml", ["enp1s0f0np0", "enP2p1s0f0np0"]),
        ("net-netplan-40-cx7-same-subnet-four.yaml", FOUR),
        ("net-netplan-60-two-addresses.yaml", ["enp1s0f1np1"]),
        ("net-netplan-three-sparks-example.yaml", FOUR),
    ],
)
def test_which_rails_a_netplan_file_configures(name: str, hits: list[str]) -> None:
    assert netplan.mentioned(text(name), FOUR) == hits


def test_patterns_macs_and_comments_in_netplan_files() -> None:
    match = "network:\n  ethernets:\n    all:\n      match:\n        name: enp1s0*\n"
    assert netplan.mentioned(match, FOUR) == ["enp1s0f0np0", "enp1s0f1np1"]
    assert netplan.mentioned('match: {name: ["enP2*", "x"]}\n', FOUR) == ["enP2p1s0f0np0", "enP2p1s0f1np1"]
    assert netplan.mentioned(
        "      macaddress: AA:BB:CC:00:00:01\n", FOUR, {FOUR[0]: "aa:bb:cc:00:00:01"}
    ) == [FOUR[0]]
    assert netplan.mentioned("# enp1s0f0np0: was here\n", FOUR) == []
    assert netplan.mentioned("    enp1s0f0np0extra:\n", FOUR) == []


def test_renderer_of_a_file() -> None:
    assert netplan.renderer_of(text("net-netplan-40-cx7-nm-renderer.yaml")) == "NetworkManager"
    assert netplan.renderer_of(text("net-netplan-40-cx7-static-0.yaml")) is None
    assert netplan.renderer_of("network:\n  ethernets:\n    e:\n      renderer: networkd\n") is None


def test_proc_net_tcp() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000:22B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 12345 1\n"
        "   1: 0100007F:1F90 0100007F:D2F0 01 00000000:00000000 00:00000000 00000000 0 0 9 1\n"
    )
    assert services.parse_proc_tcp(table) == [{"address": "0.0.0.0", "port": 8888, "inode": "12345"}]
    assert services.hex_address("00000000000000000000000001000000") == "::1"


def test_systemctl_show() -> None:
    out = (
        "Id=a.service\nLoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState=\nMainPID=7\n\n"
    )
    assert services.parse_show(out) == {
        "a.service": {"load": "loaded", "active": "active", "sub": "running", "enabled": None, "main_pid": 7}
    }


MOUNTS = (
    "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
    "30 22 0:50 / /srv/hub\\040a ro,relatime shared:9 - nfs4 10.0.0.1:/x ro\n"
    "31 22 0:25 / /run rw - tmpfs tmpfs rw\n"
)


@pytest.mark.field("B60", "B67")
def test_which_mount_holds_a_path() -> None:
    rows = storage.parse_mountinfo(MOUNTS)
    assert [row["mountpoint"] for row in rows] == ["/", "/srv/hub a", "/run"]
    held = storage.mount_of("/srv/hub a/models", rows)
    assert held and held["fstype"] == "nfs4"
    other = storage.mount_of("/srv/hub", rows)
    assert other and other["mountpoint"] == "/"
    assert storage.mount_of("/x", []) is None
