"""What a rank reads beside its weights: Engram tables, token map, RoPE tables, kernel kit."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import EngineError, os_error
from .modelconfig import ModelConfig
from .shards import DTYPE_BYTES, ENGRAM_DTYPE_BYTES, Source, scan

EMBED = re.compile(r"(?:model\.)?layers\.(\d+)\.engram\.embed\.(weight|scale)")
WEIGHT_BYTES = 256
SCALE_BYTES = 8
ROPE_ROW_BYTES = 32 * 4
ROPE_FILES = ("rope-plain-cos", "rope-plain-sin", "rope-compressed-cos", "rope-compressed-sin")


def read_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """One row; EndOfFile and ReadFailed as the engine names them."""
    try:
        data = os.pread(descriptor, nbytes, offset)
    except OSError as error:
        raise EngineError("ReadFailed") from error
    if len(data) != nbytes:
        raise EngineError("EndOfFile")
    return data


@dataclass(frozen=True)
class Table:
    """One Engram table: its rows, and where its two blocks lie."""

    rows: int
    weight: int
    weight_at: int
    scale: int
    scale_at: int


class Engram:
    """The tables of all Engram layers, read row by row from wherever the folder's files hold them."""

    def __init__(self, folder: str | None, config: ModelConfig) -> None:
        if not folder:
            raise EngineError("NoEngramTables")
        halves: dict[int, dict[str, Source]] = {}
        for name, source in scan(folder, ENGRAM_DTYPE_BYTES).items():
            match = EMBED.fullmatch(name)
            if match:
                halves.setdefault(int(match.group(1)), {})[match.group(2)] = source
        if not halves:
            raise EngineError("NoEngramTables")
        self.tables: dict[int, Table] = {}
        for layer, rows in zip(config.engram_layers, config.engram_rows, strict=True):
            found = halves.get(layer, {})
            if set(found) != {"weight", "scale"}:
                raise EngineError("MissingEngramTable")
            weight, scale = found["weight"], found["scale"]
            if weight.shape != (rows, WEIGHT_BYTES) or scale.shape != (rows, SCALE_BYTES):
                raise EngineError("BadEngramTable")
            self.tables[layer] = Table(
                rows,
                os.open(weight.path, os.O_RDONLY),
                weight.offset,
                os.open(scale.path, os.O_RDONLY),
                scale.offset,
            )
        self.reads = 0

    def row(self, layer: int, number: int) -> bytes:
        """264 bytes: 256 of the weight row, 8 of its scales."""
        table = self.tables[layer]
        self.reads += 2
        weight = read_at(table.weight, WEIGHT_BYTES, table.weight_at + number * WEIGHT_BYTES)
        return weight + read_at(table.scale, SCALE_BYTES, table.scale_at + number * SCALE_BYTES)


def token_map(path: str | None, config: ModelConfig) -> list[int]:
    """The compressed id of every token."""
    if not path or not Path(path).is_file():
        raise EngineError("NoTokenMap")
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise EngineError("BadTokenMap") from error
    if not isinstance(values, list) or len(values) != config.vocab or not all(type(v) is int for v in values):
        raise EngineError("BadTokenMap")
    return values


class Kit:
    """The kit folder: hash constants, RoPE tables, kernel list, and on a vision model its two files."""

    def __init__(self, folder: str | None, kernels: str | None, config: ModelConfig, rank: int) -> None:
        if not folder:
            raise EngineError("NoKit", "TF_DS_KIT is not set")
        self.folder = Path(folder)
        aot = Path(kernels) if kernels else self.folder / "aot"
        self._check_kernels(aot)
        try:
            document = json.loads((self.folder / "engram.json").read_text(encoding="utf-8"))
            self.multipliers = {
                layer: list(document[str(layer)]["multipliers"]) for layer in config.engram_layers
            }
            self.primes = {layer: list(document[str(layer)]["primes"]) for layer in config.engram_layers}
        except OSError as error:
            raise os_error(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError("BadEngramTable", f"{self.folder}/engram.json is not this model's") from error
        for layer, rows in zip(config.engram_layers, config.engram_rows, strict=True):
            if len(self.primes[layer]) != config.hash_columns or sum(self.primes[layer]) != rows:
                raise EngineError("BadEngramTable", f"{self.folder}/engram.json is not this model's")
        if config.vision:
            wanted = ["vision/gate_bias_vl.safetensors"] + (
                ["vision/torch_fmha_sm120.cubin"] if rank == 0 else []
            )
            if not all((self.folder / name).is_file() for name in wanted):
                raise EngineError("NoVisionKit")
            biases = scan(str(self.folder / "vision"))
            if sum(name.endswith(".ffn.gate.bias_vl") for name in biases) != config.blocks:
                raise EngineError("NoVisionKit")
        self.rope: dict[str, int] = {}
        self.rope_rows = 0

    @staticmethod
    def _check_kernels(aot: Path) -> None:
        try:
            document = json.loads((aot / "aot.json").read_text(encoding="utf-8"))
            kernels = document["kernels"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError("NoKernelImages", f"no CUDA kernel set in {aot}") from error
        for name, kernel in kernels.items():
            if not (aot / kernel["cubin"]).is_file():
                raise EngineError("MissingTritonVariant", f"{aot}: no cubin of {name}")

    def open_rope(self, rows: int) -> None:
        """Open the four tables; each must have `rows` rows of 32 float32."""
        for name in ROPE_FILES:
            path = self.folder / f"{name}.f32"
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise os_error(error) from error
            size = os.fstat(descriptor).st_size
            if size < rows * ROPE_ROW_BYTES:
                raise EngineError("ShortRopeTable")
            self.rope[name] = descriptor
            self.rope_rows = rows

    def rope_row(self, kind: str, position: int) -> bytes:
        """cos and sin of one position, of the plain or the compressed layers."""
        at = position * ROPE_ROW_BYTES
        cos = read_at(self.rope[f"rope-{kind}-cos"], ROPE_ROW_BYTES, at)
        return cos + read_at(self.rope[f"rope-{kind}-sin"], ROPE_ROW_BYTES, at)


def vision_shard(model_dir: str) -> int:
    """Bytes of the vision tower in the checkpoint (rank 0 loads them); NoVisionTower when there is none."""
    tower = [
        source
        for name, source in scan(model_dir, DTYPE_BYTES).items()
        if name.startswith(("vision.", "aligner."))
    ]
    if not tower:
        raise EngineError("MissingTensor", f"{model_dir}: no vision tower in its shards")
    return sum(source.nbytes for source in tower)
