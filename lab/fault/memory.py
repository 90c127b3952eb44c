"""Faults of memory: what /proc/meminfo shows, in the node and in its containers."""

from __future__ import annotations

from . import Fault

FAULTS = (
    Fault("sink-memory", "MemAvailable sinks to this, whoever uses it", "GiB", default="3"),
    Fault("driver-retains", "the driver keeps memory in no category after a stop", "GiB", default="80"),
    Fault("kho", "the broken 7.0 kernel: CmaTotal 0, CmaFree above it, 9.3 GiB gone"),
)
