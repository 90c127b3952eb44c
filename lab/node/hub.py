"""The lab's hub container: Debian's docker-registry on port 5000, the Hugging Face Hub stand-in on 8080.

The registry starts from a copy of the cached seed (the base image of the lab engine). The Hub stand-in is
``lab/hub/server.py``; it serves the small repositories that ``lab/checkpoint`` generates into ``/srv/hub``.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

REGISTRY = Path("/var/lib/docker-registry")
SEED = Path("/seed/docker-registry")
HUB_ROOT = Path("/srv/hub")
SERVER = Path("/usr/lib/python3/dist-packages/lab/hub/server.py")
CONFIG = """\
version: 0.1
log: {level: warn, accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: /var/lib/docker-registry}
  delete: {enabled: true}
http: {addr: ":5000", headers: {X-Content-Type-Options: [nosniff]}}
"""


def main() -> None:
    HUB_ROOT.mkdir(parents=True, exist_ok=True)
    REGISTRY.mkdir(parents=True, exist_ok=True)
    if SEED.is_dir() and not any(REGISTRY.iterdir()):
        shutil.copytree(SEED, REGISTRY, dirs_exist_ok=True)
    config = Path("/run/docker-registry.yml")
    config.write_text(CONFIG, encoding="utf-8")
    commands = [["/usr/bin/docker-registry", "serve", str(config)]]
    # The registry's seed is filled by a container of this image that serves no models.
    if SEED.is_dir():
        subprocess.run(
            [sys.executable, "-m", "lab.checkpoint", str(HUB_ROOT)], check=True, stdout=subprocess.DEVNULL
        )
        commands.append([sys.executable, str(SERVER), "--root", str(HUB_ROOT), "--port", "8080"])
    children = [subprocess.Popen(command) for command in commands]

    def stop(_number: int, _frame: FrameType | None) -> None:
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
