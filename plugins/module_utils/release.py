"""The release marker: what a replica runs on this node, and what it ran before.

One JSON file a replica. `current` and `previous` each hold the image's content id, the digest of the model
lock, the
rank file, the launch hash and the time of the commit. Committing what is already current changes nothing,
not even the
time; so a second run of the site leaves the file as it is, byte for byte. Going back is committing
`previous` again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .host_io import Host, Refusal, text_diff

SCHEMA = 1
DIRECTORY = "/var/lib/sparkfleet/releases"
#: What a release consists of. All are strings; none is a secret and none changes while the release is the
# same.
KEYS = ("image_content", "model_lock", "rank_file", "launch_hash")
#: Directories on this node that the release needs, and shares as ``volume:NAME`` and ``export:NAME``, so that nothing
#: else has to guess what may go. Not part of the identity: the same release may learn of them later.
PATHS = "paths"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


def marker_path(directory: str, replica: str) -> str:
    """The file of a replica. Raises Refusal for a name that could leave the directory."""
    if not _NAME.match(replica):
        raise Refusal(
            "not a replica name", replica, "letters, digits, dot, dash, underscore", "correct the inventory"
        )
    return f"{directory.rstrip('/')}/{replica}.json"


def parse(text: str | None, path: str) -> dict[str, Any] | None:
    """A marker, or None when there is none. A damaged one is refused: what runs is then not known."""
    if text is None:
        return None
    remedy = f"look at what runs (`docker ps`), then remove {path} and run the site again"
    try:
        marker = json.loads(text)
    except ValueError as error:
        raise Refusal("the release marker cannot be read", str(error), "JSON", remedy) from error
    if (
        not isinstance(marker, dict)
        or marker.get("schema") != SCHEMA
        or not isinstance(marker.get("current"), dict)
    ):
        raise Refusal("the release marker is of another kind", text[:80], f"schema {SCHEMA}", remedy)
    return marker


def content(release: Mapping[str, Any]) -> dict[str, str]:
    """The identity in a release: everything but the time of its commit. Raises Refusal when a part is
    missing."""
    missing = [key for key in KEYS if not release.get(key)]
    if missing:
        raise Refusal(
            "a release without identity cannot be committed",
            f"empty: {', '.join(missing)}",
            ", ".join(KEYS),
            "commit after the gates, with what the plan and the image role return",
        )
    left_out = ("committed_at", PATHS)
    return {str(key): str(value) for key, value in sorted(release.items()) if key not in left_out}


def paths_of(release: Mapping[str, Any]) -> list[str]:
    """The directories of a release, each once."""
    return sorted({str(path) for path in release.get(PATHS) or []})


def commit(
    marker: Mapping[str, Any] | None, replica: str, release: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The marker after committing `release` at the time `now` (ISO 8601, UTC); the same marker when it is
    current."""
    wanted, paths = content(release), paths_of(release)
    new = {**wanted, **({PATHS: paths} if paths else {}), "committed_at": now}
    if marker is None:
        return {"schema": SCHEMA, "replica": replica, "current": new, "previous": None}
    current = marker["current"]
    if content(current) == wanted:
        if not paths or paths_of(current) == paths:
            return dict(marker)
        return {**marker, "current": {**current, PATHS: paths}}
    return {"schema": SCHEMA, "replica": replica, "current": new, "previous": dict(current)}


def render(marker: Mapping[str, Any]) -> str:
    return json.dumps(marker, indent=2, sort_keys=True) + "\n"


def read(host: Host, directory: str, replica: str) -> dict[str, Any] | None:
    """The marker of a replica on this node, or None."""
    path = marker_path(directory, replica)
    return parse(host.read(path), path)


def ensure(
    host: Host, directory: str, replica: str, release: Mapping[str, Any] | None, *, now: str, check: bool
) -> dict[str, Any]:
    """Commit `release` (None removes the marker). Returns changed, diff and the marker's two releases."""
    path = marker_path(directory, replica)
    text = host.read(path)
    before = parse(text, path)
    after = None if release is None else commit(before, replica, release, now)
    changed = before != after
    diff = [text_diff(path, text, None if after is None else render(after))] if changed else []
    if changed and not check:
        if after is None:
            host.remove(path)
        else:
            host.write(path, render(after))
    return {
        "changed": changed,
        "diff": diff,
        "path": path,
        "current": (after or {}).get("current"),
        "previous": (after or {}).get("previous"),
    }
