# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The variables of an inventory, judged by sight: values that cannot be meant, names that nobody reads, and the plain
member records that roles take instead of them. Pure, but for a look at the files that are named on this machine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ENGINE = "tensorfold_native"
#: Every variable of the fleet begins with this.
PREFIX = "sparkfleet_"
_NAME = re.compile(r"\bsparkfleet_[a-z0-9_]*[a-z0-9]\b")
_INNER = re.compile(r"\b__[a-z0-9_]+\b")
#: In code a variable's name is a whole string; anything else is a package, a metric or words.
_QUOTED = re.compile(r"""["'](sparkfleet_[a-z0-9_]*[a-z0-9])["']""")
_TRUTH = re.compile(r"\b(sparkfleet_[a-z0-9_]*[a-z0-9])(?: \| default\([^()]*\))? \| bool\b")
#: What a role states for others. No user sets it, and a second play of the same run sees it.
_RESULT = "_result"
#: How near the rest of an unknown name must be to that of a known one. A role's must be nearer: other software has
#: variables that begin with `image_`, too.
NEAR_FLEET, NEAR_ROLE = 0.6, 0.75


class ValuesError(ValueError):
    """A variable of an inventory that cannot be read; says host, name, found and wanted."""


# --- members


def _number(host: str, values: Mapping[str, Any], key: str, default: int) -> int:
    raw = values.get(key, default)
    try:
        if isinstance(raw, bool):
            raise ValueError
        return int(raw)
    except (TypeError, ValueError) as error:
        raise ValuesError(f"{host}: {key} is {raw!r}, wanted a whole number") from error


