# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""An image as one configuration and its plain layers: the form in which it moves between nodes.

``docker save`` gives other bytes on every store: plain layers in one layout under a graph driver (overlay2),
compressed or plain ones in another under the containerd store. Taken apart, both are the same thing: the
configuration, and layers whose sha256 is their diff id. So a layer is proven by its own name, a killed copy
goes on under the same names whoever serves it, and a receiver is sent only the layers that it lacks:

* under a graph driver it has a layer when it has its *chain* (the layer upon the ones below it);
* under the containerd store it has a layer when the content store holds it, plain or compressed: the manifest
  that a receiver loads is written by the receiver and names the form that lies there.

Formats: OCI image specification 1.1 (config, manifest, layout), and ``manifest.json`` of ``docker save``.
Nothing here imports Ansible or touches Docker. Digests are 64 hex digits without ``sha256:``.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Callable

from .image_identity import ImageError

#: A configuration is text; the largest seen (a base with 80 layers of history) has 60 kB.
CONFIG_LIMIT = 4 << 20
CHUNK = 1 << 20
#: Compressed bytes unpacked at once: gzip grows at most about a thousandfold.
PIECE = 1 << 16
BLOBS = "blobs/sha256"
#: A layer that is being unpacked.
COMING = ".coming"
_HEX = re.compile(r"[0-9a-f]{64}\Z")
_BLOB_NAME = re.compile(r"blobs/sha256/([0-9a-f]{64})\Z")
#: First bytes of a compressed layer, and what an OCI media type calls it.
MAGIC = {b"\x1f\x8b": "tar+gzip", b"\x28\xb5\x2f\xfd": "tar+zstd"}
UNCOMPRESSED = "containerd.io/uncompressed=sha256:"


def kind_of(start: bytes) -> str:
    """``tar``, ``tar+gzip`` or ``tar+zstd`` by the first bytes of a layer."""
    for magic, kind in MAGIC.items():
        if start.startswith(magic):
            return kind
    return "tar"


def bare(digest: str) -> str:
    """64 hex digits of ``sha256:...``; refuses anything else (it becomes a file name)."""
    text = digest[7:] if digest.startswith("sha256:") else digest
    if not _HEX.match(text):
        raise ImageError(f"{digest!r} is no sha256 digest: this image cannot be moved")
    return text


def layer_name(diff_id: str) -> str:
    """Where a layer lies in the laid-down image and in the archive that is loaded."""
    return f"{BLOBS}/{bare(diff_id)}"


