"""The command: its exit codes, its JSON, and that it needs nothing but Python."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import calibration
from ansible_collections.sparkfleet.serving.plugins.module_utils import model_lock as ml

from tests.unit.plan.conftest import ROOT
from tests.unit.plan.small import Small, config, inventories, small_lock
from tools.plan_fullsize import write_sparse

TOOL = ROOT / "tools" / "sparkplan"


def sparkplan(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", str(TOOL), *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "m"
    write_sparse(path, inventories(Small()), json.dumps(config(Small())).encode())
    return path


def plan(*arguments: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(sparkplan(*arguments, "--json").stdout)
    return result


def test_json_holds_the_contract(checkpoint: Path) -> None:
    found = plan(checkpoint, "--context", 2048, "--mem-available-gib", "100,101")
    assert set(found["checkpoint"]) >= {"shards", "tensors", "exl3_matrices", "file_bytes", "data_bytes"}
    for row in found["ranks"]:
        assert set(row) >= {
            "rank",
            "entries",
            "data_bytes",
            "file_bytes",
            "file_name",
            "classes",
            "index_sha256",
        }
        assert sum(row["classes"].values()) == row["data_bytes"]
    nodes = found["budget"]["nodes"]
    wanted = {"rank", "available_gib", "load_gib", "idle_after_gib", "worst_gib", "required_available_gib"}
    assert all(set(node) >= wanted for node in nodes)
    assert [node["available_gib"] for node in nodes] == [100.0, 101.0]
    keys = {"kv_bytes", "kv_rows", "rope_bytes", "largest_context", "verdict", "reason", "levers"}
    assert set(found["budget"]) >= keys
    assert len(found["disk"]) == 2
    assert len(found["digest"]) == 64


def test_vllm_pool_of_the_published_command() -> None:
    lock = ROOT / "models" / "deepseek-v41-flash-exl3-2.9bpw.json"
    arguments = [lock, "--context", 524_288, "--vllm", "3029185024,4096", "--mem-available-gib", 117]
    done = sparkplan(*arguments)
    assert (
        "1,319,693 tokens in 65,737 blocks of 46,080 bytes, 2.52 requests of 524,288 at once" in done.stdout
    )
    assert "largest context 1,048,576" in done.stdout
    small = plan(lock, "--context", 1 << 20, "--vllm", "1500000000,4096,3")["budget"]
    assert small["verdict"] == "does_not_fit"
    assert "one request of 1048576 tokens needs" in small["reason"]
    assert small["largest_context"] < 1 << 20


def test_digest_tells_what_is_launched_and_not_live_memory(checkpoint: Path) -> None:
    base = plan(checkpoint, "--context", 2048)["digest"]
    assert plan(checkpoint, "--context", 2048, "--mem-available-gib", 90)["digest"] == base
    for change in (
        ["--context", 4096],
        ["--parallel", 2],
        ["--no-drafts"],
        ["--no-vision"],
        ["--chunk", 1024],
    ):
        arguments = change if change[0] == "--context" else ["--context", 2048, *change]
        assert plan(checkpoint, *arguments)["digest"] != base, change


def test_exit_codes(checkpoint: Path) -> None:
    assert sparkplan(checkpoint, "--context", 2048, "--mem-available-gib", 100).returncode == 0
    assert sparkplan(checkpoint, "--context", 2048, "--mem-available-gib", 13).returncode == 0
    too_small = sparkplan(checkpoint, "--context", 2048, "--mem-available-gib", 3)
    assert too_small.returncode == 1
    assert "does not fit: rank 0" in too_small.stdout
    assert sparkplan(checkpoint).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--context", 2048, "--world", 3],
        ["--context", 2048, "--engine", "none"],
        ["--context", 99_999_999],
        ["--context", 2048, "--mem-available-gib", "a,b"],
        ["--context", 2048, "--calibration", "/nowhere"],
        ["--context", 2048, "--index", 7],
        ["--context", 2048, "--vllm", "5"],
        ["--context", 2048, "--vllm", "5,x"],
        ["--context", 2048, "--vllm", "0,1"],
    ],
)
def test_bad_input_is_one_line_and_2(checkpoint: Path, arguments: list[object]) -> None:
    done = sparkplan(checkpoint, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("sparkplan: ")
    assert done.stderr.count("\n") == 1


def test_truncated_shard_is_named(checkpoint: Path, tmp_path: Path) -> None:
    write_sparse(tmp_path / "m", inventories(Small()), json.dumps(config(Small())).encode())
    shard = tmp_path / "m" / "model-00002-of-00002.safetensors"
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    done = sparkplan(tmp_path / "m", "--context", 2048)
    assert done.returncode == 2
    assert "model-00002-of-00002.safetensors: is shorter than its header says; found" in done.stderr
    assert sparkplan(tmp_path / "nowhere", "--context", 2048).returncode == 2


def test_a_lock_file_gives_the_same_plan(checkpoint: Path, tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    first = plan(checkpoint, "--context", 2048, "--write-lock", lock)
    assert plan(lock, "--context", 2048)["digest"] == first["digest"]
    assert ml.load(lock).digest == small_lock().digest


def test_index_table_and_tensor_list(checkpoint: Path, tmp_path: Path) -> None:
    index = sparkplan(checkpoint, "--context", 2048, "--index", 1).stdout
    row = plan(checkpoint, "--context", 2048)["ranks"][1]
    assert len(index) == row["index_bytes"]
    assert len(json.loads(index)) == row["entries"]
    table = sparkplan(checkpoint, "--context", 2048, "--tensors", tmp_path / "t.tsv").stdout
    assert row["file_name"] in table
    assert "* assumed" in table
    lines = (tmp_path / "t.tsv").read_text().splitlines()
    assert lines[0] == "rank\ttensor\tmode\tcolumns\trows\tbytes\tclass"
    assert "1\thead\tcolumn\t256:512\t\t" in "\n".join(lines)


def test_picture(checkpoint: Path, tmp_path: Path) -> None:
    sparkplan(checkpoint, "--context", 2048, "--svg", tmp_path / "p.svg")
    root = ET.parse(tmp_path / "p.svg").getroot()  # noqa: S314 (our own file)
    text = " ".join("".join(element.itertext()) for element in root.iter())
    assert "redline" in text
    assert "rank 1" in text


def test_shipped_lock_is_the_reconstructed_pack_and_marked(full_lock: ml.ModelLock) -> None:
    shipped = ml.load(ROOT / "models" / "deepseek-v41-flash-exl3-2.9bpw.json")
    assert shipped.source["kind"] == "reconstructed"
    assert ml.dumps(shipped) == ml.dumps(full_lock)


def test_a_calibration_is_taken_from_the_replicas_own_file(checkpoint: Path, tmp_path: Path) -> None:
    """The file that the head of a replica keeps; of another plan it counts for nothing, and that is told."""
    base = [checkpoint, "--context", 2048, "--mem-available-gib", 100]
    kept = tmp_path / "pair-1.json"
    ranks = {"0": {"overhead": 3.5}, "1": {"overhead": 3.25}}
    kept.write_text(
        json.dumps(
            {"format": calibration.FORMAT, "plan": plan(*base)["digest"], "build": "b", "ranks": ranks}
        )
    )
    found = plan(*base, "--calibration", kept)
    assert [node["terms_gib"]["runtime"] for node in found["budget"]["nodes"]] == [3.5, 3.25]
    assert "as a first start of this replica measured them" in sparkplan(*base, "--calibration", kept).stdout
    other = plan(checkpoint, "--context", 4096, "--calibration", kept)
    assert not any(node["calibrated"] for node in other["budget"]["nodes"])
    assert "another model, engine or settings" in " ".join(other["warnings"])
    kept.write_text(json.dumps({"0": {"overhead": 3.5}}))
    plain = plan(*base, "--calibration", kept)
    assert [node["calibrated"] for node in plain["budget"]["nodes"]] == [True, False]
    kept.write_text('{"0": {"overhead": "much"}}')
    refused = sparkplan(*base, "--calibration", kept)
    assert refused.returncode == 2 and "pair-1.json: rank 0: is no set of constants" in refused.stderr


def test_rope_rows_bound_the_context(checkpoint: Path) -> None:
    base = [checkpoint, "--mem-available-gib", 100, "--rope-rows", 4096 + 17]
    assert plan(*base, "--context", 4096)["budget"]["largest_context"] == 4096
    refused = sparkplan(*base, "--context", 6144)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "ShortRopeTable" in refused.stderr and "wanted at most 4096" in refused.stderr
