"""Bootstrap on a Debian that has nothing: no Python, no Docker engine of its own, this machine's socket."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

from lab.config import LABEL, PREFIX, cache_directory
from lab.image import MIRROR, has_image

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
# What Debian's Python brings, and the ansible-core that it gets (pyproject.toml).
SUITES = {"bookworm": ("3.11", "2.19"), "trixie": ("3.13", "2.21")}


def tree() -> bytes:
    """The tracked files, as a fresh clone would have them."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in filter(None, names.decode().split("\0")):
            if (ROOT / name).exists() or (ROOT / name).is_symlink():
                archive.add(ROOT / name, f"clone/{name}", recursive=False)
    return buffer.getvalue()


@pytest.fixture(params=sorted(SUITES))
def debian(request: pytest.FixtureRequest) -> Iterator[tuple[str, Container]]:
    """A container of a minimal Debian, with the clone in /root/clone."""
    suite = request.param
    client = docker.from_env(timeout=600)
    tag = f"{PREFIX}/bare:{suite}"
    if not has_image(client, tag):
        tar = cache_directory() / "rootfs" / f"bare-{suite}.tar"
        if not tar.exists():
            command = ["mmdebstrap", "--variant=minbase", "--mode=root", "--include=ca-certificates"]
            subprocess.run([*command, suite, str(tar), MIRROR], check=True, capture_output=True)
        client.api.import_image_from_file(str(tar), repository=f"{PREFIX}/bare", tag=suite)
    container = client.containers.create(
        tag,
        command=["sleep", "1800"],
        labels={LABEL: "bootstrap"},
        network_mode="host",
        init=True,
        volumes={
            "/var/run/docker.sock": {"bind": "/var/run/docker.sock", "mode": "rw"},
            # Packages come through whatever this machine trusts.
            "/etc/ssl/certs": {"bind": "/etc/ssl/certs", "mode": "ro"},
        },
    )
    try:
        container.put_archive("/root", tree())
        container.start()
        yield suite, container
    finally:
        container.remove(force=True)


def test_bootstrap_prepares_a_bare_debian(debian: tuple[str, Container]) -> None:
    suite, container = debian
    python, core = SUITES[suite]

    def run(command: str) -> str:
        code, output = container.exec_run(["bash", "-c", command], workdir="/root/clone")
        assert isinstance(output, bytes)
        text = output.decode(errors="replace")
        assert code == 0, text[-3000:]
        return text

    run("tools/bootstrap docker")
    assert f"Python {python}" in run(".venv/bin/python -V")
    assert f"core {core}" in run(".venv/bin/ansible --version")
    assert run(".venv/bin/python -c 'import docker; print(docker.from_env().ping())'").strip() == "True"
    # The collection resolves its own names there, and the lab speaks to the engine behind the socket.
    assert "spark_probe" in run(".venv/bin/ansible-doc -l sparkfleet.serving")
    assert "lab" in run("LAB_NAME=nobody .venv/bin/python -m lab status || true")
    # A second bootstrap has nothing to do and says nothing.
    assert run("tools/bootstrap docker").strip() == ""
