"""Faults of the GPU and its driver, as nvidia-smi shows them."""

from __future__ import annotations

from . import Fault

FAULTS = (
    Fault("smi-hang", "nvidia-smi never answers"),
    Fault("smi-lost", "nvidia-smi finds no device (exit 6)"),
    Fault("low-power", "the GPU is stuck at 611 MHz and 13 W, whatever is locked"),
)
