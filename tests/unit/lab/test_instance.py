"""Names, inventory, images and fault switches of a lab, without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lab import fault
from lab.config import REPOSITORY, Instance, instance, third_octet
from lab.image import BASE_WHEELS, pack, short_hash, tree_parts
from lab.instance import CAPABILITIES, DEVICES, daemon_json
from lab.inventory import inventory_text
from lab.node import cable
from lab.node.parts import FUNCTIONS


def test_the_default_lab_has_fixed_addresses_and_others_their_own() -> None:
    default = instance("lab")
    assert (default.subnet, default.address("spark-1"), default.hub_address) == (
        "172.31.77.0/24",
        "172.31.77.11",
        "172.31.77.10",
    )
    assert third_octet("fabric") == third_octet("fabric") != third_octet("ranks")
    assert all(80 <= third_octet(name) < 250 for name in ("a", "b", "c"))


@pytest.mark.parametrize("name", ["", "Lab", "1lab", "a/b", "x" * 30, "a b"])
def test_a_name_that_docker_or_a_path_would_mind_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_NAME", name or "-")
    with pytest.raises(ValueError, match="LAB_NAME"):
        instance(name or None)


def test_the_committed_inventory_is_the_default_labs() -> None:
    committed = (REPOSITORY / "inventory/lab/hosts.yml").read_text(encoding="utf-8")
    assert committed == inventory_text(instance("lab"), "../../.lab/lab/ssh")


def test_the_rails_of_a_pair_are_two_subnets() -> None:
    hosts = yaml.safe_load(inventory_text(Instance("x", 99), "../ssh"))["all"]["children"]["sparks"]["hosts"]
    rails = [[rail["address"] for rail in host["sparkfleet_rails"]] for host in hosts.values()]
    assert rails == [["10.77.0.1/30", "10.77.0.5/30"], ["10.77.0.2/30", "10.77.0.6/30"]]


def test_a_node_may_not_have_what_reaches_its_machine() -> None:
    forbidden = {
        "ALL",
        "SYS_TIME",
        "SYS_MODULE",
        "SYS_RAWIO",
        "SYS_BOOT",
        "SYS_RESOURCE",
        "SYSLOG",
        "MAC_ADMIN",
    }
    assert not forbidden & set(CAPABILITIES)
    assert {device.split(":")[0] for device in DEVICES} == {"/dev/fuse", "/dev/net/tun"}


def test_one_node_has_each_image_store_and_no_nvidia_runtime() -> None:
    settings = [json.loads(daemon_json(node)) for node in ("spark-1", "spark-2")]
    assert settings[0]["storage-driver"] == "overlay2"
    assert settings[1]["features"] == {"containerd-snapshotter": True}
    assert all(
        "runtimes" not in each and each["insecure-registries"] == ["hub.lab:5000"] for each in settings
    )


def test_names_of_cable_ends_fit_the_kernel_and_differ() -> None:
    names = [cable.end_name(node, function) for node in (1, 2) for function in FUNCTIONS]
    assert len(set(names)) == 8
    assert all(len(name) < 16 for name in [*names, *(function.netdev for function in FUNCTIONS)])


def test_the_hash_of_a_tree_covers_names_modes_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    seen = {short_hash(tree_parts(tmp_path))}
    (tmp_path / "a").write_text("2")
    seen.add(short_hash(tree_parts(tmp_path)))
    (tmp_path / "a").chmod(0o755)
    seen.add(short_hash(tree_parts(tmp_path)))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(short_hash(tree_parts(tmp_path)))
    assert len(seen) == 4


def test_a_context_has_texts_and_trees_without_caches(tmp_path: Path) -> None:
    import tarfile

    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/x.pyc").write_text("")
    (tmp_path / "file").write_text("x")
    with tarfile.open(fileobj=pack({"Dockerfile": "FROM x\n", "tree": tmp_path})) as archive:
        assert sorted(archive.getnames()) == ["Dockerfile", "tree", "tree/file"]


def test_the_wheel_of_the_base_image_is_the_pinned_one() -> None:
    assert all(
        f'"{wheel}"' in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8") for wheel in BASE_WHEELS
    )


def test_fault_switches_have_names_of_their_own_and_a_listing() -> None:
    known = fault.known()
    assert {
        "cut-rail",
        "no-cable",
        "mtu",
        "gid-drift",
        "gid-hole",
        "sink-memory",
        "smi-hang",
        "low-power",
    } <= set(known)
    assert len(fault.listing().splitlines()) == len(known)
    # A driver that has restarted cannot be taken back; everything else that is acted out can.
    assert [each.name for each in known.values() if each.act and not each.undo] == ["driver-restart"]
