"""lab-hardware.service: the sysfs and /proc files of hardware that this machine does not have.

One FUSE file system under /run/lab/hardware computes every file at the moment it is read, so nothing can be
stale, and an empty GID slot answers EINVAL as the kernel's does. Its parts are bound to where a reader
expects them:

    infiniband/        -> /sys/class/infiniband
    pci/               -> /sys/bus/pci/devices
    net/NETDEV/speed   -> /sys/class/net/NETDEV/speed, with ``device`` and ``phys_port_name`` added by an
    overlay meminfo            -> /proc/meminfo
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Union

import fusepy as fuse  # type: ignore[import-not-found]

from .meminfo import Memory, render
from .parts import (
    BOARD,
    FIRMWARE,
    FUNCTIONS,
    GPU_PCI,
    MANAGEMENT,
    MANAGEMENT_PCI,
    NVME_PCI,
    STATE,
    Function,
    eui64,
    fault,
    is_mounted,
    mac,
    mount_points,
    node_guid,
)
from .rdma import SLOTS, ZERO, GidFaults, GidTable

MOUNT = STATE / "hardware"
LEDGER = STATE / "memory"
MAC_PREFIX = mac(0, 0)[:11]  # of every netdev that the lab gives a node
FRESH = 0.2  # seconds for which one reading of the live state serves all files

# A directory, a file's text, or the errno that reading the file gives.
Tree = dict[str, "Entry"]
Entry = Union[Tree, str, int]
NetState = dict[str, Any]


def claims(ledger: Path = LEDGER) -> list[tuple[int, int, str]]:
    """Memory claims of live ranks: (pid, kB, process name).

    A rank claims by writing ``<kB> <name>`` to a file of its own in /run/lab/memory (bound into every
    container) and holding an exclusive flock on it; the claim ends with the lock, however the rank ends.
    """
    holders: dict[int, int] = {}
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK":
            holders[int(fields[5].rpartition(":")[2])] = int(fields[4])
    found = []
    for path in sorted(ledger.iterdir()):
        with contextlib.suppress(OSError, ValueError):
            amount, _, name = path.read_text(encoding="utf-8").strip().partition(" ")
            inode = path.stat().st_ino
            if inode in holders:
                found.append((holders[inode], int(amount), name or path.name))
    return found


def read_network() -> dict[str, NetState]:
    """Live state of this node's interfaces by name, from netlink."""
    raw = subprocess.run(
        ["/usr/sbin/ip", "-j", "-s", "addr"], check=True, capture_output=True, text=True
    ).stdout
    return {link["ifname"]: link for link in json.loads(raw) if "ifname" in link}


def has_carrier(link: NetState) -> bool:
    return "LOWER_UP" in link.get("flags", [])


def drifted(value: str | None, half: int) -> int | None:
    """The slot that `gid-drift` gives this half: ``SLOT`` for both rails, ``SLOT:RAIL`` for one of them."""
    slot, _colon, rail = (value or "4").partition(":")
    return int(slot) if value is not None and rail in ("", str(half)) else None


def gid_faults(half: int) -> GidFaults:
    late = fault("gid-late")
    return GidFaults(
        hole=fault("gid-hole") is not None,
        drift=drifted(fault("gid-drift"), half),
        late=0.0 if late is None else float(late or 8),
        shift=fault("gid-shift") is not None,
    )


