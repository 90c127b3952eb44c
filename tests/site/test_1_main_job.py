"""From bare nodes to a chat completion, predicted by check mode; and a second run that changes nothing."""

from __future__ import annotations

import json

import pytest

from tests.proof.prove import prove_check_mode
from tests.site.conftest import MODEL, Lab

pytestmark = pytest.mark.lab

# What a run that has nothing to do asks of a node: one whole probe, a read or two a role, the gates. Measured: 24 of
# the head, which keeps the calibration, and 22 of the worker.
NO_OP_TASKS = 24


@pytest.fixture(scope="module")
def proof(lab: Lab):  # type: ignore[no-untyped-def]
    """Check run, real run, second run and check run afterwards, with node snapshots in between."""
    assert lab.containers() == {}, "this test starts on a bare lab: make lab-down, then again"
    return prove_check_mode("site.yml", lab.inventory)


@pytest.mark.field("B89", "B90", "B93")
def test_check_mode_changes_nothing_and_predicts(proof) -> None:  # type: ignore[no-untyped-def]
    assert not proof.problems, proof.report()
    assert proof.real.changed_count() >= 15, "the lab was not bare"
    for run in (proof.check, proof.real, proof.again):
        assert "DEPRECAT" not in run.output.upper(), run.output


def test_check_mode_shows_the_command_line_of_each_rank(proof) -> None:  # type: ignore[no-untyped-def]
    output = proof.check.output
    assert "tf-dsv41-lanes" in output and "tensorfold serve" in output.replace("\n", " ").replace("  ", " ")
    assert "resolved at start" in output


@pytest.mark.field("B91", "B92")
def test_a_second_run_changes_nothing_and_asks_little(proof, lab: Lab) -> None:  # type: ignore[no-untyped-def]
    assert proof.again.changed_count() == 0, proof.again.changed()
    cost = proof.again.record["remote_tasks"]
    print(f"remote tasks of a run that has nothing to do: {cost}")
    assert max(cost.values()) <= NO_OP_TASKS


def test_a_second_run_leaves_the_rank_containers_alone(lab: Lab) -> None:
    before = lab.containers()
    assert {row["running"] for row in before.values()} == {True} and len(before) == 2
    done = lab.play("site.yml")
    assert done.returncode == 0, done.stdout[-3000:]
    assert lab.containers() == before


def test_the_second_plan_counts_what_the_first_start_measured(proof, lab: Lab) -> None:  # type: ignore[no-untyped-def]
    """Before the first start constants of other builds stand in; the lab's engine holds 3 GiB beside what is exact."""
    assert "memory constants: of other builds" in proof.real.output
    assert "memory constants: measured on this replica" in proof.again.output
    kept = json.loads(lab.on("spark-1", "cat", "/var/lib/sparkfleet/calibration/lab.json"))
    assert sorted(kept["ranks"]) == ["0", "1"]
    for rank, row in kept["ranks"].items():
        assert 2.5 < row["overhead"] < 3.5, (rank, kept)
    assert lab.on("spark-2", "ls", "/var/lib/sparkfleet/calibration", ok=False) == "", "the head keeps it"


def test_the_endpoint_answers_the_openai_client(lab: Lab) -> None:
    assert [model.id for model in lab.client().models.list().data] == [MODEL]
    text = lab.ask()
    assert text and len(set(text)) > 1
    assert lab.ask() == text, "greedy answers repeat"


def test_the_endpoint_streams(lab: Lab) -> None:
    stream = lab.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count."}], max_tokens=32, stream=True
    )
    chunks = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert len([chunk for chunk in chunks if chunk]) > 1


def test_the_run_ends_with_a_table(proof) -> None:  # type: ignore[no-untyped-def]
    tail = proof.again.output[-2500:]
    for word in ("replica", "endpoint", "context", "headroom", "release", ":8888/v1", "spark-1", "spark-2"):
        assert word in tail
