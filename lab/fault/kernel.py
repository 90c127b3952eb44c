"""What the kernel says. A node has no /dev/kmsg of its own; a FIFO in its place is read by journald as the real one is,
one record at a time, so the lines are the kernel's to everybody who asks the journal."""

from __future__ import annotations

from . import Fault

SAY = r"""
if ! [ -p /dev/kmsg ]; then
  mkfifo -m 600 /dev/kmsg
  # Whoever opens a FIFO for writing waits for a reader, and journald writes there before it reads: hold it open.
  setsid sh -c 'exec 3<>/dev/kmsg; exec sleep infinity' < /dev/null > /dev/null 2>&1 &
  echo $! > /run/lab/kmsg.pid
  : > /dev/kmsg
  systemctl restart systemd-journald.service
fi
seq=$(date +%s%N)
up=$(awk '{ printf "%d", $1 * 1000000 }' /proc/uptime)
printf '%s\n' "$1" | while IFS= read -r line; do
  seq=$((seq + 1))
  printf '3,%s,%s,-;%s\n' "$seq" "$up" "$line" > /dev/kmsg
  sleep 0.1
done
"""

FORGET = """
[ ! -e /run/lab/kmsg.pid ] || kill "$(cat /run/lab/kmsg.pid)"
rm -f /dev/kmsg /run/lab/kmsg.pid
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
