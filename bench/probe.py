"""What a probe of a node costs: remote round trips, seconds, bytes. Run: python -m bench.probe [REPEATS].

Needs a lab that is up. Prints one Markdown row a subset and node. A round trip is one command over the SSH
connection that stays open; the first row of a node opens it. Two cores are shared by both nodes and whatever else
runs, so the seconds are upper bounds.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.config import NODES, instance

ROOT = Path(__file__).resolve().parents[1]
SUBSETS = ("all", "min", "net", "memory", "docker", "gpu", "kernel_log", "firewall", "disk")


def probe(node: str, subset: str) -> tuple[int, float, dict[str, Any], int]:
    """(remote commands, seconds on the controller, the probe, its bytes as JSON) of one run on one node."""
    inventory = instance().directory / "inventory"
    command = [str(Path(sys.executable).parent / "ansible"), node, "-i", str(inventory), "-b", "-o", "-vvv"]
    command += ["-m", "sparkfleet.serving.spark_probe", "-a", json.dumps({"gather_subset": [subset]})]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.monotonic() - began
    found = re.search(rf"^{re.escape(node)} \| \S+ => (\{{.*)$", done.stdout, re.M)
    if done.returncode or not found:
        raise SystemExit(f"{node}: the probe failed:\n{(done.stdout + done.stderr)[-2000:]}")
    result, _end = json.JSONDecoder().raw_decode(found.group(1))
    text = json.dumps(result["probe"], separators=(",", ":"))
    return done.stdout.count("SSH: EXEC"), took, result["probe"], len(text)


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print("| node | subset | remote round trips | seconds on the node | seconds in all | KB |")
    print("|---|---|---|---|---|---|")
    for node in NODES:
        for subset in SUBSETS:
            rows = [probe(node, subset) for _ in range(repeats)]
            trips = sorted({row[0] for row in rows})
            inside = statistics.median(float(row[2]["seconds"]) for row in rows)
            whole = statistics.median(row[1] for row in rows)
            shown = " to ".join(map(str, (trips[0], trips[-1]) if len(trips) > 1 else trips))
            print(f"| {node} | {subset} | {shown} | {inside:.2f} | {whole:.1f} | {rows[-1][3] / 1000:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
