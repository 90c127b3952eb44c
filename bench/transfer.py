"""How fast a proven copy between two lab nodes is, beside a raw copy and beside rsync over ssh.

    LAB_NAME=lab python -m bench.transfer [--megabytes 800] [--files 4] [--rate 2gbit] [--runs 3]

Rates and ratios only: two nodes of a lab share the machine's cores, so a row says what the proof costs while
the rail is the limit (``--rate``), not what a Spark does. The lab must be up; what the bench makes on the
nodes is removed again. Prints one JSON object a row, with the CPU seconds that both nodes spent a GB, and ends
with 1 when a line of ``LIMITS`` is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.testing import Node, nodes

RAW, SHARE, PROVEN = "raw TCP, no proof", "share, no proof", "share, sha256 while it comes"
AFTERWARDS, SSH = "share, sha256 afterwards", "rsync over ssh, no proof"
#: What a way must reach of the raw copy while the rail is the limit.
LIMITS = {SHARE: 0.95, PROVEN: 0.9}

RAIL = "enp1s0f0np0"
SOURCE, TARGET = "10.77.0.1", "10.77.0.2"
FROM, TO = "/var/lib/sparkfleet/bench/src", "/var/lib/sparkfleet/bench/dst"

SEND = """
import os, socket, sys, threading
port, names = int(sys.argv[1]), sys.argv[2:]
listener = socket.create_server(("10.77.0.1", port))
def serve(name):
    client, _ = listener.accept()
    with client, open(name, "rb") as source:
        client.sendfile(source)
threads = [threading.Thread(target=serve, args=(name,)) for name in names]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
RECEIVE = """
import socket, sys, threading, time
port, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def take(number):
    for _ in range(200):
        try:
            link = socket.create_connection(("10.77.0.1", port)); break
        except OSError:
            time.sleep(0.02)
    with link, open(f"{folder}/{number}", "wb") as out:
        while data := link.recv(1 << 20):
            out.write(data)
start = time.monotonic()
threads = [threading.Thread(target=take, args=(number,)) for number in range(count)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(time.monotonic() - start)
"""
#: Runs the collection's own receiver on the node, as the module does, without Ansible around it.
PULL = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, "/var/lib/sparkfleet/bench/lib")
from pkg import fabric_copy, tree
files = tree.parse_files(json.load(open(sys.argv[1])))
work = Path(sys.argv[2])
proof = tree.Proof()
start = time.monotonic()
fabric_copy.pull("/usr/bin/rsync", fabric_copy.Source("10.77.0.1", int(sys.argv[3])), work, files, proof,
                 run=fabric_copy.runner(-1), parallel=len(files))
assert tree.inspect(work, files, proof).complete
print(time.monotonic() - start)
"""
HASH = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, "/var/lib/sparkfleet/bench/lib")
from pkg import tree
files = tree.parse_files(json.load(open(sys.argv[1])))
root = Path(sys.argv[2])
start = time.monotonic()
assert tree.prove(root, tree.inspect(root, files, tree.Proof()), tree.Proof(), len(files)).complete
print(time.monotonic() - start)
"""

#: Every way is timed on the receiver itself: how long the machine takes to begin a command there is no part of a copy.
TIMED = """
import subprocess, sys, time
start = time.monotonic()
subprocess.run(["sh", "-c", sys.argv[1]], check=True)
print(time.monotonic() - start)
"""


def shell(node: Node, text: str) -> str:
    return node.text("sh", "-c", text)


def prepare(source: Node, target: Node, count: int, megabytes: int) -> list[dict[str, Any]]:
    """Files, our own code on the receiver, a key for the ssh row."""
    each = megabytes // count
    shell(
        source,
        f"mkdir -p {FROM}; for n in $(seq 0 {count - 1}); do head -c {each}M /dev/urandom > {FROM}/$n; done",
    )
    sums = [line.split() for line in shell(source, f"cd {FROM} && sha256sum *").splitlines()]
    files = [{"name": name, "size": each << 20, "sha256": digest} for digest, name in sums]
    shell(target, f"mkdir -p {TO} /var/lib/sparkfleet/bench/lib/pkg")
    from lab.config import REPOSITORY

    target.write("/var/lib/sparkfleet/bench/lib/pkg/__init__.py", "")
    for name in ("tree.py", "fabric_copy.py"):
        text = (REPOSITORY / "plugins/module_utils" / name).read_text(encoding="utf-8")
        target.write(f"/var/lib/sparkfleet/bench/lib/pkg/{name}", text)
    for name, text in (("pull.py", PULL), ("hash.py", HASH), ("receive.py", RECEIVE), ("timed.py", TIMED)):
        target.write(f"/var/lib/sparkfleet/bench/{name}", text)
    source.write("/var/lib/sparkfleet/bench/send.py", SEND)
    target.write("/var/lib/sparkfleet/bench/files.json", json.dumps(files))
    source.write(
        "/var/lib/sparkfleet/bench/rsyncd.conf",
        f"address = {SOURCE}\nport = 29990\nuse chroot = no\n[tree]\npath = {FROM}\nread only = yes\n",
    )
    shell(
        source,
        "systemd-run -q --unit=bench-share rsync --daemon --no-detach "
        "--config=/var/lib/sparkfleet/bench/rsyncd.conf",
    )
    shell(
        target,
        "test -e /root/.ssh/bench || (mkdir -p /root/.ssh && ssh-keygen -q -t ed25519 -N '' -f "
        "/root/.ssh/bench)",
    )
    public = target.read("/root/.ssh/bench.pub")
    shell(source, f"mkdir -p /home/spark/.ssh && echo '{public} bench' >> /home/spark/.ssh/authorized_keys")
    return files


