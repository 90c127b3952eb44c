"""A token is planted, used, and then searched for everywhere that a person or a program could read."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest

from lab.config import NODES
from tests.site.conftest import Lab

pytestmark = pytest.mark.lab

TOKEN = "hf_CanaryThatSingsWhenItIsSeen0123456789"
KEY = "key-CanaryOfTheApi-0123456789"
REPO = "lab/kit"

# Command lines and environments of all processes of the node, as root sees them; one line a process.
WATCH = r"""
import pathlib, sys, time
needles = [text.encode() for text in sys.argv[1:]]
me = pathlib.Path("/proc/self").resolve()
end = time.time() + float(120)
while time.time() < end and not pathlib.Path("/run/lab-watch-stop").exists():
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        if process == me:
            continue
        try:
            argv = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"lab-watch" in argv:
            continue
        for needle in needles:
            if needle in argv:
                print("argv", argv.replace(b"\0", b" ").decode(errors="replace"), flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def gated(lab: Lab):  # type: ignore[no-untyped-def]
    """The Hub lets nobody see the kit without the token."""
    hub = lab.instance.container("hub")

    def control(document: dict[str, object]) -> None:
        text = json.dumps(document)
        subprocess.run(
            ["docker", "exec", "-i", hub, "sh", "-c", "cat > /srv/hub/.control.json"],
            input=text,
            text=True,
            check=True,
        )

    control({"tokens": {TOKEN: [REPO]}, "gated": [REPO]})
    yield
    control({})


def test_the_canary(lab: Lab, tmp_path: Path, gated: None) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    for node in NODES:
        lab.on(node, "sh", "-c", "rm -rf /var/lib/sparkfleet/kit; rm -f /run/lab-watch-stop; true")

    seen: dict[str, str] = {}

    def watch(node: str) -> None:
        seen[node] = lab.on(node, "python3", "-c", WATCH, TOKEN, KEY, "lab-watch")

    threads = [threading.Thread(target=watch, args=(node,)) for node in NODES]
    for thread in threads:
        thread.start()
    try:
        refused = lab.play("site.yml", "-e", "sparkfleet_hub_token_file=")
        assert refused.returncode != 0 and "401" in refused.stdout + refused.stderr, refused.stdout[-2000:]
        done = lab.play(
            "site.yml",
            "--diff",
            "-vvv",
            "-e",
            f"sparkfleet_hub_token_file={token}",
            "-e",
            f"ranks_api_key={KEY}",
        )
    finally:
        for node in NODES:
            lab.on(node, "touch", "/run/lab-watch-stop")
        for thread in threads:
            thread.join()
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    # The key that was given on this command line stands there, and nowhere else.
    lines = [
        line
        for line in output.splitlines()
        if TOKEN in line or (KEY in line and "ansible-playbook" not in line)
    ]
    assert lines == []
    assert {node: text for node, text in seen.items() if text} == {}

    for node in NODES:
        places = "/etc /var/lib/sparkfleet /var/log /tmp /var/tmp /home /root /run/sparkfleet"
        found = lab.on(node, "sh", "-c", f"grep -rlsF -e {TOKEN} -e {KEY} {places} | cat").splitlines()
        readable = [path for path in found if lab.on(node, "stat", "-c", "%a", path) != "600"]
        assert readable == [] and all(TOKEN not in lab.on(node, "cat", path) for path in found), found
        for text in (
            lab.on(node, "sh", "-c", "docker ps -aq | xargs -r docker inspect"),
            lab.on(node, "journalctl", "--no-pager"),
            lab.on(node, "sh", "-c", "docker images -q | sort -u | xargs -r -n 1 docker history --no-trunc"),
        ):
            assert TOKEN not in text and KEY not in text


def test_without_the_key_nobody_is_answered(lab: Lab) -> None:
    """The run above gave the replica a key; the next one, without it, takes it away again."""
    from openai import AuthenticationError

    with pytest.raises(AuthenticationError):
        lab.ask()
    done = lab.play("site.yml")
    assert done.returncode == 0, done.stdout[-3000:]
    assert lab.ask()
