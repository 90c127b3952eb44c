"""Give the page cache back before a load, where it is in the way.

After a copy of 200 GB the cache holds most of a Spark's memory. It counts as available, and the kernel gives
it back when a process asks; the GPU's allocations compete with it, and loads have died at 73 to 97 % (field
B38). Copies of this collection drop what they read, file by file; this is for what others left. It changes no
setting and loses no data (the cache is written first), so it never reports a change.
"""

from __future__ import annotations

import os
from typing import Any

from .docker_api import DEFAULT_SOCKET, DockerApi, DockerError
from .host_io import Host, Refusal, meminfo

DROP = "/proc/sys/vm/drop_caches"
GIB = 1 << 30


def ranks_running(docker: DockerApi) -> bool:
    """Whether a container of this collection runs; unknown counts as running."""
    try:
        return bool(docker.container_list(labels=["sparkfleet.install"], all_states=False))
    except DockerError:
        return True


def ensure(
    host: Host,
    *,
    min_free_gib: float,
    check: bool,
    docker: DockerApi | None = None,
    socket: str = DEFAULT_SOCKET,
) -> dict[str, Any]:
    """Drop clean caches when MemFree is under `min_free_gib` and no rank of ours runs. Sizes in the result
    are bytes."""
    memory = meminfo(host.read("/proc/meminfo") or "")
    if "MemFree" not in memory:
        raise Refusal("/proc/meminfo has no MemFree", "", "a Linux /proc", "look at the node")
    short = memory["MemFree"] < min_free_gib * GIB
    busy = short and ranks_running(docker or DockerApi(socket))
    drop = short and not busy
    after = memory
    if drop and not check:
        os.sync()
        host.path(DROP).write_text("3\n", encoding="ascii")
        after = meminfo(host.read("/proc/meminfo") or "")
    return {
        "changed": False,
        "dropped": drop,
        "why": "a rank runs" if busy else ("" if drop else "enough is free"),
        "free_bytes": after["MemFree"],
        "freed_bytes": max(0, after["MemFree"] - memory["MemFree"]),
    }
