"""The GID tables of a simulated ConnectX-7, as the kernel would keep them.

Pure: no clock, no files. ``GidTable`` is told which addresses a netdev has and keeps the table that
``ib_core`` would: two default entries made from the MAC (RoCE v1, then v2), then a v1 and a v2 entry for each
address, put into the first free slots. Entries do not move when others go: a removed address leaves a hole,
and the next one fills it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

SLOTS = 32  # mlx5 has 256; fewer keep a whole-table read cheap through FUSE
ZERO = ":".join(["0000"] * 8)
V1 = "IB/RoCE v1"
V2 = "RoCE v2"


def gid_of(address: str) -> str:
    """The GID of an IP address as sysfs prints it: an IPv4 address is mapped into ::ffff:0:0/96."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv4Address):
        parsed = ipaddress.IPv6Address(f"::ffff:{parsed}")
    digits = parsed.packed.hex()  # not .exploded: newer Pythons write a mapped address with dots
    return ":".join(digits[index : index + 4] for index in range(0, 32, 4))


@dataclass(frozen=True)
class Gid:
    gid: str
    kind: str


@dataclass(frozen=True)
class GidFaults:
    """What the fault switches ask of a table (see ``lab/fault/gid.py``).

    ``hole``: the entries of IPv4 addresses are gone. ``drift``: the v2 entry of the first IPv4 address sits
    at this index. ``late``: an entry appears this many seconds after its address. ``shift``: a random
    link-local address holds 2 and 3.
    """

    hole: bool = False
    drift: int | None = None
    late: float = 0.0
    shift: bool = False


@dataclass
class GidTable:
    """One port's table. ``update`` is called before each read; ``slots`` is what a reader then sees."""

    default: str
    slots: list[Gid | None] = field(default_factory=lambda: [None] * SLOTS)
    _since: dict[str, float] = field(default_factory=dict)
    _faults: GidFaults = field(default_factory=GidFaults)

    def update(self, addresses: list[str], now: float, faults: GidFaults | None = None) -> None:
        """Bring the table in step with ``addresses`` (in order of arrival) at time ``now`` (seconds)."""
        faults = faults or GidFaults()
        there = {entry.gid for entry in self.slots if entry}  # lateness takes no entry away
        if (faults.drift, faults.shift, faults.hole) != (
            self._faults.drift,
            self._faults.shift,
            self._faults.hole,
        ):
            self.slots = [None] * SLOTS  # a switch was moved: lay the table out afresh
        self._faults = faults
        self.slots[0], self.slots[1] = Gid(self.default, V1), Gid(self.default, V2)
        self._since = {address: self._since.get(address, now) for address in addresses}
        wanted = [
            gid_of(address)
            for address in addresses
            if (gid_of(address) in there or now - self._since[address] >= faults.late)
            and not (faults.hole and ":" not in address)
        ]
        if faults.shift:
            wanted.insert(0, "fe80:0000:0000:0000:5c3b:9d41:7e02:a6f8")
        wanted = [gid for gid in wanted if gid != self.default]
        for index, entry in enumerate(self.slots[2:], start=2):
            if entry and entry.gid not in wanted:
                self.slots[index] = None
        first_ipv4 = next((gid for gid in wanted if gid.startswith("0000:")), None)
        for gid in wanted:
            for kind in (V1, V2):
                if Gid(gid, kind) in self.slots[2:]:
                    continue
                drifts = faults.drift is not None and gid == first_ipv4 and kind == V2
                slot = faults.drift if drifts else self._free(faults.drift)
                if slot is not None and slot < SLOTS:
                    self.slots[slot] = Gid(gid, kind)

    def _free(self, reserved: int | None) -> int | None:
        for index, entry in enumerate(self.slots):
            if entry is None and (reserved is None or index < 3 or index > reserved):
                return index
        return None
