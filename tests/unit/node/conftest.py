"""A node in a directory: /etc, /run, /proc and /sys below a root, commands from a table, a fake Docker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Answer, Host
from ansible_collections.sparkfleet.serving.plugins.module_utils.launch import build

from tests.unit.launch.test_launch import PROFILE, given_input
from tests.unit.node.fake_docker import FakeDocker

INSTALL = "i" * 32
KEY = "k" * 64


class TreeHost(Host):
    """``Host`` over a directory; systemd and other commands answer from ``answers`` and note every call."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.calls: list[list[str]] = []
        self.units: dict[str, dict[str, str]] = {}
        self.unit("sparkfleet-gpu-clocks.service")["ActiveState"] = "active"
        self.on_start: Any = None
        self.userspace = ""
        self.addresses = {"enp1s0f0np0": "10.77.0.1", "enP2p1s0f0np0": "10.77.0.5"}

    def unit(self, name: str) -> dict[str, str]:
        return self.units.setdefault(
            name,
            {
                "LoadState": "loaded",
                "ActiveState": "inactive",
                "SubState": "dead",
                "UnitFileState": "disabled",
            },
        )

    def run(self, argv: Sequence[str], timeout: float = 20.0, stdin: str | None = None) -> Answer:
        del timeout, stdin
        words = list(argv)
        self.calls.append(words)
        if "UserspaceTimestampMonotonic" in words:
            return Answer(0, self.userspace, "")
        if words[:2] == ["systemctl", "show"]:
            return Answer(0, "\n".join(f"{k}={v}" for k, v in self.unit(words[2]).items()), "")
        if words[0] == "systemctl":
            return self.systemctl(words[1:])
        if words[0] == "ip" and "-j" in words:
            rows = [{"ifname": n, "addr_info": [{"local": a}]} for n, a in self.addresses.items()]
            return Answer(0, json.dumps(rows), "")
        return Answer(0, "", "")

    def systemctl(self, words: list[str]) -> Answer:
        verb, name = words[0], words[-1]
        unit = self.unit(name)
        if verb == "start" and self.on_start is not None:
            return Answer(*self.on_start(name))
        if verb in ("start", "restart"):
            unit["ActiveState"] = "active"
        if verb == "stop":
            unit["ActiveState"] = "inactive"
        if verb in ("enable", "disable"):
            unit["UnitFileState"] = f"{verb}d"
        return Answer(0, "", "")


def add_gid(root: Path, hca: str, index: int, ipv4: str, netdev: str, kind: str = "RoCE v2") -> None:  # noqa: PLR0917
    port = root / "sys/class/infiniband" / hca / "ports/1"
    for name, text in (
        (f"gids/{index}", "0000:0000:0000:0000:0000:ffff:" + ipv4_hex(ipv4) if ipv4 else "fe80::1"),
        (f"gid_attrs/types/{index}", kind),
        (f"gid_attrs/ndevs/{index}", netdev),
    ):
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(text + "\n")


def ipv4_hex(address: str) -> str:
    parts = [int(part) for part in address.split(".")]
    return f"{parts[0]:02x}{parts[1]:02x}:{parts[2]:02x}{parts[3]:02x}"


def make_node(root: Path, rank: int = 0) -> TreeHost:
    """A healthy node of the pair, ready to start its rank."""
    root.mkdir()
    host = TreeHost(root)
    launch = launch_of(rank)
    host.addresses = {row["netdev"]: row["address"].partition("/")[0] for row in launch["rails"]}
    for row in launch["rails"]:
        address = host.addresses[row["netdev"]]
        add_gid(root, row["rdma"], 2, address, row["netdev"], "IB/RoCE v1")
        add_gid(root, row["rdma"], 3, address, row["netdev"])
        host.write(f"/sys/class/net/{row['netdev']}/carrier", "1\n")
    host.write(
        "/proc/meminfo",
        "MemTotal: 127535084 kB\nMemAvailable: 123760211 kB\nCmaTotal: 131072 kB\nCmaFree: 1 kB\n",
    )
    host.write("/proc/uptime", "100000.0 1.0\n")
    host.write("/proc/sys/kernel/random/boot_id", "boot-1\n")
    host.write("/etc/sparkfleet/install-id", INSTALL + "\n")
    (root / "dev/infiniband").mkdir(parents=True)
    for mount in launch["container"]["mounts"]:
        (root / mount["source"].lstrip("/")).mkdir(parents=True, exist_ok=True)
    host.write("/var/lib/sparkfleet/rank_file_dir/" + launch["rank_file"]["name"], "1234")
    put_launch(host, launch)
    return host


@pytest.fixture
def node(tmp_path: Path) -> TreeHost:
    """A healthy rank 0, ready to start."""
    return make_node(tmp_path / "root")


def launch_of(rank: int, **settings: Any) -> dict[str, Any]:
    launch = build(
        PROFILE, given_input(rank, settings, rank_file={"name": f"rank{rank}of2-{'0' * 20}.bin", "bytes": 4})
    )
    launch["gates"]["wave"] = {"stable_s": 0.2}
    launch["gid"]["wait_s"] = 0.3
    launch["memory"]["wait_s"] = 0.3
    launch["ports"] = {"api": None, "api_host": None, "rendezvous": None}
    return launch


def put_launch(host: Host, launch: dict[str, Any]) -> None:
    host.write(f"/etc/sparkfleet/replicas/{launch['replica']}/launch.json", json.dumps(launch), 0o600)
    host.write(f"/etc/sparkfleet/replicas/{launch['replica']}/peer.key", KEY + "\n", 0o600)


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[FakeDocker]:
    with FakeDocker(tmp_path / "docker.sock") as fake:
        fake.images["sparkfleet/tensorfold-native:0123456789ab"] = {"Id": "sha256:x"}
        yield fake


@pytest.fixture
def api(docker: FakeDocker) -> DockerApi:
    return DockerApi(str(docker.path), timeout=5)
