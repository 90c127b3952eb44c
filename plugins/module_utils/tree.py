# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Trees of large files, proven by size and sha256, moved into place only when they are whole.

A *tree* is a directory with exactly the files of a manifest. While it is incomplete it lives beside its
final place under ``.NAME.partial``; nothing carries its final name before every file in it is proven.
What was proven is remembered beside the tree in ``.NAME.proof.json`` by size, mtime and inode, so a second
run reads no data again. A finished proof is never a state file of the transfer: a changed file is read again,
and ``rehash`` reads everything (field problem B64).

Sizes are bytes, times nanoseconds. Nothing here imports Ansible.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

#: One read of a file: large enough for an NVMe, small enough to keep memory flat.
CHUNK = 4 << 20
#: After so many bytes the pages read are handed back: on a GB10 the page cache competes with the GPU.
DROP_EVERY = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_SHA1 = re.compile(r"[0-9a-f]{40}\Z")
OnBytes = Callable[[int], None]


class TreeError(Exception):
    """A refusal: the text names what was found, what was wanted and the remedy."""


@dataclass(frozen=True)
class FileSpec:
    """One file of a manifest.

    :param name: path below the tree's root, ``/``-separated, never absolute, never with ``..``.
    :param size: bytes.
    :param sha256: 64 lower-case hex digits, or empty when only ``blob_id`` is known.
    :param blob_id: git blob id (sha1 over ``blob SIZE NUL data``), what a Hub lists for small files.
    """

    name: str
    size: int
    sha256: str = ""
    blob_id: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The form that travels through Ansible."""
        return {"name": self.name, "size": self.size, "sha256": self.sha256, "blob_id": self.blob_id}


def check_name(name: str) -> str:
    """A file name that stays below its root, or ``TreeError``."""
    parts = name.split("/")
    if (
        not name
        or name.startswith("/")
        or any(part in ("", ".", "..") for part in parts)
        or parts[0].startswith("-")
        or any(ord(char) < 32 or ord(char) == 127 for char in name)
    ):
        raise TreeError(
            f"the manifest names {name!r}, which is not a plain path below the tree: "
            "no absolute path, '..', empty part, leading '-' or control character; correct the manifest"
        )
    return name


def parse_files(raw: Iterable[Mapping[str, Any]], digests: bool = True) -> tuple[FileSpec, ...]:
    """A manifest from plain data, checked and sorted by name. Raises ``TreeError``.

    ``digests=False`` lets entries pass that only have a size, for a caller that completes them.
    """
    found: dict[str, FileSpec] = {}
    for item in raw:
        try:
            name = check_name(str(item["name"]))
            size = int(item["size"])
        except (KeyError, TypeError, ValueError) as exc:
            raise TreeError(f"a manifest entry needs name and size, found {item!r}") from exc
        sha256 = str(item.get("sha256") or "").lower()
        blob_id = str(item.get("blob_id") or item.get("git_oid") or "").lower()
        if size < 0:
            raise TreeError(f"{name}: the manifest gives a size of {size} bytes")
        if sha256 and not _SHA256.match(sha256):
            raise TreeError(f"{name}: {sha256!r} is not a sha256 (64 hex digits)")
        if blob_id and not _SHA1.match(blob_id):
            raise TreeError(f"{name}: {blob_id!r} is not a git blob id (40 hex digits)")
        if digests and not sha256 and not blob_id:
            raise TreeError(
                f"{name}: the manifest has neither sha256 nor git blob id, so nothing can prove it"
            )
        if name in found and found[name] != FileSpec(name, size, sha256, blob_id):
            raise TreeError(f"{name} stands twice in the manifest with different contents")
        found[name] = FileSpec(name, size, sha256, blob_id)
    return tuple(found[name] for name in sorted(found))


def complete_digests(files: Sequence[FileSpec], known: Sequence[FileSpec]) -> tuple[FileSpec, ...]:
    """Give entries without a digest the one that ``known`` has for the same name.

    Raises ``TreeError`` where a size differs or the name is unknown: the manifest is of other files.
    """
    by_name = {item.name: item for item in known}
    found = []
    for spec in files:
        other = by_name.get(spec.name)
        if spec.sha256 or spec.blob_id:
            found.append(spec)
        elif other is None or other.size != spec.size:
            there = f"{other.size} bytes" if other is not None else "nothing of that name"
            raise TreeError(
                f"the manifest has {spec.name} with {spec.size} bytes, the pinned revision has {there}: they "
                "do "
                "not belong together; make the model lock for this revision again"
            )
        else:
            found.append(other)
    return tuple(found)


def manifest_digest(files: Sequence[FileSpec]) -> str:
    """Identity of a manifest: sha256 over its canonical JSON."""
    rows = [[item.name, item.size, item.sha256, item.blob_id] for item in files]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def total_bytes(files: Iterable[FileSpec]) -> int:
    """Sum of sizes."""
    return sum(item.size for item in files)


def human(size: float) -> str:
    """``196.14 GiB``: binary units, two decimals, exact bytes below 1 KiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{int(value)} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


