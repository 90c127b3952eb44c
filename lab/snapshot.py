"""Snapshots of nodes, what differs between two of them, and whether that was announced.

The proof of check mode has two halves. The set of changed tasks of a `--check` run equals the set of the run
that
follows. And every object that the real run changed was announced by the check run's diff, and every object
that was
announced has changed; what is neither is listed with a reason in `lab/snapshot_exclusions.yml`, which people
review.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .config import NODES, instance

COLLECTOR = Path(__file__).with_name("snapshot_node.py")
EXCLUSIONS = Path(__file__).with_name("snapshot_exclusions.yml")

Snapshot = dict[str, dict[str, Any]]

#: Kinds of announcement that must show in the snapshot. What else a module announces is text for people.
CHECKED = frozenset(
    {
        "path",
        "unit",
        "package",
        "image",
        "container",
        "address",
        "link",
        "sysctl",
        "volume",
        "runtimes",
        "group",
        "tree",
    }
)


@dataclass(frozen=True)
class Change:
    """One object that differs. `before` or `after` is None when it did not exist."""

    kind: str
    name: str
    before: Any
    after: Any

    @property
    def verb(self) -> str:
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    def __str__(self) -> str:
        detail = ""
        if isinstance(self.before, dict) and isinstance(self.after, dict):
            keys = sorted(
                key for key in {*self.before, *self.after} if self.before.get(key) != self.after.get(key)
            )
            detail = f" ({', '.join(keys)})"
        return f"{self.kind} {self.name} {self.verb}{detail}"


@dataclass(frozen=True)
class Rule:
    """A reviewed line: objects of `kind` that match change for `reason`; with `of`, only when that was
    announced."""

    kind: str
    match: str
    reason: str
    of: str = ""

    def covers(self, change: Change) -> bool:
        return self.kind == change.kind and fnmatch.fnmatchcase(change.name, self.match)


@dataclass(frozen=True)
class Announced:
    """One object that a diff named, as (kind, name). A path that ends in a slash, and a `tree`, covers what
    is under it."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


# -- taking ------------------------------------------------------------------------------------------------


def take(node: str, name: str | None = None) -> Snapshot:
    """Snapshot of one node of a lab instance, by `docker exec`."""
    command = ["docker", "exec", "-i", instance(name).container(node), "python3", "-"]
    done = subprocess.run(command, stdin=COLLECTOR.open("rb"), capture_output=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"no snapshot of {node}: {done.stderr.decode(errors='replace')[-2000:]}")
    found: Snapshot = json.loads(done.stdout)
    return found


def take_all(nodes: Sequence[str] = NODES, name: str | None = None) -> dict[str, Snapshot]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return dict(zip(nodes, pool.map(lambda node: take(node, name), nodes), strict=True))


# -- comparing ---------------------------------------------------------------------------------------------


def load_rules(path: Path = EXCLUSIONS) -> list[Rule]:
    """The reviewed list. Every entry needs a reason; an unknown key is an error, so that a slip does not
    exclude more."""
    rules = []
    for entry in yaml.safe_load(path.read_text()) or []:
        rule = Rule(**entry)
        if len(rule.reason) < 10:
            raise ValueError(f"{path.name}: {rule.kind} {rule.match} needs a reason")
        rules.append(rule)
    return rules


