# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""An overlay over a checkpoint: other weights for some tensors, kept apart from the base and merged by name.

The engine takes every ``*.safetensors`` of its model directory and lets the last file in byte order win; it
reads no index. So the merge is a matter of names: a shard of the overlay that is called like one of the base
stands in its place, any other gets a name behind all of the base's. The merged *view* is a directory of hard
links, so it costs no bytes, and base, overlay and view have paths of their own: a switch never mixes them.

Everything else of the overlay (its config, tokenizer, index) is left out: the base's stay.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .model_lock import LockError, LockFile, ModelLock
from .tree import FileSpec, Proof, Report, TreeError, open_folders, parse_files

#: Sorts behind ``model-*`` and whatever else a checkpoint calls its shards.
PREFIX = "zz-overlay-"
BASE, OVERLAY = "base", "overlay"


class Link(NamedTuple):
    """One file of the view: its name there, the layer it comes from, its name in that layer."""

    name: str
    layer: str
    source: str


@dataclass
class Merged:
    """The lock of the view and where each of its files comes from."""

    lock: ModelLock
    links: list[Link] = field(default_factory=list)


def view_name(name: str, base_shards: Sequence[str]) -> str:
    """What a shard of the overlay is called in the view."""
    return name if name in base_shards else PREFIX + name


def merge(base: ModelLock, overlay: ModelLock) -> Merged:
    """The checkpoint that the engine will see. Raises LockError where the overlay is not one of this base."""
    known = base.tensors
    for shard, inventory in overlay.shards.items():
        strangers = sorted(set(inventory) - set(known))
        if strangers:
            raise LockError(
                "foreign-overlay",
                "is not in the checkpoint that it shall replace a part of",
                file=shard,
                tensor=strangers[0],
                found=f"{len(strangers)} tensors that the base lacks",
                remedy="name the overlay that was made for this checkpoint",
            )
        lost = sorted(set(base.shards.get(shard, ())) - set(inventory))
        if lost:
            raise LockError(
                "short-overlay",
                f"stands in the place of the base's shard but lacks {len(lost)} of its tensors",
                file=shard,
                tensor=lost[0],
                remedy="name a complete revision of the overlay",
            )
    names = {shard: view_name(shard, list(base.shards)) for shard in overlay.shards}
    last = max((os.fsencode(name) for name in base.shards), default=b"")
    added = [name for shard, name in names.items() if name != shard]
    if added and last >= os.fsencode(min(added)):
        raise LockError(
            "overlay-loses",
            "sorts behind the overlay, so the engine would take the base's tensors",
            file=os.fsdecode(last),
            wanted=f"a name before {min(added)}",
        )
    sizes = {item.name: item for item in overlay.files}
    replaced = {name for shard, name in names.items() if name == shard}
    files = [item for item in base.files if item.name not in replaced]
    links = [Link(item.name, BASE, item.name) for item in files]
    for shard, name in names.items():
        files.append(sizes[shard]._replace(name=name))
        links.append(Link(name, OVERLAY, shard))
    shards = {**{n: i for n, i in base.shards.items() if n not in replaced}}
    lengths = {**{n: base.header_bytes[n] for n in shards}}
    for shard, name in names.items():
        shards[name] = overlay.shards[shard]
        lengths[name] = overlay.header_bytes[shard]
    ordered = sorted(shards, key=os.fsencode)
    source = {
        **base.source,
        "overlay_repo": overlay.source.get("repo", ""),
        "overlay_revision": overlay.source.get("revision", ""),
    }
    lock = ModelLock(
        source,
        base.config,
        base.config_sha256,
        sorted(files, key=lambda item: item.name),
        {name: shards[name] for name in ordered},
        {name: lengths[name] for name in ordered},
        [*base.warnings, *overlay.warnings],
    )
    return Merged(lock, sorted(links))


def manifest(files: Sequence[LockFile], names: Sequence[str]) -> list[dict[str, Any]]:
    """Manifest entries of the named files."""
    return [
        {
            "name": item.name,
            "size": item.size,
            "sha256": item.sha256,
            "blob_id": "" if item.sha256 else item.git_oid,
        }
        for item in files
        if item.name in names
    ]


