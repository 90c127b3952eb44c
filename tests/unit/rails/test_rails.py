from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.filter import rails as rail_filter
from ansible_collections.sparkfleet.serving.plugins.module_utils import rails
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.rails.rail_nodes import gids, pair, probe


def checks(refusals: list[rails.Refusal]) -> set[str]:
    return {item.check for item in refusals}


@pytest.mark.field("B03", "B04", "C19")
def test_one_cable_is_one_cage_with_two_halves_in_domain_order() -> None:
    cages = rails.cages_of(probe())
    assert [(cage.name, cage.state) for cage in cages] == [("p0", "up"), ("p1", "no_cable")]
    assert [half.netdev for half in cages[0].halves] == ["enp1s0f0np0", "enP2p1s0f0np0"]
    assert [half.domain for half in cages[0].halves] == [0, 2]
    assert [half.hca for half in rails.choose_halves(probe())] == ["rocep1s0f0", "roceP2p1s0f0"]


def test_the_management_nic_bridges_and_wifi_are_no_halves() -> None:
    assert {half.netdev for half in rails.halves_of(probe())} == {
        "enp1s0f0np0",
        "enp1s0f1np1",
        "enP2p1s0f0np0",
        "enP2p1s0f1np1",
    }


@pytest.mark.field("B04")
def test_names_and_prefixes_do_not_decide() -> None:
    node = probe()
    renamed = {"eth5": node["net"].pop("enp1s0f0np0"), "eth6": node["net"].pop("enP2p1s0f0np0")}
    node["net"].update(renamed)
    assert [half.netdev for half in rails.choose_halves(node)] == ["eth5", "eth6"]


@pytest.mark.field("B02", "C12")
def test_no_cable_is_said_not_crashed() -> None:
    bare = {"net": {"lo": {}}, "rdma": {}, "hotplug": {"marker": True}}
    with pytest.raises(rails.RailError, match="marker set"):
        rails.choose_halves(bare)
    with pytest.raises(rails.RailError, match="cage p0: enp1s0f0np0 no_cable"):
        rails.choose_halves(probe(cabled=()))


@pytest.mark.field("B02", "C09")
def test_administratively_down_is_not_the_same_as_no_cable() -> None:
    node = probe(cabled=())
    for row in node["net"].values():
        row.update(carrier=None, admin_up=False)
    assert {cage.state for cage in rails.cages_of(node)} == {"admin_down"}


@pytest.mark.field("B03")
def test_a_second_half_that_nobody_brought_up_is_still_a_rail() -> None:
    node = probe()
    node["net"]["enP2p1s0f0np0"].update(carrier=None, admin_up=False)
    for name in ("enp1s0f1np1", "enP2p1s0f1np1"):
        node["net"][name].update(carrier=None, admin_up=False)
    assert [cage.state for cage in rails.cages_of(node)] == ["partly_down", "admin_down"]
    assert [half.state for half in rails.choose_halves(node)] == ["up", "admin_down"]
    plans, refusals = rails.plan_rails(pair(), {"spark-1": node, "spark-2": probe()})
    assert len(plans["spark-1"]) == 2
    assert [(item.check, item.level) for item in refusals] == [("link-state", "warn")]


def test_one_half_without_carrier_is_refused() -> None:
    node = probe()
    node["net"]["enP2p1s0f0np0"]["carrier"] = False
    assert rails.cages_of(node)[0].state == "half_up"
    with pytest.raises(rails.RailError, match="enP2p1s0f0np0 no_cable"):
        rails.choose_halves(node)


def test_two_cables_need_names_unless_one_cage_already_carries_the_plan() -> None:
    node = probe(cabled=("p0", "p1"))
    with pytest.raises(rails.RailError, match="2 cages are cabled"):
        rails.choose_halves(node)
    named = rails.choose_halves(node, ["enp1s0f1np1", "enP2p1s0f1np1"])
    assert [half.cage for half in named] == ["p1", "p1"]
    carrying = probe(cabled=("p0", "p1"), addresses={"enp1s0f1np1": ["10.77.0.1/30"]})
    assert rails.choose_halves(carrying, (), ["10.77.0.1/30"])[0].netdev == "enp1s0f1np1"


def test_a_named_interface_that_is_not_there() -> None:
    with pytest.raises(rails.RailError, match="names enp9s0"):
        rails.choose_halves(probe(), ["enp9s0", "enP2p1s0f0np0"])
    with pytest.raises(rails.RailError, match="twice"):
        rails.choose_halves(probe(), ["enp1s0f0np0", "enp1s0f0np0"])


