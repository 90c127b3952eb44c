# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The tensor inventory of the first 2.9 bpw pack of DeepSeek-V4.1-Flash, reconstructed, at full size.

Names, shapes and bit widths follow the published table of the pack and were checked two ways: against the
recorded sizes of its 39 shards (only header bytes are left over), and against the index that the engine's
own tool prints for such an inventory (tests/fixtures/plan/README.md). The vision tower's names and shapes
were not published: 266 plain tensors stand in for it whose total fits shard 39, so shard 39 proves nothing.

`write_sparse` writes the 39 shards as sparse files with real headers and no weights: 210 GB by name, 20 MB
on disk.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import (
    Inventory,
    LockFile,
    ModelLock,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.safetensors import tensor_bytes

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "plan"
SHARDS = 39
ENGRAM_LAYERS = {1: 5, 14: 4}
KV_SOURCES = (2, 8, 14, 20)
INDEX_SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)
#: Data bytes of the vision tower and its aligner: shard 39 minus its known parts and its header. Fitted, not
#: seen.
VISION_TENSORS = 266


def matrix(out: Inventory, name: str, k: int, n: int, bits: float) -> None:
    """The four tensors of an EXL3 matrix, in the order in which the quantizer writes them."""
    out[name + ".suh"] = ("F16", (k,))
    out[name + ".svh"] = ("F16", (n,))
    out[name + ".mul1"] = ("I32", ())
    out[name + ".trellis"] = ("I16", (k // 16, n // 16, int(16 * bits)))


def _block(out: Inventory, prefix: str, layer: int, experts: int) -> None:
    draft = prefix.startswith("mtp")
    bits = 4 if draft else 5
    latent = 4 if draft else (6 if layer == 0 else 5)
    routed = 4 if draft else (2 if 18 <= layer <= 22 else 3)
    for expert in range(experts):
        for leaf, k, n in (("w1", 5120, 2304), ("w3", 5120, 2304), ("w2", 2304, 5120)):
            matrix(out, f"{prefix}.ffn.experts.{expert}.{leaf}", k, n, routed)
    for leaf, k, n in (("w1", 5120, 2304), ("w3", 5120, 2304), ("w2", 2304, 5120)):
        shared = 4 if draft or 11 <= layer <= 29 else 5
        if layer == 29 and leaf == ODD_SHARED and not draft:
            shared = 5
        matrix(out, f"{prefix}.ffn.shared_experts.{leaf}", k, n, shared)
    out[f"{prefix}.ffn.gate.bias"] = ("F32", (experts,))
    out[f"{prefix}.ffn.gate.weight"] = ("F16", (experts, 5120))
    out[f"{prefix}.ffn_norm.weight"] = ("BF16", (5120,))
    for group in range(8):
        matrix(out, f"{prefix}.attn.wo_a.slice.{group}", 4096, 1024, bits)
    matrix(out, f"{prefix}.attn.wo_b", 8192, 5120, bits)
    matrix(out, f"{prefix}.attn.wq_a", 5120, 1280, latent)
    matrix(out, f"{prefix}.attn.wq_b", 1280, 32768, bits)
    matrix(out, f"{prefix}.attn.wkv", 5120, 512, latent)
    if not draft:
        _sources(out, prefix, layer)
    out[f"{prefix}.attn.attn_sink"] = ("F32", (64,))
    out[f"{prefix}.attn.kv_norm.weight"] = ("BF16", (512,))
    out[f"{prefix}.attn.q_norm.weight"] = ("BF16", (1280,))
    out[f"{prefix}.attn_norm.weight"] = ("BF16", (5120,))
    for part in ("attn", "ffn"):
        out[f"{prefix}.hc_{part}_base"] = ("F32", (24,))
        out[f"{prefix}.hc_{part}_fn"] = ("F32", (24, 20480))
        out[f"{prefix}.hc_{part}_scale"] = ("F32", (3,))


#: Layer 29 has one shared matrix at 5 bits. Which one changes no byte count of a shard; the index of a rank
#: tells.
ODD_SHARED = "w2"


def _sources(out: Inventory, prefix: str, layer: int) -> None:
    if layer in KV_SOURCES:
        matrix(out, f"{prefix}.attn.compressor.wkv", 5120, 512, 5)
        if layer != 20:
            matrix(out, f"{prefix}.attn.compressor.wgate", 5120, 512, 5)
        out[f"{prefix}.attn.compressor.norm.weight"] = ("BF16", (512,))
    if layer in INDEX_SOURCES:
        matrix(out, f"{prefix}.attn.indexer.wq_b", 1280, 4096, 5)
        out[f"{prefix}.attn.indexer.weights_proj.weight"] = ("F16", (32, 5120))
        if layer in KV_SOURCES:
            matrix(out, f"{prefix}.attn.indexer.wk", 512, 128, 8)
            out[f"{prefix}.attn.indexer.k_norm.weight"] = ("BF16", (128,))
    if layer in ENGRAM_LAYERS:
        matrix(out, f"{prefix}.engram.wkv", 6144, 25600, ENGRAM_LAYERS[layer])
        out[f"{prefix}.engram.q_weight"] = ("F32", (4, 5120))
        out[f"{prefix}.engram.k_weight"] = ("F32", (4, 5120))


def recorded_sizes() -> list[int]:
    """File sizes of the 39 real shards, in order."""
    sizes: list[int] = json.loads((FIXTURES / "recorded-shard-sizes-first-2.9bpw-pack.json").read_text())
    return sizes


def shard_of_layer(layer: int) -> int:
    """Shard number of a layer: one a shard, except 18+19 and 20+21."""
    if layer <= 17:
        return layer + 1
    if layer <= 21:
        return 19 if layer <= 19 else 20
    return layer - 1


def _tail(out: Inventory, number: int) -> None:
    if number == 38:
        matrix(out, "head", 5120, 129280, 6)
        out["norm.weight"] = ("BF16", (5120,))
        _block(out, "mtp.0", 40, 128)
        matrix(out, "mtp.0.main_proj", 15360, 5120, 4)
        out["mtp.0.main_norm.weight"] = ("BF16", (5120,))
    if number == 39:
        _block(out, "mtp.1", 41, 128)
        _block(out, "mtp.2", 42, 128)
        out["mtp.2.norm.weight"] = ("BF16", (5120,))
        out["mtp.2.markov_head.embed.weight"] = ("BF16", (129280, 256))
        out["mtp.2.markov_head.head.weight"] = ("F16", (129280, 256))
        out["mtp.2.confidence_head.proj.weight"] = ("F16", (1, 5376))


def shard_inventories() -> Iterator[tuple[str, Inventory]]:
    """(file name, tensors) of the 39 shards."""
    for number in range(1, SHARDS + 1):
        out: Inventory = {}
        if number == 1:
            out["embed.weight"] = ("BF16", (129280, 5120))
        for layer in range(40):
            if shard_of_layer(layer) == number:
                _block(out, f"layers.{layer}", layer, 384)
        _tail(out, number)
        if number == SHARDS:
            _vision(out)
        yield f"model-{number:05d}-of-{SHARDS:05d}.safetensors", out


def data_bytes(inventory: Inventory) -> int:
    """Bytes of all tensors of a shard."""
    return sum(tensor_bytes(dtype, shape) for dtype, shape in inventory.values())


def _vision(out: Inventory) -> None:
    """266 stand-in tensors, so that the last shard has its recorded size with a header of 105 bytes a
    tensor."""
    header = 105 * (len(out) + VISION_TENSORS)
    room = (recorded_sizes()[-1] - 8 - header - data_bytes(out)) // 2
    each, extra = divmod(room, VISION_TENSORS)
    for number in range(VISION_TENSORS):
        out[f"vision.stand_in.{number}.weight"] = ("BF16", (each + (extra if number == 0 else 0),))


@functools.cache
def full_size_lock() -> ModelLock:
    """The lock of the reconstructed pack: recorded file sizes, reconstructed tensors. For plans and tests
    only."""
    raw = (FIXTURES / "deepseek-v41-flash.config.json").read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    files = [LockFile("config.json", len(raw), digest)]
    shards: dict[str, Inventory] = {}
    lengths: dict[str, int] = {}
    for (name, inventory), size in zip(shard_inventories(), recorded_sizes(), strict=True):
        files.append(LockFile(name, size))
        shards[name] = inventory
        lengths[name] = size - 8 - data_bytes(inventory)
    source = {
        "kind": "reconstructed",
        "repo": "Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw",
        "revision": "64ba41b6c916a587db06eae2e19b7845f7be6e6b",
        "note": "headers were not seen: for sparkplan and tests, never for site.yml",
    }
    return ModelLock(source, json.loads(raw), digest, sorted(files), shards, lengths)


def header_text(inventory: Inventory) -> bytes:
    """The header JSON of a shard as the quantizer writes it: module order, compact, unpadded, no metadata."""
    rows: dict[str, dict[str, object]] = {}
    position = 0
    for name, (dtype, shape) in inventory.items():
        end = position + tensor_bytes(dtype, shape)
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return json.dumps(rows, separators=(",", ":")).encode()


def write_sparse(directory: Path, shards: dict[str, Inventory], config: bytes) -> int:
    """Write shards as sparse files (headers real, weights holes) with config and index. Returns bytes by
    name."""
    directory.mkdir(parents=True, exist_ok=True)
    total = 0
    weight_map: dict[str, str] = {}
    for name, inventory in shards.items():
        text = header_text(inventory)
        size = 8 + len(text) + data_bytes(inventory)
        with (directory / name).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(size)
        total += size
        weight_map.update(dict.fromkeys(inventory, name))
    (directory / "config.json").write_bytes(config)
    index = {"metadata": {"total_size": sum(map(data_bytes, shards.values()))}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_full_size(directory: Path) -> int:
    """The whole pack as sparse files. Returns bytes by name (about 210.6 GB; about 36 MB on disk)."""
    config = (FIXTURES / "deepseek-v41-flash.config.json").read_bytes()
    return write_sparse(directory, dict(shard_inventories()), config)
