"""/proc/meminfo, swaps and buddyinfo. On a GB10 this is the only truth about memory: nvidia-smi answers
[N/A]."""

from __future__ import annotations

import re
from typing import Any

from .reader import Reader

# Categories of /proc/meminfo that do not overlap and should add up to MemTotal. What is left over is held by
# nobody
# the kernel can name; on a GB10 that is the pool that the GPU driver keeps after an engine has stopped.
NAMED = (
    "MemFree",
    "Buffers",
    "Cached",
    "SwapCached",
    "AnonPages",
    "Slab",
    "KernelStack",
    "PageTables",
    "Percpu",
    "VmallocUsed",
    "HugetlbTotal",
)


def parse_meminfo(text: str) -> dict[str, int]:
    """{name: bytes} of every line with a number; a line without the unit kB is a count."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        match = re.match(r"^([A-Za-z0-9_()]+):\s+(\d+)(?:\s+([kMG]i?B))?\s*$", line)
        if match:
            scale = {
                None: 1,
                "kB": 1024,
                "KiB": 1024,
                "MiB": 1024**2,
                "MB": 1024**2,
                "GiB": 1024**3,
                "GB": 1024**3,
            }
            found[match.group(1)] = int(match.group(2)) * scale.get(match.group(3), 1024)
    return found


def unaccounted(info: dict[str, int]) -> int | None:
    """Bytes of MemTotal in no category, or None when the lines to tell are missing."""
    if "MemTotal" not in info or "MemFree" not in info or "AnonPages" not in info:
        return None
    slab = info.get("Slab", info.get("SReclaimable", info.get("KReclaimable", 0)) + info.get("SUnreclaim", 0))
    named = slab + sum(info.get(key, 0) for key in NAMED if key != "Slab")
    return max(0, info["MemTotal"] - named)


def parse_swaps(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 4 and fields[2].isdigit() and fields[3].isdigit():
            rows.append(
                {
                    "name": fields[0],
                    "type": fields[1],
                    "size_bytes": int(fields[2]) * 1024,
                    "used_bytes": int(fields[3]) * 1024,
                }
            )
    return rows


def parse_buddyinfo(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        match = re.match(r"^Node\s+(\d+),\s+zone\s+(\S+)\s+([\d\s]+)$", line)
        if match:
            rows.append(
                {
                    "node": int(match.group(1)),
                    "zone": match.group(2),
                    "free_blocks": [int(value) for value in match.group(3).split()],
                }
            )
    return rows


def read(reader: Reader) -> dict[str, Any]:
    info = parse_meminfo(reader.text("/proc/meminfo") or "")
    return {
        "total_bytes": info.get("MemTotal"),
        "available_bytes": info.get("MemAvailable"),
        "free_bytes": info.get("MemFree"),
        "cached_bytes": info.get("Cached"),
        "anon_bytes": info.get("AnonPages"),
        "shmem_bytes": info.get("Shmem"),
        "cma_total_bytes": info.get("CmaTotal"),
        "cma_free_bytes": info.get("CmaFree"),
        "swap_total_bytes": info.get("SwapTotal"),
        "swap_free_bytes": info.get("SwapFree"),
        "unaccounted_bytes": unaccounted(info),
        "swaps": parse_swaps(reader.text("/proc/swaps") or ""),
        "buddyinfo": parse_buddyinfo(reader.text("/proc/buddyinfo") or ""),
    }
