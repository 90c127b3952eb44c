# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Does the engine in the image know the planned command? Asked of its own parser before anything is stopped.

The planned command runs in a container of the image without network, devices and mounts: the model is absent
there, so an engine that took every argument ends by saying that. The exit codes and texts are the profile's
(``image.parser``); those of the native engine were seen by the launcher of its author's other recipe, which asks
the same way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .docker_api import DockerApi
from .host_io import Refusal
from .launch import create_body
from .weights_module import HELPER_LABEL

#: Seconds of silence after which the container is killed: a parser answers at once.
SILENCE = 60.0


def judge(parser: Mapping[str, Any], code: int, text: str) -> str:
    """``accepted``, ``refused`` or ``unclear`` (it ended in a way that the profile does not name)."""
    if code == parser.get("refused") or (parser.get("refusal") and str(parser["refusal"]) in text):
        return "refused"
    if code == parser.get("accepted") and str(parser.get("says", "")) in text:
        return "accepted"
    return "unclear"


def body(launch: Mapping[str, Any], index: int | None) -> dict[str, Any]:
    """The create request: image, command and environment of the rank, and nothing of the host."""
    asked = dict(create_body(launch, index, []))
    asked["Labels"] = {HELPER_LABEL: "parser"}
    asked["HostConfig"] = {"NetworkMode": "none", "CapDrop": ["ALL"], "ReadonlyRootfs": True}
    return asked


def try_command(
    docker: DockerApi, launch: Mapping[str, Any], index: int | None, parser: Mapping[str, Any]
) -> dict[str, str]:
    """``verdict`` and the last line that the engine wrote. Raises ``Refusal`` for a command that it does not take."""
    name = f"sparkfleet-parser-{os.getpid()}"
    code, out, err = docker.run(name, body(launch, index), timeout=SILENCE)
    lines = (out + err).decode("utf-8", "replace").strip().splitlines()
    verdict = judge(parser, code, "\n".join(lines))
    last = lines[-1][-300:] if lines else ""
    if verdict == "refused":
        raise Refusal(
            f"the engine in {launch['container']['image']} does not take the planned command of rank {launch['rank']}",
            f"exit code {code}: {' | '.join(lines[-3:])[-400:]}",
            "a command that its own parser takes",
            "correct ranks_settings or ranks_extra_args, or build the engine commit that has the argument; nothing was "
            "stopped",
        )
    return {"verdict": verdict, "said": f"exit code {code}: {last}"}
