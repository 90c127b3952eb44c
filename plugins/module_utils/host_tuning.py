"""The few settings of a node that the facts justify, each with its reason.

* `fs.aio-max-nr`: the engine reads its Engram rows by kernel AIO. One rank asks for about 5,200 events; the
kernel's
  65,536 are shared by the machine, and a database or another engine beside a rank exhausts them
  (`AioUnavailable`).
* memlock: RDMA registers memory. Containers get their limit from the launch; this is for tools run on the
host by an
  ordinary user, such as the link benchmarks (the default of 8 MiB fails their registration).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .host_io import Host, Refusal, meminfo, text_diff

SYSCTL_FILE = "/etc/sysctl.d/60-sparkfleet.conf"
LIMITS_FILE = "/etc/security/limits.d/60-sparkfleet.conf"
_HEADER = "# Written by sparkfleet.serving (host_tuning); removed with host_tuning_state: absent.\n"
_NAME = re.compile(r"^[a-z0-9_]+(?:[./][A-Za-z0-9_*-]+)+$")
_USER = re.compile(r"^[@%]?[A-Za-z0-9_.*-]+$")
#: Written to a kernel setting would need a sentence of its own here; `vm.drop_caches` is an action, not a
# setting.
REFUSED = ("vm.drop_caches", "vm.compact_memory")


def sysctl_path(name: str) -> str:
    return "/proc/sys/" + name.replace(".", "/")


def parse_sysctl(text: str) -> dict[str, str]:
    """Settings of a sysctl.d file; a leading `-` (ignore errors) is not part of the name."""
    found = {}
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and stripped[0] not in "#;" and "=" in stripped:
            name, value = stripped.split("=", 1)
            found[name.strip().lstrip("-").strip().replace("/", ".")] = " ".join(value.split())
    return found


def configured(host: Host, name: str) -> int:
    """The largest number that any sysctl file but ours sets for `name`; 0 when none does."""
    best = 0
    files = [
        f"{d}/{f}" for d in ("/usr/lib/sysctl.d", "/run/sysctl.d", "/etc/sysctl.d") for f in host.listdir(d)
    ]
    for path in [*files, "/etc/sysctl.conf"]:
        if path == SYSCTL_FILE or not path.endswith(".conf"):
            continue
        value = parse_sysctl(host.read(path) or "").get(name, "")
        if value.isdigit():
            best = max(best, int(value))
    return best


def ensure(
    host: Host,
    *,
    present: bool,
    at_least: Mapping[str, int],
    equal: Mapping[str, str],
    memlock: Sequence[str],
    check: bool,
) -> dict[str, Any]:
    """Kernel settings (`at_least`: a higher value of somebody else stands; `equal`: exactly this) and
    memlock limits.

    Returns changed, diff, warnings and `tuning` (live values, swap).
    """
    for name in [*at_least, *equal]:
        if not _NAME.match(name) or name in REFUSED or not host.exists(sysctl_path(name)):
            raise Refusal(
                "no such kernel setting", name, "a name as in `sysctl -a`", "correct host_tuning_sysctls"
            )
    for user in memlock:
        if not _USER.match(user):
            raise Refusal("no such account", user, "a user, @group or *", "correct host_tuning_memlock_users")

    wanted: dict[str, str] = {}
    if present:
        for name, number in at_least.items():
            wanted[name] = str(max(number, configured(host, name)))
        wanted.update({name: " ".join(str(value).split()) for name, value in equal.items()})
    sysctl_text = _HEADER + "".join(f"{name} = {value}\n" for name, value in sorted(wanted.items()))
    limits_text = _HEADER + "".join(f"{user} - memlock unlimited\n" for user in memlock)
    files = {
        SYSCTL_FILE: sysctl_text if wanted else None,
        LIMITS_FILE: limits_text if present and memlock else None,
    }
    diff = []
    for path, text in files.items():
        current = host.read(path)
        if current != text:
            diff.append(text_diff(path, current, text))
    live = {name: " ".join((host.read(sysctl_path(name)) or "").split()) for name in wanted}
    raise_live = {}
    for name, value in wanted.items():
        enough = live[name] == value or (
            name in at_least and name not in equal and live[name].isdigit() and int(live[name]) >= int(value)
        )
        if not enough:
            raise_live[name] = value
            diff.append(text_diff(f"sysctl {name}", f"{live[name]}\n", f"{value}\n"))

    if diff and not check:
        for path, text in files.items():
            if text is None:
                host.remove(path)
            elif host.read(path) != text:
                host.write(path, text)
        for name, value in raise_live.items():
            host.path(sysctl_path(name)).write_text(value + "\n", encoding="ascii")
            now = " ".join((host.read(sysctl_path(name)) or "").split())
            if now != value:
                raise Refusal(
                    f"the kernel did not take {name}", now, value, "set a value that the kernel accepts"
                )
            live[name] = now
    memory = meminfo(host.read("/proc/meminfo") or "")
    return {
        "changed": bool(diff),
        "diff": diff,
        "warnings": [],
        "tuning": {
            "sysctls": live,
            "swap_total_bytes": memory.get("SwapTotal", 0),
            "swap_used_bytes": memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        },
    }
