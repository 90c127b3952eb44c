# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Moving an image between two nodes: what a node holds, laying down at the source, loading at the receiver.

The way between is the share of ``fabric_copy``; the forms are those of ``image_archive``. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from .docker_api import DockerApi, DockerApiError, DockerNotFound, DockerStreamError, Stream
from .fabric_copy import SizeWatch, Source, pull, runner
from .image_archive import (
    BLOBS,
    COMING,
    Blob,
    Described,
    Holding,
    Laid,
    Layer,
    archive,
    bare,
    chain_ids,
    described,
    keep,
    kind_of,
    lay_down,
    layer_name,
    parse_content,
    unpack,
)
from .image_identity import ImageError, architecture
from .tree import (
    FileSpec,
    Progress,
    exclusive,
    human,
    inspect,
    nearest_existing,
    open_folders,
    proof_path,
    prove,
    read_proof,
    refuse_space,
    write_proof,
)
from .weights_module import lock_dir, need_tool, own_parents

#: Where Docker's containerd listens when the engine does not say so (API below 1.47): Debian, docker-ce, own child.
CONTAINERD_SOCKETS = (
    "/run/containerd/containerd.sock",
    "/var/run/docker/containerd/containerd.sock",
)
#: Where containerd keeps blobs unless its configuration moves its root.
CONTENT_ROOT = Path("/var/lib/containerd/io.containerd.content.v1.content")
#: Docker's namespace in containerd.
NAMESPACE = "moby"
#: What a load takes under Docker's root: the unpacked archive and the layer made of it.
LOAD_COPIES = 2


def stage_dir(data_dir: str, content: str) -> Path:
    """Where an image lies as files while it moves."""
    return Path(data_dir) / "transfer" / f"image-{content[:12]}"


def docker_root(info: Mapping[str, Any]) -> Path:
    """The directory of Docker's own data."""
    return Path(str(info.get("DockerRootDir") or "/var/lib/docker"))


def uses_containerd(info: Mapping[str, Any]) -> bool:
    """Whether images live in the containerd store."""
    return any("io.containerd.snapshotter.v1" in str(pair) for pair in info.get("DriverStatus") or [])


def read_kind(path: Path) -> str:
    """The form of a layer in a content store; empty for what is a description of an image."""
    with path.open("rb") as source:
        start = source.read(4)
    return "" if start.startswith(b"{") else kind_of(start)


