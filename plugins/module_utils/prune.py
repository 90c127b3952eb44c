# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What lies below the data directory and no release uses.

Only what this collection made can be listed at all: directories at the depth where it puts them, with the
proof that it wrote beside them (or a name that only it gives). What is used is asked of everything that can
know: release markers, launch files, containers, exports. Where one of them cannot be read or says nothing,
nothing may be removed: unknown is never unused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .tree import inspect, partial_path, proof_path, read_proof

#: Directories below the data directory that hold one tree a source and revision: FAMILY/SOURCE/REVISION.
TREES = ("models", "engram", "kit", "rank-files")
TOKEN_MAP = "dsv41_token_map.json"  # noqa: S105 - a file name
_CACHE = re.compile(r"[0-9a-f]{12}\Z")


@dataclass
class Found:
    """One directory of ours. ``why`` says what it is; ``used_by`` who uses it; ``foreign`` what is not ours."""

    path: Path
    why: str
    used_by: str = ""
    foreign: list[str] = field(default_factory=list)

    @property
    def unused(self) -> bool:
        """Nobody uses it and everything in it is ours."""
        return not self.used_by and not self.foreign


def _folders(path: Path) -> list[Path]:
    """Real directories in a real directory, hidden ones too; nothing where there is none."""
    if path.is_symlink():
        return []
    try:
        return sorted(item for item in path.iterdir() if item.is_dir() and not item.is_symlink())
    except OSError:
        return []


def survey(data: Path) -> list[Found]:
    """Every directory of ours that could be garbage, used or not, in path order."""
    found: list[Found] = []
    for family in TREES:
        for source in _folders(data / family):
            for tree in _folders(source):
                if tree.name.startswith("."):
                    if tree.name.endswith((".partial", ".inner")):
                        found.append(Found(tree, "an unfinished transfer"))
                    continue
                proof = read_proof(proof_path(tree))
                if proof.listing:
                    found.append(Found(tree, family, foreign=inspect(tree, proof.listing, proof).foreign))
    for source in _folders(data / "token-map"):
        for tree in _folders(source):
            names = sorted(item.name for item in tree.iterdir())
            if TOKEN_MAP in names:
                strangers = [name for name in names if name not in (TOKEN_MAP, f".{TOKEN_MAP}.partial")]
                found.append(Found(tree, "token-map", foreign=strangers))
    found += [Found(tree, "cache") for tree in _folders(data / "cache") if _CACHE.match(tree.name)]
    found += [Found(tree, "left by a transfer") for tree in _folders(data / "transfer")]
    return sorted(found, key=lambda item: item.path)


def marker_uses(texts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(path to user, what is unknown) of release markers: file name to text."""
    uses: dict[str, str] = {}
    unknown = []
    for name, text in sorted(texts.items()):
        try:
            marker = json.loads(text)
            releases = {key: marker[key] for key in ("current", "previous") if marker.get(key)}
            for key, release in releases.items():
                paths = release.get("paths") or []
                if not paths:
                    unknown.append(f"the {key} release of {name} does not say which paths it uses")
                uses.update({str(path): f"{key} release of {name.removesuffix('.json')}" for path in paths})
        except (ValueError, TypeError, AttributeError, KeyError) as exc:
            unknown.append(f"the release marker {name} cannot be read ({exc!r})")
    return uses, unknown


def launch_uses(texts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The same for launch files: replica to text. A Docker volume is ``volume:NAME``, as in a marker."""
    uses: dict[str, str] = {}
    unknown = []
    for replica, text in sorted(texts.items()):
        try:
            mounts = json.loads(text)["container"]["mounts"]
            sources = [str(mount["source"]) for mount in mounts]
            names = [source if source.startswith("/") else f"volume:{source}" for source in sources]
            uses.update(dict.fromkeys(names, f"launch of {replica}"))
        except (ValueError, TypeError, KeyError) as exc:
            unknown.append(f"the launch file of {replica} cannot be read ({exc!r})")
    return uses, unknown


def container_uses(containers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Paths and volumes (``volume:NAME``) that containers mount, running or not, ours or not."""
    uses = {}
    for one in containers:
        name = (one.get("Names") or [str(one.get("Id"))[:12]])[0].lstrip("/")
        for mount in one.get("Mounts") or []:
            if mount.get("Source"):
                uses[str(mount["Source"])] = f"container {name}"
            if mount.get("Type") == "volume" and mount.get("Name"):
                uses[f"volume:{mount['Name']}"] = f"container {name}"
    return uses


def export_uses(texts: Iterable[str]) -> dict[str, str]:
    """Paths that an NFS server gives away."""
    uses = {}
    for text in texts:
        for line in text.splitlines():
            path = line.strip().split(" ")[0].split("\t")[0].strip('"')
            if path.startswith("/"):
                uses[path] = "an NFS export"
    return uses


def mark(found: Sequence[Found], uses: Mapping[str, str]) -> None:
    """Say of every directory who uses it: a path that is it, lies in it, or holds it."""
    users = [(Path(os.path.normpath(path)), user) for path, user in sorted(uses.items())]
    for item in found:
        for path, user in users:
            if path == item.path or item.path in path.parents or path in item.path.parents:
                item.used_by = user
                break


def held_locks(folder: Path) -> list[str]:
    """Lock files that a running transfer holds."""
    held = []
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.suffix == ".json" or not path.is_file():
            continue
        with path.open("a", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                held.append(path.name)
    return held


def freed_bytes(paths: Sequence[Path]) -> dict[Path, int]:
    """Bytes that removing these directories frees, by directory; a file with links elsewhere frees nothing."""
    links: dict[tuple[int, int], int] = {}
    first: dict[tuple[int, int], tuple[Path, int, int]] = {}
    for root in paths:
        for folder, _names, files in os.walk(root):
            for name in files:
                with contextlib.suppress(OSError):
                    info = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - os.walk speaks strings
                    key = (info.st_dev, info.st_ino)
                    links[key] = links.get(key, 0) + 1
                    first.setdefault(key, (root, info.st_size, info.st_nlink))
    sizes = dict.fromkeys(paths, 0)
    for key, (root, size, count) in first.items():
        if links[key] == count:
            sizes[root] += size
    return sizes


def remove(tree: Path, data: Path) -> None:
    """Remove one directory with its proof; it loses its name first, so nobody meets half of it."""
    if data not in tree.parents or tree.is_symlink():
        raise ValueError(f"{tree} is not below {data}")
    aside = tree if tree.name.startswith(".") else partial_path(tree)
    if aside != tree:
        shutil.rmtree(aside, ignore_errors=True)
        tree.replace(aside)
        with contextlib.suppress(FileNotFoundError):
            proof_path(tree).unlink()
    shutil.rmtree(aside)
    parent = tree.parent
    while data not in (parent, parent.parent):
        try:
            parent.rmdir()  # only when nothing else is in it
        except OSError:
            break
        parent = parent.parent