def _rails(host: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    raw = values.get("sparkfleet_rails") or []
    if isinstance(raw, (str, bytes, Mapping)):
        raise ValuesError(f"{host}: sparkfleet_rails is not a list of rails")
    found = []
    for entry in raw:
        rail = {"address": entry} if isinstance(entry, str) else entry
        if not isinstance(rail, Mapping):
            raise ValuesError(
                f"{host}: an entry of sparkfleet_rails is {rail!r}, wanted {{address: 10.77.0.1/30}}"
            )
        found.append({key: str(rail[key]) for key in ("address", "netdev") if rail.get(key)})
    return found


def member(host: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """One host as a member record: {name, replica, rank, world, address (management), rails: [{address, netdev?}],
    engine, context}. Raises ValuesError.

    A host without sparkfleet_rank is rank 0 of a world of one only when it has no sparkfleet_world either: half a
    pair must not turn into a single node by a forgotten line.
    """
    return {
        "name": str(host),
        "replica": str(values.get("sparkfleet_replica") or ""),
        "rank": _number(host, values, "sparkfleet_rank", 0),
        "world": _number(host, values, "sparkfleet_world", 2 if "sparkfleet_rank" in values else 1),
        "address": str(values.get("ansible_host") or host),
        "rails": _rails(host, values),
        "engine": str(values.get("sparkfleet_engine") or ENGINE),
        "context": values.get("sparkfleet_context"),
    }


def in_order(rows: Iterable[Mapping[str, Any]], replica: str | None = None) -> list[dict[str, Any]]:
    """Member records of one replica or of all, adjacent by replica and in rank order."""
    kept = [dict(row) for row in rows if replica is None or row["replica"] == str(replica)]
    return sorted(kept, key=lambda row: (row["replica"], row["rank"], row["name"]))


# --- values

_YES = ("true", "yes", "on", "1")
_TRUTHS = (*_YES, "false", "no", "off", "0")


def file_refusals(name: str, path: str) -> list[str]:
    """What is wrong with a file on this machine that holds a secret: absent, unreadable or empty."""
    if not path:
        return []
    place = Path(path)
    try:
        if not place.is_file():
            return [f"{name} names {path}, which is no file on this machine"]
        if not place.read_text(encoding="utf-8").strip():
            return [f"{name} names {path}, which is empty"]
    except UnicodeDecodeError:
        return [f"{name} names {path}, which is no text"]
    except OSError as error:
        return [f"{name} names {path}, which cannot be read ({error.strerror})"]
    return []


def truth_names(yaml: Iterable[str]) -> frozenset[str]:
    """The `sparkfleet_*` variables that these YAML sources read as true or false."""
    return frozenset(name for text in yaml for name in _TRUTH.findall(text))


def value_refusals(values: Mapping[str, Any], truths: Iterable[str]) -> list[str]:
    """What is wrong with values that several roles share, by sight: one sentence each. A word that is no truth value
    would otherwise count as false, and change what every rank loads. ``truths``: of `truth_names`."""
    found = []
    for name, least, most in (("sparkfleet_context", 1, 1 << 24), ("sparkfleet_parallel", 1, 64)):
        text = str(values.get(name, "")).strip()
        # An absent or empty context is an unset pin, which preflight lists with the others.
        if text and not (text.isdigit() and least <= int(text) <= most):
            found.append(f"{name} is {text!r}, wanted a whole number from {least} to {most}")
    for name in sorted(truths):
        value = values.get(name, True)
        if not isinstance(value, bool) and str(value).strip().lower() not in _TRUTHS:
            found.append(f"{name} is {value!r}, wanted true or false")
    placement = values.get("engram_placement", "local")
    if placement not in ("local", "nfs"):
        found.append(f"engram_placement is {placement!r}, wanted local or nfs")
    if placement == "nfs" and str(values.get("engram_nfs_accepted", False)).strip().lower() not in _YES:
        found.append(
            "engram_placement is nfs, with which a 4 KiB read takes around 940 µs instead of around 90 µs and prompts "
            "take about three times as long; set engram_nfs_accepted to true, or leave engram_placement at local"
        )
    found += file_refusals("sparkfleet_hub_token_file", str(values.get("sparkfleet_hub_token_file") or ""))
    return found


# --- names


def fleet_names(yaml: Iterable[str], code: Iterable[str] = ()) -> frozenset[str]:
    """Every `sparkfleet_*` name in these YAML and Python sources: what none of them names, nobody reads."""
    found = {name for text in yaml for name in _NAME.findall(text)}
    return frozenset(found | {name for text in code for name in _QUOTED.findall(text)})


def _nearest(name: str, known: Iterable[str], prefix: str, cutoff: float) -> str:
    """The known name that is nearest behind the prefix, which all share; empty where none is near."""
    rests = sorted(other.removeprefix(prefix) for other in known)
    near = difflib.get_close_matches(name.removeprefix(prefix), rests, n=1, cutoff=cutoff)
    return prefix + near[0] if near else ""


def decided_names(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Role variables that the playbooks set from the fleet's own ones, each with those that it follows from.

    ``values``: the variables of ``playbooks/vars/replica.yml``, in which names with ``__`` are intermediate.
    """

    def fleet(name: str, seen: frozenset[str]) -> set[str]:
        text = str(values[name])
        inner = {part for part in _INNER.findall(text) if part in values and part not in seen}
        return set(_NAME.findall(text)).union(*(fleet(part, seen | {part}) for part in inner))

    return {name: sorted(fleet(name, frozenset())) for name in values if not name.startswith("__")}


def name_refusals(
    names: Iterable[str],
    known: Iterable[str],
    roles: Mapping[str, Iterable[str]],
    decided: Mapping[str, Sequence[str]],
) -> list[str]:
    """Variables that nobody reads, with the nearest known name: one sentence each.

    ``decided``: variables whose value in an inventory is not read, since the playbooks set them (`decided_names`).

    ``known``: the fleet's variables. ``roles``: role to its options. A name of the fleet must be known; a name that
    begins with a role's is refused where it is nearly an option, since others may use such names as well.
    """
    fleet = frozenset(known)
    options = {role: frozenset(found) for role, found in roles.items()}
    found = []
    for name in sorted(set(names)):
        if name.startswith(PREFIX):
            near = "" if name in fleet else _nearest(name, fleet, PREFIX, NEAR_FLEET)
            if name not in fleet:
                hint = f"did you mean {near}?" if near else "docs and inventory/example name the known ones"
                found.append(f"{name} is no variable of this collection; {hint}")
            continue
        if name in decided:
            source = f"; it follows from {', '.join(decided[name])}" if decided[name] else ""
            found.append(f"{name} is set by the playbooks and not read from an inventory{source}")
            continue
        # The longest role whose name it begins with: rank_files_x belongs to rank_files.
        role = max((role for role in options if name.startswith(f"{role}_")), key=len, default="")
        if not role or name in options[role] or name == role + _RESULT:
            continue
        near = _nearest(name, options[role], f"{role}_", NEAR_ROLE)
        if near:
            found.append(f"{name} is no variable of role {role}; did you mean {near}?")
    return found


# --- files on nodes

#: Variables that name a file with a secret on the head of a replica, and whether others may not read it.
NODE_FILES = (
    ("ranks_api_key_file", True),
    ("checkpoint_token_file", False),
    ("engram_token_file", False),
    ("rank_files_token_file", False),
)


def node_files(values: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{node, name, path, private}] of the files with secrets that the heads among these hosts must have.

    ``values``: host to its variables.
    """
    found = []
    for host, own in values.items():
        if member(host, own)["rank"] != 0:
            continue
        for name, private in NODE_FILES:
            # A key that is given itself is written by the role.
            if own.get(name) and not own.get(name.removesuffix("_file")):
                found.append({"node": host, "name": name, "path": str(own[name]), "private": private})
    return found


# --- the plan


def plan_inputs(
    members: Iterable[Mapping[str, Any]], probes: Mapping[str, Mapping[str, Any]], gib: int = 1 << 30
) -> dict[str, Any]:
    """{situation, available_gib, total_gib} of a replica for its plan, by rank, from `spark_probe` results by node.

    Where our rank runs, what it holds counts as available; a node without it is judged as free even while others run.
    Memory is left out (empty, None) where a node does not tell.
    """
    rows = [probes.get(str(row["name"])) or {} for row in members]
    memory = [row.get("memory") or {} for row in rows]

    def serves(probe: Mapping[str, Any]) -> bool:
        containers = (probe.get("docker") or {}).get("containers") or []
        return any(row.get("owned") and row.get("state") == "running" for row in containers)

    def sizes(name: str) -> list[float]:
        found = [row.get(name) for row in memory]
        return [] if None in found else [round(int(value) / gib, 2) for value in found if value is not None]

    totals = sizes("total_bytes")
    return {
        "situation": ["running" if serves(row) else "start" for row in rows],
        "available_gib": sizes("available_bytes"),
        "total_gib": min(totals) if totals else None,
    }
