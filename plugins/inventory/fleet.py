# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import netaddr
from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin
from ansible_collections.sparkfleet.serving.plugins.module_utils import rails

DOCUMENTATION = r"""
name: fleet
short_description: A fleet of replicas from a short file
version_added: 1.0.0
description:
  - Turns a list of replicas with their nodes into hosts with replica, rank, world and rail addresses.
    Members of a replica
    are adjacent, in rank order, so that batches of a play hold whole replicas.
  - Each rail of each replica gets its own subnet from one pool. The place of a replica in the pool is its
    C(rail_index), or
    is kept in a lock file beside the inventory, so that adding or removing a replica renumbers no other.
author:
  - The sparkfleet founders (@sparkfleet)
options:
  plugin:
    description: Marks the file as one for this plugin.
    required: true
    choices: [sparkfleet.serving.fleet]
  rail_pool:
    description: IPv4 network from which the rails get their subnets. Nothing else in reach may use it.
    type: str
    default: 10.77.0.0/16
  rail_prefix:
    description: Prefix length of one subnet. V(30) holds a pair, V(29) up to six nodes.
    type: int
    default: 30
  rail_lock:
    description: Lock file, relative to the inventory. Only used when a replica has no C(rail_index).
    type: str
    default: fleet.rails.lock
  user:
    description: Account for SSH on all nodes.
    type: str
    default: ''
  defaults:
    description: Values for all replicas, with the keys of a replica (except C(nodes) and C(rail_index)).
    type: dict
    default: {}
  replicas:
    description:
      - By name. Each has C(nodes), a list in rank order of names, or of dicts with C(name) and optionally
        C(address), C(user),
        C(port), C(netdevs) (of the two rails, when two cables are plugged; of the four on a ring) and C(vars).
      - C(ring_pool), an IPv4 network of its own, puts three or four nodes on a ring without a switch - a cable
        from each node to the next, into cage p0 there and p1 at the next one. Each cable takes two subnets of it.
      - Optionally C(rail_index), C(vars) (any variables, templates allowed), and any key that becomes the
        variable
        C(sparkfleet_KEY), such as C(engine), C(context), C(parallel), C(drafts), C(model_repo) or
        C(model_revision).
    type: dict
    required: true
"""

EXAMPLES = r"""
# fleet.yml
plugin: sparkfleet.serving.fleet
user: spark
rail_pool: 10.77.0.0/16
defaults:
  engine: tensorfold_native
  context: 524288
replicas:
  alpha:
    nodes: [spark-1, spark-2]
  beta:
    nodes:
      - {name: spark-3, address: 192.0.2.13}
      - {name: spark-4, address: 192.0.2.14}
    context: 262144
"""

HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$")
REPLICA = re.compile(r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
KEY = re.compile(r"^[a-z][a-z0-9_]*$")
NODE_KEYS = {"name", "address", "user", "port", "netdevs", "vars"}
TOP_KEYS = {"plugin", "rail_pool", "rail_prefix", "rail_lock", "user", "defaults", "replicas"}
#: Keys that the plugin makes itself and nobody may give.
RESERVED = {"replica", "rank", "world", "rails"}
HALVES = rails.HALVES


class FleetError(ValueError):
    """The file cannot become an inventory; the text says where and what is wanted."""


def plain(value: Any) -> Any:
    """A copy of builtin types without the trust that strings of the file carry, so that no value made from
    them is ever
    taken for a template."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    # str() of a tagged string returns the same object; joining its characters does not.
    return "".join(list(str(value)))


def subnet(pool: str, prefix: int, number: int) -> netaddr.IPNetwork:
    """Subnet `number` of the pool. Raises FleetError when the pool is too small or not usable."""
    try:
        network = netaddr.IPNetwork(pool)
    except (netaddr.AddrFormatError, ValueError) as error:
        raise FleetError(f"rail_pool: {pool!r} is not an IPv4 network") from error
    if network.version != 4 or network.ip != network.network:  # equality looks at the range only
        raise FleetError(f"rail_pool: {pool!r} is not an IPv4 network (its first address, with prefix)")
    for bad, why in rails.FORBIDDEN:
        other = netaddr.IPNetwork(bad)
        if network in other or other in network:
            raise FleetError(f"rail_pool: {pool} touches {bad} ({why})")
    if not network.prefixlen <= prefix <= 30:
        raise FleetError(f"rail_prefix: {prefix} is not between {network.prefixlen} and 30")
    first = network.first + number * 2 ** (32 - prefix)
    if first > network.last:
        raise FleetError(f"rail_pool: {pool} has no room for subnet {number + 1} of /{prefix}")
    return netaddr.IPNetwork(f"{netaddr.IPAddress(first)}/{prefix}")


def nodes_of(replica: str, raw: Any, count: int = HALVES) -> list[dict[str, Any]]:
    """The nodes of a replica as dicts; each may name `count` netdevs. Raises FleetError."""
    if isinstance(raw, (str, Mapping)) or not raw:
        raise FleetError(f"replica {replica}: nodes is not a list of nodes in rank order")
    found = []
    for entry in raw:
        row = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
        unknown = set(row) - NODE_KEYS
        if unknown:
            raise FleetError(
                f"replica {replica}: unknown key {', '.join(sorted(unknown))} of a node; known: "
                + ", ".join(sorted(NODE_KEYS))
            )
        if not HOST.match(str(row.get("name") or "")):
            raise FleetError(f"replica {replica}: {row.get('name')!r} is not the name of a node")
        netdevs = row.get("netdevs") or []
        if netdevs and (len(netdevs) != count or not all(rails.NETDEV.match(str(name)) for name in netdevs)):
            raise FleetError(
                f"replica {replica}: netdevs of {row['name']} are not the names of "
                f"{'two' if count == HALVES else 'four'} interfaces"
            )
        found.append(row)
    return found


def indexes(replicas: Mapping[str, Any], locked: Mapping[str, int]) -> dict[str, int]:
    """{replica: place in the pool}: explicit first, then the lock, then the lowest free place in the order
    of names.
    Entries of the lock keep their place even when their replica is gone. A ring takes its addresses elsewhere, its
    place stays empty."""
    found: dict[str, int] = {}
    taken: dict[int, str] = {}
    for name, row in replicas.items():
        index = row.get("rail_index")
        if index is None:
            continue
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise FleetError(f"replica {name}: rail_index {index!r} is not a number from 0")
        if int(index) in taken:
            raise FleetError(f"replicas {taken[int(index)]} and {name}: both have rail_index {index}")
        taken[int(index)], found[name] = name, int(index)
    for name, index in locked.items():
        if name in found:
            continue
        if index in taken:
            raise FleetError(f"replica {taken[index]}: place {index} is kept for {name} in the lock file")
        taken[index] = name
        if name in replicas:
            found[name] = index
    free = 0
    for name in sorted(set(replicas) - set(found)):
        while free in taken:
            free += 1
        taken[free], found[name] = name, free
    return found


def build(
    config: Mapping[str, Any], locked: Mapping[str, int]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """([{name, replica, rank, variables, extra}], places). `variables` are plain values made here, `extra`
    are passed
    through from `vars` as the file has them. Raises FleetError."""
    unknown = set(config) - TOP_KEYS
    if unknown:
        raise FleetError(f"unknown key {', '.join(sorted(unknown))}; known: {', '.join(sorted(TOP_KEYS))}")
    replicas = config.get("replicas") or {}
    if not isinstance(replicas, Mapping) or not replicas:
        raise FleetError("replicas: no replica")
    for name, row in replicas.items():
        if not REPLICA.match(str(name)):
            raise FleetError(f"replica {name!r}: wanted lower case letters, digits and dashes, at most 32")
        if not isinstance(row, Mapping):
            raise FleetError(f"replica {name}: no nodes")
    places = indexes(replicas, locked)
    pool, prefix = str(config.get("rail_pool") or "10.77.0.0/16"), int(config.get("rail_prefix") or 30)
    owner: dict[str, str] = {}
    hosts = []
    for name, row in replicas.items():
        ring = row.get("ring_pool")
        nodes = nodes_of(str(name), row.get("nodes"), rails.RING_RAILS if ring else HALVES)
        world = len(nodes)
        if world > 1 and not ring and world > 2 ** (32 - prefix) - 2:
            raise FleetError(f"replica {name}: {world} nodes do not fit into a /{prefix}: lower rail_prefix")
        subnets = (
            [subnet(pool, prefix, places[name] * HALVES + half) for half in range(HALVES)]
            if world > 1 and not ring
            else []
        )
        shared = {
            **(config.get("defaults") or {}),
            **{key: row[key] for key in row if key not in ("nodes", "rail_index", "ring_pool")},
        }
        extra_all = {**((config.get("defaults") or {}).get("vars") or {}), **(row.get("vars") or {})}
        shared.pop("vars", None)
        for key in shared:
            if not KEY.match(str(key)) or key in RESERVED or key in ("nodes", "rail_index", "ring_pool"):
                raise FleetError(f"replica {name}: {key!r} cannot be given")
        for rank, node in enumerate(nodes):
            host = str(node["name"])
            if host in owner:
                raise FleetError(f"node {host} is in replica {owner[host]} and in replica {name}")
            owner[host] = str(name)
            addresses = (
                ring_addresses(str(name), str(ring), pool, rank, world)
                if ring
                else [f"{netaddr.IPAddress(net.first + 1 + rank)}/{prefix}" for net in subnets]
            )
            variables: dict[str, Any] = {
                "sparkfleet_replica": plain(name),
                "sparkfleet_rank": rank,
                "sparkfleet_world": world,
                "sparkfleet_rails": [
                    {
                        "address": address,
                        **({"netdev": plain(node["netdevs"][number])} if node.get("netdevs") else {}),
                    }
                    for number, address in enumerate(addresses)
                ],
            }
            variables.update({f"sparkfleet_{key}": plain(value) for key, value in shared.items()})
            user = node.get("user") or config.get("user")
            if node.get("address"):
                variables["ansible_host"] = plain(node["address"])
            if user:
                variables["ansible_user"] = plain(user)
            if node.get("port"):
                variables["ansible_port"] = int(node["port"])
            hosts.append(
                {
                    "name": plain(host),
                    "replica": plain(name),
                    "rank": rank,
                    "variables": variables,
                    "extra": {**extra_all, **(node.get("vars") or {})},
                }
            )
    return hosts, places


def ring_addresses(replica: str, pool: str, rail_pool: str, rank: int, world: int) -> list[str]:
    """Addresses of the four rails of one rank on a ring, in rail order: a /30 for each half of each cable."""
    try:
        numbers = rails.ring_subnets(rank, world)
    except rails.RailError as error:
        raise FleetError(f"replica {replica}: {error}") from error
    try:
        nets = [subnet(pool, 30, number) for number in numbers]
    except FleetError as error:
        raise FleetError(f"replica {replica}: ring_pool: {str(error).partition(': ')[2]}") from error
    whole, others = netaddr.IPNetwork(pool), netaddr.IPNetwork(rail_pool)
    if whole in others or others in whole:
        raise FleetError(f"replica {replica}: ring_pool: {pool} touches rail_pool {rail_pool}")
    return [f"{netaddr.IPAddress(net.first + rails.ring_host(rail))}/30" for rail, net in enumerate(nets)]


def read_lock(path: Path) -> dict[str, int]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        loaded = json.loads(text)["rail_index"]
        return {str(name): int(index) for name, index in loaded.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FleetError(f"{path}: not a lock file of this plugin ({error!r})") from error


def write_lock(path: Path, places: Mapping[str, int]) -> None:
    text = (
        json.dumps(
            {
                "comment": "Place of each replica in rail_pool. Keep this file with the inventory.",
                "rail_index": dict(sorted(places.items(), key=lambda item: item[1])),
            },
            indent=2,
        )
        + "\n"
    )
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


class InventoryModule(BaseInventoryPlugin):  # type: ignore[misc]
    """Inventory of a fleet of replicas."""

    NAME = "sparkfleet.serving.fleet"

    def verify_file(self, path: str) -> bool:
        return bool(super().verify_file(path)) and path.endswith(("fleet.yml", "fleet.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path, cache)
        config = self._read_config_data(path)
        lock = Path(path).resolve().parent / str(config.get("rail_lock") or "fleet.rails.lock")
        try:
            locked = read_lock(lock)
            hosts, places = build(config, locked)
            implicit = {
                name: places[name]
                for name, row in config["replicas"].items()
                if row.get("rail_index") is None
            }
            wanted = {**locked, **implicit}
            if implicit and wanted != locked:
                try:
                    write_lock(lock, wanted)
                except OSError as error:
                    raise FleetError(
                        f"{lock} cannot be written ({error}): give every replica a rail_index, or "
                        "keep the lock file with the inventory"
                    ) from error
        except FleetError as error:
            raise AnsibleParserError(f"{path}: {error}") from error
        for row in hosts:
            group = "replica_" + str(row["replica"]).replace("-", "_")
            inventory.add_group(group)
            inventory.add_host(row["name"], group=group)
            for key, value in {**row["extra"], **row["variables"]}.items():
                inventory.set_variable(row["name"], key, value)
