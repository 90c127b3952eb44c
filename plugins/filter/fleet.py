# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters that turn inventory variables into plain member records for the roles.

These are the only places, beside inventories and playbooks, that know the names `sparkfleet_*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

ENGINE = "tensorfold_native"


def _number(host: str, values: Mapping[str, Any], key: str, default: int) -> int:
    raw = values.get(key, default)
    try:
        if isinstance(raw, bool):
            raise ValueError
        return int(raw)
    except (TypeError, ValueError) as error:
        raise AnsibleFilterError(f"{host}: {key} is {raw!r}, wanted a whole number") from error


def _rails(host: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    raw = values.get("sparkfleet_rails") or []
    if isinstance(raw, (str, bytes, Mapping)):
        raise AnsibleFilterError(f"{host}: sparkfleet_rails is not a list of rails")
    found = []
    for entry in raw:
        rail = {"address": entry} if isinstance(entry, str) else entry
        if not isinstance(rail, Mapping):
            raise AnsibleFilterError(
                f"{host}: an entry of sparkfleet_rails is {rail!r}, wanted {{address: 10.77.0.1/30}}"
            )
        found.append({key: str(rail[key]) for key in ("address", "netdev") if rail.get(key)})
    return found


def member(host: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """One host as a member record. A host without sparkfleet_rank is rank 0 of a world of one only when it
    has no
    sparkfleet_world either: half a pair must not turn into a single node by a forgotten line."""
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
        rows.append(member(host, hostvars[host]))
    if replica is not None:
        rows = [row for row in rows if row["replica"] == str(replica)]
    return sorted(rows, key=lambda row: (row["replica"], row["rank"], row["name"]))


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


_TRUTHS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def value_refusals(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with values that several roles share, by sight: one sentence each. A word that is no truth value
    would otherwise count as false, and change what every rank loads."""
    found = []
    for name, least, most in (("sparkfleet_context", 1, 1 << 24), ("sparkfleet_parallel", 1, 64)):
        text = str(values.get(name, "")).strip()
        # An absent or empty context is an unset pin, which preflight lists with the others.
        if text and not (text.isdigit() and least <= int(text) <= most):
            found.append(f"{name} is {text!r}, wanted a whole number from {least} to {most}")
    drafts = values.get("sparkfleet_drafts", True)
    if not isinstance(drafts, bool) and str(drafts).strip().lower() not in _TRUTHS:
        found.append(f"sparkfleet_drafts is {drafts!r}, wanted true or false")
    path = str(values.get("sparkfleet_hub_token_file") or "")
    if path and not Path(path).is_file():
        found.append(f"sparkfleet_hub_token_file names {path}, which is no file on this machine")
    return found


class FilterModule:
    """Filters of the collection about the fleet."""

    def filters(self) -> dict[str, Any]:
        return {"members": members, "collect": collect, "value_refusals": value_refusals}
