"""config.json as the engine reads it, with the engine's fixed-shape check.

The real engine runs one model only. The lab's small model has other shapes, so the image of the lab sets
`LAB_ENGINE_SHAPES=any`, which leaves out that one check and nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import strictjson
from .errors import EngineError, Panic, os_error

CONFIG_LIMIT = 4 << 20

FIXED_SHAPES = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "hc_mult": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "num_nextn_predict_layers": 3,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "dspark_markov_rank": 256,
}


@dataclass(frozen=True)
class ModelConfig:
    """The fields that decide what a rank holds and reads."""

    vocab: int
    hidden: int
    width: int
    layers: int
    heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    groups: int
    experts: int
    ratios: tuple[int, ...]
    kv_sources: frozenset[int]
    index_sources: frozenset[int]
    index_dim: int
    mult: int
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]
    ngram: int
    engram_heads: int
    engram_dim: int
    drafts: int
    draft_experts: int
    taps: int
    max_positions: int
    bos: int
    eos: int
    vision: bool

    @property
    def hash_columns(self) -> int:
        return (self.ngram - 1) * self.engram_heads

    @property
    def blocks(self) -> int:
        """Layers and draft blocks together."""
        return self.layers + self.drafts


def _whole(path: Path, source: dict[str, Any], key: str) -> int:
    if key not in source:
        raise EngineError("BadConfig", f"{path.name} has no {key}")
    value = source[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise EngineError("BadConfig")
    return value


def _numbers(path: Path, source: dict[str, Any], key: str) -> tuple[int, ...]:
    if key not in source:
        raise EngineError("BadConfig", f"{path.name} has no {key}")
    values = source[key]
    if not isinstance(values, list):
        raise EngineError("BadConfig")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise EngineError("BadConfig")
    return tuple(values)


def read(model_dir: str) -> ModelConfig:
    """Read MODEL_DIR/config.json or raise EngineError (Panic where the engine panics)."""
    path = Path(model_dir, "config.json")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise os_error(error) from error
    if len(data) > CONFIG_LIMIT:
        raise EngineError("StreamTooLong")
    document = strictjson.loads(data)
    if not isinstance(document, dict):
        raise Panic("config.json is no object")
    if document.get("model_type") != "deepseek_v41":
        raise EngineError("NotDeepSeekV41", f"{path}: the model_type is not deepseek_v41")
    quantization = document.get("quantization_config")
    if not isinstance(quantization, dict):
        raise EngineError("UnsupportedQuantization", f"{path}: no quantization_config")
    if quantization.get("quant_method") != "exl3":
        raise EngineError("UnsupportedQuantization", f"{path}: the quant_method is not exl3")
    if quantization.get("codebook") != "mul1":
        raise EngineError("UnsupportedQuantization", f"{path}: the codebook is not mul1")
    text = document.get("text_config", document)
    if not isinstance(text, dict):
        raise EngineError("BadConfig")
    fields = {key: _whole(path, text, key) for key in FIXED_SHAPES}
    ratios = _numbers(path, text, "compress_ratios")
    blocks = fields["num_hidden_layers"] + fields["num_nextn_predict_layers"]
    if len(ratios) != blocks:
        raise EngineError(
            "BadConfig", f"{path}: {len(ratios)} compress_ratios for {blocks} layers and drafts"
        )
    if max(ratios) > 2:
        raise EngineError("BadConfig")
    kv_sources = _numbers(path, text, "kv_source_layer_ids")
    index_sources = _numbers(path, text, "index_source_layer_ids")
    engram_layers = _numbers(path, text, "engram_layer_ids")
    engram_rows = _numbers(path, text, "engram_num_embeddings")
    if os.environ.get("LAB_ENGINE_SHAPES") != "any" and fields != FIXED_SHAPES:
        raise EngineError("UnsupportedShapes", f"{path}: the shapes are not the ones that this engine runs")
    return ModelConfig(
        vocab=fields["vocab_size"],
        hidden=fields["hidden_size"],
        width=fields["moe_intermediate_size"],
        layers=fields["num_hidden_layers"],
        heads=fields["num_attention_heads"],
        head_dim=fields["head_dim"],
        q_rank=fields["q_lora_rank"],
        o_rank=fields["o_lora_rank"],
        groups=fields["o_groups"],
        experts=fields["n_routed_experts"],
        ratios=ratios,
        kv_sources=frozenset(kv_sources),
        index_sources=frozenset(index_sources),
        index_dim=fields["index_head_dim"],
        mult=fields["hc_mult"],
        engram_layers=engram_layers,
        engram_rows=engram_rows,
        ngram=_whole(path, text, "engram_max_ngram_size"),
        engram_heads=fields["engram_n_heads"],
        engram_dim=fields["engram_head_dim"],
        drafts=fields["num_nextn_predict_layers"],
        draft_experts=fields["dspark_n_routed_experts"],
        taps=len(_numbers(path, text, "dspark_target_layer_ids")),
        max_positions=_whole(path, text, "max_position_embeddings"),
        bos=_whole(path, document, "bos_token_id"),
        eos=_whole(path, document, "eos_token_id"),
        vision=isinstance(document.get("vision_config"), dict),
    )
