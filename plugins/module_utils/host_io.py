"""How the host modules touch a machine: commands with a time limit, files written whole, refusals that say
what to do.

Everything goes through one small object, so that the logic of the host modules is tested on a directory tree
and a table of command answers, and runs unchanged on a node. Standard library only, Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

#: Where tools live on a node. A non-login sudo session may lack the sbin directories.
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Seconds after which a read-only tool counts as hung. A sick driver makes `nvidia-smi` block for ever (field
#: B55).
READ_TIMEOUT = 20.0


class Refusal(Exception):
    """Something is not as it must be, and acting would make it worse or lie about it.

    `found`, `wanted` and `remedy` are sentences or values for a person; the node is added where the refusal
    is shown.
    """

    def __init__(self, message: str, found: object = "", wanted: object = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.found = found
        self.wanted = wanted
        self.remedy = remedy

    def as_failure(self, node: str | None = None) -> dict[str, Any]:
        """Arguments for `fail_json`: one line that can be read alone, and the parts."""
        name = node or socket.gethostname()
        text = f"{name}: {self.message}"
        if self.found not in ("", None):
            text += f"; found: {self.found}"
        if self.wanted not in ("", None):
            text += f"; wanted: {self.wanted}"
        if self.remedy:
            text += f"; remedy: {self.remedy}"
        return {"msg": text, "node": name, "found": self.found, "wanted": self.wanted, "remedy": self.remedy}


def finish(module: Any, act: Callable[[], dict[str, Any]]) -> NoReturn:
    """End a module with what ``act`` gives, or with its refusal. Texts in ``warnings`` are warnings, no result."""
    try:
        result = {"changed": False, **act()}
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    for text in result.pop("warnings", []):
        module.warn(text)
    module.exit_json(**result)
    raise AssertionError("unreachable")


class Answer(NamedTuple):
    """What a command said. `rc` is None when it was stopped for being too slow or could not be started."""

    rc: int | None
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.rc == 0

    @property
    def text(self) -> str:
        """Both streams, for a message."""
        return "\n".join(part.strip() for part in (self.out, self.err) if part.strip())


class Host:
    """The machine under `root` ("/" on a node, a directory in a test)."""

    def __init__(self, root: str = "/") -> None:
        self.root = Path(root)

    def path(self, name: str) -> Path:
        """The place of the absolute path `name` under the root."""
        return self.root / name.lstrip("/")

    def run(self, argv: Sequence[str], timeout: float = READ_TIMEOUT, stdin: str | None = None) -> Answer:
        """Run an argument list in the C locale, without a shell; never raises."""
        env = {"PATH": SEARCH_PATH, "LC_ALL": "C", "LANG": "C", "HOME": "/root"}
        try:
            done = subprocess.run(
                list(argv),
                input=stdin if stdin is not None else "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                env=env,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(None, "", f"no answer within {timeout:g} s: {' '.join(argv)}")
        except OSError as error:
            return Answer(None, "", f"{argv[0]}: {error.strerror}")
        return Answer(done.returncode, done.stdout, done.stderr)

    def which(self, name: str) -> str | None:
        """The path of a tool, or None."""
        if "/" in name:
            return name if self.path(name).exists() else None
        return shutil.which(name, path=SEARCH_PATH)

    def read(self, name: str) -> str | None:
        """The text of a file, or None when there is none."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def listdir(self, name: str) -> list[str]:
        """Sorted names in a directory; an absent directory has none."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        """Replace a file whole, so that a reader sees the old text or the new one and nothing between."""
        target = self.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=str(target.parent), prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(mode)
            Path(temporary).replace(target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path(name).unlink()


class Unit(NamedTuple):
    """What systemd knows of a unit; an unknown unit has load state `not-found`."""

    load: str
    active: str
    sub: str
    enabled: str
    invocation: str
    main_pid: int


def unit_state(host: Host, name: str) -> Unit:
    """State of a unit by `systemctl show`, which answers for absent units too (unlike the systemd module in
    check mode)."""
    answer = host.run(
        ["systemctl", "show", name, "-p", "LoadState,ActiveState,SubState,UnitFileState,InvocationID,MainPID"]
    )
    if not answer.ok:
        raise Refusal(
            f"systemd does not answer about {name}",
            answer.text,
            "a running systemd",
            "look at `systemctl status`",
        )
    values = dict(line.split("=", 1) for line in answer.out.splitlines() if "=" in line)
    pid = values.get("MainPID", "0")
    return Unit(
        load=values.get("LoadState", "not-found"),
        active=values.get("ActiveState", "inactive"),
        sub=values.get("SubState", "dead"),
        enabled=values.get("UnitFileState", ""),
        invocation=values.get("InvocationID", ""),
        main_pid=int(pid) if pid.isdigit() else 0,
    )


def text_diff(header: str, before: str | None, after: str | None) -> dict[str, str]:
    """One entry of a module's `diff`. The header is an absolute path, or `<kind> <name>` for what is not a
    file.

    The check-mode proof reads these headers: what a module announces is what it will have changed.
    """
    return {
        "before_header": header,
        "after_header": header,
        "before": before if before is not None else "",
        "after": after if after is not None else "",
    }


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes by name. The counters without a unit (HugePages_*) are left as they are."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            values[name.strip()] = int(fields[0]) * (1024 if fields[1:2] == ["kB"] else 1)
    return values
