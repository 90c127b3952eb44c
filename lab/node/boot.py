"""PID 1 of a lab node until systemd takes over: look like a Spark, keep hands off the host.

Docker gives a container without ``--privileged`` a read-only /sys, /proc/sys and cgroup tree. systemd,
networkd and an inner Docker engine need parts of them writable; the rest must stay out of reach:

* ``/sys`` is made writable and every part of it is bound read-only again, except this container's own network
  devices;
* ``/proc/sys/{vm,fs,kernel}`` are not namespaced: the node gets private copies, so ``sysctl -w`` stays in the
  node;
* the cgroup tree is writable, but the device list at its top is not: systemd would otherwise widen it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from .parts import FUNCTIONS, KERNEL, MANAGEMENT, STATE, is_mounted

PRIVATE_SYSCTL = ("vm", "fs", "kernel")
# Namespaced or computed at each read: these stay the kernel's own.
LIVE_SYSCTL = ("kernel/hostname", "kernel/domainname", "kernel/random/uuid", "kernel/ns_last_pid")
CMDLINE = (
    f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} root=UUID=5a5a5a5a-0000-4000-8000-00000000004b ro init_on_alloc=0 "
    "pci=pcie_bus_safe fsck.mode=skip fsck.repair=no crashkernel=1G-:0M console=ttyS0,921600\n"
)
VERSION = (
    f"Linux version {KERNEL} (buildd@bos03-arm64-051) "
    "(aarch64-linux-gnu-gcc-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0, "
    "GNU ld (GNU Binutils for Ubuntu) 2.42) #32-Ubuntu SMP PREEMPT_DYNAMIC\n"
)
SWAPS = (
    "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    "/swap.img                               file\t\t16777212\t0\t\t-2\n"
)
DMI = {
    "sys_vendor": "NVIDIA",
    "product_name": "NVIDIA_DGX_Spark",
    "product_version": "A.7",
    "product_family": "DGX Spark",
    "board_name": "P4242",
    "board_vendor": "NVIDIA",
    "bios_version": "5.36_0ACUM027",
    "bios_date": "07/20/2026",
}

DATA = "/var/lib/docker"
# 4,000,787,030,016 bytes in sectors, as the factory layout of a 4 TB model shows.
DISK = {
    "size": "7814037168",
    "device/model": "SAMSUNG MZALC4T0HBL1-00B07",
    "queue/rotational": "0",
    "queue/read_ahead_kb": "128",
    "queue/scheduler": "[none] mq-deadline",
}


def mount(*arguments: str) -> None:
    subprocess.run(["/bin/mount", *arguments], check=True)


def unmount(path: Path) -> None:
    subprocess.run(["/bin/umount", "-l", str(path)], check=True)


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    mount("--bind", str(source), str(target))
    if read_only:
        mount("-o", "remount,bind,ro", str(target))


def open_sysfs() -> None:
    """/sys writable where this container's own network devices are, read-only elsewhere."""
    sys_root = Path("/sys")
    mount("-o", "remount,rw,nosuid,nodev,noexec", str(sys_root))
    own = STATE / "net"
    own.mkdir()
    bind(sys_root / "devices/virtual/net", own)
    for part in sorted(sys_root.iterdir()):
        if part.is_dir() and not part.is_symlink():
            mount("--rbind", str(part), str(part))
            mount("-o", "remount,bind,ro", str(part))
    bind(own, sys_root / "devices/virtual/net")


