"""Files that configure an interface: netplan, what netplan generated from them, and NetworkManager
profiles."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from .reader import Reader

OWN_FILE = "40-cx7.yaml"
OWN_MARK = "Managed by sparkfleet.serving"


def mentioned(text: str, netdevs: list[str], macs: dict[str, str] | None = None) -> list[str]:
    """The interfaces that a netplan file configures: named as a key, in a list, by a `match` pattern or by
    MAC.
    A deliberate over-approximation by text: the target has no YAML library, and a false hit asks a human,
    while a
    missed one brings a second address back at the next boot (B08)."""
    body = "\n".join(line.split("#", 1)[0] for line in text.splitlines())
    patterns = [item.strip("\"' ") for item in re.findall(r"^\s*name:\s*(\S+)\s*$", body, re.M)]
    for block in re.findall(r"\bname:\s*\[([^\]]*)\]", body):
        patterns += [item.strip("\"' ") for item in block.split(",")]
    found = []
    for netdev in netdevs:
        named = (
            re.search(r"(?<![A-Za-z0-9_.-])" + re.escape(netdev) + r"(?![A-Za-z0-9_.-])", body) is not None
        )
        mac = (macs or {}).get(netdev)
        if (
            named
            or any(fnmatch.fnmatchcase(netdev, item) for item in patterns)
            or (mac and mac.lower() in body.lower())
        ):
            found.append(netdev)
    return found


def renderer_of(text: str) -> str | None:
    """The global renderer of a netplan file (indented directly below `network:`), or None."""
    match = re.search(r"^( {1,8})renderer:\s*[\"']?(\w+)", text, re.M)
    return (
        match.group(2)
        if match and re.search(r"^network:\s*$", text, re.M) and len(match.group(1)) <= 4
        else None
    )


def parse_ini(text: str) -> dict[str, dict[str, list[str]]]:
    """{section: {key: [values]}} of a systemd .network or NetworkManager keyfile; repeated sections are
    joined."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            section = found.setdefault(line[1:-1], {})
        elif "=" in line and not line.startswith(("#", ";")):
            key, value = line.split("=", 1)
            section.setdefault(key.strip(), []).append(value.strip())
    return found


def generated(reader: Reader, netdev: str, base: str = "") -> dict[str, Any] | None:
    """What `netplan generate` wrote for an interface: {renderer, addresses, mtu, dhcp, link_local, path};
    None when
    nothing names it. `base` is the root that netplan was given."""
    path = f"{base}/run/systemd/network/10-netplan-{netdev}.network"
    text = reader.text(path)
    if text is not None:
        ini = parse_ini(text)
        network, link = ini.get("Network", {}), ini.get("Link", {})
        addresses = network.get("Address", []) + ini.get("Address", {}).get("Address", [])
        mtu = (link.get("MTUBytes") or [""])[0]
        return {
            "renderer": "networkd",
            "path": path,
            "addresses": addresses,
            "mtu": int(mtu) if mtu.isdigit() else None,
            "dhcp": (network.get("DHCP") or ["no"])[0],
            "link_local": next(iter(network.get("LinkLocalAddressing", [])), None),
        }
    path = f"{base}/run/NetworkManager/system-connections/netplan-{netdev}.nmconnection"
    text = reader.text(path)
    if text is not None:
        ini = parse_ini(text)
        ipv4 = ini.get("ipv4", {})
        mtu = (ini.get("ethernet", {}).get("mtu") or ini.get("802-3-ethernet", {}).get("mtu") or [""])[0]
        addresses = [
            values[0].split(",")[0] for key, values in sorted(ipv4.items()) if re.match(r"^address\d+$", key)
        ]
        return {
            "renderer": "NetworkManager",
            "path": path,
            "addresses": addresses,
            "mtu": int(mtu) if mtu.isdigit() else None,
            "dhcp": "ipv4" if ipv4.get("method") == ["auto"] else "no",
            "link_local": next(iter(ini.get("ipv6", {}).get("method", [])), None),
        }
    return None


def read(reader: Reader, net: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{files, networkmanager, networkd, generated, renderer}: who says what about which interface."""
    netdevs = [name for name, row in sorted(net.items()) if row.get("pci") and not row.get("wireless")]
    macs = {name: str(net[name]["mac"]) for name in netdevs if net[name].get("mac")}
    files = []
    renderer: str | None = None
    # /etc wins over /run wins over /lib for one file name; then the files apply in the order of their names.
    chosen: dict[str, str] = {}
    for directory in ("/lib/netplan", "/run/netplan", "/etc/netplan"):
        for name in reader.names(directory):
            if name.endswith(".yaml"):
                chosen[name] = f"{directory}/{name}"
    for name, path in sorted(chosen.items()):
        text = reader.text(path)
        if text is not None:
            renderer = renderer_of(text) or renderer
        files.append(
            {
                "path": path,
                "readable": text is not None,
                "netdevs": mentioned(text, netdevs, macs) if text is not None else None,
                "owned": name == OWN_FILE and text is not None and OWN_MARK in text,
                "renderer": renderer_of(text) if text is not None else None,
            }
        )
    profiles = []
    for directory in ("/etc/NetworkManager/system-connections", "/run/NetworkManager/system-connections"):
        for name in reader.names(directory):
            # Written by netplan itself, or of a name that NetworkManager passes over.
            if name.startswith(("netplan-", ".")) or name.endswith("~"):
                continue
            text = reader.text(f"{directory}/{name}")
            ini = parse_ini(text) if text is not None else {}
            if ini.get(".nmmeta", {}).get("nm-generated") == ["true"]:
                continue  # NetworkManager's own note of what somebody else (networkd) has configured
            device = next(iter(ini.get("connection", {}).get("interface-name", [])), None)
            profiles.append(
                {
                    "path": f"{directory}/{name}",
                    "readable": text is not None,
                    "netdevs": [device] if device in netdevs else [],
                }
            )
    units = []
    for name in reader.names("/etc/systemd/network"):
        if name.endswith(".network"):
            text = reader.text(f"/etc/systemd/network/{name}")
            patterns = " ".join(parse_ini(text or "").get("Match", {}).get("Name", [])).split()
            units.append(
                {
                    "path": f"/etc/systemd/network/{name}",
                    "readable": text is not None,
                    "netdevs": [
                        item for item in netdevs if any(fnmatch.fnmatchcase(item, one) for one in patterns)
                    ],
                }
            )
    return {
        "files": files,
        "networkmanager": profiles,
        "networkd": units,
        "generated": {name: row for name in netdevs for row in [generated(reader, name)] if row is not None},
        "renderer": renderer,
    }
