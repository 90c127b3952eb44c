# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The disk budget of a node: what one release and a second one beside it need, per real filesystem.

Components go to locations (models, engram, rank_files, docker, data); locations lie on filesystems, and one
filesystem may hold several. All sizes are bytes; GB is 10^9. A published figure of 505 GB for the head mixes
GiB and GB and leaves the image out; the sum here is 519.9 GB, 544.8 with the image.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from .safetensors import PlanError

GB = 10**9
LOCATIONS = ("models", "engram", "rank_files", "docker", "data")
#: Bytes of the engine image, and of kit, RoPE tables, token map and logs (published sizes of siblings of the
#: recipe).
IMAGE_BYTES = 24_900_000_000
OTHER_BYTES = 600_000_000
#: Share kept free of every filesystem: 519.9 + 24.9 GB becomes the 550 GB asked of a head.
SLACK = 0.01
#: statfs names that must not hold Engram tables: rows are read at random with O_DIRECT.
REMOTE_FILESYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "fuse",
    "fuse.sshfs",
    "9p",
    "ceph",
    "glusterfs",
    "lustre",
)


class DiskError(PlanError):
    """A disk budget that cannot be computed."""


class Component(NamedTuple):
    """Bytes of one thing on one node. ``second``: what a second release adds. ``passing``: needed for a
    while."""

    name: str
    location: str
    first: int
    second: int
    passing: int = 0


class Filesystem(NamedTuple):
    """One real filesystem: an identity, bytes that an ordinary user may still write, its type, what lies on
    it."""

    name: str
    available: int
    kind: str
    locations: tuple[str, ...]
    held: int = 0


def components(
    *,
    rank: int,
    world: int,
    checkpoint_bytes: int,
    engram_bytes: int,
    rank_file_bytes: list[int],
    image_bytes: int = IMAGE_BYTES,
    other_bytes: int = OTHER_BYTES,
    worker_checkpoint_bytes: int = 0,
    builds_all: bool = False,
    new_checkpoint: bool = True,
    staged_image: bool = False,
) -> list[Component]:
    """What one rank's node keeps.

    Rank 0 holds the checkpoint; a worker sees it over the network unless ``worker_checkpoint_bytes`` says
    otherwise. ``builds_all``: the head writes every rank file and keeps the others' until they are copied.
    ``new_checkpoint``: the second release brings another revision. An image lies there twice while it is
    loaded; a rank file is written as a partial on the same filesystem and renamed, so it counts once.
    """
    if not 0 <= rank < world or len(rank_file_bytes) != world:
        raise DiskError(
            "bad-rank", "is no rank of this world", tensor="rank", found=rank, wanted=f"0 to {world - 1}"
        )
    checkpoint = checkpoint_bytes if rank == 0 else worker_checkpoint_bytes
    own = rank_file_bytes[rank]
    others = sum(rank_file_bytes) - own if builds_all and rank == 0 else 0
    found = [
        Component("checkpoint", "models", checkpoint, checkpoint if new_checkpoint else 0),
        Component("engram tables", "engram", engram_bytes, 0),
        Component("rank file", "rank_files", own, own),
        Component("image", "docker", image_bytes, image_bytes, image_bytes),
        Component("kit, token map, logs", "data", other_bytes, 0),
    ]
    if others:
        found.append(Component("rank files of the others", "rank_files", 0, 0, others))
    if staged_image:
        found.append(Component("staged image archive", "data", image_bytes, 0))
    return [item for item in found if item.first or item.second or item.passing]


