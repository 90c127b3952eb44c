"""Small checkpoints with the real naming scheme: dimensions are multiples of 128, weights are holes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import (
    Inventory,
    LockFile,
    ModelLock,
)

from tools.plan_fullsize import data_bytes, header_text

EXL3 = Path(__file__).resolve().parents[2] / "fixtures" / "plan" / "exl3"


@dataclass
class Small:
    """Numbers of a small DeepSeek-V4.1: four layers cover ratio 0, 2 and 1, one Engram layer, draft
    blocks."""

    hidden: int = 256
    heads: int = 4
    head_dim: int = 128
    groups: int = 4
    o_lora: int = 128
    width: int = 256
    vocab: int = 512
    experts: int = 4
    drafts: int = 1
    draft_experts: int = 2
    ngram: int = 3
    engram_heads: int = 2
    engram_dim: int = 128
    ratios: tuple[int, ...] = (0, 2, 2, 1)
    kv: tuple[int, ...] = (1, 3)
    index: tuple[int, ...] = (1, 2, 3)
    engram: tuple[int, ...] = (1,)
    bits: int = 3

    @property
    def columns(self) -> int:
        return (self.ngram - 1) * self.engram_heads


def config(s: Small) -> dict[str, Any]:
    """config.json of a small checkpoint."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {"quant_method": "exl3", "codebook": "mul1"},
        "text_config": {
            "vocab_size": s.vocab,
            "hidden_size": s.hidden,
            "moe_intermediate_size": s.width,
            "num_hidden_layers": len(s.ratios),
            "num_attention_heads": s.heads,
            "num_key_value_heads": 1,
            "head_dim": s.head_dim,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 128,
            "o_lora_rank": s.o_lora,
            "o_groups": s.groups,
            "max_position_embeddings": 8192,
            "n_routed_experts": s.experts,
            "n_shared_experts": 1,
            "sliding_window": 128,
            "compress_ratios": [*s.ratios, *([0] * s.drafts)],
            "kv_source_layer_ids": list(s.kv),
            "index_source_layer_ids": list(s.index),
            "index_n_heads": 4,
            "index_head_dim": 128,
            "hc_mult": 4,
            "engram_layer_ids": list(s.engram),
            "engram_num_embeddings": [1000 for _ in s.engram],
            "engram_max_ngram_size": s.ngram,
            "engram_n_heads": s.engram_heads,
            "engram_head_dim": s.engram_dim,
            "num_nextn_predict_layers": s.drafts,
            "num_experts_per_tok": 2,
            "index_topk": 512,
            "dspark_n_routed_experts": s.draft_experts,
            "dspark_num_experts_per_tok": 1,
            "dspark_block_size": 5,
            "dspark_markov_rank": 128,
            "dspark_target_layer_ids": [1, 2, 3],
        },
    }


