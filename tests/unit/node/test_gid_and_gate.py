"""The GID index at every start, and whether a rank may start on this node."""

from __future__ import annotations

import shutil
import socket

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.nfs import volume_options
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError

from node.sparkfleet_node import gate, gid
from tests.unit.node.conftest import INSTALL, TreeHost, add_gid, launch_of
from tests.unit.node.fake_docker import FakeDocker


def names_that_fail(node: TreeHost, api: DockerApi, **settings: object) -> dict[str, str]:
    rows = gate.every(node, api, launch_of(0, **settings))
    return {row["check"]: row.get("msg", "") for row in rows if not row["ok"]}


@pytest.mark.field("B19", "B24")
def test_the_index_is_found_by_address_type_and_netdev(node: TreeHost) -> None:
    assert gid.resolve_now(node, launch_of(0)) == 3
    for hca, netdev, address in (
        ("rocep1s0f0", "enp1s0f0np0", "10.77.0.1"),
        ("roceP2p1s0f0", "enP2p1s0f0np0", "10.77.0.5"),
    ):
        shutil.rmtree(node.root / "sys/class/infiniband" / hca / "ports/1/gids")
        add_gid(node.root, hca, 3, "", netdev)
        add_gid(node.root, hca, 4, address, netdev, "IB/RoCE v1")
        add_gid(node.root, hca, 6, address, netdev)
    assert gid.resolve_now(node, launch_of(0)) == 6


@pytest.mark.field("B20")
def test_rails_at_different_indexes_are_refused_with_both_named(node: TreeHost) -> None:
    (node.root / "sys/class/infiniband/roceP2p1s0f0/ports/1/gids/3").unlink()
    add_gid(node.root, "roceP2p1s0f0", 5, "10.77.0.5", "enP2p1s0f0np0")
    with pytest.raises(Refusal, match=r"rocep1s0f0 has 3, roceP2p1s0f0 has 5"):
        gid.resolve_now(node, launch_of(0))


@pytest.mark.field("B23")
def test_a_build_with_a_fixed_index_is_refused_where_it_matters(node: TreeHost) -> None:
    with pytest.raises(Refusal, match="index 5 compiled in"):
        gid.resolve_now(node, launch_of(0, ring_gid_fixed=5))
    assert gid.resolve_now(node, launch_of(0, ring_gid_fixed=3)) == 3
    assert gid.resolve(node, launch_of(0, gid_mode="auto"), 0) is None


def test_an_entry_that_comes_late_is_waited_for(node: TreeHost) -> None:
    import threading

    path = node.root / "sys/class/infiniband/rocep1s0f0/ports/1/gids/3"
    text = path.read_text()
    path.unlink()
    threading.Timer(0.3, lambda: path.write_text(text)).start()
    assert gid.resolve(node, launch_of(0), 10) == 3


def test_a_healthy_node_passes(node: TreeHost, api: DockerApi) -> None:
    assert names_that_fail(node, api) == {}


def test_the_broken_kernel_is_refused(node: TreeHost, api: DockerApi) -> None:
    text = node.read("/proc/meminfo") or ""
    node.write("/proc/meminfo", text.replace("CmaTotal: 131072 kB", "CmaTotal: 0 kB"))
    assert "kho=off" in names_that_fail(node, api)["kernel"]
    node.write("/proc/meminfo", text.replace("131072 kB", "0 kB").replace("CmaFree: 1 kB", "CmaFree: 0 kB"))
    assert names_that_fail(node, api) == {}


@pytest.mark.field("B28", "B33")
@pytest.mark.parametrize("state", ["failed", "inactive", "activating"])
def test_a_clock_unit_that_has_not_run_is_refused(state: str, node: TreeHost, api: DockerApi) -> None:
    """Stopped by hand counts as well; a node without our unit has decided for itself."""
    node.unit("sparkfleet-gpu-clocks.service").update({"LoadState": "loaded", "ActiveState": state})
    assert "clocks" in names_that_fail(node, api)
    node.unit("sparkfleet-gpu-clocks.service").update({"LoadState": "not-found", "ActiveState": "inactive"})
    assert "clocks" not in names_that_fail(node, api)


