"""The whole probe on built trees: `root` shows a Spark, a Spark without a cable, and an empty directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import rails
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe import reader as reader_module
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.gather import SUBSETS, gather, resolve
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.reader import Reader

LAYOUT = [
    ("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", "p0", "192.168.100.10"),
    ("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1", "p1", None),
    ("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0", "p0", "192.168.101.10"),
    ("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1", "p1", None),
]
GPU_QUERY = (
    "nvidia-smi --query-gpu=name,driver_version,compute_cap,vbios_version,pstate,temperature.gpu,power.draw,"
    "clocks.sm,clocks.max.sm,utilization.gpu,persistence_mode --format=csv,noheader"
)
GPU_ROW = "NVIDIA GB10, 580.173.02, 12.1, 9A.0B.2D.00.00, P8, 35, 4.10 W, 208 MHz, 3003 MHz, 0 %, Enabled\n"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:0001"


def put(root: Path, name: str, value: str) -> None:
    target = root / name.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(value, encoding="utf-8")


def gid(ipv4: str) -> str:
    a, b, c, d = (int(part) for part in ipv4.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def spark(root: Path, hole: bool = False, hcas: bool = True) -> Path:
    """A Spark with one cable in cage p0, in the layout of the recorded sysfs files."""
    addresses = []
    for netdev, hca, pci, port, ipv4 in LAYOUT:
        device = root / "sys/bus/pci/devices" / pci
        put(root, f"/sys/bus/pci/devices/{pci}/current_link_speed", "32.0 GT/s PCIe\n")
        put(root, f"/sys/bus/pci/devices/{pci}/current_link_width", "4\n")
        (root / "sys/bus/pci/drivers/mlx5_core").mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to("../../drivers/mlx5_core")
        base = f"/sys/class/net/{netdev}"
        for key, value in {
            "carrier": "1" if ipv4 else "0",
            "flags": "0x1003",
            "operstate": "up" if ipv4 else "down",
            "mtu": "9000",
            "speed": "200000" if ipv4 else "-1",
            "address": "00:00:00:00:00:02",
            "phys_port_name": port,
        }.items():
            put(root, f"{base}/{key}", value + "\n")
        (root / base.lstrip("/") / "device").symlink_to(device)
        info = [{"family": "inet", "local": ipv4, "prefixlen": 24, "scope": "global"}] if ipv4 else []
        addresses.append({"ifname": netdev, "addr_info": info})
        if not hcas:
            continue
        base = f"/sys/class/infiniband/{hca}"
        put(root, f"{base}/fw_ver", "28.45.4028\n")
        put(root, f"{base}/ports/1/state", "4: ACTIVE\n" if ipv4 else "1: DOWN\n")
        put(root, f"{base}/ports/1/rate", "100 Gb/sec (2X NDR)\n")
        put(root, f"{base}/ports/1/link_layer", "Ethernet\n")
        (root / base.lstrip("/") / "device").symlink_to(device)
        (device / "net" / netdev).mkdir(parents=True)
        table = {0: (LOCAL, "IB/RoCE v1"), 1: (LOCAL, "RoCE v2")}
        if ipv4:
            table.update({2: (gid(ipv4), "IB/RoCE v1"), (4 if hole else 3): (gid(ipv4), "RoCE v2")})
        for index in range(6):
            value, kind = table.get(index, (ZERO, ""))
            put(root, f"{base}/ports/1/gids/{index}", value + "\n")
            if kind:
                put(root, f"{base}/ports/1/gid_attrs/types/{index}", kind + "\n")
                put(root, f"{base}/ports/1/gid_attrs/ndevs/{index}", netdev + "\n")
            else:
                # A directory stands for the EINVAL that an empty slot answers: opening it is an error too.
                (root / f"{base}/ports/1/gid_attrs/types/{index}".lstrip("/")).mkdir(parents=True)
                (root / f"{base}/ports/1/gid_attrs/ndevs/{index}".lstrip("/")).mkdir(parents=True)
    put(
        root,
        "/proc/meminfo",
        "MemTotal: 127535084 kB\nMemAvailable: 118000000 kB\nCmaTotal: 131072 kB\nCmaFree: 69320 kB\n",
    )
    put(root, "/proc/sys/kernel/osrelease", "6.17.0-1032-nvidia\n")
    put(root, "/proc/cmdline", "init_on_alloc=0 pci=pcie_bus_safe\n")
    put(root, "/proc/self/mountinfo", "22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n")
    put(
        root,
        "/etc/netplan/40-cx7.yaml",
        "network:\n  version: 2\n  ethernets:\n    enp1s0f0np0:\n      mtu: 9000\n",
    )
    put(
        root,
        "/.sparkfleet-commands.json",
        json.dumps(
            {
                "ip -j address show": {"stdout": json.dumps(addresses)},
                "uname -m": {"stdout": "aarch64\n"},
                GPU_QUERY: {"stdout": GPU_ROW},
                "statvfs /": {"total_bytes": 4 * 10**12, "available_bytes": 3 * 10**12},
                "GET /info": {
                    "ServerVersion": "29.2.1",
                    "Driver": "overlay2",
                    "Runtimes": {"runc": {}},
                    "DockerRootDir": "/var/lib/docker",
                },
                "GET /networks": [{"IPAM": {"Config": [{"Subnet": "172.17.0.0/16"}]}}],
                "GET /containers/json": [
                    {"Id": "1", "Names": ["/x"], "State": "running", "Labels": {"sparkfleet.install": "i"}}
                ],
            }
        ),
    )
    return root


def test_a_spark_with_one_cable(tmp_path: Path) -> None:
    probe = gather(Reader(root=str(spark(tmp_path))))
    assert probe["net"]["enP2p1s0f0np0"]["hca"] == "roceP2p1s0f0"
    assert probe["net"]["enP2p1s0f0np0"]["pci"] == "0002:01:00.0"
    assert probe["net"]["enP2p1s0f0np0"]["driver"] == "mlx5_core"
    assert probe["net"]["enp1s0f1np1"]["speed"] is None
    assert probe["rdma"]["rocep1s0f0"]["active_mtu"] == 4096
    assert probe["rdma"]["rocep1s0f0"]["active_mtu_from"] == "derived"
    assert probe["memory"]["total_bytes"] == 127535084 * 1024
    assert probe["os"]["arch"] == "aarch64"
    assert probe["kernel"]["release"] == "6.17.0-1032-nvidia"
    assert (probe["gpu"]["name"], probe["gpu"]["driver"]) == ("NVIDIA GB10", "580.173.02")
    assert probe["docker"]["storage_driver"] == "overlay2"
    assert probe["docker"]["containers"][0]["owned"] is True
    assert probe["disk"]["paths"]["/var/lib/docker"]["available_bytes"] == 3 * 10**12
    assert probe["netplan"]["files"][0]["netdevs"] == ["enp1s0f0np0"]
    assert [half.netdev for half in rails.choose_halves(probe)] == ["enp1s0f0np0", "enP2p1s0f0np0"]
    json.dumps(probe)


@pytest.mark.field("B19", "C08")
@pytest.mark.parametrize(("hole", "index"), [(False, 3), (True, 4)])
def test_gid_table_with_empty_slots_and_a_hole(tmp_path: Path, hole: bool, index: int) -> None:
    probe = gather(Reader(root=str(spark(tmp_path, hole))), ["rdma"])
    table = probe["rdma"]["rocep1s0f0"]["gids"]
    assert [row["index"] for row in table] == [0, 1, 2, index]
    assert rails.choose_gid(probe["rdma"], "rocep1s0f0", "enp1s0f0np0", "192.168.100.10").index == index


@pytest.mark.field("B02", "B18", "C05")
def test_no_cable_means_absent_devices_not_an_error(tmp_path: Path) -> None:
    put(tmp_path, "/sys/class/net/enP7s7/mtu", "1500\n")
    put(tmp_path, "/etc/nvidia/cx7-hotplug-enabled", "")
    probe = gather(Reader(root=str(tmp_path)), ["net"])
    assert probe["rdma"] == {}
    assert rails.cages_of(probe) == []
    assert "marker set" in rails.no_cable_text(probe)


def test_an_empty_root_answers_every_key(tmp_path: Path) -> None:
    probe = gather(Reader(root=str(tmp_path)))
    assert set(SUBSETS) - {"rdma"} <= set(probe) | {"net"}
    assert probe["memory"]["total_bytes"] is None
    assert probe["docker"]["present"] is False
    assert probe["gpu"]["present"] is False
    assert probe["systemd"]["known"] is False
    json.dumps(probe)


@pytest.mark.field("B72")
def test_a_denied_docker_socket_is_unknown_not_empty(tmp_path: Path) -> None:
    put(tmp_path, "/.sparkfleet-commands.json", json.dumps({"docker": "denied"}))
    probe = gather(Reader(root=str(tmp_path)), ["docker"])
    assert (probe["docker"]["present"], probe["docker"]["denied"], probe["docker"]["known"]) == (
        True,
        True,
        False,
    )
    assert probe["missing_privileges"] == [{"what": "/var/run/docker.sock", "need": "root or group docker"}]


@pytest.mark.field("B55")
def test_a_command_that_hangs_is_named_and_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Reader(timeout=0.2).run(["sleep", "5"])
    assert answer.timed_out and not answer.ok

    def hang(self: Reader, argv: list[str], timeout: float | None = None) -> reader_module.Answer:
        self.timeouts.append(argv[0])
        return reader_module.Answer(None, timed_out=True)

    monkeypatch.setattr(Reader, "run", hang)
    probe = gather(Reader(root=str(tmp_path)), ["gpu"])
    assert (probe["gpu"]["known"], probe["gpu"]["present"]) == (False, False)
    assert "sick" in probe["gpu"]["reason"]
    assert probe["timeouts"] == ["nvidia-smi"]


def test_subsets() -> None:
    assert resolve([]) == list(SUBSETS)
    assert resolve(["all", "!gpu"]) == [name for name in SUBSETS if name != "gpu"]
    assert resolve(["min", "services"]) == ["os", "kernel", "systemd", "privilege"]
    assert resolve(["!gpu"]) == [name for name in SUBSETS if name != "gpu"]
    with pytest.raises(ValueError, match="unknown subset 'gpus'"):
        resolve(["gpus"])


def test_the_locale_and_the_path_of_commands_are_fixed() -> None:
    answer = Reader().run(["env"])
    values: dict[str, Any] = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
    assert values["LC_ALL"] == "C"
    assert values["PATH"].startswith("/usr/local/sbin:")
    assert Reader().run(["no-such-command-here"]).absent


def test_an_unreadable_file_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(root=str(tmp_path))

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    assert reader.text("/etc/netplan/x.yaml") is None
    assert reader.text("/etc/netplan/x.yaml") is None
    assert reader.missing_privileges == [{"what": "/etc/netplan/x.yaml", "need": "root"}]
