# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Our own writer of rank files, for an engine build that lacks the tool.

Which bytes belong into a rank file follows from `split` alone: each part is a range of rows and columns of a
tensor, in load order, then index, length and magic. The file equals the one of the engine's tool byte for
byte (tests compare it with a tool that shares no code). Everything streams: memory holds the headers and one
block, and pages of shards and output are handed back as they are passed, because on a GB10 the page cache is
GPU memory.

Conversions are the tool's: native bytes are copied, F16 is widened to F32 exactly with a signalling NaN made
quiet, anything else is refused before the first byte is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, NamedTuple

from .model_lock import from_directory
from .safetensors import TensorMeta, read_headers
from .split import RANK_FILE_MAGIC, TILE, Part, Range, RankLayout, SplitError, plan_split

#: Most bytes of one read. A row of the widest matrix (1.5 MB) fits many times.
BLOCK_BYTES = 8 << 20
#: Pages are written out and handed back after so many bytes.
FLUSH_EVERY = 256 << 20
#: The engine whose files these are.
ENGINE = "tensorfold_native"
_FLAGS = ("--no-dspark", "--parity")


class Source(NamedTuple):
    """Where a tensor's bytes are: file, offset in it, dtype and shape."""

    file: str
    begin: int
    meta: TensorMeta


class Copy(NamedTuple):
    """One run of equal steps in a source: ``steps`` pieces of ``width`` bytes, ``stride`` bytes apart.

    ``widen`` turns F16 into F32 on the way, so that twice the bytes come out.
    """

    file: str
    begin: int
    width: int
    steps: int
    stride: int
    widen: bool = False

    @property
    def out_bytes(self) -> int:
        """Bytes that come out."""
        return self.width * self.steps * (2 if self.widen else 1)


def quiet_widening() -> array[int]:
    """The 65,536 F32 bit patterns of all F16 bit patterns; a signalling NaN gets its quiet bit."""
    table = array("I", bytes(4 << 16))
    for half in range(1 << 16):
        sign, exponent, fraction = half >> 15 << 31, half >> 10 & 0x1F, half & 0x3FF
        if exponent == 0x1F:
            bits = 0x7F800000 | (fraction << 13 | 0x400000 if fraction else 0)
        elif exponent:
            bits = exponent + 112 << 23 | fraction << 13
        elif fraction:
            shift = 11 - fraction.bit_length()
            bits = 113 - shift << 23 | (fraction << shift & 0x3FF) << 13
        else:
            bits = 0
        table[half] = sign | bits
    return table


def widen(data: bytes, table: array[int]) -> bytes:
    """Little-endian F16 to little-endian F32."""
    halves = array("H")
    halves.frombytes(data)
    if sys.byteorder == "big":
        halves.byteswap()
    found = array("I", map(table.__getitem__, halves))
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def find_sources(model: Path, shards: Sequence[str]) -> dict[str, Source]:
    """Every tensor of a checkpoint folder. ``shards`` in byte order: of a name in several the last wins."""
    found: dict[str, Source] = {}
    for header in read_headers(model, list(shards)):
        for name, meta in header.tensors.items():
            found[name] = Source(header.file, 8 + header.length + meta.begin, meta)
    return found


def plan_rank(
    model: Path, world: int, rank: int, flags: Sequence[str]
) -> tuple[RankLayout, dict[str, Source]]:
    """What one rank's file holds, from the headers of the folder. ``flags`` are those of the engine's tool.

    Raises PlanError for a checkpoint that cannot be cut, and for a flag that is none.
    """
    unknown = sorted(set(flags) - set(_FLAGS))
    if unknown:
        raise SplitError(
            "bad-flag",
            "is no flag of the writer",
            tensor="flags",
            found=unknown[0],
            wanted=" or ".join(_FLAGS),
        )
    lock = from_directory(model)
    split = plan_split(lock, ENGINE, world, drafts="--no-dspark" not in flags, parity="--parity" in flags)
    if not 0 <= rank < world:
        raise SplitError(
            "bad-rank", "is no rank of this world", tensor="rank", found=rank, wanted=f"below {world}"
        )
    return split.ranks[rank], find_sources(model, list(lock.shards))


def _slice(source: Source, cut: Range | None) -> Copy:
    """A part of a vector."""
    low, high = cut if cut is not None else (0, source.meta.shape[0])
    return Copy(source.file, source.begin + 2 * low, 2 * (high - low), 1, 0)


