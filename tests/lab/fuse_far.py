"""A read-only view of one directory through a user-space process that takes its time: what a network looks like.

python3 fuse_far.py DIRECTORY MOUNTPOINT, on a lab node (python3-fusepy); ends when it is unmounted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import fusepy as fuse  # type: ignore[import-not-found]

#: Seconds a read takes: the published figure for NFS.
READ = 940e-6


class Far(fuse.Operations):  # type: ignore[misc]
    """Looks like the directory, reads like a network."""

    def __init__(self, root: str) -> None:
        self.root = root

    def getattr(self, path: str, _handle: object = None) -> dict[str, float]:
        info = Path(self.root + path).lstat()
        return {name: getattr(info, name) for name in ("st_mode", "st_size", "st_nlink", "st_mtime")}

    def readdir(self, path: str, _handle: object) -> list[str]:
        return [".", "..", *(entry.name for entry in Path(self.root + path).iterdir())]

    def read(self, path: str, size: int, offset: int, _handle: object) -> bytes:
        time.sleep(READ)
        with Path(self.root + path).open("rb") as file:
            file.seek(offset)
            return file.read(size)


if __name__ == "__main__":
    fuse.FUSE(Far(sys.argv[1]), sys.argv[2], foreground=True, ro=True, nothreads=True)