# -- who has what ------------------------------------------------------------------------------------------


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The chain id of every layer (OCI image specification, "Layer ChainID")."""
    found: list[str] = []
    for diff_id in diff_ids:
        text = f"sha256:{bare(diff_id)}"
        if found:
            text = f"sha256:{hashlib.sha256(f'sha256:{found[-1]} {text}'.encode()).hexdigest()}"
        found.append(bare(text))
    return found


@dataclass(frozen=True)
class Blob:
    """A layer in a content store: its own digest, its bytes there, and its form (``kind_of``)."""

    digest: str
    size: int
    kind: str

    def as_list(self) -> list[Any]:
        """The form that travels through Ansible."""
        return [self.digest, self.size, self.kind]


@dataclass(frozen=True)
class Holding:
    """What a node has of images.

    :param containerd: the containerd store (else a graph driver such as overlay2).
    :param chains: chain ids of all its images; what counts under a graph driver.
    :param blobs: diff id to the layer in the content store; what counts under the containerd store.
    """

    containerd: bool = False
    chains: frozenset[str] = frozenset()
    blobs: Mapping[str, Blob] = field(default_factory=dict)

    def lacks(self, diff_ids: Sequence[str]) -> list[str]:
        """The layers that have to be brought, in order."""
        wanted = [bare(diff_id) for diff_id in diff_ids]
        if self.containerd:
            return [diff_id for diff_id in wanted if diff_id not in self.blobs]
        chains = chain_ids(wanted)
        return [diff_id for at, diff_id in enumerate(wanted) if chains[at] not in self.chains]

    def as_dict(self) -> dict[str, Any]:
        """The form that travels through Ansible."""
        return {
            "containerd": self.containerd,
            "chains": sorted(self.chains),
            "blobs": {name: blob.as_list() for name, blob in sorted(self.blobs.items())},
        }


def parse_holding(raw: Mapping[str, Any]) -> Holding:
    """A holding from plain data."""
    return Holding(
        bool(raw.get("containerd")),
        frozenset(str(item) for item in raw.get("chains") or []),
        {
            str(name): Blob(str(one[0]), int(one[1]), str(one[2]))
            for name, one in (raw.get("blobs") or {}).items()
        },
    )


def parse_content(text: str) -> dict[str, str]:
    """Diff id to blob digest, of ``ctr content ls`` (columns DIGEST SIZE AGE LABELS).

    A blob is its own diff id unless containerd labelled it with the digest of what it unpacks to. The plain form
    wins, where both are there.
    """
    found: dict[str, str] = {}
    plain: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if not words or not words[0].startswith("sha256:") or not _HEX.match(words[0][7:]):
            continue
        digest = words[0][7:]
        labels = words[-1].split(",") if len(words) > 1 else []
        unpacked = [item[len(UNCOMPRESSED) :] for item in labels if item.startswith(UNCOMPRESSED)]
        if unpacked and _HEX.match(unpacked[0]):
            found[unpacked[0]] = digest
        else:
            plain[digest] = digest
    return {**found, **plain}


# -- taking a saved image apart ----------------------------------------------------------------------------


class Unpacker:
    """The plain bytes of a layer that comes in pieces, plain or gzip. Raises ``ImageError`` for zstd."""

    def __init__(self, start: bytes) -> None:
        kind = kind_of(start)
        if kind == "tar+zstd":
            raise ImageError(
                "this node's store holds a layer compressed by zstd, which Python cannot unpack; build the image on "
                "another node, or from a base with gzip layers"
            )
        self._gzip = kind == "tar+gzip"
        self._inflate = zlib.decompressobj(31)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Plain pieces; concatenated gzip members are one stream (RFC 1952, 2.2)."""
        if not self._gzip:
            yield data
            return
        for at in range(0, len(data), PIECE):
            part = data[at : at + PIECE]
            while part:
                try:
                    plain = self._inflate.decompress(part)
                except zlib.error as exc:
                    raise ImageError(f"a layer of the saved image is damaged: {exc}") from exc
                if plain:
                    yield plain
                part = b""
                if self._inflate.eof:
                    part = self._inflate.unused_data.lstrip(b"\0")
                    self._inflate = zlib.decompressobj(31)


@dataclass(frozen=True)
class Layer:
    """One laid-down layer: its diff id and its plain bytes."""

    diff_id: str
    size: int


@dataclass(frozen=True)
class Laid:
    """A laid-down image: the text of its configuration, and those layers that somebody needs."""

    config: str
    layers: tuple[Layer, ...]

    @property
    def diff_ids(self) -> list[str]:
        """All layers, bottom first."""
        return [bare(str(item)) for item in json.loads(self.config)["rootfs"]["diff_ids"]]

    def as_dict(self) -> dict[str, Any]:
        """The form that travels through Ansible."""
        return {"config": self.config, "layers": [[one.diff_id, one.size] for one in self.layers]}


def parse_laid(raw: Mapping[str, Any]) -> Laid:
    """A laid-down image from plain data. Raises ``ImageError``."""
    try:
        laid = Laid(str(raw["config"]), tuple(Layer(bare(str(one[0])), int(one[1])) for one in raw["layers"]))
        _ = laid.diff_ids
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise ImageError(f"what the source says of the image cannot be read ({exc!r}); run again") from exc
    return laid


