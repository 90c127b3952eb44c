"""An image in the containerd store whose base came without bytes, its snapshots being there: it is made whole."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import image_move
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import (
    DockerNotFound,
    DockerStreamError,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_archive import BLOBS, Blob
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_identity import ImageError

LAYERS = [b"base" * 5000, b"middle" * 700, b"top"]
PACKED = [gzip.compress(layer, mtime=0) for layer in LAYERS]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


DIFF_IDS = [sha(layer) for layer in LAYERS]
CONFIG = json.dumps(
    {"rootfs": {"type": "layers", "diff_ids": [f"sha256:{one}" for one in DIFF_IDS]}}
).encode()
PASSING, NAME = "lab/engine:building-1", "lab/engine:1"


class Docker:
    """A daemon with the containerd store: names to manifests, and blobs as files."""

    def __init__(self, store: Path, containerd: bool = True, telling: bool = True) -> None:
        self.store, self.containerd, self.telling = store, containerd, telling
        (store / BLOBS).mkdir(parents=True)
        self.names: dict[str, str] = {}
        self.calls: list[str] = []
        #: blobs that go when something is loaded
        self.swept: list[str] = []
        self.registry: dict[str, str] = {}

    def put(self, data: bytes) -> str:
        (self.store / BLOBS / sha(data)).write_bytes(data)
        return sha(data)

    def image(self, name: str, *layers: bytes) -> None:
        """An image whose manifest names these layers; their bytes are put by the test."""
        rows = [{"digest": f"sha256:{sha(one)}"} for one in layers]
        manifest = {"config": {"digest": f"sha256:{self.put(CONFIG)}"}, "layers": rows}
        self.names[name] = self.put(json.dumps(manifest).encode())

    def info(self) -> dict[str, Any]:
        driver = "io.containerd.snapshotter.v1" if self.containerd else "overlay2"
        return {"DriverStatus": [["driver-type", driver]]}

    def blobs(self) -> dict[str, Blob] | None:
        """What ``content_blobs`` finds: plain layers by themselves, compressed ones by their label."""
        if not self.telling:
            return None
        found = {}
        for plain, packed in zip(LAYERS, PACKED):
            for data, kind in ((packed, "tar+gzip"), (plain, "tar")):
                if (self.store / BLOBS / sha(data)).exists():
                    found[sha(plain)] = Blob(sha(data), len(data), kind)
        return found

    def image_inspect(self, name: str) -> dict[str, Any]:
        if name not in self.names:
            raise DockerNotFound(404, "no such image", name)
        return {
            "Id": f"sha256:{self.names[name]}",
            "RootFS": {"Layers": [f"sha256:{one}" for one in DIFF_IDS]},
        }

    def image_tag(self, name: str, repo: str, tag: str) -> None:
        self.calls.append("tag")
        self.names[f"{repo}:{tag}"] = self.names[name]

    def image_remove(self, name: str) -> None:
        del self.names[name]

    def image_pull(self, name: str, **_more: object) -> None:
        self.calls.append("pull")
        if name not in self.registry:
            raise DockerStreamError("manifest unknown", [])
        self.names[name] = self.registry[name]

    def image_load(self, stream: Any) -> None:
        self.calls.append("load")
        with tarfile.open(fileobj=BytesIO(b"".join(stream))) as tar:
            files = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
        (entry,) = json.loads(files["index.json"])["manifests"]
        for name, data in files.items():
            if name.startswith(BLOBS):
                (self.store / name).write_bytes(data)
        self.names[entry["annotations"]["io.containerd.image.name"].removeprefix("docker.io/")] = entry[
            "digest"
        ][7:]
        for digest in self.swept:
            (self.store / BLOBS / digest).unlink()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    """A store with the base in plain form, as a move leaves it, and an image built upon its snapshots."""
    found = Docker(tmp_path / "store")
    monkeypatch.setattr(image_move, "content_blobs", lambda _info: found.blobs())
    found.put(LAYERS[0])
    found.put(LAYERS[1])
    found.put(PACKED[2])
    found.image(PASSING, *PACKED)
    return found


def name(docker: Docker) -> bool:
    return image_move.name_whole(docker, PASSING, NAME, store=docker.store)  # type: ignore[arg-type]


def base(docker: Docker) -> None:
    image_move.prepare_base(docker, "base@sha256:1", store=docker.store)  # type: ignore[arg-type]


def named(docker: Docker) -> list[tuple[str, str]]:
    """Digest and form of the layers that the named image has."""
    manifest = json.loads((docker.store / BLOBS / docker.names[NAME]).read_bytes())
    return [(row["digest"][7:], row["mediaType"].rpartition(".")[2]) for row in manifest["layers"]]


@pytest.mark.field("B70")
def test_a_built_image_names_the_layers_in_the_form_in_which_they_lie(docker: Docker) -> None:
    assert name(docker)
    assert named(docker) == [(DIFF_IDS[0], "tar"), (DIFF_IDS[1], "tar"), (sha(PACKED[2]), "tar+gzip")]
    assert docker.calls == ["load"]


def test_a_layer_whose_digest_only_the_manifest_knows_is_kept(
    docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import leaves no label on a layer that it does not unpack."""
    monkeypatch.setattr(
        image_move, "content_blobs", lambda _info: {one: Blob(one, 1, "tar") for one in DIFF_IDS[:2]}
    )
    assert name(docker)
    assert named(docker)[2] == (sha(PACKED[2]), "tar+gzip")


@pytest.mark.parametrize("how", ["whole", "overlay2", "silent"])
def test_a_whole_image_is_only_tagged(docker: Docker, how: str) -> None:
    if how == "whole":
        docker.put(PACKED[0])
        docker.put(PACKED[1])
    docker.containerd, docker.telling = how != "overlay2", how != "silent"
    assert not name(docker)
    assert (docker.calls, docker.names[NAME]) == (["tag"], docker.names[PASSING])


@pytest.mark.field("B70")
def test_a_layer_that_lies_there_in_no_form_is_refused_before_the_name_is_given(docker: Docker) -> None:
    (docker.store / BLOBS / DIFF_IDS[1]).unlink()
    with pytest.raises(ImageError, match=f"1 of 3 layers of {NAME} unpacked only .*{DIFF_IDS[1][:12]}"):
        name(docker)
    assert (docker.calls, NAME in docker.names) == ([], False)


def test_bytes_that_go_meanwhile_leave_no_name(docker: Docker) -> None:
    docker.swept = [DIFF_IDS[0]]
    with pytest.raises(ImageError, match=f"{DIFF_IDS[0][:12]} of a layer of {NAME} were cleared away"):
        name(docker)
    assert NAME not in docker.names


@pytest.mark.field("B70")
def test_a_base_without_bytes_is_refused_before_anything_is_built(docker: Docker) -> None:
    docker.registry["base@sha256:1"] = docker.names[PASSING]
    base(docker)
    assert docker.calls == ["pull"]
    base(docker)
    assert docker.calls == ["pull"], "what is here is not pulled"
    (docker.store / BLOBS / DIFF_IDS[0]).unlink()
    with pytest.raises(ImageError, match="1 of 3 layers of base@sha256:1 unpacked only"):
        base(docker)
    docker.containerd = False
    base(docker)


def test_a_base_that_cannot_be_had_is_named(docker: Docker) -> None:
    with pytest.raises(
        ImageError, match="base image base@sha256:1 is not here and cannot be pulled: manifest unknown"
    ):
        base(docker)
