"""The same job by other doors: the installed collection, one login a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.proof.prove import play
from tests.site.conftest import BIN, ROOT, Lab

pytestmark = pytest.mark.lab


def test_the_installed_collection_runs_from_anywhere(lab: Lab, tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    galaxy = [str(BIN / "ansible-galaxy"), "collection"]
    subprocess.run(
        [*galaxy, "build", str(source), "--output-path", str(tmp_path)], check=True, capture_output=True
    )
    (tarball,) = tmp_path.glob("sparkfleet-serving-*.tar.gz")
    where = tmp_path / "collections"
    # Away from the repository, whose ansible.cfg knows this collection already.
    env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(where), "ANSIBLE_CONFIG": str(tmp_path / "none.cfg")}
    install = [*galaxy, "install", str(tarball), "-p", str(where)]
    subprocess.run(install, cwd=tmp_path, env=env, check=True, capture_output=True)
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), "sparkfleet.serving.verify", "-i", lab.inventory],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    assert str(where) in text or "spark-1" in text


@pytest.mark.field("B86")
def test_a_status_run_logs_in_once_a_node(lab: Lab) -> None:
    def logins(node: str) -> int:
        text = lab.on(
            node, "journalctl", "--no-pager", "-u", "ssh", "-u", "ssh@*", "-g", "Accepted publickey", ok=False
        )
        return text.count("Accepted publickey")

    before = {node: logins(node) for node in ("spark-1", "spark-2")}
    run = play("playbooks/status.yml", lab.inventory)
    assert run.rc == 0, run.output[-2000:]
    after = {node: logins(node) for node in before}
    assert all(after[node] - before[node] <= 1 for node in before), (before, after)
    assert max(run.record["remote_tasks"].values()) == 1