def test_a_good_pair_has_no_refusal() -> None:
    assert rails.replica_refusals(pair()) == []


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda rows: rows.pop(), "half-pair"),
        (lambda rows: rows[1].update(rank=0), "rank-twice"),
        (lambda rows: rows[1].update(rank=5), "rank-range"),
        (lambda rows: rows[1].update(world=3), "world"),
        (lambda rows: rows[1].update(replica=""), "replica-name"),
        (lambda rows: [row.update(replica="--help") for row in rows], "replica-name"),
        (lambda rows: [row.update(replica="a\nb") for row in rows], "replica-name"),
        (lambda rows: [row.update(replica="{{ x }}") for row in rows], "replica-name"),
        (lambda rows: rows[1].update(rails=[]), "rails-missing"),
        (lambda rows: rows[1].update(rails=rows[1]["rails"][:1]), "rails-count"),
        (lambda rows: rows[1]["rails"][0].update(address="10.77.0.1/30"), "address-twice"),
        (lambda rows: rows[1]["rails"][0].update(address="10.77.0.2"), "rail-address"),
        (lambda rows: rows[1]["rails"][0].update(address="{{ nope }}"), "rail-address"),
        (lambda rows: rows[1]["rails"][0].update(address="fd00::2/64"), "rail-address"),
        (lambda rows: rows[1]["rails"][0].update(address="10.77.0.0/30"), "rail-address"),
        (lambda rows: rows[1]["rails"][0].update(address="10.77.0.2/32"), "rail-address"),
        (lambda rows: rows[1]["rails"][0].update(address="10.77.9.2/30"), "rail-subnets-differ"),
        (lambda rows: rows[1]["rails"].reverse(), "rail-subnets-differ"),
        (lambda rows: rows[1]["rails"][0].update(address="169.254.3.2/16"), "subnet-forbidden"),
        (lambda rows: rows[1]["rails"][0].update(address="100.100.100.4/24"), "subnet-forbidden"),
        (lambda rows: rows[1]["rails"][0].update(address="172.17.9.1/24"), "subnet-forbidden"),
        (lambda rows: rows[1].update(address="10.77.0.2"), "rail-is-management"),
        (
            lambda rows: [r["rails"][1].update(address=f"10.77.0.{r['rank'] + 5}/24") for r in rows],
            "same-subnet",
        ),
    ],
)
@pytest.mark.field("B06")
def test_every_refusal_of_the_inventory(change, check) -> None:  # type: ignore[no-untyped-def]
    rows = pair()
    change(rows)
    found = rails.replica_refusals(rows)
    # One mistake is one row a node: what follows from it is not said again.
    assert checks(found) == {check}
    assert len(found) == 1 or len({item.node for item in found}) == len(found)
    for item in found:
        assert item.node and item.found and item.wanted and item.remedy


def test_two_swapped_rails_are_one_row() -> None:
    rows = pair()
    rows[1]["rails"].reverse()
    assert [(item.check, item.found) for item in rails.replica_refusals(rows)] == [
        (
            "rail-subnets-differ",
            "the rails stand in different order: spark-1: 10.77.0.0/30, 10.77.1.0/30; "
            "spark-2: 10.77.1.0/30, 10.77.0.0/30",
        )
    ]


def test_two_mistakes_are_two_rows() -> None:
    rows = pair()
    rows[1].update(rank=0)
    rows[1]["rails"][1].update(address="10.99.1.2/30")
    found = rails.replica_refusals(rows)
    assert [item.check for item in found] == ["rank-twice", "rail-subnets-differ"]


def test_subnets_of_two_replicas_may_not_touch() -> None:
    other = copy.deepcopy(pair(replica="beta"))
    for row in other:
        row["name"] += "b"
        row["rails"] = [{"address": f"10.77.{half}.{row['rank'] + 5}/29"} for half in (0, 1)]
    assert checks(rails.replica_refusals(pair() + other)) == {"subnet-overlap"}
    for row in other:
        row["rails"] = [{"address": f"10.77.{half + 2}.{row['rank'] + 1}/30"} for half in (0, 1)]
    assert rails.replica_refusals(pair() + other) == []