def content_blobs(info: Mapping[str, Any]) -> dict[str, Blob] | None:
    """The layers in Docker's content store; None where containerd does not tell: then every layer is brought."""
    containerd = info.get("Containerd") or {}
    addresses = [str(containerd.get("Address") or ""), *CONTAINERD_SOCKETS]
    address = next((item for item in addresses if item and Path(item).exists()), "")
    namespace = str((containerd.get("Namespaces") or {}).get("Containers") or NAMESPACE)
    ctr = shutil.which("ctr", path="/usr/local/bin:/usr/bin:/bin")
    if not ctr or not address or not CONTENT_ROOT.is_dir():
        return None
    done = subprocess.run(
        [ctr, "--address", address, "--namespace", namespace, "content", "ls"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        return None
    found = {}
    for diff_id, digest in parse_content(done.stdout).items():
        path = CONTENT_ROOT / BLOBS / digest
        with contextlib.suppress(OSError):
            kind = read_kind(path)
            # A compressed blob without a label: nothing says of what.
            if kind and (diff_id != digest or kind == "tar"):
                found[diff_id] = Blob(digest, path.stat().st_size, kind)
    return found


def holding(api: DockerApi) -> Holding:
    """What this node has of images."""
    info = api.info()
    if uses_containerd(info):
        return Holding(True, frozenset(), content_blobs(info) or {})
    chains: set[str] = set()
    for row in api.image_list():
        with contextlib.suppress(DockerNotFound):  # removed since it was listed
            image = api.image_inspect(str(row["Id"]))
            chains.update(chain_ids((image.get("RootFS") or {}).get("Layers") or []))
    return Holding(False, frozenset(chains), {})


class _Reader:
    """A Docker stream as the file that tarfile reads from."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes."""
        return self._stream.read(size if size > 0 else 1 << 20)


def refuse_rooms(needs: Sequence[tuple[Path, int]], what: str) -> None:
    """Refuse when a file system lacks room; needs on one file system are added up."""
    sums: dict[int, tuple[list[str], int, int]] = {}
    for path, size in needs:
        place = nearest_existing(path)
        info = os.statvfs(place)
        names, total, _free = sums.get(place.stat().st_dev, ([], 0, 0))
        sums[place.stat().st_dev] = ([*names, str(path)], total + size, info.f_bavail * info.f_frsize)
    for names, total, free in sums.values():
        if total > free:
            raise ImageError(
                f"{what} needs {human(total)} on the file system of {' and '.join(names)}, {human(free)} are free: "
                f"{human(total - free)} short. Free that much, or move it to a larger disk"
            )


def export(
    api: DockerApi, reference: str, root: Path, *, size: int, needed: Sequence[str], progress: Progress
) -> Laid:
    """Lay the configuration and the needed layers down as files below ``root``.

    ``docker save`` writes all of the image below Docker's own root first (a graph driver does). The containerd store
    is read itself where it can be: a pull fetches no layer whose snapshot is there already, and ``docker save`` then
    gives none of an image, not even the layers that it has.
    """
    info = api.info()
    refuse_rooms([(root, size), (docker_root(info), size)], f"laying down {reference} for the other members")
    own_parents(root)
    image = api.image_inspect(reference)
    diff_ids = (image.get("RootFS") or {}).get("Layers") or []
    if uses_containerd(info):
        laid = from_store(
            content_blobs(info) or {}, str(image["Id"]), diff_ids, root=root, needed=needed, progress=progress
        )
        if laid is not None:
            return laid
    platform = f"linux/{architecture(os.uname().machine)}"
    with api.image_save([reference], platform=platform) as stream:
        laid = lay_down(cast("IO[bytes]", _Reader(stream)), root, diff_ids, needed, progress.add)
    open_folders(root)
    return laid


def store_reader(store: Path) -> Callable[[str], bytes]:
    """Reads a blob of a content store by its digest."""
    return lambda digest: (store / BLOBS / digest).read_bytes()


def from_store(
    blobs: Mapping[str, Blob],
    identity: str,
    diff_ids: Sequence[str],
    *,
    root: Path,
    needed: Sequence[str],
    progress: Progress,
    store: Path = CONTENT_ROOT,
) -> Laid | None:
    """Lay down from the blobs of a content store; None where it has not all that is needed."""
    wanted = dict.fromkeys(bare(item) for item in diff_ids if bare(item) in {bare(one) for one in needed})
    known = described(store_reader(store), identity, diff_ids)
    have = forms(blobs, known, diff_ids, store)
    if not known.config or not set(wanted) <= set(have):
        return None
    folder = root / BLOBS
    folder.mkdir(parents=True, exist_ok=True)
    layers = []
    for diff_id in wanted:
        with (store / BLOBS / have[diff_id].digest).open("rb") as source:
            name, size = unpack(source, folder / COMING, progress.add)
        if name != diff_id:
            raise ImageError(
                f"the layer {diff_id[:12]} in this node's image store is damaged: it unpacks to {name[:12]}. "
                "Remove the image here and build or bring it again"
            )
        keep(folder / COMING, folder / name)
        layers.append(Layer(name, size))
    open_folders(root)
    return Laid(known.config, tuple(layers))


def bring(
    api: DockerApi,
    reference: str,
    root: Path,
    *,
    laid: Laid,
    mine: Holding,
    source: Source,
    data_dir: str,
    reserve_bytes: int,
    parallel: int,
    progress: Progress,
    limit_kib: int = 0,
) -> int:
    """Copy the layers that this node lacks, prove them, load the image; returns the bytes that were brought."""
    sizes = {layer.diff_id: layer for layer in laid.layers}
    wanted = list(dict.fromkeys(mine.lacks(laid.diff_ids)))
    strange = [diff_id for diff_id in wanted if diff_id not in sizes]
    if strange:
        raise ImageError(
            f"the source laid down no layer {strange[0][:12]}, which this node lacks: an image was removed here "
            "meanwhile. Run again"
        )
    brought: list[Layer] = [sizes[diff_id] for diff_id in wanted]
    files = [FileSpec(layer_name(one.diff_id), one.size, one.diff_id) for one in brought]
    total = sum(one.size for one in brought)
    own_parents(root)
    own_parents(lock_dir(data_dir))
    root.mkdir(mode=0o755, exist_ok=True)
    proof = read_proof(proof_path(root))
    with exclusive(lock_dir(data_dir) / root.name, reference) as handle:
        report = prove(root, inspect(root, files, proof), proof, parallel)
        place = docker_root(api.info())
        refuse_space(place, 1, reserve_bytes, f"loading {reference}")
        refuse_rooms(
            [(root, report.needed_bytes - report.resumable), (place, LOAD_COPIES * total)],
            f"receiving {reference}",
        )
        progress.step("copy of the image", report.needed_bytes)
        try:
            with SizeWatch(root, total - report.needed_bytes, progress.set):
                pull(
                    need_tool("rsync", "rsync"),
                    source,
                    root,
                    report.needed,
                    proof,
                    run=runner(handle),
                    parallel=parallel,
                    limit_kib=limit_kib,
                )
        finally:
            write_proof(proof_path(root), proof)
        progress.step("load of the image", total)
        api.image_load(archive(root, reference, laid.config, brought, mine), on_line=progress.line)
        if mine.containerd:
            lost = holding(api).lacks(laid.diff_ids) if mine.blobs else []
            if lost:
                raise ImageError(
                    f"{reference} was loaded, but its layer {lost[0][:12]} is not in the content store: it was cleared "
                    "away meanwhile. Remove the image here and run again"
                )
    return report.needed_bytes


# -- an image that is in parts ---------------------------------------------------------------------------------
#
# A pull into the containerd store, and so a build upon a base that it pulls, fetches no layer whose snapshot is there
# already, such as one of an image that was moved here in its plain form. What comes of it runs from its snapshots. But
# its manifest names bytes that the store does not have: Docker leaves it out of its lists and saves none of its layers.


def forms(
    blobs: Mapping[str, Blob], known: Described, diff_ids: Sequence[str], store: Path
) -> dict[str, Blob]:
    """Diff id to the form in which a layer of this image lies in the store, by its manifest and by what is known."""
    found = dict(blobs)
    if len(known.blobs) == len(diff_ids):
        for diff_id, digest in zip(diff_ids, known.blobs):
            path = store / BLOBS / digest
            with contextlib.suppress(OSError):
                found[bare(diff_id)] = Blob(digest, path.stat().st_size, read_kind(path))
    return found


def refuse_unpacked_only(found: Mapping[str, Blob], diff_ids: Sequence[str], what: str) -> None:
    """Refuse an image of which the containerd store has a layer as a snapshot alone."""
    lost = Holding(True, frozenset(), found).lacks(diff_ids)
    if lost:
        raise ImageError(
            f"this node's image store has {len(lost)} of {len(diff_ids)} layers of {what} unpacked only (the first is "
            f"{lost[0][:12]}): the image that brought their bytes was removed, and a pull does not fetch what is "
            "unpacked. What is made of them could not be moved, and Docker would not list it. Remove here what has "
            "these layers (docker rmi, then docker image prune) and run again, or name another builder by image_builder"
        )


def name_whole(api: DockerApi, found: str, reference: str, *, store: Path = CONTENT_ROOT) -> bool:
    """Give the image ``found`` its name; True when it took a manifest of its own to do so.

    That manifest names each layer in the form in which it lies in the store, as one that is moved here has it. Where
    containerd does not tell what it has, the name alone is given.

    :raises ImageError: a layer lies there in no form.
    """

    def look(name: str) -> tuple[Described, list[str]]:
        image = api.image_inspect(name)
        layers = (image.get("RootFS") or {}).get("Layers") or []
        return described(store_reader(store), str(image["Id"]), layers), layers

    def absent(one: Described) -> list[str]:
        return [digest for digest in one.blobs if not (store / BLOBS / digest).is_file()]

    info = api.info()
    blobs = content_blobs(info) if uses_containerd(info) else None
    known, diff_ids = look(found) if blobs is not None else (Described(), [])
    if blobs is None or not absent(known):
        repo, _colon, tag = reference.rpartition(":")
        api.image_tag(found, repo, tag)
        return False
    have = forms(blobs, known, diff_ids, store)
    refuse_unpacked_only(have, diff_ids, reference)
    api.image_load(archive(store, reference, known.config, [], Holding(True, frozenset(), have)))
    lost = absent(look(reference)[0])
    if lost:
        api.image_remove(reference)
        raise ImageError(
            f"the bytes {lost[0][:12]} of a layer of {reference} were cleared away while it was given its name. "
            "Run again"
        )
    return True


def prepare_base(
    api: DockerApi,
    base: str,
    on_line: Callable[[str], None] | None = None,
    *,
    store: Path = CONTENT_ROOT,
) -> None:
    """Have the base of a build here, under the containerd store with bytes for each of its layers.

    :raises ImageError: a layer of it lies there in no form, or the base cannot be pulled.
    """
    try:
        image = api.image_inspect(base)
    except DockerNotFound:
        try:
            api.image_pull(base, on_line=on_line)
        except (DockerStreamError, DockerApiError) as exc:
            raise ImageError(
                f"the base image {base} is not here and cannot be pulled: {exc}. Correct image_base, or bring the base "
                "to this node"
            ) from exc
        image = api.image_inspect(base)
    info = api.info()
    blobs = content_blobs(info) if uses_containerd(info) else None
    if blobs is not None:
        layers = (image.get("RootFS") or {}).get("Layers") or []
        known = described(store_reader(store), str(image["Id"]), layers)
        refuse_unpacked_only(forms(blobs, known, layers, store), layers, base)


def clean(root: Path) -> None:
    """Remove what an export or a copy laid down."""
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        proof_path(root).unlink()
    with contextlib.suppress(OSError):
        root.parent.rmdir()  # the place of passing things, when this was the last
