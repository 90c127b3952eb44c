"""The guard's unit and settings, and its neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.module_utils import guard_setup
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.memory_guard import Policy

from tests.unit.fake_host import FakeHost, fixture

AGENT = "/usr/local/lib/sparkfleet/1/sparkfleet-node"


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.write("/proc/meminfo", fixture("mem-meminfo-short-a.txt"))
    host.answers[(AGENT, "guard")] = guard_setup_answer()
    return host


def guard_setup_answer() -> Any:
    from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Answer

    return Answer(0, "", "")


def ensure(host: FakeHost, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "present": True,
        "agent": AGENT,
        "defaults": {"redline_gib": 4.0},
        "replicas": {},
        "killers": "refuse",
        "check": False,
    }
    return guard_setup.ensure(host, **{**defaults, **options})


def test_installed_once(host: FakeHost) -> None:
    predicted = ensure(host, check=True)
    assert predicted["changed"] and host.changing_calls() == [] and not host.exists(guard_setup.UNIT_PATH)
    real = ensure(host)
    assert real["guard"]["active"] and real["guard"]["enabled"]
    assert [d["after_header"] for d in predicted["diff"]] == [d["after_header"] for d in real["diff"]]
    assert not ensure(host)["changed"]


def test_new_settings_restart_it(host: FakeHost) -> None:
    ensure(host)
    runs = host.runs
    assert ensure(host, defaults={"redline_gib": 5.0})["changed"] and host.runs == runs + 1
    assert json.loads(host.read(guard_setup.CONFIG_PATH) or "")["defaults"] == {"redline_gib": 5.0}


def test_a_dead_guard_is_started_again(host: FakeHost) -> None:
    ensure(host)
    host.units[guard_setup.UNIT]["ActiveState"] = "failed"
    assert ensure(host)["changed"] and host.units[guard_setup.UNIT]["ActiveState"] == "active"


def test_settings_are_refused_before_anything_is_written(host: FakeHost) -> None:
    with pytest.raises(Refusal, match="do not make sense"):
        ensure(host, replicas={"pair-1": {"redline_gib": 1}})
    assert not host.exists(guard_setup.CONFIG_PATH) and not host.exists(guard_setup.UNIT_PATH)


def test_absent(host: FakeHost) -> None:
    ensure(host)
    assert ensure(host, present=False)["changed"]
    assert (
        not host.exists(guard_setup.UNIT_PATH) and host.units[guard_setup.UNIT]["UnitFileState"] == "disabled"
    )


@pytest.mark.field("B41")
@pytest.mark.parametrize("arguments", ["-r 60", "-m 2,1"])
def test_earlyoom_is_refused_reported_or_disabled_by_its_floor(host: FakeHost, arguments: str) -> None:
    host.unit("earlyoom.service", ActiveState="active", UnitFileState="enabled", MainPID="77")
    host.write("/proc/77/cmdline", "/usr/bin/earlyoom\0" + arguments.replace(" ", "\0") + "\0")
    if arguments == "-m 2,1":
        assert not ensure(host)["warnings"]
        assert host.units["earlyoom.service"]["ActiveState"] == "active"
        return
    with pytest.raises(Refusal, match="by other rules"):
        ensure(host)
    assert "before the redline" in ensure(host, killers="report")["warnings"][0]
    assert ensure(host, killers="disable")["changed"]
    assert (
        host.units["earlyoom.service"] | {"ActiveState": "inactive", "UnitFileState": "disabled"}
        == host.units["earlyoom.service"]
    )
    assert not ensure(host, killers="disable")["changed"]


@pytest.mark.field("B41")
def test_earlyoom_is_adjusted_by_a_drop_in_and_given_back(host: FakeHost) -> None:
    argv = ["/usr/bin/earlyoom", "-r", "3600", "--avoid", "(^|/)(init|sshd|100%)$"]
    host.unit("earlyoom.service", ActiveState="active", UnitFileState="enabled", MainPID="77")
    host.write("/etc/default/earlyoom", 'EARLYOOM_ARGS="-r 3600"\n')
    host.write("/proc/77/cmdline", "\0".join(argv) + "\0")
    path = "/etc/systemd/system/earlyoom.service.d/50-sparkfleet.conf"

    def restarted(_words: Any) -> Any:
        text = host.read(path)
        mine = [*argv, "-M", "2097152,1048576"] if text else argv
        host.write("/proc/77/cmdline", "\0".join(mine) + "\0")
        return guard_setup_answer()

    host.answers[("systemctl", "try-restart", "earlyoom.service")] = restarted
    predicted = ensure(host, killers="adjust", check=True)
    assert predicted["changed"] and not host.exists(path)
    real = ensure(host, killers="adjust")
    assert [d["after_header"] for d in predicted["diff"]] == [d["after_header"] for d in real["diff"]]
    assert host.read(path) == (
        "# Written by sparkfleet.serving (guard_killers: adjust); removed with guard_state: absent.\n"
        '[Service]\nExecStart=\nExecStart="/usr/bin/earlyoom" "-r" "3600" "--avoid" '
        '"(^|/)(init|sshd|100%%)$$" "-M" "2097152,1048576"\n'
    )
    for policy in ("adjust", "refuse"):
        assert not ensure(host, killers=policy)["changed"], "it stays adjusted"
    ensure(host, present=False)
    assert not host.exists(path) and (host.read("/proc/77/cmdline") or "").split("\0")[:-1] == argv
    assert host.read("/etc/default/earlyoom") == 'EARLYOOM_ARGS="-r 3600"\n'
    assert not ensure(host, present=False)["changed"]


@pytest.mark.field("B41")
@pytest.mark.parametrize("comes", [True, False])
def test_an_adjusted_killer_is_judged_when_its_program_is_there(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """systemd says active before the new program runs: the first look finds no command line."""
    argv = ["/usr/bin/earlyoom", "-r", "3600"]
    host.unit("earlyoom.service", ActiveState="active", UnitFileState="enabled", MainPID="77")
    host.write("/proc/77/cmdline", "\0".join(argv) + "\0")
    looks = []

    def restarted(_words: Any) -> Any:
        host.write("/proc/77/cmdline", "")
        return guard_setup_answer()

    def later(_seconds: float) -> None:
        looks.append(1)
        if comes and len(looks) == 3:
            host.write("/proc/77/cmdline", "\0".join([*argv, "-M", "2097152,1048576"]) + "\0")

    host.answers[("systemctl", "try-restart", "earlyoom.service")] = restarted
    monkeypatch.setattr("time.sleep", later)
    if comes:
        assert ensure(host, killers="adjust")["guard"]["killers"][0]["floor_gib"] == 2.0
        assert len(looks) == 3
    else:
        monkeypatch.setattr(guard_setup, "ADJUSTED_WAIT_S", 0.05)
        with pytest.raises(Refusal, match="by other rules"):
            ensure(host, killers="adjust")


@pytest.mark.field("B41")
def test_oomd_loses_the_right_to_kill_above_the_ranks(host: FakeHost) -> None:
    host.unit("systemd-oomd.service", ActiveState="active", UnitFileState="enabled", MainPID="78")
    slices = "/etc/systemd/system/system.slice.d"
    host.write(f"{slices}/10-theirs.conf", "[Slice]\nManagedOOMSwap=kill\n")

    def show(words: Any) -> Any:
        ours = host.exists(f"{slices}/50-sparkfleet.conf")
        mode = "kill" if words[-1] == "system.slice" and not ours else "auto"
        return guard_setup_answer()._replace(out=f"ManagedOOMSwap={mode}\n")

    host.answers[("systemctl", "show", "-p", "ManagedOOMSwap,ManagedOOMMemoryPressure")] = show
    with pytest.raises(Refusal) as refused:
        ensure(host)
    assert "adjust" in refused.value.remedy and "system.slice" in str(refused.value.found)
    assert ensure(host, killers="adjust")["changed"]
    assert (host.read(f"{slices}/50-sparkfleet.conf") or "").endswith(
        "[Slice]\nManagedOOMSwap=auto\nManagedOOMMemoryPressure=auto\n"
    )
    assert not ensure(host, killers="adjust")["changed"]
    ensure(host, killers="report")
    assert host.listdir(slices) == ["10-theirs.conf"]


@pytest.mark.field("B41")
def test_a_killer_that_nothing_is_known_of_is_not_adjusted(host: FakeHost) -> None:
    host.unit("dgx-anti-oom.service", ActiveState="active", UnitFileState="enabled", MainPID="79")
    with pytest.raises(Refusal) as refused:
        ensure(host, killers="adjust")
    assert "adjust" not in refused.value.remedy and not host.exists(guard_setup.UNIT_PATH)


def test_records_go_where_they_are_wanted(host: FakeHost) -> None:
    assert ensure(host, records="/srv/data/guard")["changed"]
    assert host.exists("/srv/data/guard")
    assert json.loads(host.read(guard_setup.CONFIG_PATH) or "")["records_dir"] == "/srv/data/guard"
    assert "ReadWritePaths=-/srv/data/guard\n" in (host.read(guard_setup.UNIT_PATH) or "")
    assert not ensure(host, records="/srv/data/guard")["changed"]
    for path in ("records", "/with space", "/a\nExecStart=x"):
        with pytest.raises(Refusal, match="do not make sense"):
            ensure(host, records=path)


def test_the_unit_protects_the_guard_and_limits_nothing() -> None:
    """The text is asserted; its effect is unproven without a machine that runs out of memory."""
    text = guard_setup.UNIT_TEXT
    assert "OOMScoreAdjust=-900" in text and "WatchdogSec=" in text and "Restart=always" in text
    assert "MemoryMax" not in text and "CPUQuota" not in text


@pytest.mark.field("B36")
def test_no_role_or_unit_offers_a_memory_limit() -> None:
    """Allocations of the GPU are not charged to a cgroup: such a limit protects nothing and reads as if it
    did."""
    root = Path(__file__).parents[3]
    for path in [
        *(root / "roles").glob("**/*.yml"),
        *(root / "templates").glob("**/*"),
        *(root / "plugins").glob("**/*.py"),
    ]:
        if path.is_file():
            text = path.read_text()
            for word in ("MemoryMax=", "MemoryHigh=", "mem_limit", '"Memory":', "--memory="):
                assert word not in text, f"{path}: {word}"


def test_role_defaults_equal_the_policy() -> None:
    """One default, not two that drift apart."""
    defaults = yaml.safe_load((Path(__file__).parents[3] / "roles/guard/defaults/main.yml").read_text())
    for name, value in vars(Policy()).items():
        assert defaults[f"guard_{name}"] == value, name
