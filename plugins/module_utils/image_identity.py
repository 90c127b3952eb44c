# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What an engine image is, on every node and in every image store.

Two identities, both computed, never read from ``.Id`` (which is the config digest under overlay2 and the
manifest digest under the containerd store, field problem B69):

* the *content hash* of what an image is built from. It names the image before it exists, is its tag and its
  label ``sparkfleet.content``, and decides whether anything has to be built;
* the *layers digest* of an image that exists: RootFS layers and the parts of the configuration that a
  container inherits. Equal on two nodes means that the two ranks run the same thing.

Nothing here imports Ansible.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTENT_LABEL = "sparkfleet.content"
#: Never part of a context: they change without changing what is built.
IGNORED = (".git", "__pycache__", "*.pyc", ".DS_Store")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}\Z")
_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*(?:(?::[0-9]+)?/[a-z0-9]+(?:[._-][a-z0-9]+)*)*\Z")
_DNS = re.compile(r"[A-Za-z0-9.-]+(?::[0-9]+)?\Z")


class ImageError(Exception):
    """A refusal: what was found, what was wanted and the remedy."""


@dataclass(frozen=True)
class Entry:
    """One member of a build context: ``kind`` is ``file``, ``dir`` or ``link``."""

    name: str
    kind: str
    executable: bool
    data: bytes
    link: str = ""


def _ignored(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)


def read_context(root: Path) -> tuple[Entry, ...]:
    """The build context of a directory in name order. Contexts are recipes: small enough for memory."""
    if not root.is_dir():
        raise ImageError(f"the build context {root} is not a directory on the controller")
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not _ignored(name))
        for name in sorted([*names, *files]):
            if _ignored(name):
                continue
            path = Path(folder) / name
            relative = path.relative_to(root).as_posix()
            info = path.lstat()
            if stat.S_ISLNK(info.st_mode):
                target = os.readlink(path)  # noqa: PTH115 - the text of the link, not a path
                found.append(Entry(relative, "link", False, b"", target))
            elif stat.S_ISDIR(info.st_mode):
                found.append(Entry(relative, "dir", True, b""))
            elif stat.S_ISREG(info.st_mode):
                found.append(Entry(relative, "file", bool(info.st_mode & 0o100), path.read_bytes()))
            else:
                raise ImageError(
                    f"{path} is neither file, directory nor link; a build context cannot hold it"
                )
    return tuple(sorted(found, key=lambda entry: entry.name))


def patch_entries(patches: Sequence[Path]) -> tuple[Entry, ...]:
    """Patches as context members ``patches/NNNN-NAME`` in the order given, which is the order of applying."""
    found = []
    for number, path in enumerate(patches, 1):
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise ImageError(f"patch {path}: {exc.strerror}") from exc
        name = re.sub(r"^\d+-", "", path.name)
        found.append(Entry(f"patches/{number:04d}-{name}", "file", False, data))
    return tuple(found)


