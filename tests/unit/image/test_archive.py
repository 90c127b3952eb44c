"""An image in flight: taken apart at the source, put together at the receiver, in both kinds of store."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import image_archive as archive
from ansible_collections.sparkfleet.serving.plugins.module_utils import image_move
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_archive import (
    Blob,
    Holding,
    Laid,
    Layer,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_identity import ImageError
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import Progress
from hypothesis import given
from hypothesis import strategies as st

LAYERS = [b"base" * 5000, b"middle" * 700, b"top"]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


DIFF_IDS = [sha(layer) for layer in LAYERS]
CONFIG = json.dumps(
    {"architecture": "arm64", "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one}" for one in DIFF_IDS]}}
)


def saved(members: dict[str, bytes]) -> io.BytesIO:
    """A ``docker save`` stream of these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return io.BytesIO(out.getvalue())


def overlay2() -> dict[str, bytes]:
    """What Docker 26 saves under a graph driver: plain layers by diff id, and their old-format descriptions."""
    return {
        **{f"blobs/sha256/{sha(layer)}": layer for layer in LAYERS},
        "blobs/sha256/" + sha(b'{"id": 1}'): b'{"id": 1}',
        "blobs/sha256/" + sha(CONFIG.encode()): CONFIG.encode(),
        "index.json": b"{}",
        "manifest.json": b"[]",
    }


def containerd() -> dict[str, bytes]:
    """What it saves under the containerd store: layers as they were pulled or committed, compressed."""
    packed = [gzip.compress(layer, mtime=0) for layer in LAYERS]
    # A pigz or a registry may write a layer as several members.
    packed[0] = gzip.compress(LAYERS[0][:777]) + gzip.compress(LAYERS[0][777:])
    return {
        **{f"blobs/sha256/{sha(layer)}": layer for layer in packed},
        "blobs/sha256/" + sha(CONFIG.encode()): CONFIG.encode(),
        "index.json": b"{}",
    }


def docker20() -> dict[str, bytes]:
    """The format before Docker 25."""
    return {
        **{f"{number}/layer.tar": layer for number, layer in enumerate(LAYERS)},
        **{f"{number}/json": b"{}" for number in range(3)},
        f"{sha(CONFIG.encode())}.json": CONFIG.encode(),
        "manifest.json": b"[]",
        "repositories": b"{}",
    }


def lay(members: dict[str, bytes], root: Path, needed: list[str]) -> Laid:
    return archive.lay_down(
        saved(members), root, [f"sha256:{one}" for one in DIFF_IDS], needed, lambda _: None
    )


@pytest.mark.field("B69")
@pytest.mark.parametrize("form", [overlay2, containerd, docker20])
def test_every_store_gives_the_same_laid_down_image(form: Any, tmp_path: Path) -> None:
    laid = lay(form(), tmp_path, DIFF_IDS)
    assert laid == Laid(CONFIG, tuple(Layer(sha(layer), len(layer)) for layer in LAYERS))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert {path.name: path.read_bytes() for path in files} == dict(zip(DIFF_IDS, LAYERS, strict=True))
    assert archive.parse_laid(json.loads(json.dumps(laid.as_dict()))) == laid


@pytest.mark.parametrize("form", [overlay2, containerd])
def test_only_what_somebody_lacks_is_laid_down(form: Any, tmp_path: Path) -> None:
    laid = lay(form(), tmp_path, [DIFF_IDS[2]])
    assert laid.layers == (Layer(DIFF_IDS[2], 3),)
    assert [path.name for path in (tmp_path / "blobs/sha256").iterdir()] == [DIFF_IDS[2]]
    assert laid.diff_ids == DIFF_IDS
    assert lay(form(), tmp_path / "none", []).layers == ()


@pytest.mark.field("B70")
def test_a_store_that_saves_less_than_it_names_is_refused(tmp_path: Path) -> None:
    members = overlay2()
    del members[f"blobs/sha256/{DIFF_IDS[1]}"]
    with pytest.raises(ImageError, match=f"lacks its layer {DIFF_IDS[1][:12]}: .*image store is incomplete"):
        lay(members, tmp_path, DIFF_IDS)
    members = overlay2()
    del members["blobs/sha256/" + sha(CONFIG.encode())]
    with pytest.raises(ImageError, match="lacks its configuration"):
        lay(members, tmp_path, DIFF_IDS)
    members = containerd()
    name = next(iter(members))
    members[name] = members[name][:-400]
    with pytest.raises(ImageError, match=f"lacks its layer {DIFF_IDS[0][:12]}"):
        lay(members, tmp_path, DIFF_IDS)
    members[name] = b"\x1f\x8b" + bytes(200)
    with pytest.raises(ImageError, match="damaged"):
        lay(members, tmp_path, DIFF_IDS)
    members[name] = b"\x28\xb5\x2f\xfd" + bytes(200)
    with pytest.raises(ImageError, match="zstd"):
        lay(members, tmp_path, DIFF_IDS)


