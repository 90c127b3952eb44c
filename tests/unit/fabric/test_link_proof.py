from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import link_proof
from ansible_collections.sparkfleet.serving.plugins.module_utils.link_proof import (
    Figure,
    judge,
    parse_ib_write_bw,
)

GB10 = Path(__file__).resolve().parents[2] / "fixtures" / "gb10"
GOOD = {"speed": 200000, "pci_link_speed": "32.0 GT/s PCIe", "pci_link_width": 4}


def figure(name: str) -> Figure | None:
    return parse_ib_write_bw((GB10 / name).read_text())


@pytest.mark.field("B01")
@pytest.mark.parametrize(
    ("name", "gbps", "verdict"),
    [
        ("bw-ib_write_bw-half0-92.57-run_infinitely.txt", 92.57, "healthy"),
        ("bw-ib_write_bw-half1-97.28-run_infinitely.txt", 97.28, "healthy"),
        ("bw-ib_write_bw-client-1qp-MBs-mtu1024.txt", 92.55, "healthy"),
        ("bw-ib_write_bw-degraded-13.22.txt", 13.22, "stale_init"),
    ],
)
def test_recorded_runs(name: str, gbps: float, verdict: str) -> None:
    found = figure(name)
    assert found is not None
    assert found.average_gbps == pytest.approx(gbps, abs=0.01)
    assert judge(found, GOOD).verdict == verdict


@pytest.mark.field("B01", "C06")
@pytest.mark.parametrize(
    ("average", "peak", "verdict"),
    [
        (111.86, 111.9, "healthy"),
        (80.0, 80.0, "healthy"),
        (79.9, 80.0, "degraded"),
        (60.0, 60.1, "degraded"),
        (12.86, 12.9, "stale_init"),
        (0.23, 7.31, "degraded"),
        (0.12, 8.60, "degraded"),
        (4.70, 4.71, "degraded"),
    ],
)
def test_figures_of_reports(average: float, peak: float, verdict: str) -> None:
    found = judge(Figure(average, peak, 1), GOOD)
    assert found.verdict == verdict
    assert bool(found.ladder) == (verdict != "healthy")


def test_a_slow_link_that_does_not_read_perfect_is_no_stale_initialization() -> None:
    assert judge(Figure(13.0, 13.0, 1), {**GOOD, "speed": 100000}).verdict == "degraded"
    assert judge(Figure(13.0, 13.0, 1), {**GOOD, "pci_link_width": 2}).verdict == "degraded"
    assert judge(Figure(13.0, 13.0, 1), {**GOOD, "pci_link_speed": "16.0 GT/s PCIe"}).verdict == "degraded"


@pytest.mark.field("C07")
def test_no_row_is_a_failure_whatever_the_exit_code() -> None:
    text = (GB10 / "bw-ib_write_bw-client-1qp-MBs-mtu1024.txt").read_text().splitlines()
    header = "\n".join(line for line in text if not line.strip().startswith("65536"))
    assert parse_ib_write_bw(header) is None
    assert judge(None, GOOD, header).verdict == "failed"
    wrong = (GB10 / "bw-perftest-wrong-gid-behaviour.txt").read_text()
    assert parse_ib_write_bw(wrong) is None
    assert "Unable to Connect" in judge(None, GOOD, wrong).reason


@pytest.mark.field("B01")
def test_the_ladder_never_resets_pci() -> None:
    steps = " ".join(link_proof.LADDER["stale_init"])
    assert "mains for at least 60 seconds" in steps
    assert "do not reset or rescan" in steps


@pytest.mark.field("B14")
def test_the_test_is_bounded_and_small() -> None:
    argv = link_proof.client_argv("rocep1s0f0", 3, 12000, 5, "10.77.0.2")
    assert argv[argv.index("-D") + 1] == "5"
    # Nothing like the 16 GB buffers of nccl-tests, which took 32 GB of a node: less than a MiB in flight.
    assert int(argv[argv.index("-s") + 1]) * int(argv[argv.index("-q") + 1]) <= 2**20
    assert argv[-1] == "10.77.0.2"
    assert link_proof.client_argv("rocep1s0f0", 3, 12000, 5)[-1] == "5"
    for seconds in (0, -1, 31, 3600):
        with pytest.raises(ValueError, match="wanted 1 to 30"):
            link_proof.client_argv("rocep1s0f0", 3, 12000, seconds)


@pytest.mark.field("B14")
def test_a_node_that_serves_or_is_short_of_memory_is_not_measured() -> None:
    def docker(**over: object) -> dict[str, object]:
        return {"present": True, "known": True, "containers": [], **over}

    def rank(state: str, owned: bool = True) -> list[dict[str, object]]:
        return [{"name": "dsv41", "owned": owned, "state": state}]

    reason = link_proof.reason_not_to_measure
    assert reason(docker(), 100 * 2**30) == ""
    assert reason({"present": False, "known": False, "containers": []}, None) == ""
    for state in ("running", "paused", "restarting"):
        assert reason(docker(containers=rank(state)), None).startswith("ranks run (dsv41)")
    assert reason(docker(containers=rank("exited")), None) == ""
    assert reason(docker(containers=rank("running", owned=False)), None) == ""
    assert "not known" in reason({"present": True, "known": False, "reason": "timeout"}, None)
    assert reason(docker(), 3 * 2**30) == "only 3.0 GiB of memory are available"


@pytest.mark.field("B10")
def test_the_rdma_mtu_is_part_of_the_verdict() -> None:
    found = figure("bw-ib_write_bw-half0-92.57-run_infinitely.txt")
    assert judge(found, GOOD, active_mtu=4096, wanted_mtu=4096).verdict == "healthy"
    small = judge(found, GOOD, active_mtu=1024, wanted_mtu=4096)
    assert (small.verdict, small.reason) == ("small_mtu", "92.57 Gb/s, RDMA MTU 1024 instead of 4096")
    assert "fabric_mtu to 9000" in small.ladder[0]
    assert judge(found, GOOD, active_mtu=1024, wanted_mtu=0).verdict == "healthy"
    assert judge(found, GOOD, active_mtu=None, wanted_mtu=4096).verdict == "healthy"
    # A rail that moves too little has a worse name than a small MTU.
    assert judge(Figure(13.0, 13.0, 1), GOOD, active_mtu=1024, wanted_mtu=4096).verdict == "stale_init"
    assert link_proof.judge_mtu(1024, 4096) is not None
    assert link_proof.judge_mtu(4096, 4096) is None
