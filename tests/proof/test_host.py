"""The roles of the host on the lab: predicted, applied, kept over a reboot, found and repaired when lost,
taken back."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import fault, snapshot
from lab import instance as lab_instance
from lab.config import instance
from lab.node.meminfo import DESKTOP_USED
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
    found["stderr"] = done.stderr
    return dict(found)


def file(node: str, path: str, text: str) -> None:
    """Write a file of a node, as somebody who works on it would."""
    on(node, "sh", "-c", f"mkdir -p {path.rpartition('/')[0]}; printf '%s' {shlex.quote(text)} > {path}")


@contextmanager
def faulty(name: str, *nodes: str, value: str | None = None) -> Iterator[None]:
    """A fault switch that is on inside the block."""
    for node in nodes:
        fault.switch(instance(), name, node, value=value)
    try:
        yield
    finally:
        for node in nodes:
            fault.switch(instance(), name, node, on=False)


@contextmanager
def rank(node: str) -> Iterator[str]:
    """A container with the labels of a rank of this collection; the value is its id."""
    labels = ["--label", "sparkfleet.install=host-test", "--label", "sparkfleet.replica=host-test"]
    program = ["python3", "-c", "import time; time.sleep(9999)"]
    identity = on(node, "docker", "run", "-d", *labels, "hub.lab:5000/lab/base:1", *program).splitlines()[-1]
    try:
        yield identity
    finally:
        on(node, "docker", "rm", "-f", identity)


def started_at(node: str, container: str) -> str:
    return on(node, "docker", "inspect", "-f", "{{.State.Running}} {{.State.StartedAt}}", container)


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
        on("spark-2", "systemctl", "disable", "dgx-dashboard.service")
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
def test_a_lock_that_no_boot_confirmed_is_found_and_set_again() -> None:
    """No line of this boot, or none of this run of the unit: an older one does not count."""
    on("spark-1", "systemctl", "disable", CLOCKS)
    lab_instance.restart(instance(), "spark-1")
    wait_for(
        lambda: on("spark-1", "systemctl", "is-system-running", ok=False) in {"running", "degraded"},
        60,
        "the end of the boot",
    )
    result = clocks("spark-1", check=True)
    assert result["changed"] and result["clocks"]["confirmed"] is None
    assert result["clocks"]["reasons"] == [
        "the unit is not enabled, so the next boot is unlocked",
        "the unit is inactive",
        "the clock reads 2418 MHz, above the ceiling of 2200: the lock is gone",
    ]
    assert clocks("spark-1")["clocks"]["confirmed"] == [0, 2200] and not clocks("spark-1")["changed"]

    on("spark-1", "sh", "-c", "journalctl -q --rotate && journalctl -q --vacuum-time=1s")
    result = clocks("spark-1", check=True)
    assert result["clocks"]["reasons"] == ["the journal holds no confirmation of this run of the unit"]
    assert clocks("spark-1")["changed"] and not clocks("spark-1")["changed"]


@pytest.mark.field("B27")
def test_a_foreign_line_in_the_journal_is_no_evidence() -> None:
    """Neither one of another unit, nor one that names our unit in the fields that anybody may set."""
    on("spark-1", "systemctl", "stop", CLOCKS)
    text = 'GPU clocks set to "(gpuClkMin 0, gpuClkMax 2200)" for GPU 0000000F:01:00.0'
    on("spark-1", "systemd-run", "--wait", "--unit", "somebody", "logger", "-t", "nvidia-smi", text)
    forged = f"MESSAGE={text}\nOBJECT_SYSTEMD_UNIT={CLOCKS}\nSYSLOG_IDENTIFIER=nvidia-smi\n"
    on("spark-1", "sh", "-c", f"printf '%s' {shlex.quote(forged)} | logger --journald")
    assert text in on("spark-1", "journalctl", "-b", "-u", CLOCKS, "-o", "cat", "--no-pager"), (
        "the forged line would fool `journalctl -u`"
    )
    result = clocks("spark-1", check=True)
    assert result["changed"] and result["clocks"]["confirmed"] is None
    assert clocks("spark-1")["changed"] and not clocks("spark-1")["changed"]


@pytest.mark.field("B27", "B28")
def test_a_clock_under_load_proves_the_lock_or_its_loss() -> None:
    with faulty("gpu-load", "spark-1"):
        result = clocks("spark-1")
        assert not result["changed"] and result["clocks"]["verdict"] == "in_force"
        assert result["clocks"]["reading"]["sm_mhz"] == 2184
        assert result["clocks"]["reading"]["load_percent"] == 96
        fault.switch(instance(), "driver-restart", "spark-1")
        result = clocks("spark-1", check=True)
        assert result["changed"] and result["clocks"]["verdict"] == "lost"
        assert result["clocks"]["reasons"] == [
            "the clock reads 2496 MHz, above the ceiling of 2200: the lock is gone"
        ]
        assert result["clocks"]["confirmed"] == [0, 2200], "the unit and its line still say that all is well"
        result = clocks("spark-1")
        assert result["changed"] and result["clocks"]["verdict"] == "in_force"
        assert not clocks("spark-1")["changed"]
    with faulty("gpu-load", "spark-1", value="2250,55.10"):
        assert not clocks("spark-1")["changed"], "the last clock that a lock of 2200 leaves"
    with faulty("gpu-load", "spark-1", value="2251,55.10"):
        assert clocks("spark-1", check=True)["clocks"]["verdict"] == "lost"
        refused = clocks("spark-1")
        assert refused["failed"] and "was set and does not hold" in refused["msg"], "set again, in vain"
    assert clocks("spark-1", check=True)["clocks"]["verdict"] == "unproven", "an idle clock proves nothing"
    assert not clocks("spark-1")["changed"]


@pytest.mark.field("B31")
def test_a_stuck_low_power_state_is_named_with_its_only_cure() -> None:
    with faulty("low-power", "spark-2"):
        assert clocks("spark-2")["clocks"]["verdict"] == "unproven", "an idle clock proves nothing"
        with faulty("gpu-load", "spark-2"):
            result = clocks("spark-2")
    assert result["clocks"]["verdict"] == "low_power" and not result["changed"], "the lock is not blamed"
    assert (result["clocks"]["reading"]["sm_mhz"], result["clocks"]["reading"]["power_w"]) == (611, 13.02)
    said = " ".join((result["stderr"] + json.dumps(result)).split())
    assert "low-power state" in said and "pull the power brick and every USB-C cable" in said


@pytest.mark.field("B28")
def test_clocks_of_a_pair_under_load_are_compared() -> None:
    with faulty("gpu-load", "spark-1"), faulty("gpu-load", "spark-2", value="2150,50.1"):
        run = play("tests/proof/clocks.yml", inventory())
    assert run.rc != 0 and "clocks under load differ by more than 30 MHz" in " ".join(run.output.split())
    with faulty("gpu-load", "spark-1"), faulty("gpu-load", "spark-2", value="2160,50.1"):
        run = play("tests/proof/clocks.yml", inventory())
    assert run.rc == 0 and run.changed_count() == 0, run.output[-2000:]
    run = play(
        "tests/proof/clocks.yml",
        inventory(),
        extra=["-e", '{"gpu_clocks_max_mhz": "{{ 2200 if inventory_hostname == \'spark-1\' else 1800 }}"}'],
    )
    assert run.rc != 0 and "ceilings differ: spark-1 2200 MHz, spark-2 1800 MHz" in " ".join(
        run.output.split()
    )
    assert play("tests/proof/clocks.yml", inventory()).rc == 0


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


LIGHTDM = """[Unit]
Description=Light Display Manager
[Service]
ExecStart=/usr/bin/sleep infinity
RuntimeDirectory=gdm
[Install]
Alias=display-manager.service
"""


@pytest.fixture(params=["gdm", "lightdm"])
def display(request: pytest.FixtureRequest) -> Iterator[str]:
    """spark-2 with this display manager as its own; gdm again afterwards."""
    unit = f"{request.param}.service"
    if request.param == "lightdm":
        file("spark-2", f"/etc/systemd/system/{unit}", LIGHTDM)
        on("spark-2", "systemctl", "daemon-reload")
        on("spark-2", "systemctl", "disable", "--now", "gdm.service")
        on("spark-2", "systemctl", "enable", unit)
    yield unit
    if request.param == "lightdm":
        on("spark-2", "systemctl", "disable", "--now", unit)
        on("spark-2", "rm", f"/etc/systemd/system/{unit}")
        on("spark-2", "systemctl", "daemon-reload")
        on("spark-2", "systemctl", "enable", "gdm.service")


@pytest.mark.field("B44")
def test_the_desktop_off_and_on_again_leaves_docker_and_ranks_alone(display: str) -> None:
    docker = on("spark-2", "systemctl", "show", "-p", "MainPID", "docker.service")
    with rank("spark-2") as container:
        since = started_at("spark-2", container)
        back = module("spark-2", "headless", state="desktop", now=True)
        assert back["changed"] and on("spark-2", "systemctl", "is-active", "graphical.target") == "active"
        assert on("spark-2", "systemctl", "is-active", display) == "active"
        off = module("spark-2", "headless", now=True)
        assert off["changed"] and not off["headless"]["desktop_running"]
        assert off["headless"]["freed_bytes"] == DESKTOP_USED * 1024, "what /proc/meminfo really got back"
        sizes = [row["rss_mib"] + row["gpu_mib"] for row in off["headless"]["holders"]]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0
        assert "dockerd" in [row["name"] for row in off["headless"]["holders"]]
        again = module("spark-2", "headless", now=True)
        assert not again["changed"] and again["headless"]["freed_bytes"] == 0
        assert started_at("spark-2", container) == since
    assert on("spark-2", "systemctl", "is-active", display, ok=False) != "active"
    assert on("spark-2", "test", "-f", "/etc/systemd/system/gdm.service") == "", "nothing is removed"
    assert on("spark-2", "systemctl", "show", "-p", "MainPID", "docker.service") == docker
    assert on("spark-2", "systemctl", "is-active", CLOCKS) == "active"
    assert on("spark-2", "systemctl", "is-active", "ssh.service") == "active"


@pytest.mark.field("B44")
def test_units_to_stop_are_opt_in_and_come_back_with_the_desktop() -> None:
    """host.yml stops dgx-dashboard; its sibling, which nobody named, runs on."""
    named, other = "dgx-dashboard.service", "dgx-dashboard-admin.service"
    assert on("spark-2", "systemctl", "is-active", named, ok=False) == "inactive"
    assert on("spark-2", "systemctl", "is-active", other) == "active"
    assert not module("spark-2", "headless", stop_units=[named, "not-installed.service"])["changed"]
    for needed in ("docker.service", "ssh.service", "sparkfleet-guard.service"):
        refused = module("spark-2", "headless", stop_units=[named, needed])
        assert refused["failed"] and needed in refused["msg"]
        assert on("spark-2", "systemctl", "is-active", needed) == "active"
    assert module("spark-2", "headless", state="desktop", stop_units=[named])["changed"]
    assert on("spark-2", "systemctl", "is-active", named) == "active"
    assert on("spark-2", "systemctl", "is-enabled", named) == "enabled"
    assert module("spark-2", "headless", stop_units=[named])["changed"]


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


DAEMON = "/etc/docker/daemon.json"


@pytest.fixture
def engine() -> Iterator[dict[str, Any]]:
    """spark-2's settings of Docker with keys of others and without the nvidia runtime; put back after."""
    before = on("spark-2", "cat", DAEMON)
    settings = json.loads(before)
    settings.get("runtimes", {}).pop("nvidia", None)
    settings = {"max-concurrent-uploads": 3, **settings, "labels": ["rack=7"]}
    settings["runtimes"] = {"theirs": {"path": "/usr/sbin/runc"}, **settings.get("runtimes", {})}
    file("spark-2", DAEMON, json.dumps(settings, indent=4))
    on("spark-2", "systemctl", "reload", "docker.service")
    wait_for(lambda: "nvidia" not in runtimes(), 10, "Docker without the runtime")
    yield settings
    file("spark-2", DAEMON, before)
    on("spark-2", "systemctl", "reload", "docker.service")


