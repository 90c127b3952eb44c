"""The guard on a node: its settings, its unit, and the other programs there that end processes for memory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .host_io import Host, Refusal, meminfo, text_diff, unit_state
from .memory_guard import (
    DROP_IN_HEAD,
    KILLER_UNITS,
    OOMD_UNITS,
    RECORDS,
    Killer,
    PolicyError,
    drop_in,
    judge_killer,
    managed_by_oomd,
    policies,
    records_dir,
)

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
NoNewPrivileges=yes
PrivateTmp=yes
ProtectHome=read-only
ProtectSystem=full
ReadWritePaths=-{records}
RestrictAddressFamilies=AF_UNIX AF_INET

[Install]
WantedBy=multi-user.target
"""


#: Killers that a drop-in can adjust.
ADJUSTED = ("earlyoom.service", "systemd-oomd.service")
#: Seconds that an adjusted killer may take until its new command line shows.
ADJUSTED_WAIT_S = 10.0


def find_killers(host: Host, redline_gib: float, floor_gib: float = 2.0) -> list[Killer]:
    """Active programs that end processes for memory, each judged against the redline."""
    total = meminfo(host.read("/proc/meminfo") or "").get("MemTotal", 0)
    found = []
    for name in KILLER_UNITS:
        unit = unit_state(host, name)
        if unit.active not in ("active", "activating"):
            continue
        command = host.read(f"/proc/{unit.main_pid}/cmdline") or ""
        managed = managed_by_oomd(lambda argv: host.run(argv).out) if name == "systemd-oomd.service" else []
        found.append(
            judge_killer(
                name,
                argv=command.rstrip("\0").split("\0") if command else (),
                total_bytes=total,
                redline_gib=redline_gib,
                floor_gib=floor_gib,
                managed=managed,
            )
        )
    return found


def _adjusted(host: Host, redline_gib: float) -> list[Killer]:
    """The killers after their restart. systemd calls a simple unit active before its program is there, and
    until then its command line is another's."""
    end = time.monotonic() + ADJUSTED_WAIT_S
    found = find_killers(host, redline_gib)
    while any(killer.conflict for killer in found) and time.monotonic() < end:
        time.sleep(0.2)
        found = find_killers(host, redline_gib)
    return found


