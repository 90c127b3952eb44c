# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Moving files between two nodes over the fabric, without keys between them.

The source runs an rsync daemon as a transient systemd unit: read-only, one directory, listening on a fabric
address alone, for the named clients alone, as a user that owns nothing, with a hard end (``RuntimeMaxSec``)
for the case that the controller dies. The receiver pulls several files at once into a tree that does not have
its final name yet; a killed copy resumes by appending, and the proof by sha256 afterwards is what counts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from .tree import (
    FileSpec,
    Follower,
    OnBytes,
    Proof,
    Report,
    Seen,
    TreeError,
    inspect,
    prove,
    tree_size,
)

#: Name of the rsync module inside a share.
MODULE = "tree"
#: Default port of a share: free in the IANA registry's user range, fixed so that a firewall can name it.
PORT = 29873
RUN_DIR = Path("/run/sparkfleet")
_UNIT_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,60}\Z")

#: rsync exit codes (rsync(1), EXIT VALUES) that a second try may cure: the peer or the link went away.
_RETRY = frozenset({10, 12, 30, 35})
_MEANING = {
    5: "the source refuses this node as a client",
    10: "the source does not answer",
    11: "writing or reading a file failed (disk full, or an I/O error)",
    12: "the connection broke off",
    23: "the source lacks the file or cannot read it",
    24: "the source lost the file while it was read",
    30: "the source fell silent",
    35: "the source does not accept connections",
}


# -- the source --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listen:
    """One address of the source and the clients that may connect to it."""

    address: str
    clients: tuple[str, ...]


def parse_listen(raw: Iterable[Mapping[str, Any]]) -> tuple[Listen, ...]:
    """Addresses checked as addresses, so that nothing else reaches a configuration file."""
    merged: dict[str, set[str]] = {}
    for item in raw:
        try:
            address = str(ipaddress.ip_address(str(item["address"])))
            clients = {str(ipaddress.ip_address(str(client))) for client in item["clients"]}
        except (KeyError, TypeError, ValueError) as exc:
            raise TreeError(f"a share needs an address and clients (IP addresses), found {item!r}") from exc
        if not clients:
            raise TreeError(f"the share on {address} names no client; nobody could read it")
        merged.setdefault(address, set()).update(clients)
    return tuple(Listen(address, tuple(sorted(clients))) for address, clients in sorted(merged.items()))


def unit_name(name: str, number: int) -> str:
    """``sparkfleet-share-NAME-N.service``."""
    if not _UNIT_NAME.match(name):
        raise TreeError(f"{name!r} cannot name a share: lower-case letters, digits and hyphens only")
    return f"sparkfleet-share-{name}-{number}.service"


def daemon_config(path: str, listen: Listen, port: int) -> str:
    """``rsyncd.conf`` of one share."""
    if any(char in path for char in "\n\r%") or not path.startswith("/"):
        raise TreeError(f"{path!r} cannot be shared: an absolute path without line ends or '%' is needed")
    return (
        f"address = {listen.address}\n"
        f"port = {port}\n"
        "use chroot = no\n"
        "reverse lookup = no\n"
        "list = no\n"
        f"[{MODULE}]\n"
        f"path = {path}\n"
        "read only = yes\n"
        f"hosts allow = {' '.join(listen.clients)}\n"
        "hosts deny = *\n"
        "timeout = 300\n"
    )


def daemon_argv(unit: str, config: Path, rsync: str, max_seconds: int) -> list[str]:
    """The ``systemd-run`` call that starts one share."""
    properties = [
        "Type=exec",
        f"RuntimeMaxSec={max_seconds}",
        "DynamicUser=yes",
        "NoNewPrivileges=yes",
        "ProtectHome=yes",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        f"ExecStopPost=+/bin/rm -f {config}",
    ]
    argv = [
        "systemd-run",
        "--quiet",
        "--collect",
        f"--unit={unit}",
        "--description=sparkfleet read-only share",
    ]
    for item in properties:
        argv += ["--property", item]
    return [*argv, "--", rsync, "--daemon", "--no-detach", f"--config={config}"]


def answers(address: str, port: int, timeout: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=timeout):
        return True
    return False


