"""safetensors files as the engine reads them: by their headers alone, without the index file."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from . import strictjson
from .errors import EngineError, Panic, os_error

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
ENGRAM_DTYPE_BYTES = {**DTYPE_BYTES, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


@dataclass(frozen=True)
class Source:
    """Where one tensor lies: file, dtype, shape, absolute offset and bytes."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Panic("a header number is not a whole number")
    return value


def _tensor(path: str, entry: Any, base: int, size: int, widths: dict[str, int]) -> Source:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise Panic("a header entry lacks a field")
    if not isinstance(entry["shape"], list) or not isinstance(entry["data_offsets"], list):
        raise Panic("a header field is no list")
    dtype = entry["dtype"]
    if dtype not in widths:
        raise EngineError("UnsupportedDType")
    shape = tuple(_natural(extent) for extent in entry["shape"])
    if len(shape) > 4:
        raise EngineError("RankTooHigh")
    if len(entry["data_offsets"]) != 2:
        raise Panic("data_offsets has not two numbers")
    begin, end = (_natural(value) for value in entry["data_offsets"])
    nbytes = widths[dtype]
    for extent in shape:
        nbytes *= extent
    if end - begin != nbytes or base + end > size:
        raise EngineError("BadSafetensors")
    return Source(path, dtype, shape, base + begin, nbytes)


def parse(path: str, widths: dict[str, int]) -> dict[str, Source]:
    """All tensors of one file. The file is never named in an error, as in the engine."""
    try:
        with Path(path).open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            start = source.read(8)
            if len(start) < 8:
                raise EngineError("BadSafetensors")
            length = struct.unpack("<Q", start)[0]
            if length > size - 8:
                raise EngineError("BadSafetensors")
            text = source.read(length)
    except OSError as error:
        raise os_error(error) from error
    document = strictjson.loads(text)
    if not isinstance(document, dict):
        raise Panic("a header is no object")
    return {
        name: _tensor(path, entry, 8 + length, size, widths)
        for name, entry in document.items()
        if name != "__metadata__"
    }


def scan(folder: str, widths: dict[str, int] | None = None) -> dict[str, Source]:
    """Every tensor of every `*.safetensors` of a folder; of two with one name the last file wins."""
    try:
        names = [os.fsencode(name) for name in os.listdir(folder)]  # noqa: PTH208 (byte order of names)
    except OSError as error:
        raise os_error(error) from error
    found: dict[str, Source] = {}
    for name in sorted(name for name in names if name.endswith(b".safetensors")):
        found.update(parse(str(Path(folder, os.fsdecode(name))), widths or DTYPE_BYTES))
    return found


class Reader:
    """Reads tensors whole, keeping files open."""

    def __init__(self) -> None:
        self._files: dict[str, BinaryIO] = {}

    def read(self, source: Source) -> bytes:
        if source.path not in self._files:
            self._files[source.path] = Path(source.path).open("rb")  # noqa: SIM115 (kept open)
        data = os.pread(self._files[source.path].fileno(), source.nbytes, source.offset)
        while len(data) < source.nbytes:  # one pread returns at most 2 GiB
            more = os.pread(
                self._files[source.path].fileno(), source.nbytes - len(data), source.offset + len(data)
            )
            if not more:
                raise EngineError("EndOfFile")
            data += more
        return data

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
