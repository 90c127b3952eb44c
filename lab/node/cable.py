"""The QSFP cable between two lab nodes, in a container of its own: host process ids, NET_ADMIN, SYS_PTRACE.

Each of a node's four ConnectX-7 netdevs is one end of a veth pair; the other end stays here. The two ends of
a rail meet in a bridge, so that a node which restarts loses its own netdevs only: its neighbour keeps its
netdevs, addresses and routes and sees the carrier drop, as with a cable. When the node is back, its netdevs
are plugged in again.

Fault files (``/var/lib/lab/faults/NODE.NAME``): ``cut-rail`` (a rail number, or empty for both), ``no-cable``
(the node has no functions at all), ``rail-rate`` (Mbit/s).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .parts import FAULTS, FUNCTIONS, RAILS, Function, fault, mac

SOCKET = "/var/run/docker.sock"
PERIOD = 0.5


class Engine(http.client.HTTPConnection):
    """The Docker engine's socket; only container inspection is used."""

    def __init__(self) -> None:
        super().__init__("localhost", timeout=10)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(SOCKET)


def running_pid(container: str) -> int:
    """Process id of the container's init, 0 when it does not run."""
    engine = Engine()
    try:
        engine.request("GET", f"/containers/{container}/json")
        answer = engine.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            return 0
        state: dict[str, Any] = json.loads(body)["State"]
        return int(state["Pid"]) if state["Running"] else 0
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        engine.close()


def ip(*arguments: str) -> None:
    subprocess.run(["/usr/sbin/ip", *arguments], check=True, capture_output=True)


def end_name(node: int, function: Function) -> str:
    """Name of the cable's end of a function: c1r0 is node 1, rail 0; c1u0 the unused cage's half 0."""
    return f"c{node}{'r' if function.cage == 0 else 'u'}{function.half}"


def exists(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def booted(pid: int) -> bool:
    """True once the node's boot shim is done: its management interface has its name, and systemd runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == "systemd"
    return False


@dataclass
class Node:
    number: int
    container: str
    pid: int = 0

    def switch(self, name: str) -> str | None:
        return fault(f"{self.number}.{name}", FAULTS)

    def refresh(self) -> None:
        """Plug in what a running node lacks, unplug what a fault takes away."""
        alive = bool(self.pid) and Path(f"/proc/{self.pid}").exists()
        if not alive or not all(exists(end_name(self.number, function)) for function in FUNCTIONS):
            self.pid = running_pid(self.container)
        if self.switch("no-cable") is not None:
            for function in FUNCTIONS:
                if exists(end_name(self.number, function)):
                    ip("link", "del", end_name(self.number, function))
            return
        if not self.pid or not booted(self.pid):
            return
        for function in FUNCTIONS:
            if not exists(end_name(self.number, function)):
                self.plug(function)

    def plug(self, function: Function) -> None:
        end = end_name(self.number, function)
        ip(
            *("link", "add", end, "mtu", "9216", "type", "veth"),
            *(
                "peer",
                "name",
                function.netdev,
                "address",
                mac(self.number, function.mac_offset),
                "netns",
                str(self.pid),
            ),
        )
        if function in RAILS:
            ip("link", "set", end, "master", f"rail{function.half}")


def set_carrier(name: str, up: bool) -> None:
    """A veth's far end has carrier when this end is up."""
    if exists(name):
        flags = int(Path("/sys/class/net", name, "flags").read_text(encoding="ascii"), 16)
        if bool(flags & 1) != up:
            ip("link", "set", name, "up" if up else "down")


def set_rate(name: str, megabits: str) -> None:
    """Limit what this end sends towards its node; an empty rate takes the limit away."""
    if not exists(name):
        return
    shown = subprocess.run(
        ["/usr/sbin/tc", "qdisc", "show", "dev", name], capture_output=True, text=True, check=True
    )
    limited = "tbf" in shown.stdout
    if megabits and not limited:
        limit = ["tbf", "rate", f"{megabits}mbit", "burst", "256k", "latency", "50ms"]
        subprocess.run(["/usr/sbin/tc", "qdisc", "add", "dev", name, "root", *limit], check=True)
    elif limited and not megabits:
        subprocess.run(["/usr/sbin/tc", "qdisc", "del", "dev", name, "root"], check=True)


def step(nodes: list[Node], rates: dict[str, str]) -> None:
    for node in nodes:
        node.refresh()
    for rail, function in enumerate(RAILS):
        ends = [end_name(node.number, function) for node in nodes]
        cuts = [cut for node in nodes if (cut := node.switch("cut-rail")) is not None]
        whole = all(exists(end) for end in ends) and not any(cut in ("", str(rail)) for cut in cuts)
        for node, end in zip(nodes, ends, strict=True):
            set_carrier(end, whole)
            rate = node.switch("rail-rate") or ""
            if rates.get(end, "") != rate or not exists(end):
                set_rate(end, rate)
                rates[end] = rate if exists(end) else ""


def main() -> None:
    nodes = [Node(number, container) for number, container in enumerate(sys.argv[1:], start=1)]
    FAULTS.mkdir(parents=True, exist_ok=True)
    for rail in range(len(RAILS)):
        if not exists(f"rail{rail}"):
            # No learning delay, no spanning tree, no address: a wire.
            ip(
                "link",
                "add",
                f"rail{rail}",
                "mtu",
                "9216",
                "type",
                "bridge",
                "forward_delay",
                "0",
                "mcast_snooping",
                "0",
            )
            ip("link", "set", f"rail{rail}", "addrgenmode", "none", "up")
    rates: dict[str, str] = {}
    while True:
        try:
            step(nodes, rates)
        except subprocess.CalledProcessError as error:
            # A node can vanish between two commands; the next step sees the world as it is then.
            print(f"cable: {error.cmd}: {error.stderr!r}", flush=True)
        time.sleep(PERIOD)


if __name__ == "__main__":
    main()