def copies(part: Part, sources: dict[str, Source]) -> Iterator[Copy]:
    """The bytes of one part in their order. Raises SplitError for a conversion that there is not."""
    if part.kind == "exl3":
        trellis = sources[part.name + ".trellis"]
        depth, breadth, last = trellis.meta.shape
        first, end = (part.rows[0] // TILE, part.rows[1] // TILE) if part.rows is not None else (0, depth)
        left, right = (part.cols[0] // TILE, part.cols[1] // TILE) if part.cols is not None else (0, breadth)
        stride = 2 * last * breadth
        begin = trellis.begin + first * stride + 2 * last * left
        if (left, right) == (0, breadth):
            yield Copy(trellis.file, begin, stride * (end - first), 1, 0)
        else:
            yield Copy(trellis.file, begin, 2 * last * (right - left), end - first, stride)
        yield _slice(sources[part.name + ".suh"], part.rows)
        yield _slice(sources[part.name + ".svh"], part.cols)
        return
    source = sources[part.name]
    size = source.meta.end - source.meta.begin
    if part.convert in ("", source.meta.dtype):
        yield Copy(source.file, source.begin, size, 1, 0)
    elif (source.meta.dtype, part.convert) == ("F16", "F32"):
        yield Copy(source.file, source.begin, size, 1, 0, widen=True)
    else:
        raise SplitError(
            "bad-conversion",
            "cannot be converted (the engine says UnsupportedConversion)",
            file=source.file,
            tensor=part.name,
            found=source.meta.dtype,
            wanted=part.convert,
        )


class _Shards:
    """Open shards, read by position; what was read is handed back after ``FLUSH_EVERY`` bytes."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._open = contextlib.ExitStack()
        self._handles: dict[str, int] = {}
        self._passed = 0

    def __enter__(self) -> _Shards:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._drop()
        self._open.close()

    def _drop(self) -> None:
        self._passed = 0
        for handle in self._handles.values():
            with contextlib.suppress(OSError):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, file: str, begin: int, length: int) -> bytes:
        """Exactly ``length`` bytes. Raises OSError naming the file when it ends before."""
        handle = self._handles.get(file)
        if handle is None:
            handle = os.open(self._model / file, os.O_RDONLY)
            self._open.callback(os.close, handle)
            self._handles[file] = handle
        raw = os.pread(handle, length, begin)
        while len(raw) < length:
            more = os.pread(handle, length - len(raw), begin + len(raw))
            if not more:
                raise OSError(0, "ends before its header says; prove the checkpoint again (rehash)", file)
            raw += more
        self._passed += length
        if self._passed >= FLUSH_EVERY:
            self._drop()
        return raw

    def blocks(self, copy: Copy) -> Iterator[bytes]:
        """The bytes of a copy, in blocks."""
        if copy.steps == 1:
            for at in range(0, copy.width, BLOCK_BYTES):
                yield self.read(copy.file, copy.begin + at, min(BLOCK_BYTES, copy.width - at))
            return
        # One read over several rows and then slices: a cut row is a few kB, too little for a read of its own.
        each = max(1, BLOCK_BYTES // copy.stride)
        for first in range(0, copy.steps, each):
            count = min(each, copy.steps - first)
            span = (count - 1) * copy.stride + copy.width
            view = memoryview(self.read(copy.file, copy.begin + first * copy.stride, span))
            yield b"".join(view[at : at + copy.width] for at in range(0, count * copy.stride, copy.stride))


class _Output:
    """A new file that is hashed as it is written, with its pages kept few."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._sha = hashlib.sha256()
        self.written = 0
        self._flushed = 0

    def write(self, data: bytes) -> None:
        """Append."""
        self._sha.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view) :]
        self.written += len(data)
        if self.written - self._flushed >= FLUSH_EVERY:
            os.fdatasync(self._handle)
            self._hand_back()

    def _hand_back(self) -> None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._handle, self._flushed, 0, os.POSIX_FADV_DONTNEED)
        self._flushed = self.written

    def finish(self) -> str:
        """Sync; returns the sha256 of what was written."""
        os.fsync(self._handle)
        self._hand_back()
        return self._sha.hexdigest()

    def close(self) -> None:
        """Close."""
        os.close(self._handle)


def write_rank_file(
    model: Path,
    out: Path,
    layout: RankLayout,
    sources: dict[str, Source],
    on_bytes: Callable[[int], Any] | None = None,
) -> str:
    """Write one rank file into the directory ``out``; returns the sha256 of what was written.

    As the engine's tool does, it is ``.rankRofW.partial`` until it is whole and synced. Raises SplitError for
    a conversion that there is not (before anything is written) and OSError; the partial is removed then.
    """
    plan = [list(copies(part, sources)) for part, _size in layout.parts]
    for (part, size), found in zip(layout.parts, plan):
        count = sum(copy.out_bytes for copy in found)
        if count != size:
            raise SplitError(
                "bad-plan", "has other bytes than planned", tensor=part.name, found=count, wanted=size
            )
    partial = out / f".rank{layout.rank}of{layout.world}.partial"
    table = quiet_widening()
    try:
        output = _Output(partial)
        try:
            with _Shards(model) as shards:
                for copy in (copy for found in plan for copy in found):
                    for block in shards.blocks(copy):
                        output.write(widen(block, table) if copy.widen else block)
                        if on_bytes is not None:
                            on_bytes(len(block))
            length = output.written
            output.write(layout.index_text.encode("ascii"))
            output.write(length.to_bytes(8, "little") + RANK_FILE_MAGIC)
            digest = output.finish()
        finally:
            output.close()
        partial.replace(out / layout.file_name)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return digest
