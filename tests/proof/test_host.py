"""The roles of the host on the lab: predicted, applied, kept over a reboot, found and repaired when lost,
taken back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import fault, snapshot
from lab import instance as lab_instance
from lab.config import instance
from tests.proof.prove import ROOT, play, prove_check_mode

pytestmark = pytest.mark.lab

PLAYBOOK, UNDO = "tests/proof/host.yml", "tests/proof/host_undo.yml"
CLOCKS, GUARD = "sparkfleet-gpu-clocks.service", "sparkfleet-guard.service"


def inventory() -> str:
    return str(instance().directory / "inventory")


def on(node: str, *command: str, ok: bool = True) -> str:
    """Output of a command in a node, as root."""
    done = subprocess.run(
        ["docker", "exec", instance().container(node), *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or not ok, f"{node}: {command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def module(node: str, name: str, check: bool = False, **arguments: Any) -> dict[str, Any]:
    """One module call on a node, as Ansible makes it; the result as data, `failed` among it."""
    ansible = str(Path(sys.executable).parent / "ansible")
    command = [
        ansible,
        node,
        "-i",
        inventory(),
        "-b",
        "-m",
        f"sparkfleet.serving.{name}",
        *(["-a", json.dumps(arguments)] if arguments else []),
    ]
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
    }
    done = subprocess.run(
        [*command, *(["--check"] if check else [])],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    head, _, rest = done.stdout.partition("=>")
    found, _end = json.JSONDecoder().raw_decode(rest.strip())
    found["failed"] = "FAILED" in head
    return dict(found)


def clocks(node: str, **arguments: Any) -> dict[str, Any]:
    return module(node, "gpu_clocks", **arguments)


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} within {seconds:g} s"
        time.sleep(0.5)


@pytest.mark.field("B89", "B90")
def test_check_mode_tells_the_truth_on_a_bare_node() -> None:
    play(UNDO, inventory())
    proof = prove_check_mode(
        PLAYBOOK, inventory(), ["-e", "container_runtime_nvidia=true", "-e", "headless_now=true"]
    )
    assert not proof.problems, proof.report()
    assert proof.real is not None and proof.real.changed_count() >= 10, "the lab was not bare"
    assert max(proof.real.record["remote_tasks"].values()) <= 10


def test_a_lie_of_check_mode_is_found() -> None:
    """The proof can fail: a file that nobody announced, put there between two snapshots."""
    before = snapshot.take("spark-2")
    on(
        "spark-2",
        "sh",
        "-c",
        "echo x > /etc/sysctl.d/99-somebody.conf; systemctl enable dgx-dashboard.service; true",
    )
    try:
        after = snapshot.take("spark-2")
    finally:
        on("spark-2", "rm", "/etc/sysctl.d/99-somebody.conf")
    left = snapshot.unexcluded(snapshot.compare(before, after), snapshot.load_rules())
    assert "path /etc/sysctl.d/99-somebody.conf added" in [str(change) for change in left]


@pytest.mark.field("B28", "B33")
def test_the_lock_survives_a_reboot() -> None:
    lab_instance.restart(instance(), "spark-1")
    wait_for(
        lambda: on("spark-1", "systemctl", "is-active", CLOCKS, ok=False) == "active", 60, "the lock at boot"
    )
    result = clocks("spark-1")
    assert not result["changed"] and result["clocks"]["confirmed"] == [0, 2200]
    assert on("spark-1", "systemctl", "get-default") == "multi-user.target"
    assert on("spark-1", "systemctl", "is-active", "display-manager.service", ok=False) != "active"
    assert on("spark-1", "systemctl", "is-active", GUARD) == "active"
    assert on("spark-1", "cat", "/proc/sys/fs/aio-max-nr") == "1048576"


@pytest.mark.field("B27", "B28")
def test_a_lock_that_is_lost_is_found_and_set_again() -> None:
    on("spark-1", "nvidia-smi", "-rgc")  # what a restart of the driver does to it
    result = clocks("spark-1", check=True)
    assert result["changed"] and "the lock is gone" in result["clocks"]["reasons"][0]
    assert clocks("spark-1")["changed"] and not clocks("spark-1")["changed"]

    on("spark-1", "systemctl", "stop", CLOCKS)
    text = 'GPU clocks set to "(gpuClkMin 0, gpuClkMax 2200)" for GPU 0000000F:01:00.0'
    on("spark-1", "systemd-run", "--wait", "--unit", "somebody", "logger", "-t", "nvidia-smi", text)
    assert clocks("spark-1", check=True)["changed"], "a line of somebody else is no evidence"
    assert clocks("spark-1")["changed"]


@pytest.mark.field("B55")
def test_a_driver_that_hangs_does_not_hang_the_run() -> None:
    fault.switch(instance(), "smi-hang", "spark-1")
    try:
        result = clocks("spark-1", check=True)
        assert result["clocks"]["verdict"] == "unknown"
    finally:
        fault.switch(instance(), "smi-hang", "spark-1", on=False)


def test_a_foreign_clock_unit_is_refused_then_taken_over() -> None:
    unit = "\\n".join(
        (
            "[Service]",
            "Type=oneshot",
            "RemainAfterExit=yes",
            "ExecStart=/usr/bin/nvidia-smi -lgc 0,2400",
            "[Install]",
            "WantedBy=multi-user.target",
        )
    )
    name = "spark-gpu-clock-lock.service"
    on(
        "spark-2",
        "sh",
        "-c",
        f"printf '{unit}' > /etc/systemd/system/{name}; systemctl daemon-reload; "
        f"systemctl enable --now {name}",
    )
    try:
        refused = clocks("spark-2")
        assert refused["failed"] and "take_over" in refused["msg"] and "spark-2" in refused["msg"]
        assert clocks("spark-2", foreign="take_over")["clocks"]["confirmed"] == [0, 2200]
        assert on("spark-2", "systemctl", "is-enabled", name, ok=False) == "disabled"
    finally:
        on(
            "spark-2",
            "sh",
            "-c",
            f"systemctl disable --now {name}; rm /etc/systemd/system/{name}; systemctl daemon-reload",
        )


@pytest.mark.field("B44")
def test_the_desktop_off_and_on_again_leaves_docker_alone() -> None:
    docker = on("spark-2", "systemctl", "show", "-p", "MainPID", "docker.service")
    back = module("spark-2", "headless", state="desktop", now=True)
    assert back["changed"] and on("spark-2", "systemctl", "is-active", "graphical.target") == "active"
    off = module("spark-2", "headless", now=True)
    assert off["changed"] and not off["headless"]["desktop_running"]
    assert off["headless"]["holders"][0]["rss_mib"] > 0
    assert not module("spark-2", "headless", now=True)["changed"]
    assert on("spark-2", "systemctl", "show", "-p", "MainPID", "docker.service") == docker
    assert on("spark-2", "systemctl", "is-active", CLOCKS) == "active"
    assert on("spark-2", "systemctl", "is-active", "ssh.service") == "active"


def test_leaving_the_desktop_is_refused_when_it_would_stop_docker() -> None:
    module("spark-2", "headless", state="desktop", now=True)
    on("spark-2", "systemctl", "disable", "docker.service", "docker.socket")
    try:
        refused = module("spark-2", "headless", now=True)
        assert refused["failed"] and "docker.service" in refused["msg"]
        assert on("spark-2", "systemctl", "is-active", "graphical.target") == "active"
    finally:
        on("spark-2", "systemctl", "enable", "docker.service", "docker.socket")
    assert module("spark-2", "headless", now=True)["changed"]


def test_a_guard_that_is_killed_comes_back_and_a_bad_setting_is_visible() -> None:
    pid = on("spark-1", "systemctl", "show", "-p", "MainPID", "--value", GUARD)
    on("spark-1", "kill", "-9", pid)

    def back() -> bool:
        now = on("spark-1", "systemctl", "show", "-p", "MainPID", "--value", GUARD)
        return now not in {"0", pid} and on("spark-1", "systemctl", "is-active", GUARD, ok=False) == "active"

    wait_for(back, 20, "a new guard")
    bad = json.dumps({"defaults": {"redline": 4}})
    on(
        "spark-1",
        "sh",
        "-c",
        f"echo '{bad}' > /etc/sparkfleet/guard.json; systemctl restart --no-block {GUARD}",
    )
    wait_for(
        lambda: on("spark-1", "systemctl", "is-active", GUARD, ok=False) == "failed", 20, "a failed unit"
    )
    assert "unknown settings" in on("spark-1", "journalctl", "-u", GUARD, "-n", "5", "--no-pager")
    assert play(PLAYBOOK, inventory(), extra=["--limit", "spark-1"]).rc == 0
    assert on("spark-1", "systemctl", "is-active", GUARD) == "active"


def test_everything_is_taken_back() -> None:
    proof = prove_check_mode(UNDO, inventory())
    assert not proof.problems, proof.report()
    for node in ("spark-1", "spark-2"):
        assert on(node, "systemctl", "get-default") == "graphical.target"
        assert on(node, "sh", "-c", "ls /etc/systemd/system | grep -E 'sparkfleet-(gpu|guard)' | cat") == ""