# --- the view on a node


@dataclass
class Layer:
    """One layer on the node: its tree and what is in it."""

    path: Path
    files: dict[str, FileSpec]


def parse_layers(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, Layer]:
    """Layers from plain data: name to ``path`` and ``files``."""
    found = {}
    for name, one in raw.items():
        try:
            found[str(name)] = Layer(Path(str(one["path"])), {s.name: s for s in parse_files(one["files"])})
        except KeyError as exc:
            raise TreeError(f"layer {name} needs path and files, it lacks {exc}") from exc
    return found


def every_file(layers: Mapping[str, Layer]) -> list[dict[str, str]]:
    """Links of every file of every layer by its own name."""
    return [
        {"name": name, "layer": layer, "source": name} for layer, one in layers.items() for name in one.files
    ]


def parse_links(raw: Sequence[Mapping[str, Any]], layers: Mapping[str, Layer]) -> list[tuple[FileSpec, Path]]:
    """What the view holds: its specs, and the file that each is a link to. Raises ``TreeError``."""
    found = []
    for item in raw:
        layer = layers.get(str(item.get("layer")))
        source = layer.files.get(str(item.get("source"))) if layer is not None else None
        if layer is None or source is None:
            raise TreeError(f"the view names {item!r}, which no layer holds; make the model lock again")
        spec = FileSpec(str(item["name"]), source.size, source.sha256, source.blob_id)
        parse_files([spec.as_dict()])
        found.append((spec, layer.path / source.name))
    if not found:
        raise TreeError("the view names no file")
    return sorted(found, key=lambda pair: pair[0].name)


def inspect_view(root: Path, wanted: Sequence[tuple[FileSpec, Path]]) -> Report:
    """A file of the view is right when it is the very file (device and inode) of its layer."""
    report = Report()
    for spec, source in wanted:
        try:
            here = (root / spec.name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            report.missing.append(spec)
            continue
        there = None
        with contextlib.suppress(OSError):
            there = source.lstat()
        same = there is not None and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        if same and stat.S_ISREG(here.st_mode):
            report.proven.append(spec)
        else:
            report.wrong.append((spec, f"not the file {source}"))
    names = {spec.name for spec, _source in wanted}
    if root.is_dir():
        report.foreign = sorted(
            path.relative_to(root).as_posix()
            for path in root.rglob("*")
            if not path.is_dir() and path.relative_to(root).as_posix() not in names
        )
    return report


def link_into(folder: Path, wanted: Sequence[tuple[FileSpec, Path]], needed: Sequence[FileSpec]) -> None:
    """Put the needed links into ``folder``, each in one step. Raises ``TreeError`` across filesystems."""
    names = {spec.name for spec in needed}
    for spec, source in wanted:
        if spec.name not in names:
            continue
        target = folder / spec.name
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.link")
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        try:
            os.link(source, aside, follow_symlinks=False)
        except OSError as exc:
            raise TreeError(
                f"{source} cannot be linked into {folder} ({exc.strerror}); checkpoint, overlay and view must lie on "
                "one filesystem"
            ) from exc
        aside.replace(target)
    open_folders(folder)


def proof_of(wanted: Sequence[tuple[FileSpec, Path]], proofs: Mapping[Path, Proof]) -> Proof:
    """The view's proof, taken from those of its layers: a link is the same inode. Raises ``TreeError``."""
    found = Proof()
    for spec, source in wanted:
        proof = next((one for root, one in proofs.items() if root in source.parents), None)
        root = next((root for root in proofs if root in source.parents), source.parent)
        name = source.relative_to(root).as_posix()
        seen = proof.files.get(name) if proof is not None else None
        original = FileSpec(name, spec.size, spec.sha256, spec.blob_id)
        if proof is None or seen is None or not proof.covers(original, source.lstat()):
            raise TreeError(
                f"{source} is not proven, so no view is made of it; run the checkpoint role again"
            )
        found.files[spec.name] = seen
    found.listing = tuple(spec for spec, _source in wanted)
    return found
