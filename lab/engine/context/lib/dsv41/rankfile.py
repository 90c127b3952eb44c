"""The rank file: data, then the index as JSON, then u64 length of the data and the magic `TFDSRK01`."""

from __future__ import annotations

import json
import os
import re
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import strictjson
from .errors import EngineError, EntryError, Panic, os_error
from .shards import Reader, Source
from .split import TILE, Entry, Plain, Range

MAGIC = b"TFDSRK01"
# The dtypes that a rank file knows, by the safetensors name: (name in the index, name in refusals, bytes).
KNOWN = {
    "BF16": ("bfloat16", "bf16", 2),
    "F16": ("float16", "f16", 2),
    "F32": ("float32", "f32", 4),
    "I16": ("int16", "i16", 2),
    "I32": ("int32", "i32", 4),
    "I64": ("int64", "i64", 8),
    "U8": ("uint8", "u8", 1),
}
SHORT = {name: known[1] for name, known in KNOWN.items()} | {
    "I8": "i8",
    "BOOL": "bool",
    "U16": "u16",
    "U32": "u32",
    "U64": "u64",
    "F64": "f64",
}
BYTES = {known[0]: known[2] for known in KNOWN.values()}


@dataclass(frozen=True)
class Row:
    """One row of the index, with what is needed to write it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source: Source
    dim0: Range | None
    dim1: Range | None

    def public(self) -> list[object]:
        return [self.key, self.dtype, list(self.shape), self.offset, self.nbytes]


def _layout(key: str, source: Source | None, want: str | None) -> Source:
    if source is None:
        raise EntryError(f"{key}: MissingTensor")
    if source.dtype not in KNOWN:
        raise EntryError(f"{key}: UnsupportedDType")
    if want is not None and source.dtype != want:
        raise _not_the_split(key, source)
    return source


def _not_the_split(key: str, source: Source) -> EntryError:
    extents = ", ".join(str(extent) for extent in source.shape)
    return EntryError(f"{key}: the checkpoint's {SHORT[source.dtype]} {{ {extents} }} is not the split's")


def layout(planned: Iterable[Entry], tensors: dict[str, Source]) -> Iterator[Row]:
    """Rows in order; raises EntryError at the first entry that the checkpoint does not carry."""
    offset = 0
    for entry in planned:
        rows: list[tuple[str, str, tuple[int, ...], Source, Range | None, Range | None]] = []
        if isinstance(entry, Plain):
            source = _layout(entry.key, tensors.get(entry.name), None)
            dtype = entry.convert.removeprefix("torch.") if entry.convert else KNOWN[source.dtype][0]
            rows.append((entry.key, dtype, source.shape, source, None, None))
        else:
            key = entry.key("tr")
            source = _layout(key, tensors.get(f"{entry.name}.trellis"), "I16")
            shape = list(source.shape)
            if len(shape) != 3:
                raise _not_the_split(key, source)
            known = (None if entry.rows else entry.k, None if entry.cols else entry.n)
            for axis, extent in enumerate(known):
                if extent is not None and shape[axis] != extent // TILE:
                    raise _not_the_split(key, source)
            tiles = [
                None if span is None else (span[0] // TILE, span[1] // TILE)
                for span in (entry.rows, entry.cols)
            ]
            for axis, span in enumerate(tiles):
                if span is not None:
                    shape[axis] = span[1] - span[0]
            rows.append((key, "int16", tuple(shape), source, tiles[0], tiles[1]))
            for name, cut in (("suh", entry.rows), ("svh", entry.cols)):
                key = entry.key(name)
                source = _layout(key, tensors.get(f"{entry.name}.{name}"), "F16")
                shape = list(source.shape)
                if cut is not None:
                    if len(shape) != 1:
                        raise _not_the_split(key, source)
                    shape[0] = cut[1] - cut[0]
                rows.append((key, "float16", tuple(shape), source, cut, None))
        for key, dtype, extents, source, dim0, dim1 in rows:
            nbytes = BYTES[dtype]
            for extent in extents:
                nbytes *= extent
            yield Row(key, dtype, extents, offset, nbytes, source, dim0, dim1)
            offset += nbytes


def index_text(rows: Iterable[Row]) -> bytes:
    """The index: its sha256 names the file."""
    return json.dumps([row.public() for row in rows]).encode()


@lru_cache(maxsize=1)
def _widened() -> array[int]:
    """float32 bits of every float16: exact, and a signalling NaN becomes quiet."""
    table = array("I", bytes(4 * 65536))
    for bits in range(65536):
        sign, exponent, mantissa = bits >> 15 << 31, bits >> 10 & 0x1F, bits & 0x3FF
        if exponent == 0x1F:
            value = 0x7F800000 | mantissa << 13 | (0x400000 if mantissa else 0)
        elif exponent:
            value = (exponent + 112) << 23 | mantissa << 13
        elif mantissa:
            shift = 11 - mantissa.bit_length()
            value = (113 - shift) << 23 | (mantissa << shift & 0x3FF) << 13
        else:
            value = 0
        table[bits] = sign | value
    return table


def _cut(data: bytes, row: Row) -> bytes:
    shape = row.source.shape
    spans = [span or (0, extent) for span, extent in zip((row.dim0, row.dim1), shape, strict=False)]
    if any(span[1] > extent for span, extent in zip(spans, shape, strict=False)):
        raise Panic("index out of bounds")
    if row.dim0 is None and row.dim1 is None:
        return data
    inner = BYTES[row.dtype]
    for extent in shape[2:]:
        inner *= extent
    if len(shape) == 1:
        return data[spans[0][0] * inner : spans[0][1] * inner]
    stride = shape[1] * inner
    low, high = spans[1][0] * inner, spans[1][1] * inner
    return b"".join(data[line * stride + low : line * stride + high] for line in range(*spans[0]))


def contents(row: Row, reader: Reader) -> bytes:
    """The bytes of one row: read whole, then cut, then converted."""
    data = _cut(reader.read(row.source), row)
    if row.dtype == KNOWN[row.source.dtype][0]:
        return data
    if row.source.dtype == "F16" and row.dtype == "float32":
        table = _widened()
        return array("I", (table[bits] for bits in array("H", data))).tobytes()
    raise EngineError("UnsupportedConversion")


def find(folder: str, rank: int, world: int) -> str:
    """The name of the one rank file in a folder: regular files only, so a symbolic link is not found."""
    pattern = re.compile(rf"rank{rank}of{world}-.*\.bin", re.DOTALL)
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.is_file(follow_symlinks=False) and pattern.fullmatch(entry.name)
            ]
    except OSError as error:
        raise os_error(error) from error
    if len(names) > 1:
        raise EngineError("SeveralRankCaches")
    if not names:
        raise EngineError("NoRankCache")
    return names[0]


@dataclass(frozen=True)
class Stored:
    """One row of a written file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def open_index(path: Path) -> tuple[list[Stored], int]:
    """(rows, offset of the index); BadRankCache for a wrong end, gaps, overlaps. The name is not compared."""
    size = path.stat().st_size
    if size < 16:
        raise EngineError("BadRankCache")
    with path.open("rb") as source:
        source.seek(size - 16)
        end = source.read(16)
        index_at = struct.unpack("<Q", end[:8])[0]
        if end[8:] != MAGIC or index_at > size - 16:
            raise EngineError("BadRankCache")
        source.seek(index_at)
        text = source.read(size - 16 - index_at)
    try:
        document = strictjson.loads(text)
        rows = [
            Stored(str(key), str(dtype), tuple(shape), int(offset), int(nbytes))
            for key, dtype, shape, offset, nbytes in document
        ]
    except (EngineError, TypeError, ValueError) as error:
        raise EngineError("BadRankCache") from error
    offset = 0
    for row in rows:
        if row.offset != offset:
            raise EngineError("BadRankCache")
        offset += row.nbytes
    if offset != index_at:
        raise EngineError("BadRankCache")
    return rows, index_at
