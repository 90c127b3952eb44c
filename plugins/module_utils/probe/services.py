"""systemd units that matter on a Spark, memory killers, and who listens on which TCP port."""

from __future__ import annotations

import os
import re
import socket
import struct
from typing import Any

from ..memory_guard import KILLER_UNITS, managed_by_oomd
from .reader import Reader

UNITS = (
    "display-manager.service",
    "gdm.service",
    "gdm3.service",
    "lightdm.service",
    "graphical.target",
    "multi-user.target",
    "docker.service",
    "docker.socket",
    "containerd.service",
    "nvidia-persistenced.service",
    "dgx-dashboard.service",
    "dgx-dashboard-admin.service",
    "systemd-networkd.service",
    "NetworkManager.service",
    "ssh.service",
    "ufw.service",
    "nfs-server.service",
    "unattended-upgrades.service",
    *KILLER_UNITS,
    "sparkfleet-peer.service",
    "sparkfleet-guard.service",
    "sparkfleet-gpu-clocks.service",
    "gpu-clock-lock.service",
    "spark-gpu-clock-lock.service",
)


def parse_show(text: str) -> dict[str, dict[str, Any]]:
    """{unit: {load, active, sub, enabled, main_pid}} of `systemctl show -p ... UNIT UNIT`."""
    found: dict[str, dict[str, Any]] = {}
    for block in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("Id"):
            found[values["Id"]] = {
                "load": values.get("LoadState"),
                "active": values.get("ActiveState"),
                "sub": values.get("SubState"),
                "enabled": values.get("UnitFileState") or None,
                "main_pid": int(values["MainPID"]) if values.get("MainPID", "").isdigit() else None,
            }
    return found


def read_systemd(reader: Reader) -> dict[str, Any]:
    answer = reader.run(
        ["systemctl", "show", "-p", "Id,LoadState,ActiveState,SubState,UnitFileState,MainPID", *UNITS]
    )
    units = parse_show(answer.stdout) if answer.ok else {}
    ranks = reader.run(
        [
            "systemctl",
            "show",
            "-p",
            "Id,LoadState,ActiveState,SubState,UnitFileState,MainPID",
            "sparkfleet-rank@*",
        ]
    )
    units.update(parse_show(ranks.stdout) if ranks.ok else {})
    default = reader.link_tail("/etc/systemd/system/default.target") or reader.link_tail(
        "/usr/lib/systemd/system/default.target"
    )
    if default is None:
        default = reader.link_tail("/lib/systemd/system/default.target")
    killers = []
    # Only one may own the ranks (hosts.md 3.3): a second one stops them without a word to the pair.
    for name in KILLER_UNITS:
        row = units.get(name)
        if row is None or row["load"] != "loaded":
            continue
        command = reader.text("/proc/{}/cmdline".format(row["main_pid"])) if row["main_pid"] else None
        killers.append(
            {
                "unit": name,
                "active": row["active"] in ("active", "activating"),
                "enabled": row["enabled"],
                "argv": command.rstrip("\0").split("\0") if command else [],
                "managed": managed_by_oomd(lambda argv: reader.run(list(argv)).stdout)
                if name == "systemd-oomd.service"
                else [],
            }
        )
    return {
        "known": answer.ok,
        "default_target": default,
        "units": {name: row for name, row in sorted(units.items()) if row["load"] != "not-found"},
        "memory_killers": killers,
    }


def hex_address(text: str) -> str:
    """The address of /proc/net/tcp{,6}: words of 32 bits in host byte order (little endian on x86_64 and
    arm64)."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = b"".join(struct.pack("<I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def parse_proc_tcp(text: str) -> list[dict[str, Any]]:
    """Listening sockets (state 0A): [{address, port, inode}]."""
    rows = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != "0A":
            continue
        address, port = fields[1].split(":")
        rows.append({"address": hex_address(address), "port": int(port, 16), "inode": fields[9]})
    return rows


def owners(reader: Reader, inodes: set[str]) -> dict[str, tuple[int, str | None]]:
    """{inode: (pid, command name)} of the processes that this account may look into."""
    found: dict[str, tuple[int, str | None]] = {}
    denied = False
    for pid in reader.names("/proc"):
        if not pid.isdigit() or not inodes - found.keys():
            continue
        directory = reader.path(f"/proc/{pid}/fd")
        try:
            entries = [entry.name for entry in directory.iterdir()]
        except PermissionError:
            denied = True
            continue
        except OSError:
            continue
        for entry in entries:
            try:
                match = re.match(r"^socket:\[(\d+)\]$", os.readlink(directory / entry))  # noqa: PTH115
            except OSError:
                continue
            if match and match.group(1) in inodes:
                found[match.group(1)] = (int(pid), reader.line(f"/proc/{pid}/comm"))
    if denied and inodes - found.keys():
        reader.denied("process behind a listening socket", "root")
    return found


def read_listeners(reader: Reader) -> list[dict[str, Any]]:
    rows = []
    for name in ("tcp", "tcp6"):
        rows += parse_proc_tcp(reader.text(f"/proc/net/{name}") or "")
    known = owners(reader, {row["inode"] for row in rows})
    found = []
    for row in sorted(rows, key=lambda item: (item["port"], item["address"])):
        pid, process = known.get(row.pop("inode"), (None, None))
        found.append({"protocol": "tcp", **row, "pid": pid, "process": process})
    return found
