"""Small probes for the rail tests, in the layout of a Spark (hosts.md 1.1)."""

from __future__ import annotations

import copy
from typing import Any

LAYOUT = [
    ("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", "p0"),
    ("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1", "p1"),
    ("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0", "p0"),
    ("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1", "p1"),
]


def gids(netdev: str, ipv4: str | None, v1: int = 2, v2: int = 3) -> list[dict[str, Any]]:
    base = [
        {"index": 0, "gid": "fe80::1", "type": "IB/RoCE v1", "ipv4": None, "ndev": netdev},
        {"index": 1, "gid": "fe80::1", "type": "RoCE v2", "ipv4": None, "ndev": netdev},
    ]
    if ipv4:
        base += [
            {"index": v1, "gid": "::ffff", "type": "IB/RoCE v1", "ipv4": ipv4, "ndev": netdev},
            {"index": v2, "gid": "::ffff", "type": "RoCE v2", "ipv4": ipv4, "ndev": netdev},
        ]
    return base


def probe(cabled: tuple[str, ...] = ("p0",), addresses: dict[str, list[str]] | None = None) -> dict[str, Any]:
    addresses = addresses or {}
    net: dict[str, Any] = {
        "lo": {"carrier": True, "pci": None, "phys_port_name": None, "addresses": []},
        "enP7s7": {
            "carrier": True,
            "pci": "0007:01:00.0",
            "phys_port_name": None,
            "driver": "r8127",
            "mtu": 1500,
            "addresses": [{"cidr": "192.168.1.163/24", "family": "inet"}],
        },
        "docker0": {
            "carrier": False,
            "pci": None,
            "phys_port_name": None,
            "bridge": True,
            "addresses": [{"cidr": "172.17.0.1/16", "family": "inet"}],
        },
    }
    rdma: dict[str, Any] = {}
    for netdev, hca, pci, port in LAYOUT:
        mine = addresses.get(netdev, [])
        net[netdev] = {
            "carrier": port in cabled,
            "admin_up": True,
            "mtu": 9000,
            "speed": 200000,
            "pci": pci,
            "driver": "mlx5_core",
            "phys_port_name": port,
            "hca": hca,
            "mac": None,
            "addresses": [{"cidr": item, "family": "inet"} for item in mine],
        }
        rdma[hca] = {
            "netdev": netdev,
            "state": "ACTIVE" if port in cabled else "DOWN",
            "active_mtu": 4096,
            "gids": gids(netdev, mine[0].split("/")[0] if mine else None),
        }
    return copy.deepcopy({"net": net, "rdma": rdma, "hotplug": {"marker": True, "installed": True}})


def pair(**over: Any) -> list[dict[str, Any]]:
    rows = [
        {
            "name": f"spark-{rank + 1}",
            "replica": "alpha",
            "rank": rank,
            "world": 2,
            "address": f"192.168.1.{10 + rank}",
            "rails": [{"address": f"10.77.{half}.{rank + 1}/30"} for half in (0, 1)],
            "engine": "tensorfold_native",
        }
        for rank in (0, 1)
    ]
    for row in rows:
        row.update(over)
    return rows
