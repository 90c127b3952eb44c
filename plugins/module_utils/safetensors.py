# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Headers of safetensors files, read without the weights.

A file is: 8 bytes little-endian header length N, N bytes of JSON, then the data buffer. ``data_offsets`` are
relative to the buffer. The reference validator (safetensors/src/tensor.rs) wants tensors contiguous from 0,
sizes that equal shape times dtype, and a last end that equals the file size; this reader refuses the same
and names file and tensor, which neither the reference library nor the engine's own tool does.

Nothing here maps or casts: real EXL3 shards are not padded, so tensors start at odd file offsets.
"""

from __future__ import annotations

import gc
import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

#: The limit of the reference library (MAX_HEADER_SIZE).
HEADER_LIMIT = 100_000_000
#: A shape product beyond this cannot be a file; the reference library refuses it as ValidationOverflow.
_MAX_ELEMENTS = 2**63

#: Bits of one element. F4, F6 and F8_E8M0 are those of safetensors 0.6 and later; the Engram tables need
#: F8_E8M0.
DTYPE_BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_LFS_MAGIC = b"version https://git-lfs"
_SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")


class PlanError(ValueError):
    """Bad input of the plan: what is wrong, where, what was found and what was wanted.

    ``fault`` is a short stable name ("truncated", "overlap", ...). ``str()`` is one line.
    """

    def __init__(
        self,
        fault: str,
        message: str,
        *,
        file: str = "",
        tensor: str = "",
        found: object = None,
        wanted: object = None,
        remedy: str = "",
    ) -> None:
        self.fault = fault
        self.message = message
        self.file = file
        self.tensor = tensor
        self.found = "" if found is None else str(found)
        self.wanted = "" if wanted is None else str(wanted)
        self.remedy = remedy
        where = ": ".join(part for part in (file, tensor) if part)
        text = f"{where}: {message}" if where else message
        if found is not None:
            text += f"; found {self.found}"
        if wanted is not None:
            text += f"; wanted {self.wanted}"
        if remedy:
            text += f"; remedy: {remedy}"
        super().__init__(" ".join(text.split()))

    def as_dict(self) -> dict[str, str]:
        """The fields, for a module's fail_json or a table of refusals."""
        return {
            "fault": self.fault,
            "message": self.message,
            "file": self.file,
            "tensor": self.tensor,
            "found": self.found,
            "wanted": self.wanted,
            "remedy": self.remedy,
        }


class HeaderError(PlanError):
    """A safetensors file, or its index, that cannot be trusted."""


class TensorMeta(NamedTuple):
    """One tensor of a header: dtype name, shape, and its bytes [begin, end) in the data buffer."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """One parsed header. ``length`` is N (without the 8 bytes before it), ``size`` the whole file in
    bytes."""

    file: str
    length: int
    size: int
    tensors: dict[str, TensorMeta]
    metadata: dict[str, str]

    @property
    def data_bytes(self) -> int:
        """Bytes of the data buffer."""
        return self.size - 8 - self.length


class _DuplicateKey(Exception):
    """Carries the key that a JSON object holds twice."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a key that comes twice (json alone keeps the last without a word)."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        for key, _value in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')


def _has_each_key_once(raw: bytes, document: Any) -> bool:
    """Whether an object of plain objects was surely parsed without losing a key that came twice.

    Where no white space stands between key and colon, every key is followed by ``":``, and text inside strings
    can only make the count larger; so an equal count proves that no key was lost.
    """
    if type(document) is not dict or _SPACED_COLON.search(raw):
        return False
    keys = len(document)
    for value in document.values():
        if type(value) is dict:
            keys += len(value)
    return raw.count(b'":') == keys


