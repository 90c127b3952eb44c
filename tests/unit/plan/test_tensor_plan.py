"""The module: truthful changed and diff, check mode, the cache, and refusals with their fields."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkfleet.serving.plugins.module_utils import calibration, kit
from ansible_collections.sparkfleet.serving.plugins.module_utils import model_lock as ml

from tests.unit.plan.conftest import ROOT
from tests.unit.plan.small import Small, config, inventories, small_lock
from tests.unit.plan.test_model_lock import COMMIT, Hub, engram, serve
from tools.plan_fullsize import write_sparse

MODULE = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.tensor_plan")
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*, check: bool = False, diff: bool = False, **arguments: Any) -> dict[str, Any]:
        values = {"context": 2048, **arguments, "_ansible_check_mode": check, "_ansible_diff": diff}
        with patch_module_args(values), pytest.raises(SystemExit):
            MODULE.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_sparse(tmp_path / "m", inventories(Small()), json.dumps(config(Small())).encode())
    return tmp_path / "m"


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    server = serve(checkpoint)
    yield server
    server.shutdown()
    server.server_close()


def test_plan_from_a_folder(run: Run, checkpoint: Path) -> None:
    result = run(directory=str(checkpoint), mem_available_gib=[100, 101])
    assert result["changed"] is False
    assert result["plan"]["budget"]["verdict"] == "fits"
    assert result["lock"]["digest"] == small_lock().digest
    assert {f["name"] for f in result["lock"]["files"]} >= {"config.json", "model-00001-of-00002.safetensors"}
    assert len(result["plan"]["ranks"][0]["index_sha256"]) == 64


def test_the_kept_lock_changes_once_and_never_in_check_mode(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "locks" / "lock.json"
    arguments = {"directory": str(checkpoint), "lock_cache": str(cache)}
    predicted = run(check=True, diff=True, **arguments)
    assert predicted["changed"]
    assert not cache.exists()
    done = run(diff=True, **arguments)
    assert done["changed"]
    assert done["diff"] == predicted["diff"]
    assert [row["after"] for row in done["diff"]] == [cache.read_text()]
    assert cache.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in cache.parent.iterdir()] == ["lock.json"]
    again = run(diff=True, **arguments)
    assert not again["changed"]
    assert "diff" not in again
    assert again["plan"]["digest"] == done["plan"]["digest"]


def test_a_kept_lock_spares_reading_until_the_folder_changes(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"directory": str(checkpoint), "lock_cache": str(tmp_path / "lock.json")}
    run(**arguments)
    monkeypatch.setattr(ml, "read_directory", lambda _path: pytest.fail("headers were read again"))
    assert not run(**arguments)["changed"]
    monkeypatch.undo()
    write_sparse(checkpoint, inventories(Small(bits=4)), json.dumps(config(Small())).encode())
    assert run(**arguments)["changed"]
    (tmp_path / "lock.json").write_text("{ damaged")
    assert run(**arguments)["changed"]


@pytest.mark.field("B65")
def test_plan_from_a_hub_asks_once_for_a_pinned_commit(run: Run, hub: Hub, tmp_path: Path) -> None:
    arguments = {
        "hub": {"endpoint": hub.address, "repo": "own/m", "revision": COMMIT},
        "lock_cache": str(tmp_path / "lock.json"),
    }
    first = run(**arguments)
    assert first["changed"]
    assert first["lock"]["content_digest"]
    asked = len(hub.seen)
    assert not run(**arguments)["changed"]
    assert len(hub.seen) == asked
    arguments["hub"] = {"endpoint": hub.address, "repo": "own/m", "revision": "main"}
    assert not run(**arguments)["changed"]
    assert len(hub.seen) == asked + 1


def test_token_file_reaches_the_server_and_nothing_else(run: Run, hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    source = {"endpoint": hub.address, "repo": "own/m", "revision": COMMIT}
    refused = run(hub=source)
    assert refused["failed"]
    assert refused["refusal"]["fault"] == "no-token"
    (tmp_path / "token").write_text("hf_secret\n")
    allowed = run(hub={**source, "token_file": str(tmp_path / "token")})
    assert not allowed.get("failed")
    assert "hf_secret" not in json.dumps(allowed)


def test_plan_from_a_lock_as_file_or_data(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text(ml.dumps(small_lock()))
    by_file = run(lock=str(tmp_path / "lock.json"))
    by_data = run(lock=ml.to_document(small_lock()))
    assert by_file["plan"]["digest"] == by_data["plan"]["digest"]
    shipped = run(lock=str(ROOT / "models" / "deepseek-v41-flash-exl3-2.9bpw.json"))
    assert shipped["refusal"]["fault"] == "reconstructed-lock"


def test_verify_names_what_differs(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    lock = ml.to_document(ml.from_directory(checkpoint))
    assert run(lock=lock, verify=str(checkpoint))["verified"] is True
    assert run(check=True, lock=lock, verify=str(tmp_path / "later"))["verified"] is False
    assert run(lock=lock, verify=str(tmp_path / "later"))["refusal"]["fault"] == "missing-folder"
    write_sparse(checkpoint, inventories(Small(bits=4)), json.dumps(config(Small())).encode())
    failed = run(lock=lock, verify=str(checkpoint))
    assert failed["failed"]
    assert "differences, first: model-00001-of-00002.safetensors: has another size" in failed["msg"]


@pytest.mark.field("B64")
def test_a_flipped_byte_is_found_where_hashes_are_read(run: Run, hub: Hub, checkpoint: Path) -> None:
    lock = ml.to_document(ml.from_hub(hub.address, "own/m", COMMIT))
    shard = checkpoint / "model-00002-of-00002.safetensors"
    with shard.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    assert run(lock=lock, verify=str(checkpoint))["verified"] is True, "headers alone cannot see it"
    for _again in range(2):
        failed = run(lock=lock, verify=str(checkpoint), verify_hashes=True)
        assert failed["refusal"]["file"] == shard.name
        assert "has another sha256" in failed["msg"]


def test_refusals_carry_their_fields(run: Run, checkpoint: Path) -> None:
    failed = run(directory=str(checkpoint), world=3)
    assert failed["refusal"]["fault"] == "bad-world"
    assert failed["refusal"]["remedy"]
    unfit = run(directory=str(checkpoint), mem_available_gib=[3], require_fit=True)
    assert unfit["failed"]
    assert "what buys most: headless" in unfit["msg"]
    assert unfit["plan"]["budget"]["verdict"] == "does_not_fit"
    assert (
        run(directory=str(checkpoint), mem_available_gib=[3])["plan"]["budget"]["verdict"] == "does_not_fit"
    )


def test_calibration_by_rank(run: Run, checkpoint: Path) -> None:
    own = {"0": {"overhead": 97.0}}
    result = run(directory=str(checkpoint), mem_available_gib=[100], calibration=own)
    assert [node["calibrated"] for node in result["plan"]["budget"]["nodes"]] == [True, False]
    assert result["plan"]["budget"]["nodes"][0]["verdict"] == "does_not_fit"


def test_engram_source_gives_files_and_warns_of_other_rows(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    write_sparse(tmp_path / "e", {"e.safetensors": engram(1000)}, b"{}")
    result = run(directory=str(checkpoint), engram={"directory": str(tmp_path / "e")})
    assert result["engram"]["tables"] == {"1": [1000, 264]}
    assert result["plan"]["checkpoint"]["engram_bytes"] == result["engram"]["total_bytes"]
    assert not [text for text in result["plan"]["warnings"] if "Engram" in text]
    write_sparse(tmp_path / "e", {"e.safetensors": engram(999)}, b"{}")
    other = run(directory=str(checkpoint), engram={"directory": str(tmp_path / "e")})
    assert "Engram layer 1: found 999 rows, wanted 1000" in other["plan"]["warnings"]
    assert run(directory=str(checkpoint), engram={"repo": "own/m"})["refusal"]["fault"] == "bad-engram"


@pytest.mark.parametrize(
    ("where", "placement", "holders"),
    [("hub", "local", [0, 1]), ("hub", "nfs", [0]), ("directory", "local", [1]), ("directory", "nfs", [])],
)
def test_the_disks_know_who_gets_the_engram_tables(  # noqa: PLR0917
    run: Run, checkpoint: Path, tmp_path: Path, where: str, placement: str, holders: list[int]
) -> None:
    write_sparse(tmp_path / "e", {"e.safetensors": engram(1000)}, b"{}")
    server = serve(tmp_path / "e")
    hub = {"endpoint": server.address, "repo": "own/m", "revision": COMMIT, "directory": ""}
    source = hub if where == "hub" else {**hub, "directory": str(tmp_path / "e")}
    found = run(directory=str(checkpoint), engram={**source, "placement": placement})
    server.shutdown()
    size = found["engram"]["total_bytes"]
    held = {
        row["rank"]: item["first"]
        for row in found["plan"]["disk"]
        for item in row["components"]
        if item["name"] == "engram tables"
    }
    assert held == dict.fromkeys(holders, size)


def rope(folder: Path, rows: int, missing: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    for name in kit.ROPE_TABLES:
        if name != missing:
            (folder / name).write_bytes(bytes(128 * rows))
    return folder


def test_the_kit_bounds_the_context_before_it_is_fetched(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    source = {"directory": str(rope(tmp_path / "kit", 4096 + 17))}
    fits = run(directory=str(checkpoint), kit=source, context=4096, mem_available_gib=[100])
    assert fits["rope_rows"] == 4113
    assert fits["plan"]["budget"]["largest_context"] == fits["plan"]["budget"]["max_context"] == 4096
    refused = run(directory=str(checkpoint), kit=source, context=4097)
    assert refused["refusal"]["fault"] == "short-rope"
    assert "4113 rows" in refused["msg"] and "wanted at most 4096" in refused["msg"]
    without = {"directory": str(rope(tmp_path / "git", 9, missing="rope-plain-sin.f32"))}
    lacking = run(directory=str(checkpoint), kit=without)
    assert lacking["refusal"]["fault"] == "bad-kit" and "rope-plain-sin.f32 is absent" in lacking["msg"]
    (tmp_path / "git" / "rope-plain-sin.f32").write_bytes(bytes(100))
    assert "not whole rows" in run(directory=str(checkpoint), kit=without)["msg"]
    assert run(directory=str(checkpoint), kit={"repo": "own/m"})["refusal"]["fault"] == "bad-kit"
    secret = run(directory=str(checkpoint), kit={"repo": "https://user:ghp_x@host/o/n", "revision": "a" * 40})
    assert "holds a secret" in secret["msg"]
    assert "ghp_x" not in str(secret)


@pytest.mark.field("B65")
def test_kit_and_engram_source_are_asked_once_for_a_pinned_commit(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    root = rope(tmp_path / "sources", 4113)
    write_sparse(root, {"e.safetensors": engram(1000), "f.safetensors": engram(10)}, b"{}")
    server = serve(root)
    where = {"endpoint": server.address, "repo": "own/m", "revision": COMMIT}
    cache = tmp_path / "locks" / "sources.json"
    arguments = {
        "directory": str(checkpoint),
        "kit": {**where, "folder": ""},
        "engram": {**where, "names": ["e.safetensors"]},
        "source_cache": str(cache),
    }
    predicted = run(check=True, diff=True, **arguments)
    assert predicted["changed"] and not cache.exists()
    first = run(diff=True, **arguments)
    assert first["diff"] == predicted["diff"] and first["rope_rows"] == 4113
    assert [row["name"] for row in first["engram"]["files"]] == ["e.safetensors"]
    component = {row["name"]: row["first"] for row in first["plan"]["disk"][1]["components"]}
    assert (
        component["engram tables"]
        == first["engram"]["total_bytes"]
        == (root / "e.safetensors").stat().st_size
    )
    asked = len(server.seen)
    again = run(**arguments)
    assert not again["changed"] and len(server.seen) == asked
    assert (again["engram"], again["rope_rows"]) == (first["engram"], first["rope_rows"])
    (tmp_path / "locks" / "sources.json").write_text("{ damaged")
    assert run(**arguments)["changed"]
    absent = run(**{**arguments, "engram": {**where, "names": ["absent.safetensors"]}})
    assert absent["refusal"]["fault"] == "missing-file" and "sparkfleet_engram_files" in absent["msg"]
    moving = {**arguments, "kit": {**where, "revision": "main", "folder": ""}}
    run(**moving)
    asked = len(server.seen)
    run(**moving)
    assert len(server.seen) > asked, "a branch is asked every time"
    server.shutdown()


def test_a_kept_calibration_counts_for_its_own_plan_and_build_only(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "pair-1.json"
    arguments = {"directory": str(checkpoint), "mem_available_gib": [100, 100], "calibration_file": str(kept)}

    def calibrated(**more: Any) -> tuple[list[bool], list[str]]:
        plan = run(**{**arguments, **more})["plan"]
        return [n["calibrated"] for n in plan["budget"]["nodes"]], [
            w for w in plan["warnings"] if "calib" in w
        ]

    assert calibrated() == ([False, False], [])
    digest = run(**arguments)["plan"]["digest"]
    document = {
        "format": calibration.FORMAT,
        "plan": digest,
        "build": "b1",
        "ranks": {"0": {"overhead": 3.0}},
    }
    document["ranks"]["1"] = {"overhead": 2.5}
    kept.write_text(json.dumps(document))
    assert calibrated(engine_build="b1") == ([True, True], [])
    plan = run(**arguments, engine_build="b1")["plan"]["budget"]
    assert [node["terms_gib"]["runtime"] for node in plan["nodes"]] == [3.0, 2.5]
    running = {"engine_build": "b1", "situation": ["running"], "reserve_gib": 200, "require_fit": True}
    assert not run(**arguments, **running).get("failed"), "this very plan runs and goes on"
    assert run(**arguments, **running, parallel=1)["failed"], "another will be started again"
    for change in ({"context": 4096}, {"parallel": 1}, {"drafts": False}, {"chunk": 1024}):
        assert calibrated(engine_build="b1", **change)[0] == [False, False], change
    (why,) = calibrated(engine_build="b2")[1]
    assert "another build of the engine" in why
    (why,) = calibrated(engine_build="b1", context=4096)[1]
    assert "another model, engine or settings" in why
    kept.write_text("{ damaged")
    done = run(**arguments)
    assert "not used" in done["plan"]["warnings"][-1] and not done.get("failed")


def test_disk_of_this_host(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    paths = {name: str(tmp_path / name) for name in ("models", "engram", "rank_files", "docker", "data")}
    held = {"docker": 10**15}
    result = run(directory=str(checkpoint), rank=1, disk_paths=paths, disk_held=held)
    assert result["plan"]["disk"][1]["verdict"] == "fits"
    assert result["plan"]["disk"][0]["verdict"] == "unknown"
    assert (
        run(directory=str(checkpoint), rank=1, disk_paths={"attic": "/"})["refusal"]["fault"]
        == "bad-location"
    )


def test_documentation_equals_the_arguments() -> None:
    document = yaml.safe_load(MODULE.DOCUMENTATION)
    source = (ROOT / "plugins" / "modules" / "tensor_plan.py").read_text()
    for name, option in document["options"].items():
        assert f'"{name}": {{' in source, name
        assert option["description"], name
    assert yaml.safe_load(MODULE.EXAMPLES)
    assert set(yaml.safe_load(MODULE.RETURN)) == {
        "plan",
        "lock",
        "overlay",
        "engram",
        "rope_rows",
        "verified",
    }
