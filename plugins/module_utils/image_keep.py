# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which images of ours stay on a node: those of current and previous releases, of this run, of containers.

An image is ours when it carries the label ``sparkfleet.content`` and its one name is the tag that goes with it. An
image that somebody built upon ours inherits the label, but has another name; it is never listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .host_io import Host
from .image_identity import CONTENT_LABEL
from .release import marker_path, read


@dataclass(frozen=True)
class Own:
    """An image of ours. ``kept`` holds the reasons why it stays; none means that it may go. ``size`` is bytes."""

    reference: str
    content: str
    size: int
    identity: str
    kept: tuple[str, ...] = ()
    #: names by digest, as a pull leaves them; they go with the image
    digests: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The form that a result has."""
        return {
            "reference": self.reference,
            "content": self.content,
            "size": self.size,
            "kept": list(self.kept),
        }


def own_images(listed: Iterable[Mapping[str, Any]]) -> list[Own]:
    """Images of ours among those that Docker lists with our label, in the order of their names."""
    found = []
    for row in listed:
        content = str((row.get("Labels") or {}).get(CONTENT_LABEL, ""))
        names = [str(name) for name in row.get("RepoTags") or [] if name != "<none>:<none>"]
        if content and names and all(name.endswith(f":{content[:12]}") for name in names):
            digests = tuple(str(name) for name in row.get("RepoDigests") or [] if "<none>" not in str(name))
            size, identity = int(row.get("Size") or 0), str(row.get("Id"))
            found += [Own(name, content, size, identity, (), digests) for name in names]
    return sorted(found, key=lambda one: one.reference)


def releases(host: Host, directory: str) -> dict[str, list[str]]:
    """Image content to the releases of this node that have it. Raises ``Refusal`` for a damaged marker."""
    found: dict[str, list[str]] = {}
    for name in host.listdir(directory):
        if not name.endswith(".json"):
            continue
        replica = name[: -len(".json")]
        marker_path(directory, replica)
        marker = read(host, directory, replica) or {}
        for which in ("current", "previous"):
            content = str((marker.get(which) or {}).get("image_content") or "")
            if content:
                found.setdefault(content, []).append(f"{which} release of {replica}")
    return found


def judge(
    images: Sequence[Own], needed: Mapping[str, Sequence[str]], users: Mapping[str, Sequence[str]]
) -> list[Own]:
    """Give every image the reasons why it stays.

    :param needed: content to reasons.
    :param users: image id to the containers made of it, running or not.
    """
    return [
        replace(
            one,
            kept=(
                *needed.get(one.content, ()),
                *(f"container {name}" for name in users.get(one.identity, ())),
            ),
        )
        for one in images
    ]
