# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Everything that speaks against starting, as data: from the inventory alone, from each node, and from
comparing the
nodes of a replica. Pure; the probes are plain dicts from `spark_probe`. docs/preflight.md explains every
check id.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import rail_firewall, rails
from .disk_needs import lacking
from .memory_guard import judge_killer
from .rails import Refusal

GIB = 1024**3

#: Kernels that must not run, with the reason (hosts.md 3.4, field-problems B48 and B53).
DENIED_KERNELS = (
    (
        r"^6\.17\.0-1008-nvidia",
        "panics, then fails at each boot (DOE mailbox)",
        "a newer 6.17 kernel, after a cold drain",
    ),
)
#: Kernels that are good only with kho=off: kexec handover takes memory as CMA and breaks RDMA registration.
KHO_KERNELS = (r"^7\.0\.0-1019-nvidia", r"^7\.0\.0-31-generic")
KHO_REMEDY = (
    "install nvidia-spark-grub-kho (or put kho=off into /etc/default/grub.d and run update-grub) and restart "
    "one node "
    "at a time, or boot 6.17.0-1032-nvidia"
)


#: Every check, from the inventory, a node, or the comparison of nodes: what preflight_warn may name.
CHECKS = (
    "address-twice",
    "architecture",
    "bond",
    "cable",
    "cage-differs",
    "container-name",
    "disk",
    "disk-network",
    "disk-rollback",
    "docker",
    "docker-denied",
    "engine-unknown",
    "firewall",
    "gid",
    "gpu",
    "gpu-busy",
    "half-pair",
    "halves",
    "kernel-denied",
    "kernel-kho",
    "kernel-next-boot",
    "link-state",
    "memory",
    "memory-killer",
    "memory-pieces",
    "netplan-foreign",
    "not-read",
    "parity-architecture",
    "parity-bios",
    "parity-driver",
    "parity-driver-version",
    "parity-firmware",
    "parity-kernel",
    "parity-memory",
    "parity-os",
    "parity-storage",
    "parity-swap",
    "pcie-errors",
    "pcie-width",
    "pin-unset",
    "port",
    "rail-address",
    "rail-is-management",
    "rail-netdev",
    "rail-speed",
    "rail-subnets-differ",
    "rails-count",
    "rails-missing",
    "rank-range",
    "rank-twice",
    "rdma-mtu",
    "replica-name",
    "same-subnet",
    "secret-file",
    "subnet-forbidden",
    "subnet-overlap",
    "subnet-taken",
    "sudo",
    "timeout",
    "unreachable",
    "warn-unknown",
    "world",
)