@pytest.mark.field("B06")
def test_what_a_node_already_uses_is_refused() -> None:
    node = probe()
    node["docker"] = {"networks": ["10.77.1.0/24", "fd00::/64"]}
    node["net"]["enP7s7"]["addresses"] = [{"cidr": "10.77.0.9/24", "family": "inet"}]
    found = rails.overlap_refusals(rails.Member.of(pair()[0]), node, ["enp1s0f0np0", "enP2p1s0f0np0"])
    assert [item.check for item in found] == ["subnet-taken", "subnet-taken"]
    assert "interface enP7s7" in found[0].found and "Docker" in found[1].found


def test_plan_of_a_pair() -> None:
    plans, refusals = rails.plan_rails(pair(), {"spark-1": probe(), "spark-2": probe()})
    assert refusals == []
    first = plans["spark-1"][0].as_dict()
    assert first == {
        "rail": 0,
        "netdev": "enp1s0f0np0",
        "hca": "rocep1s0f0",
        "pci": "0000:01:00.0",
        "cage": "p0",
        "address": "10.77.0.1/30",
        "ip": "10.77.0.1",
        "network": "10.77.0.0/30",
        "mtu": 9000,
        "peers": [{"name": "spark-2", "rank": 1, "address": "10.77.0.2"}],
        "peer_address": "10.77.0.2",
    }
    assert [item.netdev for item in plans["spark-2"]] == ["enp1s0f0np0", "enP2p1s0f0np0"]


@pytest.mark.field("B05")
def test_different_cages_are_paired_by_half_and_warned_about() -> None:
    plans, refusals = rails.plan_rails(pair(), {"spark-1": probe(), "spark-2": probe(cabled=("p1",))})
    assert [item.netdev for item in plans["spark-2"]] == ["enp1s0f1np1", "enP2p1s0f1np1"]
    assert [(item.check, item.level) for item in refusals] == [("cage-differs", "warn")]


def test_a_node_without_an_answer_is_one_refusal() -> None:
    plans, refusals = rails.plan_rails(pair(), {"spark-1": probe()})
    assert list(plans) == ["spark-1"]
    assert [(item.check, item.node) for item in refusals] == [("unreachable", "spark-2")]


def test_swapped_names_of_rails_are_taken_as_named() -> None:
    rows = pair()
    for row in rows:
        row["rails"][0]["netdev"], row["rails"][1]["netdev"] = "enP2p1s0f0np0", "enp1s0f0np0"
    plans, _ = rails.plan_rails(rows, {"spark-1": probe(), "spark-2": probe()})
    assert [item.hca for item in plans["spark-1"]] == ["roceP2p1s0f0", "rocep1s0f0"]
    rows[0]["rails"][0].pop("netdev")
    _, refusals = rails.plan_rails(rows, {"spark-1": probe(), "spark-2": probe()})
    assert checks(refusals) == {"rail-netdev"}


@pytest.mark.parametrize("world", [3, 4])
def test_three_and_four_nodes_on_a_switch(world: int) -> None:
    rows = [
        {
            "name": f"n{rank}",
            "replica": "ring",
            "rank": rank,
            "world": world,
            "rails": [{"address": f"10.77.{half}.{rank + 1}/24"} for half in (0, 1)],
        }
        for rank in range(world)
    ]
    assert rails.replica_refusals(rows) == []
    plans, refusals = rails.plan_rails(rows, {str(row["name"]): probe() for row in rows})
    assert refusals == []
    assert len(plans["n0"][1].peers) == world - 1
    assert plans["n1"][0].peer_address == "10.77.0.1"


def ring(world: int) -> list[dict]:  # type: ignore[type-arg]
    """Members of a ring, a cable from each to the next one, addresses as ring_subnets counts them."""
    rows = []
    for rank in range(world):
        addresses = [
            f"10.78.0.{4 * number + rails.ring_host(rail)}/30"
            for rail, number in enumerate(rails.ring_subnets(rank, world))
        ]
        rows.append(
            {
                "name": f"n{rank}",
                "replica": "ring",
                "rank": rank,
                "world": world,
                "rails": [{"address": address} for address in addresses],
            }
        )
    return rows


