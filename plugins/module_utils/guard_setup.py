"""The guard on a node: its settings, its unit, and the other programs there that end processes for memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .host_io import Host, Refusal, meminfo, text_diff, unit_state
from .memory_guard import KILLER_UNITS, Killer, PolicyError, judge_killer, policies

UNIT = "sparkfleet-guard.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
CONFIG_PATH = "/etc/sparkfleet/guard.json"

#: Protection of the guard itself. OOMScoreAdjust keeps the kernel's killer away from the one process that can
#: end a shortage in order; the watchdog restarts a guard that hangs; Restart brings back one that was killed.
#: Exit code 2 means settings that cannot be used, where trying again is no help. No limit is set on its
#: memory or processor.
UNIT_TEXT = """\
# Written by sparkfleet.serving (guard); removed with guard_state: absent.
[Unit]
Description=sparkfleet: stops the rank of this node before memory runs out
After=local-fs.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={agent} guard
Restart=always
RestartSec=1
RestartPreventExitStatus=2
WatchdogSec=15
TimeoutStopSec=5
OOMScoreAdjust=-900
Nice=-10
LimitMEMLOCK=infinity
RuntimeDirectory=sparkfleet
RuntimeDirectoryPreserve=yes
StateDirectory=sparkfleet
NoNewPrivileges=yes
PrivateTmp=yes
ProtectHome=yes
ProtectSystem=full
RestrictAddressFamilies=AF_UNIX AF_INET

[Install]
WantedBy=multi-user.target
"""


def find_killers(host: Host, redline_gib: float) -> list[Killer]:
    """Active programs that end processes for memory, each judged against the redline."""
    total = meminfo(host.read("/proc/meminfo") or "").get("MemTotal", 0)
    found = []
    for name in KILLER_UNITS:
        unit = unit_state(host, name)
        if unit.active not in ("active", "activating"):
            continue
        arguments = (host.read(f"/proc/{unit.main_pid}/cmdline") or "").replace("\0", " ")
        managed = _managed(host) if name == "systemd-oomd.service" else []
        found.append(
            judge_killer(
                name, arguments=arguments, total_bytes=total, redline_gib=redline_gib, managed=managed
            )
        )
    return found


def _managed(host: Host) -> list[str]:
    """Of the units above the ranks, those in which systemd-oomd may kill."""
    units = []
    for name in ("-.slice", "system.slice", "docker.service"):
        answer = host.run(["systemctl", "show", "-p", "ManagedOOMSwap,ManagedOOMMemoryPressure", "--", name])
        if "=kill" in answer.out:
            units.append(name)
    return units


def config_text(defaults: Mapping[str, Any], replicas: Mapping[str, Mapping[str, Any]]) -> str:
    """The settings file. Raises Refusal for what the guard could not work with."""
    try:
        policies({"defaults": defaults, "replicas": replicas})
    except PolicyError as error:
        raise Refusal(
            "the guard's settings do not make sense",
            str(error),
            "settings as in the role's README",
            "correct guard_*",
        ) from error
    return json.dumps({"defaults": defaults, "replicas": replicas}, indent=2, sort_keys=True) + "\n"


def ensure(
    host: Host,
    *,
    present: bool,
    agent: str,
    defaults: Mapping[str, Any],
    replicas: Mapping[str, Mapping[str, Any]],
    killers: str,
    check: bool,
) -> dict[str, Any]:
    """Make the guard run with these settings, or be gone. Returns changed, diff, warnings and `guard`."""
    texts: dict[str, str | None] = {UNIT_PATH: None, CONFIG_PATH: None}
    warnings: list[str] = []
    found: list[Killer] = []
    disable: list[str] = []
    if present:
        texts = {UNIT_PATH: UNIT_TEXT.format(agent=agent), CONFIG_PATH: config_text(defaults, replicas)}
        # The gentlest redline of the node is the one that another killer must not come before.
        base, special = policies({"defaults": defaults, "replicas": replicas})
        found = find_killers(host, min(policy.redline_gib for policy in (base, *special.values())))
        disable, warnings = _judge(found, killers)
    unit = unit_state(host, UNIT)
    diff = [text_diff(path, host.read(path), text) for path, text in texts.items() if host.read(path) != text]
    wrong = present and (unit.enabled != "enabled" or unit.active != "active")
    left = not present and (unit.active == "active" or unit.enabled == "enabled")
    restart = present and (bool(diff) or unit.active != "active")
    if wrong or left or restart:
        state = f"{unit.enabled or 'absent'}, {unit.active}\n"
        diff.append(text_diff(f"unit {UNIT}", state, "enabled, active\n" if present else "absent\n"))
    diff += [text_diff(f"unit {name}", "active\n", "disabled\n") for name in disable]
    if diff and not check:
        for name in disable:
            _do(host, ["systemctl", "disable", "--now", name])
        if left:
            _do(host, ["systemctl", "disable", "--now", UNIT])
        for path, text in texts.items():
            if text is None:
                host.remove(path)
            elif host.read(path) != text:
                host.write(path, text)
        _do(host, ["systemctl", "daemon-reload"])
        if present:
            _do(host, ["systemctl", "enable", UNIT])
            _do(host, ["systemctl", "restart", UNIT])
            unit = unit_state(host, UNIT)
            if unit.active != "active":
                raise Refusal("the guard does not run", unit.active, "active", f"`journalctl -u {UNIT}`")
    return {
        "changed": bool(diff),
        "diff": diff,
        "warnings": warnings,
        "guard": {
            "active": unit.active == "active",
            "enabled": unit.enabled == "enabled",
            "killers": [{"unit": k.unit, "floor_gib": k.floor_gib, "conflict": k.conflict} for k in found],
        },
    }


def _judge(found: Sequence[Killer], policy: str) -> tuple[list[str], list[str]]:
    """Units to disable and warnings; raises Refusal where the policy is to refuse."""
    conflicts = [killer for killer in found if killer.conflict]
    if policy == "disable":
        return [killer.unit for killer in conflicts], []
    if conflicts and policy == "refuse":
        raise Refusal(
            "another program on this node ends processes for memory, by other rules than the guard",
            "; ".join(f"{killer.unit} {killer.conflict}" for killer in conflicts),
            "one that decides, or a floor under the redline (earlyoom -m 2,1)",
            "set guard_killers: disable, or report to accept both, or configure the other program",
        )
    return [], [f"{killer.unit} {killer.conflict}" for killer in conflicts]


def _do(host: Host, argv: Sequence[str]) -> None:
    answer = host.run(argv, timeout=60.0)
    if not answer.ok:
        raise Refusal(f"`{' '.join(argv)}` failed", answer.text, "exit code 0", f"`journalctl -u {UNIT}`")