@dataclass(frozen=True)
class Options:
    """What the role wants. Sizes are bytes. An empty value means: not judged."""

    architecture: str = "aarch64"
    known_engines: tuple[str, ...] = ()
    pins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warn: tuple[str, ...] = ()
    start: bool = True
    min_available_bytes: int = 0
    ports: tuple[int, ...] = ()
    container_name: str = ""
    disk_needs: tuple[Mapping[str, Any], ...] = ()
    local_paths: tuple[str, ...] = ()
    secret_files: tuple[Mapping[str, Any], ...] = ()
    takeover: bool = False
    open_firewall: bool = False
    rdma_mtu: int = 4096
    #: What the guard will do about other killers (`guard_killers`), and the redline that they must stay under.
    killers: str = "refuse"
    redline_gib: float = 4.0
    guard_replicas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError for a key that does not exist."""
        unknown = set(raw) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"unknown preflight option {', '.join(sorted(unknown))}")
        values = dict(raw)
        for key in ("known_engines", "warn", "disk_needs", "local_paths", "secret_files"):
            if key in values:
                values[key] = tuple(values[key])
        if "ports" in values:
            values["ports"] = tuple(int(port) for port in values["ports"])
        return cls(**values)


def size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.1f} GiB"


# --- the inventory


def inventory_refusals(members: Sequence[Mapping[str, Any]], options: Options) -> list[Refusal]:
    """Before any node is asked."""
    found = rails.replica_refusals(members)
    for name in options.warn:
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, 1)
            found.append(
                Refusal(
                    "warn-unknown",
                    "inventory",
                    f"preflight_warn names {name!r}",
                    "ids of checks",
                    f"did you mean {near[0]}?" if near else "docs/preflight.md lists them",
                )
            )
    for row in members:
        engine = str(row.get("engine") or "")
        if options.known_engines and engine not in options.known_engines:
            found.append(
                Refusal(
                    "engine-unknown",
                    str(row["name"]),
                    f"engine {engine}",
                    ", ".join(sorted(options.known_engines)),
                    "correct sparkfleet_engine, or add a profile in roles/ranks/vars/engines",
                )
            )
    for name, pin in sorted(options.pins.items()):
        value = str(pin.get("value") or "").strip()
        pattern = str(pin.get("pattern") or "")
        if value and (not pattern or re.fullmatch(pattern, value)):
            continue
        found.append(
            Refusal(
                "pin-unset",
                "inventory",
                f"{name} is {value!r}" if value else f"{name} is not set",
                f"a pinned value{' of the form ' + pattern if pattern else ''}; none is invented here",
                str(pin.get("where_to_get") or "see the comments in inventory/example"),
            )
        )
    return found


# --- one node


def owned_running(probe: Mapping[str, Any]) -> list[str]:
    """Names of our rank containers that run on the node."""
    return [
        str(row["name"])
        for row in (probe.get("docker") or {}).get("containers") or []
        if row.get("owned") and row.get("state") == "running"
    ]


def kho_picture(memory: Mapping[str, Any]) -> str:
    """Which of the three recorded pictures /proc/meminfo shows.

    healthy (6.17: CmaTotal 128 MiB, CmaFree below it), repaired (7.0 with kho=off: both 0), broken (CmaTotal
    0 and
    CmaFree above it), or unknown. CmaTotal 0 alone condemns repaired boxes.
    """
    total, free = memory.get("cma_total_bytes"), memory.get("cma_free_bytes")
    if total is None or free is None:
        return "unknown"
    if free > total:
        return "broken"
    return "repaired" if total == 0 else "healthy"


def _kernel(node: str, probe: Mapping[str, Any]) -> list[Refusal]:
    found = []
    kernel = probe.get("kernel") or {}
    release, cmdline = str(kernel.get("release") or ""), str(kernel.get("cmdline") or "")
    memory = probe.get("memory") or {}
    picture = kho_picture(memory)
    needs_off = (
        any(re.match(pattern, release) for pattern in KHO_KERNELS) and "kho=off" not in cmdline.split()
    )
    if picture == "broken" or needs_off:
        cma = "CmaTotal {} kB, CmaFree {} kB".format(
            *(
                value // 1024 if value is not None else "unknown"
                for value in (memory.get("cma_total_bytes"), memory.get("cma_free_bytes"))
            )
        )
        found.append(
            Refusal(
                "kernel-kho",
                node,
                f"{release or 'kernel unknown'} without kho=off; {cma}",
                "no kexec handover: it holds memory as CMA and RDMA registration fails",
                KHO_REMEDY,
            )
        )
    for pattern, why, remedy in DENIED_KERNELS:
        if re.match(pattern, release):
            found.append(Refusal("kernel-denied", node, f"{release}: {why}", remedy, "install it, restart"))
    following = kernel.get("next_boot") or {}
    ahead = str(following.get("release") or "")
    if ahead and ahead != release:
        bad = any(re.match(pattern, ahead) for pattern in KHO_KERNELS) and "kho=off" not in str(
            following.get("cmdline")
        )
        bad = bad or any(re.match(pattern, ahead) for pattern, _why, _remedy in DENIED_KERNELS)
        found.append(
            Refusal(
                "kernel-next-boot",
                node,
                f"runs {release}, the next boot takes {ahead}",
                "the kernel that is tested",
                KHO_REMEDY
                if bad
                else "restart at a time of your choice, or set the GRUB default and hold it",
                warnable=True,
                level="fail" if bad else "warn",
            )
        )
    return found


def _kernel_log(node: str, probe: Mapping[str, Any]) -> list[Refusal]:
    """PCIe and ConnectX-7 errors of this boot that were not corrected (B16)."""
    log = probe.get("kernel_log") or {}
    fatal, uncorrected = log.get("fatal") or 0, log.get("uncorrected") or 0
    if not fatal and not uncorrected:
        return []
    first = next(iter(log.get("lines") or []), "")
    return [
        Refusal(
            "pcie-errors",
            node,
            f"{fatal or uncorrected} kernel line{'s' * ((fatal or uncorrected) != 1)} of this boot: {first}",
            "no uncorrected PCIe or ConnectX-7 error since the node started",
            "stop the replica on all its nodes, restart this one (the recovery may hang: then hold the power "
            "button), drain its power if it comes again; nvidia-bug-report.sh for support",
            warnable=True,
            level="fail" if fatal else "warn",
        )
    ]


def _firewall(
    node: str, plan: Sequence[rails.RailPlan], probe: Mapping[str, Any], options: Options
) -> list[Refusal]:
    """ufw between the rails: ranks meet on a known port and then talk on ports that nobody knows before (B15).

    The node's own subnet is what is asked for, so that a rank that connects to its own address gets through too.
    """
    wall = probe.get("firewall") or {}
    if not rail_firewall.filters(wall):
        return []
    rules = wall.get("rules")
    answers = [(item, rail_firewall.decided(rules or [], item.netdev, item.network)) for item in plan]
    # The role fabric adds what is missing when it may; it never goes around a rule that says no.
    fatal = (False,) if options.open_firewall and rules is not None else (False, None)
    closed = [item for item, answer in answers if answer in fatal]
    if not closed:
        return []
    names = ", ".join(item.netdev for item in closed)
    missing = [item for item, answer in answers if item in closed and answer is None]
    remedy = "; ".join(
        "ufw " + " ".join(rail_firewall.rule_words(item.netdev, item.network)) for item in missing
    )
    if missing and rules is not None:
        remedy += "; or set fabric_open_firewall: true"
    if len(missing) < len(closed):
        remedy = "; ".join(filter(None, ["remove the rule that denies it (ufw status numbered)", remedy]))
    return [
        Refusal(
            "firewall",
            node,
            f"ufw is active; its rules could not be read (rails {names})"
            if rules is None
            else f"ufw is active and does not let the ranks through on {names}",
            "all ports open between the ranks, on the rails only: the ranks choose ports while they run",
            remedy,
            warnable=True,
            level="warn" if rules is None else "fail",
        )
    ]


def _privilege(node: str, probe: Mapping[str, Any], sudo_message: str) -> list[Refusal]:
    if sudo_message:
        return [
            Refusal(
                "sudo",
                node,
                sudo_message,
                "root by sudo, with or without a password",
                "pass --ask-become-pass, or allow sudo without a password",
            )
        ]
    missing = [f"{row['what']} ({row['need']})" for row in probe.get("missing_privileges") or []]
    if missing:
        return [
            Refusal(
                "not-read",
                node,
                "not readable: " + "; ".join(missing),
                "a probe as root",
                "let the probe become root",
                level="warn",
            )
        ]
    return []


def _machine(node: str, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    found = []
    arch = (probe.get("os") or {}).get("arch")
    if options.architecture and arch and arch != options.architecture:
        found.append(
            Refusal(
                "architecture",
                node,
                str(arch),
                options.architecture,
                "use a DGX Spark; for a trial on another machine set sparkfleet_architecture",
            )
        )
    gpu = probe.get("gpu") or {}
    if gpu and not gpu.get("present"):
        found.append(
            Refusal(
                "gpu",
                node,
                str(gpu.get("reason") or "no GPU"),
                "a GB10 that answers nvidia-smi",
                "check the driver (nvidia-smi); after a hang restart the node",
            )
        )
    for label in probe.get("timeouts") or []:
        if str(label).startswith("nvidia-smi") and gpu and not gpu.get("present"):
            continue  # that is the refusal above
        found.append(
            Refusal(
                "timeout",
                node,
                f"no answer in time: {label}",
                "an answer",
                "look at the node: something hangs",
                level="warn",
            )
        )
    # Only compute processes count: GPU utilisation comes from a desktop too.
    foreign = [str(row["name"]) for row in gpu.get("processes") or []]
    if foreign and not owned_running(probe):
        found.append(
            Refusal(
                "gpu-busy",
                node,
                f"GPU used by {', '.join(sorted(set(foreign)))}",
                "a GPU that nobody else uses",
                "stop these processes: memory is shared with the CPU",
                warnable=True,
            )
        )
    return found


def _docker(node: str, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    state = probe.get("docker")
    if state is None:
        return []
    if state.get("denied"):
        return [
            Refusal(
                "docker-denied",
                node,
                "the Docker socket refuses this account",
                "an answer",
                "let the probe become root; what runs there is not known",
            )
        ]
    if not state.get("known"):
        return [
            Refusal(
                "docker",
                node,
                f"Docker does not answer ({state.get('reason')})",
                "a running Docker engine",
                "DGX OS ships it: systemctl status docker",
            )
        ]
    found = []
    for row in state.get("containers") or []:
        if options.container_name and row.get("name") == options.container_name and not row.get("owned"):
            found.append(
                Refusal(
                    "container-name",
                    node,
                    f"a container {row['name']} ({row.get('state')}) that is not ours",
                    "a free name",
                    "stop and rename it, or adopt it with playbooks/adopt.yml",
                )
            )
    return found


def _ports(node: str, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    if owned_running(probe):
        return []  # our own ranks listen there
    found = []
    for port in options.ports:
        rows = [row for row in probe.get("listeners") or [] if row.get("port") == port]
        if rows:
            who = ", ".join(
                sorted({f"{row.get('process') or 'a process'} (pid {row.get('pid') or '?'})" for row in rows})
            )
            found.append(
                Refusal(
                    "port",
                    node,
                    f"{port} is taken by {who}",
                    f"{port} free",
                    "stop it, or choose another port; Jupyter takes 8888 by default",
                    warnable=True,
                )
            )
    return found


def _memory(node: str, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    if not options.start or not options.min_available_bytes or owned_running(probe):
        return []
    memory = probe.get("memory") or {}
    available = memory.get("available_bytes")
    # What a bad kernel has set aside comes back with a good one, which is another row.
    held = memory.get("cma_free_bytes") or 0 if kho_picture(memory) == "broken" else 0
    if available is None or available + held >= options.min_available_bytes:
        return []
    unaccounted = memory.get("unaccounted_bytes") or 0
    remedy = "stop what uses memory (desktop, other models, page cache)"
    if available + unaccounted >= options.min_available_bytes:
        remedy = (
            f"{size(unaccounted)} belong to nobody the kernel can name: the pool that the GPU driver keeps "
            "after an "
            "engine stopped. The next engine may reuse it; else restart the node"
        )
    return [
        Refusal(
            "memory",
            node,
            f"{size(available)} available of {size(memory.get('total_bytes'))}",
            f"{size(options.min_available_bytes)} before a start",
            remedy,
            warnable=True,
        )
    ]


#: Free blocks of 16 MiB or more below which loads were seen to crawl or fail; a fresh boot has 780 to 1400
#: (local-inference-lab/sparkring#173, MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#23).
LARGE_BLOCK, LARGE_BLOCKS = 16 << 20, 60


def large_blocks(memory: Mapping[str, Any], page_size: Any) -> int | None:
    """Free blocks of at least 16 MiB, in units of 16 MiB; None where the kernel keeps no blocks that large."""
    found = None
    for zone in memory.get("buddyinfo") or []:
        for order, count in enumerate(zone.get("free_blocks") or []):
            block = int(page_size or 0) << order
            if block >= LARGE_BLOCK:
                found = (found or 0) + int(count) * (block // LARGE_BLOCK)
    return found


def _fragmented(node: str, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    """Memory in pieces: a warning, because the figure is from two sites and the load may work all the same."""
    if not options.start or owned_running(probe):
        return []
    blocks = large_blocks(probe.get("memory") or {}, (probe.get("kernel") or {}).get("page_size"))
    if blocks is None or blocks >= LARGE_BLOCKS:
        return []
    return [
        Refusal(
            "memory-pieces",
            node,
            f"{blocks} free blocks of 16 MiB",
            f"{LARGE_BLOCKS} or more before a start",
            "restart the node before the load: a fresh boot has about a thousand",
            level="warn",
        )
    ]


def _disk(node: str, rank: int, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    """What will be written against what is free, by filesystem; what lies there already is not asked for twice."""
    found = []
    paths = (probe.get("disk") or {}).get("paths") or {}
    needs: dict[str, list[tuple[str, int]]] = {}
    room: dict[str, int] = {}
    second: dict[str, int] = {}
    begun: set[str] = set()
    for need in options.disk_needs:
        if need.get("rank") is not None and int(need["rank"]) != rank:
            continue
        if need.get("node") is not None and str(need["node"]) != node:
            continue
        row = paths.get(str(need["path"])) or {}
        count = lacking(need, paths, probe.get("docker") or {})
        if row.get("available_bytes") is None:
            continue
        mount = str(row["mountpoint"])
        second[mount] = second.get(mount, 0) + int(need.get("second") or 0)
        if count < int(need["bytes"]) and not need.get("unless"):
            begun.add(mount)
        if not count:
            continue
        needs.setdefault(mount, []).append((str(need.get("what") or need["path"]), count))
        room[mount] = int(row["available_bytes"])
    for mount, items in sorted(needs.items()):
        total = sum(count for _what, count in items)
        if total > room[mount]:
            what = ", ".join(f"{name} {size(count)}" for name, count in items)
            found.append(
                Refusal(
                    "disk",
                    node,
                    f"{mount} has {size(room[mount])} free",
                    f"{size(total)} ({what})",
                    "free space there, or move sparkfleet_data_dir to another disk",
                    warnable=True,
                )
            )
        elif mount not in begun and total + second[mount] > room[mount]:
            # Told before the first bytes are written: later, what is free hangs on which releases are kept.
            found.append(
                Refusal(
                    "disk-rollback",
                    node,
                    f"{mount} has {size(room[mount])} free",
                    f"{size(total + second[mount])} for a second release beside this one, as an upgrade keeps it",
                    "it can serve, but an upgrade will have no way back; free space there, or use another disk",
                    level="warn",
                )
            )
    for path in options.local_paths:
        row = paths.get(path) or {}
        if row.get("network"):
            found.append(
                Refusal(
                    "disk-network",
                    node,
                    f"{path} is on {row.get('fstype')} ({row.get('mountpoint')})",
                    "a local disk: the Engram tables are read at random while decoding",
                    "choose a local directory",
                )
            )
    return found


def disk_refusals(
    members: Sequence[Mapping[str, Any]], probes: Mapping[str, Mapping[str, Any]], options: Options
) -> list[Refusal]:
    """The disk checks of all members that answered."""
    found = []
    for row in members:
        name = str(row["name"])
        if name in probes:
            found += _disk(name, int(row.get("rank", 0)), probes[name], options)
    return found


def _secrets(node: str, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    """Files with a key or a token that this node must have: there, not empty, and not for others to read."""
    seen = (probe.get("disk") or {}).get("paths") or {}
    found = []
    for row in options.secret_files:
        path = str(row["path"])
        if str(row["node"]) != node or path not in seen:
            continue
        facts, state = seen[path], ""
        if facts.get("exists") is False:
            state = "absent"
        elif facts.get("size_bytes") is None:
            # On a network filesystem nothing is asked; the role that needs the file asks it.
            state = "" if facts.get("network") else "no file"
        elif facts["size_bytes"] == 0:
            state = "empty"
        elif row.get("private") and int(str(facts.get("mode") or "0"), 8) & 0o077:
            state = f"readable by others (mode {facts['mode']})"
        if state:
            found.append(
                Refusal(
                    "secret-file",
                    node,
                    f"{row['name']} names {path}, which is {state}",
                    "a file with the secret on this node" + (", mode 0600" if row.get("private") else ""),
                    f"write it there (chmod 600), or correct {row['name']}",
                )
            )
    return found


def _killers(node: str, probe: Mapping[str, Any], options: Options) -> list[Refusal]:
    """Other programs that end processes for memory, judged as the guard judges them."""
    found = []
    total = int((probe.get("memory") or {}).get("total_bytes") or 0)
    # As the guard takes it: of all replicas the gentlest, which nothing else may come before.
    special = (row["redline_gib"] for row in options.guard_replicas.values() if "redline_gib" in row)
    redline_gib = min([options.redline_gib, *map(float, special)])
    for row in (probe.get("systemd") or {}).get("memory_killers") or []:
        if not row.get("active"):
            continue
        killer = judge_killer(
            row["unit"],
            argv=row.get("argv") or (),
            total_bytes=total,
            redline_gib=redline_gib,
            managed=row.get("managed") or (),
        )
        settled = options.killers == "disable" or (options.killers == "adjust" and killer.remedy)
        if not killer.conflict or settled:
            continue
        found.append(
            Refusal(
                "memory-killer",
                node,
                f"{row['unit']} is active and {killer.conflict}",
                "one memory killer only, the guard of this collection",
                f"systemctl disable --now {row['unit']}; or guard_killers: "
                + ("adjust, " if killer.remedy else "")
                + "disable, or report, which accepts it",
                warnable=True,
                level="warn" if options.killers == "report" else "fail",
            )
        )
    return found


def _rails(
    member: rails.Member, plan: Sequence[rails.RailPlan], probe: Mapping[str, Any], options: Options
) -> list[Refusal]:
    """What the planned rails of one node show now."""
    found = []
    node = member.name
    net, rdma = probe.get("net") or {}, probe.get("rdma") or {}
    netplan = probe.get("netplan") or {}
    right = True
    for item in plan:
        row = net.get(item.netdev) or {}
        if row.get("master"):
            found.append(
                Refusal(
                    "bond",
                    node,
                    f"{item.netdev} is part of {row['master']}",
                    "two separate rails",
                    "remove the bond: RDMA goes past it and it gains nothing",
                )
            )
        speed = row.get("speed")
        if speed and row.get("driver") == rails.MELLANOX_DRIVER and speed < 200000:
            found.append(
                Refusal(
                    "rail-speed",
                    node,
                    f"{item.netdev} at {speed} Mb/s",
                    "200000 Mb/s",
                    "direct cable: cable or firmware; switch: turn autonegotiation off, force 200G",
                    level="warn",
                )
            )
        width = row.get("pci_link_width")
        if width is not None and width < 4:
            found.append(
                Refusal(
                    "pcie-width",
                    node,
                    f"{item.netdev} on PCIe x{width}",
                    "x4",
                    "drain the power of the node, reseat",
                    level="warn",
                )
            )
        here = [str(entry["cidr"]) for entry in row.get("addresses") or [] if entry.get("family") == "inet"]
        right = right and here == [item.address]
        active = (rdma.get(str(item.hca)) or {}).get("active_mtu")
        # Before the rails are applied the MTU is not what it will be.
        configured = row.get("mtu") == item.mtu and here == [item.address]
        if configured and active is not None and active < options.rdma_mtu:
            found.append(
                Refusal(
                    "rdma-mtu",
                    node,
                    f"{item.hca} has an active RDMA MTU of {active} at MTU {item.mtu} of {item.netdev}",
                    f"{options.rdma_mtu}: small packets cost bandwidth and time",
                    "fabric_mtu: 9000 on every node; if it is, restart the node",
                    warnable=True,
                )
            )
        files = [
            str(entry["path"])
            for kind in ("files", "networkmanager", "networkd")
            for entry in netplan.get(kind) or []
            if not entry.get("owned") and item.netdev in (entry.get("netdevs") or [])
        ]
        made = (netplan.get("generated") or {}).get(item.netdev) or {}
        same = (
            made.get("addresses") == [item.address] and made.get("mtu") == item.mtu and here == [item.address]
        )
        if files and not same and not options.takeover:
            found.append(
                Refusal(
                    "netplan-foreign",
                    node,
                    f"{item.netdev} ({', '.join(here) or 'no IPv4'}) is configured by " + ", ".join(files),
                    f"{item.address} by this collection alone",
                    "remove the rail from these files, or set fabric_takeover: true",
                )
            )
    if right and plan and all(item.hca and (rdma.get(item.hca) or {}).get("gids") for item in plan):
        try:
            rails.one_gid_index(
                [rails.choose_gid(rdma, str(item.hca), item.netdev, item.ip) for item in plan]
            )
        except rails.RailError as error:
            found.append(
                Refusal(
                    "gid",
                    node,
                    str(error),
                    "one RoCE v2 index on all rails of the node",
                    "networkctl reconfigure both rails, or restart the node",
                    warnable=True,
                )
            )
    return found


def node_refusals(
    member: rails.Member,
    plan: Sequence[rails.RailPlan],
    probe: Mapping[str, Any],
    options: Options,
    sudo_message: str = "",
) -> list[Refusal]:
    node = member.name
    return [
        *_privilege(node, probe, sudo_message),
        *_kernel(node, probe),
        *_kernel_log(node, probe),
        *_machine(node, probe, options),
        *_rails(member, plan, probe, options),
        *_firewall(node, plan, probe, options),
        *_docker(node, probe, options),
        *_ports(node, probe, options),
        *_killers(node, probe, options),
        *_memory(node, probe, options),
        *_fragmented(node, probe, options),
        *_disk(node, member.rank, probe, options),
        *_secrets(node, probe, options),
    ]


# --- comparing the nodes of a replica


def _branch(version: Any) -> str | None:
    return str(version).split(".", 1)[0] if version else None


def parity(replica: str, probes: Mapping[str, Mapping[str, Any]]) -> list[Refusal]:
    """Two nodes of one replica must be equal in what decides, and should be in the rest (B50)."""
    if len(probes) < 2:
        return []

    def values(read: Any) -> dict[str, Any]:
        return {name: read(probe) for name, probe in probes.items()}

    def swap(probe: Mapping[str, Any]) -> str | None:
        total = (probe.get("memory") or {}).get("swap_total_bytes")
        return None if total is None else size(total)

    def firmware(probe: Mapping[str, Any]) -> str | None:
        seen = sorted({str(row["fw_ver"]) for row in (probe.get("rdma") or {}).values() if row.get("fw_ver")})
        return ", ".join(seen) or None

    rules: list[tuple[str, str, str, Any]] = [
        ("parity-architecture", "fail", "architecture", lambda p: (p.get("os") or {}).get("arch")),
        ("parity-kernel", "fail", "kernel", lambda p: (p.get("kernel") or {}).get("release")),
        ("parity-driver", "fail", "driver branch", lambda p: _branch((p.get("gpu") or {}).get("driver"))),
        (
            "parity-storage",
            "fail",
            "Docker storage driver",
            lambda p: (p.get("docker") or {}).get("storage_driver"),
        ),
        ("parity-driver-version", "warn", "driver", lambda p: (p.get("gpu") or {}).get("driver")),
        ("parity-firmware", "warn", "ConnectX-7 firmware", firmware),
        ("parity-os", "warn", "DGX OS", lambda p: (p.get("os") or {}).get("dgx_release")),
        ("parity-bios", "warn", "BIOS", lambda p: (p.get("os") or {}).get("bios_version")),
        ("parity-swap", "warn", "swap", swap),
    ]
    found = []
    for check, level, what, read in rules:
        seen = {name: value for name, value in values(read).items() if value is not None}
        if len(set(seen.values())) > 1:
            found.append(
                Refusal(
                    check,
                    replica,
                    f"{what}: " + ", ".join(f"{name} {value}" for name, value in sorted(seen.items())),
                    f"the same {what} on every node of a replica",
                    "bring the nodes to one state, one at a time",
                    warnable=check in ("parity-kernel", "parity-driver", "parity-storage"),
                    level=level,
                )
            )
    totals = {n: v for n, v in values(lambda p: (p.get("memory") or {}).get("total_bytes")).items() if v}
    if totals and max(totals.values()) - min(totals.values()) > 0.01 * max(totals.values()):
        # Two populations exist, 119.6 and 121.7 GiB (a BIOS setting): the budget takes the smaller one.
        found.append(
            Refusal(
                "parity-memory",
                replica,
                "memory: " + ", ".join(f"{n} {size(v)}" for n, v in sorted(totals.items())),
                "the same memory on every node",
                "compare the display reserve in the BIOS",
                level="warn",
            )
        )
    return found


# --- all of it


def judge(
    members: Sequence[Mapping[str, Any]],
    probes: Mapping[str, Mapping[str, Any]],
    options: Options,
    messages: Mapping[str, str] | None = None,
    sudo: Mapping[str, str] | None = None,
) -> list[Refusal]:
    """Every refusal and warning of every node, worst first. `messages` says why a node gave no probe, `sudo`
    why root
    was refused on it."""
    messages, sudo = messages or {}, sudo or {}
    found = inventory_refusals(members, options)
    replicas: dict[str, list[Mapping[str, Any]]] = {}
    for row in members:
        replicas.setdefault(str(row.get("replica") or ""), []).append(row)
    for replica, rows in sorted(replicas.items()):
        plans, refusals = rails.plan_rails(rows, probes)
        for item in refusals:
            told = " ".join(messages.get(item.node, "").split()) if item.check == "unreachable" else ""
            found.append(replace(item, found=told, remedy=way_in(told, item.remedy)) if told else item)
        for row in rows:
            name = str(row["name"])
            if name in probes:
                found += node_refusals(
                    rails.Member.of(row), plans.get(name, []), probes[name], options, sudo.get(name, "")
                )
        found += parity(
            replica,
            {str(row["name"]): probes[str(row["name"])] for row in rows if str(row["name"]) in probes},
        )
    return soften(without_derived(found), options.warn)


#: What ssh says when it gets no further -> what to do. The first that fits is taken.
WAYS_IN = (
    (
        r"Permission denied|Invalid/incorrect password|Too many authentication failures",
        "the node does not accept this account with this key: correct ansible_user or ansible_ssh_private_key_file "
        "(or pass -u, --private-key), or put your key on the node with ssh-copy-id; then `ssh USER@ADDRESS true` "
        "must work",
    ),
    (
        r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED|host key",
        "connect once by hand (ssh USER@ADDRESS) and compare the fingerprint; after a reinstallation remove the "
        "old key with ssh-keygen -R ADDRESS",
    ),
    (
        r"Could not resolve|Name or service not known|Temporary failure in name",
        "correct the name in the inventory, or give the address as ansible_host",
    ),
    (
        r"sshpass",
        "passwords for ssh need sshpass on this machine; a key needs nothing (ssh-copy-id USER@ADDRESS)",
    ),
    (
        r"Connection refused",
        "the node is up and no ssh server listens there: correct ansible_host, ansible_port",
    ),
    (
        r"timed out|No route to host|Network is unreachable",
        "power and network of the node; ansible_host must be its management address, not one of a rail",
    ),
)


def way_in(message: str, otherwise: str) -> str:
    """The remedy for a node that gave no answer, from what ssh said."""
    return next((remedy for pattern, remedy in WAYS_IN if re.search(pattern, message, re.I)), otherwise)


#: Check -> checks on the same node (for one of a replica: on any node) that explain it.
FOLLOWS = {
    "not-read": ("sudo",),
    "docker-denied": ("sudo",),
    "firewall": ("sudo",),  # its rules are root's to read
    "netplan-foreign": ("bond",),
    "parity-driver-version": ("parity-driver",),
    "parity-architecture": ("architecture",),
}


def without_derived(found: Sequence[Refusal]) -> list[Refusal]:
    """Without the rows that would go with another one: what remains is what somebody has to do."""
    fails = {(item.check, item.node) for item in found if item.level == "fail"}
    anywhere = {check for check, _node in fails}
    return [
        item
        for item in found
        if not any(
            (cause, item.node) in fails or (item.check.startswith("parity-") and cause in anywhere)
            for cause in FOLLOWS.get(item.check, ())
        )
    ]


def soften(found: Iterable[Refusal], warn: Sequence[str]) -> list[Refusal]:
    """Apply preflight_warn. A name in it that may not be softened stays a refusal, and says so."""
    rows = []
    for item in found:
        if item.level != "fail" or item.check not in warn:
            rows.append(item)
        elif item.warnable:
            rows.append(replace(item, level="warn"))
        else:
            rows.append(replace(item, remedy=f"{item.remedy} (preflight_warn does not soften this one)"))
    unique = list(dict.fromkeys(rows))
    return sorted(
        unique, key=lambda item: (item.level != "fail", item.check != "sudo", item.node, item.check)
    )


def table(rows: Sequence[Refusal], width: int = 72) -> str:
    """The report as text, no line longer than `width`: 72 leaves room for the indent that a callback adds."""
    if not rows:
        return "preflight: nothing speaks against it"
    fails = sum(item.level == "fail" for item in rows)
    lines = [
        f"preflight: {fails} refusal{'s' * (fails != 1)}, {len(rows) - fails} warning{'s' * (len(rows) - fails != 1)}"
    ]
    rule = "-" * width
    lines.append(rule)
    for item in rows:
        head = f"{'REFUSED' if item.level == 'fail' else 'warning'}  {item.check}  "
        lines += textwrap.wrap(head + item.node, width, subsequent_indent="  ")
        parts = [("found", item.found), ("wanted", item.wanted), ("remedy", item.remedy)]
        if item.level == "fail" and item.warnable:
            parts.append(("or", f"preflight_warn: [{item.check}] makes it a warning"))
        for label, text in parts:
            clean = "".join(char if char.isprintable() else " " for char in text)
            lines += textwrap.wrap(
                f"{label:>7}  {clean}", width, initial_indent="  ", subsequent_indent=" " * 11
            )
    lines.append(rule)
    return "\n".join(lines)


def brief(rows: Sequence[Refusal]) -> str:
    """What a failed task says below the report, which stands above it in full."""
    fails = [f"{item.check} ({item.node})" for item in rows if item.level == "fail"]
    more = f" and {len(fails) - 3} more" if len(fails) > 3 else ""
    count = f"{len(fails)} refusal{'s' * (len(fails) != 1)}"
    return f"preflight: {count}, see the report above: {', '.join(fails[:3])}{more}"


def as_json(rows: Sequence[Refusal]) -> str:
    failed = any(item.level == "fail" for item in rows)
    return json.dumps({"failed": failed, "rows": [item.as_dict() for item in rows]}, indent=2, sort_keys=True)