def open_cgroups() -> None:
    """The cgroup tree writable (version 1 or 2), the device list at its top read-only."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        mount("-o", "remount,bind,rw,nosuid,nodev,noexec", str(top))
        return
    for hierarchy in sorted(top.iterdir()):
        if is_mounted(hierarchy):
            mount("-o", "remount,bind,rw,nosuid,nodev,noexec", str(hierarchy))
    for name in ("devices.allow", "devices.deny"):
        if (top / "devices" / name).exists():
            bind(top / "devices" / name, top / "devices" / name, read_only=True)


def copy_sysctl(source: Path, target: Path) -> None:
    """Copy a /proc/sys directory to plain files; what cannot be read becomes an empty file."""
    target.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        copy = target / entry.name
        if entry.is_dir():
            if entry.name != "binfmt_misc":
                copy_sysctl(entry, copy)
            continue
        try:
            copy.write_bytes(entry.read_bytes())
        except OSError:
            copy.write_bytes(b"")
        copy.chmod(entry.stat().st_mode & 0o777)


def open_proc() -> None:
    """Private sysctls, and the files in which a Spark's /proc differs from this machine's."""
    sysctl = Path("/proc/sys")
    if is_mounted(sysctl):
        unmount(sysctl)
    real = STATE / "procsys"
    real.mkdir()
    bind(sysctl, real)
    for name in sorted(entry.name for entry in sysctl.iterdir()):
        if name in PRIVATE_SYSCTL:
            copy_sysctl(real / name, STATE / "sysctl" / name)
            bind(STATE / "sysctl" / name, sysctl / name)
        elif name != "net":
            bind(sysctl / name, sysctl / name, read_only=True)
    for name in LIVE_SYSCTL:
        if (real / name).exists():
            bind(real / name, sysctl / name)
    unmount(real)
    (sysctl / "kernel/osrelease").write_text(KERNEL + "\n")
    (sysctl / "kernel/random/boot_id").write_text(f"{uuid.uuid4()}\n")
    for name, text in {"cmdline": CMDLINE, "version": VERSION, "swaps": SWAPS}.items():
        stand_in = STATE / "proc" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(text)
        bind(stand_in, Path("/proc") / name, read_only=True)


def rename_management() -> None:
    """Docker's eth0 becomes enP7s7, the name of a Spark's 10 GbE port; its default route is kept."""
    routes = json.loads(
        subprocess.run(["ip", "-j", "route"], check=True, capture_output=True, text=True).stdout
    )
    gateways = [route["gateway"] for route in routes if route["dst"] == "default"]
    for command in (["set", "eth0", "down"], ["set", "eth0", "name", MANAGEMENT], ["set", MANAGEMENT, "up"]):
        subprocess.run(["ip", "link", *command], check=True)
    for gateway in gateways:
        subprocess.run(["ip", "route", "replace", "default", "via", gateway, "dev", MANAGEMENT], check=True)


def open_classes() -> None:
    """Room in /sys/class for what this machine lacks: infiniband (see lab-hardware.service) and DMI."""
    extra = STATE / "class"
    for name, value in DMI.items():
        path = extra / "dmi/id" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    (extra / "infiniband").mkdir()
    mount("-t", "overlay", "-o", f"ro,lowerdir={extra}:/sys/class", "overlay", "/sys/class")


def open_disk() -> None:
    """The data volumes lie on a 4 TB NVMe disk, as far as sysfs tells; /sys/block lists nothing else.

    The size is the factory one; free space is what the machine's own file system says.
    """
    disk = STATE / "disk/block/nvme0n1"
    for name, value in DISK.items():
        path = disk / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    (disk / "nvme0n1p2").mkdir()
    bind(disk.parent, Path("/sys/block"), read_only=True)
    numbers = Path(DATA).stat().st_dev
    links = STATE / "dev-block"
    links.mkdir()
    (links / f"{os.major(numbers)}:{os.minor(numbers)}").symlink_to("/sys/block/nvme0n1/nvme0n1p2")
    mount("-t", "overlay", "-o", f"ro,lowerdir={links}:/sys/dev/block", "overlay", "/sys/dev/block")


def make_devices() -> None:
    """Device nodes of a Spark, with the numbers of /dev/null: nothing behind them, no rule to widen."""
    null = os.makedev(1, 3)
    names = ["infiniband/rdma_cm", *(f"infiniband/uverbs{index}" for index in range(len(FUNCTIONS)))]
    names += ["nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset"]
    for name in names:
        path = Path("/dev") / name
        path.parent.mkdir(exist_ok=True)
        os.mknod(path, 0o020666, null)
        path.chmod(0o666)


def main() -> None:
    # /run is a tmpfs that starts empty at each boot; the GPU's state and the memory ledger live and die with
    # it.
    shutil.rmtree(STATE, ignore_errors=True)
    STATE.mkdir(parents=True)
    ledger = STATE / "memory"
    ledger.mkdir()
    ledger.chmod(0o1777)
    open_sysfs()
    open_cgroups()
    open_proc()
    rename_management()
    open_classes()
    open_disk()
    make_devices()
    mount("--make-rshared", "/")
    # systemd 256 and newer want to be told that version 1 of the cgroup tree is meant.
    os.environ["SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE"] = "1"
    os.execv("/sbin/init", ["/sbin/init", *sys.argv[1:]])  # noqa: S606


if __name__ == "__main__":
    main()
