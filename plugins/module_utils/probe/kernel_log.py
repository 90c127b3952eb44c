"""What the kernel said in this boot about failing PCIe links and ConnectX-7 functions.

Correctable errors are left out: a port logs "RxErr" each time hot-plug takes the card off the bus, and that is
no fault. A fatal one starts a recovery that can lock the node up minutes later, while everything still answers
(B16: fatal at 06:38, the first failed request at 06:42).
"""

from __future__ import annotations

import re
from typing import Any

from .reader import Reader

#: Lines that a report carries; a storm of equal errors must not fill it.
MAX_LINES = 5
# Kernels name the same error "Uncorrected" (until 6.11) and "Uncorrectable" (since), with its class in
# brackets (drivers/pci/pcie/aer.c).
FATAL = re.compile(
    r"(?:AER|PCIe Bus Error).*Uncorrect\w* \(Fatal\)"
    r"|Uncorrect\w* Fatal"
    r"|mlx5_core .*(?:mlx5_pci_err_detected|mlx5_pci_slot_reset|Fatal error|device's health compromised"
    r"|handling bad device|assert_var)"
    r"|soft lockup.*aerdrv",
    re.I,
)
UNCORRECTED = re.compile(r"(?:AER|PCIe Bus Error).*Uncorrect\w* \(Non-Fatal\)|Uncorrect\w* Non-?Fatal", re.I)


def parse(text: str) -> dict[str, Any]:
    """{fatal, uncorrected: number of lines; lines: the first few of the worst kind} of a kernel log."""
    fatal = [line.strip() for line in text.splitlines() if FATAL.search(line)]
    uncorrected = [
        line.strip() for line in text.splitlines() if UNCORRECTED.search(line) and not FATAL.search(line)
    ]
    return {
        "fatal": len(fatal),
        "uncorrected": len(uncorrected),
        "lines": [line[:200] for line in (fatal or uncorrected)[:MAX_LINES]],
    }


def read(reader: Reader) -> dict[str, Any]:
    """The journal's kernel lines of this boot; `known` is false where the account may not see them."""
    answer = reader.run(
        ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-iso", "--lines=20000"]
    )
    denied = "permission" in answer.stderr.lower()
    if denied:
        reader.denied("the kernel log", "root or group adm")
    return {"known": answer.rc is not None and not denied, **parse(answer.stdout)}
