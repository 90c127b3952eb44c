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
