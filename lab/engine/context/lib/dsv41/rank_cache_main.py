"""`tf-dsv41-rank-cache MODEL_DIR OUT_DIR RANK WORLD [--parity] [--no-dspark] [--index-only]`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import stat
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from . import modelconfig, rankfile, shards, split
from .errors import EngineError, EntryError, Panic, os_error, panic, report, say

USAGE = "usage: tf-dsv41-rank-cache MODEL_DIR OUT_DIR RANK WORLD [--parity] [--no-dspark] [--index-only]"
WORLDS = "WORLD is 1, 2 or 4, RANK below it, --parity needs WORLD 4"
PROGRESS_BYTES = 8 << 30


@dataclass(frozen=True)
class Options:
    """The checked command line."""

    model: str
    out: str
    rank: int
    world: int
    parity: bool
    dspark: bool
    index_only: bool


class Usage(Exception):
    """Exit 2 with the usage line."""


def number(text: str) -> int:
    """An unsigned 32-bit decimal as the engine's parser takes it: `+1` and `01` too."""
    if not re.fullmatch(r"[+-]?[0-9](_?[0-9])*", text):
        raise EngineError("InvalidCharacter")
    value = int(text)
    if value < 0 or value >= 1 << 32:
        raise EngineError("Overflow")
    return value


def parse(args: list[str]) -> Options:
    """Check the arguments, before MODEL_DIR is looked at."""
    if len(args) < 4 or any(arg not in ("--parity", "--no-dspark", "--index-only") for arg in args[4:]):
        raise Usage
    rank, world = number(args[2]), number(args[3])
    parity = "--parity" in args[4:]
    if world not in (1, 2, 4) or rank >= world or (parity and world != 4):
        say(WORLDS)
        raise Usage
    return Options(
        args[0], args[1], rank, world, parity, "--no-dspark" not in args[4:], "--index-only" in args[4:]
    )


def write_stdout(data: bytes) -> None:
    """As the tool does it: a regular file is written from its start, whatever stands in it already."""
    descriptor = sys.stdout.fileno()
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    offset = 0
    try:
        import fcntl

        appending = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND)
        while offset < len(data):
            if regular and not appending:
                offset += os.pwrite(descriptor, data[offset:], offset)
            else:
                offset += os.write(descriptor, data[offset:])
    except OSError as error:
        raise EngineError("WriteFailed") from error


def write(options: Options, rows: list[rankfile.Row], index: bytes) -> Path:
    """Write the file under its partial name, sync it and rename it."""
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise EngineError("NotDir") from error
    except OSError as error:
        raise os_error(error) from error
    try:
        old = rankfile.find(options.out, options.rank, options.world)
    except EngineError as error:
        if error.name != "NoRankCache":
            raise
    else:
        raise EntryError(f"{options.out} already holds {old}: remove it or name an empty OUT_DIR")
    partial = out / f".rank{options.rank}of{options.world}.partial"
    reader = shards.Reader()
    total = rows[-1].offset + rows[-1].nbytes if rows else 0
    written, told = 0, 0
    try:
        with partial.open("wb") as file:
            for row in rows:
                data = rankfile.contents(row, reader)
                file.write(data)
                written += len(data)
                if written - told >= PROGRESS_BYTES:
                    told = written
                    say(f"rank {options.rank} of {options.world}: {written >> 20} of {total >> 20} MiB")
            file.write(index + struct.pack("<Q", total) + rankfile.MAGIC)
            file.flush()
            os.fsync(file.fileno())
    except PermissionError as error:
        raise os_error(error) from error
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise EngineError("WriteFailed") from error
    except EngineError:
        partial.unlink(missing_ok=True)
        raise
    finally:
        reader.close()
    name = f"rank{options.rank}of{options.world}-{hashlib.sha256(index).hexdigest()[:20]}.bin"
    partial.rename(out / name)
    return out / name


def run(args: list[str]) -> int:
    options = parse(args)
    config = modelconfig.read(options.model)
    planned = split.entries(config, options.rank, options.world, options.parity, options.dspark)
    tensors = shards.scan(options.model)
    rows = list(rankfile.layout(planned, tensors))
    index = rankfile.index_text(rows)
    if options.index_only:
        write_stdout(index)
        return 0
    path = write(options, rows, index)
    result = {
        "file": str(path),
        "entries": len(rows),
        "data_bytes": rows[-1].offset + rows[-1].nbytes,
        "index_bytes": len(index),
        "rank": options.rank,
        "world": options.world,
        "parity": options.parity,
        "dspark": options.dspark,
    }
    write_stdout(json.dumps(result).encode() + b"\n")
    return 0


def main() -> int:
    """Run the tool; the exit code."""
    # A process that is the first of its container gets no default action for SIGTERM: ask for one.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    try:
        return run(sys.argv[1:])
    except Usage:
        say(USAGE)
        return 2
    except EngineError as error:
        return report(error)
    except EntryError as error:
        say(str(error))
        return 1
    except Panic as error:
        panic(str(error))
