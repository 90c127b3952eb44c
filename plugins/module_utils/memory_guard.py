"""What the guard decides, from numbers alone: when a rank has to stop, how hard, and why.

One unified memory serves processor and GPU. When it runs out, a Spark does not kill a process, it stops
answering (field B35); a cgroup limit does not see allocations of the GPU (B36). So a process outside the
container watches MemAvailable of the whole machine and stops the rank while the machine still answers. Pure:
no clock, no file, no process in here; times are seconds of any monotonic clock, sizes are bytes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

GIB = 1 << 30

#: Actions. `none` goes on; `terminate` and `kill` are for the local rank; `record` only writes down.
NONE, RECORD, TERMINATE, KILL = "none", "record", "terminate", "kill"

#: Where records go unless the settings say otherwise.
RECORDS = "/var/lib/sparkfleet/guard"

#: Samples kept in memory: ten minutes at two a second.
RING = 1200

#: Named categories of /proc/meminfo that add up to what the kernel can account for. What is missing after a
#: stop is a pool that the driver keeps for its next user: one machine showed about 80 GiB of it.
ACCOUNTED = (
    "MemFree",
    "Buffers",
    "Cached",
    "AnonPages",
    "KReclaimable",
    "SUnreclaim",
    "KernelStack",
    "PageTables",
    "Percpu",
    "VmallocUsed",
    "Hugetlb",
)


class PolicyError(ValueError):
    """A setting that the guard cannot work with; says which and why."""


@dataclass(frozen=True)
class Policy:
    """Settings of one replica's guard. Sizes in GiB and times in seconds, as the configuration has them."""

    #: MemAvailable under which the replica stops. 4 is the seed's value; a run of 479k tokens has been seen
    #: to touch 2.67 GiB and recover, so it is a choice. The plan keeps redline and margin free at the chosen
    #: context.
    redline_gib: float = 4.0
    #: Samples in a row under the redline.
    samples: int = 2
    interval_s: float = 0.5
    #: Under this the rank is killed without waiting for its answer to the first signal.
    hard_gib: float = 2.0
    #: How long a terminated rank may take.
    grace_s: float = 10.0
    #: A warning from here on.
    warn_gib: float = 8.0
    #: `stop` stops the replica and records; `record` only records.
    action: str = "stop"
    #: Silence of every rail of a peer that was heard before, until the replica is stopped here too. 0 turns
    #: it off.
    silence_s: float = 30.0
    #: Requests running with frozen counters. A prompt of half a million tokens takes about 250 s with nothing
    #: counted, so the default is far above. 0 turns it off.
    stall_s: float = 900.0
    #: How long memory may take to come back after a stop before that is said.
    return_s: float = 120.0
    #: What counts as "come back".
    return_gib: float = 100.0
    #: Restarts after a trip that the guard may make within `restart_window_s`. 0: none, somebody looks first.
    restarts: int = 0
    restart_backoff_s: float = 60.0
    restart_window_s: float = 86400.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Policy:
        """From the configuration file. An unknown name or an impossible value is an error, never ignored."""
        known = {item.name: item.type for item in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise PolicyError(f"unknown settings: {', '.join(unknown)}")
        made: dict[str, Any] = {}
        for name, value in values.items():
            if name == "action":
                made[name] = str(value)
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise PolicyError(f"{name}: {value!r} is not a number")
            made[name] = int(value) if known[name] == "int" else float(value)
        policy = cls(**made)
        policy.check()
        return policy

    def check(self) -> None:
        if self.action not in ("stop", "record"):
            raise PolicyError(f"action: {self.action!r} is neither stop nor record")
        if not 0 <= self.hard_gib <= self.redline_gib <= self.warn_gib:
            raise PolicyError(
                f"hard_gib {self.hard_gib:g} <= redline_gib {self.redline_gib:g} <= warn_gib "
                f"{self.warn_gib:g} must hold"
            )
        if self.samples < 1 or not 0.05 <= self.interval_s <= 10:
            raise PolicyError("samples must be 1 or more and interval_s 0.05 to 10")
        for name in (
            "grace_s",
            "silence_s",
            "stall_s",
            "return_s",
            "return_gib",
            "restarts",
            "restart_backoff_s",
        ):
            if getattr(self, name) < 0:
                raise PolicyError(f"{name} must not be negative")


def policies(config: Mapping[str, Any]) -> tuple[Policy, dict[str, Policy]]:
    """The policy of the node and those of replicas that differ, from the configuration file.

    Raises PolicyError. The interval is the node's: one loop samples for all.
    """
    unknown = sorted(set(config) - {"defaults", "replicas", "records_dir"})
    if unknown:
        raise PolicyError(f"unknown sections: {', '.join(unknown)}")
    defaults = config.get("defaults") or {}
    made = {}
    for name, values in (config.get("replicas") or {}).items():
        if "interval_s" in values:
            raise PolicyError(f"{name}: interval_s is one for the whole node")
        made[name] = Policy.from_mapping({**defaults, **values})
    return Policy.from_mapping(defaults), made


def records_dir(config: Mapping[str, Any]) -> str:
    """Where records go. Raises PolicyError for what is no absolute path of one line."""
    path = config.get("records_dir", RECORDS)
    if not isinstance(path, str) or not re.fullmatch(r"/[^\s%\"'\\]+", path):
        raise PolicyError(f"records_dir: {path!r} is not an absolute path without spaces and quotes")
    return path.rstrip("/") or "/"


@dataclass
class History:
    """Samples of one node: a ring of (time, bytes), the lowest since the rank started, and how many were low
    in a row."""

    ring: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RING))
    low: tuple[float, int] | None = None
    below: int = 0

    def observe(self, now: float, available: int, redline: float) -> None:
        self.ring.append((now, available))
        if self.low is None or available < self.low[1]:
            self.low = (now, available)
        self.below = self.below + 1 if available < redline else 0

    def restart(self) -> None:
        """A new rank: the low-water mark begins again, the ring goes on."""
        self.low = None
        self.below = 0

    def last(self, count: int) -> list[tuple[float, int]]:
        return list(self.ring)[-count:]


