"""The running kernel, its command line, and the one that the next boot would take."""

from __future__ import annotations

import os
import re
from typing import Any

from .reader import Reader


def parse_grub(text: str, chosen: str = "") -> dict[str, str] | None:
    """{release, cmdline} of the entry that GRUB boots: the one named by `chosen` (title or id, last part of
    a path
    of submenus), else the first. None when no entry loads a kernel."""
    entries: list[dict[str, str]] = []
    title = ""
    ident = ""
    for line in text.splitlines():
        head = re.match(r"""^\s*menuentry\s+(['"])(.*?)\1(.*)$""", line)
        if head:
            title = head.group(2)
            tag = re.search(r"""menuentry_id_option\s+(['"])(.*?)\1""", head.group(3))
            ident = tag.group(2) if tag else ""
            continue
        load = re.match(r"^\s*linux(?:efi|16)?\s+(\S*vmlinu[xz]-(\S+))\s*(.*)$", line)
        if load:
            entries.append(
                {"title": title, "id": ident, "release": load.group(2), "cmdline": load.group(3).strip()}
            )
    if not entries:
        return None
    wanted = chosen.rsplit(">", maxsplit=1)[-1]
    best = next(
        (entry for entry in entries if wanted and wanted in (entry["title"], entry["id"])), entries[0]
    )
    return {"release": best["release"], "cmdline": best["cmdline"]}


def parse_grubenv(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def next_boot(reader: Reader) -> dict[str, str] | None:
    text = reader.text("/boot/grub/grub.cfg")
    if not text:
        return None
    environment = parse_grubenv(reader.text("/boot/grub/grubenv") or "")
    chosen = environment.get("next_entry") or ""
    if not chosen and "saved_entry" in environment and re.search(r"set default=.*saved_entry", text):
        chosen = environment["saved_entry"]
    return parse_grub(text, chosen)


def read(reader: Reader) -> dict[str, Any]:
    release = reader.line("/proc/sys/kernel/osrelease")
    if release is None and reader.live:
        release = os.uname().release
    modules = sorted(name for name in reader.names("/lib/modules") if re.match(r"^\d", name))
    return {
        "release": release,
        "version": reader.line("/proc/sys/kernel/version"),
        "cmdline": reader.line("/proc/cmdline"),
        "boot_id": reader.line("/proc/sys/kernel/random/boot_id"),
        "page_size": os.sysconf("SC_PAGE_SIZE") if reader.live else None,
        "installed": modules,
        "next_boot": next_boot(reader),
        "reboot_required": reader.exists("/var/run/reboot-required"),
        "kexec_crash_size": reader.integer("/sys/kernel/kexec_crash_size"),
    }
