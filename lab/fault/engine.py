"""Faults of the lab engine. A rank sees them through /run/lab/memory, which every container of a node has."""

from __future__ import annotations

from . import Fault


def _file(name: str, summary: str, value: str = "", default: str = "") -> Fault:
    path = f"/run/lab/memory/fault-{name}"
    return Fault(
        name,
        summary,
        value=value,
        default=default,
        act=("/bin/sh", "-c", 'mkdir -p /run/lab/memory && printf %s "$1" > "$2"', "sh", "{value}", path),
        undo=("rm", "-f", path),
    )


FAULTS = (
    _file("engine-load", "a rank takes longer to load", "seconds", "20"),
    _file("engine-slow", "each token takes longer (rank 0)", "milliseconds", "100"),
    _file(
        "engine-crash",
        "a rank dies with 137 while it loads, or rank 0 at the next token",
        "load or token",
        "load",
    ),
    _file("engine-collapsed", "every token is the same, as with damaged weights (rank 0)"),
    _file("engine-silent", "replies are empty (rank 0)"),
    _file("engine-socket", "NCCL finds no RDMA device and falls back to TCP, without an error"),
    _file("engine-nccl", "the next connection of NCCL fails (error 2), the one after it works"),
)
