# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The files that a kit from git lacks, made by the kit's own scripts.

``make_rope.py MODEL OUT`` computes the RoPE tables on a CPU with PyTorch and reads ``OUT/rope.json``.
``make_bias_vl.py ORIGINAL OUT`` copies every ``*.ffn.gate.bias_vl`` out of the original release, found by its index.
Those are 43 tensors of 1.5 KiB in 550 GB, so what the script gets is a small checkpoint with these tensors alone, read
by ranges: the same names, dtypes, shapes and bytes, hence the same file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .kit import BIAS, compare
from .model_lock import HubClient
from .tree import TreeError

ROPE_SCRIPT, BIAS_SCRIPT = "tools/make_rope.py", "tools/make_bias_vl.py"
BIAS_SUFFIX = ".ffn.gate.bias_vl"
INDEX = "model.safetensors.index.json"
#: Bytes at most of an index; the real one has about 10 MB.
INDEX_LIMIT = 100_000_000

Run = Callable[[str, Sequence[str], Sequence[str], Mapping[str, str]], "tuple[int, str, str]"]


def wanted_tensors(index: bytes) -> dict[str, list[str]]:
    """Shard to the names of its routing biases, from the index of the original release. Raises TreeError."""
    try:
        placed = json.loads(index)["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in placed.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise TreeError(f"{INDEX} of the original release is no index ({exc!r})") from exc
    found: dict[str, list[str]] = {}
    for name, shard in sorted(pairs):
        if name.endswith(BIAS_SUFFIX):
            found.setdefault(shard, []).append(name)
    if not found:
        raise TreeError(
            f"the index names no *{BIAS_SUFFIX}: it is not of the original release (a quantized checkpoint leaves them "
            "out)"
        )
    return found


def small_shard(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """A safetensors file of these tensors: name to (dtype, shape, bytes)."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _dtype, _shape, data in tensors.values())


def small_original(client: HubClient, out: Path) -> int:
    """Write a checkpoint of the routing biases alone into ``out``; returns how many there are.

    Raises PlanError for a server that does not give them, TreeError for a repository that does not have them.
    """
    commit, listed = client.list_files()
    client.revision = commit
    sizes = {item.name: item.size for item in listed}
    if INDEX not in sizes:
        raise TreeError(f"{client.repo} at {client.revision} has no {INDEX}: it is not the original release")
    wanted = wanted_tensors(client.read(INDEX, 0, INDEX_LIMIT))
    absent = sorted(set(wanted) - set(sizes))
    if absent:
        raise TreeError(f"{client.repo} at {client.revision} lacks {absent[0]}, which its index names")
    out.mkdir(mode=0o755)
    for shard, names in wanted.items():
        header = client.header(shard, sizes[shard])
        tensors = {}
        for name in names:
            meta = header.tensors.get(name)
            if meta is None:
                raise TreeError(f"{shard} of {client.repo} has no {name}, where its index says that it is")
            data = client.read(shard, 8 + header.length + meta.begin, meta.end - meta.begin)
            if len(data) != meta.end - meta.begin:
                raise TreeError(f"{shard} of {client.repo} ended within {name}")
            tensors[name] = (meta.dtype, meta.shape, data)
        (out / shard).parent.mkdir(parents=True, exist_ok=True)
        (out / shard).write_bytes(small_shard(tensors))
    placed = {name: shard for shard, names in wanted.items() for name in names}
    (out / INDEX).write_text(json.dumps({"weight_map": placed}), encoding="utf-8")
    return len(placed)


def why_rope_failed(text: str, code: int) -> str:
    """What the failure of ``make_rope.py`` means, in words."""
    tail = text.strip()[-300:]
    if "No module named 'torch'" in text:
        return (
            "the engine image has no PyTorch, whose pow and polar give the tables their last bits; build it upon its "
            "default base image, or name a complete copy of the kit"
        )
    if "No module named" in text:
        return (
            f"it imports what the image lacks ({tail.splitlines()[-1]}): the script of the kit for two nodes needs the "
            "engine's Python family (github.com/bertholomus/TensorFold, branch deepseek-v41-tp2); put a checkout on "
            "rank 0 and name its folder src in rank_files_rope_source"
        )
    if "DIFFERS" in text:
        return (
            f"the tables are not those of the kit ({tail}): another PyTorch, or the config of another model"
        )
    return f"it ended with {code}: {tail}"


def make_tables(run: Run, kit: Path, model_dir: str, out: Path, source: str) -> None:
    """The four RoPE tables into ``out``, which holds the kit's ``rope.json``. Raises TreeError."""
    binds = [f"{kit}:/kit:ro", f"{model_dir}:/model:ro", f"{out}:/out"]
    environment = {}
    if source:
        binds.append(f"{source}:/source:ro")
        environment["PYTHONPATH"] = "/source"
    code, said, err = run("rope", ["python3", f"/kit/{ROPE_SCRIPT}", "/model", "/out"], binds, environment)
    if code != 0:
        raise TreeError(f"{kit}/{ROPE_SCRIPT} failed: {why_rope_failed(f'{said}{err}', code)}")


def make_bias(run: Run, kit: Path, original: Path, out: Path) -> None:
    """The routing bias into ``out``, from a checkpoint that holds it. Raises TreeError."""
    (out / BIAS).parent.mkdir(mode=0o755, exist_ok=True)
    argv = ["python3", f"/kit/{BIAS_SCRIPT}", "/original", f"/out/{BIAS}"]
    code, said, err = run("bias", argv, [f"{kit}:/kit:ro", f"{original}:/original:ro", f"{out}:/out"], {})
    if code != 0:
        raise TreeError(f"{kit}/{BIAS_SCRIPT} failed: it ended with {code}: {f'{said}{err}'.strip()[-300:]}")


def refuse_other(manifest: Mapping[str, str], made: Mapping[str, str], source: str) -> None:
    """Refuse files that are not the ones of MANIFEST. ``made``: path to sha256. Raises TreeError."""
    listed = {path: manifest[path] for path in made if path in manifest}
    unlisted = sorted(set(made) - set(listed))
    if unlisted:
        raise TreeError(f"MANIFEST says nothing of {', '.join(unlisted)}: this is not a copy of a whole kit")
    wrong = compare(listed, made)
    if not wrong:
        return
    hint = ""
    if BIAS in made and made[BIAS] != manifest[BIAS]:
        hint = (
            f". The routing bias comes from {source}: take a kit that was made for this release, or take this one with "
            f"rank_files_bias_sha256: {made[BIAS]}"
        )
    raise TreeError(f"what the kit's scripts made is not what its MANIFEST says: {'; '.join(wrong)}{hint}")