@dataclass(frozen=True)
class PeerView:
    """What is known of one peer. `heard` is when its service last gave a sealed answer; None when never since
    our rank started. A peer whose guard is missing or restarting answers all the same: its service is another
    process."""

    name: str
    heard: float | None = None
    alive: bool = False
    guard: str = "unknown"


@dataclass(frozen=True)
class ApiView:
    """What the head's counters say. `running` is None when no page tells; `progress_at` is when any counter
    last moved."""

    running: int | None = None
    progress_at: float | None = None


@dataclass(frozen=True)
class Decision:
    """What to do now and the one line that says why."""

    action: str
    cause: str = ""
    reason: str = ""


def decide(
    policy: Policy,
    history: History,
    now: float,
    *,
    rank_running: bool,
    peers: Sequence[PeerView] = (),
    api: ApiView | None = None,
    terminated_at: float | None = None,
    recorded: frozenset[str] = frozenset(),
) -> Decision:
    """What has to happen to the local rank.

    :param terminated_at: when the rank was told to end, if it was.
    :param recorded: causes that were written down already (for `action: record`, so that each is said once).
    """
    if not rank_running or not history.ring:
        return Decision(NONE)
    available = history.ring[-1][1]
    if terminated_at is not None:
        return _escalate(policy, now, available, terminated_at)
    trip = _trip(policy, history, now, peers, api)
    if trip is None:
        return Decision(NONE)
    cause, reason = trip
    if policy.action == "record":
        return Decision(NONE) if cause in recorded else Decision(RECORD, cause, reason)
    if cause == "redline" and available < policy.hard_gib * GIB:
        return Decision(KILL, cause, reason)
    return Decision(TERMINATE, cause, reason)


def _escalate(policy: Policy, now: float, available: int, terminated_at: float) -> Decision:
    waited = now - terminated_at
    if available < policy.hard_gib * GIB:
        return Decision(
            KILL, "hard", f"{gib(available)} GiB available is under {policy.hard_gib:g} GiB while it ends"
        )
    if waited >= policy.grace_s:
        return Decision(KILL, "grace", f"still running {waited:.1f} s after it was told to end")
    return Decision(NONE)


def _trip(
    policy: Policy, history: History, now: float, peers: Sequence[PeerView], api: ApiView | None
) -> tuple[str, str] | None:
    if history.below >= policy.samples:
        lows = ", ".join(gib(value) for _time, value in history.last(policy.samples))
        return (
            "redline",
            f"{policy.samples} samples under the redline of {policy.redline_gib:g} GiB: {lows} GiB available",
        )
    if policy.silence_s:
        for peer in peers:
            if peer.heard is not None and now - peer.heard >= policy.silence_s:
                return "silence", f"{peer.name} has not answered on any rail for {now - peer.heard:.0f} s"
    if policy.stall_s and api is not None and api.running and api.progress_at is not None:
        frozen = now - api.progress_at
        if frozen >= policy.stall_s:
            return "stall", f"{api.running} requests run and no counter has moved for {frozen:.0f} s"
    return None


def gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def restart_due(
    policy: Policy,
    now: float,
    trips: Sequence[float],
    *,
    ended_at: float,
    memory_back: bool,
    restarts: Sequence[float],
) -> tuple[bool, str]:
    """Whether the guard may start its rank again after a trip, and why (not). Off unless somebody asked for
    it.

    The wait doubles with every restart in the window, and memory has to have come back: starting into a pool
    that the driver still holds is how both machines of a pair wedge (field B43).
    """
    if not policy.restarts:
        return False, "restarts are off; look at the record, then start the replica"
    recent = [when for when in restarts if now - when < policy.restart_window_s]
    if len(recent) >= policy.restarts:
        return False, f"{len(recent)} restarts in {policy.restart_window_s / 3600:g} h are the limit"
    if not trips:
        return False, "nothing tripped"
    wait = policy.restart_backoff_s * (2 ** len(recent))
    if now - ended_at < wait:
        return (
            False,
            f"waiting {wait - (now - ended_at):.0f} s before restart {len(recent) + 1} of {policy.restarts}",
        )
    if not memory_back:
        return False, "memory has not come back since the stop"
    return True, f"restart {len(recent) + 1} of {policy.restarts}"


def unaccounted(memory: Mapping[str, int]) -> int:
    """Bytes that are in no category of /proc/meminfo: mostly what the driver keeps for its next user."""
    return max(0, memory.get("MemTotal", 0) - sum(memory.get(name, 0) for name in ACCOUNTED))


def memory_verdict(policy: Policy, memory: Mapping[str, int], since_stop: float) -> tuple[bool, str]:
    """Whether memory came back after a stop, and a sentence."""
    available = memory.get("MemAvailable", 0)
    if available >= policy.return_gib * GIB:
        return True, f"{gib(available)} GiB available"
    if since_stop < policy.return_s:
        return False, f"{gib(available)} GiB available, waiting for {policy.return_gib:g}"
    return False, (
        f"{gib(available)} GiB available {since_stop:.0f} s after the stop, {gib(unaccounted(memory))} GiB "
        "in no category "
        "of /proc/meminfo: the driver may keep it for its next user; a reboot returns it"
    )


# -- other killers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Killer:
    """Another program on the node that ends processes when memory is short. `conflict` says what is wrong
    with it."""

    unit: str
    floor_gib: float | None
    conflict: str = ""
    #: What `adjust` would write, by path; empty where nothing is known that could be set.
    remedy: Mapping[str, str] = field(default_factory=dict)


#: Units that are known to end processes for memory. dgx-anti-oom kills engines every few minutes (field B41).
KILLER_UNITS = (
    "earlyoom.service",
    "systemd-oomd.service",
    "dgx-anti-oom.service",
    "nohang.service",
    "nohang-desktop.service",
    "oomd.service",
)


#: Units above the ranks for which systemd-oomd may have been told to kill.
OOMD_UNITS = ("-.slice", "system.slice", "docker.service")


def managed_by_oomd(ask: Callable[[Sequence[str]], str]) -> list[str]:
    """Of the units above the ranks, those in which systemd-oomd may kill. `ask` gives the output of a command."""
    show = ("systemctl", "show", "-p", "ManagedOOMSwap,ManagedOOMMemoryPressure", "--")
    return [name for name in OOMD_UNITS if "=kill" in ask([*show, name])]


def earlyoom_floor(arguments: str, total_bytes: int) -> float:
    """GiB of MemAvailable at which earlyoom sends SIGTERM. It also waits for swap to be under its own limit;
    on a node without swap that is always so. `-m 10` percent is its default, `-M` is in KiB; with both the lower
    one counts, and of one given twice the last."""
    kib = re.findall(r"(?:^|\s)-M[\s=]*(\d+)", arguments)
    percent = re.findall(r"(?:^|\s)-m[\s=]*(\d+)", arguments)
    floors = [int(kib[-1]) * 1024 / GIB] if kib else []
    if percent or not kib:
        floors.append(total_bytes * (int(percent[-1]) if percent else 10) / 100 / GIB)
    return min(floors)


