# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The model lock: the identity of a checkpoint as data, made from headers alone.

A lock holds the files (size, sha256 where the source gives it), ``config.json`` and the tensor inventory
(name, dtype, shape, shard). It comes from a local folder, from any Hub-compatible server by HTTP ranges
(about 20 MB for a checkpoint of 210 GB), or from ``models/``. After a download the real headers must equal
it (`verify_directory`).

On disk a lock is JSON with one line a tensor family: the four tensors of an EXL3 matrix are one line, and
numbers in names are folded into ranges, so that 192,452 tensors are about 2,000 lines that a diff shows well.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .safetensors import (
    DTYPE_BITS,
    Header,
    HeaderError,
    PlanError,
    check_file_name,
    header_length,
    loads_strict,
    missing_shards,
    parse_header,
    read_directory,
    read_header,
)

FORMAT = "sparkfleet-model-lock/1"
#: First range of a shard over HTTP. A layer shard of the 2.9 bpw pack has a header of 490 to 496 kB.
FIRST_RANGE = 512 * 1024
#: config.json beyond this is refused by the engine (4 MiB).
CONFIG_LIMIT = 4 * 1024 * 1024

_NUMBER = re.compile(r"(?:(?<=\.)|^)(?:0|[1-9]\d{0,8})(?=\.|$)")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_MARKERS = ("mul1", "mcg")


class LockError(PlanError):
    """A lock that cannot be made, read or trusted."""


