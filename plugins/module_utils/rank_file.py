# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The frame of a rank file: its name, its end, its index. The weights themselves are the engine's business.

Format: data, index (a JSON list of ``[key, dtype, shape, offset, bytes]``), u64 little-endian length of the
data, magic. The name is ``rank{R}of{W}-{first 20 hex of sha256(index)}.bin``. The name covers the layout
only, so weights of another checkpoint with the same shapes have the same name: a directory per variant keeps
them apart, and the proof beside the directory names the model that the file was cut from.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tree import TreeError

MAGIC = b"TFDSRK01"
#: Bytes after the index: data length and magic.
TAIL = 16
#: The engine's index is 13.5 MB; anything beyond this is no index.
INDEX_LIMIT = 256 << 20
_NAME = re.compile(r"rank(?P<rank>\d+)of(?P<world>\d+)-(?P<hash>[0-9a-f]{20})\.bin\Z")


@dataclass(frozen=True)
class RankName:
    """A rank file's name, taken apart."""

    name: str
    rank: int
    world: int
    index: str


def parse_name(name: str) -> RankName:
    """Refuses what is not ``rankRofW-HASH.bin``."""
    match = _NAME.match(name)
    if match is None:
        raise TreeError(f"{name!r} is not the name of a rank file (rankRofW-<20 hex>.bin)")
    return RankName(name, int(match["rank"]), int(match["world"]), match["hash"])


def index_name(index: bytes, rank: int, world: int) -> str:
    """The file name that belongs to an index, byte for byte as the engine's tool prints it."""
    return f"rank{rank}of{world}-{hashlib.sha256(index).hexdigest()[:20]}.bin"


def check_frame(path: Path, rows: bool = True) -> int:
    """Check end, index and name of a rank file; returns the data bytes. Raises ``TreeError``.

    Reads the index alone (13.5 MB of a 106 GB file). The engine's own opener does not compare the name with
    the index; this does. ``rows=False`` leaves out the walk over the rows.
    """
    wanted = parse_name(path.name)
    size = path.stat().st_size
    with path.open("rb") as source:
        if size < TAIL + 2:
            raise TreeError(f"{path}: {size} bytes cannot be a rank file; remove it and make it again")
        source.seek(size - TAIL)
        length, magic = struct.unpack("<Q8s", source.read(TAIL))
        index_bytes = size - TAIL - length
        if magic != MAGIC or not 2 <= index_bytes <= INDEX_LIMIT:
            raise TreeError(
                f"{path}: the end of the file is not that of a rank file (BadRankCache): it was cut short or "
                "is "
                "something else; remove it and make it again"
            )
        source.seek(length)
        index = source.read(index_bytes)
    found = index_name(index, wanted.rank, wanted.world)
    if found != wanted.name:
        raise TreeError(f"{path}: its index belongs to {found}; remove it and make it again")
    if rows:
        check_rows(json.loads(index.decode("ascii")), length, path)
    return int(length)


def check_rows(rows: Sequence[Any], length: int, path: Path) -> None:
    """Rows follow each other without gap from 0 to ``length`` (the engine refuses others: BadRankCache)."""
    at = 0
    for row in rows:
        key, _dtype, _shape, offset, size = row
        if offset != at or size < 0:
            raise TreeError(f"{path}: {key} begins at {offset} instead of {at}; remove it and make it again")
        at += size
    if at != length:
        raise TreeError(f"{path}: the index ends at {at}, the data at {length}; remove it and make it again")


_ERROR = re.compile(r"^(?:error: )?(?P<name>[A-Z][A-Za-z0-9]+)$")
#: What the tool's error names mean to an operator (measured on the tool itself).
MEANING: Mapping[str, str] = {
    "FileNotFound": "the model directory or its config.json is absent",
    "BadSafetensors": "a shard is cut short or is no safetensors file; prove the checkpoint again (rehash)",
    "MissingTensor": "a tensor is absent: a shard is missing, or the names carry a 'model.' prefix",
    "UnsupportedDType": "a tensor has a type that the tool does not take; Engram shards do not belong there",
    "UnsupportedConversion": "a tensor would have to be converted in a way that the tool cannot",
    "UnsupportedQuantization": "the checkpoint is not EXL3 with the mul1 codebook",
    "NotDeepSeekV41": "config.json is of another model",
    "UnsupportedShapes": "config.json has shapes that this engine build does not take",
    "BadConfig": "config.json is not usable",
    "SeveralRankCaches": "the output directory holds two files of this rank",
    "WriteFailed": "the disk is full or the output cannot be written",
    "AccessDenied": "a file cannot be read or the output not be written",
}


def explain(stderr: str, code: int) -> str:
    """The tool's failure in words: the last line that is only an error name, with what it means."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if code == 2:
        return "the tool refused its arguments: " + (lines[0] if lines else "usage")
    if code == 134:
        return "the tool panicked on malformed input: " + (lines[0] if lines else "no text")
    for line in reversed(lines):
        match = _ERROR.match(line)
        if match and line.startswith("error: "):
            before = [other for other in lines if other != line][-1:]
            name = match["name"]
            return f"{name}: {MEANING.get(name, 'see the engine')}" + (f" ({before[0]})" if before else "")
        tail = line.rpartition(": ")[2]
        if tail in MEANING:
            return f"{line}: {MEANING[tail]}"
    return lines[-1] if lines else f"exit code {code} without a word"