class Hardware:
    """Builds the tree from the live state of the node."""

    def __init__(self) -> None:
        self.tables: dict[str, GidTable] = {}
        self.built = -FRESH
        self.tree: Tree = {}
        self.counted = -FRESH
        self.meminfo = ""

    def current(self) -> Tree:
        now = time.monotonic()
        if now - self.built >= FRESH:
            self.tree = self.build(read_network(), now)
            self.built = now
        return self.tree

    def memory(self) -> str:
        """/proc/meminfo: read often, and it needs no look at the network."""
        now = time.monotonic()
        if now - self.counted >= FRESH:
            self.meminfo = render(memory_state())
            self.counted = now
        return self.meminfo

    def build(self, network: dict[str, NetState], now: float) -> Tree:
        present = [function for function in FUNCTIONS if function.netdev in network]
        if fault("half-missing") is not None:
            present = [function for function in present if function.half == 0]
        first = next((network[function.netdev]["address"] for function in present), "00:00:00:00:00:00")
        return {
            "infiniband": {f.rdma: self.rdma(f, network[f.netdev], first, now) for f in present},
            "pci": pci_tree(present),
            "net": {f.netdev: net_tree(network[f.netdev]) for f in present},
        }

    def rdma(self, function: Function, link: NetState, first: str, now: float) -> Tree:
        table = self.tables.setdefault(function.rdma, GidTable(eui64(link["address"])))
        table.default = eui64(link["address"])
        table.update([info["local"] for info in link.get("addr_info", [])], now, gid_faults(function.half))
        up = has_carrier(link)
        stats = link.get("stats64", {})
        gids: Tree = {}
        types: Tree = {}
        ndevs: Tree = {}
        for index in range(SLOTS):
            entry = table.slots[index]
            gids[str(index)] = (entry.gid if entry else ZERO) + "\n"
            types[str(index)] = entry.kind + "\n" if entry else errno.EINVAL
            ndevs[str(index)] = function.netdev + "\n" if entry else errno.EINVAL
        return {
            "node_type": "1: CA\n",
            "node_guid": node_guid(link["address"]) + "\n",
            "sys_image_guid": node_guid(first) + "\n",
            "node_desc": function.rdma + "\n",
            "fw_ver": FIRMWARE + "\n",
            "hca_type": "MT4129\n",
            "board_id": BOARD + "\n",
            "hw_rev": "0\n",
            "device": f"-> /sys/bus/pci/devices/{function.pci}",
            "ports": {
                "1": {
                    "state": "4: ACTIVE\n" if up else "1: DOWN\n",
                    "phys_state": "5: LinkUp\n" if up else "3: Disabled\n",
                    "rate": "200 Gb/sec (2X NDR)\n" if up else "40 Gb/sec (4X QDR)\n",
                    "link_layer": "Ethernet\n",
                    "lid": "0x0\n",
                    "cap_mask": "0x00010000\n",
                    "gids": gids,
                    "gid_attrs": {"types": types, "ndevs": ndevs},
                    # Four-byte words. The lab's ranks speak TCP over the rails, so the netdev's bytes are the
                    # port's.
                    "counters": {
                        "port_xmit_data": f"{stats.get('tx', {}).get('bytes', 0) // 4}\n",
                        "port_rcv_data": f"{stats.get('rx', {}).get('bytes', 0) // 4}\n",
                        "port_xmit_packets": f"{stats.get('tx', {}).get('packets', 0)}\n",
                        "port_rcv_packets": f"{stats.get('rx', {}).get('packets', 0)}\n",
                    },
                    "hw_counters": dict.fromkeys(
                        (
                            "packet_seq_err",
                            "out_of_sequence",
                            "local_ack_timeout_err",
                            "np_cnp_sent",
                            "np_ecn_marked_roce_packets",
                        ),
                        "0\n",
                    ),
                }
            },
        }


def net_tree(link: NetState) -> Tree:
    """What a veth cannot say of itself. A port without carrier has no speed: mlx5 prints -1."""
    return {
        "speed": (fault("link-speed") or "200000") + "\n" if has_carrier(link) else "-1\n",
    }


def pci_tree(present: list[Function]) -> Tree:
    def device(address: str, identity: str, kind: str, driver: str, link: str) -> Tree:
        vendor, device_id = identity.split(":")
        speed, width = link.split(" x")
        return {
            "vendor": f"0x{vendor}\n",
            "device": f"0x{device_id}\n",
            "class": kind + "\n",
            "current_link_speed": speed + "\n",
            "current_link_width": width + "\n",
            "max_link_speed": "32.0 GT/s PCIe\n",
            "max_link_width": width + "\n",
            "numa_node": "-1\n",
            "driver": f"-> ../../../bus/pci/drivers/{driver}",
            "uevent": f"DRIVER={driver}\nPCI_SLOT_NAME={address}\n",
        }

    tree: Tree = {
        GPU_PCI: device(GPU_PCI, "10de:2e12", "0x030000", "nvidia", "2.5 GT/s PCIe x1"),
        MANAGEMENT_PCI: device(MANAGEMENT_PCI, "10ec:8127", "0x020000", "r8127", "16.0 GT/s PCIe x1"),
        NVME_PCI: device(NVME_PCI, "144d:a810", "0x010802", "nvme", "32.0 GT/s PCIe x4"),
    }
    for function in present:
        entry = device(function.pci, "15b3:1021", "0x020000", "mlx5_core", "32.0 GT/s PCIe x4")
        entry["net"] = {function.netdev: {}}
        entry["infiniband"] = {function.rdma: {}}
        tree[function.pci] = entry
    return tree