def loads_strict(raw: bytes, file: str, what: str) -> Any:
    """Parse JSON bytes; refuse bad UTF-8, duplicate keys, NaN, and nesting that exhausts the parser."""
    try:
        text = raw.decode("utf-8")
        # A call for each of 200,000 objects costs more than the parsing; so only where it may matter.
        document = json.loads(text, parse_constant=_no_constant)
        if _has_each_key_once(raw, document):
            return document
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except _DuplicateKey as error:
        raise HeaderError(
            "duplicate-key",
            f"{what} holds the key {str(error)!r} twice",
            file=file,
            remedy="fetch the file again",
        ) from None
    except UnicodeDecodeError as error:
        raise HeaderError("not-utf8", f"{what} is not UTF-8 at byte {error.start}", file=file) from None
    except (ValueError, RecursionError) as error:
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise HeaderError(
            "not-json", f"{what} is not JSON: {detail}", file=file, wanted="a JSON object"
        ) from None


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a known dtype. Raises ValueError where sub-byte values end inside a byte."""
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    if bits % 8:
        raise ValueError("not a whole number of bytes")
    return bits // 8


def header_length(raw: bytes, file: str, size: int | None = None) -> int:
    """N from the first 8 bytes. ``raw`` may be longer. Refuses LFS pointers and lengths that cannot be."""
    if raw[: len(_LFS_MAGIC)] == _LFS_MAGIC:
        raise HeaderError(
            "lfs-pointer",
            "is a Git LFS pointer, not the weights",
            file=file,
            found=f"{len(raw) if size is None else size} bytes of text",
            wanted="a safetensors file",
            remedy="fetch it with `hf download` or `git lfs pull`",
        )
    if len(raw) < 8:
        raise HeaderError(
            "truncated",
            "is too short for a header length",
            file=file,
            found=f"{len(raw)} bytes",
            wanted="8 or more",
        )
    length: int = struct.unpack("<Q", raw[:8])[0]
    if length > HEADER_LIMIT:
        raise HeaderError(
            "header-length",
            "has an absurd header length",
            file=file,
            found=length,
            wanted=f"at most {HEADER_LIMIT}",
        )
    if size is not None and length + 8 > size:
        raise HeaderError(
            "truncated",
            "ends inside its header",
            file=file,
            found=f"{size} bytes",
            wanted=f"{length + 8} or more",
            remedy="the download is not complete: fetch the file again",
        )
    if length < 2:
        raise HeaderError(
            "header-length", "has no room for a header", file=file, found=length, wanted="2 or more"
        )
    return length


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _one_tensor(file: str, name: str, entry: object) -> TensorMeta:
    """One entry, or the error that names what is wrong with it."""
    # The quick way for good entries: a checkpoint has hundreds of thousands. Whatever is odd falls through.
    if type(entry) is dict:
        dtype, dims, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if type(dtype) is str and type(dims) is list and type(offsets) is list and len(offsets) == 2:
            begin, end = offsets
            size = DTYPE_BITS.get(dtype, 0)
            good = size > 0 and type(begin) is int and type(end) is int and begin >= 0
            for dim in dims:
                if type(dim) is not int or not 0 <= dim < _MAX_ELEMENTS:
                    good = False
                    break
                size *= dim
            if good and (end - begin) * 8 == size < _MAX_ELEMENTS:
                return TensorMeta(dtype, tuple(dims), begin, end)
    return _odd_tensor(file, name, entry)


def _odd_tensor(file: str, name: str, entry: object) -> TensorMeta:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise HeaderError(
            "bad-entry",
            "is no tensor entry",
            file=file,
            tensor=name,
            found=repr(entry)[:80],
            wanted="dtype, shape and data_offsets",
        )
    dtype, dims, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(
            "unknown-dtype",
            "has an unknown dtype",
            file=file,
            tensor=name,
            found=repr(dtype)[:40],
            wanted=" ".join(DTYPE_BITS),
        )
    if not isinstance(dims, list) or not all(_is_count(dim) for dim in dims):
        raise HeaderError(
            "bad-shape",
            "has a bad shape",
            file=file,
            tensor=name,
            found=repr(dims)[:80],
            wanted="a list of whole numbers",
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(value) for value in offsets):
        raise HeaderError(
            "bad-offsets",
            "has bad data_offsets",
            file=file,
            tensor=name,
            found=repr(offsets)[:80],
            wanted="two whole numbers",
        )
    begin, end = offsets
    shape = tuple(dims)
    elements = 1
    for dim in shape:
        elements *= dim
        if elements >= _MAX_ELEMENTS:
            raise HeaderError("bad-shape", "has a shape beyond any file", file=file, tensor=name, found=dims)
    try:
        wanted = tensor_bytes(dtype, shape)
    except ValueError as error:
        raise HeaderError(
            "bad-shape", f"{dtype} of this shape is {error}", file=file, tensor=name, found=dims
        ) from None
    if end - begin != wanted:
        raise HeaderError(
            "size-mismatch",
            f"its bytes do not match {dtype} {list(shape)}",
            file=file,
            tensor=name,
            found=f"{end - begin} bytes",
            wanted=f"{wanted} bytes",
        )
    return TensorMeta(dtype, shape, begin, end)


def parse_header(raw: bytes, file: str, size: int) -> Header:
    """Parse the first bytes of a file (at least 8 + N of them) of ``size`` bytes.

    Raises HeaderError, and nothing else, for whatever bytes it is given.
    """
    length = header_length(raw, file, size)
    if len(raw) < 8 + length:
        raise HeaderError(
            "truncated",
            "ends inside its header",
            file=file,
            found=f"{len(raw)} bytes",
            wanted=f"{length + 8} or more",
        )
    body = raw[8 : 8 + length]
    if body[:1] != b"{":
        raise HeaderError("not-json", "the header does not begin with {", file=file, found=repr(body[:8]))
    document = loads_strict(body, file, "the header")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("bad-metadata", "__metadata__ is not a map of strings", file=file)
    tensors: dict[str, TensorMeta] = {}
    position, in_order = 0, True
    for name, entry in document.items():
        if not name.isprintable() or not name:
            raise HeaderError(
                "bad-name", f"holds a tensor with an unusable name {ascii(name)[:80]}", file=file
            )
        tensors[name] = meta = _one_tensor(file, name, entry)
        in_order = in_order and meta.begin == position
        position = meta.end
    # A header is usually written in the order of the data.
    position = position if in_order else 0
    for name, meta in (
        [] if in_order else sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    ):
        if meta.begin != position:
            fault = "overlap" if meta.begin < position else "gap"
            raise HeaderError(
                fault,
                f"there is {'an' if fault == 'overlap' else 'a'} {fault} before it",
                file=file,
                tensor=name,
                found=f"begin {meta.begin}",
                wanted=f"begin {position}",
            )
        position = meta.end
    if 8 + length + position != size:
        short = size < 8 + length + position
        raise HeaderError(
            "truncated" if short else "trailing-bytes",
            "is shorter than its header says" if short else "holds bytes after its last tensor",
            file=file,
            found=f"{size} bytes",
            wanted=f"{8 + length + position} bytes",
            remedy="fetch the file again",
        )
    return Header(file, length, size, tensors, metadata)


def read_header(path: os.PathLike[str] | str, name: str | None = None) -> Header:
    """Read one file's header. ``name`` is what errors call it (default: the file's own name)."""
    where = Path(path)
    label = name if name is not None else where.name
    try:
        with where.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(64)
            length = header_length(start, label, size)
            raw = start + stream.read(max(0, 8 + length - len(start)))
    except IsADirectoryError:
        raise HeaderError(
            "not-a-file", "is a folder", file=label, wanted="a safetensors file", remedy="rename the folder"
        ) from None
    except FileNotFoundError:
        dangling = where.is_symlink()
        raise HeaderError(
            "dangling-link" if dangling else "missing-file",
            "is a link to a file that is gone" if dangling else "is missing",
            file=label,
            found=os.readlink(where) if dangling else "nothing",  # noqa: PTH115
            remedy="fetch the file again",
        ) from None
    except OSError as error:
        raise HeaderError("unreadable", f"cannot be read: {error.strerror}", file=label) from None
    return parse_header(raw, label, size)


def missing_shards(names: list[str]) -> list[str]:
    """Names that a numbered series (``x-00001-of-00039.safetensors``) lacks."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in names:
        match = _SHARD_NAME.match(name)
        if match:
            series.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    return [
        f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        for (stem, count), have in sorted(series.items())
        for number in range(1, count + 1)
        if number not in have
    ]


