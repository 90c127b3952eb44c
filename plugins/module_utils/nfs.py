# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A read-only NFS export of one tree to the fabric addresses of the peers, and the volume that mounts it.

One file of ours an export in ``/etc/exports.d`` and nothing else: ``/etc/exports`` is never appended to (field
problem B62). The tree alone is exported, never a cache directory that holds an access token.

A dead server hangs every process that touches a hard mount, and Docker with it (field problem B57), so whoever is
about to touch one asks the server first, over a socket that gives up: ``ping``.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

from .engram import Mount
from .tree import TreeError

#: Program number and version of NFS in an RPC call (RFC 5531, RFC 7530), and its port.
NFS_PROGRAM, NFS_VERSION, NFS_PORT = 100003, 4, 2049
#: Seconds that a server may take to answer a call that does nothing. On a rail it takes under a millisecond.
PING_SECONDS = 5.0
#: What a Hub client calls its access tokens.
TOKEN_NAMES = frozenset({"token", "stored_tokens"})
SERVER_OPTIONS = "ro,sync,no_subtree_check,root_squash"
#: ``hard``: weights must not turn into read errors; ``timeo`` in tenths of a second.
CLIENT_OPTIONS = "nfsvers=4.2,ro,nconnect=8,rsize=1048576,wsize=1048576,hard,timeo=600"
#: File systems that the kernel cannot export (overlayfs says so itself) or that would loop.
UNEXPORTABLE = frozenset({"overlay", "tmpfs", "nfs", "nfs4"})
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}\Z")
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


def export_file(name: str) -> str:
    """Name of our file in ``exports.d`` for one export. A name is a word, so that the file is always ours."""
    if not _NAME.match(name):
        raise TreeError(f"{name!r} cannot name an export: lower-case letters, digits and - are needed")
    return f"sparkfleet-{name}.exports"


def entries(text: str) -> list[tuple[str, str, str]]:
    """(path, client, options) of every entry of an exports file, or of what ``exportfs -s`` prints (exports(5))."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split("#")[0].split()
        # A word that begins with - gives options to the clients after it.
        common = ""
        for word in words[1:]:
            if word.startswith("-"):
                common = word[1:]
                continue
            client, _bracket, options = word.partition("(")
            found.append((words[0].strip('"'), client or "*", options.rstrip(")") or common))
    return found


def foreign(path: str, files: Mapping[str, str]) -> list[str]:
    """Sentences about exports of others that stand in the way. ``files``: name to text.

    An export that holds ``path`` gives it away with options of its own. One with ``fsid=0`` is the root that NFSv4
    paths begin at, so that ours would not be found where the volume looks for it.
    """
    found = []
    for name, text in sorted(files.items()):
        for other, client, options in entries(text):
            if path == other or path.startswith(f"{other.rstrip('/')}/"):
                sentence = f"{name} exports {other}, which gives {path} away with options of its own"
            elif {"fsid=0", "fsid=root"} & set(options.split(",")):
                sentence = f"{name} exports {other} to {client} with fsid=0, so that NFSv4 paths begin there"
            else:
                continue
            if sentence not in found:
                found.append(sentence)
    return found


def withdraw(run: Callable[[list[str]], Any], exportfs: str, before: str, wanted: str) -> None:
    """Take what our file (``before``) no longer says (``wanted``) out of the kernel's table, and nothing else."""
    kept = {(path, client) for path, client, _options in entries(wanted)}
    for path, client, _options in entries(before):
        if (path, client) not in kept:
            run([exportfs, "-u", f"{client}:{path}"])


def take_back(run: Callable[[list[str]], Any], exportfs: str, own: Path) -> None:
    """Remove our file and what it says from the kernel's table. The server stays: others may use it."""
    before = own.read_text(encoding="utf-8")
    own.unlink()
    withdraw(run, exportfs, before, "")


def missing_clients(wanted: str, table: str) -> list[tuple[str, str]]:
    """(path, client) of ``wanted`` (our file) that the kernel's ``table`` (``exportfs -s``) has not."""
    have = {(path, client) for path, client, _options in entries(table)}
    return [(path, client) for path, client, _options in entries(wanted) if (path, client) not in have]


def mounts_below(path: str, mounts: Sequence[Mount]) -> list[str]:
    """Mount points below an export: a client sees an empty directory there (field problem B56)."""
    return sorted({one.point for one in mounts if one.point.startswith(f"{path.rstrip('/')}/")})


