"""Holding packages whose upgrade behind one's back has cost people a pair: kernel, driver, firmware updaters.

Only holds that were set here are ever lifted: their names are kept in a file of ours, so a hold of the owner
stands.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from typing import Any

from .host_io import Host, Refusal, text_diff

RECORD = "/var/lib/sparkfleet/holds.json"
APT_FILE = "/etc/apt/apt.conf.d/60sparkfleet-holds"

#: Installed packages that match are held. Kernel 7.0.0-1019 broke RDMA registration on many pairs, an
# unattended
#: upgrade armed 7.0.0-31 three days before an unrelated reboot, mlnx-fw-updater bricked both NICs inside an
# apt run,
#: another driver branch deadlocks; Docker and its toolkit restart every container when they are upgraded.
PATTERNS = (
    "linux-image-*",
    "linux-headers-*",
    "linux-modules-*",
    "linux-nvidia*",
    "nvidia-driver-*",
    "nvidia-dkms-*",
    "nvidia-kernel-*",
    "libnvidia-*",
    "nvidia-container-toolkit*",
    "libnvidia-container*",
    "docker-ce*",
    "docker.io",
    "containerd.io",
    "mlnx-fw-updater*",
    "doca-*",
)


def parse_status(text: str) -> dict[str, str]:
    """Selection state by package, from `dpkg-query -W -f
    '${Package}\\t${db:Status-Want}\\t${db:Status-Status}\\n'`;
    only what is installed."""
    found = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[2] == "installed":
            found[fields[0]] = fields[1]
    return found


def matching(packages: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return sorted(
        name for name in packages if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )


def apt_text(names: Sequence[str]) -> str:
    """The list for unattended-upgrades, which looks at its own blacklist (regular expressions), not only at
    holds."""
    rows = "".join(
        f'  "{name.replace("+", chr(92) * 2 + "+").replace(".", chr(92) * 2 + ".")}$";\n' for name in names
    )
    return (
        "// Written by sparkfleet.serving (package_holds); removed with package_holds_state: released.\n"
        "Unattended-Upgrade::Package-Blacklist {\n" + rows + "};\n"
    )


def ensure(host: Host, *, held: bool, patterns: Sequence[str], check: bool) -> dict[str, Any]:
    """Hold what matches, or lift what was held here. Returns changed, diff and `holds` (held here, held by
    others)."""
    answer = host.run(["dpkg-query", "-W", "-f", "${Package}\\t${db:Status-Want}\\t${db:Status-Status}\\n"])
    if not answer.ok:
        raise Refusal("dpkg does not answer", answer.text, "the list of packages", "`dpkg --audit`")
    state = parse_status(answer.out)
    text = host.read(RECORD)
    try:
        ours = set(json.loads(text)) if text else set()
    except (ValueError, TypeError) as error:
        raise Refusal(
            "the record of holds cannot be read", str(error), "a JSON list of names", f"remove {RECORD}"
        ) from error
    names = matching(list(state), patterns) if held else []
    add = [name for name in names if state[name] != "hold"]
    lift = [] if held else sorted(name for name in ours if state.get(name) == "hold")
    # A package that left the system leaves the record; one that the owner held already never enters it.
    record = sorted((ours & set(state)) | set(add)) if held else []
    record_text = json.dumps(record, indent=1) + "\n" if record else None
    apt = apt_text(names) if names else None
    diff = [text_diff(f"package {name}", "install\n", "hold\n") for name in add]
    diff += [text_diff(f"package {name}", "hold\n", "install\n") for name in lift]
    for path, wanted in ((RECORD, record_text), (APT_FILE, apt)):
        if host.read(path) != wanted:
            diff.append(text_diff(path, host.read(path), wanted))
    if diff and not check:
        for path, wanted in ((RECORD, record_text), (APT_FILE, apt)):
            if wanted is None:
                host.remove(path)
            elif host.read(path) != wanted:
                host.write(path, wanted)
        selections = "".join([f"{n} hold\n" for n in add] + [f"{n} install\n" for n in lift])
        if selections:
            done = host.run(["dpkg", "--set-selections"], stdin=selections, timeout=60.0)
            if not done.ok:
                raise Refusal(
                    "dpkg did not take the selections", done.text, selections, "`dpkg --get-selections`"
                )
    others = sorted(
        name for name, want in state.items() if want == "hold" and name not in ours and name not in add
    )
    return {
        "changed": bool(diff),
        "diff": diff,
        "warnings": [],
        "holds": {"ours": record, "others": others},
    }