def check_file_name(name: object, file: str) -> str:
    """A file name out of an index or a listing: refuse anything that leaves the folder."""
    if (
        not isinstance(name, str)
        or not name
        or name.startswith(("/", "\\"))
        or any(part in ("..", "", ".") for part in name.replace("\\", "/").split("/"))
        or not name.isprintable()
    ):
        raise HeaderError(
            "path-traversal",
            "names a file outside the checkpoint",
            file=file,
            found=repr(name)[:80],
            wanted="a plain file name",
        )
    return name


def _distinct(values: Iterable[object]) -> Iterable[object]:
    """Every value once, where they can be compared so; file names of an index are few, its tensors many."""
    found = list(values)
    try:
        return set(found)
    except TypeError:
        return found


def check_index(raw: bytes, headers: list[Header], file: str = "model.safetensors.index.json") -> list[str]:
    """Set the sharded index against the headers.

    Refuses what makes the checkpoint unusable (a file or a tensor that is not there). Returns warnings for
    what an overlay breaks legitimately (a wrong total_size, tensors that only the headers know).
    """
    document = loads_strict(raw, file, "the index")
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise HeaderError("bad-index", "has no weight_map", file=file)
    by_file = {header.file: header for header in headers}
    for name in sorted({check_file_name(value, file) for value in _distinct(weight_map.values())}):
        if name not in by_file:
            raise HeaderError(
                "missing-file",
                f"names {name}, which is not there",
                file=file,
                found="nothing",
                wanted=name,
                remedy="fetch the file again",
            )
    for tensor, name in weight_map.items():
        if tensor not in by_file[name].tensors:
            raise HeaderError(
                "missing-tensor",
                f"the index puts it into {name}, whose header lacks it",
                file=name,
                tensor=tensor,
            )
    warnings = []
    unknown = sum(1 for header in headers for tensor in header.tensors if tensor not in weight_map)
    if unknown:
        warnings.append(f"{file}: {unknown} tensors of the headers are not in the index")
    total = (
        (document.get("metadata") or {}).get("total_size")
        if isinstance(document.get("metadata"), dict)
        else None
    )
    data = sum(header.data_bytes for header in headers)
    if total is not None and total != data:
        warnings.append(f"{file}: total_size is {total}, the headers hold {data} bytes")
    return warnings