def tokens_below(path: Path) -> list[str]:
    """Files below a tree that a Hub client would call a token."""
    return sorted(str(item) for item in path.rglob("*") if item.name in TOKEN_NAMES and item.is_file())


def refuse_filesystem(path: str, fstype: str) -> None:
    """Refuse what the kernel cannot export (field problem B56)."""
    if fstype in UNEXPORTABLE or fstype.startswith("fuse"):
        raise TreeError(
            f"{path} lies on {fstype}, which the kernel does not export over NFS; put the tree on ext4 or xfs"
        )


#: What ``/proc/filesystems`` calls it when it is there -> (in words, module that brings it on first use).
KERNEL_PARTS = {"nfsd": ("server", "nfsd"), "nfs4": ("client", "nfs")}


def refuse_kernel(filesystems: str, kind: str, loadable: bool) -> None:
    """The kernel must have ``nfsd`` (server) or ``nfs4`` (client), or be able to load it on first use.

    :param filesystems: ``/proc/filesystems``, which names what is loaded or built in.
    :param loadable: whether ``modprobe`` would find the module.
    """
    if kind not in filesystems.split() and not loadable:
        role, module = KERNEL_PARTS[kind]
        raise TreeError(
            f"this kernel has no NFS {role} (module {module} is neither built in, nor loaded, nor found by "
            "modprobe); install the kernel's modules, or keep the files local, which is the default and costs one "
            "copy over the fabric"
        )


def refuse_other_server(threads: str, active: bool) -> None:
    """A kernel has one NFS server; one that nfs-server.service did not start is somebody else's (B61).

    :param threads: ``/proc/fs/nfsd/threads``, empty when the server was never loaded.
    """
    if threads.strip() not in ("", "0") and not active:
        raise TreeError(
            f"this kernel's NFS server runs with {threads.strip()} threads and nfs-server.service did not start it "
            "(another recipe's exporter, perhaps in a container; a kernel has one): stop it, or export the tree there"
        )


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise TreeError("it hung up before it answered")
        data += more
    return data


def ping(address: str, port: int = NFS_PORT, seconds: float = PING_SECONDS) -> None:
    """Ask an NFS server for nothing (procedure NULL) and wait for its answer, at most ``seconds`` a step.

    Raises ``TreeError`` that says which it was: no way there, nobody listens, no answer, no NFS version 4. A kernel
    that hangs can still accept a connection, so that only an answer counts.
    """
    number = os.getpid() & 0xFFFFFFFF
    # xid, CALL, RPC version 2, program, version, procedure NULL, two empty authentications (RFC 5531, section 9).
    call = struct.pack(">10I", number, 0, 2, NFS_PROGRAM, NFS_VERSION, 0, 0, 0, 0, 0)
    remedy = "see `systemctl status nfs-server` there, and its firewall"
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.sendall(struct.pack(">I", 0x80000000 | len(call)) + call)
            (mark,) = struct.unpack(">I", _exactly(connection, 4))
            answer = _exactly(connection, min(mark & 0x7FFFFFFF, 4096))
    except ConnectionRefusedError as exc:
        raise TreeError(
            f"nobody listens on {address}:{port}: the NFS server is not started; {remedy}"
        ) from exc
    except socket.timeout as exc:
        raise TreeError(
            f"the NFS server {address}:{port} did not answer in {seconds:g} s: it is down, hangs, or a firewall "
            f"drops what is sent; {remedy}"
        ) from exc
    except OSError as exc:
        raise TreeError(
            f"no way to the NFS server {address}:{port} ({exc.strerror or exc}); {remedy}"
        ) from exc
    except TreeError as exc:
        raise TreeError(f"{address}:{port} is no NFS server: {exc}; {remedy}") from exc
    words = struct.unpack(f">{len(answer) // 4}I", answer[: len(answer) // 4 * 4])
    # xid, REPLY, accepted, an authentication of some length, then success.
    skip = 5 + (words[4] + 3) // 4 if len(words) > 4 else 0
    if words[:3] != (number, 1, 0) or len(words) <= skip or words[skip] != 0:
        raise TreeError(
            f"{address}:{port} answers, but not as a server of NFS version {NFS_VERSION}; {remedy}"
        )


def server_of(options: Mapping[str, str] | None) -> str:
    """Address of the server behind a Docker volume's options; empty for a volume that is not NFS."""
    given = dict(options or {})
    if given.get("type") not in ("nfs", "nfs4"):
        return ""
    for option in given.get("o", "").split(","):
        key, _equals, value = option.partition("=")
        if key == "addr":
            return value
    return ""


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
