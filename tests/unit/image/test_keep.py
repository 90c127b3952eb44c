"""Which images stay: current and previous release, this run, containers; and never one that is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_keep import judge, own_images, releases


def row(letter: str, *tags: str, identity: str = "") -> dict[str, Any]:
    return {
        "Id": identity or f"sha256:{letter * 4}",
        "RepoTags": list(tags),
        "RepoDigests": ["<none>@<none>", f"hub/x@sha256:{letter * 64}"],
        "Labels": {"sparkfleet.content": letter * 64},
        "Size": 7,
    }


def test_only_what_carries_our_label_and_our_tag_is_ours() -> None:
    ours = row("a", f"lab/engine:{'a' * 12}")
    built_upon_ours = row("b", "mine:latest")
    also_named = row("c", f"lab/engine:{'c' * 12}", "mine:good")
    nameless = row("d")
    no_label = {**row("e", "x:1"), "Labels": None}
    (one,) = own_images([also_named, built_upon_ours, nameless, no_label, ours])
    assert (one.reference, one.content, one.size) == (f"lab/engine:{'a' * 12}", "a" * 64, 7)
    assert one.digests == (f"hub/x@sha256:{'a' * 64}",)


def marker(folder: Path, replica: str, current: str, previous: str = "") -> None:
    def release(letter: str) -> dict[str, str]:
        return {"image_content": letter * 64, "model_lock": "m", "rank_file": "r", "launch_hash": "l"}

    raw = {
        "schema": 1,
        "replica": replica,
        "current": release(current),
        "previous": release(previous) if previous else None,
    }
    (folder / f"{replica}.json").write_text(json.dumps(raw))


def test_current_and_previous_of_every_replica_stay_and_the_rest_may_go(tmp_path: Path) -> None:
    folder = tmp_path / "releases"
    folder.mkdir()
    marker(folder, "one", "a", "b")
    marker(folder, "two", "c")
    (folder / "note.txt").write_text("x")
    needed = releases(Host(str(tmp_path)), "/releases")
    assert needed == {
        "a" * 64: ["current release of one"],
        "b" * 64: ["previous release of one"],
        "c" * 64: ["current release of two"],
    }
    images = own_images(row(letter, f"lab/engine:{letter * 12}") for letter in "abcde")
    judged = judge(images, needed, {"sha256:dddd": ["stopped-one"]})
    assert [one.content[0] for one in judged if not one.kept] == ["e"]
    assert judged[3].kept == ("container stopped-one",)


def test_no_marker_needs_nothing_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert releases(Host(str(tmp_path)), "/releases") == {}
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases/one.json").write_text("{")
    with pytest.raises(Refusal, match="cannot be read"):
        releases(Host(str(tmp_path)), "/releases")