def runtimes() -> list[str]:
    return list(json.loads(on("spark-2", "docker", "info", "-f", "{{json .Runtimes}}")))


def docker_pid() -> str:
    return on("spark-2", "systemctl", "show", "-p", "MainPID", "--value", "docker.service")


@pytest.mark.field("B73")
def test_the_nvidia_runtime_is_merged_and_taken_by_a_reload(engine: dict[str, Any]) -> None:
    pid = docker_pid()
    with rank("spark-2") as container:
        since = started_at("spark-2", container)
        assert not module("spark-2", "container_runtime")["changed"], "nobody asked for it"
        result = module("spark-2", "container_runtime", nvidia_runtime=True)
        assert result["changed"] and "nvidia" in result["runtime"]["runtimes"], result
        assert started_at("spark-2", container) == since and docker_pid() == pid, "no restart"
    settings = json.loads(on("spark-2", "cat", DAEMON))
    theirs = settings["runtimes"].pop("nvidia")
    assert theirs == {"path": "nvidia-container-runtime", "runtimeArgs": []} or "path" in theirs
    assert settings == engine and list(settings) == list(engine), "keys of others survive in their order"
    assert not module("spark-2", "container_runtime", nvidia_runtime=True)["changed"]
    assert (result["runtime"]["store"], result["runtime"]["os"]) == ("containerd", "linux")
    assert result["runtime"]["architecture"] in {"arm64", "amd64"}


