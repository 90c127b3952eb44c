"""What the subcommands share: launch files, the status file, systemd notification, retries with an end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.launch import LAUNCH_SCHEMA
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_state import (
    launch_path,
    read_json,
    status_path,
)

Json = dict[str, Any]
T = TypeVar("T")


def load_launch(host: Host, replica: str) -> Json:
    """The launch of this node's rank. Raises ``Refusal`` when there is none or of another schema."""
    launch = read_json(host, launch_path(replica))
    if launch is None:
        raise Refusal(
            f"no launch for replica {replica}",
            f"{launch_path(replica)} is absent",
            "a launch file",
            "run site.yml for this replica",
        )
    if launch.get("schema") != LAUNCH_SCHEMA:
        raise Refusal(
            f"{launch_path(replica)} has another schema",
            launch.get("schema"),
            LAUNCH_SCHEMA,
            "run site.yml, which writes launch file and agent together",
        )
    return launch


def boot_id(host: Host) -> str:
    return (host.read("/proc/sys/kernel/random/boot_id") or "").strip()


def since_boot(host: Host) -> float:
    """Seconds since this system's services began to start (a soft reboot counts, as does a container's
    boot).
    """
    answer = host.run(["systemctl", "show", "-p", "UserspaceTimestampMonotonic", "--value"])
    if answer.ok and answer.out.strip().isdigit():
        return time.monotonic() - int(answer.out) / 1e6
    return float((host.read("/proc/uptime") or "1e9").split()[0])


class Status:
    """The agent's status file, replaced whole at every change (so a reader never sees a half)."""

    def __init__(self, host: Host, replica: str) -> None:
        self.host = host
        self.path = status_path(replica)
        # `run` tells one life of a rank from the next; `partners` are the lives of the peers that it is bound to.
        self.values: Json = {
            "replica": replica,
            "pid": os.getpid(),
            "boot_id": boot_id(host),
            "run": uuid.uuid4().hex,
            "partners": {},
        }

    def set(self, phase: str, message: str = "", **more: Any) -> None:
        """Change phase and message; ``more`` is kept until it is changed again."""
        self.values.update(more)
        self.values.update({"phase": phase, "message": message, "since": round(time.time(), 1)})
        # A full /run must not take a serving rank down.
        with contextlib.suppress(OSError):
            self.host.write(self.path, json.dumps(self.values, sort_keys=True) + "\n", 0o600)


def sd_notify(*fields: str) -> bool:
    """Tell systemd (``READY=1``, ``STATUS=...``); False outside a unit of Type=notify."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return False
    address = "\0" + where[1:] if where.startswith("@") else where
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto("\n".join(fields).encode("utf-8"), address)
    return True


class Final(Refusal):
    """A refusal that waiting does not change."""


def until(
    attempt: Callable[[], T],
    seconds: float,
    *,
    every: float = 1.0,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call ``attempt`` until it does not raise ``Refusal``, at most ``seconds``; then its last one passes
    on. A ``Final`` one passes on at once.
    """
    end = clock() + seconds
    while True:
        try:
            return attempt()
        except Final:
            raise
        except Refusal:
            if stopped() or clock() >= end:
                raise
        sleep(min(every, max(0.05, end - clock())))
