"""The generated checkpoint: deterministic, small, and laid out as the real one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.module_utils import kit, model_lock, safetensors, split

from lab.checkpoint import __main__ as program
from lab.checkpoint import container, repos
from lab.checkpoint.config import load_config
from lab.checkpoint.inventory import Tensor, first_pack_bits, shards
from tests.unit.lab_engine.conftest import CONFIG, newest
from tests.unit.lab_engine.harness import Inputs


def headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Every tensor of a folder by name."""
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            document = json.loads(file.read(length))
        assert (
            max(entry["data_offsets"][1] for entry in document.values()) + 8 + length == path.stat().st_size
        )
        found.update(document)
    return found


def test_same_seed_same_revision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    revisions = []
    for folder, seed in (("a", "5"), ("b", "5"), ("a", "6"), ("a", "5")):
        assert program.main([str(tmp_path / folder), "--seed", seed, "--context", "2048"]) == 0
        revisions.append(
            {name: entry["revision"] for name, entry in json.loads(capsys.readouterr().out).items()}
        )
    assert revisions[0] == revisions[1] == revisions[3]
    assert all(revisions[0][name] != revisions[2][name] for name in revisions[0])
    for name, revision in revisions[0].items():
        base = tmp_path / "a" / name
        assert (base / "refs/main").read_text().strip() == revision
        assert repos.content_revision(base / revision) == revision
        assert {path.name for path in base.iterdir()} == {"refs", revision, revisions[2][name]}


def test_layout(inputs: Inputs) -> None:
    tensors = headers(inputs.model)
    size = sum(path.stat().st_size for path in inputs.model.iterdir())
    assert 5e6 < size < 30e6
    index = json.loads((inputs.model / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    names = sorted(path.name for path in inputs.model.glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-00006.safetensors" for number in range(1, 7)]
    assert {name for name, file in index["weight_map"].items() if file == names[-1]} >= {"aligner.fc1.weight"}
    matrices = [name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis")]
    for name in matrices:
        k, n, words = tensors[f"{name}.trellis"]["shape"]
        assert (k * 16 % 128, n * 16 % 128, words % 8) == (0, 0, 0)
        assert tensors[f"{name}.suh"]["shape"] == [k * 16] and tensors[f"{name}.svh"]["shape"] == [n * 16]
        assert tensors[f"{name}.mul1"] | {"data_offsets": 0} == {
            "dtype": "I32",
            "shape": [],
            "data_offsets": 0,
        }
    config = json.loads((inputs.model / "config.json").read_text())["text_config"]
    assert set(config["compress_ratios"][:5]) == {0, 1, 2}
    assert {tensors[f"{name}.trellis"]["shape"][2] / 16 for name in matrices} >= {2, 2.5, 3, 4, 5, 6, 8}
    gates = {tensors[f"layers.{layer}.ffn.gate.bias"]["dtype"] for layer in range(5)}
    assert gates == {"F16", "F32"}


def test_the_collection_finds_no_fault(inputs: Inputs) -> None:
    for shard in inputs.model.glob("*.safetensors"):
        safetensors.read_header(shard)
    assert split.audit(model_lock.from_directory(inputs.model)) == []
    tables = model_lock.engram_from_directory(inputs.engram)
    config = json.loads((inputs.model / "config.json").read_text())["text_config"]
    assert [rows for rows, _ in tables.tables.values()] == config["engram_num_embeddings"]
    assert kit.rope_rows(inputs.kit) == 8192 + 49
    manifest = kit.parse_manifest((inputs.kit / "MANIFEST").read_text())
    files = {str(path.relative_to(inputs.kit)) for path in inputs.kit.rglob("*") if path.is_file()}
    assert set(manifest) == files - {"MANIFEST"}
    assert kit.compare(manifest, {name: repos.sha256(inputs.kit / name) for name in manifest}) == []


def test_engram_tables(inputs: Inputs) -> None:
    tensors = headers(inputs.engram)
    for layer, rows in ((1, 11342), (3, 12314)):
        weight, scale = (tensors[f"layers.{layer}.engram.embed.{part}"] for part in ("weight", "scale"))
        assert (weight["dtype"], scale["dtype"]) == ("F8_E4M3", "F8_E8M0")
        assert (weight["shape"], scale["shape"]) == ([rows, 256], [rows, 8])
        assert scale["data_offsets"][0] < weight["data_offsets"][0]


def test_full_size_inventory_has_the_recorded_figures() -> None:
    plan = shards(load_config(CONFIG), first_pack_bits)
    names = [tensor.name for tensors in plan for tensor in tensors]
    matrices = sum(name.endswith(".trellis") for name in names)
    assert (len(plan), matrices, len(names)) == (39, 47_900, 192_452)
    assert len(names) - 4 * matrices == 852
    sizes = [sum(tensor.nbytes for tensor in tensors) + len(container.header(tensors)[0]) for tensors in plan]
    # Dtype of the gate bias (768 bytes a layer) and length of the names are what may differ, and the names
    # inside the vision tower are ours.
    recorded = json.loads((CONFIG.parent / "recorded-shard-sizes.json").read_text())
    differences = [abs(size - real) for size, real in zip(sizes, recorded, strict=True)]
    assert max(differences[:-1]) < 2000
    assert differences[-1] < 100_000


def test_matrices_are_whole_blocks() -> None:
    from lab.checkpoint.inventory import lab_bits, matrix

    with pytest.raises(ValueError, match="multiple of 128"):
        matrix("x", 128, 64, lab_bits)


def test_contents_are_finite() -> None:
    half = container.content(Tensor("a", "F16", (4096,)), "s")
    assert all(0 < abs(value) < 1 for value in struct.unpack("<4096e", half))
    single = container.content(Tensor("a", "F32", (4096,)), "s")
    assert all(0 < abs(value) < 1 for value in struct.unpack("<4096f", single))
    assert not {0x7F, 0xFF} & set(container.content(Tensor("a", "F8_E4M3", (4096,)), "s"))


def test_the_lab_s_inventory_pins_what_is_generated(hub_root: Path) -> None:
    path = Path(__file__).resolve().parents[3] / "inventory/lab/group_vars/all.yml"
    pinned = yaml.safe_load(path.read_text())
    for prefix, repo in (("model", repos.CHECKPOINT), ("engram", repos.ORIGINAL), ("kit", repos.KIT)):
        assert pinned[f"sparkfleet_{prefix}_repo"] == repo
        assert pinned[f"sparkfleet_{prefix}_revision"] == newest(hub_root, repo).name
