"""inventory/example with lab/overrides.yml: what a user copies works, from bare nodes to an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import instance as lab_instance
from lab.config import instance as chosen
from tests.site.conftest import ROOT, Lab

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    found = Lab(chosen())
    lab_instance.up(found.instance)
    assert found.containers() == {}, "this test starts on a bare lab: make lab-down, then again"
    yield found


def test_the_example_inventory_with_the_overrides(lab: Lab, tmp_path: Path) -> None:
    """What a user copies works as it is; only what lab/overrides.yml lists differs. Runs first, on a bare lab."""
    overrides = ROOT / "lab/overrides.yml"
    if lab.instance.name != "lab":
        text = overrides.read_text().replace(
            "172.31.77.", str(lab.instance.hub_address).rsplit(".", 1)[0] + "."
        )
        overrides = tmp_path / "overrides.yml"
        overrides.write_text(text.replace(".lab/lab/", f".lab/{lab.instance.name}/"))
    done = lab.play("site.yml", "-e", f"@{overrides}", inventory=str(ROOT / "inventory/example"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert lab.ask()
