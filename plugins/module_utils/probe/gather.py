"""One round trip: every asked subset of one node, as plain JSON types with documented, stable keys."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from . import docker, firewall, gpu, kernel, kernel_log, memory, net, netplan, services, storage, system
from .reader import Reader

SCHEMA = 1
SUBSETS = (
    "os",
    "kernel",
    "kernel_log",
    "memory",
    "net",
    "rdma",
    "netplan",
    "firewall",
    "docker",
    "gpu",
    "clocks",
    "disk",
    "systemd",
    "listeners",
    "packages",
    "privilege",
)
# Names that ask for another subset: `rdma` and `net` are read together, `services` is what `setup` users
# look for.
ALIASES = {"services": "systemd", "routes": "net"}
DEFAULT_PATHS = ("/", "/var/lib/sparkfleet", "/var/lib/docker")


def resolve(wanted: Iterable[str]) -> list[str]:
    """The subsets to read, in fixed order. "all" and "!name" work as in `setup`; min is "os", "kernel",
    "privilege".

    Raises ValueError for a name that does not exist.
    """
    chosen: set[str] = set()
    dropped: set[str] = set()
    for raw in wanted:
        name = raw[1:] if raw.startswith("!") else raw
        name = ALIASES.get(name, name)
        names = set(SUBSETS) if name == "all" else {"os", "kernel", "privilege"} if name == "min" else {name}
        unknown = names - set(SUBSETS)
        if unknown:
            raise ValueError(
                "unknown subset {!r}; known: {}".format(raw, ", ".join((*SUBSETS, "all", "min")))
            )
        if raw.startswith("!"):
            dropped |= names
        else:
            chosen |= names
    if not chosen:
        chosen = set(SUBSETS)
    return [name for name in SUBSETS if name in chosen - dropped]


def gather(reader: Reader, wanted: Iterable[str] = ("all",), paths: Iterable[str] = ()) -> dict[str, Any]:
    """The probe of one node. A subset that was not asked has no key; what could not be read is None or
    empty, and
    `missing_privileges` and `timeouts` say why."""
    subsets = resolve(wanted)
    probe: dict[str, Any] = {"schema": SCHEMA, "subsets": subsets}
    started = time.monotonic()
    if {"net", "rdma", "netplan"} & set(subsets):
        together = net.read(reader)
        probe.update(together)
        if "netplan" in subsets:
            probe["netplan"] = netplan.read(reader, together["net"])
    simple = {
        "os": system.read_os,
        "kernel": kernel.read,
        "kernel_log": kernel_log.read,
        "firewall": firewall.read,
        "memory": memory.read,
        "docker": docker.read,
        "gpu": gpu.read,
        "clocks": gpu.read_clocks,
        "systemd": services.read_systemd,
        "listeners": services.read_listeners,
        "packages": system.read_packages,
        "privilege": system.read_privilege,
    }
    for name in subsets:
        if name in simple:
            probe[name] = simple[name](reader)
    if "disk" in subsets:
        asked = list(dict.fromkeys([*DEFAULT_PATHS, *paths]))
        root = (probe.get("docker") or {}).get("root_dir")
        if root and root not in asked:
            asked.append(root)
        # What lies below a path is only counted where somebody asks for this very path.
        probe["disk"] = storage.read(reader, asked, [path for path in paths if path not in DEFAULT_PATHS])
    probe["missing_privileges"] = reader.missing_privileges
    probe["timeouts"] = reader.timeouts
    probe["seconds"] = round(time.monotonic() - started, 3)
    return probe