def memory_state() -> Memory:
    sink, retained = fault("sink-memory"), fault("driver-retains")
    gib = 1024 * 1024
    return Memory(
        claimed=sum(amount for _, amount, _ in claims()),
        desktop=Path("/run/gdm").exists(),
        retained=0 if retained is None else int(float(retained or 80) * gib),
        sink=None if sink is None else int(float(sink or 3) * gib),
        kho=fault("kho") is not None,
    )


class FileSystem(fuse.Operations):  # type: ignore[misc]
    """Read-only view of the tree. A file's text that starts with ``-> `` is a symbolic link."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def find(self, path: str) -> Entry:
        if path == "/meminfo":
            return self.hardware.memory()
        entry: Entry = self.hardware.current()
        for part in path.strip("/").split("/"):
            if not part:
                continue
            if not isinstance(entry, dict) or part not in entry:
                raise fuse.FuseOSError(errno.ENOENT)
            entry = entry[part]
        return entry

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:  # noqa: ARG002
        entry = self.find(path)
        if isinstance(entry, dict):
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if isinstance(entry, str) and entry.startswith("-> "):
            return {"st_mode": stat.S_IFLNK | 0o777, "st_nlink": 1, "st_size": len(entry) - 3}
        # sysfs reports a page for every attribute; direct I/O lets a reader see where the text really ends.
        return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": 0 if path == "/meminfo" else 4096}

    def readdir(self, path: str, fh: int) -> list[str]:  # noqa: ARG002
        entry = self.find(path)
        names = [*entry] if isinstance(entry, dict) else []
        return [".", "..", *names, *(["meminfo"] if path == "/" else [])]

    def readlink(self, path: str) -> str:
        entry = self.find(path)
        if not isinstance(entry, str) or not entry.startswith("-> "):
            raise fuse.FuseOSError(errno.EINVAL)
        return entry[3:]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:  # noqa: ARG002
        entry = self.find(path)
        if isinstance(entry, int):
            raise fuse.FuseOSError(entry)
        if isinstance(entry, dict):
            raise fuse.FuseOSError(errno.EISDIR)
        return entry.encode()[offset : offset + size]


def bind(source: Path, target: Path) -> None:
    while is_mounted(target):
        subprocess.run(["/bin/umount", "-l", str(target)], check=True)
    subprocess.run(["/bin/mount", "--bind", str(source), str(target)], check=True)


def dress(netdev: str) -> None:
    """Give one netdev's sysfs directory what a Spark's has: its PCI device, its port name, its speed."""
    function = next((each for each in FUNCTIONS if each.netdev == netdev), None)
    directory = Path("/sys/devices/virtual/net") / netdev
    if function:
        # The tree is computed a few times a second: it may not know a netdev yet that appeared just now.
        deadline = time.monotonic() + 2
        while not (MOUNT / "net" / netdev / "speed").exists() and time.monotonic() < deadline:
            time.sleep(FRESH / 4)
    extra = STATE / "netdev" / netdev
    extra.mkdir(parents=True, exist_ok=True)
    link = extra / "device"
    if not link.is_symlink():
        link.symlink_to(f"/sys/bus/pci/devices/{function.pci if function else MANAGEMENT_PCI}")
    if function:
        (extra / "phys_port_name").write_text(function.port + "\n", encoding="ascii")
    real = STATE / "net" / netdev
    options = f"ro,lowerdir={extra}:{real}"
    subprocess.run(["/bin/mount", "-t", "overlay", "-o", options, "overlay", str(directory)], check=True)
    try:
        bind(real / "uevent", directory / "uevent")
        if function:
            bind(MOUNT / "net" / netdev / "speed", directory / "speed")
    except subprocess.CalledProcessError:
        subprocess.run(["/bin/umount", "-l", str(directory)], check=False)  # dressed in full or not at all
        raise
    # udev may have started after the kernel's own event; networkd waits until udev has seen a netdev.
    (real / "uevent").write_text("add", encoding="ascii")


def bind_class() -> None:
    """/sys/class/net from sysfs itself. Seen through the overlay that lies on /sys/class, the entry of a
    netdev that went and came again (a cable plugged later) would stay stale until the node restarts."""
    below = STATE / "sysfs"
    below.mkdir(exist_ok=True)
    bind(Path("/sys"), below)  # not recursive: without the overlay
    subprocess.run(["/bin/mount", "-o", "remount,bind,ro", str(below)], check=True)
    bind(below / "class/net", Path("/sys/class/net"))
    subprocess.run(["/bin/mount", "-o", "remount,bind,ro", "/sys/class/net"], check=True)
    subprocess.run(["/bin/umount", "-l", str(below)], check=True)


def cage_names(addresses: dict[str, str], other: bool) -> dict[str, str]:
    """{name now: name wanted} of ConnectX-7 netdevs that sit on the wrong name, from {name: MAC}.

    The cable always ends in the netdevs of one pair of MACs. ``other``: they carry the names of the cage
    further from RJ45, as on a Spark whose cable sits there.
    """
    port = {0: 1, 1: 0} if other else {0: 0, 1: 1}
    names = {(function.cage, function.half): function.netdev for function in FUNCTIONS}
    wanted = {
        f"{0x10 + function.mac_offset:02x}": names[port[function.cage], function.half]
        for function in FUNCTIONS
    }
    return {
        name: wanted[address[-2:]]
        for name, address in addresses.items()
        if address.startswith(MAC_PREFIX) and wanted.get(address[-2:], name) != name
    }


def name_cages() -> None:
    """Give the netdevs the names of the cage that holds the cable (fault switch ``other-cage``)."""
    base = Path("/sys/class/net")
    addresses = {
        entry.name: (entry / "address").read_text(encoding="ascii").strip()
        for entry in sorted(base.iterdir())
        if (entry / "address").is_file()
    }
    renames = cage_names(addresses, fault("other-cage") is not None)
    for name in renames:
        point = Path("/sys/devices/virtual/net") / name
        if is_mounted(point):
            subprocess.run(["/bin/umount", "-l", str(point)], check=True)
        passing = "lab-" + addresses[name][-2:]
        subprocess.run(["/usr/sbin/ip", "link", "set", name, "down"], check=True)
        subprocess.run(["/usr/sbin/ip", "link", "set", name, "name", passing], check=True)
    for name, wanted in renames.items():
        passing = "lab-" + addresses[name][-2:]
        subprocess.run(["/usr/sbin/ip", "link", "set", passing, "name", wanted], check=True)


def undressed() -> list[str]:
    names = [MANAGEMENT, *(function.netdev for function in FUNCTIONS)]
    base = Path("/sys/devices/virtual/net")
    return [name for name in names if (base / name).is_dir() and not is_mounted(base / name)]


def clear() -> None:
    """Take away what an earlier run of this service left: its file system, and what it put on netdevs."""
    for point in reversed(mount_points()):
        if point == str(MOUNT) or point.startswith("/sys/devices/virtual/net/"):
            subprocess.run(["/bin/umount", "-l", point], check=True)


def dress_all() -> None:
    try:
        name_cages()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot name the cages: {error}", flush=True)
    for name in undressed():
        # It may be gone again by now; the next event tells.
        try:
            dress(name)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"cannot dress {name}: {error}", flush=True)


def follow_links() -> None:
    """Dress each netdev when it appears. Netlink wakes us; a netdev that goes takes its mounts along."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as events:
        events.bind((0, 1))  # RTMGRP_LINK
        events.settimeout(5)
        while True:
            dress_all()
            with contextlib.suppress(TimeoutError):
                events.recv(65536)


def notify_ready() -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect("\0" + address[1:] if address.startswith("@") else address)
            channel.send(b"READY=1")


def place() -> None:
    """Once the file system answers: bind its parts to their places, then follow the netdevs."""
    while not is_mounted(MOUNT):
        time.sleep(0.01)
    bind(MOUNT / "infiniband", Path("/sys/class/infiniband"))
    bind(MOUNT / "pci", Path("/sys/bus/pci/devices"))
    bind(MOUNT / "meminfo", Path("/proc/meminfo"))
    bind_class()
    dress_all()
    notify_ready()
    follow_links()


def main() -> None:
    clear()
    MOUNT.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=place, daemon=True).start()
    fuse.FUSE(
        FileSystem(Hardware()),
        str(MOUNT),
        foreground=True,
        nothreads=True,
        allow_other=True,
        direct_io=True,
        attr_timeout=0.1,
        entry_timeout=0.1,
        fsname="lab",
    )


if __name__ == "__main__":
    main()
