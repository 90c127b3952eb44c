"""Rank files, token map and kit, made by the lab engine's own tools from a generated checkpoint."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import kit, rank_file, tree
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError

from .conftest import ROOT, run_module

ENGINE = ROOT / "lab/engine/context"
TOOL = ENGINE / "bin/tf-dsv41-rank-cache"


def process(argv: list[str]) -> subprocess.CompletedProcess[bytes]:
    """A tool of the lab engine, where the image has it on PATH."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ENGINE / "lib"), "LAB_ENGINE_SHAPES": "any"}
    return subprocess.run([sys.executable, *argv], capture_output=True, check=False, env=environment)


@pytest.fixture
def model(repos: dict[str, Path]) -> Path:
    return repos["lab/DeepSeek-V4.1-Flash-1017-EXL3"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Containers become processes: the paths of the binds take the place of the paths inside."""
    module = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.rank_inputs")
    seen: list[list[str]] = []

    def run(
        _self: Any, _purpose: str, argv: list[str], binds: list[str], hear: Any = None
    ) -> tuple[int, str, str]:
        paths = {bind.split(":")[1]: bind.split(":")[0] for bind in binds}
        words = []
        for word in argv:
            inside = next((path for path in paths if word == path or word.startswith(f"{path}/")), "")
            words.append(paths[inside] + word[len(inside) :] if inside else word)
        seen.append(argv)
        script = str(ENGINE / "tools/make_token_map.py") if words[0] == "python3" else str(TOOL)
        done = process([script, *(words[2:] if words[0] == "python3" else words[1:])])
        if hear is not None:
            hear(1, done.stdout)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    monkeypatch.setattr(module.Tools, "run", run)
    monkeypatch.setattr(module.Tools, "has_image", lambda _self: True)
    monkeypatch.setattr(module, "available_memory", lambda: 8 << 30)
    yield seen


def planned(model: Path, rank: int) -> dict[str, Any]:
    """What the plan says: the name that the index gives."""
    index = process([str(TOOL), str(model), "/nowhere", str(rank), "2", "--index-only"]).stdout
    return {"rank": rank, "file_name": rank_file.index_name(index, rank, 2)}


def inputs(
    model: Path, data: Path, ranks: list[dict[str, Any]], check: bool = False, **args: Any
) -> dict[str, Any]:
    given = {
        "ranks": [{"root": str(data / "rank-files/v1"), **one} for one in ranks],
        "variant": "v1",
        "model_dir": str(model),
        "token_map": str(data / "token-map/dsv41_token_map.json"),
        "data_dir": str(data),
        "reserve_bytes": 0,
        "image": "lab",
        **args,
    }
    return run_module("rank_inputs", given, check)


def test_files_are_predicted_made_and_then_nothing(
    model: Path, tmp_path: Path, calls: list[list[str]]
) -> None:
    ranks = [planned(model, 0), planned(model, 1)]
    predicted = inputs(model, tmp_path, ranks, check=True)
    assert (predicted["changed"], predicted["rank_needed"]) == (True, True)
    assert [words[-1] for words in calls] == ["--index-only"] * 2, "names alone are asked"
    assert not (tmp_path / "rank-files").exists()
    made = inputs(model, tmp_path, ranks)
    assert made["changed"], made
    for item, found in zip(ranks, made["ranks"], strict=True):
        path = Path(found["file"])
        assert path.name == item["file_name"]
        assert [one.name for one in path.parent.iterdir()] == [item["file_name"]]
        assert found["files"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert rank_file.check_frame(path) > 0
    assert made["ranks"][0]["path"] != made["ranks"][1]["path"]
    count = len(calls)
    again = inputs(model, tmp_path, ranks)
    assert (again["changed"], again["needed"], len(calls)) == (False, False, count)


def test_a_name_that_is_not_the_plans_is_refused_with_both(
    model: Path, tmp_path: Path, calls: list[list[str]]
) -> None:
    wrong = {"rank": 0, "file_name": "rank0of2-" + "0" * 20 + ".bin"}
    predicted = inputs(model, tmp_path, [wrong], check=True)
    answer = inputs(model, tmp_path, [wrong])
    assert predicted["failed"] and answer["failed"]
    assert answer["msg"] == predicted["msg"]
    assert planned(model, 0)["file_name"] in answer["msg"]
    assert wrong["file_name"] in answer["msg"]
    assert not list((tmp_path / "rank-files").rglob("*.bin"))


def test_another_variant_never_takes_this_ones_file(
    model: Path, tmp_path: Path, calls: list[list[str]]
) -> None:
    item = planned(model, 0)
    inputs(model, tmp_path, [item])
    root = tmp_path / "rank-files/v1"
    other = inputs(model, tmp_path, [{**item, "root": str(root)}], state="compared", variant="ablit")
    assert not other["ranks"][0]["present"]
    assert "other weights" in other["ranks"][0]["why"]


def test_a_partial_and_a_damaged_file_are_made_anew(
    model: Path, tmp_path: Path, calls: list[list[str]]
) -> None:
    item = planned(model, 0)
    folder = tmp_path / "rank-files/v1" / rank_file.parse_name(item["file_name"]).index
    stale = tree.partial_path(folder)
    stale.mkdir(parents=True)
    (stale / ".rank0of2.partial").write_bytes(b"left by a dead run")
    (stale / item["file_name"]).write_bytes(b"")
    assert inputs(model, tmp_path, [item])["changed"]
    assert not stale.exists()
    path = folder / item["file_name"]
    os.truncate(path, path.stat().st_size - 1)
    looked = inputs(model, tmp_path, [item], state="compared")
    assert not looked["ranks"][0]["present"]
    assert inputs(model, tmp_path, [item])["changed"]
    assert rank_file.check_frame(path) > 0


def test_too_little_memory_is_refused_before_the_tool_writes(
    model: Path, tmp_path: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.rank_inputs")
    monkeypatch.setattr(module, "available_memory", lambda: 3 << 30)
    answer = inputs(model, tmp_path, [planned(model, 0)])
    assert "needs 5.00 GiB of memory, 3.00 GiB are available" in answer["msg"]


def test_the_tools_refusal_is_given_in_words(model: Path, tmp_path: Path, calls: list[list[str]]) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-5])
    answer = inputs(broken, tmp_path, [planned(model, 0)])
    assert "BadSafetensors" in answer["msg"]
    assert "rehash" in answer["msg"]


def test_what_was_made_for_another_node_is_removed(
    model: Path, tmp_path: Path, calls: list[list[str]]
) -> None:
    item = {**planned(model, 1), "root": str(tmp_path / "transfer/rank-files-v1")}
    inputs(model, tmp_path, [item])
    answer = inputs(model, tmp_path, [item], state="released")
    assert not answer["changed"]
    assert not (tmp_path / "transfer").exists()


@pytest.mark.parametrize(
    ("stderr", "code", "text"),
    [
        ("error: FileNotFound\n", 1, "config.json is absent"),
        (
            "error: FileNotFound\n/build/src/main.zig:12:5: 0x1 in main\n    try x();\n",
            1,
            "config.json is absent",
        ),
        ("error: /m/config.json: codebook is mcg\nerror: UnsupportedQuantization\n", 1, "codebook is mcg"),
        ("layers.4.hc_attn_fn|torch.float32: MissingTensor\n", 1, "layers.4.hc_attn_fn"),
        ("WORLD is 1, 2 or 4\nusage: x\n", 2, "refused its arguments: WORLD"),
        ("thread 1 panic: index out of bounds\n", 134, "panicked"),
        ("", 143, "exit code 143"),
    ],
)
def test_the_tools_errors_are_told_apart(stderr: str, code: int, text: str) -> None:
    assert text in rank_file.explain(stderr, code)


@pytest.mark.parametrize(
    "name", ["rank0of2-x.bin", "rank0of2-" + "0" * 20 + ".bin.tmp", "../rank0of2-" + "0" * 20 + ".bin"]
)
def test_only_a_rank_files_name_is_one(name: str) -> None:
    with pytest.raises(TreeError, match="not the name"):
        rank_file.parse_name(name)


def test_a_frame_that_lies_is_refused(tmp_path: Path) -> None:
    def written(
        rows: list[Any], data: bytes, length: int | None = None, magic: bytes = rank_file.MAGIC
    ) -> Path:
        index = json.dumps(rows).encode()
        path = tmp_path / rank_file.index_name(index, 0, 2)
        end = (len(data) if length is None else length).to_bytes(8, "little") + magic
        path.write_bytes(data + index + end)
        return path

    good = written([["a|None", "uint8", [3], 0, 3], ["b|None", "uint8", [2], 3, 2]], b"12345")
    assert rank_file.check_frame(good) == 5
    with pytest.raises(TreeError, match="index belongs to"):
        rank_file.check_frame(good.rename(tmp_path / f"rank0of2-{'0' * 20}.bin"))
    with pytest.raises(TreeError, match="begins at 4 instead of 3"):
        rank_file.check_frame(
            written([["a|None", "uint8", [3], 0, 3], ["b|None", "uint8", [1], 4, 1]], b"12345")
        )
    with pytest.raises(TreeError, match="index ends at 3, the data at 5"):
        rank_file.check_frame(written([["a|None", "uint8", [3], 0, 3]], b"12345"))
    with pytest.raises(TreeError, match="BadRankCache"):
        rank_file.check_frame(written([["a|None", "uint8", [5], 0, 5]], b"12345", magic=b"TFDSRK02"))


@pytest.fixture
def a_kit(repos: dict[str, Path]) -> tuple[Path, tree.Proof]:
    folder = repos["lab/kit"] / "kit"
    files = tree.parse_files(
        {
            "name": path.relative_to(folder).as_posix(),
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.rglob("*")
        if path.is_file()
    )
    proof = tree.Proof()
    tree.prove(folder, tree.inspect(folder, files, proof), proof)
    return folder, proof


def test_a_kit_is_judged_by_its_manifest_and_its_tables(a_kit: tuple[Path, tree.Proof]) -> None:
    folder, proof = a_kit
    rows = kit.check(folder, proof, 8192)
    with pytest.raises(TreeError, match=rf"have {rows} rows, the context needs 524305 \(ShortRopeTable\)"):
        kit.check(folder, proof, 524288 + 17)
    absent = proof.files.pop("engram.json")
    with pytest.raises(TreeError, match=r"engram\.json is absent.*Name a revision"):
        kit.check(folder, proof, 8192)
    proof.files["engram.json"] = absent


@pytest.mark.parametrize("name", kit.GENERATED)
def test_a_kit_from_git_is_refused_by_the_name_of_what_it_lacks(
    a_kit: tuple[Path, tree.Proof], name: str
) -> None:
    folder, proof = a_kit
    kit.check(folder, proof, 8192)
    del proof.files[name]
    with pytest.raises(TreeError, match=rf"{re.escape(name)}.*rank_files makes them.*a complete copy"):
        kit.check(folder, proof, 8192)


@pytest.mark.parametrize("text", ["", "nonsense", f"{'0' * 64}  ../x"])
def test_a_manifest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(TreeError):
        kit.parse_manifest(text)
