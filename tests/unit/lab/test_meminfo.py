"""/proc/meminfo of a lab node."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lab.node.meminfo import GIB, MEM_TOTAL, Memory, available, render

FIXTURES = Path(__file__).parents[2] / "fixtures/lab"


def rows(text: str) -> dict[str, int]:
    return {
        name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in text.splitlines())
    }


def test_a_healthy_machine_agrees_with_the_recorded_one() -> None:
    recorded = rows((FIXTURES / "mem-meminfo-6.17-healthy-cma-128M.txt").read_text(encoding="utf-8"))
    mine = rows(render(Memory()))
    assert {name: mine[name] for name in ("MemTotal", "CmaTotal", "CmaFree")} == {
        name: recorded[name] for name in ("MemTotal", "CmaTotal", "CmaFree")
    }


def test_it_has_every_row_that_was_recorded() -> None:
    recorded = rows((FIXTURES / "mem-meminfo-after-stop-driver-retains-80G.txt").read_text(encoding="utf-8"))
    assert set(recorded) <= set(rows(render(Memory())))


def test_an_idle_machine_with_its_desktop_has_118_gib() -> None:
    assert round(available(Memory()) / GIB) == 118


def test_the_broken_kernel_shows_cma_free_above_its_total() -> None:
    broken = rows(render(Memory(kho=True)))
    assert broken["CmaTotal"] == 0 < broken["CmaFree"]


def test_what_the_driver_retains_is_in_no_row() -> None:
    kept = rows(render(Memory(retained=80 * GIB)))
    named = ("MemFree", "Buffers", "Cached", "AnonPages", "Slab", "PageTables", "KernelStack", "Shmem")
    assert MEM_TOTAL - sum(kept[name] for name in named) > 75 * GIB


@given(st.integers(0, 150 * GIB), st.booleans(), st.integers(0, 100 * GIB))
def test_rows_are_never_negative_and_available_falls_with_use(
    claimed: int, desktop: bool, retained: int
) -> None:
    memory = Memory(claimed=claimed, desktop=desktop, retained=retained)
    assert all(value >= 0 for value in rows(render(memory)).values())
    assert available(memory) <= available(Memory(desktop=desktop))
    assert rows(render(memory))["MemAvailable"] == available(memory)


def test_a_sink_overrules_everything() -> None:
    assert available(Memory(claimed=7, sink=3 * GIB)) == 3 * GIB
