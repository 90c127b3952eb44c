from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import netaddr
import pytest
from ansible_collections.sparkfleet.serving.plugins.filter import fleet as fleet_filter
from ansible_collections.sparkfleet.serving.plugins.inventory import fleet
from ansible_collections.sparkfleet.serving.plugins.module_utils import inventory_values, rails
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
BASE: dict[str, Any] = {
    "plugin": "sparkfleet.serving.fleet",
    "replicas": {"alpha": {"nodes": ["a1", "a2"]}, "beta": {"nodes": ["b1", "b2"], "context": 1024}},
}


def made(config: dict[str, Any], locked: dict[str, int] | None = None) -> dict[str, dict[str, Any]]:
    return {row["name"]: row["variables"] for row in fleet.build(config, locked or {})[0]}


def test_members_are_adjacent_in_rank_order_with_one_subnet_a_rail() -> None:
    hosts, places = fleet.build(BASE, {})
    assert [row["name"] for row in hosts] == ["a1", "a2", "b1", "b2"]
    assert places == {"alpha": 0, "beta": 1}
    rows = made(BASE)
    assert rows["a1"]["sparkfleet_rails"] == [{"address": "10.77.0.1/30"}, {"address": "10.77.0.5/30"}]
    assert rows["b2"]["sparkfleet_rails"] == [{"address": "10.77.0.10/30"}, {"address": "10.77.0.14/30"}]
    assert rows["b1"]["sparkfleet_context"] == 1024
    assert (rows["b2"]["sparkfleet_rank"], rows["b2"]["sparkfleet_world"]) == (1, 2)


def test_removing_or_adding_a_replica_renumbers_no_other() -> None:
    _, places = fleet.build(BASE, {})
    less = {**BASE, "replicas": {"beta": BASE["replicas"]["beta"]}}
    assert made(less, places)["b1"] == made(BASE)["b1"]
    more = {**BASE, "replicas": {"aaa": {"nodes": ["x1", "x2"]}, **BASE["replicas"]}}
    after = fleet.build(more, places)[1]
    assert after == {"alpha": 0, "beta": 1, "aaa": 2}
    # The place of a replica that is gone stays kept for it.
    less["replicas"]["new"] = {"nodes": ["n1", "n2"]}
    assert fleet.build(less, places)[1]["new"] == 2


def test_explicit_index_wins() -> None:
    config = copy.deepcopy(BASE)
    config["replicas"]["alpha"]["rail_index"] = 7
    assert fleet.build(config, {})[1] == {"alpha": 7, "beta": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(replicas={}), "no replica"),
        (lambda c: c.update(pool="x"), "unknown key pool"),
        (lambda c: c["replicas"]["alpha"].update(nodes="a1"), "not a list"),
        (lambda c: c["replicas"]["alpha"].update(nodes=[]), "not a list"),
        (lambda c: c["replicas"]["alpha"].update(nodes=["a1", "b1"]), "in replica alpha and in replica beta"),
        (
            lambda c: c["replicas"]["alpha"].update(nodes=["a1", "a1"]),
            "in replica alpha and in replica alpha",
        ),
        (lambda c: c["replicas"]["alpha"].update(nodes=["a1", "-rf"]), "not the name of a node"),
        (lambda c: c["replicas"]["alpha"].update(nodes=["a1", "a b"]), "not the name of a node"),
        (lambda c: c["replicas"]["alpha"].update(nodes=["a1", "{{ x }}"]), "not the name of a node"),
        (
            lambda c: c["replicas"]["alpha"].update(nodes=[{"name": "a1", "adress": "x"}, "a2"]),
            "unknown key adress",
        ),
        (
            lambda c: c["replicas"]["alpha"].update(nodes=[{"name": "a1", "netdevs": ["e0"]}, "a2"]),
            "two interfaces",
        ),
        (lambda c: c["replicas"]["alpha"].update(rank=1), "cannot be given"),
        (lambda c: c["replicas"]["alpha"].update({"Bad-Key": 1}), "cannot be given"),
        (lambda c: c["replicas"].update({"Bad Name": {"nodes": ["q"]}}), "wanted lower case"),
        (lambda c: c["replicas"].update({"x": None}), "no nodes"),
        (lambda c: [r.update(rail_index=1) for r in c["replicas"].values()], "both have rail_index 1"),
        (lambda c: c["replicas"]["alpha"].update(rail_index=-1), "not a number"),
        (lambda c: c["replicas"]["alpha"].update(rail_index=9000), "no room"),
        (lambda c: c.update(rail_pool="100.64.0.0/16"), "carrier grade"),
        (lambda c: c.update(rail_pool="172.16.0.0/12"), "Docker"),
        (lambda c: c.update(rail_pool="10.77.0.1/16"), "not an IPv4 network"),
        (lambda c: c.update(rail_pool="fd00::/64"), "not an IPv4 network"),
        (lambda c: c.update(rail_pool="nonsense"), "not an IPv4 network"),
        (lambda c: c.update(rail_prefix=8), "not between"),
        (lambda c: c["replicas"]["alpha"].update(nodes=["a1", "a2", "a3"]), "do not fit"),
    ],
)
def test_refusals_name_what_is_wrong(change, words) -> None:  # type: ignore[no-untyped-def]
    config = copy.deepcopy(BASE)
    change(config)
    with pytest.raises(fleet.FleetError, match=words):
        fleet.build(config, {})


