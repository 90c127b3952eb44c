"""The two proofs of check mode, for any playbook on the lab.

proof = prove_check_mode("site.yml", inventory="inventory/lab")
assert not proof.problems, proof.report()
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import snapshot
from lab.config import NODES

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """One ansible-playbook command: exit code, output, and the record of the summary callback."""

    rc: int
    output: str
    record: Mapping[str, Any]

    def changed(self) -> set[tuple[str, str]]:
        """(host, task) of everything that changed, or would."""
        return {(host, task) for host, tasks in self.record.get("changed", {}).items() for task in tasks}

    def changed_count(self) -> int:
        return sum(len(tasks) for tasks in self.record.get("changed", {}).values())


@dataclass
class Proof:
    """What was found. `problems` is empty when check mode told the truth."""

    problems: list[str] = field(default_factory=list)
    check: Run | None = None
    real: Run | None = None
    again: Run | None = None
    changes: dict[str, list[snapshot.Change]] = field(default_factory=dict)

    def report(self) -> str:
        lines = [f"{len(self.problems)} problems", *self.problems]
        for name, run in (("check", self.check), ("real", self.real), ("again", self.again)):
            if run is not None and run.rc:
                lines += [f"-- end of the {name} run --", run.output[-4000:]]
        return "\n".join(lines)


def play(
    playbook: str, inventory: str | None, *, extra: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Run:
    """Run ansible-playbook from the repository's root, with the summary callback's record switched on."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [str(Path(sys.executable).parent / "ansible-playbook"), playbook]
        if inventory:
            command += ["-i", inventory]
        done = subprocess.run(
            [*command, *extra],
            cwd=ROOT,
            env={
                **os.environ,
                **(env or {}),
                "SPARKFLEET_RECORD": str(record),
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            },
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        found = json.loads(record.read_text()) if record.exists() else {}
    return Run(done.returncode, done.stdout + done.stderr, found)


def compare_tasks(check: Run, real: Run) -> list[str]:
    """The first proof: the two sets of changed tasks are equal."""
    problems = [
        f"{host}: check mode did not announce the task `{task}`"
        for host, task in sorted(real.changed() - check.changed())
    ]
    problems += [
        f"{host}: check mode announced `{task}`, which changed nothing"
        for host, task in sorted(check.changed() - real.changed())
    ]
    return problems


def compare_nodes(
    check: Run,
    before: Mapping[str, snapshot.Snapshot],
    after: Mapping[str, snapshot.Snapshot],
    rules: Sequence[snapshot.Rule],
) -> tuple[list[str], dict[str, list[snapshot.Change]]]:
    """The second proof: changed objects equal announced objects."""
    problems: list[str] = []
    found: dict[str, list[snapshot.Change]] = {}
    for node in before:
        changes = snapshot.compare(before[node], after[node])
        notes = snapshot.announced(check.record.get("tasks", []), node)
        found[node] = snapshot.unexcluded(changes, rules)
        problems += [
            f"{node}: not announced: {change}" for change in snapshot.unexplained(changes, notes, rules)
        ]
        problems += [
            f"{node}: announced and unchanged: {note}" for note in snapshot.unfulfilled(changes, notes)
        ]
    return problems, found


def prove_check_mode(
    playbook: str,
    inventory: str | None = None,
    extra_args: Sequence[str] = (),
    *,
    nodes: Sequence[str] = NODES,
    env: Mapping[str, str] | None = None,
    again: bool = True,
) -> Proof:
    """Check run, real run and (with `again`) two more that must change nothing, with node snapshots in
    between."""
    proof = Proof()
    rules = snapshot.load_rules()
    before = snapshot.take_all(nodes)
    proof.check = play(playbook, inventory, extra=[*extra_args, "--check", "--diff"], env=env)
    if proof.check.rc:
        proof.problems.append(f"the check run ended with {proof.check.rc}")
    middle = snapshot.take_all(nodes)
    for node in nodes:
        touched = snapshot.unexcluded(snapshot.compare(before[node], middle[node]), rules)
        proof.problems += [f"{node}: the check run changed {change}" for change in touched]
    proof.real = play(playbook, inventory, extra=extra_args, env=env)
    if proof.real.rc:
        proof.problems.append(f"the real run ended with {proof.real.rc}")
        return proof
    after = snapshot.take_all(nodes)
    proof.problems += compare_tasks(proof.check, proof.real)
    problems, proof.changes = compare_nodes(proof.check, middle, after, rules)
    proof.problems += problems
    if again:
        proof.again = play(playbook, inventory, extra=extra_args, env=env)
        late = play(playbook, inventory, extra=[*extra_args, "--check", "--diff"], env=env)
        for run, name in ((proof.again, "second run"), (late, "check run afterwards")):
            if run.rc:
                proof.problems.append(f"the {name} ended with {run.rc}")
            proof.problems += [f"{host}: the {name} changed `{task}`" for host, task in sorted(run.changed())]
    return proof
