"""Network interfaces, addresses, routes, and the RDMA devices behind them.

Nothing is told from a name when sysfs can tell it: the PCI address comes from the `device` link, the cage
from
`phys_port_name`, the interface of an RDMA device from its directory. Names are the last resort, and the
probe says so
(`pci_from`, `port_from`), because names differ between boxes and udev rules.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

from .reader import Reader

# enp1s0f0np0, enP2p1s0f1np1: P<domain>, p<bus>, s<slot>, f<function>, np<port>. Domain and function may be
# absent.
NAME = re.compile(
    r"^en(?:P(?P<domain>\d+))?p(?P<bus>\d+)s(?P<slot>\d+)(?:f(?P<function>\d+))?(?:np(?P<port>\d+))?$"
)
PCI = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
# What the kernel leaves of the MTU for RoCE: GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4 (iboe_get_mtu,
# ib_addr.h).
ROCE_OVERHEAD = 96
IB_MTUS = (4096, 2048, 1024, 512, 256)


def pci_from_name(name: str) -> str | None:
    match = NAME.match(name)
    if not match:
        return None
    return "{:04x}:{:02x}:{:02x}.{}".format(
        int(match.group("domain") or 0),
        int(match.group("bus")),
        int(match.group("slot")),
        match.group("function") or "0",
    )


def roce_mtu(netdev_mtu: int) -> int:
    """The RDMA path MTU that follows from an Ethernet MTU (bytes): 9000 -> 4096, 1500 -> 1024."""
    return next((size for size in IB_MTUS if size <= netdev_mtu - ROCE_OVERHEAD), 0)


def parse_ip_addresses(text: str) -> dict[str, list[dict[str, Any]]]:
    """{netdev: [{cidr, address, prefix, family, scope, dynamic}]} from `ip -j address show`."""
    try:
        rows = json.loads(text or "[]")
    except ValueError:
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not isinstance(row, dict) or "ifname" not in row:
            continue
        found[row["ifname"]] = [
            {
                "cidr": "{}/{}".format(item["local"], item["prefixlen"]),
                "address": item["local"],
                "prefix": item["prefixlen"],
                "family": item.get("family"),
                "scope": item.get("scope"),
                "dynamic": bool(item.get("dynamic", False)),
            }
            for item in row.get("addr_info", [])
            if "local" in item and "prefixlen" in item
        ]
    return found


def parse_ip_routes(text: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text or "[]")
    except ValueError:
        return []
    return [
        {
            "destination": row.get("dst"),
            "gateway": row.get("gateway"),
            "netdev": row.get("dev"),
            "metric": row.get("metric"),
            "linkdown": "linkdown" in row.get("flags", []),
        }
        for row in rows
        if isinstance(row, dict)
    ]


def parse_ibv_devinfo(text: str) -> dict[str, dict[str, Any]]:
    """{hca: {state, active_mtu, max_mtu, fw_ver}} of `ibv_devinfo` (port 1)."""
    found: dict[str, dict[str, Any]] = {}
    current: dict[str, Any] = {}
    for line in text.splitlines():
        key, _mark, value = line.strip().partition(":")
        value = value.strip()
        if key == "hca_id":
            current = found.setdefault(value, {})
        elif key in ("active_mtu", "max_mtu"):
            number = re.match(r"^(\d+)", value)
            if number:
                current[key] = int(number.group(1))
        elif key == "state":
            current["state"] = value.split(" ", 1)[0]
        elif key == "fw_ver":
            current["fw_ver"] = value
    return found


def gid_ipv4(gid: str) -> str | None:
    """The IPv4 address in a GID of the form ::ffff:a.b.c.d, else None."""
    try:
        mapped = ipaddress.IPv6Address(gid).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped is not None else None


def gid_table(reader: Reader, base: str) -> list[dict[str, Any]]:
    """The filled slots of one port. A hole reads as all zeros, and its attributes answer EINVAL: both are
    left out,
    so the list of indexes may have gaps."""
    rows = []
    for name in sorted(reader.names(f"{base}/gids"), key=lambda item: int(item) if item.isdigit() else -1):
        gid = reader.line(f"{base}/gids/{name}")
        if not name.isdigit() or gid is None or not gid.replace(":", "").strip("0"):
            continue
        kind = reader.line(f"{base}/gid_attrs/types/{name}")
        if kind is None:
            continue
        rows.append(
            {
                "index": int(name),
                "gid": gid,
                "type": kind,
                "ipv4": gid_ipv4(gid),
                "ndev": reader.line(f"{base}/gid_attrs/ndevs/{name}"),
            }
        )
    return rows


def leading_state(text: str | None) -> str | None:
    """ "4: ACTIVE" -> "ACTIVE". Only this file tells; `rdma link` may show LINK_UP on the half of an empty
    cage."""
    if text is None:
        return None
    return text.split(":", 1)[-1].strip() or None


def leading_number(text: str | None) -> int | None:
    match = re.match(r"^(\d+)", text or "")
    return int(match.group(1)) if match else None


def hca_netdev(reader: Reader, hca: str, gids: list[dict[str, Any]], by_pci: dict[str, str]) -> str | None:
    base = f"/sys/class/infiniband/{hca}"
    for name in reader.names(f"{base}/device/net"):
        return name
    parent = reader.line(f"{base}/parent")  # software RDMA has no device directory
    if parent:
        return parent
    pci = reader.link_tail(f"{base}/device")
    if pci in by_pci:
        return by_pci[pci]
    for row in gids:
        if row["ndev"]:
            return str(row["ndev"])
    return None


def read_rdma(reader: Reader, net: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{hca: {...}}; empty when there is no cable and hot-plug power-off has taken the functions from the
    bus."""
    found: dict[str, Any] = {}
    hcas = reader.names("/sys/class/infiniband")
    asked = parse_ibv_devinfo(reader.run(["ibv_devinfo"]).stdout) if hcas else {}
    by_pci = {
        row["pci"]: name for name, row in net.items() if row.get("pci") and row.get("pci_from") == "sysfs"
    }
    for hca in hcas:
        base = f"/sys/class/infiniband/{hca}"
        port = f"{base}/ports/1"
        gids = gid_table(reader, port)
        netdev = hca_netdev(reader, hca, gids, by_pci)
        pci = reader.link_tail(f"{base}/device")
        mtu = net.get(netdev or "", {}).get("mtu")
        state = leading_state(reader.line(f"{port}/state"))
        active_mtu = asked.get(hca, {}).get("active_mtu")
        source = "ibv_devinfo" if active_mtu else None
        if active_mtu is None and mtu and state == "ACTIVE":
            active_mtu, source = roce_mtu(mtu), "derived"
        found[hca] = {
            "netdev": netdev,
            "pci": pci if pci and PCI.match(pci) else None,
            "fw_ver": reader.line(f"{base}/fw_ver"),
            "hca_type": reader.line(f"{base}/hca_type"),
            "board_id": reader.line(f"{base}/board_id"),
            "node_guid": reader.line(f"{base}/node_guid"),
            "sys_image_guid": reader.line(f"{base}/sys_image_guid"),
            "state": state,
            "phys_state": leading_state(reader.line(f"{port}/phys_state")),
            "rate_gbps": leading_number(reader.line(f"{port}/rate")),
            "link_layer": reader.line(f"{port}/link_layer"),
            "active_mtu": active_mtu,
            "active_mtu_from": source,
            "counters": {
                name: reader.integer(f"{port}/{group}/{name}")
                for group, name in (
                    ("counters", "port_xmit_data"),
                    ("counters", "port_rcv_data"),
                    ("hw_counters", "packet_seq_err"),
                    ("hw_counters", "out_of_sequence"),
                    ("hw_counters", "local_ack_timeout_err"),
                )
            },
            "gids": gids,
        }
    return found


