"""Running without a desktop: what the next boot starts, what runs now, and what that frees.

Nothing is purged. The default target is a link that can be set back; stopping the desktop now is a choice of
its own, and it is made only when it takes neither Docker nor a rank with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .host_io import Host, Refusal, meminfo, text_diff, unit_state

HEADLESS = "multi-user.target"
DESKTOP = "graphical.target"

#: Stopping any of these would take the service or the way in with it.
PROTECTED = (
    "docker.service",
    "containerd.service",
    "ssh.service",
    "sshd.service",
    "nvidia-persistenced.service",
)
PROTECTED_PREFIX = "sparkfleet-"

#: How many holders of memory are reported.
HOLDERS = 10


class Holder(NamedTuple):
    """Resident memory of all processes with one name, and what the driver says that they hold of the GPU's,
    which is the same memory on a GB10 and in no resident size."""

    name: str
    processes: int
    rss_mib: int
    gpu_mib: int = 0


def default_target(host: Host) -> str:
    answer = host.run(["systemctl", "get-default"])
    if not answer.ok:
        raise Refusal(
            "systemd does not tell its default target", answer.text, HEADLESS, "`systemctl get-default`"
        )
    return answer.out.strip()


def holders(host: Host, limit: int = HOLDERS) -> list[Holder]:
    """Who holds memory, largest first, by process name."""
    gpu = gpu_memory(host)
    sums: dict[str, list[int]] = {}
    for pid in host.listdir("/proc"):
        if not pid.isdigit():
            continue
        text = host.read(f"/proc/{pid}/status") or ""
        name = re.search(r"^Name:\s*(.+)$", text, re.M)
        rss = re.search(r"^VmRSS:\s*(\d+) kB", text, re.M)
        if name and rss:
            entry = sums.setdefault(name.group(1), [0, 0, 0])
            entry[0] += 1
            entry[1] += int(rss.group(1))
            entry[2] += gpu.get(int(pid), 0)
    found = [Holder(name, count, kib // 1024, mib) for name, (count, kib, mib) in sums.items()]
    return sorted(found, key=lambda holder: (-holder.rss_mib - holder.gpu_mib, holder.name))[:limit]


def gpu_memory(host: Host) -> dict[int, int]:
    """MiB of GPU memory by pid; empty without a driver that tells. GB10 gives it by process, not in all."""
    tool = host.which("nvidia-smi")
    if tool is None:
        return {}
    answer = host.run([tool, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"])
    rows = [line.split(",") for line in answer.out.splitlines()] if answer.ok else []
    return {
        int(row[0]): int(row[1])
        for row in rows
        if len(row) == 2 and row[0].isdigit() and row[1].strip().isdigit()
    }


def available(host: Host) -> int | None:
    """MemAvailable in bytes, or None when /proc/meminfo has no such line."""
    return meminfo(host.read("/proc/meminfo") or "").get("MemAvailable")


def _show(host: Host, units: Sequence[str], properties: str) -> dict[str, dict[str, str]]:
    """Properties of many units in one call, by unit id."""
    if not units:
        return {}
    answer = host.run(["systemctl", "show", *units, "-p", f"Id,{properties}"], timeout=60.0)
    found: dict[str, dict[str, str]] = {}
    for block in answer.out.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in values:
            found[values["Id"]] = values
    return found


def stopped_by_isolate(host: Host, target: str) -> list[str]:
    """Active services that `systemctl isolate` would stop.

    systemd keeps what the target requires or wants, what carries IgnoreOnIsolate (all scopes, so containers
    and sessions), and what is triggered by a unit that stays.
    """
    wanted = host.run(
        ["systemctl", "list-dependencies", "--plain", "--all", "--no-pager", target], timeout=60.0
    )
    stays = {line.strip() for line in wanted.out.splitlines() if line.strip()}
    listed = host.run(
        [
            "systemctl",
            "list-units",
            "--type=service",
            "--state=active",
            "--plain",
            "--no-legend",
            "--no-pager",
        ],
        timeout=60.0,
    )
    active = [line.split()[0] for line in listed.out.splitlines() if line.strip()]
    gone = []
    for name, values in sorted(_show(host, active, "IgnoreOnIsolate,TriggeredBy,Names").items()):
        names = {name, *values.get("Names", "").split()}
        if names & stays or values.get("IgnoreOnIsolate") == "yes":
            continue
        if any(trigger in stays for trigger in values.get("TriggeredBy", "").split()):
            continue
        gone.append(name)
    return gone


def protected(units: Sequence[str]) -> list[str]:
    return [unit for unit in units if unit in PROTECTED or unit.startswith(PROTECTED_PREFIX)]


def ensure(host: Host, *, desktop: bool, now: bool, stop_units: Sequence[str], check: bool) -> dict[str, Any]:
    """Make the next boot headless (or graphical again), and, when `now`, this one too.

    Returns changed, diff, warnings and `headless`: default target, whether the desktop runs, bytes freed,
    holders.
    """
    wanted = DESKTOP if desktop else HEADLESS
    before = default_target(host)
    graphical = unit_state(host, DESKTOP).active == "active"
    display = unit_state(host, "display-manager.service").active == "active"
    diff = []
    if before != wanted:
        diff.append(text_diff("/etc/systemd/system/default.target", f"{before}\n", f"{wanted}\n"))
    switch = now and (not graphical if desktop else (graphical or display))
    if switch:
        diff.append(
            text_diff(
                f"unit {DESKTOP}",
                "active\n" if graphical else "inactive\n",
                "active\n" if desktop else "inactive\n",
            )
        )

    units = {name: unit_state(host, name) for name in stop_units}
    refused = protected(list(units))
    if refused:
        raise Refusal(
            "the stop list names what serving needs",
            ", ".join(refused),
            "other units",
            "correct headless_stop_units",
        )
    to_stop = [
        name
        for name, unit in units.items()
        if not desktop and unit.load == "loaded" and (unit.active == "active" or unit.enabled == "enabled")
    ]
    to_start = [
        name
        for name, unit in units.items()
        if desktop and unit.load == "loaded" and unit.enabled == "disabled"
    ]
    diff += [text_diff(f"unit {name}", f"{units[name].enabled}\n", "disabled\n") for name in to_stop]
    diff += [text_diff(f"unit {name}", f"{units[name].enabled}\n", "enabled\n") for name in to_start]

    if switch and not desktop:
        going = stopped_by_isolate(host, HEADLESS)
        diff += [text_diff(f"unit {name}", "active\n", "inactive\n") for name in going if name not in to_stop]
        lost = protected(going)
        if lost:
            raise Refusal(
                "leaving the desktop now would stop what serving needs",
                ", ".join(lost),
                f"these units wanted by {HEADLESS}",
                f"`systemctl enable {' '.join(lost)}`, or set headless_now: false and reboot later",
            )

    had = available(host)
    changed = bool(diff)
    if changed and not check:
        if before != wanted:
            _do(host, ["systemctl", "set-default", wanted])
        if switch:
            # A wave of stop jobs can outlast a reader's patience (a session that does not end); 90 s is
            # systemd's own limit.
            _do(
                host,
                ["systemctl", "start", DESKTOP] if desktop else ["systemctl", "isolate", HEADLESS],
                180.0,
            )
        for name in to_stop:
            _do(host, ["systemctl", "disable", "--now", name], 120.0)
        for name in to_start:
            _do(host, ["systemctl", "enable", "--now", name], 120.0)
        if default_target(host) != wanted:
            raise Refusal(
                "the default target did not change", default_target(host), wanted, "`systemctl set-default`"
            )
        graphical = unit_state(host, DESKTOP).active == "active"
        display = unit_state(host, "display-manager.service").active == "active"
    has = available(host)
    return {
        "changed": changed,
        "diff": diff,
        "warnings": [],
        "headless": {
            "default_target": before if check else wanted,
            "desktop_running": graphical or display,
            "available_bytes": has,
            "freed_bytes": (has - had)
            if (changed and not check and has is not None and had is not None)
            else 0,
            "holders": [holder._asdict() for holder in holders(host)],
        },
    }


def _do(host: Host, argv: Sequence[str], timeout: float = 60.0) -> None:
    answer = host.run(argv, timeout=timeout)
    if not answer.ok:
        raise Refusal(f"`{' '.join(argv)}` failed", answer.text, "exit code 0", "`systemctl list-jobs`")