@pytest.mark.field("B73")
def test_settings_that_docker_cannot_read_are_refused_and_left(engine: dict[str, Any]) -> None:
    pid = docker_pid()
    for broken in ('{"runtimes": {', '["a list"]', '{"runtimes": []}'):
        file("spark-2", DAEMON, broken)
        refused = module("spark-2", "container_runtime", nvidia_runtime=True)
        assert refused["failed"] and DAEMON in refused["msg"], refused
        assert on("spark-2", "cat", DAEMON) == broken
    assert docker_pid() == pid and "nvidia" not in runtimes()


@pytest.mark.field("B73")
def test_docker_is_not_restarted_under_a_rank(engine: dict[str, Any]) -> None:
    """A Docker whose reload does not take the runtime: allowed to restart, and only when nothing runs."""
    drop_in = "/etc/systemd/system/docker.service.d/test.conf"
    file("spark-2", drop_in, "[Service]\nExecReload=\nExecReload=/bin/true\n")
    on("spark-2", "systemctl", "daemon-reload")
    pid = docker_pid()
    try:
        with rank("spark-2") as container:
            since = started_at("spark-2", container)
            for allowed in (False, True):
                refused = module("spark-2", "container_runtime", nvidia_runtime=True, allow_restart=allowed)
                assert refused["failed"], refused
            assert started_at("spark-2", container) == since and docker_pid() == pid
        result = module("spark-2", "container_runtime", nvidia_runtime=True, allow_restart=True)
        assert "nvidia" in result["runtime"]["runtimes"] and docker_pid() != pid
    finally:
        on("spark-2", "rm", "-f", drop_in)
        on("spark-2", "systemctl", "daemon-reload")


