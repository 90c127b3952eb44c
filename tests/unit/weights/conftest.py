"""Plain processes that stand for another node and for the Hub; modules run in this process, as on a node."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkfleet.serving.plugins.module_utils import fabric_copy

ROOT = Path(__file__).parents[3]
REVISION = "0123456789abcdef0123456789abcdef01234567"

RunModule = Callable[..., dict[str, Any]]


def run_module(name: str, args: dict[str, Any], check: bool = False) -> dict[str, Any]:
    """Run a module of the collection and return its answer (``failed`` is set when it refused)."""
    module = importlib.import_module(f"ansible_collections.sparkfleet.serving.plugins.modules.{name}")
    answer = io.StringIO()
    given = dict(args, _ansible_check_mode=check, _ansible_diff=True)
    with patch_module_args(given), contextlib.redirect_stdout(answer), contextlib.suppress(SystemExit):
        module.main()
    result: dict[str, Any] = json.loads(answer.getvalue())
    return result


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def manifest(folder: Path) -> list[dict[str, Any]]:
    """The manifest of a directory as the model lock would give it."""
    return [
        {
            "name": path.relative_to(folder).as_posix(),
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


def fill(folder: Path, sizes: dict[str, int], seed: int = 1) -> Path:
    """Files of given sizes with contents that differ."""
    for number, (name, size) in enumerate(sizes.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        block = hashlib.sha256(f"{seed}:{number}".encode()).digest() * 128
        path.write_bytes((block * (size // len(block) + 1))[:size])
    return folder


@pytest.fixture(scope="session")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The repositories of the lab: checkpoint, original release, kit, the kit from git, overlay."""
    out = tmp_path_factory.mktemp("hub")
    done = subprocess.run(
        [sys.executable, "-m", "lab.checkpoint", str(out)], cwd=ROOT, capture_output=True, check=True
    )
    return {name: Path(one["path"]) for name, one in json.loads(done.stdout).items()}


@dataclass
class Share:
    """An rsync daemon with the configuration that a node would run, on loopback."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def source(self) -> dict[str, Any]:
        return {"address": "127.0.0.1", "port": self.port}

    def sent(self) -> int:
        """Bytes of files that the daemon sent, by its own log."""
        return sum(
            int(line.split("sent ")[1].split()[0].replace(",", ""))
            for line in self.log.read_text().splitlines()
            if "sent " in line and " bytes" in line
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=10)


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Callable[..., Share]]:
    """Start shares of directories; all end with the test."""
    running = []

    def start(path: Path, clients: tuple[str, ...] = ("127.0.0.1",), port: int = 0) -> Share:
        number = port or free_port()
        config = tmp_path / f"rsyncd-{number}.conf"
        listen = fabric_copy.Listen("127.0.0.1", clients)
        config.write_text(fabric_copy.daemon_config(str(path), listen, number))
        log = tmp_path / f"rsyncd-{number}.log"
        command = ["rsync", "--daemon", "--no-detach", f"--config={config}", f"--log-file={log}"]
        one = Share(number, subprocess.Popen(command, stdin=subprocess.DEVNULL), log)
        running.append(one)
        deadline = time.monotonic() + 10
        while not fabric_copy.answers("127.0.0.1", number) and time.monotonic() < deadline:
            time.sleep(0.02)
        return one

    yield start
    for one in running:
        one.stop()


class Hub:
    """The Hub stand-in as a process, with a control file."""

    def __init__(self, root: Path, process: subprocess.Popen[str], port: int) -> None:
        self.root = root
        self.process = process
        self.endpoint = f"http://127.0.0.1:{port}"

    def control(self, **settings: Any) -> None:
        """Set what the Hub refuses and breaks."""
        (self.root / ".control.json").write_text(json.dumps(settings))

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.endpoint}/_lab/stats", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def publish(self, repo: str, sizes: dict[str, int], revision: str = REVISION, seed: int = 1) -> Path:
        """A repository with files of given sizes; returns its directory."""
        folder = fill(self.root / repo / revision, sizes, seed)
        refs = self.root / repo / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(revision)
        return folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A running Hub with no repository yet."""
    root = tmp_path / "hub"
    root.mkdir()
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "lab/hub/server.py"),
            "--root",
            str(root),
            "--port",
            "0",
            "--bind",
            "127.0.0.1",
            "--log",
            str(tmp_path / "hub.log"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield Hub(root, process, int(process.stdout.readline()))
    process.terminate()
    process.wait(timeout=10)


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunModule:
    """hub_fetch with the real client in a plain process instead of a container."""
    module = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.hub_fetch")

    def run_job(
        _params: dict[str, Any], job: Path, work: Path, hear: Callable[[int, bytes], None]
    ) -> tuple[int, str]:
        task = json.loads((job / "job.json").read_text())
        task.update(dest=str(work), home=str(work / ".cache/home"))
        (job / "job.json").write_text(json.dumps(task))
        assert (job / "token").stat().st_mode & 0o777 == 0o600
        done = subprocess.run(
            [sys.executable, str(job / "fetch.py")],
            capture_output=True,
            check=False,
            env={"PATH": os.environ["PATH"], "HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5"},
        )
        hear(1, done.stdout)
        return done.returncode, done.stderr.decode()

    monkeypatch.setattr(module, "run_job", run_job)
    monkeypatch.setattr(module, "RUN_DIR", tmp_path / "run")

    def call(hub: Hub, dest: Path, check: bool = False, **args: Any) -> dict[str, Any]:
        given = {
            "endpoint": hub.endpoint,
            "repo": "lab/model",
            "revision": REVISION,
            "dest": str(dest),
            "data_dir": str(tmp_path / "data"),
            "reserve_bytes": 0,
            "image": "unused",
            **args,
        }
        return run_module("hub_fetch", given, check)

    return call
