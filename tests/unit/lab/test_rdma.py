"""The GID tables of the simulated ConnectX-7."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lab.node.parts import eui64, mac, node_guid
from lab.node.rdma import SLOTS, V1, V2, Gid, GidFaults, GidTable, gid_of

FIXTURES = Path(__file__).parents[2] / "fixtures/lab"
DEFAULT = eui64("02:00:00:00:00:01")


def table(addresses: list[str], faults: GidFaults | None = None) -> GidTable:
    made = GidTable(DEFAULT)
    made.update(addresses, 0.0, faults)
    return made


def used(made: GidTable) -> dict[int, tuple[str, str]]:
    return {index: (entry.gid, entry.kind) for index, entry in enumerate(made.slots) if entry}


def test_the_usual_table_has_ipv4_at_2_and_3() -> None:
    mapped = "0000:0000:0000:0000:0000:ffff:c0a8:640a"
    assert used(table(["192.168.100.10"])) == {
        0: ("fe80:0000:0000:0000:0000:00ff:fe00:0001", V1),
        1: ("fe80:0000:0000:0000:0000:00ff:fe00:0001", V2),
        2: (mapped, V1),
        3: (mapped, V2),
    }


def test_drift_is_the_recorded_table() -> None:
    recorded = {}
    for line in (FIXTURES / "sysfs-gid-table-hole-at-3.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("index") and "empty" not in line:
            _, index, rest = line.split(maxsplit=2)
            kind, _, gid = rest.rpartition(" ")
            recorded[int(index)] = (gid_of(gid), kind.strip())
    made = GidTable(gid_of("fe80::200:ff:fe00:1"))
    made.update(["192.168.100.10"], 0.0, GidFaults(drift=4))
    assert used(made) == recorded
    assert made.slots[3] is None


def test_the_link_local_address_of_the_mac_is_no_second_entry() -> None:
    assert set(used(table(["fe80::ff:fe00:1"]))) == {0, 1}


def test_another_link_local_address_pushes_ipv4_to_4_and_5() -> None:
    made = table(["fe80::1234", "10.0.0.1"])
    assert made.slots[5] == Gid(gid_of("10.0.0.1"), V2)
    assert used(table(["10.0.0.1"], GidFaults(shift=True)))[5] == (gid_of("10.0.0.1"), V2)


def test_a_removed_address_leaves_a_hole_that_the_next_one_fills() -> None:
    made = table(["10.0.0.1", "10.0.1.1"])
    made.update(["10.0.1.1"], 1.0)
    assert made.slots[2:4] == [None, None]
    assert made.slots[5] == Gid(gid_of("10.0.1.1"), V2)
    made.update(["10.0.1.1", "10.0.2.1"], 2.0)
    assert made.slots[3] == Gid(gid_of("10.0.2.1"), V2)


def test_late_entries_come_when_their_time_is_over() -> None:
    made, late = GidTable(DEFAULT), GidFaults(late=8)
    for moment, slots in ((100.0, 2), (107.0, 2), (108.0, 4)):
        made.update(["10.0.0.1"], moment, late)
        assert len(used(made)) == slots


def test_lateness_is_of_new_entries_and_takes_none_away() -> None:
    made, late = table(["10.0.0.1"]), GidFaults(late=8)
    for moment, faults in ((1.0, late), (2.0, GidFaults(late=8, drift=5))):
        made.update(["10.0.0.1", "10.0.0.2"], moment, faults)
        assert {gid for gid, _kind in used(made).values()} == {DEFAULT, gid_of("10.0.0.1")}
    for moment, present, slots in ((3.0, [], 2), (4.0, ["10.0.0.1"], 2), (11.0, ["10.0.0.1"], 2)):
        made.update(present, moment, late)
        assert len(used(made)) == slots
    made.update(["10.0.0.1"], 12.0, late)
    assert len(used(made)) == 4


def test_a_hole_takes_the_ipv4_entries_only_and_goes_with_the_switch() -> None:
    made = table(["10.0.0.1"], GidFaults(hole=True))
    assert set(used(made)) == {0, 1}
    made.update(["10.0.0.1"], 1.0)
    assert set(used(made)) == {0, 1, 2, 3}


addresses = st.ip_addresses(v=4).map(str)


@given(st.lists(st.lists(addresses, unique=True, max_size=5), min_size=1, max_size=8))
def test_every_present_address_has_both_entries_and_no_other_has_any(history: list[list[str]]) -> None:
    made = GidTable(DEFAULT)
    for moment, present in enumerate(history):
        before = list(made.slots)
        made.update(present, float(moment))
        entries = [entry for entry in made.slots[2:] if entry]
        assert sorted((entry.gid, entry.kind) for entry in entries) == sorted(
            (gid_of(address), kind) for address in present for kind in (V1, V2)
        )
        kept = [index for index, entry in enumerate(before) if entry and entry in made.slots]
        assert all(made.slots[index] == before[index] for index in kept)
        assert len(made.slots) == SLOTS


def test_macs_of_a_node_are_spaced_as_recorded_and_give_the_guid() -> None:
    assert [mac(1, offset)[-2:] for offset in (0, 1, 2, 5, 6)] == ["10", "11", "12", "15", "16"]
    assert node_guid(mac(2, 1)) == "4cbb:4703:0000:0211"
