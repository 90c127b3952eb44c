"""Unified memory: the engine's admission rule, and the lab's account of what a rank holds.

`/proc/meminfo` cannot follow a program that has no GPU, so a rank that runs in a lab enters what
it would hold into the lab's account (`LAB_MEMORY_DIR`, /run/lab/memory when unset; nothing is written when
that folder does not exist), and what makes the lab's meminfo takes it off.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import socket
from pathlib import Path

from .errors import EngineError
from .fabric import root

GIB = 1 << 30
# Per position: FP4 KV and index keys 890 B, RoPE 512 B, prompt mask 256 B, round scoring 204 B.
POSITION_BYTES = 1862
# CUDA context, prompt buffers and graphs of a real rank.
RUNTIME_BYTES = 3 * GIB
_claims: list[Path] = []


def meminfo() -> tuple[int, int]:
    """(MemTotal, MemAvailable) in bytes; a malformed file is refused."""
    try:
        text = (root() / "proc/meminfo").read_text()
    except OSError as error:
        raise EngineError("BadMeminfo", "/proc/meminfo is not readable") from error
    found = dict(re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB$", text, re.MULTILINE))
    if set(found) != {"MemTotal", "MemAvailable"}:
        raise EngineError("BadMeminfo", "/proc/meminfo has no MemTotal and MemAvailable")
    return int(found["MemTotal"]) << 10, int(found["MemAvailable"]) << 10


def admit(weights: int) -> None:
    """Rank 0's check before it loads: weights must fit what is available above the reserve."""
    total, available = meminfo()
    text = os.environ.get("TENSORFOLD_MEMORY_RESERVE_GIB", "")
    reserve = max(4 * GIB, total // 10)
    if text:
        try:
            reserve = int(float(text) * GIB)
        except ValueError as error:
            raise EngineError("BadArgument", f"TENSORFOLD_MEMORY_RESERVE_GIB={text}") from error
        if not 2 * GIB <= reserve <= total:
            raise EngineError(
                "BadArgument", f"TENSORFOLD_MEMORY_RESERVE_GIB={text} is not 2 to the memory's size"
            )
    room = available - reserve
    limit = os.environ.get("TENSORFOLD_CUDA_MEMORY_LIMIT_GB", "")
    if limit:
        room = min(room, int(float(limit) * GIB))
    if weights > room:
        raise EngineError(
            "OutOfMemory",
            f"rank 0: weights do not fit the memory budget ({weights / GIB:.2f} GiB of weights, "
            f"{available / GIB:.2f} GiB available, {reserve / GIB:.2f} GiB reserve)",
        )


def claim(name: str, weights: int, context: int) -> int:
    """Enter this rank's memory into the lab's account, if there is one; the bytes claimed.

    The account is a folder of files `KB NAME`, each held under an exclusive lock by the rank that wrote it:
    the claim ends with the lock, however the rank ends.
    """
    nbytes = weights + POSITION_BYTES * context + RUNTIME_BYTES
    folder = Path(os.environ.get("LAB_MEMORY_DIR", "/run/lab/memory"))
    if folder.is_dir():
        path = folder / f"{name}-{socket.gethostname()}-{os.getpid()}"
        # Kept open for the life of the process: closing it would end the claim.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, f"{nbytes >> 10} {name}\n".encode())
        _claims.append(path)
        atexit.register(release)
    return nbytes


def release() -> None:
    """Take this rank's claims away."""
    while _claims:
        _claims.pop().unlink(missing_ok=True)