class LockTensor(NamedTuple):
    """One tensor as the engine would find it: dtype name, shape, and the shard it is read from."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class LockFile(NamedTuple):
    """One file of the checkpoint: size in bytes, sha256 and git blob id where the source gives them."""

    name: str
    size: int
    sha256: str = ""
    git_oid: str = ""


#: dtype and shape of the tensors of one shard
Inventory = dict[str, "tuple[str, tuple[int, ...]]"]


@dataclass
class ModelLock:
    """Identity of one checkpoint. ``shards`` keeps byte order of the file names (the engine's precedence)."""

    source: dict[str, str]
    config: dict[str, Any]
    config_sha256: str
    files: list[LockFile]
    shards: dict[str, Inventory]
    header_bytes: dict[str, int]
    warnings: list[str] = field(default_factory=list)
    _tensors: dict[str, LockTensor] | None = None
    _digest: str = ""
    _document: dict[str, dict[str, Any]] | None = None

    @property
    def tensors(self) -> dict[str, LockTensor]:
        """Every tensor once; of a name in several files the last file in byte order wins, as in the
        engine."""
        if self._tensors is None:
            found: dict[str, LockTensor] = {}
            for name in self.shards:
                for tensor, (dtype, shape) in self.shards[name].items():
                    found[tensor] = LockTensor(dtype, shape, name)
            self._tensors = found
        return self._tensors

    @property
    def shadowed(self) -> list[tuple[str, str]]:
        """(tensor, file) pairs that lose against a later file: what an overlay replaced."""
        final = self.tensors
        return [
            (tensor, name)
            for name in self.shards
            for tensor in self.shards[name]
            if final[tensor].file != name
        ]

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of every file."""
        return {item.name: item.size for item in self.files}

    @property
    def file_bytes(self) -> int:
        """Bytes of the shards, headers included."""
        sizes = self.sizes
        return sum(sizes[name] for name in self.shards)

    @property
    def data_bytes(self) -> int:
        """Bytes of the shards without headers."""
        return self.file_bytes - sum(8 + length for length in self.header_bytes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of every file of the checkpoint, small files included."""
        return sum(item.size for item in self.files)

    @property
    def matrices(self) -> int:
        """Number of EXL3 matrices."""
        return sum(1 for name in self.tensors if name.endswith(".trellis"))

    @property
    def digest(self) -> str:
        """sha256 of config and layout (shards, sizes, tensors). Equal for the same files from any source."""
        if not self._digest:
            sizes = self.sizes
            found = hashlib.sha256(self.config_sha256.encode())
            for name, inventory in self.shards.items():
                body = [name, sizes[name], self.header_bytes[name], inventory]
                found.update(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
            self._digest = found.hexdigest()
        return self._digest

    @property
    def content_digest(self) -> str:
        """sha256 over digest and the sha256 of every shard; empty while one of them is unknown.

        The layout digest alone does not tell an abliterated overlay from its base.
        """
        hashes = [item.sha256 for item in self.files if item.name in self.shards]
        if not hashes or not all(hashes):
            return ""
        return hashlib.sha256("\n".join([self.digest, *hashes]).encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """What a module returns: digests, files and totals, no tensors."""
        return {
            "digest": self.digest,
            "content_digest": self.content_digest,
            "source": dict(self.source),
            "config_sha256": self.config_sha256,
            "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in self.files],
            "shards": len(self.shards),
            "tensors": len(self.tensors),
            "total_bytes": self.total_bytes,
        }


# --- text form


def _runs(numbers: Iterable[int]) -> str:
    """{3,5-9} of a set of numbers."""
    parts: list[str] = []
    ordered = sorted(numbers)
    start = previous = ordered[0]
    for number in [*ordered[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return "{" + ",".join(parts) + "}"


def _fold(pattern: str, rows: set[tuple[int, ...]]) -> Iterator[str]:
    """Patterns with ranges that expand to exactly these rows."""
    if not rows or not next(iter(rows)):
        yield pattern
        return
    columns = [set(column) for column in zip(*rows)]
    total = 1
    for column in columns:
        total *= len(column)
    if total == len(rows):
        pieces = iter(_runs(column) for column in columns)
        yield re.sub(r"\{\}", lambda _match: next(pieces), pattern)
        return
    axis = next(i for i, column in enumerate(columns) if len(column) > 1)
    for value in sorted(columns[axis]):
        kept = {row[:axis] + row[axis + 1 :] for row in rows if row[axis] == value}
        head, tail = _split_at(pattern, axis)
        yield from _fold(head + f"\0{value}\0" + tail, kept)


def _split_at(pattern: str, axis: int) -> tuple[str, str]:
    position = -1
    for _index in range(axis + 1):
        position = pattern.index("{}", position + 1)
    return pattern[:position], pattern[position + 2 :]


_RANGE = re.compile(r"\{([0-9,\-]+)\}")


def _unfold(pattern: str) -> Iterator[str]:
    """Names of a pattern, in order."""
    if pattern.startswith("="):
        yield pattern[1:]
        return
    pieces = _RANGE.split(pattern)
    choices: list[list[str]] = []
    for text in pieces[1::2]:
        values: list[str] = []
        for run in text.split(","):
            low, _dash, high = run.partition("-")
            values.extend(str(number) for number in range(int(low), int(high or low) + 1))
            if len(values) > 1_000_000:
                raise ValueError(f"range {text} is too long")
        choices.append(values)
    template = "{}".join(pieces[::2])
    if not choices:
        yield template
        return
    for combination in itertools.product(*choices):
        yield template.format(*combination)


def _families(inventory: Inventory) -> list[list[Any]]:
    """Tensor families of one shard: [pattern, "exl3", k, n, last, marker] or [pattern, dtype, shape]."""
    groups: dict[tuple[str, tuple[Any, ...]], set[tuple[int, ...]]] = {}
    taken: set[str] = set()
    entries: list[tuple[str, tuple[Any, ...]]] = []
    for name, (dtype, shape) in inventory.items():
        if not name.endswith(".trellis") or dtype != "I16" or len(shape) != 3:
            continue
        prefix = name[: -len(".trellis")]
        k, n = shape[0] * 16, shape[1] * 16
        if inventory.get(prefix + ".suh") != ("F16", (k,)) or inventory.get(prefix + ".svh") != ("F16", (n,)):
            continue
        markers = [marker for marker in _MARKERS if inventory.get(f"{prefix}.{marker}") == ("I32", ())]
        if len(markers) > 1:
            continue
        marker = markers[0] if markers else ""
        taken.update(f"{prefix}.{part}" for part in ("trellis", "suh", "svh", *markers))
        entries.append((prefix, ("exl3", k, n, shape[2], marker)))
    entries += [
        (name, (dtype, list(shape))) for name, (dtype, shape) in inventory.items() if name not in taken
    ]
    for name, spec in entries:
        key: tuple[str, tuple[Any, ...]]
        frozen = tuple(tuple(part) if isinstance(part, list) else part for part in spec)
        if "{" in name or "}" in name or name.startswith("="):
            groups.setdefault(("=" + name, frozen), set()).add(())
            continue
        numbers = tuple(int(text) for text in _NUMBER.findall(name))
        key = (_NUMBER.sub("{}", name), frozen)
        groups.setdefault(key, set()).add(numbers)
    rows: list[list[Any]] = []
    for (pattern, spec), numbers_of in groups.items():
        plain = [list(part) if isinstance(part, tuple) else part for part in spec]
        folded = [pattern] if pattern.startswith("=") else _fold(pattern, numbers_of)
        rows.extend([text.replace("\0", ""), *plain] for text in folded)
    return sorted(rows, key=lambda row: (row[0], json.dumps(row[1:])))


def _shards_document(lock: ModelLock) -> dict[str, dict[str, Any]]:
    if lock._document is None:
        lock._document = {
            name: {"header": lock.header_bytes[name], "tensors": _families(inventory)}
            for name, inventory in lock.shards.items()
        }
    return lock._document


def to_document(lock: ModelLock) -> dict[str, Any]:
    """The lock as plain data (what `from_document` reads)."""
    return {
        "format": FORMAT,
        "source": dict(lock.source),
        "config_sha256": lock.config_sha256,
        "config": lock.config,
        "files": [[f.name, f.size, f.sha256, f.git_oid] for f in lock.files],
        "shards": _shards_document(lock),
    }


def dumps(lock: ModelLock) -> str:
    """The lock as text: JSON, one line a file and a tensor family."""
    document = to_document(lock)
    out = ["{"]
    for key in ("format", "source", "config_sha256", "config"):
        out.append(f" {json.dumps(key)}: {json.dumps(document[key], sort_keys=key == 'source')},")
    out.append(' "files": [')
    out.append(",\n".join("  " + json.dumps(row) for row in document["files"]))
    out.append(" ],")
    out.append(' "shards": {')
    blocks = []
    for name, shard in document["shards"].items():
        rows = ",\n".join("   " + json.dumps(row) for row in shard["tensors"])
        blocks.append(f'  {json.dumps(name)}: {{"header": {shard["header"]}, "tensors": [\n{rows}\n  ]}}')
    out.append(",\n".join(blocks))
    out.append(" }")
    out.append("}")
    return "\n".join(out) + "\n"


def _expand(name: str, rows: object) -> Inventory:
    found: Inventory = {}
    if not isinstance(rows, list):
        raise TypeError("tensors is no list")
    for row in rows:
        pattern, kind = row[0], row[1]
        if kind == "exl3":
            _pattern, _kind, k, n, last, marker = row
            if not all(isinstance(v, int) and v >= 0 for v in (k, n, last)) or marker not in ("", *_MARKERS):
                raise ValueError(f"bad EXL3 row {row!r}")
            parts: list[tuple[str, tuple[str, tuple[int, ...]]]] = [
                (".trellis", ("I16", (k // 16, n // 16, last))),
                (".suh", ("F16", (k,))),
                (".svh", ("F16", (n,))),
            ]
            if marker:
                parts.append(("." + marker, ("I32", ())))
        else:
            if kind not in DTYPE_BITS or not all(isinstance(v, int) and v >= 0 for v in row[2]):
                raise ValueError(f"bad tensor row {row!r}")
            parts = [("", (kind, tuple(row[2])))]
        for prefix in _unfold(pattern):
            for suffix, spec in parts:
                if prefix + suffix in found:
                    raise LockError("duplicate-key", "comes twice", file=name, tensor=prefix + suffix)
                found[prefix + suffix] = spec
    return found


def from_document(document: object, label: str = "lock") -> ModelLock:
    """A lock from plain data. Raises LockError for whatever is not a lock of this format."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise LockError("bad-lock", "is not a model lock", file=label, found=found, wanted=FORMAT)
    try:
        files = [LockFile(str(row[0]), int(row[1]), str(row[2]), str(row[3])) for row in document["files"]]
        for item in files:
            check_file_name(item.name, label)
        shards = {
            str(name): _expand(str(name), document["shards"][name]["tensors"])
            for name in sorted(document["shards"], key=os.fsencode)
        }
        lengths = {name: int(document["shards"][name]["header"]) for name in shards}
        source = {str(key): str(value) for key, value in document["source"].items()}
        config, config_sha256 = document["config"], str(document["config_sha256"])
    except PlanError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise LockError("bad-lock", f"is damaged: {type(error).__name__} {error}", file=label) from None
    if not isinstance(config, dict):
        raise LockError("bad-lock", "holds no config", file=label)
    lacking = sorted(set(shards) - {item.name for item in files})
    if lacking or not shards:
        raise LockError("bad-lock", "its shards are not among its files", file=label, found=lacking[:3])
    return ModelLock(source, config, config_sha256, files, shards, lengths)


def load(path: os.PathLike[str] | str) -> ModelLock:
    """Read a lock file. Raises LockError."""
    where = Path(path)
    try:
        raw = where.read_bytes()
    except OSError as error:
        raise LockError("unreadable", f"cannot be read: {error.strerror}", file=str(where)) from None
    return from_document(loads_strict(raw, str(where), "the lock"), str(where))


# --- sources


def _parse_config(raw: bytes, label: str = "config.json") -> dict[str, Any]:
    if len(raw) > CONFIG_LIMIT:
        raise LockError(
            "bad-config", "is too long", file=label, found=len(raw), wanted=f"at most {CONFIG_LIMIT}"
        )
    config = loads_strict(raw, label, "the config")
    if not isinstance(config, dict):
        raise LockError("bad-config", "is no JSON object", file=label, found=type(config).__name__)
    return config


def _from_headers(
    headers: list[Header],
    raw_config: bytes,
    files: list[LockFile],
    source: dict[str, str],
    warnings: list[str],
) -> ModelLock:
    ordered = sorted(headers, key=lambda header: os.fsencode(header.file))
    shards: dict[str, Inventory] = {
        header.file: {name: (meta.dtype, meta.shape) for name, meta in header.tensors.items()}
        for header in ordered
    }
    return ModelLock(
        source,
        _parse_config(raw_config),
        hashlib.sha256(raw_config).hexdigest(),
        sorted(files, key=lambda item: item.name),
        shards,
        {header.file: header.length for header in ordered},
        warnings,
    )


def directory_fingerprint(directory: os.PathLike[str] | str) -> str:
    """sha256 of names, sizes and times of the shards and config.json: tells cheaply that nothing changed."""
    root = Path(directory)
    rows: list[list[object]] = []
    try:
        for path in sorted(root.iterdir()):
            if path.name.endswith((".safetensors", ".json")):
                stat = path.stat()
                rows.append([path.name, stat.st_size, stat.st_mtime_ns])
    except OSError as error:
        raise LockError("missing-folder", f"cannot be listed: {error.strerror}", file=str(root)) from None
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def from_directory(directory: os.PathLike[str] | str) -> ModelLock:
    """A lock from a checkpoint folder (a plain one, or a snapshot of the Hub cache). Reads headers only.

    sha256 comes for free where a snapshot links to blobs that are named by it; else it stays empty.
    """
    root = Path(directory)
    headers, warnings = read_directory(root)
    try:
        raw = (root / "config.json").read_bytes()
    except OSError as error:
        raise LockError(
            "missing-file",
            f"cannot be read: {error.strerror}",
            file="config.json",
            remedy="finish the download",
        ) from None
    files = []
    for base, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(base) / name
            relative = path.relative_to(root).as_posix()
            if (name.startswith(".") and not name.endswith(".safetensors")) or not path.exists():
                continue
            blob = path.resolve().name if path.is_symlink() else ""
            known = blob if _SHA256.match(blob) else ""
            if relative == "config.json":
                known = hashlib.sha256(raw).hexdigest()
            files.append(LockFile(relative, path.stat().st_size, known))
    source = {"kind": "directory", "directory": str(root), "fingerprint": directory_fingerprint(root)}
    return _from_headers(headers, raw, files, source, warnings)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follow redirects as urllib does, but never carry the token to another host."""

    def redirect_request(  # noqa: PLR0917 (urllib's own signature)
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (
            urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc
        ):
            request.remove_header("Authorization")
        return request


class HubClient:
    """Reads file lists and byte ranges from a Hub-compatible server (Hugging Face, a mirror, the lab's
    hub)."""

    def __init__(
        self, endpoint: str, repo: str, revision: str, token: str = "", *, timeout: float = 30.0
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        if urllib.parse.urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise LockError("bad-endpoint", "is no http address", file=endpoint, wanted="https://...")
        self.repo = repo
        self.revision = revision
        self.timeout = timeout
        self.received = 0
        self._token = token
        self._opener = urllib.request.build_opener(_Redirects())

    def _open(self, url: str, headers: dict[str, str], label: str) -> Any:
        if self._token:
            headers = {**headers, "Authorization": f"Bearer {self._token}"}
        headers["User-Agent"] = "sparkfleet-serving"
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        for attempt in range(4):
            try:
                return self._opener.open(request, timeout=self.timeout)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (429, 500, 502, 503, 504) and attempt < 3:
                    time.sleep(0.5 * 2**attempt)
                    continue
                raise self._refusal(error.code, label) from None
            except (urllib.error.URLError, OSError) as error:
                if attempt < 3:
                    time.sleep(0.5 * 2**attempt)
                    continue
                reason = getattr(error, "reason", error)
                raise LockError(
                    "unreachable",
                    f"{self.endpoint} cannot be reached: {reason}",
                    file=label,
                    remedy="give a lock made elsewhere, or another endpoint",
                ) from None
        raise AssertionError("unreachable code")

    def _refusal(self, code: int, label: str) -> LockError:
        name = f"{self.repo}@{self.revision}"
        reasons = {
            401: ("no-token", f"{name} wants a valid token", "check the token"),
            403: ("forbidden", f"{name} is gated", "accept its terms, or give the token read access to it"),
            404: ("not-found", f"{name} does not exist there", "check repo, revision and file"),
        }
        fault, text, remedy = reasons.get(code, ("http", f"{name} cannot be read", "try again later"))
        return LockError(fault, text, file=label, found=f"HTTP {code}", remedy=remedy)

    def _url(self, *parts: str) -> str:
        return "/".join([self.endpoint, *parts])

    def _json(self, url: str) -> tuple[Any, str]:
        with self._open(url, {"Accept": "application/json"}, url) as response:
            raw = response.read()
            self.received += len(raw)
            link = response.headers.get("Link", "")
        return loads_strict(raw, url, "the answer"), link

    def list_files(self) -> tuple[str, list[LockFile]]:
        """(resolved commit, files). Uses the model API with blobs, or the tree API where sizes are
        missing."""
        repo, revision = urllib.parse.quote(self.repo), urllib.parse.quote(self.revision, safe="")
        document, _link = self._json(self._url("api/models", repo, "revision", revision) + "?blobs=true")
        if not isinstance(document, dict):
            raise LockError("bad-answer", "the server's model answer is no object", file=self.endpoint)
        commit = str(document.get("sha") or self.revision)
        files: list[LockFile] = []
        for row in document.get("siblings") or []:
            if not isinstance(row, dict) or not isinstance(row.get("size"), int):
                files = []
                break
            files.append(
                _hub_file(row.get("rfilename"), row["size"], row.get("lfs"), row.get("blobId"), "sha256")
            )
        if not files:
            files = self._tree(repo, urllib.parse.quote(commit, safe=""))
        if not files:
            raise LockError("no-files", f"{self.repo}@{self.revision} lists no file", file=self.endpoint)
        return commit, sorted(files, key=lambda item: item.name)

    def _tree(self, repo: str, revision: str) -> list[LockFile]:
        url = self._url("api/models", repo, "tree", revision) + "?recursive=true"
        files: list[LockFile] = []
        while url:
            document, link = self._json(url)
            if not isinstance(document, list):
                raise LockError("bad-answer", "the server's tree is no list", file=self.endpoint)
            for row in document:
                if isinstance(row, dict) and row.get("type") == "file" and isinstance(row.get("size"), int):
                    files.append(
                        _hub_file(row.get("path"), row["size"], row.get("lfs"), row.get("oid"), "oid")
                    )
            match = re.search(r"<([^>]+)>;\s*rel=\"next\"", link)
            url = urllib.parse.urljoin(url, match[1]) if match else ""
            if url and urllib.parse.urlsplit(url).netloc != urllib.parse.urlsplit(self.endpoint).netloc:
                raise LockError("bad-answer", "the server's next page is on another host", file=url)
        return files

    def read(self, name: str, begin: int, length: int) -> bytes:
        """Bytes [begin, begin + length) of a file, fewer at its end. Falls back to reading past a 200
        answer."""
        url = self._url(
            urllib.parse.quote(self.repo),
            "resolve",
            urllib.parse.quote(self.revision, safe=""),
            urllib.parse.quote(name),
        )
        headers = {"Range": f"bytes={begin}-{begin + length - 1}", "Accept-Encoding": "identity"}
        for attempt in range(3):
            try:
                with self._open(url, headers, name) as response:
                    if response.status == 200 and begin:
                        self.received += len(response.read(begin))
                    raw: bytes = response.read(length)
            except OSError as error:
                if attempt < 2:
                    continue
                raise LockError("unreachable", f"the connection broke: {error}", file=name) from None
            self.received += len(raw)
            return raw
        raise AssertionError("unreachable code")

    def header(self, name: str, size: int) -> Header:
        """The header of one shard, by one range (two where it is longer than `FIRST_RANGE`)."""
        raw = self.read(name, 0, min(FIRST_RANGE, size) or 1)
        wanted = 8 + header_length(raw, name, size)
        if len(raw) < wanted:
            raw += self.read(name, len(raw), wanted - len(raw))
        return parse_header(raw, name, size)


def _hub_file(name: object, size: int, lfs: object, blob: object, key: str) -> LockFile:
    sha256 = ""
    if isinstance(lfs, dict):
        sha256 = str(lfs.get(key) or lfs.get("sha256") or lfs.get("oid") or "")
        size = int(lfs.get("size") or size)
    if not _SHA256.match(sha256):
        sha256 = ""
    return LockFile(check_file_name(name, "file list"), size, sha256, str(blob or ""))


def read_token(token_file: str = "", environment: str = "HF_TOKEN") -> str:
    """The Hub token from a file, or from the environment; empty where there is none. Never from arguments."""
    if not token_file:
        return os.environ.get(environment, "").strip()
    try:
        return Path(token_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise LockError(
            "no-token", f"the token file cannot be read: {error.strerror}", file=token_file
        ) from None


def from_hub(
    endpoint: str,
    repo: str,
    revision: str,
    token: str = "",
    *,
    timeout: float = 30.0,
    workers: int = 8,
    overlay: bool = False,
) -> ModelLock:
    """A lock from a Hub-compatible server by ranges. Raises LockError or HeaderError.

    ``overlay``: the repository holds some shards of another one, so neither a whole series nor a config is
    asked for, and the lock holds its shards alone.
    """
    client = HubClient(endpoint, repo, revision, token, timeout=timeout)
    commit, files = client.list_files()
    if _COMMIT.match(commit):
        client.revision = commit
    by_name = {item.name: item for item in files}
    names = [item.name for item in files if item.name.endswith(".safetensors") and "/" not in item.name]
    if not names:
        raise LockError("no-shards", f"{repo}@{revision} holds no .safetensors file", file=endpoint)
    lacking = [] if overlay else missing_shards(names)
    if lacking:
        raise LockError("missing-file", f"{len(lacking)} shards are missing on the server", file=lacking[0])
    if "config.json" not in by_name and not overlay:
        raise LockError("missing-file", f"{repo}@{revision} has no config.json", file="config.json")
    raw = b"{}" if overlay else client.read("config.json", 0, CONFIG_LIMIT + 1)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        headers = list(pool.map(lambda name: client.header(name, by_name[name].size), names))
    source = {"kind": "hub", "endpoint": client.endpoint, "repo": repo, "revision": commit, "asked": revision}
    known = [
        item._replace(sha256=hashlib.sha256(raw).hexdigest())
        if item.name == "config.json" and not overlay
        else item
        for item in files
        if not overlay or item.name in names
    ]
    return _from_headers(headers, raw, known, source, [])


# --- after the download


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(8 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def compare_inventories(name: str, found: Inventory, wanted: Inventory) -> Iterator[PlanError]:
    """Differences of one shard's tensors, each naming file, tensor, found and wanted."""
    for tensor in sorted(set(wanted) | set(found)):
        have, want = found.get(tensor), wanted.get(tensor)
        if have != want:
            yield LockError(
                "lock-mismatch",
                "the header is not the lock's",
                file=name,
                tensor=tensor,
                found="nothing" if have is None else f"{have[0]} {list(have[1])}",
                wanted="nothing" if want is None else f"{want[0]} {list(want[1])}",
            )


def verify_directory(
    lock: ModelLock, directory: os.PathLike[str] | str, *, hashes: bool = False, limit: int = 20
) -> list[PlanError]:
    """Set a downloaded folder against the lock: shards, sizes, headers, config.json; sha256 on request.

    Empty list: equal. At most ``limit`` differences, each with file, tensor, found and wanted. Shards that
    the lock does not know are differences too: the engine would read them.
    """
    root = Path(directory)
    problems: list[PlanError] = []
    try:
        names = {path.name for path in root.iterdir()}
    except OSError as error:
        return [LockError("missing-folder", f"cannot be listed: {error.strerror}", file=str(root))]
    for name in sorted(name for name in names if name.endswith(".safetensors") and name not in lock.shards):
        problems.append(
            LockError(
                "foreign-file",
                "the engine would read it, the lock does not know it",
                file=name,
                remedy="remove it",
            )
        )
    sizes = lock.sizes
    for name, wanted in lock.shards.items():
        if len(problems) >= limit:
            break
        try:
            header = read_header(root / name, name)
        except HeaderError as error:
            problems.append(error)
            continue
        if header.size != sizes[name]:
            problems.append(
                LockError(
                    "lock-mismatch", "has another size", file=name, found=header.size, wanted=sizes[name]
                )
            )
        found: Inventory = {tensor: (meta.dtype, meta.shape) for tensor, meta in header.tensors.items()}
        if found != wanted:
            problems.extend(itertools.islice(compare_inventories(name, found, wanted), limit - len(problems)))
    for item in lock.files:
        if len(problems) >= limit:
            break
        path = root / item.name
        if item.name == "config.json" or (hashes and item.sha256 and item.name in lock.shards):
            try:
                actual = _file_sha256(path)
            except OSError as error:
                problems.append(
                    LockError("missing-file", f"cannot be read: {error.strerror}", file=item.name)
                )
                continue
            expected = lock.config_sha256 if item.name == "config.json" else item.sha256
            if actual != expected:
                problems.append(
                    LockError(
                        "lock-mismatch", "has another sha256", file=item.name, found=actual, wanted=expected
                    )
                )
    return problems[:limit]


# --- Engram tables

_ENGRAM = re.compile(r"^(?:model\.)?layers\.(\d+)\.engram\.embed\.(weight|scale)$")


class EngramTables(NamedTuple):
    """The files that hold Engram tables, and the tables found in their headers: layer to (rows, row
    bytes)."""

    files: list[LockFile]
    tables: dict[int, tuple[int, int]]
    revision: str

    @property
    def total_bytes(self) -> int:
        """Bytes of the files (original shards carry a little more than the tables)."""
        return sum(item.size for item in self.files)


def _tables(headers: list[Header], source: str) -> dict[int, tuple[int, int]]:
    halves: dict[tuple[int, str], tuple[tuple[int, ...], str]] = {}
    for header in headers:
        for name, meta in header.tensors.items():
            match = _ENGRAM.match(name)
            if match:
                halves[int(match[1]), match[2]] = (meta.shape, header.file)
    found: dict[int, tuple[int, int]] = {}
    for layer in sorted({layer for layer, _half in halves}):
        weight, scale = halves.get((layer, "weight")), halves.get((layer, "scale"))
        if weight is None or scale is None:
            present = weight or scale
            raise LockError(
                "missing-engram",
                "a table needs weight and scale (the engine says MissingEngramTable)",
                file=present[1] if present else source,
                tensor=f"layers.{layer}.engram.embed",
                found="scale" if weight is None else "weight",
                wanted="both",
            )
        if len(weight[0]) != 2 or len(scale[0]) != 2 or weight[0][0] != scale[0][0]:
            raise LockError(
                "bad-engram",
                "weight and scale differ in rows (the engine says BadEngramTable)",
                file=weight[1],
                tensor=f"layers.{layer}.engram.embed",
                found=f"{list(weight[0])} and {list(scale[0])}",
            )
        found[layer] = (weight[0][0], weight[0][1] + scale[0][1])
    if not found:
        raise LockError("missing-engram", "no Engram table is there", file=source)
    return found


def engram_from_directory(directory: os.PathLike[str] | str) -> EngramTables:
    """Engram tables of a folder: every file whose header holds a half of one. Raises LockError."""
    root = Path(directory)
    try:
        names = sorted(path.name for path in root.iterdir() if path.name.endswith(".safetensors"))
    except OSError as error:
        raise LockError("missing-folder", f"cannot be listed: {error.strerror}", file=str(root)) from None
    headers = [read_header(root / name, name) for name in names]
    chosen = [header for header in headers if any(_ENGRAM.match(name) for name in header.tensors)]
    files = [LockFile(header.file, header.size) for header in chosen]
    return EngramTables(files, _tables(chosen, str(root)), "")


def engram_from_hub(
    endpoint: str,
    repo: str,
    revision: str,
    token: str = "",
    *,
    timeout: float = 30.0,
    names: Iterable[str] = (),
) -> EngramTables:
    """Engram tables of a Hub repository: the index (or ``names``) says which shards hold them, their headers how
    many rows."""
    client = HubClient(endpoint, repo, revision, token, timeout=timeout)
    commit, files = client.list_files()
    if _COMMIT.match(commit):
        client.revision = commit
    shards = {
        item.name: item for item in files if item.name.endswith(".safetensors") and "/" not in item.name
    }
    index = next((item for item in files if item.name == "model.safetensors.index.json"), None)
    chosen_names = sorted(names)
    if chosen_names:
        lacking = sorted(set(chosen_names) - set(shards))
        if lacking:
            raise LockError(
                "missing-file",
                f"{repo}@{revision} lacks it",
                file=lacking[0],
                found=", ".join(sorted(shards)[:3]) or "no .safetensors file",
                remedy="name the shards that hold the Engram tables (sparkfleet_engram_files)",
            )
    elif index is not None:
        document = loads_strict(client.read(index.name, 0, max(1, index.size)), index.name, "the index")
        weight_map = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(weight_map, dict):
            raise LockError("bad-index", "has no weight_map", file=index.name)
        named = {
            check_file_name(name, index.name) for tensor, name in weight_map.items() if _ENGRAM.match(tensor)
        }
        lacking = sorted(named - set(shards))
        if lacking:
            raise LockError("missing-file", "the index names it, the server lacks it", file=lacking[0])
        chosen_names = sorted(named)
    else:
        chosen_names = sorted(shards)
    headers = [client.header(name, shards[name].size) for name in chosen_names]
    chosen = [header for header in headers if any(_ENGRAM.match(name) for name in header.tensors)]
    return EngramTables([shards[h.file] for h in chosen], _tables(chosen, f"{repo}@{revision}"), commit)