def same_config(data: bytes, diff_ids: Sequence[str]) -> bool:
    """Whether this is the configuration of the image with these layers."""
    if not data.lstrip().startswith(b"{"):
        return False
    try:
        raw = json.loads(data.decode("utf-8"))
        found = raw["rootfs"]["diff_ids"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(list(found) == [f"sha256:{bare(item)}" for item in diff_ids])


def unpack(
    source: IO[bytes], target: Path, on_bytes: Callable[[int], None], start: bytes = b""
) -> tuple[str, int]:
    """Write the plain bytes of a layer; returns their sha256 and their number. ``start`` was read already."""
    data = start or source.read(CHUNK)
    digest = hashlib.sha256()
    size = 0
    unpacker = Unpacker(data)
    with target.open("wb") as out:
        while data:
            for piece in unpacker.feed(data):
                digest.update(piece)
                out.write(piece)
                size += len(piece)
            on_bytes(len(data))
            data = source.read(CHUNK)
    return digest.hexdigest(), size


def keep(passing: Path, target: Path) -> None:
    """Give a layer that was unpacked its name, readable for the share."""
    passing.replace(target)
    target.chmod(0o644)


@dataclass(frozen=True)
class Described:
    """What a content store says of an image: its configuration, and the digests that its manifest gives its layers.

    ``blobs`` is empty where no manifest is between the name and the configuration.
    """

    config: str = ""
    blobs: tuple[str, ...] = ()


def described(read: Callable[[str], bytes], digest: str, diff_ids: Sequence[str]) -> Described:
    """The image behind a digest: of a configuration, of a manifest, or of an index; empty where there is none.

    ``read`` gives the bytes of a blob by its digest and raises OSError for one that is not there.
    """
    try:
        data = read(bare(digest))
        raw = json.loads(data.decode("utf-8"))
    except (OSError, ValueError):
        return Described()
    if same_config(data, diff_ids):
        return Described(data.decode("utf-8"))
    manifest = "config" in raw and "layers" in raw
    for one in [raw["config"]] if manifest else raw.get("manifests") or []:
        found = described(read, str(one.get("digest", "")), diff_ids)
        if found.config and manifest:
            return Described(found.config, tuple(bare(str(row["digest"])) for row in raw["layers"]))
        if found.config:
            return found
    return Described()


def incomplete(what: str) -> ImageError:
    """The refusal of an image store that has less than it names."""
    return ImageError(
        f"Docker names the image, but what it saves {what}: this node's image store is incomplete. "
        "Remove the image here and build or bring it again"
    )


def lay_down(
    stream: IO[bytes],
    root: Path,
    diff_ids: Sequence[str],
    needed: Iterable[str],
    on_bytes: Callable[[int], None],
) -> Laid:
    """Read a ``docker save`` stream and keep the configuration and the layers of ``needed`` below ``root``.

    :raises ImageError: a layer or the configuration is not in the stream, or it breaks off (field problem B70): Docker
        answers with success before it finds that a blob is absent.
    """
    wanted = {bare(item) for item in needed}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            config, found = _sort_out(tar, root, [bare(item) for item in diff_ids], wanted, on_bytes)
    except tarfile.TarError as exc:
        raise incomplete(f"breaks off ({exc})") from exc
    lost = sorted(wanted - set(found))
    if lost or not config:
        what = ", ".join(f"layer {item[:12]}" for item in lost) or "configuration"
        raise incomplete(f"lacks its {what}")
    order = [bare(item) for item in diff_ids]
    return Laid(config, tuple(Layer(name, found[name]) for name in dict.fromkeys(order) if name in found))


def _sort_out(
    tar: tarfile.TarFile,
    root: Path,
    diff_ids: Sequence[str],
    wanted: set[str],
    on_bytes: Callable[[int], None],
) -> tuple[str, dict[str, int]]:
    """Write the wanted layers; returns the configuration, and the size of each layer that was written."""
    folder = root / BLOBS
    folder.mkdir(parents=True, exist_ok=True)
    config = ""
    found: dict[str, int] = {}
    for info in tar:
        if not info.isfile():
            continue
        match = _BLOB_NAME.match(info.name.lstrip("./"))
        if match and match.group(1) in set(diff_ids) - wanted:
            continue  # named by its diff id, and nobody needs it
        source = tar.extractfile(info)
        if source is None:
            raise ImageError(f"the saved image has an unreadable member {info.name}")
        start = source.read(CHUNK if info.size > CONFIG_LIMIT else CONFIG_LIMIT)
        if not config and info.size <= CONFIG_LIMIT and same_config(start, diff_ids):
            config = start.decode("utf-8")
            continue
        if info.name.endswith((".json", "/VERSION")) or not wanted:
            continue
        passing = folder / COMING
        name, size = unpack(source, passing, on_bytes, start)
        if name in wanted:
            keep(passing, folder / name)
            found[name] = size
        else:
            passing.unlink()
    return config, found


# -- the archive that a receiver loads ---------------------------------------------------------------------


def canonical_name(reference: str) -> str:
    """``sparkfleet/engine:1`` as containerd names it: ``docker.io/sparkfleet/engine:1``."""
    first, slash, _rest = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return reference
    return f"docker.io/{reference}" if slash else f"docker.io/library/{reference}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _member(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _whole(name: str, data: bytes) -> Iterator[bytes]:
    yield _member(name, len(data)) + data + _padding(len(data))


def oci_manifest(config: str, blobs: Mapping[str, Blob]) -> bytes:
    """The manifest over a configuration and its layers in the form in which they lie in the content store."""
    raw = config.encode()
    layers = []
    for diff_id in Laid(config, ()).diff_ids:
        blob = blobs[diff_id]
        media = f"application/vnd.oci.image.layer.v1.{blob.kind}"
        layers.append({"mediaType": media, "digest": f"sha256:{blob.digest}", "size": blob.size})
    return _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": f"sha256:{hashlib.sha256(raw).hexdigest()}",
                "size": len(raw),
            },
            "layers": layers,
        }
    )