# -- the receiver ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where to pull from: fabric address and port of a share, and the folder inside it."""

    address: str
    port: int
    folder: str = ""

    @property
    def url(self) -> str:
        """The rsync URL of the share."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"rsync://{host}:{self.port}/{MODULE}/"

    def named(self, name: str) -> bytes:
        """A file as rsync is asked for it. What stands before ``/./`` is not repeated at the receiver.

        A folder in the URL would do the same, but rsync 3.5.0 then reports every file as vanished.
        """
        folder = self.folder.strip("/")
        return (f"{folder}/./{name}" if folder else name).encode() + b"\0"


def parse_source(raw: Mapping[str, Any]) -> Source:
    """A source from plain data."""
    try:
        address = str(ipaddress.ip_address(str(raw["address"])))
        port = int(raw.get("port") or PORT)
    except (KeyError, ValueError) as exc:
        raise TreeError(f"the source of a copy needs an IP address and a port, found {raw!r}") from exc
    folder = str(raw.get("folder") or "")
    if ".." in folder.split("/") or any(ord(char) < 32 for char in folder):
        raise TreeError(f"{folder!r} leaves the share")
    return Source(address, port, folder)


def pull_argv(rsync: str, source: Source, dest: Path, limit_kib: int = 0) -> list[str]:
    """The ``rsync`` call; names come NUL-separated on stdin, so no name is ever an option or a pattern.

    ``--append`` resumes a killed copy without reading what is there on either side; the proof reads it.
    """
    argv = [
        rsync,
        "--append",
        "--no-motd",
        "--from0",
        "--files-from=-",
        "--chmod=D755,F644",
        "--contimeout=10",
        "--timeout=120",
    ]
    if limit_kib:
        argv.append(f"--bwlimit={limit_kib}")
    return [*argv, source.url, f"{dest}/"]


Run = Callable[[Sequence[str], bytes], "tuple[int, str]"]


def runner(lock_fd: int) -> Run:
    """Run a command whose process keeps the lock, so that a killed parent leaves no second writer."""

    def run(argv: Sequence[str], stdin: bytes) -> tuple[int, str]:
        done = subprocess.run(
            list(argv),
            input=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
            pass_fds=(lock_fd,) if lock_fd >= 0 else (),
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"},
        )
        return done.returncode, done.stderr.decode("utf-8", "replace").strip()

    return run


def pull_one(
    rsync: str, source: Source, work: Path, spec: FileSpec, *, run: Run, tries: int = 3, limit_kib: int = 0
) -> None:
    """Bring one file, resuming and trying again while the fault may pass. Raises ``TreeError``."""
    target = work / spec.name
    for attempt in range(tries):
        code, text = run(pull_argv(rsync, source, work, limit_kib), source.named(spec.name))
        if code == 0:
            break
        if code not in _RETRY or attempt == tries - 1:
            meaning = _MEANING.get(code, f"rsync ended with {code}")
            last = text.splitlines()[-1] if text else ""
            raise TreeError(f"{spec.name} from {source.address}:{source.port}: {meaning} ({last})")
        time.sleep(1 << attempt)
    size = target.stat().st_size if target.is_file() else -1
    if size != spec.size:
        raise TreeError(
            f"{spec.name} from {source.address}: {max(size, 0)} bytes came instead of {spec.size}; "
            "the source holds another file than the manifest says"
        )


class WrongBytes(TreeError):
    """A file came whole and is not the manifest's."""


def pull_proven(
    rsync: str, source: Source, work: Path, spec: FileSpec, *, run: Run, limit_kib: int = 0
) -> Seen:
    """Bring one file and digest it while it comes."""
    target = work / spec.name
    if target.is_symlink() or (target.exists() and target.stat().st_size > spec.size):
        target.unlink()
    with Follower(target, spec) as follower:
        pull_one(rsync, source, work, spec, run=run, limit_kib=limit_kib)
        try:
            return follower.finish()
        except TreeError as exc:
            raise WrongBytes(str(exc)) from exc


def pull(
    rsync: str,
    source: Source,
    work: Path,
    files: Sequence[FileSpec],
    proof: Proof,
    *,
    run: Run,
    parallel: int = 4,
    limit_kib: int = 0,
    on_bytes: OnBytes | None = None,
) -> None:
    """Bring and prove files, several at once, each digested while it comes.

    A file that came wrong is thrown away and brought once more as a whole (the kept part of a killed copy may
    be what was wrong). Raises ``TreeError`` for the first file that stays wrong; what is proven stays proven.
    """
    guard = threading.Lock()
    stop = threading.Event()

    def work_on(spec: FileSpec) -> None:
        if stop.is_set():
            return
        try:
            resumed = (work / spec.name).exists()
            try:
                seen = pull_proven(rsync, source, work, spec, run=run, limit_kib=limit_kib)
            except WrongBytes:
                (work / spec.name).unlink()
                if not resumed:
                    raise
                seen = pull_proven(rsync, source, work, spec, run=run, limit_kib=limit_kib)
            with guard:
                proof.files[spec.name] = seen
            if on_bytes is not None:
                on_bytes(spec.size)
        except BaseException:
            stop.set()
            raise

    ordered = sorted(files, key=lambda spec: -spec.size)
    with ThreadPoolExecutor(max_workers=max(1, min(parallel, len(ordered) or 1))) as pool:
        futures = [pool.submit(work_on, spec) for spec in ordered]
        failed = [error for error in (future.exception() for future in futures) if error is not None]
    if failed:
        first = failed[0]
        if isinstance(first, OSError):
            raise TreeError(f"{work}: {first.strerror or first}") from first
        raise first


class SizeWatch:
    """Counts the bytes below a directory once a second into ``set_done`` while work goes on."""

    def __init__(self, root: Path, base: int, set_done: Callable[[int], None]) -> None:
        self._root = root
        self._base = base
        self._set = set_done
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        while not self._stop.wait(1.0):
            self._set(max(0, tree_size(self._root) - self._base))

    def __enter__(self) -> SizeWatch:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)


def settle(root: Path, files: Sequence[FileSpec], proof: Proof, workers: int) -> Report:
    """Compare and read whatever the proof does not cover."""
    return prove(root, inspect(root, files, proof), proof, workers)