def clean(source: Node, target: Node) -> None:
    for node in (source, target):
        node.run(
            "sh",
            "-c",
            f"tc qdisc del dev {RAIL} root; systemctl stop bench-share; rm -rf /var/lib/sparkfleet/bench",
        )
    target.run("sh", "-c", "rm -f /root/.ssh/bench /root/.ssh/bench.pub")
    source.run("sed", "-i", "/bench$/d", "/home/spark/.ssh/authorized_keys")


def cpu_seconds(nodes: Sequence[Node]) -> float:
    """CPU seconds that nodes have spent so far: cgroup v1 counts ns, v2 microseconds."""
    read = (
        "if [ -e /sys/fs/cgroup/cpuacct/cpuacct.usage ]; then cat /sys/fs/cgroup/cpuacct/cpuacct.usage; "
        "else awk '/^usage_usec/ {print $2 * 1000}' /sys/fs/cgroup/cpu.stat; fi"
    )
    return sum(int(shell(node, read).split()[-1]) for node in nodes) / 1e9


def missed(ratios: Mapping[str, float]) -> list[str]:
    """Lines that are not reached, from the ways' rates in parts of the raw copy."""
    found = [
        f"{way} reached {ratios[way]:.2f} of the raw copy, wanted {limit}"
        for way, limit in LIMITS.items()
        if ratios[way] < limit
    ]
    if ratios[PROVEN] <= ratios[SSH]:
        found.append(
            f"{PROVEN} reached {ratios[PROVEN]:.2f}, rsync over ssh {ratios[SSH]:.2f} without any proof"
        )
    return found


def rows(source: Node, target: Node, count: int) -> dict[str, Callable[[], float]]:
    """Name of a way to its measurement in seconds."""
    names = " ".join(f"{FROM}/{number}" for number in range(count))
    bench = "/var/lib/sparkfleet/bench"

    def raw() -> float:
        shell(source, f"systemd-run -q --collect python3 {bench}/send.py 29991 {names}")
        return float(shell(target, f"python3 {bench}/receive.py 29991 {count} {TO}"))

    def ours() -> float:
        return float(shell(target, f"python3 {bench}/pull.py {bench}/files.json {TO} 29990"))

    def timed(command: str) -> float:
        return float(target.text("python3", f"{bench}/timed.py", command).split()[-1])

    def share() -> float:
        pulls = " & ".join(f"rsync rsync://{SOURCE}:29990/tree/{number} {TO}/" for number in range(count))
        return timed(f"{pulls} & wait")

    def share_then_hash() -> float:
        return share() + float(shell(target, f"python3 {bench}/hash.py {bench}/files.json {TO}"))

    def ssh() -> float:
        return timed(
            "rsync -r -e 'ssh -i /root/.ssh/bench -o StrictHostKeyChecking=no -o "
            "UserKnownHostsFile=/dev/null -q' "
            f"spark@{SOURCE}:{FROM}/ {TO}/"
        )

    return {
        RAW: raw,
        SHARE: share,
        PROVEN: ours,
        AFTERWARDS: share_then_hash,
        SSH: ssh,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rate", default="2gbit", help="limit of the rail (tbf); empty for none")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    source, target = nodes()
    try:
        files = prepare(source, target, options.files, options.megabytes)
        if options.rate:
            shell(source, f"tc qdisc add dev {RAIL} root tbf rate {options.rate} burst 4mb latency 100ms")
        ratios: dict[str, float] = {}
        reference = 0.0
        gigabytes = options.runs * options.megabytes * 1.048576 / 1000
        for name, measure in rows(source, target, options.files).items():
            taken = []
            before = cpu_seconds((source, target))
            for _ in range(options.runs):
                shell(target, f"rm -rf {TO}; mkdir -p {TO}")
                taken.append(measure())
                came = sum(int(size) for size in shell(target, f"stat -c %s {TO}/*").split())
                if came != sum(file["size"] for file in files):
                    raise SystemExit(f"{name}: {came} bytes came")
            median = statistics.median(taken)
            reference = reference or median
            ratios[name] = reference / median
            row = {
                "way": name,
                "seconds": round(median, 2),
                "spread": [round(value, 2) for value in sorted(taken)],
                "MB_s": round(options.megabytes * 1.048576 / median),
                "of_raw": round(reference / median, 2),
                "cpu_s_per_GB": round((cpu_seconds((source, target)) - before) / gigabytes, 2),
                "rail": options.rate or "no limit",
            }
            print(json.dumps(row), flush=True)
    finally:
        clean(source, target)
    lines = missed(ratios)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
