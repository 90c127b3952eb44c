"""Docker's daemon.json: read strictly, merged, never replaced.

The file belongs to the machine. Keys of others survive with their order and values, the indentation is kept,
a file
that cannot be parsed is refused as it is (dockerd would not start with it either), and only
`runtimes.nvidia` is ours.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .host_io import Refusal

PATH = "/etc/docker/daemon.json"
#: What `nvidia-ctk runtime configure --runtime=docker` writes.
NVIDIA_RUNTIME = {"args": [], "path": "nvidia-container-runtime"}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} stands twice")
        seen[key] = value
    return seen


def parse(text: str | None) -> dict[str, Any]:
    """The settings in daemon.json; an absent or empty file has none.

    Raises Refusal for what dockerd refuses too: no JSON, a key twice, not an object.
    """
    if text is None or not text.strip():
        return {}
    remedy = f"correct {PATH} by hand; it is not touched while it cannot be read"
    try:
        settings = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise Refusal(
            f"{PATH} is not JSON",
            f"line {error.lineno}, column {error.colno}: {error.msg}",
            "a JSON object",
            remedy,
        ) from error
    except ValueError as error:
        raise Refusal(f"{PATH} is not unambiguous", str(error), "each key once", remedy) from error
    if not isinstance(settings, dict):
        raise Refusal(f"{PATH} is not an object", type(settings).__name__, "a JSON object", remedy)
    return settings


def indentation(text: str | None) -> str:
    """The indentation of an existing file; four blanks as nvidia-ctk writes where there is none to follow."""
    match = re.search(r'^([ \t]+)"', text or "", re.M)
    return match.group(1) if match else "    "


def with_nvidia_runtime(text: str | None, path: str = "nvidia-container-runtime") -> str | None:
    """The file's new text with the nvidia runtime registered, or None when it already is.

    A registration under the same name that runs another program is somebody's own arrangement and is refused.
    """
    settings = parse(text)
    runtimes = settings.get("runtimes", {})
    if not isinstance(runtimes, dict):
        raise Refusal(
            f"runtimes in {PATH} is not an object", runtimes, "an object by runtime name", f"correct {PATH}"
        )
    present = runtimes.get("nvidia")
    if present is not None:
        program = str(present.get("path", "")) if isinstance(present, dict) else str(present)
        if program.rsplit("/", 1)[-1] != path.rsplit("/", 1)[-1]:
            raise Refusal(
                f"{PATH} registers another program as runtime nvidia",
                program,
                path,
                "remove runtimes.nvidia, or set container_runtime_nvidia_path to that program",
            )
        return None
    merged = dict(settings)
    merged["runtimes"] = {**runtimes, "nvidia": {**NVIDIA_RUNTIME, "path": path}}
    return json.dumps(merged, indent=indentation(text), ensure_ascii=False) + "\n"
