"""Which tensors a checkpoint holds, in which shard: names, dtypes, shapes, bit widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from lab.checkpoint.config import Config, engram_columns

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I16": 2, "I32": 4, "F8_E4M3": 1, "F8_E8M0": 1}
MUL1_MARKER = -2082680531  # the int32 that exllamav3 stores beside a matrix of the mul1 codebook (0x83DCD12D)

Bits = Callable[[str], Fraction]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a shard; `dtype` in the spelling of safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


def first_pack_bits(name: str) -> Fraction:
    """Bits of each matrix of the first 2.9 bpw pack (checked against its shard sizes to the byte)."""
    parts = name.split(".")
    if name == "head":
        return Fraction(6)
    if parts[0] == "mtp":
        return Fraction(4)
    layer = int(parts[1]) if parts[0] == "layers" else -1
    if ".shared_experts." in name:
        bits = 4 if 11 <= layer <= 29 else 5
        return Fraction(5) if (layer, parts[-1]) == (29, "w2") else Fraction(bits)
    if ".experts." in name:
        return Fraction(2 if 18 <= layer <= 22 else 3)
    if name.endswith("indexer.wk"):
        return Fraction(8)
    if layer == 0 and name.endswith(("attn.wq_a", "attn.wkv")):
        return Fraction(6)
    return Fraction(4 if name == "layers.14.engram.wkv" else 5)


def lab_bits(name: str) -> Fraction:
    """Bits of the lab model: the same spread, and one layer at 2.5 (which only the mul1 codebook allows)."""
    if ".experts." in name and name.startswith(("layers.", "mtp.")):
        if name.startswith("mtp."):
            return Fraction(4)
        return {"layers.2": Fraction(2), "layers.3": Fraction(5, 2)}.get(name[:8], Fraction(3))
    if name == "layers.3.engram.wkv":
        return Fraction(4)
    return first_pack_bits(name)


def matrix(name: str, k: int, n: int, bits: Bits) -> list[Tensor]:
    """An EXL3 matrix of k inputs and n outputs, in the order in which the quantizer stores it."""
    if k % 128 or n % 128:
        raise ValueError(f"{name}: {k} x {n} is not a multiple of 128")
    words = 16 * bits(name)
    if words.denominator != 1:
        raise ValueError(f"{name}: {bits(name)} bits are no whole number of words a tile")
    return [
        Tensor(f"{name}.suh", "F16", (k,)),
        Tensor(f"{name}.svh", "F16", (n,)),
        Tensor(f"{name}.mul1", "I32", ()),
        Tensor(f"{name}.trellis", "I16", (k // 16, n // 16, int(words))),
    ]


def block(config: Config, index: int, bits: Bits) -> Iterator[Tensor]:
    """The tensors of block `index`: a layer, or behind the last one a draft block."""
    text = config["text_config"]
    layers = int(text["num_hidden_layers"])
    draft = index >= layers
    prefix = f"mtp.{index - layers}" if draft else f"layers.{index}"
    hidden, head = int(text["hidden_size"]), int(text["head_dim"])
    heads, groups = int(text["num_attention_heads"]), int(text["o_groups"])
    q_rank, o_rank = int(text["q_lora_rank"]), int(text["o_lora_rank"])
    mult = int(text["hc_mult"])
    mixes = mult * (mult + 2)
    for part in ("attn", "ffn"):
        yield Tensor(f"{prefix}.hc_{part}_fn", "F32", (mixes, mult * hidden))
        yield Tensor(f"{prefix}.hc_{part}_scale", "F32", (3,))
        yield Tensor(f"{prefix}.hc_{part}_base", "F32", (mixes,))
    yield Tensor(f"{prefix}.attn_norm.weight", "BF16", (hidden,))
    yield Tensor(f"{prefix}.ffn_norm.weight", "BF16", (hidden,))
    yield from matrix(f"{prefix}.attn.wq_a", hidden, q_rank, bits)
    yield Tensor(f"{prefix}.attn.q_norm.weight", "BF16", (q_rank,))
    yield from matrix(f"{prefix}.attn.wq_b", q_rank, heads * head, bits)
    yield from matrix(f"{prefix}.attn.wkv", hidden, head, bits)
    yield Tensor(f"{prefix}.attn.kv_norm.weight", "BF16", (head,))
    yield Tensor(f"{prefix}.attn.attn_sink", "F32", (heads,))
    for group in range(groups):
        yield from matrix(f"{prefix}.attn.wo_a.slice.{group}", heads // groups * head, o_rank, bits)
    yield from matrix(f"{prefix}.attn.wo_b", groups * o_rank, hidden, bits)
    kv_source = index in text["kv_source_layer_ids"]
    if kv_source:
        yield from matrix(f"{prefix}.attn.compressor.wkv", hidden, head, bits)
        if int(text["compress_ratios"][index]) > 1:
            yield from matrix(f"{prefix}.attn.compressor.wgate", hidden, head, bits)
        yield Tensor(f"{prefix}.attn.compressor.norm.weight", "BF16", (head,))
    if index in text["index_source_layer_ids"]:
        index_heads, index_dim = int(text["index_n_heads"]), int(text["index_head_dim"])
        yield from matrix(f"{prefix}.attn.indexer.wq_b", q_rank, index_heads * index_dim, bits)
        yield Tensor(f"{prefix}.attn.indexer.weights_proj.weight", "F16", (index_heads, hidden))
        if kv_source:
            yield from matrix(f"{prefix}.attn.indexer.wk", head, index_dim, bits)
            yield Tensor(f"{prefix}.attn.indexer.k_norm.weight", "BF16", (index_dim,))
    experts = int(text["dspark_n_routed_experts" if draft else "n_routed_experts"])
    yield Tensor(f"{prefix}.ffn.gate.weight", "F16", (experts, hidden))
    # The bias is F16 in some layers and F32 in others; the engine keeps it as F32 either way.
    yield Tensor(f"{prefix}.ffn.gate.bias", "F32" if index % 2 else "F16", (experts,))
    width = int(text["moe_intermediate_size"])
    for expert in [*(f"experts.{number}" for number in range(experts)), "shared_experts"]:
        yield from matrix(f"{prefix}.ffn.{expert}.w1", hidden, width, bits)
        yield from matrix(f"{prefix}.ffn.{expert}.w2", width, hidden, bits)
        yield from matrix(f"{prefix}.ffn.{expert}.w3", hidden, width, bits)
    if index in text["engram_layer_ids"]:
        inputs = engram_columns(text) * int(text["engram_head_dim"])
        yield from matrix(f"{prefix}.engram.wkv", inputs, (mult + 1) * hidden, bits)
        yield Tensor(f"{prefix}.engram.q_weight", "F32", (mult, hidden))
        yield Tensor(f"{prefix}.engram.k_weight", "F32", (mult, hidden))


def draft_tail(config: Config, bits: Bits) -> tuple[list[Tensor], list[Tensor]]:
    """What stands beside the draft blocks: (of the first block, of the last block)."""
    text = config["text_config"]
    hidden, vocab, rank = int(text["hidden_size"]), int(text["vocab_size"]), int(text["dspark_markov_rank"])
    last = int(text["num_nextn_predict_layers"]) - 1
    taps = len(text["dspark_target_layer_ids"])
    first = [
        *matrix("mtp.0.main_proj", taps * hidden, hidden, bits),
        Tensor("mtp.0.main_norm.weight", "BF16", (hidden,)),
    ]
    return first, [
        Tensor(f"mtp.{last}.norm.weight", "BF16", (hidden,)),
        Tensor(f"mtp.{last}.markov_head.embed.weight", "BF16", (vocab, rank)),
        Tensor(f"mtp.{last}.markov_head.head.weight", "F16", (vocab, rank)),
        Tensor(f"mtp.{last}.confidence_head.proj.weight", "F16", (1, hidden + rank)),
    ]


def vision(config: Config) -> Iterator[Tensor]:
    """The vision tower and its aligner, not quantized: eight tensors a layer, ten beside them (266 in all).

    The names inside the tower are ours: no header of the real last shard has been seen.
    """
    tower = config["vision_config"]
    hidden, width = int(tower["hidden_size"]), int(tower["intermediate_size"])
    patch, ratio = int(tower["patch_size"]), int(tower["downsample_ratio"])
    model = int(config["text_config"]["hidden_size"])
    yield Tensor("vision.patch_embed.weight", "BF16", (hidden, 3, patch, patch))
    yield Tensor("vision.patch_embed.bias", "BF16", (hidden,))
    yield Tensor("vision.pre_norm.weight", "BF16", (hidden,))
    for layer in range(int(tower["num_hidden_layers"])):
        prefix = f"vision.blocks.{layer}"
        yield Tensor(f"{prefix}.norm1.weight", "BF16", (hidden,))
        yield Tensor(f"{prefix}.attn.qkv.weight", "BF16", (3 * hidden, hidden))
        yield Tensor(f"{prefix}.attn.qkv.bias", "BF16", (3 * hidden,))
        yield Tensor(f"{prefix}.attn.proj.weight", "BF16", (hidden, hidden))
        yield Tensor(f"{prefix}.norm2.weight", "BF16", (hidden,))
        yield Tensor(f"{prefix}.mlp.w1.weight", "BF16", (width, hidden))
        yield Tensor(f"{prefix}.mlp.w2.weight", "BF16", (hidden, width))
        yield Tensor(f"{prefix}.mlp.w3.weight", "BF16", (width, hidden))
    yield Tensor("vision.post_norm.weight", "BF16", (hidden,))
    merged = hidden * ratio * ratio
    yield Tensor("aligner.norm.weight", "BF16", (merged,))
    yield Tensor("aligner.fc1.weight", "BF16", (model, merged))
    yield Tensor("aligner.fc1.bias", "BF16", (model,))
    yield Tensor("aligner.fc2.weight", "BF16", (model, model))
    yield Tensor("aligner.fc2.bias", "BF16", (model,))
    yield Tensor("aligner.newline", "BF16", (model,))


def layer_groups(config: Config) -> list[list[int]]:
    """Layers of each shard but the last one: one layer a shard, and the small ones (2 bits) in pairs."""
    layers = int(config["text_config"]["num_hidden_layers"])
    if layers == 40:
        groups = [[layer] for layer in range(18)] + [[18, 19], [20, 21], [22]]
        return groups + [[layer] for layer in range(23, 40)]
    return [[layer] for layer in range(layers)]


def shards(config: Config, bits: Bits) -> list[list[Tensor]]:
    """All shards in order. The first starts with the embedding, the last holds the vision tower."""
    text = config["text_config"]
    hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    layers, drafts = int(text["num_hidden_layers"]), int(text["num_nextn_predict_layers"])
    result = [
        [tensor for layer in group for tensor in block(config, layer, bits)] for group in layer_groups(config)
    ]
    result[0].insert(0, Tensor("embed.weight", "BF16", (vocab, hidden)))
    first, tail = draft_tail(config, bits)
    result[-1] += matrix("head", hidden, vocab, bits)
    result[-1].append(Tensor("norm.weight", "BF16", (hidden,)))
    result[-1] += [*block(config, layers, bits), *first]
    last = [tensor for draft in range(1, drafts) for tensor in block(config, layers + draft, bits)]
    result.append([*last, *tail, *vision(config)])
    return result


def shard_name(number: int, count: int) -> str:
    """`model-00001-of-00039.safetensors`; numbers start at 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"
