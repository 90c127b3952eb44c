# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A read-only NFS export of one tree to the fabric addresses of the peers, and the volume that mounts it.

One file of ours in ``/etc/exports.d`` and nothing else: ``/etc/exports`` is never appended to (field problem
B62). The tree alone is exported, never a cache directory that holds an access token.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .tree import TreeError

EXPORT_FILE = "sparkfleet.exports"
#: What a Hub client calls its access tokens.
TOKEN_NAMES = frozenset({"token", "stored_tokens"})
SERVER_OPTIONS = "ro,sync,no_subtree_check,root_squash"
#: ``hard``: weights must not turn into read errors; ``timeo`` in tenths of a second.
CLIENT_OPTIONS = "nfsvers=4.2,ro,nconnect=8,rsize=1048576,wsize=1048576,hard,timeo=600"
#: File systems that the kernel cannot export (overlayfs says so itself) or that would loop.
UNEXPORTABLE = frozenset({"overlay", "tmpfs", "nfs", "nfs4"})
_PLAIN = re.compile(r"/[A-Za-z0-9._/+@-]+\Z")


def check_path(path: str) -> str:
    """A path that needs no quoting in exports(5) and in Docker's options."""
    if not _PLAIN.match(path) or ".." in path.split("/"):
        raise TreeError(
            f"{path!r} cannot be exported: an absolute path of letters, digits and ._/+@- is needed"
        )
    return path.rstrip("/")


def export_text(path: str, clients: Sequence[str]) -> str:
    """The contents of our file in ``exports.d``."""
    hosts = sorted(str(ipaddress.ip_address(client)) for client in clients)
    if not hosts:
        raise TreeError(f"no client is named for the export of {path}")
    entries = " ".join(f"{host}({SERVER_OPTIONS})" for host in hosts)
    return f"# Written by sparkfleet (role nfs_share).\n{check_path(path)} {entries}\n"


def exported_paths(text: str) -> list[str]:
    """Paths that an exports file names."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        words = line.split("#")[0].split()
        if words:
            found.append(words[0].strip('"'))
    return found


def foreign(path: str, files: Mapping[str, str]) -> list[str]:
    """Sentences about exports of others that hold ``path``. ``files``: name to text."""
    found = []
    for name, text in sorted(files.items()):
        for other in exported_paths(text):
            if path == other or path.startswith(f"{other.rstrip('/')}/"):
                found.append(f"{name} exports {other}")
    return found


def tokens_below(path: Path) -> list[str]:
    """Files below a tree that a Hub client would call a token."""
    return sorted(str(item) for item in path.rglob("*") if item.name in TOKEN_NAMES and item.is_file())


def refuse_filesystem(path: str, fstype: str) -> None:
    """Refuse what the kernel cannot export (field problem B56)."""
    if fstype in UNEXPORTABLE or fstype.startswith("fuse"):
        raise TreeError(
            f"{path} lies on {fstype}, which the kernel does not export over NFS; put the tree on ext4 or xfs"
        )


def refuse_kernel(filesystems: str, kind: str) -> None:
    """``/proc/filesystems`` must offer ``nfsd`` (server) or ``nfs4`` (client)."""
    if kind not in filesystems.split():
        role, module = ("server", "nfsd") if kind == "nfsd" else ("client", "nfs")
        raise TreeError(
            f"this kernel has no NFS {role} (module {module} is neither built in nor loaded); load it, or "
            "keep the "
            "files local, which is the default and costs one copy over the fabric"
        )


def volume_options(server: str, path: str) -> dict[str, str]:
    """Options of the Docker volume that mounts the export."""
    address = str(ipaddress.ip_address(server))
    return {"type": "nfs", "o": f"addr={address},{CLIENT_OPTIONS}", "device": f":{check_path(path)}"}


def volume_difference(wanted: Mapping[str, str], found: Mapping[str, str] | None) -> list[str]:
    """What differs; the options of a volume never change, so its owner has to remove a different one."""
    have = dict(found or {})
    return [
        f"{key} is {have.get(key, 'absent')}, wanted {wanted.get(key, 'absent')}"
        for key in sorted(set(wanted) | set(have))
        if wanted.get(key) != have.get(key)
    ]
