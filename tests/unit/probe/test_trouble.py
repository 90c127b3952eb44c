"""The kernel log and the firewall: what the readers make of recordings and of an account without privileges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe import firewall, kernel_log
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.gather import gather
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.reader import Reader

GB10 = Path(__file__).resolve().parents[2] / "fixtures" / "gb10"
JOURNAL = "journalctl --dmesg --boot --no-pager --output=short-iso --lines=20000"
# Formats of drivers/pci/pcie/aer.c (6.8 and 6.12) and mlx5's health.c; the recording is a digest.
FATAL = [
    "kernel: pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:00:00.0",
    "kernel: pcieport 0000:00:00.0: AER: Uncorrected (Fatal) error received: 0000:00:00.0",
    "kernel: pcieport 0000:00:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    "kernel: mlx5_core 0000:01:00.0: mlx5_pci_err_detected Device state = 1 health sensors: 1 pci_status: 1. Enter",
    "kernel: mlx5_core 0002:01:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
    "kernel: watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [irq/41-aerdrv:311]",
]


def put(root: Path, name: str, value: str) -> None:
    target = root / name.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(value, encoding="utf-8")


@pytest.mark.field("B16", "C05")
@pytest.mark.parametrize(
    "name",
    [
        "kernel-cx7-no-cable-removed-after-boot.txt",
        "kernel-mlx5-firmware-bootlog.txt",
        "kernel-cx7-hotplug-plugin.txt",
        "kernel-boot-cx7-with-cable-and-gpu-x0.txt",
    ],
)
def test_recorded_boots_of_healthy_nodes_are_silent(name: str) -> None:
    assert kernel_log.parse((GB10 / name).read_text()) == {"fatal": 0, "uncorrected": 0, "lines": []}


@pytest.mark.field("B16")
def test_the_recorded_fatal_error_is_seen() -> None:
    found = kernel_log.parse((GB10 / "kernel-aer-fatal-timeline.md").read_text())
    assert found["fatal"] == 1
    assert "Uncorrectable Fatal" in found["lines"][0]


@pytest.mark.field("B16")
@pytest.mark.parametrize("line", FATAL)
def test_fatal_lines_of_both_kernels(line: str) -> None:
    assert kernel_log.parse(line)["fatal"] == 1


@pytest.mark.field("B16")
def test_the_worst_kind_is_reported_and_a_storm_does_not_fill_the_report() -> None:
    mild = "pcieport 0000:00:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer"
    benign = "pcieport 0000:00:00.0: AER: Corrected error received: 0000:00:00.0\nRxErr (First)"
    assert kernel_log.parse(f"{mild}\n{benign}") == {"fatal": 0, "uncorrected": 1, "lines": [mild]}
    storm = kernel_log.parse("\n".join([mild, *FATAL * 1000]))
    assert (storm["fatal"], storm["uncorrected"], len(storm["lines"])) == (6000, 1, kernel_log.MAX_LINES)
    assert mild not in storm["lines"]


@pytest.mark.field("B16")
def test_a_log_that_the_account_may_not_see_is_not_known(tmp_path: Path) -> None:
    hint = "No journal files were opened due to insufficient permissions."
    put(tmp_path, ".sparkfleet-commands.json", json.dumps({JOURNAL: {"rc": 1, "stderr": hint}}))
    probe = gather(Reader(root=str(tmp_path)), ["kernel_log"])
    assert probe["kernel_log"] == {"known": False, "fatal": 0, "uncorrected": 0, "lines": []}
    assert probe["missing_privileges"] == [{"what": "the kernel log", "need": "root or group adm"}]
    put(tmp_path, ".sparkfleet-commands.json", json.dumps({JOURNAL: {"stdout": FATAL[0]}}))
    assert gather(Reader(root=str(tmp_path)), ["kernel_log"])["kernel_log"]["fatal"] == 1


STATUS = """Status: active

To                         Action      From
--                         ------      ----
22/tcp                     ALLOW       Anywhere
Anywhere on enp1s0f0np0    ALLOW IN    10.77.0.0/30               # rail 0
Anywhere on enP2p1s0f0np0  DENY        10.77.1.0/30
25/tcp                     ALLOW OUT   Anywhere
22/tcp (v6)                ALLOW       Anywhere (v6)
"""


@pytest.mark.field("B15")
def test_the_status_of_ufw() -> None:
    stock = firewall.parse_status((GB10 / "net-firewall-stock.txt").read_text())
    assert stock["active"] is False
    assert firewall.parse_status("") == {"active": None, "rules": []}
    assert firewall.parse_status(STATUS) == {
        "active": True,
        "rules": [
            {"to": "22/tcp", "action": "ALLOW", "source": "Anywhere"},
            {"to": "Anywhere on enp1s0f0np0", "action": "ALLOW", "source": "10.77.0.0/30"},
            {"to": "Anywhere on enP2p1s0f0np0", "action": "DENY", "source": "10.77.1.0/30"},
        ],
    }


@pytest.mark.field("B15")
def test_the_firewall_of_a_node(tmp_path: Path) -> None:
    reader = Reader(root=str(tmp_path))
    assert firewall.read(reader)["active"] is False
    put(tmp_path, "/etc/ufw/ufw.conf", "# comment\nENABLED=yes\nLOGLEVEL=low\n")
    put(tmp_path, "/etc/default/ufw", 'DEFAULT_INPUT_POLICY="DROP"\n')
    denied = firewall.read(reader)
    assert (denied["active"], denied["rules"], denied["default_input"]) == (True, None, "DROP")
    assert reader.missing_privileges == [{"what": "ufw status", "need": "root"}]
    put(tmp_path, ".sparkfleet-commands.json", json.dumps({"ufw status": {"stdout": STATUS}}))
    seen = firewall.read(Reader(root=str(tmp_path)))
    assert (seen["active"], len(seen["rules"])) == (True, 3)
    # What runs counts, not what the next boot will do.
    off = {"ufw status": {"stdout": "Status: inactive\n"}}
    put(tmp_path, ".sparkfleet-commands.json", json.dumps(off))
    assert firewall.read(Reader(root=str(tmp_path)))["active"] is False
