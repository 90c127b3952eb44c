"""What an image is: named by what it is built from, compared by layers, moved as files."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import image_identity as identity
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_identity import ImageError

BASE = "nvcr.io/nvidia/pytorch@sha256:" + "2" * 64


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "bin").mkdir(parents=True)
    (root / "Dockerfile").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY bin /bin\n")
    (root / "bin/tool").write_text("#!/bin/sh\n")
    (root / "bin/tool").chmod(0o755)
    (root / "bin/link").symlink_to("tool")
    return root


def content(root: Path, **args: Any) -> str:
    given: dict[str, Any] = {"dockerfile": "Dockerfile", "build_args": {}, "base": BASE, **args}
    return identity.make_recipe(root, **given).content


def test_the_same_recipe_has_the_same_name_wherever_and_whenever_it_lies(
    context: Path, tmp_path: Path
) -> None:
    first = content(context)
    copy = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", str(context), str(copy)], check=True)
    os.utime(copy / "bin/tool", (1, 1))
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__/x.pyc").write_bytes(b"x")
    (copy / "bin/tool").chmod(0o700)
    assert content(copy) == first
    one, two = (
        identity.context_tar(identity.make_recipe(root, "Dockerfile", {}, BASE)) for root in (context, copy)
    )
    assert one == two


def test_whatever_decides_the_build_changes_the_name(context: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "0005-a.patch", tmp_path / "0006-b.patch"
    one.write_text("a")
    two.write_text("b")
    names = {content(context)}
    names.add(content(context, build_args={"TF_REF": "a" * 40}))
    names.add(content(context, base=BASE[:-1] + "3"))
    names.add(content(context, target="final"))
    names.add(content(context, patches=[one, two]))
    names.add(content(context, patches=[two, one]))
    (context / "bin/tool").chmod(0o644)
    names.add(content(context))
    (context / "bin/tool").write_text("#!/bin/sh\n\n")
    names.add(content(context))
    (context / "bin/link").unlink()
    (context / "bin/link").symlink_to("other")
    names.add(content(context))
    (context / "empty").mkdir()
    names.add(content(context))
    assert len(names) == 10


def test_patches_enter_the_context_in_their_order(context: Path, tmp_path: Path) -> None:
    patches = [tmp_path / "0006-second.patch", tmp_path / "first.patch"]
    for path in patches:
        path.write_text(path.name)
    recipe = identity.make_recipe(context, "Dockerfile", {}, BASE, patches=patches)
    with tarfile.open(fileobj=io.BytesIO(identity.context_tar(recipe))) as tar:
        names = tar.getnames()
        assert names[-2:] == ["patches/0001-second.patch", "patches/0002-first.patch"]
        assert tar.getmember("bin/link").linkname == "tool"
        assert {info.uid for info in tar} == {0}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"base": "nvcr.io/nvidia/pytorch:26.07-py3"}, "is a tag, which can move"),
        ({"base": ""}, "no base image"),
        ({"dockerfile": "Containerfile"}, "has no Containerfile"),
        ({"patches": [Path("/not/there.patch")]}, "No such file"),
    ],
)
def test_a_recipe_that_decides_nothing_is_refused(context: Path, args: dict[str, Any], text: str) -> None:
    with pytest.raises(ImageError, match=text):
        content(context, **args)


@pytest.mark.field("E25")
def test_a_moving_base_is_taken_only_when_it_is_allowed(context: Path) -> None:
    assert content(context, base="hub:5000/base:1", allow_tag=True)


@pytest.mark.parametrize(
    "name", ["sparkfleet/engine", "hub.lab:5000/lab/engine", "engine", "192.0.2.1:5000/x"]
)
def test_good_names(name: str) -> None:
    assert identity.reference(name, "0123456789abcdef") == f"{name}:0123456789ab"


@pytest.mark.parametrize("name", ["", "Engine", "a:b", "a@sha256:x", "-x", "a b", "a//b", "x;rm"])
def test_bad_names(name: str) -> None:
    with pytest.raises(ImageError, match="not an image name"):
        identity.reference(name, "0" * 64)


def inspected(image_id: str, **config: Any) -> dict[str, Any]:
    return {
        "Id": image_id,
        "RootFS": {"Type": "layers", "Layers": ["sha256:a", "sha256:b"]},
        "Config": config,
    }


@pytest.mark.field("B69")
def test_two_stores_agree_on_layers_although_their_ids_differ() -> None:
    overlay2 = inspected("sha256:" + "c" * 64, Env=["A=1"], Cmd=None, Entrypoint=None, WorkingDir="")
    containerd = inspected("sha256:" + "d" * 64, Env=["A=1"], Cmd=[], Entrypoint=[])
    assert identity.layers_digest(overlay2) == identity.layers_digest(containerd)
    assert identity.layers_digest(inspected("x", Env=["A=2"])) != identity.layers_digest(overlay2)
    with pytest.raises(ImageError, match="no layers"):
        identity.layers_digest({"Config": {}})


@pytest.mark.field("B68")
@pytest.mark.parametrize(
    ("image", "node", "good"),
    [("arm64", "aarch64", True), ("amd64", "aarch64", False), ("amd64", "x86_64", True)],
)
def test_an_image_of_another_architecture_is_refused_by_name(image: str, node: str, good: bool) -> None:
    if good:
        identity.refuse_architecture("x:1", image, node)
        return
    with pytest.raises(ImageError, match=r"built for amd64, this node is arm64: .*exec format error"):
        identity.refuse_architecture("x:1", image, node)


def test_an_outage_is_said_with_who_suffers_it_and_for_how_long() -> None:
    assert identity.outage("spark-1", [], []) == ""
    text = identity.outage("spark-1", ["dsv41"], ["pair-a"])
    for part in ("dsv41 run on spark-1", "pair-a slow or stopped", "6 minutes"):
        assert part in text
