"""The roles of the host on the lab: predicted, applied, kept over a reboot, found and repaired when lost."""

from __future__ import annotations

import pytest

from lab.config import instance
from tests.proof.prove import prove_check_mode

pytestmark = pytest.mark.lab

PLAYBOOK = "tests/proof/host.yml"


def inventory() -> str:
    return str(instance().directory / "inventory")


@pytest.mark.field("B89", "B90")
def test_check_mode_tells_the_truth_on_a_bare_node() -> None:
    proof = prove_check_mode(PLAYBOOK, inventory(), ["-e", "container_runtime_nvidia=true"])
    assert not proof.problems, proof.report()
    assert proof.real is not None and proof.real.changed_count() > 0, "the lab was not bare"