#: Name of the drop-ins that `adjust` writes beside another killer's unit. Its own files stay as they are.
DROP_IN = "50-sparkfleet.conf"
DROP_IN_HEAD = "# Written by sparkfleet.serving (guard_killers: adjust); removed with guard_state: absent.\n"


def drop_in(unit: str) -> str:
    return f"/etc/systemd/system/{unit}.d/{DROP_IN}"


def _quoted(word: str) -> str:
    """A word of a command line as systemd reads it back."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def earlyoom_drop_in(argv: Sequence[str], floor_gib: float) -> str:
    """Start earlyoom as it is, with a floor of `floor_gib` and SIGKILL at half of it. The lower of `-m` and
    `-M` counts, so a `-M` at the end is enough."""
    words = list(argv)
    while "-M" in words:
        at = words.index("-M")
        del words[at : at + 2]
    kib = int(floor_gib * GIB / 1024)
    command = " ".join(_quoted(word) for word in [*words, "-M", f"{kib},{kib // 2}"])
    return f"{DROP_IN_HEAD}[Service]\nExecStart=\nExecStart={command}\n"


def judge_killer(
    unit: str,
    *,
    argv: Sequence[str] = (),
    total_bytes: int = 0,
    redline_gib: float = 4.0,
    floor_gib: float = 2.0,
    managed: Sequence[str] = (),
) -> Killer:
    """What an active killer means for a guard with this redline.

    :param argv: command line of earlyoom.
    :param floor_gib: where an adjusted killer may act; under the redline.
    :param managed: slices and services for which systemd-oomd may kill (`ManagedOOM...=kill`).
    """
    if unit == "earlyoom.service":
        floor = earlyoom_floor(" ".join(argv), total_bytes)
        if floor < redline_gib:
            return Killer(unit, floor)
        remedy = {drop_in(unit): earlyoom_drop_in(argv, floor_gib)} if argv else {}
        return Killer(
            unit, floor, f"acts at {floor:.1f} GiB, before the redline of {redline_gib:g} GiB", remedy
        )
    if unit == "systemd-oomd.service":
        risky = [name for name in managed if name in OOMD_UNITS]
        if not risky:
            return Killer(unit, None)
        off = "ManagedOOMSwap=auto\nManagedOOMMemoryPressure=auto\n"
        remedy = {
            drop_in(name): f"{DROP_IN_HEAD}[{'Slice' if name.endswith('.slice') else 'Service'}]\n{off}"
            for name in risky
        }
        return Killer(unit, None, f"may kill in {', '.join(risky)}, where ranks run", remedy)
    return Killer(unit, None, "ends processes by rules of its own")


# -- telling -----------------------------------------------------------------------------------------------


def prometheus(node: Mapping[str, Any]) -> str:
    """Metrics in the text format of Prometheus (for a textfile collector). `node` is the guard's state as
    data."""
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, values: Sequence[tuple[Mapping[str, str], float]]) -> None:
        lines.append(f"# HELP sparkfleet_guard_{name} {text}")
        lines.append(f"# TYPE sparkfleet_guard_{name} {kind}")
        for labels, value in values:
            inner = ",".join(f'{key}="{_escape(label)}"' for key, label in sorted(labels.items()))
            lines.append(
                f"sparkfleet_guard_{name}{{{inner}}} {value:g}"
                if inner
                else f"sparkfleet_guard_{name} {value:g}"
            )

    metric("memory_available_bytes", "gauge", "MemAvailable of the node.", [({}, float(node["available"]))])
    metric("samples_total", "counter", "Samples since the guard started.", [({}, float(node["samples"]))])
    replicas: Mapping[str, Mapping[str, Any]] = node["replicas"]
    for name, kind, text, key in (
        ("redline_bytes", "gauge", "MemAvailable under which the rank stops.", "redline"),
        ("memory_low_bytes", "gauge", "Lowest MemAvailable since the rank started.", "low"),
        ("rank_running", "gauge", "Whether the rank of this node runs.", "running"),
        ("trips_total", "counter", "Times that the guard stopped the rank.", "trips"),
        ("peers_silent", "gauge", "Peers that do not answer.", "silent"),
    ):
        metric(
            name,
            kind,
            text,
            [
                ({"replica": replica}, float(state[key]))
                for replica, state in sorted(replicas.items())
                if state[key] is not None
            ],
        )
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