@pytest.mark.field("B72")
def test_members_of_the_docker_group_are_opt_in() -> None:
    on("spark-2", "useradd", "--no-create-home", "tester")
    try:
        before = on("spark-2", "getent", "group", "docker")
        assert not module("spark-2", "container_runtime")["changed"]
        predicted = module("spark-2", "container_runtime", check=True, users=["tester"])
        assert predicted["changed"] and on("spark-2", "getent", "group", "docker") == before
        assert module("spark-2", "container_runtime", users=["tester"])["changed"]
        members = on("spark-2", "getent", "group", "docker").rpartition(":")[2].split(",")
        assert "tester" in members and set(before.rpartition(":")[2].split(",")) - {""} <= set(members)
        assert not module("spark-2", "container_runtime", users=["tester"])["changed"]
        assert not module("spark-2", "container_runtime", users=[])["changed"], "nobody is ever removed"
        refused = module("spark-2", "container_runtime", users=["nobody-of-that-name"])
        assert refused["failed"] and "nobody-of-that-name" in refused["msg"]
    finally:
        on("spark-2", "userdel", "tester")


@pytest.mark.field("B38")
def test_the_page_cache_is_given_back_only_where_it_is_in_the_way() -> None:
    drop = "/proc/sys/vm/drop_caches"
    before = on("spark-2", "cat", drop)
    result = module("spark-2", "page_cache", min_free_gib=104)
    assert (result["dropped"], result["why"]) == (False, "enough is free")
    with faulty("sink-memory", "spark-2", value="60"):
        with rank("spark-2"):
            result = module("spark-2", "page_cache", min_free_gib=104)
            assert (result["dropped"], result["why"]) == (False, "a rank runs")
        assert module("spark-2", "page_cache", check=True, min_free_gib=104)["dropped"]
        assert on("spark-2", "cat", drop) == before
        result = module("spark-2", "page_cache", min_free_gib=104)
        assert result["dropped"] and not result["changed"]
    assert on("spark-2", "cat", drop) == "3"


