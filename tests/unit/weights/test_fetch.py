"""Fetching from a Hub: the real huggingface_hub client, a stand-in that refuses and breaks on demand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import tree

from .conftest import Hub, RunModule, manifest

SIZES = {
    "README.md": 95,
    "config.json": 3_000,
    "m-00001-of-00002.safetensors": 400_000,
    "m-00002-of-00002.safetensors": 9,
}


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.field("B63", "B65")
def test_a_fetch_is_predicted_made_proven_and_then_needs_no_network(
    hub: Hub, fetch: RunModule, tmp_path: Path
) -> None:
    source = hub.publish("lab/model", SIZES)
    dest = tmp_path / "models/lab--model/x"
    predicted = fetch(hub, dest, check=True, files=manifest(source))
    assert (predicted["changed"], predicted["files_needed"], predicted["bytes_needed"]) == (True, 4, 403_104)
    assert not (tmp_path / "models").exists()
    made = fetch(hub, dest, files=manifest(source))
    assert (made["changed"], made["complete"]) == (True, True), made
    assert contents(dest) == contents(source)
    assert sorted(path.name for path in dest.parent.iterdir()) == [".x.proof.json", "x"]
    hub.process.terminate()
    hub.process.wait()
    for rehash in (False, True):
        again = fetch(hub, dest, files=manifest(source), rehash=rehash)
        assert (again["changed"], again["complete"]) == (False, True)


def test_a_list_from_the_hub_is_remembered_and_a_folder_can_be_the_root(
    hub: Hub, fetch: RunModule, tmp_path: Path
) -> None:
    hub.publish("lab/model", {"kit/MANIFEST": 20, "kit/aot/a.cubin": 500, "other.bin": 7})
    dest = tmp_path / "kit/x"
    made = fetch(hub, dest, prefix="kit")
    assert (made["complete"], sorted(contents(dest))) == (True, ["MANIFEST", "aot/a.cubin"])
    hub.process.terminate()
    hub.process.wait()
    again = fetch(hub, dest, prefix="kit")
    assert (again["changed"], len(again["files"])) == (False, 2)
    assert all(len(item["sha256"]) == 64 for item in again["files"])


def test_a_damaged_folder_tree_is_repaired(hub: Hub, fetch: RunModule, tmp_path: Path) -> None:
    source = hub.publish("lab/model", {"kit/MANIFEST": 20, "kit/aot/a.cubin": 5_000})
    dest = tmp_path / "kit/x"
    fetch(hub, dest, prefix="kit")
    (dest / "aot/a.cubin").write_bytes(b"short")
    made = fetch(hub, dest, prefix="kit")
    assert (made["changed"], made["files_needed"], made["complete"]) == (True, 1, True)
    assert contents(dest) == contents(source / "kit")


def test_only_named_files_are_taken(hub: Hub, fetch: RunModule, tmp_path: Path) -> None:
    hub.publish("lab/model", SIZES)
    made = fetch(hub, tmp_path / "e/x", names=["m-00002-of-00002.safetensors"])
    assert sorted(contents(tmp_path / "e/x")) == ["m-00002-of-00002.safetensors"]
    assert made["files_total"] == 1
    answer = fetch(hub, tmp_path / "e/y", names=["nope.bin"])
    assert "has no nope.bin" in answer["msg"]


GATES = {
    "no token": ({"repo": "lab/gated"}, "Give a token"),
    "a wrong token": ({"repo": "lab/gated", "token": "hf_wrong"}, "make a new one"),
    "terms not accepted": ({"repo": "lab/gated", "token": "hf_other"}, "Accept the repository's terms"),
    "no such repository": ({"repo": "lab/absent"}, "Correct the repository name"),
    "no such revision": ({"revision": "f" * 40}, "there is no such revision"),
    "a branch": ({"revision": "main"}, "not a commit id"),
}


@pytest.mark.field("B66")
@pytest.mark.parametrize("case", GATES)
def test_the_gate_is_tried_before_anything_and_each_refusal_has_its_own_words(
    hub: Hub, fetch: RunModule, tmp_path: Path, case: str
) -> None:
    source = hub.publish("lab/model", SIZES)
    hub.publish("lab/gated", SIZES)
    hub.control(tokens={"hf_good": ["lab/gated"], "hf_other": []}, gated=["lab/gated"])
    args, text = GATES[case]
    for check in (True, False):
        answer = fetch(hub, tmp_path / "m/x", check=check, files=manifest(source), **args)
        assert answer["failed"]
        assert text in answer["msg"], answer["msg"]
        assert not (tmp_path / "m").exists()
        assert "hf_" not in json.dumps(answer)


@pytest.mark.field("B66")
def test_a_token_opens_a_gated_repository_and_stays_out_of_everything(
    hub: Hub, fetch: RunModule, tmp_path: Path
) -> None:
    source = hub.publish("lab/model", SIZES)
    hub.control(tokens={"hf_good": ["lab/model"]}, gated=["lab/model"])
    token = tmp_path / "token"
    token.write_text("hf_good\n")
    made = fetch(hub, tmp_path / "m/x", token_file=str(token), files=manifest(source))
    assert made["complete"], made
    assert "hf_good" not in json.dumps(made)
    kept = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path not in (token, hub.root / ".control.json")
    ]
    assert not [path for path in kept if b"hf_good" in path.read_bytes()]


@pytest.mark.field("B65")
def test_no_network_is_said_as_such(hub: Hub, fetch: RunModule, tmp_path: Path) -> None:
    source = hub.publish("lab/model", SIZES)
    hub.process.terminate()
    hub.process.wait()
    answer = fetch(hub, tmp_path / "m/x", files=manifest(source))
    assert "does not answer" in answer["msg"]


@pytest.mark.field("B63")
def test_wrong_bytes_from_the_hub_never_get_the_final_name(
    hub: Hub, fetch: RunModule, tmp_path: Path
) -> None:
    source = hub.publish("lab/model", SIZES)
    hub.control(faults={"lab/model/m-00001-of-00002.safetensors": {"corrupt": True}})
    dest = tmp_path / "m/x"
    answer = fetch(hub, dest, files=manifest(source))
    assert answer["failed"]
    assert "does not match its manifest after two downloads" in answer["msg"]
    assert not dest.exists()
    hub.control()
    before = hub.stats()
    made = fetch(hub, dest, files=manifest(source))
    assert made.get("complete"), made
    assert contents(dest) == contents(source)
    assert made["files_needed"] < 4, "what was right is not fetched again"
    assert before != hub.stats()


@pytest.mark.field("B63")
def test_a_short_body_resumes(hub: Hub, fetch: RunModule, tmp_path: Path) -> None:
    source = hub.publish("lab/model", SIZES)
    name = "lab/model/m-00001-of-00002.safetensors"
    hub.control(faults={name: {"short": 100_000}})
    dest = tmp_path / "m/x"
    answer = fetch(hub, dest, files=manifest(source))
    assert not dest.exists() or answer["complete"]
    hub.control()
    made = fetch(hub, dest, files=manifest(source))
    assert made["complete"], made
    assert contents(dest) == contents(source)


@pytest.mark.field("B66")
@pytest.mark.parametrize(
    ("status", "token", "text"),
    [
        (401, "", "Give a token"),
        (401, "hf_good", "make a new one"),
        (403, "", "Give a token"),
        (403, "hf_good", "Accept the repository's terms"),
        (404, "", "not found"),
        (416, "", "Remove the partial directory"),
    ],
)
def test_a_refusal_in_the_middle_of_a_download_has_its_own_words(
    hub: Hub, fetch: RunModule, tmp_path: Path, *, status: int, token: str, text: str
) -> None:
    """The gate was open when it was asked; the real client meets the refusal at the bytes."""
    source = hub.publish("lab/model", SIZES)
    faults = {"lab/model/m-00001-of-00002.safetensors": {"status": status}}
    hub.control(faults=faults, tokens={"hf_good": ["lab/model"]})
    dest = tmp_path / "m/x"
    answer = fetch(hub, dest, files=manifest(source), token=token)
    assert answer["failed"]
    assert str(status) in answer["msg"] and text in answer["msg"], answer["msg"]
    assert not dest.exists()
    hub.control()
    assert fetch(hub, dest, files=manifest(source))["complete"]


@pytest.mark.field("B67")
def test_parts_that_nothing_can_go_on_with_do_not_fill_the_disk(
    hub: Hub, fetch: RunModule, tmp_path: Path
) -> None:
    """The client (2.x) names the part of a file anew each time, so a kill leaves it behind for good."""
    source = hub.publish("lab/model", SIZES)
    hub.control(faults={"lab/model/m-00001-of-00002.safetensors": {"status": 404}})
    dest = tmp_path / "m/x"
    assert fetch(hub, dest, files=manifest(source))["failed"]
    (folder,) = [path for path in tree.partial_path(dest).rglob("download") if path.is_dir()]
    dead = folder / f"abcDEF-_123=.{'a' * 64}.0123abcd.incomplete"
    resumable = folder / f"abcDEF-_123=.{'a' * 64}.incomplete"
    for path in (dead, resumable):
        path.write_bytes(b"part")
    assert fetch(hub, dest, files=manifest(source))["failed"]
    assert (dead.exists(), resumable.exists()) == (False, True)
    hub.control()
    assert fetch(hub, dest, files=manifest(source))["complete"]
    assert contents(dest) == contents(source)


def test_a_hub_in_trouble_is_told_apart_from_a_wrong_pin(hub: Hub, fetch: RunModule, tmp_path: Path) -> None:
    source = hub.publish("lab/model", SIZES)
    hub.control(faults={"lab/model/README.md": {"status": 503}})
    answer = fetch(hub, tmp_path / "m/x", files=manifest(source))
    assert answer["failed"]
    assert "503" in answer["msg"]
    assert "Try again later" in answer["msg"]


def test_a_manifest_of_another_revision_is_refused(hub: Hub, fetch: RunModule, tmp_path: Path) -> None:
    source = hub.publish("lab/model", SIZES)
    files = manifest(source)
    files[0] = {"name": files[0]["name"], "size": files[0]["size"] + 1}
    answer = fetch(hub, tmp_path / "m/x", files=files)
    assert "do not belong together" in answer["msg"]


def test_two_revisions_lie_side_by_side(hub: Hub, fetch: RunModule, tmp_path: Path) -> None:
    other = "f" * 40
    one = hub.publish("lab/model", SIZES)
    two = hub.publish("lab/model", SIZES, revision=other, seed=2)
    fetch(hub, tmp_path / "m/one", files=manifest(one))
    fetch(hub, tmp_path / "m/two", files=manifest(two), revision=other)
    assert contents(tmp_path / "m/one") == contents(one) != contents(tmp_path / "m/two") == contents(two)


def test_a_file_changed_in_place_is_noticed_by_its_time_alone(
    hub: Hub, fetch: RunModule, tmp_path: Path
) -> None:
    source = hub.publish("lab/model", SIZES)
    dest = tmp_path / "m/x"
    fetch(hub, dest, files=manifest(source))
    target = dest / "m-00001-of-00002.safetensors"
    data = bytearray(target.read_bytes())
    data[5] ^= 1
    target.write_bytes(data)
    os.utime(target)
    predicted = fetch(hub, dest, check=True, files=manifest(source))
    assert (predicted["changed"], predicted["files_needed"]) == (True, 1)
    assert fetch(hub, dest, files=manifest(source))["complete"]
    assert contents(dest) == contents(source)


def test_a_proxy_of_the_task_reaches_the_download_as_a_file(
    hub: Hub, fetch: RunModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hub.publish("lab/model", SIZES)
    monkeypatch.setenv("https_proxy", "http://user:secret@192.0.2.1:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = fetch(hub, tmp_path / "m/x", files=manifest(source))
    assert made["complete"], made
    assert "secret" not in json.dumps(made)