@pytest.mark.field("T03", "T08")
def test_a_rail_without_address_or_carrier_is_refused(node: TreeHost, api: DockerApi) -> None:
    node.write("/sys/class/net/enP2p1s0f0np0/carrier", "0\n")
    assert "enP2p1s0f0np0 has no carrier" in names_that_fail(node, api)["rails"]
    del node.addresses["enP2p1s0f0np0"]
    assert "no IPv4 address" in names_that_fail(node, api)["rails"]


@pytest.mark.field("T16")
def test_two_rank_files_or_a_short_one_are_refused(node: TreeHost, api: DockerApi) -> None:
    node.write("/var/lib/sparkfleet/rank_file_dir/rank1of2-0.bin", "x")
    assert "exactly one rank file" in names_that_fail(node, api)["files"]
    node.remove("/var/lib/sparkfleet/rank_file_dir/rank1of2-0.bin")
    node.write(f"/var/lib/sparkfleet/rank_file_dir/rank0of2-{'0' * 20}.bin", "123")
    assert "wrong size" in names_that_fail(node, api)["files"]


@pytest.mark.field("T19", "T22")
def test_a_missing_mount_or_image_is_refused(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    (node.root / "var/lib/sparkfleet/engram").rmdir()
    docker.images.clear()
    failing = names_that_fail(node, api)
    assert "/engram" in failing["files"] and "not on this node" in failing["image"]


@pytest.mark.field("B57")
def test_a_volume_that_is_absent_or_whose_server_is_dead_is_refused_before_docker_touches_it(
    node: TreeHost, api: DockerApi, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of(0)
    mount = next(one for one in launch["container"]["mounts"] if one["target"] == "/engram")
    mount["source"] = "sparkfleet-engram-0123"

    def refused() -> str:
        rows = {row["check"]: row for row in gate.every(node, api, launch)}
        assert rows["files"]["ok"]
        return str(rows["volumes"].get("msg", ""))

    assert "does not exist" in refused()
    docker.volumes["sparkfleet-engram-0123"] = {"Options": None}
    assert refused() == "", "a volume of this node needs no server"
    docker.volumes["sparkfleet-engram-0123"] = {"Options": volume_options("127.0.0.1", "/srv/tables")}
    asked: list[str] = []
    monkeypatch.setattr(gate, "ping", asked.append)
    assert (refused(), asked) == ("", ["127.0.0.1"])

    def dead(_address: str) -> None:
        raise TreeError("nobody listens on 127.0.0.1:2049")

    monkeypatch.setattr(gate, "ping", dead)
    assert "cannot be used: nobody listens on 127.0.0.1:2049" in refused()
    docker.denied = True
    assert "cannot be used" in refused()


@pytest.mark.field("B84")
def test_a_busy_port_is_named_with_its_owner(node: TreeHost, api: DockerApi) -> None:
    launch = launch_of(0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        launch["ports"] = {"api": port, "rendezvous": None}
        row = next(row for row in gate.every(node, api, launch) if row["check"] == "ports")
        assert not row["ok"] and f"API port {port} is in use" in row["msg"]
        from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host

        assert "pid" in gate.listener(Host(), port)
    launch["ports"] = {"api": port, "rendezvous": None}
    assert all(row["ok"] for row in gate.every(node, api, launch))


def test_a_foreign_container_of_the_name_is_refused(
    node: TreeHost, api: DockerApi, docker: FakeDocker
) -> None:
    docker.add("dsv41-1017-exl3-tf", {"sparkfleet.install": "another", "sparkfleet.replica": "spark-a"})
    assert "not ours" in names_that_fail(node, api)["container"]


@pytest.mark.field("T11")
def test_memory_is_judged_only_where_a_start_will_happen(
    node: TreeHost, api: DockerApi, docker: FakeDocker
) -> None:
    node.write("/proc/meminfo", "MemTotal: 127535084 kB\nMemAvailable: 40174336 kB\nMemFree: 3139656 kB\n")
    message = names_that_fail(node, api)["memory"]
    assert "38.3 GiB available" in message and "109.0 GiB" in message and "driver's pool" in message
    docker.add("dsv41-1017-exl3-tf", {"sparkfleet.install": INSTALL, "sparkfleet.replica": "spark-a"})
    assert names_that_fail(node, api) == {}


def test_docker_down_is_not_nothing_running(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    docker.denied = True
    failing = names_that_fail(node, api)
    assert "does not answer" in failing["container"] and "does not answer" in failing["image"]
