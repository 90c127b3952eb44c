"""The fixed parts of a simulated Spark: its network functions, their addresses and names.

Sources: the table of ConnectX-7 functions in NVIDIA's connect-two-sparks playbook and NVIDIA/daqiri#108; the
MAC spacing (management n, functions n+1, n+2, n+5, n+6) and the versions are as recorded from Founders
Edition machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KERNEL = "6.17.0-1032-nvidia"
FIRMWARE = "28.45.4028"
BOARD = "NVD0000000087"
DRIVER = "580.173.02"
CUDA = "13.0"
VBIOS = "9A.0B.2D.00.00"
GPU_BUS = "0000000F:01:00.0"
MANAGEMENT = "enP7s7"
MANAGEMENT_PCI = "0007:01:00.0"
GPU_PCI = "000f:01:00.0"
NVME_PCI = "0004:01:00.0"

STATE = Path("/run/lab")
FAULTS = Path("/var/lib/lab/faults")


@dataclass(frozen=True)
class Function:
    """One PCIe function of the ConnectX-7: a netdev and an RDMA device.

    ``cage`` is the QSFP cage that it belongs to, ``half`` the PCIe half (0 is domain 0000, 1 is domain 0002);
    ``mac_offset`` is its distance from the MAC of the management interface.
    """

    netdev: str
    rdma: str
    pci: str
    port: str
    cage: int
    half: int
    mac_offset: int


FUNCTIONS = (
    Function("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0", "p0", 0, 0, 1),
    Function("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1", "p1", 1, 0, 2),
    Function("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0", "p0", 0, 1, 5),
    Function("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1", "p1", 1, 1, 6),
)
RAILS = tuple(function for function in FUNCTIONS if function.cage == 0)


def mac(node: int, offset: int) -> str:
    """MAC of an interface of node number ``node`` (1, 2); offset 0 is the management interface."""
    return f"4c:bb:47:00:{node:02x}:{0x10 + offset:02x}"


def eui64(address: str) -> str:
    """The fe80 GID that the kernel makes from a MAC: 32 hex digits in eight groups, as sysfs prints it."""
    octets = [int(part, 16) for part in address.split(":")]
    octets[0] ^= 2
    full = [*octets[:3], 0xFF, 0xFE, *octets[3:]]
    tail = [f"{full[i]:02x}{full[i + 1]:02x}" for i in range(0, 8, 2)]
    return ":".join(["fe80", "0000", "0000", "0000", *tail])


def node_guid(address: str) -> str:
    """``node_guid`` as sysfs prints it: the EUI-64 of the MAC without the flipped bit."""
    octets = address.split(":")
    full = [*octets[:3], "03", "00", *octets[3:]]
    return ":".join(full[i] + full[i + 1] for i in range(0, 8, 2))


def fault(name: str, root: Path = FAULTS) -> str | None:
    """Value of a fault switch that is on, or None. An empty file means "on, without a value"."""
    try:
        return (root / name).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def mount_points() -> list[str]:
    """Every mount point of this process's namespace, in mount order; one that is hidden by another, twice."""
    with Path("/proc/self/mountinfo").open(encoding="utf-8") as table:
        return [line.split()[4] for line in table]


def is_mounted(path: Path) -> bool:
    """Whether something is mounted there; ``os.path.ismount`` misses a bind within one file system."""
    return str(path) in mount_points()
