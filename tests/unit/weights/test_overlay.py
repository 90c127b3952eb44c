"""An overlay over a checkpoint: merged by names, apart on the disk, and what the engine really reads of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import model_lock, overlay, rank_writer, tree
from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import LockError

from lab.checkpoint import repos as lab_repos

from .conftest import ROOT, Hub, RunModule, run_module

TOOL = ROOT / "lab/engine/context/bin/tf-dsv41-rank-cache"


@pytest.fixture
def published(hub: Hub, repos: dict[str, Path]) -> Hub:
    """The Hub stand-in with checkpoint and overlay."""
    for name in (lab_repos.CHECKPOINT, lab_repos.OVERLAY):
        shutil.copytree(repos[name].parent, hub.root / name)
    return hub


def plan(
    hub: Hub, repos: dict[str, Path], data: Path, *, on: bool, check: bool = False, token: str = ""
) -> dict[str, Any]:
    def source(name: str) -> dict[str, Any]:
        return {"endpoint": hub.endpoint, "repo": name, "revision": repos[name].name, "token": token}

    given: dict[str, Any] = {
        "hub": source(lab_repos.CHECKPOINT),
        "lock_cache": str(data / "locks/base.json"),
        "context": 4096,
        "mem_total_gib": 119.0,
        "mem_available_gib": [110.0, 110.0],
    }
    if on:
        given["overlay"] = {**source(lab_repos.OVERLAY), "lock_cache": str(data / "locks/overlay.json")}
    return run_module("tensor_plan", given, check)


def bring(
    hub: Hub, repos: dict[str, Path], fetch: RunModule, data: Path, planned: dict[str, Any]
) -> dict[str, Any]:
    """What the checkpoint role does on rank 0."""
    base, over = (
        data / "models" / name / repos[name].name for name in (lab_repos.CHECKPOINT, lab_repos.OVERLAY)
    )
    changed = False
    fetched = {}
    for layer, root, name in (("base", base, lab_repos.CHECKPOINT), ("overlay", over, lab_repos.OVERLAY)):
        fetched[layer] = fetch(
            hub,
            root,
            repo=name,
            revision=repos[name].name,
            files=planned["overlay"][layer],
            data_dir=str(data),
        )
        assert fetched[layer].get("complete"), fetched[layer]
        changed = changed or fetched[layer]["changed"]
    view = run_module(
        "tree_view",
        {
            "dest": f"{base}-{over.name}",
            "data_dir": str(data),
            "layers": {
                "base": {"path": str(base), "files": fetched["base"]["files"]},
                "overlay": {"path": str(over), "files": fetched["overlay"]["files"]},
            },
            "links": planned["overlay"]["links"],
        },
    )
    return {"base": base, "overlay": over, "view": view, "changed": changed or view.get("changed")}


def rank_bytes(model: Path, out: Path) -> tuple[str, bytes]:
    done = subprocess.run(
        [sys.executable, str(TOOL), str(model), str(out), "0", "2"],
        capture_output=True,
        check=False,
        env={**os.environ, "LAB_ENGINE_SHAPES": "any"},
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.bin")
    return path.name, path.read_bytes()


def test_base_and_overlay_stay_apart_and_the_engine_reads_the_overlay(
    published: Hub, repos: dict[str, Path], fetch: RunModule, tmp_path: Path
) -> None:
    plain = plan(published, repos, tmp_path, on=False)
    merged = plan(published, repos, tmp_path, on=True)
    assert plain["lock"]["content_digest"] != merged["lock"]["content_digest"]
    done = bring(published, repos, fetch, tmp_path, merged)
    view = Path(done["view"]["path"])
    assert done["view"]["complete"], done["view"]
    names = sorted(path.name for path in view.glob("*.safetensors"))
    assert names[-1] == "zz-overlay-keys_wo_b.safetensors"
    shard = next(name for name in names if "00002-of" in name)
    assert (view / shard).samefile(done["overlay"] / shard)
    assert not (done["base"] / names[-1]).exists() and not (done["overlay"] / "config.json").exists()
    assert model_lock.from_directory(view).digest == merged["lock"]["digest"]
    # One layout and one name, two sets of weights: the tool, our writer, and every byte of what was laid over.
    base_name, base_bytes = rank_bytes(done["base"], tmp_path / "base-out")
    over_name, over_bytes = rank_bytes(view, tmp_path / "over-out")
    assert base_name == over_name == merged["plan"]["ranks"][0]["file_name"]
    layout, sources = rank_writer.plan_rank(view, 2, 0, ())
    (tmp_path / "ours").mkdir()
    rank_writer.write_rank_file(view, tmp_path / "ours", layout, sources)
    assert (tmp_path / "ours" / over_name).read_bytes() == over_bytes
    changed = {
        row[0].split("|")[0]
        for row in json.loads(layout.index_text)
        if base_bytes[row[3] : row[3] + row[4]] != over_bytes[row[3] : row[3] + row[4]]
    }
    assert changed and all(name.endswith("attn.wo_b") for name in changed)
    assert len(changed) > 1, "both forms of the overlay"


def test_switching_back_and_forth_moves_nothing(
    published: Hub, repos: dict[str, Path], fetch: RunModule, tmp_path: Path
) -> None:
    merged = plan(published, repos, tmp_path, on=True)
    assert bring(published, repos, fetch, tmp_path, merged)["changed"]
    before = published.stats()["bytes"]
    assert plan(published, repos, tmp_path, on=False)["changed"] is False
    again = plan(published, repos, tmp_path, on=True)
    assert again["changed"] is False
    assert again["plan"] == merged["plan"]
    assert bring(published, repos, fetch, tmp_path, again)["changed"] is False
    assert published.stats()["bytes"] == before


@pytest.mark.field("B64")
def test_a_repaired_layer_is_linked_anew(
    published: Hub, repos: dict[str, Path], fetch: RunModule, tmp_path: Path
) -> None:
    merged = plan(published, repos, tmp_path, on=True)
    first = bring(published, repos, fetch, tmp_path, merged)
    view = Path(first["view"]["path"])
    shard = sorted(first["base"].glob("*.safetensors"))[0]
    good = (view / shard.name).read_bytes()
    with shard.open("r+b") as damaged:
        damaged.write(b"X")
    assert (view / shard.name).read_bytes() != good, "one inode"
    assert bring(published, repos, fetch, tmp_path, merged)["changed"]
    assert (view / shard.name).read_bytes() == good
    assert (view / shard.name).samefile(shard)
    proof = tree.read_proof(tree.proof_path(view))
    report = tree.inspect(view, proof.listing, proof)
    assert report.complete and not report.foreign


def test_a_foreign_shard_in_the_view_is_refused_and_stays(
    published: Hub, repos: dict[str, Path], fetch: RunModule, tmp_path: Path
) -> None:
    merged = plan(published, repos, tmp_path, on=True)
    view = Path(bring(published, repos, fetch, tmp_path, merged)["view"]["path"])
    stray = view / "zzz.safetensors"
    stray.write_bytes(b"mine")
    answer = bring(published, repos, fetch, tmp_path, merged)["view"]
    assert "zzz.safetensors" in answer["msg"]
    assert stray.read_bytes() == b"mine"


def test_layers_that_are_not_proven_are_no_view(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    spec = {
        "name": "config.json",
        "size": 2,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }
    given = {
        "dest": str(tmp_path / "view"),
        "data_dir": str(tmp_path),
        "layers": {"base": {"path": str(base), "files": [spec]}},
        "links": [{"name": "config.json", "layer": "base", "source": "config.json"}],
    }
    assert run_module("tree_view", given, check=True)["changed"]
    assert "is not proven" in run_module("tree_view", given)["msg"]
    given["links"] = [{"name": "config.json", "layer": "other", "source": "config.json"}]
    assert "no layer holds" in run_module("tree_view", given)["msg"]
    assert not (tmp_path / "view").exists()


@pytest.mark.field("B66")
def test_a_gated_overlay_is_told_apart_before_anything(
    published: Hub, repos: dict[str, Path], tmp_path: Path
) -> None:
    published.control(tokens={"hf_good": [lab_repos.OVERLAY], "hf_other": []}, gated=[lab_repos.OVERLAY])
    for token, text in (("", "HTTP 401"), ("hf_other", "HTTP 403")):
        answer = plan(published, repos, tmp_path, on=True, check=True, token=token)
        assert answer["failed"] and text in answer["msg"], answer["msg"]
    assert plan(published, repos, tmp_path, on=True, check=True, token="hf_good")["changed"]


def locks(repos: dict[str, Path]) -> tuple[model_lock.ModelLock, model_lock.ModelLock]:
    base = model_lock.from_directory(repos[lab_repos.CHECKPOINT])
    shards = {name: dict(found) for name, found in base.shards.items() if "00002-of" in name}
    files = [item for item in base.files if item.name in shards]
    return base, model_lock.ModelLock(
        {}, {}, "", files, shards, {name: base.header_bytes[name] for name in shards}
    )


def test_an_overlay_of_another_checkpoint_is_refused(repos: dict[str, Path]) -> None:
    base, other = locks(repos)
    (shard,) = other.shards
    assert overlay.merge(base, other).lock.digest == base.digest, "the same shard again changes no layout"
    lost = other.shards[shard].popitem()
    with pytest.raises(LockError, match="lacks 1 of its tensors"):
        overlay.merge(base, other)
    other.shards[shard][lost[0]] = lost[1]
    other.shards[shard]["layers.0.attn.wo_c.trellis"] = lost[1]
    with pytest.raises(LockError, match=r"wo_c\.trellis.*tensors that the base lacks"):
        overlay.merge(base, other)


def test_a_name_that_would_lose_is_refused(repos: dict[str, Path]) -> None:
    base, other = locks(repos)
    (shard,) = other.shards
    renamed = model_lock.ModelLock(
        {},
        {},
        "",
        [other.files[0]._replace(name="a.safetensors")],
        {"a.safetensors": other.shards[shard]},
        {"a.safetensors": 1},
    )
    assert [link.name for link in overlay.merge(base, renamed).links][-1] == "zz-overlay-a.safetensors"
    last = sorted(base.shards)[-1]
    base.shards["~.safetensors"] = base.shards.pop(last)
    with pytest.raises(LockError, match="the engine would take the base's tensors"):
        overlay.merge(base, renamed)
