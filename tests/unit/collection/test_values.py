"""Values that several roles share are judged by sight, before any node is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.sparkfleet.serving.plugins.filter import fleet
from ansible_collections.sparkfleet.serving.plugins.filter.fleet import value_refusals
from ansible_collections.sparkfleet.serving.plugins.module_utils import budget
from ansible_collections.sparkfleet.serving.plugins.module_utils import inventory_values as core

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sparkfleet_context": 524288, "sparkfleet_parallel": "4", "sparkfleet_drafts": "false"},
        {"sparkfleet_context": "", "sparkfleet_drafts": True},
        {"engram_placement": "local"},
        {"engram_placement": "nfs", "engram_nfs_accepted": "true"},
    ],
)
def test_what_can_be_meant_passes(values: dict[str, object]) -> None:
    assert value_refusals(values) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sparkfleet_context", "abc"),
        ("sparkfleet_context", "-1"),
        ("sparkfleet_context", "0"),
        ("sparkfleet_parallel", "abc"),
        ("sparkfleet_parallel", "4.5"),
        ("sparkfleet_parallel", 0),
        ("sparkfleet_drafts", "maybe"),
        ("sparkfleet_drafts", None),
        ("sparkfleet_ablit", "perhaps"),
        ("sparkfleet_recalibrate", "later"),
        ("engram_placement", "remote"),
        ("engram_placement", "nfs"),
    ],
)
def test_the_value_is_named(name: str, value: object) -> None:
    (text,) = value_refusals({name: value})
    assert name in text and (repr(value) in text or str(value) in text)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (text,) = value_refusals({"sparkfleet_hub_token_file": str(tmp_path / "token")})
    assert "sparkfleet_hub_token_file" in text
    (tmp_path / "token").write_text("x")
    assert value_refusals({"sparkfleet_hub_token_file": str(tmp_path / "token")}) == []
    (tmp_path / "token").write_text(" \n")
    (text,) = value_refusals({"sparkfleet_hub_token_file": str(tmp_path / "token")})
    assert "empty" in text
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    assert "no text" in value_refusals({"sparkfleet_hub_token_file": str(tmp_path / "token")})[0]
    assert "no file" in value_refusals({"sparkfleet_hub_token_file": str(tmp_path)})[0]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("sparkfleet_contxt", "sparkfleet_context"),
        ("sparkfleet_draft", "sparkfleet_drafts"),
        ("sparkfleet_model_revison", "sparkfleet_model_revision"),
        ("sparkfleet_railz", "sparkfleet_rails"),
        ("sparkfleet_quux", ""),
        ("ranks_setting", "ranks_settings"),
        ("guard_redlinegib", "guard_redline_gib"),
        ("rank_files_kit_foldr", "rank_files_kit_folder"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    (text,) = value_refusals({name: "1"})
    assert text.startswith(f"{name} is no variable of ")
    assert f"did you mean {nearest}?" in text if nearest else "did you mean" not in text


def test_other_names_are_the_users_own() -> None:
    own = {
        "image_of_the_day": 1,
        "ansible_host": "x",
        "ranks_result": {},
        "my_context": 1,
        "guard_dog": "rex",
    }
    assert value_refusals(own) == []


def test_every_name_that_an_inventory_of_ours_sets_is_known() -> None:
    for path in (*(ROOT / "inventory").glob("*/group_vars/all.yml"), ROOT / "lab/overrides.yml"):
        names = yaml.safe_load(path.read_text())
        assert (
            len(names) > 10
            and core.name_refusals(names, fleet.known_names(), fleet.role_options(), fleet.decided_names())
            == []
        ), path
    for role, options in fleet.role_options().items():
        assert options and core.name_refusals(options, (), {role: options}, {}) == []


def test_a_value_that_the_playbooks_overrule_is_refused_with_what_it_follows_from() -> None:
    assert value_refusals({"guard_records_dir": "/srv/guard", "ranks_served_name": "x"}) == [
        "guard_records_dir is set by the playbooks and not read from an inventory; it follows from sparkfleet_data_dir",
        "ranks_served_name is set by the playbooks and not read from an inventory; it follows from "
        "sparkfleet_served_name",
    ]
    decided = fleet.decided_names()
    assert "guard_redline_gib" not in decided and not [name for name in decided if name.startswith("__")]
    assert set(decided) <= set().union(*fleet.role_options().values()), "the playbooks set what no role reads"


def test_known_names_come_from_what_reads_them() -> None:
    known = fleet.known_names()
    assert {"sparkfleet_context", "sparkfleet_rank", "sparkfleet_rails", "sparkfleet_hosts"} <= known
    assert "sparkfleet_node" not in known, "the agent's package is no variable"
    assert not [name for name in known if "contxt" in name]
    assert {"sparkfleet_drafts", "sparkfleet_ablit"} <= fleet.known_truths() < known


def test_what_the_documents_name_is_known() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "roles").glob("*/README.md")]
    assert core.fleet_names(page.read_text() for page in pages) - fleet.known_names() == set()


def test_files_with_secrets_are_wanted_of_heads() -> None:
    shared = {"sparkfleet_replica": "a", "ranks_api_key_file": "/etc/key", "engram_token_file": "/root/token"}
    rows = core.node_files({"one": {**shared, "sparkfleet_rank": 0}, "two": {**shared, "sparkfleet_rank": 1}})
    assert [(row["node"], row["name"], row["private"]) for row in rows] == [
        ("one", "ranks_api_key_file", True),
        ("one", "engram_token_file", False),
    ]
    assert core.node_files({"one": {"ranks_api_key": "k", "ranks_api_key_file": "/etc/key"}}) == []


def test_plan_inputs_judge_each_node_by_what_runs_there() -> None:
    members = [{"name": "one"}, {"name": "two"}]
    ours = {"owned": True, "state": "running"}
    memory = {"total_bytes": 120 << 30, "available_bytes": 15 << 30}
    probes: dict[str, dict[str, Any]] = {
        "one": {"memory": memory, "docker": {"containers": [ours]}},
        "two": {
            "memory": {**memory, "available_bytes": 117 << 30},
            "docker": {"containers": [{**ours, "owned": False}]},
        },
    }
    assert core.plan_inputs(members, probes) == {
        "situation": ["running", "start"],
        "available_gib": [15.0, 117.0],
        "total_gib": 120.0,
    }
    assert core.plan_inputs(members, {"one": probes["one"]}) == {
        "situation": ["running", "start"],
        "available_gib": [],
        "total_gib": None,
    }
    stopped: dict[str, dict[str, Any]] = {
        "one": {"docker": {"containers": [{"owned": True, "state": "exited"}]}},
        "two": {},
    }
    assert core.plan_inputs(members, stopped)["situation"] == ["start", "start"]


def test_every_host_is_judged_and_named() -> None:
    hosts = {
        "one": {"sparkfleet_context": 8192},
        "two": {"sparkfleet_context": "x"},
        "six": {"sparkfleet_context": "x"},
    }
    (text,) = fleet.inventory_refusals(hosts, hosts)
    assert text == "two, six: sparkfleet_context is 'x', wanted a whole number from 1 to 16777216"
    (text,) = fleet.inventory_refusals(hosts, {**hosts, "two": {}, "six": {"sparkfleet_drfts": True}})
    assert text == "six: sparkfleet_drfts is no variable of this collection; did you mean sparkfleet_drafts?"


def test_the_plan_and_the_role_want_the_same_rope_rows() -> None:
    defaults = yaml.safe_load((ROOT / "roles/rank_files/defaults/main.yml").read_text())
    assert defaults["rank_files_rope_extra_rows"] == budget.ROPE_EXTRA_ROWS
    assert defaults["rank_files_kit_folder"] in (ROOT / "playbooks/plan.yml").read_text()


def test_the_profile_gives_the_plan_gate_and_reserve() -> None:
    profile = fleet.engine_profile("tensorfold_native")
    assert profile["memory"]["min_available_gib"]["value"] == 109
    assert profile["settings"]["memory_reserve_gib"]["default"] == 10
    with pytest.raises(
        AnsibleFilterError, match=r"no engine profile ../x; wanted one of .*tensorfold_native"
    ):
        fleet.engine_profile("../x")
