"""inventory/example with lab/overrides.yml: what a user copies works, from bare nodes to an answer."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
import yaml

from lab import instance as lab_instance
from lab.config import NODES
from lab.config import instance as chosen
from lab.image import fetch_wheels
from tests.site.conftest import ROOT, Lab

pytestmark = pytest.mark.lab

ON_HEAD = "/home/spark/sparkfleet"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    found = Lab(chosen())
    lab_instance.up(found.instance)
    yield found


@pytest.fixture
def overrides(lab: Lab, tmp_path: Path) -> Path:
    """lab/overrides.yml, with the addresses and paths of this instance."""
    text = (ROOT / "lab/overrides.yml").read_text()
    text = text.replace("172.31.77.", str(lab.instance.hub_address).rsplit(".", 1)[0] + ".")
    found = tmp_path / "overrides.yml"
    found.write_text(text.replace(".lab/lab/", f".lab/{lab.instance.name}/"))
    return found


def test_the_example_inventory_with_the_overrides(lab: Lab, overrides: Path) -> None:
    """What a user copies works as it is; only what lab/overrides.yml lists differs. Runs first, on a bare lab."""
    assert lab.containers() == {}, "this test starts on a bare lab: make lab-down, then again"
    done = lab.play("site.yml", "-e", f"@{overrides}", inventory=str(ROOT / "inventory/example"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert lab.ask()


def controller_wheels(target: Path, python: str) -> None:
    """ansible-core and netaddr as pinned for a controller with that Python, for the head's own architecture."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = [pin.partition(";")[0].strip() for pin in groups["controller"] if "< '3.12'" not in pin]
    fetch_wheels(target, wanted, python=python)


def put_on_head(lab: Lab, overrides: Path, scratch: Path) -> str:
    """The repository, the example with a local head, ssh to the worker, and ansible-core; returns PYTHONPATH."""
    head = lab.instance.container(NODES[0])
    version = lab.on(NODES[0], "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    controller_wheels(scratch / "wheels", version)
    hosts = yaml.safe_load((ROOT / "inventory/example/hosts.yml").read_text())
    hosts["all"]["hosts"][NODES[0]] |= {"ansible_connection": "local"}
    (scratch / "hosts.yml").write_text(yaml.safe_dump(hosts))
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in files.decode().rstrip("\0").split("\0"):
            if (ROOT / name).exists():
                archive.add(ROOT / name, name, recursive=False)
        ssh = lab.instance.directory / "ssh"
        for path in ssh.iterdir():
            archive.add(path, str(path.relative_to(ROOT)))
        archive.add(scratch / "wheels", "wheels")
        archive.add(scratch / "hosts.yml", "inventory/example/hosts.yml")
        archive.add(overrides, "overrides.yml")
    unpack = f"mkdir -p {ON_HEAD} && tar -xf - -C {ON_HEAD} && chown -R spark: {ON_HEAD}"
    subprocess.run(
        ["docker", "exec", "-i", head, "sh", "-c", unpack], input=buffer.getvalue(), check=True, timeout=300
    )
    return f"{ON_HEAD}/wheels"


def test_from_the_head_the_same_inventory_finds_nothing_to_do(
    lab: Lab, overrides: Path, tmp_path: Path
) -> None:
    """README, "From the head": the controller moves to the head, by local connection and sudo; nothing changes."""
    path = put_on_head(lab, overrides, tmp_path)
    before = lab.containers()
    for playbook, last in (("site.yml", "site"), ("playbooks/status.yml", "status")):
        done = subprocess.run(
            [
                *("docker", "exec", "--user", "spark", "--workdir", ON_HEAD, "--env", f"PYTHONPATH={path}"),
                *("--env", "HOME=/home/spark", lab.instance.container(NODES[0])),
                *("python3", "-m", "ansible", "playbook", playbook),
                *("-i", "inventory/example", "-e", "@overrides.yml"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{last}: {(done.stdout + done.stderr)[-3000:]}"
        rows = re.findall(
            r"^(spark-\d)\s+:.*?changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", done.stdout, re.M
        )
        assert sorted(rows) == [(node, "0", "0", "0") for node in sorted(NODES)], done.stdout[-3000:]
    assert lab.containers() == before