@pytest.mark.parametrize("world", [3, 4])
def test_a_ring_with_a_cable_to_each_neighbour(world: int) -> None:
    rows = ring(world)
    assert rails.replica_refusals(rows) == []
    both = probe(cabled=("p0", "p1"))
    plans, refusals = rails.plan_rails(rows, {row["name"]: both for row in rows})
    assert refusals == []
    for rank in range(world):
        plan = plans[f"n{rank}"]
        ahead, behind = f"n{(rank + 1) % world}", f"n{(rank - 1) % world}"
        assert [item.netdev for item in plan] == [
            "enp1s0f0np0",
            "enP2p1s0f0np0",
            "enp1s0f1np1",
            "enP2p1s0f1np1",
        ]
        assert [[peer["name"] for peer in item.peers] for item in plan] == [[ahead]] * 2 + [[behind]] * 2
    # Both ends of a wire name each other, and a wire has two ends.
    ends = {item.ip: item.peer_address for plan in plans.values() for item in plan}
    assert len(ends) == 4 * world
    assert all(ends[other] == own for own, other in ends.items())
    assert len({item.network for plan in plans.values() for item in plan}) == 2 * world


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda rows: rows[1]["rails"].reverse(), "rail-subnets-differ"),
        (
            lambda rows: rows[1].update(rails=rows[1]["rails"][2:] + rows[1]["rails"][:2]),
            "rail-subnets-differ",
        ),
        (lambda rows: rows[2]["rails"][0].update(address="10.99.0.1/30"), "rail-subnets-differ"),
        (lambda rows: rows[2]["rails"][1].update(address="10.78.0.1/30"), "address-twice"),
        (lambda rows: rows[2]["rails"].pop(), "rails-count"),
        (lambda rows: rows.pop(), "half-pair"),
    ],
)
def test_a_ring_that_is_not_closed(change, check) -> None:  # type: ignore[no-untyped-def]
    rows = ring(3)
    change(rows)
    assert check in checks(rails.replica_refusals(rows))


def test_a_ring_needs_both_cages_and_three_or_four_nodes() -> None:
    rows = ring(3)
    seen = {row["name"]: probe(cabled=("p0", "p1")) for row in rows} | {"n1": probe()}
    plans, refusals = rails.plan_rails(rows, seen)
    assert sorted(plans) == ["n0", "n2"]
    assert [(item.check, item.node) for item in refusals] == [("cable", "n1")]
    assert "1 of 2 cages" in refusals[0].found
    for world in (1, 2, 5):
        with pytest.raises(rails.RailError, match="a ring has 3 or 4 nodes"):
            rails.ring_subnets(0, world)
    # Four rails in a pair are a mistake, not a ring.
    pairs = pair()
    pairs[0]["rails"] = ring(3)[0]["rails"]
    assert "rails-count" in checks(rails.replica_refusals(pairs))


def test_two_cables_plugged_the_other_way_round_are_named() -> None:
    rows = ring(3)
    names = ["enp1s0f1np1", "enP2p1s0f1np1", "enp1s0f0np0", "enP2p1s0f0np0"]
    for rail, name in zip(rows[0]["rails"], names, strict=True):
        rail["netdev"] = name
    plans, refusals = rails.plan_rails(rows, {row["name"]: probe(cabled=("p0", "p1")) for row in rows})
    assert refusals == []
    assert [item.netdev for item in plans["n0"]] == names
    assert plans["n0"][0].peers[0]["name"] == "n1"


def test_each_node_of_a_ring_measures_towards_the_next() -> None:
    rows = ring(3)
    own = rail_filter.own_rails(rows, "n0")
    assert [row["peers"] for row in own] == [["10.78.0.2"], ["10.78.0.6"], ["10.78.0.17"], ["10.78.0.21"]]
    sent = rail_filter.proof_rails(rows, "n0", "n1")
    heard = rail_filter.proof_rails(rows, "n0", "n1", "serve")
    assert [(row["address"], row["peer"]) for row in sent] == [
        ("10.78.0.1/30", "10.78.0.2"),
        ("10.78.0.5/30", "10.78.0.6"),
    ]
    assert [(row["address"], row["peer"]) for row in heard] == [("10.78.0.2/30", ""), ("10.78.0.6/30", "")]
    couple = rail_filter.proof_rails(pair(), "spark-2", "spark-1")
    assert [(row["address"], row["peer"]) for row in couple] == [
        ("10.77.0.2/30", "10.77.0.1"),
        ("10.77.1.2/30", "10.77.1.1"),
    ]


def test_a_single_spark_needs_no_rails() -> None:
    row = {"name": "solo", "replica": "solo", "rank": 0, "world": 1, "rails": []}
    assert rails.replica_refusals([row]) == []
    nodes: list[dict[str, Any]] = [probe(), probe(cabled=()), {"net": {}}]
    for node in nodes:
        assert rails.plan_rails([row], {"solo": node}) == ({"solo": []}, [])