def archive(
    root: Path, reference: str, config: str, brought: Sequence[Layer], holding: Holding
) -> Iterator[bytes]:
    """The tar stream that ``docker load`` takes, with the brought layers alone.

    A graph driver takes a layer whose chain it has from its own store and never looks for the file; the containerd
    store takes a blob that it has by the digest in the manifest.
    """
    raw = config.encode()
    name = hashlib.sha256(raw).hexdigest()
    diff_ids = Laid(config, ()).diff_ids
    mine = {layer.diff_id: Blob(layer.diff_id, layer.size, "tar") for layer in brought}
    if holding.containerd:
        manifest = oci_manifest(config, {**holding.blobs, **mine})
        index = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    "mediaType": "application/vnd.oci.image.manifest.v1+json",
                    "digest": f"sha256:{hashlib.sha256(manifest).hexdigest()}",
                    "size": len(manifest),
                    "annotations": {
                        "io.containerd.image.name": canonical_name(reference),
                        "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
                    },
                }
            ],
        }
        yield from _whole("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        yield from _whole("index.json", _json(index))
        yield from _whole(f"{BLOBS}/{hashlib.sha256(manifest).hexdigest()}", manifest)
    else:
        listing = [
            {
                "Config": layer_name(name),
                "RepoTags": [reference],
                "Layers": [layer_name(diff_id) for diff_id in diff_ids],
            }
        ]
        yield from _whole("manifest.json", _json(listing))
    yield from _whole(layer_name(name), raw)
    for layer in mine.values():
        yield _member(layer_name(layer.digest), layer.size)
        sent = 0
        with (root / layer_name(layer.digest)).open("rb") as source:
            while True:
                data = source.read(CHUNK)
                if not data:
                    break
                sent += len(data)
                yield data
        if sent != layer.size:
            raise ImageError(f"{root / layer_name(layer.digest)} has {sent} bytes instead of {layer.size}")
        yield _padding(sent)
    yield bytes(2 * tarfile.BLOCKSIZE)