# -- places ------------------------------------------------------------------------------------------------


def partial_path(root: Path) -> Path:
    """Where the tree lives until it is proven."""
    return root.parent / f".{root.name}.partial"


def proof_path(root: Path) -> Path:
    """Where the proof of a tree is kept: beside it, so that the tree holds its own files only."""
    return root.parent / f".{root.name}.proof.json"


# -- proof -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A file as it was when it was proven."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str
    blob_id: str = ""

    @classmethod
    def of(cls, info: os.stat_result, sha256: str, blob_id: str = "") -> Seen:
        """From a stat result and the digests read."""
        return cls(info.st_size, info.st_mtime_ns, info.st_ino, sha256, blob_id)


@dataclass
class Proof:
    """What was proven of one tree, and the manifest and facts that belong to it."""

    files: dict[str, Seen] = field(default_factory=dict)
    listing: tuple[FileSpec, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    def covers(self, spec: FileSpec, info: os.stat_result) -> bool:
        """Whether ``spec`` was proven on exactly this inode, size and mtime."""
        seen = self.files.get(spec.name)
        if seen is None or (seen.size, seen.mtime_ns, seen.inode) != (
            info.st_size,
            info.st_mtime_ns,
            info.st_ino,
        ):
            return False
        return seen.sha256 == spec.sha256 if spec.sha256 else seen.blob_id == spec.blob_id


def read_proof(path: Path) -> Proof:
    """The proof at ``path``; an absent or unreadable one proves nothing."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Proof(
            {
                str(name): Seen(
                    int(one["size"]),
                    int(one["mtime_ns"]),
                    int(one["inode"]),
                    str(one["sha256"]),
                    str(one.get("blob_id", "")),
                )
                for name, one in raw["files"].items()
            },
            parse_files(raw.get("listing", [])),
            dict(raw.get("meta", {})),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, TreeError):
        return Proof()


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write, sync and rename, so that a reader sees the old or the new file and a crash leaves no half."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def write_proof(path: Path, proof: Proof) -> None:
    """Keep a proof."""
    raw = {
        "files": {name: vars(seen) for name, seen in sorted(proof.files.items())},
        "listing": [item.as_dict() for item in proof.listing],
        "meta": proof.meta,
    }
    write_atomic(path, (json.dumps(raw, indent=1, sort_keys=True) + "\n").encode())


# -- comparing ---------------------------------------------------------------------------------------------


@dataclass
class Report:
    """A tree against its manifest. Every list holds ``FileSpec`` in name order but ``foreign`` (names)."""

    proven: list[FileSpec] = field(default_factory=list)
    unproven: list[FileSpec] = field(default_factory=list)
    missing: list[FileSpec] = field(default_factory=list)
    #: (spec, what is wrong) – wrong size, a link, a directory, a wrong hash.
    wrong: list[tuple[FileSpec, str]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    #: bytes of wrong-sized files that a resumed transfer need not move again
    resumable: int = 0

    @property
    def complete(self) -> bool:
        """Every file proven."""
        return not (self.unproven or self.missing or self.wrong)

    @property
    def needed(self) -> list[FileSpec]:
        """Files that have to be brought, in name order."""
        return sorted([*self.missing, *(spec for spec, _why in self.wrong)], key=lambda spec: spec.name)

    @property
    def needed_bytes(self) -> int:
        """Bytes of ``needed``."""
        return total_bytes(self.needed)


def _walk(root: Path) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not (Path(folder) == root and name in OWN_FOLDERS))
        for name in sorted(files):
            yield os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118 - os.walk speaks strings


#: What transfers keep inside an unfinished tree; removed before it gets its final name.
OWN_FOLDERS = frozenset({".cache", ".huggingface", ".rsync-partial"})


def inspect(root: Path, files: Sequence[FileSpec], proof: Proof, rehash: bool = False) -> Report:
    """Compare by stat alone. A file that the proof does not cover is ``unproven``, never assumed."""
    report = Report()
    wanted = {item.name for item in files}
    for spec in files:
        path = root / spec.name
        try:
            info = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            report.missing.append(spec)
            continue
        if not stat.S_ISREG(info.st_mode):
            report.wrong.append((spec, "not a regular file"))
        elif info.st_size != spec.size:
            report.wrong.append((spec, f"{info.st_size} bytes instead of {spec.size}"))
            report.resumable += info.st_size if info.st_size < spec.size else 0
        elif not rehash and proof.covers(spec, info):
            report.proven.append(spec)
        else:
            report.unproven.append(spec)
    if root.is_dir():
        report.foreign = [name for name in _walk(root) if name not in wanted]
    return report


def refuse_foreign(root: Path, foreign: Sequence[str]) -> list[str]:
    """Warnings for foreign files; refuses those that an engine would read as weights.

    The engine takes every ``*.safetensors`` of the directory, the last in byte order wins
    (facts of tf-dsv41-rank-cache): a stray shard changes the weights without a word.
    """
    harmful = [name for name in foreign if name.endswith(".safetensors")]
    if harmful:
        raise TreeError(
            f"{root} holds {', '.join(harmful[:5])}, which its manifest does not name; the engine would read "
            "it as weights. Move it elsewhere: sparkfleet removes only what it wrote"
        )
    return [f"{root}: foreign file {name}" for name in foreign[:10]]


def digest_file(path: Path, size: int, want_blob: bool, on_bytes: OnBytes | None = None) -> tuple[str, str]:
    """(sha256, git blob id or "") of a file, its pages handed back while it is read."""
    sha = hashlib.sha256()
    blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if want_blob else None
    with path.open("rb", buffering=0) as source:
        handle = source.fileno()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = bytearray(CHUNK)
        view = memoryview(buffer)
        done = dropped = 0
        while True:
            count = source.readinto(buffer)
            if not count:
                break
            sha.update(view[:count])
            if blob is not None:
                blob.update(view[:count])
            done += count
            if on_bytes is not None:
                on_bytes(count)
            if done - dropped >= DROP_EVERY:
                _drop(handle, dropped, done - dropped)
                dropped = done
        _drop(handle, dropped, 0)
    return sha.hexdigest(), blob.hexdigest() if blob is not None else ""


def _drop(handle: int, start: int, length: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)


def prove_one(root: Path, spec: FileSpec, on_bytes: OnBytes | None = None) -> Seen:
    """Read one file and compare it with its manifest entry. Raises ``TreeError`` when it differs."""
    path = root / spec.name
    before = path.stat()
    sha256, blob_id = digest_file(path, spec.size, bool(spec.blob_id), on_bytes)
    after = path.stat()
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise TreeError(f"{path} changed while it was read: something else writes there")
    return judge_digest(path, spec, after, sha256, blob_id)


def judge_digest(path: Path, spec: FileSpec, info: os.stat_result, sha256: str, blob_id: str) -> Seen:
    """Compare digests with a manifest entry. Raises ``TreeError`` when they differ."""
    if spec.sha256 and sha256 != spec.sha256:
        raise TreeError(f"{path}: sha256 {sha256} instead of {spec.sha256}")
    if not spec.sha256 and blob_id != spec.blob_id:
        raise TreeError(f"{path}: git blob {blob_id} instead of {spec.blob_id}")
    return Seen.of(info, sha256, blob_id)


class Follower:
    """Digests a file while something else appends to it, so that the proof costs no second pass.

    The writer must write in order and never rewrite (rsync with ``--append`` does so). ``finish`` reads to
    the end and judges; the pages behind the reader are written out and handed back as it goes. The file stays
    open until the end, so that a replaced one cannot come back under the same inode.
    """

    #: Written out and handed back in pieces of this size.
    FLUSH_EVERY = 256 << 20

    def __init__(self, path: Path, spec: FileSpec) -> None:
        self._path = path
        self._spec = spec
        self._sha = hashlib.sha256()
        self._blob = hashlib.sha1(b"blob %d\0" % spec.size, usedforsecurity=False) if spec.blob_id else None
        self._done = 0
        self._flushed = 0
        self._inode = -1
        self._open = contextlib.ExitStack()
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._cancelled.set()
        self._thread.join()
        self._open.close()

    def _run(self) -> None:
        try:
            self._follow()
        except OSError as exc:
            self._error = exc

    def _follow(self) -> None:
        while not self._path.exists():
            if self._cancelled.wait(0.01) or self._ended.is_set():
                return
        buffer = bytearray(CHUNK)
        view = memoryview(buffer)
        source = self._open.enter_context(self._path.open("rb", buffering=0))
        handle = source.fileno()
        self._inode = os.fstat(handle).st_ino
        while self._done < self._spec.size and not self._cancelled.is_set():
            last = self._ended.is_set()
            count = source.readinto(buffer)
            if not count:
                if last:
                    return
                self._ended.wait(0.01)
                continue
            self._sha.update(view[:count])
            if self._blob is not None:
                self._blob.update(view[:count])
            self._done += count
            if self._done - self._flushed >= self.FLUSH_EVERY:
                os.fdatasync(handle)
                _drop(handle, self._flushed, self._done - self._flushed)
                self._flushed = self._done

    def finish(self) -> Seen:
        """Read what is left and compare. Raises ``TreeError`` when the file is not the manifest's."""
        self._ended.set()
        self._thread.join()
        info = self._path.stat()
        if self._error is not None or info.st_ino != self._inode or self._done != info.st_size:
            return prove_one(self._path.parents[self._spec.name.count("/")], self._spec)
        blob_id = self._blob.hexdigest() if self._blob is not None else ""
        return judge_digest(self._path, self._spec, info, self._sha.hexdigest(), blob_id)


def prove(
    root: Path,
    report: Report,
    proof: Proof,
    workers: int = 4,
    on_bytes: OnBytes | None = None,
) -> Report:
    """Read what is ``unproven``; each entry goes to ``proven`` or ``wrong`` and ``proof`` is filled."""

    def work(spec: FileSpec) -> tuple[FileSpec, Seen | None, str]:
        try:
            return spec, prove_one(root, spec, on_bytes), ""
        except TreeError as exc:
            return spec, None, str(exc)
        except OSError as exc:
            return spec, None, f"{root / spec.name}: {exc.strerror or exc}"

    if not report.unproven:
        return report
    ordered = sorted(report.unproven, key=lambda spec: -spec.size)
    with ThreadPoolExecutor(max_workers=max(1, min(workers, len(ordered)))) as pool:
        for spec, seen, why in pool.map(work, ordered):
            if seen is None:
                proof.files.pop(spec.name, None)
                report.wrong.append((spec, why))
            else:
                proof.files[spec.name] = seen
                report.proven.append(spec)
    report.unproven = []
    report.proven.sort(key=lambda spec: spec.name)
    report.wrong.sort(key=lambda item: item[0].name)
    return report


# -- space, locks, placing ---------------------------------------------------------------------------------


def nearest_existing(path: Path) -> Path:
    """The path itself or its nearest ancestor that exists: where its bytes will be written."""
    for candidate in (path, *path.parents):
        if candidate.exists():
            return candidate
    return Path("/")


def refuse_space(path: Path, need: int, reserve: int, what: str) -> None:
    """Refuse when the filesystem that really takes ``path`` has less than ``need + reserve`` bytes."""
    place = nearest_existing(path)
    info = os.statvfs(place)
    free = info.f_bavail * info.f_frsize
    if need and free < need + reserve:
        raise TreeError(
            f"{what} needs {human(need)} on the filesystem of {place} and {human(reserve)} must stay free, "
            f"but {human(free)} are free: {human(need + reserve - free)} short. "
            "Free space there or point the data directory at a larger filesystem"
        )


@contextlib.contextmanager
def exclusive(lock: Path, what: str) -> Iterator[int]:
    """Hold a lock file and yield its descriptor; refuse when another run holds it.

    The lock dies with the last process that has the descriptor: a child that inherits it (``pass_fds``) keeps
    a second run away even after its parent was killed.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise TreeError(
                f"another run works on {what} (lock {lock}). Wait for it; the lock ends with its process"
            ) from exc
        yield handle.fileno()


def open_folders(root: Path) -> None:
    """Let the share, which owns nothing, walk a tree, whatever the umask."""
    for folder, _names, _files in os.walk(root):
        Path(folder).chmod(0o755)


def sync_tree(root: Path) -> None:
    """Flush files and directories of a tree, so that a power cut after the rename finds it whole."""
    for folder, _names, files in os.walk(root):
        for name in files:
            handle = os.open(os.path.join(folder, name), os.O_RDONLY)  # noqa: PTH118
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_for_work(root: Path) -> Path:
    """The working directory of an unfinished or damaged tree, made when absent.

    A damaged finished tree loses its final name first: a reader must not meet it half repaired. Processes
    that hold it open keep their files.
    """
    work = partial_path(root)
    if root.exists():
        if work.exists():
            shutil.rmtree(work)
        root.replace(work)
    work.mkdir(parents=True, exist_ok=True)
    return work


def place(work: Path, root: Path) -> None:
    """Give a proven tree its final name. ``work`` is the tree itself, in or below the partial directory."""
    for name in OWN_FOLDERS:
        shutil.rmtree(work / name, ignore_errors=True)
    open_folders(work)
    sync_tree(work)
    work.replace(root)
    partial = partial_path(root)
    if partial.exists():
        shutil.rmtree(partial)
    handle = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- progress ----------------------------------------------------------------------------------------------


class Progress:
    """Bytes done of a total, written to a small file once a second for whoever watches.

    The file is JSON: ``{"what", "done", "total", "rate", "left"}`` in bytes, bytes/s and seconds.
    """

    def __init__(self, path: Path | None, what: str, total: int) -> None:
        self._path = path
        self._what = what
        self._total = total
        self._done = 0
        self._line = ""
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._written = 0.0

    def add(self, count: int) -> None:
        """Count bytes; thread-safe."""
        with self._lock:
            self._done += count
        self._write()

    def set(self, done: int) -> None:
        """State the bytes done so far."""
        with self._lock:
            self._done = done
        self._write()

    def step(self, what: str, total: int = 0) -> None:
        """Begin another step."""
        with self._lock:
            self._what, self._total, self._done, self._start, self._written = (
                what,
                total,
                0,
                time.monotonic(),
                0.0,
            )
        self._write()

    def line(self, text: str) -> None:
        """Keep the last line of a tool's own output."""
        self._line = text[:200]
        self._write()

    def _write(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._written < 1.0:
            return
        with self._lock:
            if now - self._written < 1.0:
                return
            self._written = now
            spent = max(now - self._start, 1e-6)
            rate = self._done / spent
            left = (self._total - self._done) / rate if rate > 0 and self._total else None
            raw = {
                "what": self._what,
                "done": self._done,
                "total": self._total,
                "rate": round(rate),
                "left": None if left is None else round(max(left, 0)),
                "line": self._line,
            }
        with contextlib.suppress(OSError):  # progress is a courtesy, never a reason to fail
            for folder in (self._path.parent.parent, self._path.parent):
                folder.mkdir(mode=0o755, exist_ok=True)
            write_atomic(self._path, json.dumps(raw).encode())

    def close(self) -> None:
        """Remove the file, and its folder when nobody else reports there."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()


def tree_size(root: Path) -> int:
    """Bytes below a directory, whatever they are called: how far a running download has come."""
    size = 0
    for folder, _names, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
    return size
