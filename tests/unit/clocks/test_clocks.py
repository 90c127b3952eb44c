"""The clock lock: found where it is lost, set once, and never claimed on evidence that does not prove it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import clocks
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Answer, Refusal

from tests.unit.fake_host import FakeHost, fixture

ROOT = Path(__file__).parents[3]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def present(host: FakeHost, maximum: int = 2200, foreign: str = "report", check: bool = False) -> dict:  # type: ignore[type-arg]
    return clocks.ensure_present(
        host, 0, maximum, nvidia_smi="nvidia-smi", foreign_policy=foreign, check=check
    )


def test_recorded_confirmations() -> None:
    assert clocks.parse_confirmed(fixture("smi-lgc-success-then-done.txt")) == (0, 2200)
    assert clocks.parse_confirmed(fixture("smi-lgc-success-snapped-1976.txt")) == (0, 1976)
    assert clocks.parse_confirmed(fixture("smi-lgc-success-3003-not-pinned.txt")) == (3003, 3003)
    assert clocks.parse_confirmed(fixture("smi-lgc-permission-denied-rc4.txt")) is None


@pytest.mark.field("B37", "B100")
def test_a_field_that_the_driver_does_not_give_is_none() -> None:
    reading = clocks.parse_reading("[N/A], [N/A], [N/A], 35, P8, 580.173.02\n")
    assert reading is not None
    assert reading.sm_mhz is None and reading.power_w is None and reading.temperature_c == 35
    assert clocks.parse_reading(fixture("smi-no-devices-found.txt")) is None
    assert clocks.verdict(None, 2200) == "unknown"


@pytest.mark.field("B27")
def test_second_run_changes_nothing(host: FakeHost) -> None:
    first = present(host)
    assert first["changed"] and first["clocks"]["confirmed"] == [0, 2200]
    host.calls.clear()
    second = present(host)
    assert not second["changed"] and second["diff"] == []
    assert host.changing_calls() == []


def test_check_mode_predicts_and_touches_nothing(host: FakeHost) -> None:
    predicted = present(host, check=True)
    assert predicted["changed"] and host.changing_calls() == [] and not host.exists(clocks.UNIT_PATH)
    real = present(host)
    assert [d["after_header"] for d in predicted["diff"]] == [d["after_header"] for d in real["diff"]]
    assert not present(host, check=True)["changed"]


@pytest.mark.field("B28")
def test_the_lock_comes_back_at_boot(host: FakeHost) -> None:
    present(host)
    host.reboot()
    assert host.lock == (0, 2200)
    assert not present(host)["changed"]


@pytest.mark.field("B28")
def test_a_lock_that_the_boot_did_not_set_is_found(host: FakeHost) -> None:
    present(host)
    host.units[clocks.UNIT]["UnitFileState"] = "disabled"
    host.reboot()
    result = present(host)
    assert result["changed"] and host.lock == (0, 2200)
    assert any("not enabled" in reason for reason in result["clocks"]["reasons"])


@pytest.mark.field("B27")
def test_lines_of_others_and_of_earlier_runs_do_not_count(host: FakeHost) -> None:
    """The trusted fields of journald name unit and run; a line under another run is not evidence."""
    present(host)
    unit = host.units[clocks.UNIT]
    line = 'GPU clocks set to "(gpuClkMin 0, gpuClkMax 2200)" for GPU 0000000F:01:00.0'
    host.journal.clear()
    host.log("other.service", unit["InvocationID"], line)
    host.log(clocks.UNIT, "f" * 32, line)
    result = present(host)
    assert result["changed"]
    assert any("no confirmation" in reason for reason in result["clocks"]["reasons"])


@pytest.mark.field("B28")
def test_a_clock_above_the_ceiling_proves_that_the_lock_is_gone(host: FakeHost) -> None:
    """A driver restart drops the lock; unit and journal still look right."""
    present(host)
    host.lock = None
    host.sm_idle, host.load, host.power = 2405, 96, 55.0
    result = present(host)
    assert (result["changed"], host.locked(), result["clocks"]["verdict"]) == (True, (0, 2200), "in_force")


def test_a_clock_that_stays_above_is_refused_and_not_claimed(host: FakeHost) -> None:
    host.sm_override = 2522
    with pytest.raises(Refusal, match="does not hold"):
        present(host)


def test_an_idle_reading_proves_nothing(host: FakeHost) -> None:
    assert present(host)["clocks"]["verdict"] == "unproven"


def test_the_driver_may_snap(host: FakeHost) -> None:
    host.snap = 24
    assert present(host, 2000)["clocks"]["confirmed"] == [0, 1976]
    assert not present(host, 2000)["changed"]
    host.snap = 400
    with pytest.raises(Refusal, match="does not hold"):
        present(host, 2100)


def test_permission_is_named(host: FakeHost) -> None:
    host.refuse = fixture("smi-lgc-permission-denied-rc4.txt").splitlines()[1]
    with pytest.raises(Refusal) as refused:
        present(host)
    assert "exit code 4" in refused.value.message
    assert "container" in refused.value.remedy


@pytest.mark.field("B31")
def test_low_power_is_named_with_its_only_cure(host: FakeHost) -> None:
    host.sm_override, host.load, host.power = 611, 97, 13.0
    result = present(host)
    assert result["clocks"]["verdict"] == "low_power"
    assert "power brick" in result["warnings"][0]
    # The desktop alone can show such utilisation, at ordinary power for its clock.
    assert clocks.verdict(clocks.Reading(1200, 96, 40.0, 50, "P0", "580"), 2200) == "in_force"


def test_a_driver_that_hangs_is_unknown_and_not_fine(host: FakeHost) -> None:
    present(host)
    host.answers[("/usr/bin/nvidia-smi", "--query")] = Answer(None, "", "no answer within 20 s")
    host.answers[("/usr/bin/nvidia-smi",)] = Answer(None, "", "no answer within 20 s")
    assert present(host)["clocks"]["verdict"] == "unknown"


def foreign_unit(host: FakeHost, pair: str) -> None:
    name = "spark-gpu-clock-lock.service"
    host.write(
        f"/etc/systemd/system/{name}", f"[Service]\nType=oneshot\nExecStart=/usr/bin/nvidia-smi -lgc {pair}\n"
    )
    host.unit(name, UnitFileState="enabled", ActiveState="active")


def test_a_foreign_unit_with_the_same_ceiling_is_reported(host: FakeHost) -> None:
    foreign_unit(host, "300,2200")
    result = present(host)
    assert result["clocks"]["foreign"] == [
        {"name": "spark-gpu-clock-lock.service", "enabled": True, "active": True, "pair": [300, 2200]}
    ]
    assert host.units["spark-gpu-clock-lock.service"]["UnitFileState"] == "enabled"


def test_a_foreign_unit_with_another_ceiling_is_refused_or_taken_over(host: FakeHost) -> None:
    foreign_unit(host, "0,2400")
    with pytest.raises(Refusal, match="another unit"):
        present(host)
    assert not host.exists(clocks.UNIT_PATH)
    result = present(host, foreign="take_over")
    assert result["changed"] and host.units["spark-gpu-clock-lock.service"]["UnitFileState"] == "disabled"
    assert host.exists("/etc/systemd/system/spark-gpu-clock-lock.service")
    assert not present(host, foreign="take_over")["changed"]


def test_absent_frees_the_clock_and_forgets_the_unit(host: FakeHost) -> None:
    present(host)
    assert clocks.ensure_absent(host, "nvidia-smi", check=True)["changed"] and host.locked()
    assert clocks.ensure_absent(host, "nvidia-smi", check=False)["changed"]
    assert (host.locked(), host.exists(clocks.UNIT_PATH)) == (None, False)
    assert not clocks.ensure_absent(host, "nvidia-smi", check=False)["changed"]


def test_a_missing_tool_is_refused(host: FakeHost) -> None:
    host.tools.clear()
    with pytest.raises(Refusal, match="nvidia-smi is missing"):
        present(host)


@pytest.mark.field("B30")
def test_nothing_calls_what_a_gb10_lacks() -> None:
    text = clocks.unit_text(0, 2200, "/usr/bin/nvidia-smi")
    assert "-lmc" not in text and "-pl" not in text and "After=nvidia-persistenced.service" in text
    for path in [*(ROOT / "roles").glob("**/*.yml"), *(ROOT / "plugins").glob("**/*.py")]:
        for call in ('"-lmc"', '"-pl"', "--lock-memory-clocks", "--power-limit"):
            assert call not in path.read_text(), path


def test_parity_of_a_replica() -> None:
    loaded = clocks.Reading(2190, 95, 45.0, 60, "P0", "580.173.02")
    slower = loaded._replace(sm_mhz=1800)
    assert clocks.parity([("a", (0, 2200), loaded), ("b", (0, 2200), loaded)]) == []
    problems = clocks.parity([("a", (0, 2200), loaded), ("b", (0, 1800), slower)])
    assert any("ceilings differ" in p for p in problems) and any("under load" in p for p in problems)
    assert clocks.parity([("a", (0, 2200), None), ("b", None, None)]) == ["no confirmed ceiling on b"]
    assert (
        "drivers differ"
        in clocks.parity([("a", None, loaded), ("b", None, loaded._replace(driver="590.48.01"))])[0]
    )
