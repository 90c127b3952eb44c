"""What the guard costs a node and how soon it acts, on the lab: python -m bench.guard_bench [SECONDS].

Needs a lab that is up and the guard on it (tests/proof/guard.yml); with a replica that serves
(tests/lab/test_guard_pair.py leaves one) the reactions are measured too, and the replica is started again
after each. Prints Markdown. Two cores are shared by both nodes and whatever else runs, so the figures are
upper bounds for a Spark.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab import fault
from lab.config import NODES, instance

ROOT = Path(__file__).resolve().parents[1]

UNIT, STATE = "sparkfleet-guard.service", "/run/sparkfleet/lab/guard.json"


def on(node: str, *command: str) -> str:
    done = subprocess.run(
        ["docker", "exec", instance().container(node), *command], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def reading(node: str) -> tuple[float, float, int]:
    """Processor seconds, samples, resident KiB of the guard."""
    pid = on(node, "systemctl", "show", "-p", "MainPID", "--value", UNIT)
    fields = on(node, "cat", f"/proc/{pid}/stat").rpartition(")")[2].split()
    ticks = float(on(node, "getconf", "CLK_TCK"))
    resident = next(
        int(row.split()[1])
        for row in on(node, "cat", f"/proc/{pid}/status").splitlines()
        if row.startswith("VmRSS")
    )
    metrics = dict(
        row.rsplit(" ", 1)
        for row in on(node, "cat", "/run/sparkfleet/guard.prom").splitlines()
        if row[0] != "#"
    )
    return (
        (int(fields[11]) + int(fields[12])) / ticks,
        float(metrics["sparkfleet_guard_samples_total"]),
        resident,
    )


def state(node: str) -> dict[str, Any]:
    """What the guard thinks of the lab's replica; empty where there is none."""
    return dict(json.loads(on(node, "sh", "-c", f"cat {STATE} 2>/dev/null || echo '{{}}'")))


def lines(node: str, text: str, since: float) -> float:
    """When the guard's journal had this text first, in seconds of the clock that both nodes share."""
    found = on(
        node, "journalctl", "-u", UNIT, "--no-pager", "-o", "short-unix", f"--since=@{int(since)}", "-g", text
    )
    return next(float(line.split()[0]) for line in found.splitlines() if line[:1].isdigit())


def reaction(sinking: str, gib: str) -> tuple[float, float, float]:
    """Seconds from low memory to the guard's signal, to the end of that rank, and to the end of the other."""
    other = next(node for node in NODES if node != sinking)
    begun = time.time()
    fault.switch(instance(), "sink-memory", sinking, value=gib)
    # The switch comes out of an archive without a time of its own; when it was put there is its change time.
    low = float(on(sinking, "stat", "-c", "%.Z", "/var/lib/lab/faults/sink-memory"))
    stops: list[str] = []
    try:
        deadline = time.monotonic() + 90
        while len(stops) < len(NODES) and time.monotonic() < deadline:
            stops = [node for node in NODES if not state(node)["running"]]
            time.sleep(0.5)
        signal = lines(sinking, "(stopping|killing) rank", begun)
        here = lines(sinking, "the rank ended", begun)
        there = lines(other, "(stopped for its peer|ended with its peer)", begun)
    finally:
        fault.switch(instance(), "sink-memory", sinking, on=False)
    return signal - low, here - low, there - low


def reactions() -> None:
    print("\n| memory sinks | to | signal s | its rank ended s | the other known to have ended s |")
    print("|---|---|---|---|---|")
    for node in NODES:
        for gib in ("3", "1"):
            signal, here, there = reaction(node, gib)
            print(f"| on {node} | {gib} GiB | {signal:.2f} | {here:.2f} | {there:.2f} |", flush=True)
            start = [str(Path(sys.executable).parent / "ansible-playbook"), "playbooks/start.yml"]
            inventory = ["-i", str(instance().directory / "inventory")]
            subprocess.run([*start, *inventory], cwd=ROOT, check=True, capture_output=True)
            time.sleep(10)


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    before = {node: reading(node) for node in NODES}
    began = time.monotonic()
    time.sleep(seconds)
    print("| node | seconds | processor % of one core | samples | resident MiB |\n|---|---|---|---|---|")
    for node in NODES:
        after = reading(node)
        took = time.monotonic() - began
        share = 100 * (after[0] - before[node][0]) / took
        count = after[1] - before[node][1]
        print(f"| {node} | {took:.0f} | {share:.2f} | {count:.0f} | {after[2] / 1024:.1f} |")
    if all(state(node).get("running") for node in NODES):
        reactions()
    return 0


if __name__ == "__main__":
    sys.exit(main())
