"""What the kernel says. A node has no /dev/kmsg of its own; a FIFO in its place is read by journald as the real one is,
one record at a time, so the lines are the kernel's to everybody who asks the journal."""

from __future__ import annotations

from . import Fault

SAY = r"""
[ -p /dev/kmsg ] || { mkfifo -m 600 /dev/kmsg && systemctl restart systemd-journald.service; }
seq=$(date +%s%N)
up=$(awk '{ printf "%d", $1 * 1000000 }' /proc/uptime)
printf '%s\n' "$1" | while IFS= read -r line; do
  seq=$((seq + 1))
  printf '3,%s,%s,-;%s\n' "$seq" "$up" "$line" > /dev/kmsg
  sleep 0.1
done
"""

FORGET = """
rm -f /dev/kmsg
systemctl stop systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service
rm -rf /run/log/journal/* /var/log/journal/*
systemctl start systemd-journald.service
"""

FAULTS = (
    Fault(
        "kernel-log",
        "the kernel logs these lines (a restart forgets them; healing empties the journal)",
        value="lines",
        default="pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:00:00.0",
        act=("/bin/sh", "-c", SAY, "sh", "{value}"),
        undo=("/bin/sh", "-c", FORGET),
    ),
)
