# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters that find the way between two members over the fabric, and who needs something."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.sparkfleet.serving.plugins.module_utils.git_source import is_git, repo_folder
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import human


def _named(members: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for member in members:
        if member["name"] == name:
            return member
    raise AnsibleFilterError(f"{name} is not one of the members of this role")


def _way(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[str, str]:
    """(address of the source, address of the target) on the first rail that both have."""
    for theirs in source.get("rails") or []:
        one = ipaddress.ip_interface(theirs["address"])
        for ours in target.get("rails") or []:
            other = ipaddress.ip_interface(ours["address"])
            if other.network == one.network and other.ip != one.ip:
                return str(one.ip), str(other.ip)
    raise AnsibleFilterError(
        f"{source['name']} and {target['name']} share no rail subnet, so nothing can be copied over the "
        "fabric; "
        "correct the rail addresses of the inventory"
    )


def transfer_source(
    members: Sequence[Mapping[str, Any]], name: str, source: str, port: int, folder: str = ""
) -> dict[str, Any]:
    """Where member ``name`` finds the share of member ``source``: address, port, folder."""
    address, _mine = _way(_named(members, source), _named(members, name))
    return {"address": address, "port": int(port), "folder": folder}


def transfer_listen(
    members: Sequence[Mapping[str, Any]], source: str, names: Iterable[str]
) -> list[dict[str, Any]]:
    """What the share of ``source`` listens on so that ``names`` can read it, and nobody else."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name == source:
            continue
        address, client = _way(_named(members, source), _named(members, name))
        found.setdefault(address, []).append(client)
    return [{"address": address, "clients": sorted(clients)} for address, clients in sorted(found.items())]


def host_address(variables: Mapping[str, Any]) -> str:
    """The IP address by which Ansible reaches a host, from its variables; a name is resolved on the controller."""
    name = str(variables.get("ansible_host") or variables["inventory_hostname"])
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as exc:
        raise AnsibleFilterError(f"{name} has no address on the controller: {exc}") from exc
    if ipaddress.ip_address(found).is_loopback:
        raise AnsibleFilterError(
            f"{name} is {found} on the controller, which no other node reaches; set image_builder_address, or "
            "ansible_host of that host"
        )
    return str(found)


def members_where(
    members: Sequence[Mapping[str, Any]],
    hostvars: Mapping[str, Any],
    result: str,
    key: str,
    value: bool = True,
) -> list[str]:
    """Names of members whose registered ``result`` has ``key`` of that truth; others are left out."""
    found = []
    for member in members:
        if member["name"] not in hostvars:
            continue
        registered = hostvars[member["name"]].get(result)
        if isinstance(registered, Mapping) and key in registered and bool(registered[key]) is value:
            found.append(str(member["name"]))
    return found


def prune_line(row: Mapping[str, Any]) -> str:
    """One unused directory: path, what it is, and what removing it frees."""
    return f"{row['path']}: {row['what']}, {human(int(row['bytes']))}"


class FilterModule:
    """Filters of this collection for moving things between members."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {
            "transfer_source": transfer_source,
            "transfer_listen": transfer_listen,
            "members_where": members_where,
            "prune_line": prune_line,
            "repo_folder": repo_folder,
            "is_git": is_git,
            "host_address": host_address,
        }
