"""The repositories that a replica is fetched from: checkpoint, original (Engram shards), kit, and an overlay."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.checkpoint import container, tokenizer
from lab.checkpoint.config import Config, engram_primes, lab_config
from lab.checkpoint.inventory import Bits, Tensor, lab_bits, shard_name, shards
from lab.checkpoint.kit_tools import make_bias_vl, make_rope

CHECKPOINT = "lab/DeepSeek-V4.1-Flash-1017-EXL3"
ORIGINAL = "lab/DeepSeek-V4.1-Flash-1017"
KIT = "lab/kit"
#: The same kit as git has it: without what its scripts make.
GIT_KIT = "lab/kit-from-git"
OVERLAY = "lab/keys-DeepSeek-V4.1-Flash-1017-Abliterated"
#: Tensors that the overlay has other weights for.
OVERLAID = ".attn.wo_b."
ENGRAM_SHARDS = (47, 48)
ORIGINAL_SHARDS = 48
#: Shards of the original release that hold the routing biases of image tokens: of the blocks, of the drafts.
BIAS_SHARDS = (2, 46)
# Rows that the engine wants beyond the context: the widest round (48 rows, 16 by default) and one more.
ROPE_EXTRA_ROWS = 49


@dataclass(frozen=True)
class Repo:
    """One repository as written: where it is and which revision its contents have."""

    name: str
    revision: str
    path: Path
    nbytes: int


def sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def content_revision(folder: Path) -> str:
    """40 hex digits over every path and content: the same files always have the same revision."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{sha256(path)}\n".encode())
    return digest.hexdigest()[:40]


def write_index(folder: Path, files: dict[str, list[Tensor]]) -> None:
    """model.safetensors.index.json over the given shards."""
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(document, indent=2) + "\n", encoding="utf-8"
    )


