"""Writing safetensors files: with deterministic contents, or as sparse files that hold a header only."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterable
from pathlib import Path

from lab.checkpoint.inventory import MUL1_MARKER, Tensor


def _table(choices: Iterable[int]) -> bytes:
    values = list(choices)
    return bytes(values[index % len(values)] for index in range(256))


# The high byte decides sign and exponent; these keep every value finite and of a size that weights have.
_HIGH_BYTE = {
    "F16": _table((0x2C, 0x2E, 0x30, 0x33, 0xAC, 0xAE, 0xB0, 0xB3)),
    "BF16": _table((0x3C, 0x3D, 0xBC, 0xBD)),
    "F32": _table((0x3C, 0x3D, 0xBC, 0xBD)),
}
_WIDTH = {"F16": 2, "BF16": 2, "F32": 4}
# E4M3 has two NaN codes (0x7f, 0xff); E8M0 is an exponent, kept near one.
_F8 = _table(code for code in range(256) if code & 0x7F != 0x7F)
_E8M0 = _table(range(118, 132))


def content(tensor: Tensor, seed: str) -> bytes:
    """The bytes of one tensor: the same for the same seed and name, whatever else is in the checkpoint."""
    if tensor.name.endswith(".mul1"):
        return struct.pack("<i", MUL1_MARKER)
    raw = bytearray(random.Random(f"{seed}:{tensor.name}").randbytes(tensor.nbytes))
    if tensor.dtype in _HIGH_BYTE:
        width = _WIDTH[tensor.dtype]
        raw[width - 1 :: width] = raw[width - 1 :: width].translate(_HIGH_BYTE[tensor.dtype])
    elif tensor.dtype == "F8_E4M3":
        raw = raw.translate(_F8)
    elif tensor.dtype == "F8_E8M0":
        raw = raw.translate(_E8M0)
    return bytes(raw)


def header(tensors: Iterable[Tensor]) -> tuple[bytes, int]:
    """(u64 length and JSON, without padding; bytes of the data behind it)."""
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        if tensor.name in entries:
            raise ValueError(f"{tensor.name} twice in one file")
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text, end


def write(path: Path, tensors: list[Tensor], seed: str) -> int:
    """Write one shard with contents; the size in bytes."""
    head, data = header(tensors)
    with path.open("wb") as out:
        out.write(head)
        for tensor in tensors:
            out.write(content(tensor, seed))
    return len(head) + data


def write_sparse(path: Path, tensors: list[Tensor]) -> int:
    """Write header and length only: the file has its full size and holds no data blocks."""
    head, data = header(tensors)
    with path.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + data)
    return len(head) + data
