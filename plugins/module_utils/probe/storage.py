"""Filesystems, disks, and where given paths lie. A network filesystem is named, never asked: statvfs on a
dead NFS
server does not return."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from stat import S_ISREG
from typing import Any

from .reader import Reader

NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ceph",
    "glusterfs",
    "lustre",
    "fuse.sshfs",
    "fuse.glusterfs",
    "afs",
    "beegfs",
}
PSEUDO = {
    "proc",
    "sysfs",
    "cgroup",
    "cgroup2",
    "devtmpfs",
    "devpts",
    "mqueue",
    "hugetlbfs",
    "debugfs",
    "tracefs",
    "securityfs",
    "pstore",
    "bpf",
    "configfs",
    "fusectl",
    "autofs",
    "binfmt_misc",
    "nsfs",
    "rpc_pipefs",
    "efivarfs",
    "squashfs",
    "ramfs",
    "nfsd",
    "selinuxfs",
}


def unescape(text: str) -> str:
    """Blanks and backslashes are written as octal in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def parse_mountinfo(text: str) -> list[dict[str, Any]]:
    """[{mountpoint, fstype, device, options, major_minor}] in mount order; a later mount hides an earlier
    one."""
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        left, mark, right = line.partition(" - ")
        head, tail = left.split(), right.split()
        if mark and len(head) >= 6 and len(tail) >= 2:
            rows.append(
                {
                    "mountpoint": unescape(head[4]),
                    "fstype": tail[0],
                    "device": unescape(tail[1]),
                    "options": head[5],
                    "major_minor": head[2],
                }
            )
    return rows


def mount_of(path: str, mounts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The mount that holds a path: the longest mountpoint above it, the last of equals."""
    best: dict[str, Any] | None = None
    parts = PurePosixPath(path).parts
    for row in mounts:
        mine = PurePosixPath(row["mountpoint"]).parts
        if parts[: len(mine)] == mine and (
            best is None or len(mine) >= len(PurePosixPath(best["mountpoint"]).parts)
        ):
            best = row
    return best


def sizes(reader: Reader, mountpoint: str) -> dict[str, int | None]:
    if not reader.live:
        row = reader.recorded().get(f"statvfs {mountpoint}")
        row = row if isinstance(row, dict) else {}
        return {key: row.get(key) for key in ("total_bytes", "available_bytes")}
    try:
        stat = os.statvfs(mountpoint)
    except OSError:
        return {"total_bytes": None, "available_bytes": None}
    return {"total_bytes": stat.f_blocks * stat.f_frsize, "available_bytes": stat.f_bavail * stat.f_frsize}


def disk_of(reader: Reader, major_minor: str) -> str | None:
    """The whole disk behind a block device number (nvme0n1 for nvme0n1p2), or None (tmpfs, overlay)."""
    link = reader.path(f"/sys/dev/block/{major_minor}")
    if not link.is_symlink():
        return None
    target = str(link.resolve())
    parts = target.split("/block/")
    return parts[1].split("/")[0] if len(parts) == 2 else None


#: Entries below a path that are counted; more than a data directory ever has, less than a whole disk.
MAX_ENTRIES = 20000


def held_bytes(reader: Reader, path: str) -> int | None:
    """Bytes on disk of the file or of everything below the directory; 0 when it is absent, None when it is too
    much to count or not readable. Holes count as holes: a download that has only begun takes no room yet."""
    top = reader.path(path)
    total = entries = 0
    pending = [top]
    while pending:
        place = pending.pop()
        try:
            stat = place.lstat()
            if place.is_dir() and not place.is_symlink():
                pending += list(place.iterdir())
            else:
                total += stat.st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return None
        entries += 1
        if entries > MAX_ENTRIES:
            return None
    return total


NO_FILE: dict[str, Any] = {"size_bytes": None, "mode": None}


def file_facts(reader: Reader, path: str) -> dict[str, Any]:
    """Size in bytes and mode (octal digits) of a regular file, links followed; None where it is none."""
    try:
        stat = reader.path(path).stat()
    except OSError:
        return NO_FILE
    if not S_ISREG(stat.st_mode):
        return NO_FILE
    return {"size_bytes": stat.st_size, "mode": f"{stat.st_mode & 0o7777:04o}"}


def read(reader: Reader, paths: list[str], count: list[str] | None = None) -> dict[str, Any]:
    mounts = parse_mountinfo(reader.text("/proc/self/mountinfo") or "")
    filesystems = []
    seen = set()
    for row in mounts:
        if (
            row["fstype"] in PSEUDO
            or row["mountpoint"] in seen
            or row["mountpoint"].startswith(("/proc/", "/sys/", "/dev/"))
        ):
            continue
        seen.add(row["mountpoint"])
        network = row["fstype"] in NETWORK
        disk = disk_of(reader, row["major_minor"])
        entry = {
            "mountpoint": row["mountpoint"],
            "fstype": row["fstype"],
            "device": row["device"],
            "network": network,
            "disk": disk,
            "nvme": bool(disk and disk.startswith("nvme")),
            "read_only": "ro" in row["options"].split(","),
        }
        entry.update(
            {"total_bytes": None, "available_bytes": None} if network else sizes(reader, row["mountpoint"])
        )
        filesystems.append(entry)
    held = {}
    for path in paths:
        mount = mount_of(path, mounts)
        holder = next(
            (item for item in filesystems if mount and item["mountpoint"] == mount["mountpoint"]), None
        )
        held[path] = {
            "held_bytes": held_bytes(reader, path)
            if path in (count or []) and not (holder and holder["network"])
            else None,
            "exists": reader.exists(path) if not (holder and holder["network"]) else None,
            **(NO_FILE if holder and holder["network"] else file_facts(reader, path)),
            "mountpoint": mount["mountpoint"] if mount else None,
            "fstype": mount["fstype"] if mount else None,
            "network": holder["network"] if holder else None,
            "nvme": holder["nvme"] if holder else None,
            "total_bytes": holder["total_bytes"] if holder else None,
            "available_bytes": holder["available_bytes"] if holder else None,
        }
    disks = [
        {
            "name": name,
            "size_bytes": (reader.integer(f"/sys/block/{name}/size") or 0) * 512,
            "model": reader.line(f"/sys/block/{name}/device/model"),
            "rotational": reader.integer(f"/sys/block/{name}/queue/rotational") == 1,
        }
        for name in reader.names("/sys/block")
        if not name.startswith(("loop", "ram", "zram", "dm-", "md"))
    ]
    return {"filesystems": filesystems, "paths": held, "disks": disks}
