"""Access to one node for the probe readers: files below a root, commands with a time limit, the Docker
socket.

Every reader gets one `Reader`. Nothing here raises for a thing that is not there: an absent file, a file
that answers
EINVAL (an empty GID slot) or a command that is not installed are values (`None`). What could not be read for
lack of
privilege, and which command did not answer in time, is collected and reported.

With a root other than "/" no command of this machine is run: answers come from `.sparkfleet-commands.json`
below the
root, an object from the command line (arguments joined by one blank) to {"rc", "stdout", "stderr"}; for the
Docker
socket from "GET /path" to any JSON. So the same readers serve recorded trees.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..docker_api import DockerApi, DockerError, DockerUnreachable

RECORDED_COMMANDS = ".sparkfleet-commands.json"
# What the readers may write into a report, so that a runaway file cannot fill it.
MAX_FILE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    """What a command said. `rc` is None when it did not run (absent) or did not end (timed_out)."""

    rc: int | None
    stdout: str = ""
    stderr: str = ""
    absent: bool = False
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.rc == 0


@dataclass
class Reader:
    """Reads of one node. `timeout` is the limit of each command and of each Docker answer, in seconds."""

    root: str = "/"
    timeout: float = 20.0
    docker_socket: str = "/var/run/docker.sock"
    missing_privileges: list[dict[str, str]] = field(default_factory=list)
    timeouts: list[str] = field(default_factory=list)
    _recorded: dict[str, Any] | None = None
    _docker: DockerApi | None = None

    @property
    def live(self) -> bool:
        return self.root == "/"

    def path(self, name: str) -> Path:
        return Path(self.root) / name.lstrip("/")

    def denied(self, what: str, need: str) -> None:
        row = {"what": what, "need": need}
        if row not in self.missing_privileges:
            self.missing_privileges.append(row)

    def text(self, name: str) -> str | None:
        """The text of a file, or None when it is absent, a directory, or answers an error (sysfs EINVAL)."""
        try:
            with self.path(name).open("rb") as stream:
                return stream.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        except PermissionError:
            self.denied(name, "root")
            return None
        except OSError:
            return None

    def line(self, name: str) -> str | None:
        """The stripped text of a one-line file; None when absent or empty."""
        text = self.text(name)
        text = text.strip() if text is not None else ""
        return text or None

    def integer(self, name: str) -> int | None:
        text = self.line(name)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    def names(self, directory: str) -> list[str]:
        """Sorted entries of a directory; empty when it is absent."""
        try:
            return sorted(entry.name for entry in self.path(directory).iterdir())
        except PermissionError:
            self.denied(directory, "root")
            return []
        except OSError:
            return []

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def link_tail(self, name: str) -> str | None:
        """The last part of what a symbolic link points to (the PCI address behind `device`), or None."""
        try:
            return PurePosixPath(os.readlink(self.path(name))).name or None  # noqa: PTH115 (kept as text)
        except OSError:
            return None

    def recorded(self) -> dict[str, Any]:
        if self._recorded is None:
            text = self.text(RECORDED_COMMANDS)
            loaded = json.loads(text) if text else {}
            self._recorded = loaded if isinstance(loaded, dict) else {}
        return self._recorded

    def run(self, argv: list[str], timeout: float | None = None) -> Answer:
        """Run a command in the C locale, no shell, no input, bounded in time."""
        label = " ".join(argv)
        if not self.live:
            row = self.recorded().get(label)
            if not isinstance(row, dict):
                return Answer(None, absent=True)
            if row.get("timed_out"):
                self.timeouts.append(label)
                return Answer(None, timed_out=True)
            return Answer(int(row.get("rc", 0)), str(row.get("stdout", "")), str(row.get("stderr", "")))
        environ = {
            **os.environ,
            "LC_ALL": "C",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout if timeout is None else timeout,
                check=False,
                env=environ,
            )
        except subprocess.TimeoutExpired:
            # A sick driver lets nvidia-smi hang for ever: "unknown", never "fine".
            self.timeouts.append(label)
            return Answer(None, timed_out=True)
        except OSError:
            return Answer(None, absent=True)
        return Answer(
            done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        )

    def docker(self, path: str, query: dict[str, Any] | None = None) -> tuple[bool, Any]:
        """GET of the Docker engine: (True, decoded JSON), or (False, why): "absent", "denied", "timeout" or
        a text."""
        if not self.live:
            recorded = self.recorded()
            row = recorded.get(f"GET {path}")
            return (False, str(recorded.get("docker", "absent"))) if row is None else (True, row)
        if self._docker is None:
            self._docker = DockerApi(self.docker_socket, self.timeout)
        try:
            return True, self._docker.get(path, query)
        except DockerUnreachable as error:
            cause = error.__cause__
            if isinstance(cause, PermissionError):
                return False, "denied"
            if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)):
                return False, "absent"
            if isinstance(cause, socket.timeout):
                self.timeouts.append(f"docker GET {path}")
                return False, "timeout"
            return False, str(error)
        except DockerError as error:
            return False, str(error)