def config_text(
    defaults: Mapping[str, Any], replicas: Mapping[str, Mapping[str, Any]], records: str = RECORDS
) -> str:
    """The settings file. Raises Refusal for what the guard could not work with."""
    config = {"defaults": defaults, "records_dir": records, "replicas": replicas}
    try:
        policies(config)
        records_dir(config)
    except PolicyError as error:
        raise Refusal(
            "the guard's settings do not make sense",
            str(error),
            "settings as in the role's README",
            "correct guard_*",
        ) from error
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def ensure(
    host: Host,
    *,
    present: bool,
    agent: str,
    defaults: Mapping[str, Any],
    replicas: Mapping[str, Mapping[str, Any]],
    killers: str,
    check: bool,
    records: str = RECORDS,
) -> dict[str, Any]:
    """Make the guard run with these settings, or be gone. Returns changed, diff, warnings and `guard`."""
    own: dict[str, str | None] = {UNIT_PATH: None, CONFIG_PATH: None}
    warnings: list[str] = []
    found: list[Killer] = []
    disable: list[str] = []
    # Drop-ins of an earlier run stay while the policy is to have no conflict.
    drop_ins: dict[str, str | None] = {}
    if not present or killers in ("report", "disable"):
        drop_ins = dict.fromkeys(_drop_ins(host))
    if present:
        config = config_text(defaults, replicas, records)
        own = {UNIT_PATH: UNIT_TEXT.format(agent=agent, records=records.rstrip("/")), CONFIG_PATH: config}
        # The gentlest redline of the node is the one that another killer must not come before.
        base, special = policies({"defaults": defaults, "replicas": replicas})
        lowest = min((base, *special.values()), key=lambda policy: policy.redline_gib)
        found = find_killers(host, lowest.redline_gib, lowest.hard_gib or lowest.redline_gib / 2)
        disable, adjusted, warnings = _judge(found, killers)
        drop_ins.update(adjusted)
    texts = {**own, **drop_ins}
    unit = unit_state(host, UNIT)
    differ = [path for path, text in texts.items() if host.read(path) != text]
    diff = [text_diff(path, host.read(path), texts[path]) for path in differ]
    # A killer takes what its drop-in says when it starts.
    again = [killer.unit for killer in found if killer.conflict] if killers == "adjust" else []
    if any(path in differ and text is None for path, text in drop_ins.items()):
        again = [
            name for name in ADJUSTED if name not in disable and unit_state(host, name).active == "active"
        ]
    new_folder = present and not host.exists(records)
    if new_folder:
        diff.append(text_diff(records, None, "a folder\n"))
    wrong = present and (unit.enabled != "enabled" or unit.active != "active")
    left = not present and (unit.active == "active" or unit.enabled == "enabled")
    restart = present and (unit.active != "active" or any(path in differ for path in own))
    if wrong or left or restart:
        state = f"{unit.enabled or 'absent'}, {unit.active}\n"
        diff.append(text_diff(f"unit {UNIT}", state, "enabled, active\n" if present else "absent\n"))
    diff += [text_diff(f"unit {name}", "active\n", "disabled\n") for name in disable]
    diff += [text_diff(f"unit {name}", "active\n", "restarted\n") for name in again]
    if diff and not check:
        for name in disable:
            _do(host, ["systemctl", "disable", "--now", name])
        if left:
            _do(host, ["systemctl", "disable", "--now", UNIT])
        if new_folder:
            host.path(records).mkdir(mode=0o755, parents=True, exist_ok=True)
        for path in differ:
            text = texts[path]
            if text is None:
                host.remove(path)
                if path in drop_ins:
                    _remove_empty(host, path.rpartition("/")[0])
            else:
                host.write(path, text)
        _do(host, ["systemctl", "daemon-reload"])
        for name in again:
            _do(host, ["systemctl", "try-restart", name])
        if killers == "adjust" and again:
            found = _adjusted(host, lowest.redline_gib)
            _judge(found, "refuse")
        if present:
            _do(host, ["systemctl", "enable", UNIT])
            if restart:
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


def _drop_ins(host: Host) -> list[str]:
    """Drop-ins that an earlier run wrote beside another killer's unit."""
    paths = [drop_in(name) for name in ("earlyoom.service", *OOMD_UNITS)]
    return [path for path in paths if (host.read(path) or "").startswith(DROP_IN_HEAD)]


def _remove_empty(host: Host, folder: str) -> None:
    with contextlib.suppress(OSError):  # somebody else's drop-in is in it
        host.path(folder).rmdir()


def _judge(found: Sequence[Killer], policy: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Units to disable, drop-ins to write, and warnings; raises Refusal where the policy is to refuse."""
    conflicts = [killer for killer in found if killer.conflict]
    if policy == "disable":
        return [killer.unit for killer in conflicts], {}, []
    refused = [k for k in conflicts if policy == "refuse" or (policy == "adjust" and not k.remedy)]
    if refused:
        raise Refusal(
            "another program on this node ends processes for memory, by other rules than the guard",
            "; ".join(f"{killer.unit} {killer.conflict}" for killer in refused),
            "one that decides, or a floor under the redline (earlyoom -m 2,1)",
            "set guard_killers: "
            + ("adjust (a drop-in lowers its floor), " if all(k.remedy for k in refused) else "")
            + "disable (stops its unit), or report (accepts both), or configure the other program",
        )
    if policy == "adjust":
        return [], {path: text for killer in conflicts for path, text in killer.remedy.items()}, []
    return [], {}, [f"{killer.unit} {killer.conflict}" for killer in conflicts]


def _do(host: Host, argv: Sequence[str]) -> None:
    answer = host.run(argv, timeout=60.0)
    if not answer.ok:
        raise Refusal(f"`{' '.join(argv)}` failed", answer.text, "exit code 0", f"`journalctl -u {UNIT}`")
