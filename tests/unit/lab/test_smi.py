"""The nvidia-smi stand-in prints what real ones printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.node import smi

FIXTURES = Path(__file__).parents[2] / "fixtures/lab"


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh driver: no state, no faults, no ranks, root's capability."""
    monkeypatch.setattr(smi, "STATE", tmp_path / "smi.json")
    monkeypatch.setattr(smi, "FAULTS", tmp_path / "faults")
    monkeypatch.setattr(smi, "LEDGER", tmp_path / "memory")
    monkeypatch.setattr(smi, "may_administer", lambda: True)
    monkeypatch.setattr(smi, "desktop", list)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert smi.main(list(arguments)) == status
    return capsys.readouterr().out


def recorded(name: str) -> list[str]:
    return (FIXTURES / name).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("fixture", "apps"),
    [
        ("smi-table-idle-p8-desktop-580.142.txt", []),
        ("smi-table-engine-loaded-idle.txt", [(577729, "VLLM::EngineCore", 89093)]),
    ],
)
def test_the_table_has_the_recorded_layout(
    fixture: str,
    apps: list[tuple[int, str, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = [(2747, "/usr/lib/xorg/Xorg", 18), (2911, "/usr/bin/gnome-shell", 6)]
    monkeypatch.setattr(smi, "desktop", lambda: shown)
    monkeypatch.setattr(smi, "ranks", lambda: apps)
    mine, real = printed(capsys).splitlines()[1:], recorded(fixture)[1:]
    assert [len(line) for line in mine] == [len(line) for line in real]
    assert [re.sub(r"\d", "#", line).replace(" ", "") for line in mine][3:8] == [
        re.sub(r"\d", "#", line).replace(" ", "") for line in real
    ][3:8]
    frame = [index for index, line in enumerate(real) if line.startswith(("+", "|=")) or "GPU  " in line]
    assert [mine[index] for index in frame] == [real[index] for index in frame]


@pytest.mark.parametrize(
    ("asked", "fixture"),
    [("0,2000", "smi-lgc-success-snapped-1976.txt"), ("0,2200", "smi-lgc-success-then-done.txt")],
)
def test_locking_prints_what_the_driver_printed(
    asked: str, fixture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "-lgc", asked).splitlines() == recorded(fixture)


def test_a_lock_without_the_capability_is_refused_as_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smi, "may_administer", lambda: False)
    refused = printed(capsys, "-lgc", "2190", status=4)
    assert refused.splitlines() == recorded("smi-lgc-permission-denied-rc4.txt")[1:2]
    assert printed(capsys, "-rgc", status=4) == refused


def test_a_lock_is_a_cap_and_a_reset_lifts_it(capsys: pytest.CaptureFixture[str]) -> None:
    query = ("--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
    readings = []
    for arguments in ((), ("-lgc", "0,2200"), ("-lgc", "3003,3003"), ("-lgc", "0,2000"), ("-rgc",)):
        if arguments:
            printed(capsys, *arguments)
        readings.append(printed(capsys, *query).strip())
    assert readings == ["2418", "2184", "2418", "1976", "2418"]


def test_the_clock_report_does_not_show_the_lock(capsys: pytest.CaptureFixture[str]) -> None:
    report = printed(capsys, "-q", "-d", "CLOCK")
    assert "Locked" not in report
    assert f"GPU {smi.BUS}" in report


def test_memory_fields_are_not_available(capsys: pytest.CaptureFixture[str]) -> None:
    command, header, row = recorded("smi-query-memory-na-580.173.02.csv")
    mine = printed(capsys, *command.split()[2:]).splitlines()
    assert mine[0] == header
    assert mine[1].split(", ")[:4] == row.split(", ")[:4]
    short = printed(
        capsys, "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"
    )
    expected = recorded("smi-query-name-cap-driver-memory.csv")[0].replace("580.159.03", smi.DRIVER)
    assert short.strip() == expected


def test_compute_apps_are_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = recorded("smi-compute-apps-vram.csv")
    apps = [
        (int(pid), name, int(used.split()[0])) for pid, name, used in (row.split(", ") for row in rows[1:])
    ]
    monkeypatch.setattr(smi, "ranks", lambda: apps)
    mine = printed(capsys, "--query-compute-apps=pid,process_name,used_memory", "--format=csv")
    assert mine.splitlines() == rows


def test_an_unknown_field_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert '"memory.size"' in printed(capsys, "--query-gpu=name,memory.size", "--format=csv", status=2)


def test_faults(driver: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (driver / "faults").mkdir()
    (driver / "faults/low-power").write_text("\n")
    query = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader")
    assert printed(capsys, *query) == "611 MHz, 13.02 W\n"
    (driver / "faults/smi-lost").write_text("\n")
    assert printed(capsys, "-L", status=6) == "No devices were found\n"


def test_a_gpu_under_load_reads_as_recorded_and_the_lock_caps_it(
    driver: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (driver / "faults").mkdir()
    switch = driver / "faults/gpu-load"
    switch.write_text("\n")
    fields = "power.draw,temperature.gpu,clocks.sm,utilization.gpu"
    query = (f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = [line.split(",") for line in recorded("smi-telemetry-under-load-dense27b.csv")[1:]]
    mine = printed(capsys, *query).strip().split(", ")
    for column, value in enumerate(mine, start=1):
        assert value in {row[column] for row in rows}, fields.split(",")[column - 1]
    temperature = (
        "--query-gpu=temperature.gpu,clocks.sm,power.draw,utilization.gpu",
        "--format=csv,noheader",
    )
    shape = re.sub(r"\d+", "#", recorded("smi-query-temp-sm-power-util.csv")[0])
    assert re.sub(r"\d+", "#", printed(capsys, *temperature).strip()) == shape
    assert "96%      Default" in printed(capsys)
    printed(capsys, "-lgc", "0,2200")
    assert printed(capsys, *query).split(", ")[2] == "2184", "a site read 2177 to 2210 under this lock"
    switch.write_text("2251,63.1\n")
    assert printed(capsys, *query).strip() == "63.1, 71, 2251, 96"
    (driver / "faults/low-power").write_text("\n")
    assert printed(capsys, *query).strip() == "13.02, 50, 611, 96"