@pytest.mark.field("B70")
@given(data=st.data())
def test_a_stream_that_breaks_off_anywhere_is_the_same_refusal(data: Any) -> None:
    """Docker answers 200 and ends the archive where it misses a blob."""
    members = overlay2()
    order = data.draw(st.permutations(list(members)))
    stream = saved({name: members[name] for name in order}).getvalue()
    last = stream.rstrip(b"\0")  # behind it is padding alone
    cut = io.BytesIO(stream[: data.draw(st.integers(0, len(last) - 1))])
    with tempfile.TemporaryDirectory() as folder:
        try:
            laid = archive.lay_down(cut, Path(folder), DIFF_IDS, DIFF_IDS, lambda _: None)
        except ImageError as exc:
            assert re.search("image store is incomplete. Remove the image here", str(exc))
        else:
            assert laid == Laid(CONFIG, tuple(Layer(sha(layer), len(layer)) for layer in LAYERS))


def test_a_graph_driver_lacks_what_is_above_its_longest_common_chain() -> None:
    chains = archive.chain_ids(DIFF_IDS)
    assert chains[0] == DIFF_IDS[0]
    assert chains[1] == sha(f"sha256:{DIFF_IDS[0]} sha256:{DIFF_IDS[1]}".encode())
    assert Holding().lacks(DIFF_IDS) == DIFF_IDS
    assert Holding(False, frozenset(chains[:2])).lacks(DIFF_IDS) == DIFF_IDS[2:]
    # The same layer upon another one is another chain: overlay2 cannot take it from there.
    other = archive.chain_ids([DIFF_IDS[1], DIFF_IDS[0]])
    assert Holding(False, frozenset(other)).lacks(DIFF_IDS) == DIFF_IDS


@given(
    st.lists(st.sampled_from([sha(bytes([number])) for number in range(6)]), min_size=1, max_size=6),
    st.data(),
)
def test_nothing_is_lacking_exactly_when_all_is_there(diff_ids: list[str], data: Any) -> None:
    count = data.draw(st.integers(0, len(diff_ids)))
    graph = Holding(False, frozenset(archive.chain_ids(diff_ids)[:count]))
    assert graph.lacks(diff_ids) == diff_ids[count:]
    store = Holding(True, frozenset(), {one: Blob(one, 1, "tar") for one in diff_ids[:count]})
    assert store.lacks(diff_ids) == [one for one in diff_ids if one not in diff_ids[:count]]
    for one in (graph, store):
        assert archive.parse_holding(json.loads(json.dumps(one.as_dict()))) == one


def test_what_containerd_tells_of_its_store() -> None:
    packed, plain, config = sha(b"p"), sha(b"q"), sha(b"c")
    text = (
        "DIGEST\tSIZE\tAGE\tLABELS\n"
        f"sha256:{packed}\t43.83MB\tAbout a minute\t"
        f"containerd.io/distribution.source.hub.lab=lab/base,containerd.io/uncompressed=sha256:{DIFF_IDS[0]}\n"
        f"sha256:{plain}\t3.001MB\t52 seconds\t-\n"
        f"sha256:{config}\t1.382kB\t9 seconds\tcontainerd.io/gc.ref.snapshot.overlayfs=sha256:{plain}\n"
        "not a row\n"
    )
    assert archive.parse_content(text) == {DIFF_IDS[0]: packed, plain: plain, config: config}