def read_headers(root: Path, names: list[str]) -> list[Header]:
    """Headers of the named files of a folder. Raises HeaderError."""
    # Hundreds of thousands of small objects and no cycles: the collector would only walk them again and
    # again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return [read_header(root / name, name) for name in names]
    finally:
        if collecting:
            gc.enable()


def read_directory(directory: os.PathLike[str] | str) -> tuple[list[Header], list[str]]:
    """All headers of a checkpoint folder in byte order of the file names, and warnings.

    The selection is the engine's own: every entry whose name ends in ``.safetensors``, hidden ones included,
    links followed, subfolders not searched. Raises HeaderError.
    """
    root = Path(directory)
    try:
        entries = sorted((entry.name for entry in root.iterdir()), key=os.fsencode)
    except OSError as error:
        raise HeaderError("missing-folder", f"cannot be listed: {error.strerror}", file=str(root)) from None
    names = [name for name in entries if name.endswith(".safetensors")]
    if not names:
        raise HeaderError(
            "no-shards", "holds no .safetensors file", file=str(root), remedy="name a checkpoint folder"
        )
    lacking = missing_shards(names)
    if lacking:
        raise HeaderError(
            "missing-file",
            f"{len(lacking)} shards are missing",
            file=lacking[0],
            found="nothing",
            wanted=", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else ""),
            remedy="finish the download",
        )
    headers = read_headers(root, names)
    warnings = [f"{name}: an unfinished download" for name in entries if name.endswith(".incomplete")]
    index = root / "model.safetensors.index.json"
    if index.is_file():
        warnings += check_index(index.read_bytes(), headers)
    elif index.is_symlink():
        raise HeaderError("dangling-link", "is a link to a file that is gone", file=index.name)
    return headers, warnings