@pytest.mark.field("B49", "B52")
def test_holds_of_the_owner_are_not_lifted() -> None:
    ours = set(on("spark-2", "apt-mark", "showhold").split())
    assert ours, "host.yml holds what it found"
    free = next(name for name in ("tar", "gzip") if name not in ours)
    on("spark-2", "apt-mark", "hold", free)
    try:
        defaults = yaml.safe_load((ROOT / "roles/package_holds/defaults/main.yml").read_text())
        patterns = [*defaults["package_holds_patterns"], free]
        kept = module("spark-2", "package_holds", patterns=patterns)["holds"]
        assert set(kept["ours"]) == ours and kept["others"] == [free]
        lifted = module("spark-2", "package_holds", state="released")
        assert lifted["changed"], lifted
        assert on("spark-2", "apt-mark", "showhold").split() == [free], "ours are lifted, theirs is not"
    finally:
        on("spark-2", "apt-mark", "unhold", free)
    assert play(PLAYBOOK, inventory(), extra=["--limit", "spark-2"]).rc == 0
    assert set(on("spark-2", "apt-mark", "showhold").split()) == ours


def guarded(killers: str, check: bool = False, refused: bool = False) -> dict[str, Any]:
    """The guard of spark-1 as it is, with another policy for killers, which must do or refuse."""
    settings = json.loads(on("spark-1", "cat", "/etc/sparkfleet/guard.json"))
    agent = on(
        "spark-1", "sed", "-n", "s/^ExecStart=\\([^ ]*\\) guard$/\\1/p", f"/etc/systemd/system/{GUARD}"
    )
    found = module(
        "spark-1",
        "guard",
        check=check,
        agent=agent,
        defaults=settings["defaults"],
        replicas=settings["replicas"],
        records=settings["records_dir"],
        killers=killers,
    )
    assert found["failed"] == refused, found
    return found