def members_of(stream: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
        found = {}
        for info in tar:
            source = tar.extractfile(info)
            assert source is not None
            found[info.name] = source.read()
        return found


def test_a_graph_driver_is_given_the_lacking_layer_and_the_names_of_all(tmp_path: Path) -> None:
    laid = lay(overlay2(), tmp_path, DIFF_IDS[2:])
    members = members_of(b"".join(archive.archive(tmp_path, "lab/engine:1", CONFIG, laid.layers, Holding())))
    (listing,) = json.loads(members.pop("manifest.json"))
    assert listing["RepoTags"] == ["lab/engine:1"]
    assert listing["Layers"] == [f"blobs/sha256/{one}" for one in DIFF_IDS]
    assert members == {listing["Config"]: CONFIG.encode(), f"blobs/sha256/{DIFF_IDS[2]}": LAYERS[2]}


def test_the_containerd_store_is_given_a_manifest_of_what_lies_there(tmp_path: Path) -> None:
    laid = lay(containerd(), tmp_path, DIFF_IDS[2:])
    here = Holding(
        True,
        frozenset(),
        {DIFF_IDS[0]: Blob("a" * 64, 77, "tar+gzip"), DIFF_IDS[1]: Blob(DIFF_IDS[1], len(LAYERS[1]), "tar")},
    )
    members = members_of(b"".join(archive.archive(tmp_path, "lab/engine:1", CONFIG, laid.layers, here)))
    (entry,) = json.loads(members["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "docker.io/lab/engine:1"
    manifest = members["blobs/sha256/" + entry["digest"][7:]]
    assert (sha(manifest), len(manifest)) == (entry["digest"][7:], entry["size"])
    assert [
        (row["digest"][7:], row["size"], row["mediaType"][-8:]) for row in json.loads(manifest)["layers"]
    ] == [
        ("a" * 64, 77, "tar+gzip"),
        (DIFF_IDS[1], len(LAYERS[1]), "r.v1.tar"),
        (DIFF_IDS[2], 3, "r.v1.tar"),
    ]
    assert "manifest.json" not in members
    assert members[f"blobs/sha256/{DIFF_IDS[2]}"] == LAYERS[2]


def test_a_laid_down_file_that_shrank_ends_the_load(tmp_path: Path) -> None:
    laid = lay(overlay2(), tmp_path, DIFF_IDS)
    (tmp_path / "blobs/sha256" / DIFF_IDS[0]).write_bytes(b"short")
    with pytest.raises(ImageError, match="5 bytes instead of 20000"):
        b"".join(archive.archive(tmp_path, "x:1", CONFIG, laid.layers, Holding()))


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("engine:1", "docker.io/library/engine:1"),
        ("lab/engine:1", "docker.io/lab/engine:1"),
        ("hub.lab:5000/lab/engine:1", "hub.lab:5000/lab/engine:1"),
        ("localhost/engine:1", "localhost/engine:1"),
    ],
)
def test_a_name_as_containerd_has_it(name: str, full: str) -> None:
    assert archive.canonical_name(name) == full


@pytest.mark.parametrize(
    "raw", [{}, {"config": "x", "layers": []}, {"config": CONFIG, "layers": [["../x", 1]]}]
)
def test_a_description_that_cannot_be_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ImageError):
        archive.parse_laid(raw)


def write_store(root: Path, *blobs: bytes) -> dict[str, str]:
    """A content store with these blobs; their names by number."""
    folder = root / "blobs/sha256"
    folder.mkdir(parents=True)
    for blob in blobs:
        (folder / sha(blob)).write_bytes(blob)
    return {str(number): sha(blob) for number, blob in enumerate(blobs)}


@pytest.mark.field("B70")
def test_a_store_without_the_blobs_of_its_base_still_gives_the_layers_that_it_has(tmp_path: Path) -> None:
    """A pull fetches no layer whose snapshot exists, and docker save then gives no layer of the image at all."""
    top = gzip.compress(LAYERS[2], mtime=0)
    manifest = json.dumps({"config": {"digest": "sha256:" + sha(CONFIG.encode())}, "layers": []}).encode()
    other = json.dumps({"config": {"digest": "sha256:" + "0" * 64}, "layers": []}).encode()
    index = json.dumps(
        {"manifests": [{"digest": f"sha256:{sha(other)}"}, {"digest": f"sha256:{sha(manifest)}"}]}
    ).encode()
    write_store(tmp_path / "store", top, CONFIG.encode(), manifest, other, index)
    blobs = {DIFF_IDS[2]: Blob(sha(top), len(top), "tar+gzip")}

    def lay(needed: list[str], identity: bytes = index) -> Laid | None:
        return image_move.from_store(
            blobs,
            f"sha256:{sha(identity)}",
            [f"sha256:{one}" for one in DIFF_IDS],
            root=tmp_path / "laid",
            needed=needed,
            progress=Progress(None, "", 0),
            store=tmp_path / "store",
        )

    assert lay(DIFF_IDS[2:]) == Laid(CONFIG, (Layer(DIFF_IDS[2], len(LAYERS[2])),))
    assert (tmp_path / "laid/blobs/sha256" / DIFF_IDS[2]).read_bytes() == LAYERS[2]
    assert lay(DIFF_IDS[1:]) is None, "the base's middle layer is not in the store"
    assert lay(DIFF_IDS[2:], b"no such") is None
    (tmp_path / "store/blobs/sha256" / sha(top)).write_bytes(gzip.compress(b"other"))
    with pytest.raises(ImageError, match="is damaged"):
        lay(DIFF_IDS[2:])
