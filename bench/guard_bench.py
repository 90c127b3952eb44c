"""What the guard costs a node and how soon it acts, on the lab: python -m bench.guard_bench [SECONDS].

Needs a lab that is up and the guard on it (tests/proof/guard.yml). Prints one Markdown row a node. Two cores
are shared by both nodes and whatever else runs, so the figures are upper bounds for a Spark.
"""

from __future__ import annotations

import subprocess
import sys
import time

from lab.config import NODES, instance

UNIT = "sparkfleet-guard.service"


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
