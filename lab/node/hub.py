"""The lab's hub container: Debian's docker-registry on port 5000, the Hugging Face Hub stand-in on 8080, git on 9418.

The registry starts from a copy of the cached seed (the base image of the lab engine). The Hub stand-in is
``lab/hub/server.py``; it serves the small repositories that ``lab/checkpoint`` generates into ``/srv/hub``. ``git://HUB/kit``
has the kernel kit as its git repository has it: one commit of the folder ``kit``.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from ..checkpoint.repos import GIT_KIT

REGISTRY = Path("/var/lib/docker-registry")
SEED = Path("/seed/docker-registry")
HUB_ROOT = Path("/srv/hub")
GIT_ROOT = Path("/srv/git")
SERVER = Path("/usr/lib/python3/dist-packages/lab/hub/server.py")
CONFIG = """\
version: 0.1
log: {level: warn, accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: /var/lib/docker-registry}
  delete: {enabled: true}
http: {addr: ":5000", headers: {X-Content-Type-Options: [nosniff]}}
"""


def publish_kit() -> None:
    """Make the git repository. Author and time are fixed, so the commit id follows from the files alone."""
    source = next(path for path in (HUB_ROOT / GIT_KIT).iterdir() if (path / "kit").is_dir())
    repo = GIT_ROOT / "kit"
    shutil.rmtree(repo, ignore_errors=True)
    shutil.copytree(source, repo)
    who = {"NAME": "lab", "EMAIL": "lab@localhost", "DATE": "2026-10-17T00:00:00Z"}
    environment = {
        f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()
    }
    for words in (
        ["init", "--initial-branch=main"],
        ["add", "--all"],
        ["commit", "--message", "The kernel kit"],
    ):
        subprocess.run(
            ["/usr/bin/git", *words], cwd=repo, env=environment, check=True, stdout=subprocess.DEVNULL
        )


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
        publish_kit()
        commands.append(["/usr/bin/git", "daemon", f"--base-path={GIT_ROOT}", "--export-all"])
    children = [subprocess.Popen(command) for command in commands]

    def stop(_number: int, _frame: FrameType | None) -> None:
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
