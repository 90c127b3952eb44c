# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Proof that a rail carries what it should: a bounded ib_write_bw, and what its figure means.

A green link proves nothing: 200000 Mb/s, PCIe Gen5 x4 and clean counters are also what a rail shows that
moves 13 Gb/s
(B01). Only a measured figure counts, and only a result row is one: with a wrong GID index perftest prints
the whole
header, no row, and ends with 0.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

#: Gb/s of one half. NVIDIA's check-connectx-bandwidth passes from here (hosts.md 1.7).
HEALTHY = 80.0
#: Gb/s, the band of a ConnectX-7 that came up badly (12.7 to 13.3 seen on many boxes).
STALE = (8.0, 25.0)
#: A peak that is this many times the average marks retransmissions, as through a misconfigured switch.
GAP = 3.0

LADDER = {
    "healthy": (),
    "stale_init": (
        "seat the final cabling on both nodes and do not touch it again",
        "restart both nodes with the cable in place (a warm restart cures most)",
        "if it stays: shut both down, unplug USB-C and the mains for at least 60 seconds, start again",
        "do not reset or rescan PCI devices: it does not help",
    ),
    "degraded": (
        "compare link speed and MTU of both ends, and the switch between them if there is one",
        "behind a switch: autonegotiation off, 200G forced, no half-configured lossless mode",
        "update firmware and driver on both nodes to the same release, restart both",
        "try another cable; then nvidia-bug-report.sh on both nodes",
    ),
    "failed": (
        "look at the output of ib_write_bw: no result row means that no data moved",
        "check the GID index, the address of the peer, and a firewall between the rails",
    ),
    "small_mtu": (
        "set fabric_mtu to 9000 and run the role fabric on both nodes: 9000 gives an RDMA MTU of 4096",
        "if the interfaces show 9000 on both nodes, restart both: the RDMA device follows the link",
        "behind a switch allow jumbo frames on these ports",
    ),
    "not_measured": (),
}
#: Bytes of one message of the test; with QUEUE_PAIRS it bounds what a run may hold.
MESSAGE_BYTES = 65536
QUEUE_PAIRS = 4
#: Seconds. Longer runs say nothing more and heat the node.
LONGEST = 30
#: Bytes that a node must have free before anything is measured. The test itself takes a few MiB; nccl-tests with
#: their 16 GB buffers froze whole nodes (B14), and on one that is short even a small test is one too many.
MEMORY_FLOOR = 4 * 1024**3


@dataclass(frozen=True)
class Figure:
    """Gb/s of the rows of one run: median of the averages, largest peak (0 when not measured)."""

    average_gbps: float
    peak_gbps: float
    rows: int


def parse_ib_write_bw(text: str) -> Figure | None:
    """The figure of an ib_write_bw run, or None without a result row. Reads Gb/sec (--report_gbits) and
    MB/sec, which
    perftest counts in 2**20 bytes."""
    scale = 1.0
    averages: list[float] = []
    peaks: list[float] = []
    seen_header = False
    for line in text.splitlines():
        header = re.search(r"BW average\[(\w+)/sec\]", line)
        if header:
            seen_header = True
            scale = 1.0 if header.group(1) == "Gb" else 8 * 2**20 / 1e9
            continue
        row = re.match(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$", line)
        if row and seen_header:
            peaks.append(float(row.group(3)) * scale)
            averages.append(float(row.group(4)) * scale)
    if not averages:
        return None
    return Figure(round(statistics.median(averages), 3), round(max(peaks), 3), len(averages))


@dataclass(frozen=True)
class Verdict:
    verdict: str
    reason: str
    ladder: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ladder": list(self.ladder)}


def judge_mtu(active: int | None, wanted: int) -> Verdict | None:
    """small_mtu when the RDMA path MTU (bytes) is known and below `wanted`; 0 does not ask."""
    if active is None or active >= wanted:
        return None
    return Verdict("small_mtu", f"RDMA MTU {active} instead of {wanted}", LADDER["small_mtu"])


def reason_not_to_measure(docker: Mapping[str, Any], available: int | None) -> str:
    """Why this node may not be measured now, empty when it may. `docker` is the probe's subset, `available` is
    MemAvailable in bytes (None: not known, which does not forbid)."""
    if docker.get("present") and not docker.get("known"):
        return f"what runs here is not known: Docker does not answer ({docker.get('reason')})"
    busy = ("running", "paused", "restarting")
    ranks = [
        str(row["name"])
        for row in docker.get("containers") or []
        if row.get("owned") and row.get("state") in busy
    ]
    if ranks:
        return f"ranks run ({', '.join(ranks)}): a test would take their bandwidth"
    if available is not None and available < MEMORY_FLOOR:
        return f"only {available / 2**30:.1f} GiB of memory are available"
    return ""


def judge(
    figure: Figure | None,
    link: Mapping[str, Any],
    output: str = "",
    active_mtu: int | None = None,
    wanted_mtu: int = 0,
) -> Verdict:
    """healthy, small_mtu, stale_init, degraded or failed. `link` has speed (Mb/s), pci_link_speed and pci_link_width as
    the probe
    gives them: a figure in the stale band with a link that reads perfect is a bad initialization, not a bad
    cable."""
    if figure is None:
        last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")
        return Verdict("failed", f"no result row ({last[:120]})", LADDER["failed"])
    shown = f"{figure.average_gbps:.2f} Gb/s"
    if figure.average_gbps >= HEALTHY:
        small = judge_mtu(active_mtu, wanted_mtu)
        return replace(small, reason=f"{shown}, {small.reason}") if small else Verdict("healthy", shown, ())
    perfect = (
        link.get("speed") in (None, 200000)
        and (link.get("pci_link_width") in (None, 4))
        and str(link.get("pci_link_speed") or "32.0 GT/s").startswith("32")
    )
    if figure.peak_gbps > GAP * max(figure.average_gbps, 0.001):
        reason = f"{shown} with a peak of {figure.peak_gbps:.2f}: packets are lost on the way"
        return Verdict("degraded", reason, LADDER["degraded"])
    if perfect and STALE[0] <= figure.average_gbps <= STALE[1]:
        return Verdict("stale_init", f"{shown} although the link reads perfect", LADDER["stale_init"])
    return Verdict("degraded", shown, LADDER["degraded"])


def client_argv(hca: str, gid: int, port: int, seconds: int, peer: str = "") -> list[str]:
    """ib_write_bw of one side; without a peer it is the server. Four queue pairs, as NVIDIA's helper takes;
    message size and time are bounded. Raises ValueError for a time outside 1 to LONGEST seconds."""
    if not 1 <= int(seconds) <= LONGEST:
        raise ValueError(f"{seconds} seconds: wanted 1 to {LONGEST}")
    argv = [
        "ib_write_bw",
        "-d",
        hca,
        "-i",
        "1",
        "-x",
        str(int(gid)),
        "-p",
        str(int(port)),
        "-F",
        "--report_gbits",
    ]
    argv += ["-s", str(MESSAGE_BYTES), "-q", str(QUEUE_PAIRS), "-D", str(int(seconds))]
    return [*argv, peer] if peer else argv
