"""What the lab must not change on the machine that it runs on: save before, compare after.

python tests/machine.py save FILE       after bootstrap, with the lab down
python tests/machine.py compare FILE    after `make lab-down`; exit 1 and one line a difference
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

# Counters and values that the kernel moves by itself.
RESTLESS = (
    "fs/aio-nr", "fs/dentry-state", "fs/file-nr", "fs/inode-nr", "fs/inode-state", "fs/quota", "kernel/ns_last_pid",
    "kernel/pty/nr", "kernel/random", "kernel/tainted", "vm/stat_refresh", "fs/binfmt_misc", "kernel/keys", "fs/epoll",
    "kernel/perf_event_max_sample_rate", "kernel/sched_domain", "fs/verity", "vm/drop_caches", "vm/compact_memory",
)  # fmt: skip


def sysctls() -> dict[str, str]:
    found = {}
    for family in ("vm", "fs", "kernel", "net/core", "net/ipv4/conf/all", "net/ipv4/conf/default"):
        for path in sorted(Path("/proc/sys", family).rglob("*")):
            name = str(path.relative_to("/proc/sys"))
            if path.is_file() and not name.startswith(RESTLESS):
                try:
                    found[name] = path.read_text().strip()
                except (OSError, UnicodeDecodeError):
                    continue
    return found


def files() -> dict[str, str]:
    """sha256 of every file below /etc; the set of systemd units counts through its links."""
    found = {}
    for path in sorted(Path("/etc").rglob("*")):
        try:
            if path.is_symlink():
                found[str(path)] = f"-> {path.readlink()}"
            elif path.is_file():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
    return found


def interfaces() -> dict[str, str]:
    rows = json.loads(
        subprocess.run(["ip", "-j", "address"], check=True, capture_output=True, text=True).stdout
    )
    return {
        row["ifname"]: json.dumps([[entry["local"], entry["prefixlen"]] for entry in row["addr_info"]])
        for row in rows
        if row["ifname"] != "docker0"  # the engine's own bridge
    }


def routes() -> dict[str, str]:
    text = subprocess.run(["ip", "route"], check=True, capture_output=True, text=True).stdout
    return {line.strip(): "" for line in text.splitlines() if "docker0" not in line}


# What a kernel loads by itself for any Docker container and its network, once, on a machine that ran none before.
DOCKERS = (
    *(
        "veth",
        "bridge",
        "br_netfilter",
        "stp",
        "llc",
        "overlay",
        "xt_",
        "x_tables",
        "nf_",
        "nft_",
        "nfnetlink",
    ),
    *("ip_tables", "ip6_tables", "iptable_", "ip6table_", "fuse", "tun", "sch_", "libcrc32c"),
)


def modules() -> dict[str, str]:
    path = Path("/proc/modules")
    names = [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []
    return {name: "" for name in names if not name.startswith(DOCKERS)}


def mounts() -> dict[str, str]:
    """Mount points of this namespace, without what a Docker engine mounts for its own containers."""
    rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return {row[1]: row[2] for row in rows if "/docker/" not in row[1] and "/run/docker" not in row[1]}


def take() -> dict[str, dict[str, str]]:
    return {
        "sysctl": sysctls(),
        "file": files(),
        "interface": interfaces(),
        "route": routes(),
        "module": modules(),
        "mount": mounts(),
    }


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """One line for each object that differs."""
    return [
        f"{kind} {name}: before {before[kind].get(name, 'absent')!r}, after {after[kind].get(name, 'absent')!r}"
        for kind in after
        for name in sorted({*before[kind], *after[kind]})
        if before[kind].get(name) != after[kind].get(name)
    ]


def main() -> int:
    action, path = sys.argv[1], Path(sys.argv[2])
    if action == "save":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(take()))
        return 0
    before = json.loads(path.read_text())
    # The kernel takes an ended container's network down a while after the container.
    end = time.monotonic() + 60
    while (differences := compare(before, take())) and time.monotonic() < end:
        time.sleep(2)
    print("\n".join(differences) or "the machine is as it was")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
