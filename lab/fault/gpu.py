"""Faults of the GPU and its driver, as nvidia-smi shows them."""

from __future__ import annotations

from . import Fault

FAULTS = (
    Fault("smi-hang", "nvidia-smi never answers"),
    Fault("smi-lost", "nvidia-smi finds no device (exit 6)"),
    Fault(
        "gpu-load",
        "the GPU works at 96 %: the clock that its lock leaves it, 51.23 W; or these readings",
        "MHz or MHz,W",
    ),
    Fault(
        "driver-restart",
        "the driver starts again and forgets the locked clocks",
        act=("rm", "-f", "/run/lab/smi.json"),
    ),
    Fault("low-power", "the GPU is stuck at 611 MHz and 13 W, whatever is locked"),
)
