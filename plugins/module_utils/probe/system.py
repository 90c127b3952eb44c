"""Operating system, identity of the box, privileges of the account, packages that matter here."""

from __future__ import annotations

import os
import re
from typing import Any

from .reader import Reader

# Packages whose version or hold decides something on a Spark (kernel, driver, container stack, firmware
# tools).
PACKAGE = re.compile(
    r"^(linux-image-\d.*|linux-(?:image|headers|modules)-nvidia.*|linux-nvidia.*|linux-generic-hwe.*|nvidia-driver-.*|"
    r"nvidia-container-toolkit|nvidia-spark-grub-kho|docker-ce|docker\.io|containerd\.io|containerd|mlnx-fw-updater|"
    r"dgx-spark-mlnx-hotplug|perftest|ibverbs-utils|rdma-core|netplan\.io|network-manager|earlyoom|nfs-kernel-server|"
    r"unattended-upgrades)$"
)


def parse_assignments(text: str) -> dict[str, str]:
    """KEY=value lines, quoted or not. The last of equal keys wins (/etc/dgx-release repeats DGX_OTA_VERSION).
    Never sourced by a shell: values with blanks are not always quoted."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, mark, value = line.strip().partition("=")
        if mark and re.match(r"^[A-Za-z_][A-Za-z0-9_]*$", key):
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            found[key] = value
    return found


def parse_dgx_release(text: str) -> dict[str, str | None]:
    """What may be reported of /etc/dgx-release. The serial number in it stays there."""
    values = parse_assignments(text)
    return {
        "name": values.get("DGX_NAME"),
        "platform": values.get("DGX_PLATFORM"),
        "swbuild": values.get("DGX_SWBUILD_VERSION"),
        "ota": values.get("DGX_OTA_VERSION"),
    }


def parse_dpkg_status(text: str) -> dict[str, dict[str, Any]]:
    """{package: {version, installed, held}} of /var/lib/dpkg/status for the packages of `PACKAGE`."""
    found: dict[str, dict[str, Any]] = {}
    for block in text.split("\n\n"):
        if not block.startswith("Package: "):
            continue
        name = block[9 : block.find("\n")].strip()
        if not PACKAGE.match(name):
            continue
        status = re.search(r"^Status: (\S+) \S+ (\S+)$", block, re.M)
        version = re.search(r"^Version: (\S+)$", block, re.M)
        if status:
            found[name] = {
                "version": version.group(1) if version else None,
                "installed": status.group(2) == "installed",
                "held": status.group(1) == "hold",
            }
    return found


def read_os(reader: Reader) -> dict[str, Any]:
    release = parse_assignments(reader.text("/etc/os-release") or "")
    text = reader.text("/etc/dgx-release")
    dgx = parse_dgx_release(text) if text is not None else None
    uname = reader.run(["uname", "-m"])
    return {
        "arch": os.uname().machine if reader.live else (uname.stdout.strip() or None),
        "id": release.get("ID"),
        "version_id": release.get("VERSION_ID"),
        "pretty_name": release.get("PRETTY_NAME"),
        "dgx_release": (dgx.get("ota") or dgx.get("swbuild")) if dgx else None,
        "dgx": dgx,
        "fastos": reader.exists("/etc/fastos-release"),
        "vendor": reader.line("/sys/class/dmi/id/sys_vendor"),
        "product": reader.line("/sys/class/dmi/id/product_name"),
        "bios_version": reader.line("/sys/class/dmi/id/bios_version"),
        "hostname": reader.line("/proc/sys/kernel/hostname"),
    }


def read_privilege(reader: Reader) -> dict[str, Any]:
    """Who reads. `sudo` is "root", "nopasswd", "password" (asks for one), "refused" or None when not
    known."""
    euid = os.geteuid() if reader.live else 0
    sudo: str | None = "root" if euid == 0 else None
    if euid != 0:
        answer = reader.run(["sudo", "-n", "true"])
        if answer.ok:
            sudo = "nopasswd"
        elif answer.absent:
            sudo = "refused"
        elif not answer.timed_out:
            sudo = "password" if "password" in answer.stderr else "refused"
    return {"euid": euid, "sudo": sudo}


def read_packages(reader: Reader) -> dict[str, Any]:
    return parse_dpkg_status(reader.text("/var/lib/dpkg/status") or "")
