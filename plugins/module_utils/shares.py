# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What ``engram_placement: nfs`` makes on a node: an export on rank 0, a Docker volume on the others, one a revision.

Both outlive the placement: a release that is kept may need them, so a run that places tables elsewhere leaves them
and says so. Only what the role engram alone names like this, and where this collection wrote the file or labelled
the volume, is looked at; a share that somebody made with the role nfs_share is theirs to take back.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .nfs import entries

#: How markers, launches and the inventory name what they use: ``export:NAME`` and ``volume:NAME``.
EXPORT, VOLUME = "export:", "volume:"
#: The label of a volume that this collection made for NFS.
LABEL = ("sparkfleet.helper", "nfs")
PREFIX = "sparkfleet-"
_SHARE = re.compile(r"engram-[0-9a-f]{12}\Z")
_CLIENT = re.compile(r'^address: "(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)):\d+"', re.MULTILINE)


@dataclass(frozen=True)
class Share:
    """One side of the share ``name``. ``place`` is a file or a volume's name, ``tree`` what an export gives away."""

    name: str
    key: str
    place: str
    what: str
    tree: str = ""
    clients: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What and where, for a message."""
        return f"{self.place} ({self.what})"


def exports(folder: Path) -> list[Share]:
    """Exports of Engram tables that this collection wrote into ``folder`` (``/etc/exports.d``)."""
    found = []
    for path in sorted(folder.glob(f"{PREFIX}*.exports")) if folder.is_dir() else []:
        name = path.stem[len(PREFIX) :]
        if not _SHARE.match(name):
            continue
        rows = entries(path.read_text(encoding="utf-8"))
        clients = tuple(sorted({client for _tree, client, _options in rows}))
        tree = rows[0][0] if rows else ""
        what = f"NFS export of {tree} to {', '.join(clients)}"
        found.append(Share(name, EXPORT + name, str(path), what, tree, clients))
    return found


def volumes(rows: Iterable[Mapping[str, Any]]) -> list[Share]:
    """Docker volumes over NFS that this collection made for Engram tables, of what ``GET /volumes`` lists."""
    found = []
    for row in rows:
        volume = str(row.get("Name", ""))
        prefix, name = volume[: len(PREFIX)], volume[len(PREFIX) :]
        ours = (row.get("Labels") or {}).get(LABEL[0]) == LABEL[1]
        if ours and prefix == PREFIX and _SHARE.match(name):
            found.append(Share(name, VOLUME + volume, volume, "Docker volume over NFS"))
    return sorted(found, key=lambda one: one.key)


def connected(folder: Path) -> set[str]:
    """Addresses of the clients that this kernel's NFS server knows now (``/proc/fs/nfsd/clients``, Linux 5.3)."""
    found = set()
    for path in sorted(folder.glob("*/info")) if folder.is_dir() else []:
        # A client may go between the listing and the reading.
        with contextlib.suppress(FileNotFoundError):
            for six, four in _CLIENT.findall(path.read_text(encoding="utf-8", errors="replace")):
                found.add(six or four)
    return found


def user_of(share: Share, uses: Mapping[str, str], clients: set[str]) -> str:
    """Who uses a share, in words; empty for nobody. An export is used by a client of it that is connected, too."""
    named = uses.get(share.key, "")
    here = sorted(clients & set(share.clients))
    return named or (f"the NFS client {here[0]}, which is connected" if here else "")
