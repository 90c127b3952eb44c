# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Tools that come with the engine or its kit, run in a container of the engine image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .docker_api import DockerApi, DockerNotFound
from .tree import TreeError
from .weights_module import HELPER_LABEL


class EngineTools:
    """Runs one tool at a time in a read-only container that sees nothing but its binds."""

    def __init__(self, docker_socket: str, image: str) -> None:
        self._api = DockerApi(docker_socket)
        self._image = image

    def has_image(self) -> bool:
        """The engine image is here."""
        try:
            self._api.image_inspect(self._image)
        except DockerNotFound:
            return False
        return True

    def need_image(self) -> None:
        """Refuse when the engine image is not here."""
        if not self.has_image():
            raise TreeError(
                f"the engine image {self._image or '(none named)'} is not on this node; run the image role first"
            )

    def run(
        self,
        purpose: str,
        argv: Sequence[str],
        binds: Sequence[str],
        hear: Callable[[int, bytes], None] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        network: str = "none",
    ) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of one tool. A leftover of a dead run by this name is replaced."""
        name = f"sparkfleet-{purpose}"
        self._api.container_remove(name, force=True)
        spec: dict[str, Any] = {
            "Image": self._image,
            "Entrypoint": list(argv[:1]),
            "Cmd": list(argv[1:]),
            "User": "0:0",
            "Env": [f"{key}={value}" for key, value in (environment or {}).items()],
            "Labels": {HELPER_LABEL: purpose},
            "HostConfig": {
                "NetworkMode": network,
                "Binds": list(binds),
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "ReadonlyRootfs": True,
                "Tmpfs": {"/tmp": "rw,mode=1777"},  # noqa: S108 - inside the container
            },
        }
        code, out, err = self._api.run(name, spec, hear)
        return code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
