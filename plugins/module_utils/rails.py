# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Rails of a DGX Spark: which interfaces are halves of which cage, the address plan of a replica, the GID
choice.

Pure: the input is a probe (plain dicts from `spark_probe`) and the wanted rails, the output is data or
refusals.

Topologies: a pair on one cable and several nodes behind a switch have two rails a node. Three or four nodes on
a ring (a cable to each neighbour) have four: rails 0 and 1 on the cable to the next rank, 2 and 3 on the cable
to the previous one, each rail of each cable in a subnet of its own.

Anatomy (NVIDIA/daqiri#108 and the connect-two-sparks playbook): one ConnectX-7 ASIC, two QSFP cages, two
PCIe links in
PCI domains 0000 and 0002. Each cage shows two netdevs and two RDMA devices, the *halves*. One half alone is
about
100 Gb/s and can never fill the cable, so a rail set is always both halves of one cage, and they pair by
`phys_port_name`, never by PCI prefix (NVIDIA/NemoClaw#8520) and never by name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Bytes. Ethernet MTU of a rail; the RDMA path MTU is 4096 then, and 1024 at 1500 (hosts.md 1.6).
RAIL_MTU = 9000
#: MT4129 in PCI terms; only used when the driver name is not readable.
MELLANOX_DRIVER = "mlx5_core"
#: Halves of a cage in rail order, as PCI domain: rail 0 is domain 0000, rail 1 is domain 0002.
HALVES = 2

#: Rails of a node on a ring: both halves of the cable to the next rank, then of the one to the previous.
RING_RAILS = 2 * HALVES
#: A node has two cages, so a ring is the only shape of more than two nodes without a switch.
RING_WORLDS = (3, 4)

#: Ranges that a rail may not use, with the reason.
FORBIDDEN = (
    ("169.254.0.0/16", "link-local: changes at each boot and has scope link"),
    ("100.64.0.0/10", "carrier grade NAT: Tailscale lives here"),
    ("127.0.0.0/8", "loopback"),
    ("224.0.0.0/3", "multicast or reserved"),
    ("0.0.0.0/8", "reserved"),
    ("172.17.0.0/16", "the default network of Docker (docker0)"),
)


class RailError(ValueError):
    """Something about the rails that cannot be planned; the text names found, wanted and remedy."""


@dataclass(frozen=True)
class Refusal:
    """One reason not to go on. `check` is the stable id that docs/preflight.md explains; `warn` is the
    variable that
    turns it into a warning, empty where that would be unsafe. `level` is "fail" or "warn"."""

    check: str
    node: str
    found: str
    wanted: str
    remedy: str
    warnable: bool = False
    level: str = "fail"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Half:
    """One PCIe half of a cage: one netdev and, when the RDMA driver is there, one RDMA device."""

    netdev: str
    hca: str | None
    pci: str
    domain: int
    cage: str
    carrier: bool | None
    admin_up: bool | None
    mtu: int | None
    speed: int | None
    ipv4: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """up, no_cable (no carrier), or admin_down (carrier cannot be read then)."""
        if self.carrier:
            return "up"
        return "admin_down" if self.admin_up is False else "no_cable"


@dataclass(frozen=True)
class Cage:
    """A QSFP cage with its halves in rail order. A healthy one has two."""

    name: str
    halves: tuple[Half, ...]

    @property
    def state(self) -> str:
        """up; half_up (only one half sees the cable); partly_down (one half is up, nobody has brought the
        other up,
        as with old instructions that ignore the second half, B03); no_cable; admin_down."""
        states = {half.state for half in self.halves}
        if states == {"up"}:
            return "up"
        if "no_cable" in states:
            return "half_up" if "up" in states else "no_cable"
        return "partly_down" if "up" in states else "admin_down"

    @property
    def complete(self) -> bool:
        return len(self.halves) == HALVES


def _ipv4(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        str(item["cidr"]) for item in row.get("addresses") or [] if item.get("family", "inet") == "inet"
    )


def is_ring(member: Member) -> bool:
    """Whether the inventory puts a node on a ring: three or four nodes with four rails each."""
    return member.world in RING_WORLDS and len(member.rails) == RING_RAILS


def ring_subnets(rank: int, world: int) -> list[int]:
    """For the rails of one rank on a ring: the number of the subnet within the replica, in rail order.

    Cable c joins rank c (its rails 0, 1) with rank c + 1 (its rails 2, 3) and takes subnets 2c and 2c + 1, so a
    ring takes 2 * world subnets. Raises RailError for another world size.
    """
    if world not in RING_WORLDS:
        raise RailError(f"a ring has {' or '.join(map(str, RING_WORLDS))} nodes, not {world}")
    cables = (rank % world, (rank - 1) % world)
    return [cable * HALVES + half for cable in cables for half in range(HALVES)]


def ring_host(rail: int) -> int:
    """Number of the host in its /30 on a ring: 1 towards the next rank, 2 towards the previous."""
    return 1 if rail < HALVES else 2


def halves_of(probe: Mapping[str, Any]) -> list[Half]:
    """Every ConnectX-7 half that the node shows, by cage and then PCI domain. Empty without a cable when
    hot-plug has
    taken the functions from the bus."""
    found = []
    for name, row in (probe.get("net") or {}).items():
        pci, port = row.get("pci"), row.get("phys_port_name")
        if not pci or not port or row.get("wireless") or row.get("bridge"):
            continue
        # A driver decides when it is known. Behind a veth or an unreadable link only an RDMA device or a full
        # port name (npN, which the management NIC does not have) can speak for it.
        driver = row.get("driver")
        if driver is not None and driver != MELLANOX_DRIVER and not row.get("hca"):
            continue
        found.append(
            Half(
                netdev=str(name),
                hca=row.get("hca"),
                pci=str(pci),
                domain=int(str(pci).split(":", 1)[0], 16),
                cage=str(port),
                carrier=row.get("carrier"),
                admin_up=row.get("admin_up"),
                mtu=row.get("mtu"),
                speed=row.get("speed"),
                ipv4=_ipv4(row),
            )
        )
    return sorted(found, key=lambda half: (half.cage, half.domain, half.netdev))


def cages_of(probe: Mapping[str, Any]) -> list[Cage]:
    """Cages by name, each with its halves in rail order (domain 0000 first)."""
    groups: dict[str, list[Half]] = {}
    for half in halves_of(probe):
        groups.setdefault(half.cage, []).append(half)
    return [Cage(name, tuple(groups[name])) for name in sorted(groups)]


def no_cable_text(probe: Mapping[str, Any]) -> str:
    """What is known when no half is there at all (B02)."""
    hotplug = probe.get("hotplug") or {}
    marker = "set" if hotplug.get("marker") else "not set"
    return f"no ConnectX-7 device on the bus (hot-plug power-off marker {marker})"


def choose_halves(
    probe: Mapping[str, Any],
    netdevs: Sequence[str] = (),
    addresses: Sequence[str] = (),
    strict: bool = True,
    cables: int = 1,
) -> tuple[Half, ...]:
    """The halves that carry the rails of a node, in rail order.

    With `cables` 2 (a ring) both cages: the cable to the next rank belongs into cage p0, the one to the previous
    into p1, unless `netdevs` says otherwise.

    `netdevs` (from the inventory) decides when given. Else the cage with carrier on both halves; of two such
    cages the
    one that already carries one of `addresses`. Raises RailError otherwise; never guesses.
    """
    cages = cages_of(probe)
    halves = [half for cage in cages for half in cage.halves]
    if netdevs:
        by_name = {half.netdev: half for half in halves}
        missing = [name for name in netdevs if name not in by_name]
        if missing:
            known = ", ".join(sorted(by_name)) or no_cable_text(probe)
            raise RailError(f"the inventory names {', '.join(missing)}, the node shows {known}")
        chosen = tuple(by_name[name] for name in netdevs)
        if len({half.netdev for half in chosen}) != len(chosen):
            raise RailError(f"the inventory names one interface twice: {', '.join(netdevs)}")
        return chosen
    if not cages:
        raise RailError(no_cable_text(probe))
    if cables > 1:
        whole = [
            cage for cage in cages if cage.complete and cage.state in ("up", "partly_down", "admin_down")
        ]
        if len(whole) == cables:
            return tuple(half for cage in whole for half in cage.halves)
        if not strict:
            return ()
        states = "; ".join(f"cage {cage.name} {cage.state}" for cage in cages)
        raise RailError(f"{len(whole)} of {cables} cages have a cable on both halves ({states})")
    up = [cage for cage in cages if cage.state == "up" and cage.complete]
    if len(up) > 1:
        carrying = [
            cage for cage in up if any(cidr in addresses for half in cage.halves for cidr in half.ipv4)
        ]
        if len(carrying) == 1:
            return carrying[0].halves
        names = "; ".join(f"{cage.name}: {', '.join(h.netdev for h in cage.halves)}" for cage in up)
        raise RailError(
            f"{len(up)} cages are cabled ({names}): name the netdev of each rail in sparkfleet_rails"
        )
    if up:
        return up[0].halves
    # Where nobody has brought a link up no carrier can be read. The cage that carries the plan, else one of
    # which a half
    # is up, else the first: the caller sees `state` and says that it is a guess (or brings the links up,
    # asks again).
    partly = [cage for cage in cages if cage.complete and cage.state == "partly_down"]
    down = partly or [cage for cage in cages if cage.complete and cage.state == "admin_down"]
    if down and not any(cage.state == "half_up" for cage in cages):
        carrying = [
            cage for cage in down if any(cidr in addresses for half in cage.halves for cidr in half.ipv4)
        ]
        return (carrying or down)[0].halves
    if not strict:
        return ()
    states = "; ".join(
        f"cage {cage.name}: " + ", ".join(f"{half.netdev} {half.state}" for half in cage.halves)
        for cage in cages
    )
    raise RailError(f"no cage with a cable on both halves ({states})")


# --- the address plan


def interface(cidr: str) -> ipaddress.IPv4Interface:
    """A host address with prefix. Raises RailError for anything that cannot be one on a rail."""
    try:
        value = ipaddress.IPv4Interface(cidr)
    except ValueError as error:
        raise RailError(f"{cidr!r} is not an IPv4 address with prefix, such as 10.77.0.1/30") from error
    if "/" not in str(cidr):
        raise RailError(f"{cidr!r} has no prefix length, such as 10.77.0.1/30")
    if value.network.prefixlen > 30:
        raise RailError(f"{cidr} leaves no room for a peer: use /30 or wider")
    if value.ip in (value.network.network_address, value.network.broadcast_address):
        raise RailError(f"{cidr} is the network or the broadcast address of {value.network}")
    return value


@dataclass(frozen=True)
class Member:
    """One node of a replica as the inventory states it. `rails` are (address, netdev or "") in rail order."""

    name: str
    replica: str
    rank: int
    world: int
    rails: tuple[tuple[str, str], ...] = ()
    address: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Member:
        rails = tuple(
            (str(rail.get("address") or ""), str(rail.get("netdev") or "")) for rail in row.get("rails") or []
        )
        return cls(
            name=str(row["name"]),
            replica=str(row.get("replica") or ""),
            rank=int(row.get("rank", 0)),
            world=int(row.get("world", 1)),
            rails=rails,
            address=str(row.get("address") or ""),
        )


def members_of(rows: Iterable[Mapping[str, Any]]) -> list[Member]:
    return [Member.of(row) for row in rows]


def replica_refusals(rows: Iterable[Mapping[str, Any]]) -> list[Refusal]:
    """What is wrong with the inventory itself, before any node is asked: half a pair, ranks, one address
    twice,
    subnets that cannot work. `rows` are all members of all replicas that are known."""
    members = members_of(rows)
    found: list[Refusal] = []
    replicas: dict[str, list[Member]] = {}
    for member in members:
        replicas.setdefault(member.replica, []).append(member)
    for replica, group in sorted(replicas.items()):
        nameless = 0 if not replica else len(replicas.get("", []))
        found += _shape(replica, sorted(group, key=lambda member: (member.rank, member.name)), nameless)
    wrong = {item.node for item in found if item.check in ("world", "rank-twice", "rank-range")}
    misnumbered = {
        member.replica for member in members if is_ring(member) and {member.replica, member.name} & wrong
    }
    found += _addresses(members, misnumbered)
    return found


#: A replica's name stands in unit names, paths and labels; launch.py holds it to the same form.
REPLICA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def _shape(replica: str, group: list[Member], nameless: int) -> list[Refusal]:
    """Names, ranks and number of rails of one replica. `nameless` nodes have a refusal of their own for having no
    replica: they may be the missing ones."""
    found = []
    if replica and not REPLICA_NAME.fullmatch(replica):
        return [
            Refusal(
                "replica-name",
                ", ".join(member.name for member in group),
                f"sparkfleet_replica is {replica!r}",
                "letters, digits, and . _ - after the first, 63 at the most",
                "give the replica such a name: it stands in unit names and paths",
            )
        ]
    names = ", ".join(member.name for member in group)
    if not replica:
        return [
            Refusal(
                "replica-name",
                member.name,
                "no replica name",
                "sparkfleet_replica",
                "give every node the name of the replica that it serves",
            )
            for member in group
        ]
    worlds = sorted({member.world for member in group})
    if len(worlds) > 1:
        found.append(
            Refusal(
                "world",
                replica,
                f"world sizes {', '.join(map(str, worlds))}",
                "one world size a replica",
                "set the same sparkfleet_world on every member",
            )
        )
    world = worlds[-1]
    ranks = [member.rank for member in group]
    missing = sorted(set(range(world)) - set(ranks))
    # A rank that is missing only because two nodes have one rank, a node has none of them, or the members do not
    # agree on how many there are, is said by that refusal.
    if missing and len(worlds) == 1 and len(group) + nameless < world:
        found.append(
            Refusal(
                "half-pair",
                replica,
                f"{len(group)} of {world} nodes ({names}); no rank {', '.join(map(str, missing))}",
                f"ranks 0 to {world - 1}, one node each",
                "add the missing node, or run the whole replica (check --limit)",
            )
        )
    for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        twice = ", ".join(member.name for member in group if member.rank == rank)
        found.append(
            Refusal(
                "rank-twice", replica, f"rank {rank} on {twice}", "one node a rank", "correct sparkfleet_rank"
            )
        )
    for member in group:
        if len(worlds) == 1 and (member.rank >= world or member.rank < 0):
            found.append(
                Refusal(
                    "rank-range",
                    member.name,
                    f"rank {member.rank}",
                    f"0 to {world - 1}",
                    "correct sparkfleet_rank or sparkfleet_world",
                )
            )
        if world > 1 and not member.rails:
            found.append(
                Refusal(
                    "rails-missing",
                    member.name,
                    "no rails",
                    "two rails, one for each half of the cable",
                    "set sparkfleet_rails, or use the inventory plugin",
                )
            )
        elif world > 1 and len(member.rails) != HALVES and not is_ring(member):
            found.append(
                Refusal(
                    "rails-count",
                    member.name,
                    f"{len(member.rails)} rails",
                    "2: both halves of the cable, or half of its bandwidth is lost (on a ring of 3 or 4 nodes: 4)",
                    "set two entries in sparkfleet_rails (on a ring four: to the next rank, to the previous)",
                    warnable=True,
                )
            )
    return found


def _addresses(members: list[Member], misnumbered: set[str]) -> list[Refusal]:
    """Every address plan refusal that needs no node. On a ring the ranks decide which subnets meet, so that is not
    judged in the rings whose ranks are wrong (`misnumbered`)."""
    found: list[Refusal] = []
    owner: dict[str, tuple[str, int]] = {}
    # Rails with a refusal of their own: what comparing them with others would say follows from it.
    judged: set[tuple[str, int]] = set()
    nets: list[tuple[ipaddress.IPv4Network, str, int, tuple[str, int]]] = []
    for member in sorted(members, key=lambda item: (item.replica, item.rank, item.name)):
        own: list[tuple[ipaddress.IPv4Network, tuple[str, int]]] = []
        for number, (cidr, _netdev) in enumerate(member.rails):
            here = (member.name, number)
            try:
                value = interface(cidr)
            except RailError as error:
                found.append(
                    Refusal(
                        "rail-address",
                        member.name,
                        f"rail {number}: {error}",
                        "10.77.0.1/30 or alike",
                        "correct sparkfleet_rails",
                    )
                )
                judged.add(here)
                continue
            first = owner.setdefault(str(value.ip), here)
            if first != here:
                judged |= {first, here}
                found.append(
                    Refusal(
                        "address-twice",
                        member.name,
                        "{} on {} rail {} and on {} rail {}".format(value.ip, *here, *first),
                        "one address, one interface",
                        "give each rail of each node its own address",
                    )
                )
            if member.address and member.address == str(value.ip):
                found.append(
                    Refusal(
                        "rail-is-management",
                        member.name,
                        f"{value.ip} is also the address of the connection",
                        "a rail that does not carry the controller",
                        "use another management address",
                    )
                )
            for bad, why in FORBIDDEN:
                if value.network.overlaps(ipaddress.IPv4Network(bad)):
                    judged.add(here)
                    found.append(
                        Refusal(
                            "subnet-forbidden",
                            member.name,
                            f"{value.network} is in {bad} ({why})",
                            "a private range of its own",
                            "choose another subnet for the rails",
                        )
                    )
            for other, there in own:
                if other.overlaps(value.network) and not judged & {here, there}:
                    judged |= {here, there}
                    found.append(
                        Refusal(
                            "same-subnet",
                            member.name,
                            f"{value.network} holds two rails of one node",
                            "one subnet a rail: in one subnet traffic leaves by the wrong half",
                            "give each rail its own subnet",
                        )
                    )
            own.append((value.network, here))
            if not member.replica:
                continue  # whether it may share a subnet is not known before it has a name
            wire = number
            if is_ring(member):
                wire = ring_subnets(member.rank, member.world)[number]
            nets.append((value.network, member.replica, wire, here))
    differ = _rails_agree([member for member in members if member.replica not in misnumbered], judged)
    told = misnumbered | {item.node for item in differ}
    found += _between([row for row in nets if row[3] not in judged], told)
    return found + differ


def _between(
    nets: list[tuple[ipaddress.IPv4Network, str, int, tuple[str, int]]], told: set[str]
) -> list[Refusal]:
    """Subnets of different replicas, or of different rails (on a ring: wires) of one replica, may not touch.

    Within a replica of `told` another refusal says already which rails do not fit.
    """
    found = []
    seen: set[tuple[str, str]] = set()
    for at, (network, replica, number, (name, _rail)) in enumerate(nets):
        for other, other_replica, other_number, (other_name, _other_rail) in nets[:at]:
            if (
                name == other_name
                or not network.overlaps(other)
                or (replica, number) == (other_replica, other_number)
                or (replica == other_replica and replica in told)
            ):
                continue
            key = (f"{replica}/{number}", f"{other_replica}/{other_number}")
            if key in seen:
                continue
            seen.add(key)
            found.append(
                Refusal(
                    "subnet-overlap",
                    name,
                    f"{network} (replica {replica}, rail {number}) overlaps {other} "
                    f"(replica {other_replica}, rail {other_number})",
                    "subnets that do not touch",
                    "renumber one of the two",
                )
            )
    return found


def _rails_agree(members: list[Member], judged: set[tuple[str, int]]) -> list[Refusal]:
    """Within a replica, rail k of every node lies in one subnet; on a ring, rails 0 and 1 of a rank meet rails 2
    and 3 of the next one, and nobody else. Rails in `judged` have a refusal of their own."""
    found = []
    replicas: dict[str, list[Member]] = {}
    for member in members:
        replicas.setdefault(member.replica, []).append(member)
    for replica, group in sorted(replicas.items()):
        ring = any(is_ring(member) for member in group)
        wires: dict[str, dict[str, list[str]]] = {}
        order: dict[str, list[str]] = {}
        for member in group:
            for number, (cidr, _netdev) in enumerate(member.rails):
                if (member.name, number) in judged:
                    continue
                network = str(interface(cidr).network)
                order.setdefault(member.name, []).append(network)
                wire = f"rail {number}"
                if ring:
                    near = number < HALVES
                    start = member.rank if near else (member.rank - 1) % member.world
                    wire = f"cable from rank {start} to rank {(start + 1) % member.world}, half {number % HALVES}"
                wires.setdefault(wire, {}).setdefault(network, []).append(member.name)
        apart = {wire: networks for wire, networks in sorted(wires.items()) if len(networks) > 1}
        if apart and not ring and len({tuple(sorted(names)) for names in order.values()}) == 1:
            # The same subnets in another order: one mistake, one row.
            shown = "; ".join(f"{name}: {', '.join(names)}" for name, names in sorted(order.items()))
            found.append(
                Refusal(
                    "rail-subnets-differ",
                    replica,
                    f"the rails stand in different order: {shown}",
                    "the same order on every node: rail 0 meets rail 0",
                    "swap the entries of sparkfleet_rails on one of them",
                )
            )
            continue
        for wire, networks in apart.items():
            shown = "; ".join(f"{net}: {', '.join(names)}" for net, names in sorted(networks.items()))
            found.append(
                Refusal(
                    "rail-subnets-differ",
                    replica,
                    f"{wire}: {shown}",
                    f"one subnet for {wire} on every node that it joins",
                    "correct sparkfleet_rails",
                )
            )
    return found


def node_networks(probe: Mapping[str, Any], rails: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(network, where) of everything on a node that a rail subnet may not overlap: addresses of other
    interfaces and
    Docker's networks."""
    own = set(rails)
    for entry in (probe.get("netplan") or {}).get("files") or []:
        if entry.get("owned"):  # rails of ours; where the cable has moved to the other cage, they were
            own |= set(entry.get("netdevs") or [])
    found = []
    for name, row in (probe.get("net") or {}).items():
        if name in own or name == "lo":
            continue
        for cidr in _ipv4(row):
            found.append((str(ipaddress.IPv4Interface(cidr).network), f"interface {name}"))
    for subnet in (probe.get("docker") or {}).get("networks") or []:
        if ":" not in str(subnet):
            found.append((str(subnet), "a Docker network"))
    return found


def overlap_refusals(member: Member, probe: Mapping[str, Any], netdevs: Iterable[str]) -> list[Refusal]:
    """Rail subnets against what the node really has (LAN, Docker). Addresses on the other cage count too."""
    found = []
    for number, (cidr, _netdev) in enumerate(member.rails):
        try:
            network = interface(cidr).network
        except RailError:
            continue
        for other, where in node_networks(probe, netdevs):
            if network.overlaps(ipaddress.IPv4Network(other, strict=False)):
                found.append(
                    Refusal(
                        "subnet-taken",
                        member.name,
                        f"rail {number} {network} overlaps {other} ({where})",
                        "a subnet that nothing else on the node uses",
                        "choose another subnet for the rail",
                    )
                )
    return found


# --- GIDs


@dataclass(frozen=True)
class GidChoice:
    hca: str
    netdev: str
    ipv4: str
    index: int


def choose_gid(rdma: Mapping[str, Any], hca: str, netdev: str, ipv4: str) -> GidChoice:
    """The slot of `hca` that holds `ipv4` as RoCE v2 on `netdev`. Never by position: the table has holes,
    the v1 and v2
    twins of an address need not be adjacent, and the index moves while an engine serves (B19, B24).

    Raises RailError when there is no such slot.
    """
    row = rdma.get(hca) or {}
    table = row.get("gids") or []
    hits = [
        item
        for item in table
        if item.get("ipv4") == ipv4 and "v2" in str(item.get("type")) and item.get("ndev") in (netdev, None)
    ]
    if not hits:
        kinds = ", ".join(
            f"{item['index']}: {item['type']} {item.get('ipv4') or 'link-local'}" for item in table
        )
        raise RailError(f"{hca}: no RoCE v2 GID for {ipv4} on {netdev} (table: {kinds or 'empty'})")
    exact = [item for item in hits if item.get("ndev") == netdev] or hits
    return GidChoice(hca, netdev, ipv4, int(min(item["index"] for item in exact)))


def one_gid_index(choices: Sequence[GidChoice]) -> int:
    """The index that all rails of a node share. An engine takes one integer for all its devices; a node
    whose rails
    have different indexes is refused with both named. Raises RailError."""
    indexes = {choice.index for choice in choices}
    if not choices:
        raise RailError("no rail to choose a GID for")
    if len(indexes) > 1:
        shown = ", ".join(f"{choice.hca} has {choice.index}" for choice in choices)
        raise RailError(
            f"the rails of this node have different GID indexes ({shown}), an engine takes one: "
            "bring both rails down and up together, or restart the node"
        )
    return indexes.pop()


# --- the plan of a replica


@dataclass(frozen=True)
class RailPlan:
    """One rail of one node. `address` has the prefix; `peers` are the rail addresses of the other ranks, in
    rank order;
    `peer_address` is the only one in a pair, else the one of rank 0 (rank 1 on rank 0)."""

    rail: int
    netdev: str
    hca: str | None
    pci: str
    cage: str
    address: str
    ip: str
    network: str
    mtu: int
    peers: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    peer_address: str = ""

    def as_dict(self) -> dict[str, Any]:
        row = asdict(self)
        row["peers"] = [dict(peer) for peer in self.peers]
        return row


def _in_network(cidr: str, network: ipaddress.IPv4Network) -> bool:
    try:
        return interface(cidr).network == network
    except RailError:
        return False


def plan_rails(
    rows: Iterable[Mapping[str, Any]], probes: Mapping[str, Mapping[str, Any]], mtu: int = RAIL_MTU
) -> tuple[dict[str, list[RailPlan]], list[Refusal]]:
    """({node: rails in rail order}, refusals) of the members of ONE replica. A node that cannot be planned
    has no
    entry and at least one refusal."""
    members = sorted(members_of(rows), key=lambda member: member.rank)
    plans: dict[str, list[RailPlan]] = {}
    refusals: list[Refusal] = []
    cages: dict[str, str] = {}
    for member in members:
        probe = probes.get(member.name)
        if probe is None:
            refusals.append(
                Refusal(
                    "unreachable",
                    member.name,
                    "no answer from the node",
                    "a probe",
                    "check power, network and SSH",
                )
            )
            continue
        if not member.rails:  # a single Spark; for more than one node replica_refusals speaks
            plans[member.name] = []
            continue
        named = [netdev for _cidr, netdev in member.rails if netdev]
        if named and len(named) != len(member.rails):
            refusals.append(
                Refusal(
                    "rail-netdev",
                    member.name,
                    f"{len(named)} of {len(member.rails)} rails name a netdev",
                    "all or none",
                    "name the netdev of every rail, or leave them all out",
                )
            )
            continue
        try:
            halves = choose_halves(
                probe, named, [cidr for cidr, _netdev in member.rails], cables=2 if is_ring(member) else 1
            )
        except RailError as error:
            refusals.append(
                Refusal(
                    "cable",
                    member.name,
                    str(error),
                    "both halves of one cage with a carrier",
                    "seat the QSFP cable in the same cage on both nodes, then restart both",
                )
            )
            continue
        refusals += overlap_refusals(member, probe, [half.netdev for half in halves])
        if any(half.state != "up" for half in halves):
            shown = ", ".join(f"{half.netdev} {half.state}" for half in halves)
            refusals.append(
                Refusal(
                    "link-state",
                    member.name,
                    shown,
                    "a carrier on both halves",
                    "the links are brought up when the rails are applied; if it stays, seat the cable",
                    level="warn",
                )
            )
        if not is_ring(member):
            cages[member.name] = halves[0].cage if halves else ""
        if len(halves) < len(member.rails):
            refusals.append(
                Refusal(
                    "halves",
                    member.name,
                    f"{len(halves)} halves for {len(member.rails)} rails",
                    "one half a rail",
                    "check the cable, or lspci for the second PCI domain",
                )
            )
            continue
        plan = []
        for number, ((cidr, _netdev), half) in enumerate(zip(member.rails, halves)):
            try:
                value = interface(cidr)
            except RailError:
                break  # said by replica_refusals
            peers = tuple(
                {"name": other.name, "rank": other.rank, "address": there.split("/")[0]}
                for other in members
                if other.name != member.name
                for there, _name in other.rails
                if _in_network(there, value.network)
            )
            plan.append(
                RailPlan(
                    rail=number,
                    netdev=half.netdev,
                    hca=half.hca,
                    pci=half.pci,
                    cage=half.cage,
                    address=str(value),
                    ip=str(value.ip),
                    network=str(value.network),
                    mtu=mtu,
                    peers=peers,
                    peer_address=str(peers[0]["address"]) if peers else "",
                )
            )
        else:
            plans[member.name] = plan
    if len(set(cages.values())) > 1:
        shown = ", ".join(f"{name}: {cage}" for name, cage in cages.items())
        refusals.append(
            Refusal(
                "cage-differs",
                members[0].replica,
                shown,
                "the same cage on both nodes",
                "works, but NVIDIA asks for the same cage; move the cable when convenient",
                level="warn",
            )
        )
    return plans, refusals


# --- netplan

NETDEV = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$")
HEADER = (
    "# Managed by sparkfleet.serving (role fabric). Changes are overwritten.\n"
    "# Undo: remove this file, then run: netplan apply\n"
)


def render_netplan(rails: Sequence[tuple[str, str]], mtu: int, renderer: str) -> str:
    """The text of 40-cx7.yaml for (netdev, address with prefix) pairs.

    No gateway, no DHCP, no router advertisements, no link-local: exactly one IPv4 a rail keeps the GID table
    short and
    its index stable (hosts.md 1.5). `optional`, so that a boot without the cable does not wait for it.
    """
    if renderer not in ("networkd", "NetworkManager"):
        raise RailError(f"unknown renderer {renderer!r}")
    lines = [HEADER + "network:", "  version: 2", "  ethernets:"]
    for netdev, cidr in sorted(rails):
        if not NETDEV.match(netdev):
            raise RailError(f"{netdev!r} is not the name of an interface")
        lines += [
            f"    {netdev}:",
            f"      renderer: {renderer}",
            "      dhcp4: false",
            "      dhcp6: false",
            "      accept-ra: false",
            "      link-local: []",
            "      optional: true",
            f"      mtu: {int(mtu)}",
            "      addresses:",
            f"        - {interface(cidr)}",
        ]
    return "\n".join(lines) + "\n"
