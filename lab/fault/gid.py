"""Faults of the GID tables, as seen on pairs in the field."""

from __future__ import annotations

from . import Fault

FAULTS = (
    Fault("gid-hole", "the entries of the rails' IPv4 addresses are gone: slots 2 and 3 are empty"),
    Fault(
        "gid-drift",
        "the RoCE v2 entry of IPv4 moved to another slot; its v1 twin stayed at 2",
        "slot, or slot:rail for one of the rails 0 and 1",
        default="4",
    ),
    Fault("gid-late", "an entry appears only some time after its address", "seconds", default="8"),
    Fault("gid-shift", "a random IPv6 link-local address holds slots 2 and 3; IPv4 lands on 4 and 5"),
)
