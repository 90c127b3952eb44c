# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters that turn inventory variables into plain member records for the roles.

These are the only places, beside inventories and playbooks, that know the names `sparkfleet_*`. The pure code is
plugins/module_utils/inventory_values.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.sparkfleet.serving.plugins.module_utils import inventory_values as core

ROOT = Path(__file__).resolve().parents[2]
#: Where every variable of the fleet is read or shown, below the collection.
SOURCES = ("playbooks", "inventory/example", "plugins/filter", "plugins/inventory", "plugins/module_utils")


@functools.cache
def _texts(suffix: str) -> tuple[str, ...]:
    """The sources of one kind that read or show variables of the fleet."""
    return tuple(
        path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob(f"*{suffix}"))
        if "collections" not in path.relative_to(ROOT).parts
    )


@functools.cache
def known_names() -> frozenset[str]:
    """Every `sparkfleet_*` name that the collection itself reads or its example sets."""
    return core.fleet_names(_texts(".yml"), _texts(".py"))


@functools.cache
def known_truths() -> frozenset[str]:
    """The variables of the fleet that are true or false."""
    return core.truth_names(_texts(".yml"))


@functools.cache
def decided_names() -> dict[str, list[str]]:
    """Role variables that the playbooks set, with what each follows from."""
    text = (ROOT / "playbooks" / "vars" / "replica.yml").read_text(encoding="utf-8")
    return core.decided_names(yaml.safe_load(text))


@functools.cache
def role_options() -> dict[str, frozenset[str]]:
    """Role to its options, from the argument specs."""
    found = {}
    for path in sorted((ROOT / "roles").glob("*/meta/argument_specs.yml")):
        specs = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
        found[path.parts[-3]] = frozenset(
            name for spec in specs.values() for name in spec.get("options") or {}
        )
    return found


def members(
    hosts: Iterable[str], hostvars: Mapping[str, Any], replica: str | None = None
) -> list[dict[str, Any]]:
    """Member records of `hosts`, of one replica or of all, adjacent by replica and in rank order.

    {name, replica, rank, world, address (management), rails: [{address, netdev?}], engine, context}
    """
    rows = []
    for host in hosts:
        if host not in hostvars:
            raise AnsibleFilterError(f"{host} is not in the inventory")
        try:
            rows.append(core.member(host, hostvars[host]))
        except core.ValuesError as error:
            raise AnsibleFilterError(str(error)) from error
    return core.in_order(rows, replica)


def collect(
    hosts: Iterable[str], hostvars: Mapping[str, Any], name: str, key: str | None = None
) -> dict[str, Any]:
    """{host: value of the variable `name` (or its entry `key`)} of the hosts that have it: a node that could
    not be
    reached is left out, so that the reader can say so."""
    found: dict[str, Any] = {}
    for host in hosts:
        value = hostvars[host].get(name) if host in hostvars else None
        if key is not None:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[str(host)] = value
    return found


def value_refusals(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with values and names of one host's variables, by sight: one sentence each."""
    return core.value_refusals(values, known_truths()) + core.name_refusals(
        list(values), known_names(), role_options(), decided_names()
    )


def inventory_refusals(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> list[str]:
    """What is wrong with the variables of these hosts: one sentence each, with the hosts that it is true of."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        for text in value_refusals(hostvars[host]):
            found.setdefault(text, []).append(str(host))
    return [f"{', '.join(names)}: {text}" for text, names in found.items()]


def node_files(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{node, name, path, private}]: files with secrets that the heads of these hosts' replicas must have."""
    try:
        return core.node_files({host: hostvars[host] for host in hosts})
    except core.ValuesError as error:
        raise AnsibleFilterError(str(error)) from error


def plan_inputs(members: Sequence[Mapping[str, Any]], probes: Mapping[str, Any]) -> dict[str, Any]:
    """{situation, available_gib, total_gib} by rank, for the module tensor_plan."""
    return core.plan_inputs(members, probes)


def of_rank(rows: Iterable[Mapping[str, Any]], rank: Any) -> Mapping[str, Any]:
    """The row of a rank among rows of all ranks."""
    found = next((row for row in rows if int(row["rank"]) == int(rank)), None)
    if found is None:
        raise AnsibleFilterError(f"there is no rank {rank} in the plan; run the play for the whole replica")
    return found


def engine_profile(name: str) -> dict[str, Any]:
    """The profile of an engine by its name, as role ranks reads it."""
    folder = ROOT / "roles" / "ranks" / "vars" / "engines"
    known = sorted(path.stem for path in folder.glob("*.yml"))
    if name not in known:
        raise AnsibleFilterError(f"no engine profile {name}; wanted one of {', '.join(known)}")
    found: dict[str, Any] = yaml.safe_load((folder / f"{name}.yml").read_text(encoding="utf-8"))
    return found


class FilterModule:
    """Filters of the collection about the fleet."""

    def filters(self) -> dict[str, Any]:
        return {
            "members": members,
            "collect": collect,
            "inventory_refusals": inventory_refusals,
            "node_files": node_files,
            "plan_inputs": plan_inputs,
            "of_rank": of_rank,
            "engine_profile": engine_profile,
        }