def read_net(reader: Reader) -> dict[str, dict[str, Any]]:
    """{netdev: {...}} of every interface that sysfs lists."""
    addresses = parse_ip_addresses(reader.run(["ip", "-j", "address", "show"]).stdout)
    found: dict[str, dict[str, Any]] = {}
    for name in reader.names("/sys/class/net"):
        base = f"/sys/class/net/{name}"
        if not reader.exists(f"{base}/address") and not reader.exists(f"{base}/mtu"):
            continue  # bonding_masters is a file among the directories
        pci = reader.link_tail(f"{base}/device")
        pci_from: str | None = "sysfs"
        if pci is None or not PCI.match(pci):
            pci, pci_from = pci_from_name(name), "name"
        port = reader.line(f"{base}/phys_port_name")
        port_from: str | None = "sysfs"
        if port is None:
            match = NAME.match(name)
            port = "p{}".format(match.group("port")) if match and match.group("port") else None
            port_from = "name" if port else None
        flags = reader.line(f"{base}/flags")
        speed = reader.integer(f"{base}/speed")
        found[name] = {
            "carrier": {0: False, 1: True}.get(reader.integer(f"{base}/carrier") if flags else None),  # type: ignore[arg-type]
            "operstate": reader.line(f"{base}/operstate"),
            "admin_up": bool(int(flags, 16) & 1) if flags else None,
            "mtu": reader.integer(f"{base}/mtu"),
            "speed": speed if speed is not None and speed > 0 else None,
            "mac": reader.line(f"{base}/address"),
            "phys_port_name": port,
            "port_from": port_from,
            "phys_switch_id": reader.line(f"{base}/phys_switch_id"),
            "pci": pci,
            "pci_from": pci_from if pci else None,
            "driver": reader.link_tail(f"{base}/device/driver"),
            "master": reader.link_tail(f"{base}/master"),
            "bridge": reader.exists(f"{base}/bridge"),
            "wireless": reader.exists(f"{base}/wireless"),
            "pci_link_speed": None,
            "pci_link_width": None,
            "hca": None,
            "addresses": addresses.get(name, []),
        }
        if pci and pci_from == "sysfs":
            bus = f"/sys/bus/pci/devices/{pci}"
            found[name]["pci_link_speed"] = reader.line(f"{bus}/current_link_speed")
            found[name]["pci_link_width"] = reader.integer(f"{bus}/current_link_width")
    return found


def read(reader: Reader) -> dict[str, Any]:
    """{"net", "rdma", "routes", "hotplug"}: read together, because each explains the other."""
    net = read_net(reader)
    rdma = read_rdma(reader, net)
    for hca, row in rdma.items():
        if row["netdev"] in net:
            net[row["netdev"]]["hca"] = hca
            if row["pci"] and net[row["netdev"]]["pci_from"] != "sysfs":
                net[row["netdev"]]["pci"], net[row["netdev"]]["pci_from"] = row["pci"], "infiniband"
    return {
        "net": net,
        "rdma": rdma,
        "routes": parse_ip_routes(reader.run(["ip", "-j", "-4", "route", "show"]).stdout),
        # The package dgx-spark-mlnx-hotplug powers the CX7 off without a cable when this marker exists.
        "hotplug": {
            "marker": reader.exists("/etc/nvidia/cx7-hotplug-enabled"),
            "installed": reader.exists("/opt/nvidia/dgx-spark-mlnx-hotplug"),
        },
    }