@dataclass(frozen=True)
class Recipe:
    """All that decides what a build gives.

    :param dockerfile: name of the Dockerfile inside the context.
    :param base: reference of the base image; ends in ``@sha256:...`` unless a moving tag was allowed.
    """

    entries: tuple[Entry, ...]
    dockerfile: str
    build_args: Mapping[str, str]
    base: str
    target: str = ""

    @property
    def content(self) -> str:
        """64 hex digits over Dockerfile, context, arguments, base and order of patches."""
        rows: list[Any] = [
            [entry.name, entry.kind, entry.executable, hashlib.sha256(entry.data).hexdigest(), entry.link]
            for entry in self.entries
        ]
        canon = {
            "format": 1,
            "entries": rows,
            "dockerfile": self.dockerfile,
            "args": dict(sorted(self.build_args.items())),
            "base": self.base,
            "target": self.target,
        }
        return hashlib.sha256(json.dumps(canon, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def make_recipe(
    root: Path,
    dockerfile: str,
    build_args: Mapping[str, str],
    base: str,
    *,
    patches: Sequence[Path] = (),
    allow_tag: bool = False,
    target: str = "",
) -> Recipe:
    """Read a recipe from the controller's disk. Raises ``ImageError``."""
    entries = read_context(root)
    extra = patch_entries(patches)
    taken = {entry.name for entry in entries}
    for entry in extra:
        if entry.name in taken:
            raise ImageError(f"the context already holds {entry.name}; rename the patch or remove it there")
    if dockerfile not in taken:
        raise ImageError(f"{root} has no {dockerfile}; name the Dockerfile inside the context")
    if not base:
        raise ImageError("no base image is named: the base decides the content and has no default here")
    if not _DIGEST.search(base) and not allow_tag:
        raise ImageError(
            f"the base image {base} is a tag, which can move between two builds and two nodes; name it by "
            "digest (NAME@sha256:...), or allow a tag by image_allow_base_tag"
        )
    merged = tuple(sorted([*entries, *extra], key=lambda entry: entry.name))
    return Recipe(merged, dockerfile, {str(k): str(v) for k, v in build_args.items()}, base, target)


def context_tar(recipe: Recipe) -> bytes:
    """The context as a tar that depends on its contents alone (owner, time and mode are fixed)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for entry in recipe.entries:
            info = tarfile.TarInfo(entry.name)
            info.mode = 0o755 if entry.executable else 0o644
            if entry.kind == "dir":
                info.type = tarfile.DIRTYPE
            elif entry.kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            else:
                info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data) if entry.kind == "file" else None)
    return out.getvalue()


def reference(name: str, content: str) -> str:
    """``NAME:<first 12 hex of the content hash>``; refuses a name that Docker would refuse later."""
    first, slash, rest = name.partition("/")
    valid = _NAME.match(name) or (slash and _DNS.match(first) and _NAME.match(rest))
    if not valid:
        raise ImageError(f"{name!r} is not an image name: lower-case path parts, no tag and no digest")
    return f"{name}:{content[:12]}"


def layers_digest(inspect: Mapping[str, Any]) -> str:
    """Identity of an existing image across stores: RootFS layers plus what a container inherits."""
    config = inspect.get("Config") or {}
    root = inspect.get("RootFS") or {}
    layers = root.get("Layers")
    if not layers:
        raise ImageError("Docker names no layers for the image: it cannot be compared with another node's")
    canon = {
        "layers": layers,
        "env": config.get("Env") or [],
        "entrypoint": config.get("Entrypoint") or [],
        "cmd": config.get("Cmd") or [],
        "workdir": config.get("WorkingDir") or "",
    }
    return hashlib.sha256(json.dumps(canon, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


#: Machine names of Docker and uname for the same architecture.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv8": "arm64", "arm64/v8": "arm64"}


def architecture(name: str) -> str:
    """One spelling: ``arm64``, ``amd64``."""
    return _ARCHITECTURES.get(name.lower(), name.lower())


def refuse_architecture(image: str, found: str, node: str) -> None:
    """Refuse an image of another architecture before any container is created (field problem B68)."""
    if architecture(found) != architecture(node):
        raise ImageError(
            f"{image} is built for {architecture(found) or 'an unnamed architecture'}, this node is "
            f"{architecture(node)}: it would fail with 'exec format error'. Build it on a node of the fleet "
            "or name an image of the right platform"
        )


def outage(node: str, ranks: Sequence[str], replicas: Sequence[str]) -> str:
    """What a build on a node costs those who are served there; empty when no rank runs.

    Six minutes is the recipe's own figure for a build on a Spark with the base image at hand.
    """
    if not ranks:
        return ""
    return (
        f"{', '.join(ranks)} run on {node}, and a build takes memory and processors that they need. Expected outage: "
        f"{', '.join(replicas)} slow or stopped by the guard while the image is built (about 6 minutes on a Spark, and "
        "before that the download of a base that is not here), then a start of all ranks."
    )
