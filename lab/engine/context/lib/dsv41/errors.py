"""How the engine fails: a name on stderr, sometimes a reason line before it, and an exit code."""

from __future__ import annotations

import os
import resource
import sys
from typing import NoReturn


class EngineError(Exception):
    """A refusal that the engine raises by name: `error: NAME`, exit 1, after the optional reason line."""

    def __init__(self, name: str, reason: str | None = None) -> None:
        super().__init__(name)
        self.name = name
        self.reason = reason


class EntryError(Exception):
    """A refusal of one entry of the rank file: `KEY: TEXT`, without the `error:` prefix, exit 1."""


class Panic(Exception):
    """What a safety-checked build ends with on malformed input: SIGABRT, exit 134."""


def say(line: str) -> None:
    """One line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def report(error: EngineError) -> int:
    """Print an engine error as the engine prints it; the exit code."""
    if error.reason is not None:
        say(f"error: {error.reason}")
    say(f"error: {error.name}")
    return 1


def panic(reason: str) -> NoReturn:
    """Die by SIGABRT without a core file."""
    say(f"thread 1 panic: {reason}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def os_error(error: OSError) -> EngineError:
    """The name under which the engine reports a failed system call."""
    names: dict[type[OSError], str] = {
        FileNotFoundError: "FileNotFound",
        PermissionError: "AccessDenied",
        NotADirectoryError: "NotDir",
        IsADirectoryError: "IsDir",
    }
    return EngineError(names.get(type(error), "InputOutput"))
