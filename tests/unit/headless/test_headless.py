"""No desktop at boot; and leaving it now takes nothing with it that serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import headless
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal

from tests.unit.fake_host import FakeHost, fixture

WANTED = {"WantedBy": "multi-user.target", "ActiveState": "active"}


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.unit("graphical.target", ActiveState="active")
    host.unit("display-manager.service", ActiveState="active")
    host.unit("docker.service", **WANTED)
    host.unit("sparkfleet-rank@pair-1.service", **WANTED)
    host.write("/proc/meminfo", fixture("mem-meminfo-short-a.txt"))
    for pid, name, kib in ((10, "gnome-shell", 400_000), (11, "Xorg", 90_000), (12, "gnome-shell", 300_000)):
        host.write(f"/proc/{pid}/status", f"Name:\t{name}\nVmRSS:\t{kib} kB\n")
    return host


def ensure(host: FakeHost, **options: Any) -> dict[str, Any]:
    return headless.ensure(
        host, **{"desktop": False, "now": False, "stop_units": [], "check": False, **options}
    )


def test_only_the_next_boot_changes_unless_asked(host: FakeHost) -> None:
    assert ensure(host)["changed"]
    assert host.default == "multi-user.target"
    assert host.units["graphical.target"]["ActiveState"] == "active"
    assert not ensure(host)["changed"]


def test_check_mode_predicts(host: FakeHost) -> None:
    predicted = ensure(host, now=True, check=True)
    assert predicted["changed"] and host.changing_calls() == [] and host.default == "graphical.target"
    real = ensure(host, now=True)
    assert [d["after_header"] for d in predicted["diff"]] == [d["after_header"] for d in real["diff"]]


@pytest.mark.field("B44")
def test_holders_are_named_largest_first(host: FakeHost) -> None:
    found = ensure(host)["headless"]["holders"]
    assert [(h["name"], h["processes"]) for h in found] == [("gnome-shell", 2), ("Xorg", 1)]
    assert found[0]["rss_mib"] == 700_000 // 1024


@pytest.mark.field("B44")
def test_memory_of_the_gpu_counts_for_who_holds_it(host: FakeHost) -> None:
    """A model server of somebody else holds little that is resident, and most of the machine."""
    host.write("/proc/13/status", "Name:\tollama\nVmRSS:\t40960 kB\n")
    host.apps = "13, 20480\n99, 5\n12, [N/A]\n"
    found = ensure(host)["headless"]["holders"]
    assert [(h["name"], h["rss_mib"], h["gpu_mib"]) for h in found][:2] == [
        ("ollama", 40, 20480),
        ("gnome-shell", 683, 0),
    ]


@pytest.mark.field("B44")
def test_docker_and_ranks_survive_leaving_the_desktop(host: FakeHost) -> None:
    result = ensure(host, now=True)
    assert not result["headless"]["desktop_running"]
    assert host.units["docker.service"]["ActiveState"] == "active"
    assert host.units["sparkfleet-rank@pair-1.service"]["ActiveState"] == "active"


@pytest.mark.parametrize("unit", ["docker.service", "sparkfleet-rank@pair-1.service"])
def test_refused_when_it_would_stop_what_serves(host: FakeHost, unit: str) -> None:
    host.units[unit]["WantedBy"] = ""
    with pytest.raises(Refusal, match="would stop"):
        ensure(host, now=True)
    assert host.default == "graphical.target", "nothing was touched before the refusal"


def test_reversible(host: FakeHost) -> None:
    host.unit(
        "tracker.service", UnitFileState="enabled", ActiveState="active", **{"WantedBy": "multi-user.target"}
    )
    ensure(host, now=True, stop_units=["tracker.service", "absent.service"])
    assert host.units["tracker.service"]["UnitFileState"] == "disabled"
    assert not ensure(host, now=True, stop_units=["tracker.service"])["changed"]
    back = ensure(host, desktop=True, now=True, stop_units=["tracker.service"])
    assert back["changed"] and host.default == "graphical.target"
    assert host.units["tracker.service"]["UnitFileState"] == "enabled"
    assert host.units["graphical.target"]["ActiveState"] == "active"


def test_the_stop_list_cannot_name_what_serves(host: FakeHost) -> None:
    with pytest.raises(Refusal, match="needs"):
        ensure(host, stop_units=["docker.service"])