def test_four_nodes_with_a_wider_prefix() -> None:
    config = {**BASE, "rail_prefix": 29, "replicas": {"ring": {"nodes": ["n1", "n2", "n3", "n4"]}}}
    assert made(config)["n4"]["sparkfleet_rails"] == [
        {"address": "10.77.0.4/29"},
        {"address": "10.77.0.12/29"},
    ]


@pytest.mark.parametrize("world", [3, 4])
def test_a_ring_has_its_own_pool_and_renumbers_nobody(world: int) -> None:
    config = copy.deepcopy(BASE)
    config["replicas"]["aring"] = {"nodes": [f"n{k}" for k in range(world)], "ring_pool": "10.78.0.0/27"}
    rows = made(config, {"alpha": 0, "beta": 1})
    assert rows["a1"] == made(BASE)["a1"] and rows["b2"] == made(BASE)["b2"]
    first = [row["address"] for row in rows["n0"]["sparkfleet_rails"]]
    last = 8 * world - 8
    assert first == ["10.78.0.1/30", "10.78.0.5/30", f"10.78.0.{last + 2}/30", f"10.78.0.{last + 6}/30"]
    assert "sparkfleet_ring_pool" not in rows["n0"]
    members = [inventory_values.member(name, values) for name, values in rows.items()]
    assert rails.replica_refusals(members) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": ["a", "b"]}, "a ring has 3 or 4 nodes, not 2"),
        ({"nodes": list("abcde")}, "not 5"),
        ({"ring_pool": "10.78.0.0/28"}, "ring_pool: 10.78.0.0/28 has no room"),
        ({"ring_pool": "100.64.0.0/24"}, "ring_pool: 100.64.0.0/24 touches"),
        ({"ring_pool": "10.77.8.0/24"}, "touches rail_pool 10.77.0.0/16"),
        ({"nodes": [{"name": "a", "netdevs": ["e0", "e1"]}, "b", "c"]}, "names of four interfaces"),
    ],
)
def test_refusals_of_a_ring(change: dict[str, Any], words: str) -> None:
    ring = {"nodes": ["a", "b", "c"], "ring_pool": "10.78.0.0/27", **change}
    with pytest.raises(fleet.FleetError, match=words):
        fleet.build({**BASE, "replicas": {"ring": ring}}, {})


def test_a_single_node_has_no_rails() -> None:
    assert made({**BASE, "replicas": {"solo": {"nodes": ["s1"]}}})["s1"]["sparkfleet_rails"] == []


@settings(max_examples=60, deadline=None)
@given(
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    gone=st.sets(st.integers(0, 39), max_size=10),
)
def test_any_fleet_has_no_address_or_subnet_twice(worlds: list[int], gone: set[int]) -> None:
    replicas = {f"r{n}": {"nodes": [f"r{n}-n{k}" for k in range(world)]} for n, world in enumerate(worlds)}
    config = {**BASE, "rail_prefix": 29, "replicas": replicas}
    hosts, places = fleet.build(config, {})
    rows = [
        {
            "name": row["name"],
            "replica": row["replica"],
            "rank": row["rank"],
            "world": row["variables"]["sparkfleet_world"],
            "rails": row["variables"]["sparkfleet_rails"],
        }
        for row in hosts
    ]
    assert rails.replica_refusals(rows) == []
    networks = {
        (row["replica"], n): netaddr.IPNetwork(rail["address"]).cidr
        for row in rows
        for n, rail in enumerate(row["rails"])
    }
    assert len(set(networks.values())) == len(networks)
    left = {name: row for number, (name, row) in enumerate(replicas.items()) if number not in gone}
    if left:
        again = made({**config, "replicas": left}, places)
        before = made(config)
        assert all(again[name] == before[name] for name in again)


def run(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "fleet.yml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-inventory"), "-i", str(tmp_path / "fleet.yml"), "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    loaded["stderr"] = done.stderr
    return loaded  # type: ignore[no-any-return]


def test_the_plugin_writes_its_lock_and_marks_what_it_makes_as_untrusted(tmp_path: Path) -> None:
    text = """
plugin: sparkfleet.serving.fleet
replicas:
  alpha:
    nodes: [{name: a1, address: "{{ lookup('pipe', 'touch /tmp/x') }}"}, a2]
    served_name: "{{ 7 * 7 }}"
    vars: {mine: "{{ 6 * 7 }}"}
"""
    loaded = run(tmp_path, text)
    values = loaded["_meta"]["hostvars"]["a1"]
    # What the plugin makes is marked, so no template in it ever runs; `vars` are the user's own templates.
    assert values["sparkfleet_served_name"] == {"__ansible_unsafe": "{{ 7 * 7 }}"}
    assert "__ansible_unsafe" in values["ansible_host"]
    assert values["mine"] in (42, "{{ 6 * 7 }}")
    assert json.loads((tmp_path / "fleet.rails.lock").read_text())["rail_index"] == {"alpha": 0}
    assert loaded["replica_alpha"]["hosts"] == ["a1", "a2"]


def test_the_example_fleet_parses_and_has_no_refusal() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-inventory"), "-i", "inventory/fleet/fleet.yml", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return (
                value["__ansible_unsafe"]
                if "__ansible_unsafe" in value
                else {k: bare(v) for k, v in value.items()}
            )
        return [bare(item) for item in value] if isinstance(value, list) else value

    hostvars = bare(json.loads(done.stdout)["_meta"]["hostvars"])
    members = fleet_filter.members(list(hostvars), hostvars)
    assert len(members) == 4
    assert rails.replica_refusals(members) == []
