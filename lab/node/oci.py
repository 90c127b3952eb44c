"""The OCI runtime of a lab node: runc, told first what this machine cannot do and a Spark can.

``/usr/sbin/runc`` and ``/usr/bin/nvidia-container-runtime`` call this for ``create`` and ``run``. It appends
what the product asked for, unchanged, to /var/log/lab-oci.jsonl; then it takes from the container's spec what
the lab cannot give (capabilities, limits), and adds what a Spark would show inside (memory, RDMA devices in
sysfs, nvidia-smi). Environment values never reach the log: names only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

RUNC = "/usr/sbin/runc.real"
LOG = Path("/var/log/lab-oci.jsonl")
SMI = "/usr/bin/nvidia-smi"
Spec = dict[str, Any]


def bundle_of(arguments: list[str]) -> Path:
    """The bundle directory that ``runc create`` is given (default: the current directory)."""
    for index, argument in enumerate(arguments):
        if argument in ("--bundle", "-b"):
            return Path(arguments[index + 1])
        if argument.startswith("--bundle="):
            return Path(argument.partition("=")[2])
    return Path.cwd()


def environment(spec: Spec) -> dict[str, str]:
    return dict(entry.partition("=")[::2] for entry in spec["process"].get("env", []))


def gpus_of(spec: Spec) -> str:
    """The value of NVIDIA_VISIBLE_DEVICES that Docker (for a device request) or the user set."""
    hooks = spec.get("hooks", {}).get("prestart", [])
    by_docker = any("nvidia-container-runtime-hook" in hook.get("path", "") for hook in hooks)
    value = environment(spec).get("NVIDIA_VISIBLE_DEVICES", "")
    return value if by_docker or value else ""


def namespaces(spec: Spec) -> set[str]:
    return {entry["type"] for entry in spec.get("linux", {}).get("namespaces", []) if not entry.get("path")}


def record(spec: Spec, identity: str, runtime: str) -> dict[str, Any]:
    """What was asked for, as one line of the log."""
    process, linux = spec["process"], spec.get("linux", {})
    private = namespaces(spec)
    return {
        "time": time.time(),
        "id": identity,
        "runtime": runtime,
        "args": process.get("args", []),
        "env_names": sorted(environment(spec)),
        "rlimits": {entry["type"]: [entry["soft"], entry["hard"]] for entry in process.get("rlimits", [])},
        "capabilities": sorted(process.get("capabilities", {}).get("bounding", [])),
        "devices": sorted(entry["path"] for entry in linux.get("devices", [])),
        "gpus": gpus_of(spec),
        "host_network": "network" not in private
        and not any(entry["type"] == "network" for entry in linux.get("namespaces", [])),
        "host_ipc": "ipc" not in private
        and not any(entry["type"] == "ipc" for entry in linux.get("namespaces", [])),
        "mounts": [
            {
                "destination": entry["destination"],
                "source": entry.get("source", ""),
                "options": entry.get("options", []),
            }
            for entry in spec.get("mounts", [])
            if entry.get("type") == "bind"
        ],
        "oom_score_adj": process.get("oomScoreAdj"),
    }


def own_capabilities() -> set[int]:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    bounding = next(line.split()[1] for line in text.splitlines() if line.startswith("CapBnd"))
    return {number for number in range(64) if int(bounding, 16) >> number & 1}


CAPABILITIES = (  # noqa: SIM905 - by number, from linux/capability.h
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE "
    "NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT "
    "SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE "
    "AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ "
    "PERFMON BPF CHECKPOINT_RESTORE"
).split()


def relax(spec: Spec, capabilities: set[int], hard_limits: dict[str, int], oom_score_adj: int) -> None:
    """Take from ``spec`` what this machine refuses: a Spark's root may do more than a container's."""
    allowed = {f"CAP_{CAPABILITIES[number]}" for number in capabilities if number < len(CAPABILITIES)}
    process = spec["process"]
    for kind, names in process.get("capabilities", {}).items():
        process["capabilities"][kind] = [name for name in names if name in allowed]
    for entry in process.get("rlimits", []):
        hard = hard_limits.get(entry["type"])
        if hard is not None:
            entry["hard"] = min(entry["hard"], hard)
            entry["soft"] = min(entry["soft"], entry["hard"])
    if process.get("oomScoreAdj") is not None:
        process["oomScoreAdj"] = max(process["oomScoreAdj"], oom_score_adj)


def inject(spec: Spec) -> None:
    """Add what a container on a Spark sees and one in the lab would not."""
    mounts: list[dict[str, Any]] = spec["mounts"]
    taken = {entry["destination"] for entry in mounts}
    linux = spec.setdefault("linux", {})
    host_network = not any(entry["type"] == "network" for entry in linux.get("namespaces", []))

    def add(source: str, destination: str, *options: str) -> None:
        if destination not in taken and Path(source).exists():
            mounts.append(
                {"source": source, "destination": destination, "type": "bind", "options": list(options)}
            )

    for name in ("meminfo", "swaps"):
        add(f"/proc/{name}", f"/proc/{name}", "bind", "ro")
    add("/run/lab/memory", "/run/lab/memory", "bind", "rw")
    if host_network:
        # The node's own /sys has the RDMA devices; a fresh sysfs would not.
        for entry in mounts:
            if entry["destination"] == "/sys":
                entry.update(
                    {
                        "type": "bind",
                        "source": "/sys",
                        "options": ["rbind", "ro", "nosuid", "noexec", "nodev"],
                    }
                )
    if gpus_of(spec):
        add(SMI, SMI, "bind", "ro")


def limits() -> dict[str, int]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    hard = {name: resource.getrlimit(getattr(resource, name))[1] for name in names}
    return {name: value for name, value in hard.items() if value != resource.RLIM_INFINITY}


def main() -> None:
    runtime, arguments = sys.argv[1], sys.argv[2:]
    path = bundle_of(arguments) / "config.json"
    spec: Spec = json.loads(path.read_text(encoding="utf-8"))
    with LOG.open("a", encoding="utf-8") as log:
        log.write(json.dumps(record(spec, arguments[-1], runtime)) + "\n")
    score = int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
    relax(spec, own_capabilities(), limits(), score)
    inject(spec)
    path.write_text(json.dumps(spec), encoding="utf-8")
    os.execv(RUNC, [RUNC, *arguments])  # noqa: S606


if __name__ == "__main__":
    main()
