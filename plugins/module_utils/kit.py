# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The kernel kit of the engine: whole by its own MANIFEST, and with RoPE tables long enough for the context.

``MANIFEST`` is a sha256 list. Its lines are compared with digests that were proven while the kit was brought, so
nothing is read twice.

A kit from git lacks five files that are made from public weights: four RoPE tables, whose last bits are those of
PyTorch's own ``pow`` and ``polar`` on a CPU, and the routing bias of image tokens, 43 small tensors of the original
release that a quantized checkpoint leaves out. The kit's own scripts make both, and MANIFEST has their digests; see
``kit_files``, which runs them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .tree import Proof, TreeError, check_name

#: float32 cos or sin of 32 pairs (64 rotary dimensions) a row: the engine's table format.
ROPE_ROW_BYTES = 128
ROPE_TABLES = (
    "rope-compressed-cos.f32",
    "rope-compressed-sin.f32",
    "rope-plain-cos.f32",
    "rope-plain-sin.f32",
)
#: Row count and digests of the tables; the script that makes them reads it beside them.
ROPE_DOCUMENT = "rope.json"
BIAS = "vision/gate_bias_vl.safetensors"
#: Made after a checkout, so absent from the kit's git copy.
GENERATED = (*ROPE_TABLES, BIAS)
#: A line is ``HEX  PATH`` in the kit for two nodes, ``HEX BYTES ORIGIN TWO-NODE PATH`` in the one for four.
_LINE = re.compile(r"(?P<hex>[0-9a-f]{64})(?: +\d+ +\S+ +\S+ +| [ *])(?P<path>\S.*)\Z")


def parse_manifest(text: str) -> dict[str, str]:
    """Path to sha256. Raises ``TreeError`` for a line that is no sha256 line or leaves the kit."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise TreeError(f"MANIFEST line {number} is no line of a sha256 list: {line[:80]!r}")
        path = match["path"]
        found[check_name(path[2:] if path.startswith("./") else path)] = match["hex"]
    if not found:
        raise TreeError("the kit's MANIFEST is empty")
    return found


def compare(manifest: Mapping[str, str], digests: Mapping[str, str]) -> list[str]:
    """What differs between a MANIFEST and proven digests, one sentence each."""
    wrong = []
    for path, digest in sorted(manifest.items()):
        found = digests.get(path)
        if found is None:
            wrong.append(f"{path} is absent")
        elif found != digest:
            wrong.append(f"{path} has sha256 {found[:12]}… instead of {digest[:12]}…")
    return wrong


def rope_rows(kit: Path, names: Sequence[str] = ROPE_TABLES) -> int:
    """Rows of the shortest RoPE table; 0 when one is absent. Raises on a size that is no whole row."""
    rows = []
    for name in names:
        path = kit / name
        size = path.stat().st_size if path.is_file() else 0
        if size % ROPE_ROW_BYTES:
            raise TreeError(f"{path}: {size} bytes are not whole rows of {ROPE_ROW_BYTES}")
        rows.append(size // ROPE_ROW_BYTES)
    return min(rows)


def rows_by_sizes(sizes: Mapping[str, int], read: Callable[[str], bytes], folder: str = "") -> int:
    """Rows of the shortest RoPE table of a kit that is still on a server, from the sizes that it lists.

    ``read`` gives the contents of a small file of it: where no table is there, they will be made with as many rows as
    ``rope.json`` says. ``folder``: where the kit lies in the repository. Raises TreeError where a table is absent or no
    whole rows.
    """
    base = f"{folder.strip('/')}/".lstrip("/")
    document = base + ROPE_DOCUMENT
    if document in sizes and not any(base + name in sizes for name in ROPE_TABLES):
        return rows_by_document(read(document), document)
    rows = []
    for name in ROPE_TABLES:
        path = base + name
        size = sizes.get(path)
        if size is None:
            raise TreeError(
                f"{path} is absent. A kit has all four tables, or none and a {ROPE_DOCUMENT} by which they are made; "
                "name a repository and revision that has"
            )
        if size % ROPE_ROW_BYTES:
            raise TreeError(f"{path}: {size} bytes are not whole rows of {ROPE_ROW_BYTES}")
        rows.append(size // ROPE_ROW_BYTES)
    return min(rows)


def rows_by_document(raw: bytes, label: str) -> int:
    """Rows that the tables of ``rope.json`` have. Raises TreeError."""
    try:
        rows = json.loads(raw)["rows"]
    except (ValueError, TypeError, KeyError) as exc:
        raise TreeError(f"{label} does not say how many rows the RoPE tables have ({exc!r})") from exc
    if type(rows) is not int or rows < 1:
        raise TreeError(f"{label}: {rows!r} are no rows of RoPE tables")
    return rows


def read_manifest(kit: Path) -> dict[str, str]:
    """The MANIFEST of a kit on this node."""
    path = kit / "MANIFEST"
    try:
        return parse_manifest(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise TreeError(f"{path} cannot be read ({exc.strerror}): this is not a kit") from exc


def check(kit: Path, proof: Proof, rows_wanted: int, accepted: Mapping[str, str] | None = None) -> int:
    """Refuse an incomplete kit or one with too short tables; returns the rows of its tables.

    ``accepted``: path to the sha256 that somebody wants in the place of the one in MANIFEST.
    """
    manifest = {**read_manifest(kit), **(accepted or {})}
    digests = {name: seen.sha256 for name, seen in proof.files.items()}
    unmade = [path for path in GENERATED if path not in digests]
    if unmade:
        raise TreeError(
            f"{kit} lacks generated files ({', '.join(unmade)}): it is a copy of the kit's git repository. The role "
            "rank_files makes them, or name a complete copy of the kit, such as the folder kit of the Hub repository "
            "bertholomus/DeepSeek-V4.1-Flash-TensorFold-TP2-2xGB10"
        )
    wrong = compare(manifest, digests)
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise TreeError(
            f"{kit} is not what its MANIFEST says: {'; '.join(wrong[:4])}{more}. Name a revision of the kit that "
            "is complete"
        )
    rows = rope_rows(kit)
    if rows < rows_wanted:
        raise TreeError(
            f"{kit}: the RoPE tables have {rows} rows, the context needs {rows_wanted} (ShortRopeTable). Lower the "
            f"context to {max(rows - 17, 0)}, or name a kit with longer tables"
        )
    return rows