def matrix(out: Inventory, name: str, k: int, n: int, bits: int) -> None:
    """The four tensors of an EXL3 matrix."""
    out[name + ".suh"] = ("F16", (k,))
    out[name + ".svh"] = ("F16", (n,))
    out[name + ".mul1"] = ("I32", ())
    out[name + ".trellis"] = ("I16", (k // 16, n // 16, 16 * bits))


def _block(out: Inventory, s: Small, p: str, layer: int, experts: int) -> None:
    h, plain = s.hidden, out
    for part in ("attn", "ffn"):
        plain[f"{p}.hc_{part}_fn"] = ("F32", (24, 4 * h))
        plain[f"{p}.hc_{part}_scale"] = ("F32", (3,))
        plain[f"{p}.hc_{part}_base"] = ("F32", (24,))
    for name, size in (("attn_norm", h), ("ffn_norm", h), ("attn.q_norm", 128), ("attn.kv_norm", s.head_dim)):
        plain[f"{p}.{name}.weight"] = ("BF16", (size,))
    matrix(out, f"{p}.attn.wq_a", h, 128, s.bits)
    matrix(out, f"{p}.attn.wq_b", 128, s.heads * s.head_dim, s.bits)
    matrix(out, f"{p}.attn.wkv", h, s.head_dim, s.bits)
    plain[f"{p}.attn.attn_sink"] = ("F32", (s.heads,))
    for group in range(s.groups):
        matrix(out, f"{p}.attn.wo_a.slice.{group}", s.heads * s.head_dim // s.groups, s.o_lora, s.bits)
    matrix(out, f"{p}.attn.wo_b", s.groups * s.o_lora, h, s.bits)
    plain[f"{p}.ffn.gate.weight"] = ("F16", (experts, h))
    plain[f"{p}.ffn.gate.bias"] = ("F32", (experts,))
    for base in (*(f"{p}.ffn.experts.{e}" for e in range(experts)), f"{p}.ffn.shared_experts"):
        matrix(out, f"{base}.w1", h, s.width, s.bits)
        matrix(out, f"{base}.w3", h, s.width, s.bits)
        matrix(out, f"{base}.w2", s.width, h, s.bits)
    if layer in s.kv:
        matrix(out, f"{p}.attn.compressor.wkv", h, s.head_dim, s.bits)
        plain[f"{p}.attn.compressor.norm.weight"] = ("BF16", (s.head_dim,))
        if s.ratios[layer] > 1:
            matrix(out, f"{p}.attn.compressor.wgate", h, s.head_dim, s.bits)
    if layer in s.index:
        matrix(out, f"{p}.attn.indexer.wq_b", 128, 512, s.bits)
        plain[f"{p}.attn.indexer.weights_proj.weight"] = ("F16", (4, h))
        if layer in s.kv:
            matrix(out, f"{p}.attn.indexer.wk", s.head_dim, 128, 8)
            plain[f"{p}.attn.indexer.k_norm.weight"] = ("BF16", (128,))
    if layer in s.engram:
        matrix(out, f"{p}.engram.wkv", s.columns * s.engram_dim, 5 * h, s.bits)
        plain[f"{p}.engram.q_weight"] = ("F32", (4, h))
        plain[f"{p}.engram.k_weight"] = ("F32", (4, h))


def inventories(s: Small) -> dict[str, Inventory]:
    """Two shards: embed and layers; head, norm and drafts."""
    first: Inventory = {"embed.weight": ("BF16", (s.vocab, s.hidden))}
    for layer in range(len(s.ratios)):
        _block(first, s, f"layers.{layer}", layer, s.experts)
    second: Inventory = {"norm.weight": ("BF16", (s.hidden,))}
    matrix(second, "head", s.hidden, s.vocab, 6)
    for draft in range(s.drafts):
        _block(second, s, f"mtp.{draft}", len(s.ratios) + draft, s.draft_experts)
    if s.drafts:
        matrix(second, "mtp.0.main_proj", 3 * s.hidden, s.hidden, 4)
        last = f"mtp.{s.drafts - 1}"
        second["mtp.0.main_norm.weight"] = ("BF16", (s.hidden,))
        second[f"{last}.norm.weight"] = ("BF16", (s.hidden,))
        second[f"{last}.markov_head.embed.weight"] = ("BF16", (s.vocab, 128))
        second[f"{last}.markov_head.head.weight"] = ("F16", (s.vocab, 128))
        second[f"{last}.confidence_head.proj.weight"] = ("F16", (1, s.hidden + 128))
    return {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}


def lock_of(shards: dict[str, Inventory], body: dict[str, Any]) -> ModelLock:
    """A lock of inventories, as if read from their headers."""
    raw = json.dumps(body).encode()
    digest = hashlib.sha256(raw).hexdigest()
    lengths = {name: len(header_text(inventory)) for name, inventory in shards.items()}
    files = [LockFile("config.json", len(raw), digest)]
    files += [LockFile(name, 8 + lengths[name] + data_bytes(shards[name])) for name in shards]
    return ModelLock({"kind": "test"}, body, digest, files, shards, lengths)


def small_lock(s: Small | None = None) -> ModelLock:
    """The lock of a small checkpoint."""
    numbers = s or Small()
    return lock_of(inventories(numbers), config(numbers))


def lay_out_exl3(name: str, directory: Path) -> Path:
    """One of the really quantized checkpoints with real headers and holes for weights."""
    source, target = EXL3 / name, directory / name
    target.mkdir()
    for file, size in json.loads((source / "sizes.json").read_text()).items():
        with (target / file).open("wb") as stream:
            stream.write((source / f"{file}.header").read_bytes())
            stream.truncate(size)
    for file in ("config.json", "model.safetensors.index.json"):
        (target / file).write_bytes((source / file).read_bytes())
    return target