def rdma(table: list[dict]) -> dict:  # type: ignore[type-arg]
    return {"rocep1s0f0": {"gids": table}}


@pytest.mark.field("B19", "B20", "C08")
@pytest.mark.parametrize("index", [3, 4, 5, 8])
def test_gid_by_address_type_and_netdev(index: int) -> None:
    table = gids("enp1s0f0np0", "192.168.100.10", 2, index)
    assert rails.choose_gid(rdma(table), "rocep1s0f0", "enp1s0f0np0", "192.168.100.10").index == index


@pytest.mark.field("B24", "C08")
def test_gid_with_an_extra_link_local_in_front() -> None:
    table = gids("enp1s0f0np0", "10.0.0.1", 4, 5)
    table += [{"index": 3, "gid": "fe80::dead", "type": "RoCE v2", "ipv4": None, "ndev": "enp1s0f0np0"}]
    assert rails.choose_gid(rdma(table), "rocep1s0f0", "enp1s0f0np0", "10.0.0.1").index == 5


@pytest.mark.field("B19")
def test_no_such_gid_shows_the_table() -> None:
    with pytest.raises(rails.RailError, match="1: RoCE v2 link-local"):
        rails.choose_gid(rdma(gids("enp1s0f0np0", None)), "rocep1s0f0", "enp1s0f0np0", "10.0.0.1")
    with pytest.raises(rails.RailError, match="empty"):
        rails.choose_gid({}, "rocep1s0f0", "enp1s0f0np0", "10.0.0.1")


def test_a_gid_of_another_netdev_does_not_count() -> None:
    table = gids("bond0", "10.0.0.1")
    with pytest.raises(rails.RailError):
        rails.choose_gid(rdma(table), "rocep1s0f0", "enp1s0f0np0", "10.0.0.1")


@pytest.mark.field("B20", "B23")
def test_mixed_indexes_of_one_node_are_refused_with_both_named() -> None:
    one = rails.GidChoice("rocep1s0f0", "enp1s0f0np0", "10.0.0.1", 3)
    two = rails.GidChoice("roceP2p1s0f0", "enP2p1s0f0np0", "10.0.1.1", 4)
    with pytest.raises(rails.RailError, match=r"rocep1s0f0 has 3, roceP2p1s0f0 has 4"):
        rails.one_gid_index([one, two])
    assert rails.one_gid_index([one]) == 3


@given(v1=st.integers(2, 60), v2=st.integers(2, 60), holes=st.sets(st.integers(2, 60), max_size=8))
def test_gid_choice_never_takes_a_v1_or_foreign_slot(v1: int, v2: int, holes: set[int]) -> None:
    if v1 == v2:
        return
    table = gids("enp1s0f0np0", "10.0.0.1", v1, v2) + [
        {"index": hole, "gid": "x", "type": "RoCE v2", "ipv4": "10.9.9.9", "ndev": "enp1s0f0np0"}
        for hole in holes - {v1, v2}
    ]
    assert rails.choose_gid(rdma(table), "rocep1s0f0", "enp1s0f0np0", "10.0.0.1").index == v2


@pytest.mark.field("B07", "B10", "C11")
def test_rendered_netplan_says_what_yaml_reads() -> None:
    text = rails.render_netplan(
        [("enp1s0f0np0", "10.77.0.1/30"), ("enP2p1s0f0np0", "10.77.1.1/30")], 9000, "networkd"
    )
    loaded = yaml.safe_load(text)["network"]
    assert loaded["version"] == 2
    assert loaded["ethernets"]["enP2p1s0f0np0"] == {
        "renderer": "networkd",
        "dhcp4": False,
        "dhcp6": False,
        "accept-ra": False,
        "link-local": [],
        "optional": True,
        "mtu": 9000,
        "addresses": ["10.77.1.1/30"],
    }


def test_nothing_hostile_reaches_the_file() -> None:
    for netdev in ("a b", "x:", "-rf", "{{ x }}", "eth0\n  evil:", ""):
        with pytest.raises(rails.RailError):
            rails.render_netplan([(netdev, "10.77.0.1/30")], 9000, "networkd")
    with pytest.raises(rails.RailError):
        rails.render_netplan([("eth0", "10.77.0.1/30\nx")], 9000, "networkd")
    with pytest.raises(rails.RailError):
        rails.render_netplan([("eth0", "10.77.0.1/30")], 9000, "nmcli")
