"""The playbooks' look at an engine profile: the shipped data, and the runtime that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.sparkfleet.serving.plugins.lookup.engine_profile import LookupModule

ROOT = Path(__file__).parents[3]


def look(*names: str) -> list[Any]:
    return LookupModule().run(list(names))


def test_every_shipped_profile_is_found_by_name() -> None:
    for path in (ROOT / "roles/ranks/vars/engines").glob("*.yml"):
        assert look(path.stem) == [yaml.safe_load(path.read_text())]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AnsibleError, match=r"no engine profile vllm; wanted: one of .*tensorfold_native"):
        look("vllm")


@pytest.mark.field("B73")
@pytest.mark.parametrize(
    ("profile", "registered"),
    [
        (look("tensorfold_native")[0], False),
        ({"container": {"name": {"value": "x"}}}, False),
        ({"container": {"runtime": {"value": "nvidia", "source": "-"}}}, True),
        ({"container": {"runtime": {"value": "crun", "source": "-"}}}, False),
    ],
)
def test_the_runtime_is_registered_where_the_profile_asks_for_it(
    profile: dict[str, Any], registered: bool
) -> None:
    text = yaml.safe_load((ROOT / "playbooks/vars/replica.yml").read_text())
    names = {key: trust_as_template(text[key]) for key in ("__engine", "container_runtime_nvidia")}
    templar = Templar(loader=DataLoader(), variables={**names, "ranks_engine_profile": profile})
    assert templar.template(trust_as_template("{{ container_runtime_nvidia }}")) is registered