def judge_disk(items: list[Component], filesystems: list[Filesystem] | None, *, rank: int) -> dict[str, Any]:
    """Needs of one node for one and for two releases, and whether its filesystems have the room.

    ``held`` bytes of a filesystem (what of ours is there already) count as room. Without filesystems: needs
    alone.
    """
    first = sum(item.first for item in items)
    passing = max((item.passing for item in items), default=0)
    result: dict[str, Any] = {
        "rank": rank,
        "components": [item._asdict() for item in items],
        "one_release_bytes": first,
        "two_releases_bytes": first + sum(item.second for item in items),
        "passing_bytes": passing,
        "filesystems": [],
        "verdict": "unknown",
        "keeps_rollback": None,
        "refusals": [],
        "warnings": [],
    }
    if not filesystems:
        return result
    placed = {location: fs for fs in filesystems for location in fs.locations}
    lacking = sorted({item.location for item in items} - set(placed))
    if lacking:
        raise DiskError("bad-filesystem", "no filesystem is known for it", tensor=lacking[0], wanted=lacking)
    for fs in filesystems:
        mine = [item for item in items if item.location in fs.locations]
        if not mine:
            continue
        one = sum(item.first for item in mine) + max(item.passing for item in mine)
        two = sum(item.first + item.second for item in mine) + max(item.passing for item in mine)
        room = int((fs.available + fs.held) * (1 - SLACK))
        result["filesystems"].append(
            {
                "name": fs.name,
                "type": fs.kind,
                "locations": list(fs.locations),
                "available_bytes": fs.available,
                "held_bytes": fs.held,
                "one_release_bytes": one,
                "two_releases_bytes": two,
                "fits_one": one <= room,
                "fits_two": two <= room,
            }
        )
        if one > room:
            result["refusals"].append(
                f"{fs.name}: {', '.join(fs.locations)} need {one / GB:.1f} GB, {room / GB:.1f} GB are free"
            )
        elif two > room:
            result["warnings"].append(
                f"{fs.name}: two releases need {two / GB:.1f} GB, {room / GB:.1f} GB are free: no rollback"
            )
        if fs.kind in REMOTE_FILESYSTEMS and "engram" in fs.locations:
            result["refusals"].append(f"{fs.name}: Engram tables on {fs.kind}: they must be on local storage")
    result["keeps_rollback"] = all(fs["fits_two"] for fs in result["filesystems"])
    result["verdict"] = (
        "does_not_fit" if result["refusals"] else ("fits_with_warning" if result["warnings"] else "fits")
    )
    return result


def _mount_type(path: Path, table: str = "/proc/self/mounts") -> tuple[str, str]:
    """(mount point, type) of the filesystem that holds a path, from the kernel's table; empty where
    unknown."""
    try:
        lines = Path(table).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    best = ("", "")
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best


def probe_filesystems(paths: dict[str, str], held: dict[str, int] | None = None) -> list[Filesystem]:
    """The real filesystems behind locations on this node, by the nearest folder that exists.

    ``paths``: location to path. ``held``: bytes that already lie in a location. Raises DiskError for an
    unknown location or a relative path.
    """
    groups: dict[int, list[str]] = {}
    facts: dict[int, tuple[str, int, str]] = {}
    for location, text in sorted(paths.items()):
        if location not in LOCATIONS or not text.startswith("/"):
            raise DiskError(
                "bad-location", "is no location", tensor=location, found=text, wanted=", ".join(LOCATIONS)
            )
        path = Path(text)
        while not path.exists() and path != path.parent:
            path = path.parent
        path = path.resolve()
        device = path.stat().st_dev
        groups.setdefault(device, []).append(location)
        space = os.statvfs(path)
        point, kind = _mount_type(path)
        facts[device] = (point or str(path), space.f_bavail * space.f_frsize, kind)
    known = held or {}
    return [
        Filesystem(*facts[device], tuple(names), sum(known.get(name, 0) for name in names))
        for device, names in groups.items()
    ]


def disk_for_node(
    plan: dict[str, Any], rank: int, filesystems: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Judge probed filesystems of one node against a finished plan; for the controller.

    A filesystem is {name, available_bytes, type, locations, held_bytes}. Raises DiskError for a plan without
    the rank.
    """
    row = next((row for row in plan.get("disk", []) if row.get("rank") == rank), None)
    if row is None:
        raise DiskError("bad-plan", "the plan has no disk row for this rank", tensor="rank", found=rank)
    items = [Component(**item) for item in row["components"]]
    known = [
        Filesystem(
            str(fs["name"]),
            int(fs["available_bytes"]),
            str(fs.get("type", "")),
            tuple(fs.get("locations") or LOCATIONS),
            int(fs.get("held_bytes", 0)),
        )
        for fs in filesystems or []
    ]
    return judge_disk(items, known, rank=rank)
