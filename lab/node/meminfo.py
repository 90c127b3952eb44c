"""/proc/meminfo as a Spark shows it, computed from what runs on the node.

Recorded: MemTotal 127535084 kB, CmaTotal 131072 kB with CmaFree 69320 kB on a healthy 6.17 kernel; an idle
machine with its desktop uses 3.5 GiB in all (118 GiB available); swap is a file of 16 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass

MEM_TOTAL = 127535084
SWAP_TOTAL = 16777212
GIB = 1024 * 1024  # kB
BASE_USED = int(3.2 * GIB)
DESKTOP_USED = int(0.4 * GIB)
PAGE_CACHE = 2 * GIB


@dataclass(frozen=True)
class Memory:
    """Who uses the node's memory. ``claimed``: kB that live ranks hold; ``desktop``: the login screen runs;
    ``retained``: kB that the driver keeps in no category after a stop; ``sink``: MemAvailable forced to this
    many kB; ``kho``: the broken 7.0 kernel (CmaTotal 0, CmaFree above it, about 9.3 GiB gone)."""

    claimed: int = 0
    desktop: bool = True
    retained: int = 0
    sink: int | None = None
    kho: bool = False


def available(memory: Memory) -> int:
    """MemAvailable in kB."""
    if memory.sink is not None:
        return memory.sink
    used = BASE_USED + memory.claimed + memory.retained
    used += DESKTOP_USED if memory.desktop else 0
    used += int(9.3 * GIB) if memory.kho else 0
    return max(MEM_TOTAL - used, 0)


def render(memory: Memory) -> str:
    """The text of /proc/meminfo."""
    usable = available(memory)
    cached = min(PAGE_CACHE, usable // 2)
    rows: list[tuple[str, int]] = [
        ("MemTotal", MEM_TOTAL),
        ("MemFree", max(usable - cached, 0)),
        ("MemAvailable", usable),
        ("Buffers", 13252),
        ("Cached", cached),
        ("SwapCached", 0),
        ("Active", cached // 2),
        ("Inactive", cached // 2),
        ("Unevictable", 24640),
        ("Mlocked", 24640),
        ("SwapTotal", SWAP_TOTAL),
        ("SwapFree", SWAP_TOTAL),
        ("Dirty", 128),
        ("Writeback", 0),
        ("AnonPages", max(MEM_TOTAL - usable - memory.retained - BASE_USED, 0) + BASE_USED // 2),
        ("Mapped", 212044),
        ("Shmem", 3028),
        ("KReclaimable", 477572),
        ("Slab", 997932),
        ("SReclaimable", 477572),
        ("SUnreclaim", 520360),
        ("KernelStack", 9216),
        ("PageTables", 20480),
        ("NFS_Unstable", 0),
        ("CommitLimit", SWAP_TOTAL + MEM_TOTAL // 2),
        ("Committed_AS", 5242880),
        ("VmallocTotal", 133141626880),
        ("VmallocUsed", 101620),
        ("Percpu", 27520),
        ("CmaTotal", 0 if memory.kho else 131072),
        ("CmaFree", 940604 if memory.kho else 69320),
    ]
    lines = [f"{name + ':':<16}{value:>8} kB\n" for name, value in rows]
    lines += [f"{name + ':':<16}{0:>8}\n" for name in ("HugePages_Total", "HugePages_Free")]
    lines += [f"{'Hugepagesize:':<16}{2048:>8} kB\n", f"{'Hugetlb:':<16}{0:>8} kB\n"]
    return "".join(lines)
