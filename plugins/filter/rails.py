# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters around the rail plan. The pure code is plugins/module_utils/rails.py."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.sparkfleet.serving.plugins.module_utils import rails


def _members(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise AnsibleFilterError(
            "wanted a list of members, as the filter sparkfleet.serving.members makes it"
        )
    return list(value)


def replica_refusals(members: Any) -> list[dict[str, Any]]:
    """What is wrong with the inventory itself; see rails.replica_refusals."""
    return [item.as_dict() for item in rails.replica_refusals(_members(members))]


def _by_replica(members: Any) -> list[list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in _members(members):
        groups.setdefault(str(row.get("replica") or ""), []).append(row)
    return [groups[name] for name in sorted(groups)]


def rail_plan(
    members: Any, probes: Mapping[str, Any], mtu: int = rails.RAIL_MTU
) -> dict[str, list[dict[str, Any]]]:
    """{node: [{rail, netdev, hca, pci, cage, address, ip, network, mtu, peers: [{name, rank, address}],
    peer_address}]} in rail order. Nodes that cannot be planned are left out; rail_refusals says why."""
    found: dict[str, list[dict[str, Any]]] = {}
    for group in _by_replica(members):
        plans, _refusals = rails.plan_rails(group, probes, int(mtu))
        found.update({name: [item.as_dict() for item in plan] for name, plan in plans.items()})
    return found


def rail_refusals(members: Any, probes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Why a rail plan cannot be made on the nodes as they are."""
    found: list[dict[str, Any]] = []
    for group in _by_replica(members):
        found += [item.as_dict() for item in rails.plan_rails(group, probes)[1]]
    return found


def _same_wire(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    try:
        return (
            rails.interface(str(one.get("address"))).network
            == rails.interface(str(other.get("address"))).network
        )
    except rails.RailError:
        return False


def own_rails(members: Any, name: str) -> list[dict[str, Any]]:
    """The rails of the member `name` as the module rail_network takes them: [{address, netdev, peers:
    [address]}]. Peers are the members with a rail in the same subnet: all of them behind a switch, the neighbour
    on a ring. An empty list of members is no rails; a list without `name` is an error."""
    rows = _members(members)
    if not rows:
        return []
    mine = next((row for row in rows if row.get("name") == name), None)
    if mine is None:
        raise AnsibleFilterError(
            f"{name} is not among the members " + ", ".join(str(row.get("name")) for row in rows)
        )
    others = [row for row in rows if row.get("name") != name and row.get("replica") == mine.get("replica")]
    return [
        {
            "address": str(own.get("address") or ""),
            "netdev": str(own.get("netdev") or ""),
            "peers": [
                str(rail["address"]).split("/", maxsplit=1)[0]
                for row in others
                for rail in row.get("rails") or []
                if _same_wire(own, rail)
            ],
        }
        for own in mine.get("rails") or []
    ]


def proof_rails(members: Any, source: str, target: str, side: str = "measure") -> list[dict[str, str]]:
    """The rails that `source` and `target` share, in the order of the source, as the module link_proof takes
    them: [{address, netdev, peer}]. For `side` measure they are the source's with the target's addresses as
    peers, for serve the target's without."""
    rows = {str(row.get("name")): row for row in _members(members)}
    shared = [
        (own, other)
        for own in rows[source].get("rails") or []
        for other in rows[target].get("rails") or []
        if _same_wire(own, other)
    ]
    return [
        {
            "address": str(chosen.get("address") or ""),
            "netdev": str(chosen.get("netdev") or ""),
            "peer": str(other["address"]).split("/", maxsplit=1)[0] if side == "measure" else "",
        }
        for own, other in shared
        for chosen in ((own if side == "measure" else other),)
    ]


def link_report(result: Mapping[str, Any], source: str, target: str) -> str:
    """Lines of at most 72 columns about a result of link_proof, with the recovery ladder where a rail is not
    healthy."""
    lines = []
    if not result.get("measured"):
        reason = f"{source} to {target}: not measured ({result.get('reason') or 'unknown'})"
        lines = textwrap.wrap(reason, 72, subsequent_indent="  ")
    for row in result.get("rails") or []:
        if row["verdict"] == "not_measured":
            continue
        lines += textwrap.wrap(
            f"{source} to {target} on {row['netdev']} ({row['hca']}, GID {row['gid_index']}, path MTU "
            f"{row['active_mtu'] or 'unknown'}): {row['verdict']}, {row['reason']}",
            72,
            subsequent_indent="  ",
        )
        for number, step in enumerate(row.get("ladder") or [], 1):
            lines += textwrap.wrap(f"{number}. {step}", 72, initial_indent="  ", subsequent_indent="     ")
    return "\n".join(lines)


def gid_index(plan: Any, probe: Mapping[str, Any]) -> int:
    """The GID index that all rails of one node share now. It drifts: for display and gates, never for
    storing."""
    try:
        choices = [
            rails.choose_gid(probe.get("rdma") or {}, str(row["hca"]), str(row["netdev"]), str(row["ip"]))
            for row in _members(plan)
        ]
        return rails.one_gid_index(choices)
    except rails.RailError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters of the collection about rails."""

    def filters(self) -> dict[str, Any]:
        return {
            "replica_refusals": replica_refusals,
            "rail_plan": rail_plan,
            "rail_refusals": rail_refusals,
            "own_rails": own_rails,
            "proof_rails": proof_rails,
            "link_report": link_report,
            "gid_index": gid_index,
        }
