"""Archives that the kernel unpacks before the first program: the way to the root disk, and files of one machine.

Format: cpio "newc" (the kernel's Documentation/driver-api/early-userspace/buffer-format.rst): a header of hexadecimal
numbers, name and data, each padded to four bytes; archives may follow one another in one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class File:
    """A file: absolute path, contents, mode and owner."""

    path: str
    data: bytes
    mode: int = 0o644
    owner: int = 0


@dataclass(frozen=True)
class Directory:
    """An empty directory. One that holds a file needs none."""

    path: str


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _entry(number: int, name: str, mode: int, owner: int, data: bytes) -> bytes:
    title = name.encode() + b"\0"
    # ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
    fields = (number, mode, owner, owner, 1, 0, len(data), 0, 0, 0, 0, len(title), 0)
    head = b"070701" + b"".join(f"{field:08X}".encode() for field in fields)
    return _pad(head + title) + _pad(data)


def archive(entries: Sequence[File | Directory]) -> bytes:
    """The archive of ``entries``; the directory of a file with an owner belongs to that owner alone."""
    made: dict[str, bytes] = {}

    def directory(path: PurePosixPath, mode: int, owner: int) -> None:
        made.setdefault(str(path), _entry(len(made) + 1, str(path), 0o040000 | mode, owner, b""))

    for one in entries:
        path = PurePosixPath(one.path.lstrip("/"))
        for parent in reversed(path.parents[:-1]):
            private = isinstance(one, File) and one.owner and parent == path.parent
            directory(parent, *((0o700, one.owner) if isinstance(one, File) and private else (0o755, 0)))
        if isinstance(one, Directory):
            directory(path, 0o755, 0)
        else:
            made[str(path)] = _entry(len(made) + 1, str(path), 0o100000 | one.mode, one.owner, one.data)
    return b"".join(made.values()) + _entry(0, "TRAILER!!!", 0, 0, b"")