def compare(before: Snapshot, after: Snapshot) -> list[Change]:
    """All objects that differ, in a stable order."""
    found = []
    for kind in sorted({*before, *after}):
        old, new = before.get(kind, {}), after.get(kind, {})
        found += [
            Change(kind, name, old.get(name), new.get(name))
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    return found


def unexcluded(changes: Iterable[Change], rules: Sequence[Rule]) -> list[Change]:
    """Without what changes by itself (rules that depend on no announcement)."""
    return [change for change in changes if not any(rule.covers(change) for rule in rules if not rule.of)]


# -- announcements -----------------------------------------------------------------------------------------

_KIND = re.compile(
    r"^(unit|package|image|container|address|link|sysctl|volume|runtimes|group|tree|rail) (.+)$"
)


def announced(tasks: Iterable[Mapping[str, Any]], host: str) -> list[Announced]:
    """Objects that the diffs of `tasks` (the record of the summary callback) name for `host`."""
    found: dict[Announced, None] = {}
    for task in tasks:
        if task["host"] != host:
            continue
        diffs = task.get("diff") or []
        for diff in [diffs] if isinstance(diffs, dict) else diffs:
            for header in _headers(diff):
                found[header] = None
    return list(found)


def _headers(diff: Mapping[str, Any]) -> Iterable[Announced]:
    names = {str(diff.get(key) or "") for key in ("before_header", "after_header")}
    for side in ("before", "after"):  # ansible.builtin.file shows a dict with the path in it
        value = diff.get(side)
        if isinstance(value, dict) and value.get("path"):
            names.add(str(value["path"]))
    for name in sorted(names):
        match = _KIND.match(name)
        if match:
            yield Announced(match.group(1), match.group(2))
            continue
        # "dynamically generated" and the "(content)" of the copy module are no part of a path.
        path = name.split(" (", 1)[0].strip()
        if path.startswith("/"):
            yield Announced("path", path)


def explains(note: Announced, change: Change) -> bool:
    """Whether announcing `note` tells a reader that `change` will happen."""
    if change.kind == "path":
        if note.kind == "path":
            # A new file brings the folders above it.
            new_parent = change.verb == "added" and change.after.get("type") == "directory"
            return note.name == change.name or (new_parent and note.name.startswith(change.name + "/"))
        if note.kind == "tree":
            return (
                change.name == note.name
                or change.name.startswith(note.name.rstrip("/") + "/")
                or (change.verb == "added" and note.name.startswith(change.name + "/"))
            )
        if note.kind == "unit":
            # Enabling is a link in a folder of the unit that wants it.
            folder, _, link = change.name.rpartition("/")
            return link == note.name and folder.endswith((".wants", ".requires"))
        if note.kind == "package":
            return note.name in {(change.before or {}).get("package"), (change.after or {}).get("package")}
        if note.kind == "group":
            return change.name in {"/etc/group", "/etc/gshadow", "/etc/group-", "/etc/gshadow-"}
        return False
    if note.kind == change.kind and note.name == change.name:
        return True
    if note.kind in {"rail", "link", "address"} and change.kind in {"link", "address", "route"}:
        return change.name.split(" ", 1)[0] == note.name.split(" ", 1)[0]
    if change.kind == "unit":
        # A unit's file announces the unit, a package the units that it brings.
        if note.kind == "path":
            return note.name.startswith(
                ("/etc/systemd/system/", "/usr/local/lib/systemd/system/")
            ) and note.name.endswith("/" + change.name)
        return False
    if change.kind == "default":
        return note == Announced("path", "/etc/systemd/system/default.target")
    return False


def unexplained(changes: Iterable[Change], notes: Sequence[Announced], rules: Sequence[Rule]) -> list[Change]:
    """Changes that nothing announced and no reviewed rule covers."""
    spoken = [str(note) for note in notes]
    left = []
    for change in changes:
        if any(explains(note, change) for note in notes):
            continue
        if any(
            rule.covers(change)
            and (not rule.of or any(fnmatch.fnmatchcase(text, rule.of) for text in spoken))
            for rule in rules
        ):
            continue
        left.append(change)
    return left


def unfulfilled(changes: Sequence[Change], notes: Iterable[Announced]) -> list[Announced]:
    """Announcements of objects that did not change: a check mode that cries wolf."""
    return [
        note
        for note in notes
        if note.kind in CHECKED and not any(explains(note, change) for change in changes)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """`take NODE` prints a snapshot as JSON; `diff OLD NEW` prints what differs and is not excluded."""
    parser = argparse.ArgumentParser(prog="python -m lab.snapshot", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    taking = verbs.add_parser("take")
    taking.add_argument("node", choices=NODES)
    comparing = verbs.add_parser("diff")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "take":
        print(json.dumps(take(chosen.node), indent=1, sort_keys=True))
        return 0
    changes = compare(json.loads(chosen.old.read_text()), json.loads(chosen.new.read_text()))
    left = unexcluded(changes, load_rules())
    print("\n".join(map(str, left)) or "nothing differs")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