def write_checkpoint(folder: Path, config: Config, vocab: list[str], seed: str) -> None:
    """Config, tokenizer, index and the shards of the quantized model."""
    plan = shards(config, lab_bits)
    files = {shard_name(number, len(plan)): tensors for number, tensors in enumerate(plan, 1)}
    for name, tensors in files.items():
        container.write(folder / name, tensors, seed)
    write_index(folder, files)
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    matrices = sorted(
        tensor.name.removesuffix(".trellis")
        for tensors in plan
        for tensor in tensors
        if tensor.name.endswith(".trellis")
    )
    storage = {name: {"bits_per_weight": float(lab_bits(name)), "quant_format": "exl3"} for name in matrices}
    document = {**config["quantization_config"], "tensor_storage": storage}
    (folder / "quantization_config.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    tokenizer.write(folder, vocab, config)
    (folder / "README.md").write_text(
        "A generated stand-in with made-up weights: the layout of the real checkpoint and nothing else.\n",
        encoding="utf-8",
    )


def write_original(folder: Path, config: Config, seed: str) -> None:
    """Shards of the original release: with the Engram tables (scale before weight, as there), with routing biases."""
    text = config["text_config"]
    files: dict[str, list[Tensor]] = {}
    hidden, mult = int(text["hidden_size"]), int(text["hc_mult"])
    for number, layer, rows in zip(
        ENGRAM_SHARDS, text["engram_layer_ids"], text["engram_num_embeddings"], strict=True
    ):
        prefix = f"layers.{layer}.engram"
        files[shard_name(number, ORIGINAL_SHARDS)] = [
            Tensor(f"{prefix}.embed.scale", "F8_E8M0", (rows, 8)),
            Tensor(f"{prefix}.embed.weight", "F8_E4M3", (rows, 256)),
            Tensor(f"{prefix}.q_weight", "F32", (mult, hidden)),
            Tensor(f"{prefix}.k_weight", "F32", (mult, hidden)),
        ]
    experts = int(text["n_routed_experts"])
    blocks = [
        Tensor(f"layers.{layer}.ffn.gate.{part}", "F32", (experts,))
        for layer in range(int(text["num_hidden_layers"]))
        for part in ("bias", "bias_vl")
    ]
    drafts = [
        Tensor(f"mtp.{draft}.ffn.gate.bias_vl", "F32", (int(text["dspark_n_routed_experts"]),))
        for draft in range(int(text["num_nextn_predict_layers"]))
    ]
    for number, tensors in zip(BIAS_SHARDS, (blocks, drafts), strict=True):
        files[shard_name(number, ORIGINAL_SHARDS)] = tensors
    for name, tensors in files.items():
        container.write(folder / name, tensors, seed)
    write_index(folder, files)
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def placeholder(name: str, seed: str) -> bytes:
    """A file in the place of a compiled kernel: an ELF magic number and a few deterministic bytes."""
    return b"\x7fELF" + hashlib.sha256(f"{seed}:{name}".encode()).digest() * 8


def write_kit(
    folder: Path, config: Config, seed: str, context: int, *, original: Path, generated: bool
) -> None:
    """The kernel kit in its folder `kit/`, with a MANIFEST of sha256 lines over every file.

    `generated`: with the files that its own scripts make, which a copy of its git repository lacks.
    """
    kit = folder / "kit"
    text = config["text_config"]
    for sub in ("aot/cubins", "cubins", "vision"):
        (kit / sub).mkdir(parents=True)
    kernels = {}
    for name in ("attn_window", "hc_mix", "indexer_topk", "kv_compress", "router_top6"):
        cubin = placeholder(name, seed)
        (kit / "aot/cubins" / f"{name}.cubin").write_bytes(cubin)
        kernels[name] = {"cubin": f"cubins/{name}.cubin", "sha256": hashlib.sha256(cubin).hexdigest()}
    (kit / "aot/aot.json").write_text(json.dumps({"sm": 121, "kernels": kernels}, indent=1) + "\n")
    for name in ("linear", "linear_grouped", "experts", "experts_cb"):
        (kit / "cubins" / f"{name}.cubin").write_bytes(placeholder(name, seed))
    tables = {
        str(layer): {
            "multipliers": [
                int.from_bytes(hashlib.sha256(f"{seed}:{layer}:{order}".encode()).digest()[:4]) | 1
                for order in range(int(text["engram_max_ngram_size"]))
            ],
            "primes": engram_primes(text, table),
        }
        for table, layer in enumerate(text["engram_layer_ids"])
    }
    (kit / "engram.json").write_text(json.dumps(tables, indent=1) + "\n")
    rows = context + ROPE_EXTRA_ROWS
    document: dict[str, int | str] = {"rows": rows, "half": int(text["qk_rope_head_dim"]) // 2}
    made = [kit / "vision/gate_bias_vl.safetensors"]
    for name, data in make_rope.tables(config, rows).items():
        made.append(kit / name)
        made[-1].write_bytes(data)
        document[name] = hashlib.sha256(data).hexdigest()
    (kit / "rope.json").write_text(json.dumps(document, indent=1) + "\n")
    (kit / "tools").mkdir()
    for script in (make_rope, make_bias_vl):
        shutil.copy(str(script.__file__), kit / "tools")
    (kit / "vision/torch_fmha_sm120.cubin").write_bytes(placeholder("torch_fmha_sm120", seed))
    command = [sys.executable, str(make_bias_vl.__file__), str(original), str(made[0])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    paths = sorted(path for path in kit.rglob("*") if path.is_file())
    lines = "".join(f"{sha256(path)}  {path.relative_to(kit)}\n" for path in paths)
    (kit / "MANIFEST").write_text(lines)
    for path in [] if generated else made:
        path.unlink()


def write_overlay(folder: Path, config: Config, seed: str) -> None:
    """Other `wo_b` weights in both forms of such overlays: a rewritten shard, and a file of the tensors alone."""
    plan = shards(config, lab_bits)
    alone = [tensor for tensor in plan[0] if OVERLAID in tensor.name]
    container.write(folder / "keys_wo_b.safetensors", alone, f"{seed}:overlay")
    name = shard_name(2, len(plan))
    with (folder / name).open("wb") as out:
        out.write(container.header(plan[1])[0])
        for tensor in plan[1]:
            changed = OVERLAID in tensor.name
            out.write(container.content(tensor, f"{seed}:overlay" if changed else seed))
    (folder / "README.md").write_text("A generated overlay with made-up weights.\n", encoding="utf-8")


def publish(root: Path, name: str, fill: Callable[[Path], None]) -> Repo:
    """Fill a new folder and put it at ROOT/OWNER/NAME/REVISION, with `refs/main` pointing at it."""
    base = root / name
    base.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=base))
    fill(scratch)
    scratch.chmod(0o755)
    revision = content_revision(scratch)
    target = base / revision
    if target.exists():
        shutil.rmtree(scratch)
    else:
        scratch.rename(target)
    (base / "refs").mkdir(exist_ok=True)
    (base / "refs/main").write_text(revision + "\n")
    nbytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return Repo(name, revision, target, nbytes)


def generate(root: Path, seed: int, context: int) -> list[Repo]:
    """Write the repositories under `root`; a second call with the same arguments writes nothing new."""
    vocab_size = int(lab_config(0)["text_config"]["vocab_size"])
    vocab = tokenizer.vocabulary(vocab_size)
    config = lab_config(tokenizer.compressed_size(vocab))
    text = str(seed)
    original = publish(root, ORIGINAL, lambda folder: write_original(folder, config, text))
    kit = functools.partial(write_kit, config=config, seed=text, context=context, original=original.path)
    return [
        publish(root, CHECKPOINT, lambda folder: write_checkpoint(folder, config, vocab, text)),
        original,
        publish(root, KIT, functools.partial(kit, generated=True)),
        publish(root, GIT_KIT, functools.partial(kit, generated=False)),
        publish(root, OVERLAY, lambda folder: write_overlay(folder, config, text)),
    ]


def full_headers(folder: Path, config: Config, bits: Bits) -> int:
    """A full-size checkpoint as sparse files that hold headers only, for tools that read no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = shards(config, bits)
    total = 0
    for number, tensors in enumerate(plan, 1):
        total += container.write_sparse(folder / shard_name(number, len(plan)), tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    return total