@contextmanager
def stub(name: str, arguments: str = "", **more: str) -> Iterator[str]:
    """An active unit of somebody else on spark-1 that ends processes for memory, with files of its own."""
    program = "/usr/local/lib/killer.py"
    files = {
        program: "import time; time.sleep(99999)\n",
        f"/etc/systemd/system/{name}": f"[Service]\nExecStart=/usr/bin/python3 {program}{arguments}\n"
        "[Install]\nWantedBy=multi-user.target\n",
        **more,
    }
    for path, text in files.items():
        file("spark-1", path, text)
    on("spark-1", "systemctl", "daemon-reload")
    on("spark-1", "systemctl", "enable", "--now", name)
    try:
        yield name
        for path, text in files.items():
            assert on("spark-1", "cat", path) == text.strip(), f"{path} is somebody else's"
    finally:
        on("spark-1", "systemctl", "disable", "--now", name, ok=False)
        on("spark-1", "rm", "-f", *files)
        on("spark-1", "systemctl", "daemon-reload")


@pytest.mark.field("B41")
def test_earlyoom_above_the_redline_is_refused_reported_adjusted_or_disabled() -> None:
    path = "/etc/systemd/system/earlyoom.service.d/50-sparkfleet.conf"
    with stub("earlyoom.service", " -r 3600 --avoid (^|/)(sshd|100%%)$$") as unit:
        refused = guarded("refuse", refused=True)
        assert "acts at 12.2 GiB, before the redline of 4 GiB" in refused["msg"]
        assert guarded("report")["guard"]["killers"][0]["unit"] == unit
        predicted = guarded("adjust", check=True)
        assert predicted["changed"] and on("spark-1", "ls", path, ok=False) != path
        pid = on("spark-1", "systemctl", "show", "-p", "MainPID", "--value", unit)
        assert guarded("adjust")["changed"]
        command = on(
            "spark-1", "sh", "-c", f"tr '\\0' ' ' < /proc/$(systemctl show -p MainPID --value {unit})/cmdline"
        )
        assert command.endswith("-r 3600 --avoid (^|/)(sshd|100%)$ -M 2097152,1048576")
        assert on("spark-1", "systemctl", "show", "-p", "MainPID", "--value", unit) != pid
        for policy in ("adjust", "refuse"):
            found = guarded(policy)
            assert not found["changed"] and found["guard"]["killers"] == [
                {"unit": unit, "floor_gib": 2.0, "conflict": ""}
            ]
        assert guarded("report")["changed"], "its own command line again"
        assert on("spark-1", "ls", "/etc/systemd/system", ok=False).count("earlyoom.service.d") == 0
        assert guarded("disable")["changed"]
        assert on("spark-1", "systemctl", "is-active", unit, ok=False) == "inactive"
        assert not guarded("disable")["changed"]
    with stub("earlyoom.service", " -m 2,1"):
        assert not guarded("refuse")["changed"], "a floor under the redline is the last backstop"


@pytest.mark.field("B41")
def test_other_killers_are_found_and_judged_by_what_they_may_end() -> None:
    with stub("dgx-anti-oom.service"):
        for policy in ("refuse", "adjust"):
            refused = guarded(policy, refused=True)
            assert "dgx-anti-oom.service ends processes by rules of its own" in refused["msg"]
        assert not guarded("report")["changed"]
        assert on("spark-1", "systemctl", "is-active", "dgx-anti-oom.service") == "active"
    theirs = "/etc/systemd/system/system.slice.d/10-theirs.conf"
    with stub("systemd-oomd.service"):
        assert not guarded("refuse")["changed"], "it may kill nothing above the ranks"
    with stub("systemd-oomd.service", **{theirs: "[Slice]\nManagedOOMMemoryPressure=kill\n"}):
        refused = guarded("refuse", refused=True)
        assert "may kill in system.slice, where ranks run" in refused["msg"]
        assert guarded("adjust")["changed"] and not guarded("adjust")["changed"]
        shown = on(
            "spark-1", "systemctl", "show", "-p", "ManagedOOMMemoryPressure", "--value", "system.slice"
        )
        assert shown == "auto"
        assert guarded("report")["changed"]
        assert on("spark-1", "ls", "/etc/systemd/system/system.slice.d") == "10-theirs.conf"
    assert not guarded("refuse")["changed"]


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
