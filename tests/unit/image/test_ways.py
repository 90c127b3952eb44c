"""The way between two members, and who needs what."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.sparkfleet.serving.plugins.action.engine_image import with_jobs
from ansible_collections.sparkfleet.serving.plugins.filter.transfer import (
    host_address,
    members_where,
    transfer_listen,
    transfer_source,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_identity import Entry, Recipe

PAIR: list[dict[str, Any]] = [
    {"name": "a", "rank": 0, "rails": [{"address": "10.77.0.1/30"}, {"address": "10.77.0.5/30"}]},
    {"name": "b", "rank": 1, "rails": [{"address": "10.77.0.2/30"}, {"address": "10.77.0.6/30"}]},
]
SWITCHED: list[dict[str, Any]] = [
    {"name": f"n{number}", "rank": number, "rails": [{"address": f"10.1.0.{number + 1}/24"}]}
    for number in range(4)
]


def test_a_pair_uses_its_first_common_rail() -> None:
    assert transfer_source(PAIR, "b", "a", 29873) == {"address": "10.77.0.1", "port": 29873, "folder": ""}
    assert transfer_listen(PAIR, "a", ["b", "a"]) == [{"address": "10.77.0.1", "clients": ["10.77.0.2"]}]


def test_four_on_a_switch_share_one_address() -> None:
    assert transfer_listen(SWITCHED, "n0", ["n1", "n3"]) == [
        {"address": "10.1.0.1", "clients": ["10.1.0.2", "10.1.0.4"]}
    ]


def test_members_without_a_common_subnet_are_refused() -> None:
    apart = [PAIR[0], {"name": "c", "rank": 1, "rails": [{"address": "10.9.0.2/30"}]}]
    with pytest.raises(AnsibleFilterError, match="share no rail subnet"):
        transfer_source(apart, "c", "a", 1)
    with pytest.raises(AnsibleFilterError, match="not one of the members"):
        transfer_source(PAIR, "z", "a", 1)


def test_only_members_that_said_so_count() -> None:
    hostvars = {"a": {"r": {"needed": True}}, "b": {"r": {"skipped": True}}}
    assert members_where(PAIR, hostvars, "r", "needed") == ["a"]
    assert members_where(PAIR, {"b": {"r": {"needed": False}}}, "r", "needed", False) == ["b"]
    assert members_where(PAIR, {}, "r", "needed") == []


def test_a_builder_outside_is_reached_where_ansible_reaches_it() -> None:
    assert host_address({"ansible_host": "192.0.2.7", "inventory_hostname": "x"}) == "192.0.2.7"
    with pytest.raises(AnsibleFilterError, match="set image_builder_address"):
        host_address({"inventory_hostname": "localhost"})
    with pytest.raises(AnsibleFilterError, match="no address on the controller"):
        host_address({"inventory_hostname": "no-such-name.invalid"})


@pytest.mark.parametrize(
    ("dockerfile", "given", "jobs", "wanted"),
    [
        ("ARG JOBS=8\n", {}, 3, {"JOBS": "3"}),
        ("FROM x\n  arg jobs\n", {}, 3, {"JOBS": "3"}),
        ("ARG JOBS=8\n", {"JOBS": "2"}, 3, {"JOBS": "2"}),
        ("ARG JOBS=8\n", {}, 0, {}),
        ("ARG JOBSX\n# ARG JOBS\n", {}, 3, {}),
    ],
)
def test_jobs_reach_a_build_that_has_the_argument_and_never_its_content(
    dockerfile: str, given: dict[str, str], jobs: int, wanted: dict[str, str]
) -> None:
    recipe = Recipe((Entry("Dockerfile", "file", False, dockerfile.encode()),), "Dockerfile", given, "x")
    before = recipe.content
    assert with_jobs(recipe, jobs) == wanted
    assert recipe.content == before
