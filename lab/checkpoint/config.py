"""The two configurations that the generator knows: the lab's small one, and any real `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def primes_above(start: int, count: int, skip: int = 0) -> list[int]:
    """`count` consecutive primes above `start`, after leaving out the first `skip` of them."""
    found: list[int] = []
    candidate = start
    while len(found) < skip + count:
        candidate += 1
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
    return found[skip:]


def engram_columns(text: Config) -> int:
    """Hash columns of one table: one per n-gram order (2 ... max) and head."""
    return (int(text["engram_max_ngram_size"]) - 1) * int(text["engram_n_heads"])


def engram_primes(text: Config, table: int) -> list[int]:
    """Rows of each hash column of table number `table` (0, 1, ...): distinct primes over all tables."""
    columns = engram_columns(text)
    return primes_above(int(text["engram_vocab_size"]), columns, skip=columns * table)


def lab_config(compressed_vocab: int) -> Config:
    """The lab model: five layers (ratios 0, 0, 2, 1, 1), six experts, one draft block, two Engram tables.

    Every matrix dimension is a multiple of 128 and the halves that two ranks take are too; the expert width
    of 768 leaves each rank three 128-blocks, so a four-node split is uneven as it is with the real model.
    """
    text: Config = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 1024,
        "hidden_size": 256,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 4,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 1, 1, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 3],
        "index_source_layer_ids": [2, 3, 4],
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 256,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 900,
        "engram_n_heads": 4,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_vocab,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 1023,
        "dspark_target_layer_ids": [2, 3, 4],
        "dspark_markov_rank": 128,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    text["engram_num_embeddings"] = [
        sum(engram_primes(text, table)) for table in range(len(text["engram_layer_ids"]))
    ]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 7,
        "quantization_config": {
            "quant_method": "exl3",
            "version": "1.4.2",
            "avg_bits": 2.9,
            "head_bits": 6,
            "calibration": {"rows": 250, "cols": 2048},
            "out_scales": "always",
            "codebook": "mul1",
            "mtp_bits": 4,
        },
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "patch_size": 14,
            "rope_theta": 10000,
            "downsample_ratio": 3,
            "max_image_tokens": 1024,
            "min_pixels": 295936,
            "max_wh_ratio": None,
        },
        "engram_table_dir": None,
    }


def load_config(path: Path) -> Config:
    """A real `config.json`, for full-size headers."""
    config: Config = json.loads(path.read_text(encoding="utf-8"))
    return config
