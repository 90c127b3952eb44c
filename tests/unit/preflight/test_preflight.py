from __future__ import annotations

import ast
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.filter import preflight as preflight_filter
from ansible_collections.sparkfleet.serving.plugins.module_utils import preflight
from ansible_collections.sparkfleet.serving.plugins.module_utils.preflight import GIB, Options, judge
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe import memory
from ansible_collections.sparkfleet.serving.plugins.module_utils.rails import Refusal

ROOT = Path(__file__).resolve().parents[3]
GB10 = ROOT / "tests/fixtures/gb10"


def halves() -> dict[str, Any]:
    net: dict[str, Any] = {}
    for domain, port, up in (
        ("0000", "p0", True),
        ("0002", "p0", True),
        ("0000", "p1", False),
        ("0002", "p1", False),
    ):
        prefix = "enP2p1s0" if domain == "0002" else "enp1s0"
        net[f"{prefix}f{port[1]}n{port}"] = {
            "carrier": up,
            "admin_up": True,
            "mtu": 9000,
            "speed": 200000 if up else None,
            "driver": "mlx5_core",
            "pci": f"{domain}:01:00.{port[1]}",
            "phys_port_name": port,
            "hca": f"hca-{domain}-{port}",
            "addresses": [],
            "pci_link_width": 4,
        }
    return net


def node(**over: Any) -> dict[str, Any]:
    probe: dict[str, Any] = {
        "net": halves(),
        "rdma": {"hca-0000-p0": {"fw_ver": "28.45.4028", "gids": []}},
        "netplan": {"files": [], "networkmanager": [], "networkd": [], "generated": {}},
        "memory": {
            "total_bytes": 121 * GIB,
            "available_bytes": 117 * GIB,
            "cma_total_bytes": 128 * 1024**2,
            "cma_free_bytes": 60 * 1024**2,
            "swap_total_bytes": 16 * GIB,
        },
        "kernel": {"release": "6.17.0-1032-nvidia", "cmdline": "init_on_alloc=0"},
        "os": {"arch": "aarch64", "dgx_release": "7.6.0", "bios_version": "x"},
        "gpu": {"present": True, "driver": "580.173.02", "processes": []},
        "docker": {
            "present": True,
            "known": True,
            "denied": False,
            "storage_driver": "overlay2",
            "containers": [],
        },
        "listeners": [],
        "systemd": {"memory_killers": []},
        "disk": {
            "paths": {
                "/var/lib/sparkfleet": {"mountpoint": "/", "available_bytes": 900 * GIB, "network": False}
            }
        },
        "missing_privileges": [],
        "timeouts": [],
    }
    probe.update(over)
    return copy.deepcopy(probe)


def pair(**over: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": f"spark-{rank + 1}",
            "replica": "alpha",
            "rank": rank,
            "world": 2,
            "engine": "tensorfold_native",
            "rails": [{"address": f"10.77.{half}.{rank + 1}/30"} for half in (0, 1)],
            **over,
        }
        for rank in (0, 1)
    ]


OPTIONS = Options(
    known_engines=("tensorfold_native",),
    min_available_bytes=109 * GIB,
    ports=(8888, 29620),
    container_name="dsv41-1017-exl3-tf",
    local_paths=("/var/lib/sparkfleet",),
)


def found(options: Options = OPTIONS, first: dict[str, Any] | None = None, **over: Any) -> dict[str, str]:
    """{check: level} with `over` laid over the probe of both nodes."""
    rows = judge(pair(), {"spark-1": first or node(**over), "spark-2": node(**over)}, options)
    return {row.check: row.level for row in rows}


def test_a_good_pair_is_silent() -> None:
    assert found() == {}
    assert preflight.table([]) == "preflight: nothing speaks against it"


@pytest.mark.field("B48")
@pytest.mark.parametrize(
    ("recording", "picture"),
    [
        ("mem-meminfo-6.17-healthy-cma-128M.txt", "healthy"),
        ("mem-meminfo-after-stop-driver-retains-80G.txt", "healthy"),
        ("mem-meminfo-kho-broken-excerpt.txt", "broken"),
        ("mem-meminfo-short-a.txt", "unknown"),
    ],
)
def test_pictures_of_cma(recording: str, picture: str) -> None:
    info = memory.parse_meminfo((GB10 / recording).read_text())
    assert (
        preflight.kho_picture(
            {"cma_total_bytes": info.get("CmaTotal"), "cma_free_bytes": info.get("CmaFree")}
        )
        == picture
    )


@pytest.mark.field("B48")
def test_the_repaired_7_0_kernel_is_not_condemned() -> None:
    repaired = {**node()["memory"], "cma_total_bytes": 0, "cma_free_bytes": 0}
    kernel = {"release": "7.0.0-1019-nvidia", "cmdline": "ro kho=off"}
    assert preflight.kho_picture(repaired) == "repaired"
    assert found(memory=repaired, kernel=kernel) == {}
    assert found(memory=repaired, kernel={**kernel, "cmdline": "ro"}) == {"kernel-kho": "fail"}
    broken = {**repaired, "cma_free_bytes": 940604 * 1024}
    assert found(memory=broken) == {"kernel-kho": "fail"}


@pytest.mark.field("B53")
def test_denied_kernels() -> None:
    assert found(kernel={"release": "6.17.0-1008-nvidia", "cmdline": ""}) == {"kernel-denied": "fail"}


@pytest.mark.field("B49")
def test_the_kernel_of_the_next_boot() -> None:
    kernel = {
        "release": "6.17.0-1032-nvidia",
        "cmdline": "",
        "next_boot": {"release": "7.0.0-31-generic", "cmdline": ""},
    }
    assert found(kernel=kernel) == {"kernel-next-boot": "fail"}
    kernel["next_boot"] = {"release": "6.17.0-1040-nvidia", "cmdline": ""}
    assert found(kernel=kernel) == {"kernel-next-boot": "warn"}


@pytest.mark.field("B50")
@pytest.mark.parametrize(
    ("over", "check", "level"),
    [
        ({"kernel": {"release": "6.17.0-1029-nvidia", "cmdline": ""}}, "parity-kernel", "fail"),
        ({"gpu": {"present": True, "driver": "590.48.01"}}, "parity-driver", "fail"),
        ({"gpu": {"present": True, "driver": "580.159.03"}}, "parity-driver-version", "warn"),
        (
            {"docker": {"present": True, "known": True, "storage_driver": "overlayfs"}},
            "parity-storage",
            "fail",
        ),
        ({"os": {"arch": "aarch64", "dgx_release": "7.5.0", "bios_version": "x"}}, "parity-os", "warn"),
        ({"os": {"arch": "aarch64", "dgx_release": "7.6.0", "bios_version": "y"}}, "parity-bios", "warn"),
        ({"rdma": {"h": {"fw_ver": "28.44.1", "gids": []}}}, "parity-firmware", "warn"),
    ],
)
def test_parity(over: dict[str, Any], check: str, level: str) -> None:
    assert found(first=node(**over))[check] == level


def test_parity_of_memory_and_swap() -> None:
    small = {**node()["memory"], "total_bytes": int(119.6 * GIB), "swap_total_bytes": 32 * GIB}
    seen = found(first=node(memory=small))
    assert (seen["parity-memory"], seen["parity-swap"]) == ("warn", "warn")


def test_architecture() -> None:
    assert found(os={"arch": "x86_64"})["architecture"] == "fail"


@pytest.mark.field("B55")
def test_a_sick_gpu_and_timeouts() -> None:
    seen = found(gpu={"present": False, "reason": "nvidia-smi did not answer"}, timeouts=["lsblk"])
    assert (seen["gpu"], seen["timeout"]) == ("fail", "warn")


@pytest.mark.field("B72")
def test_docker() -> None:
    assert found(docker={"present": True, "denied": True, "known": False}) == {"docker-denied": "fail"}
    assert found(docker={"present": False, "denied": False, "known": False, "reason": "absent"}) == {
        "docker": "fail"
    }
    mine = [{"name": "dsv41-1017-exl3-tf", "owned": False, "state": "exited"}]
    assert found(docker={**node()["docker"], "containers": mine}) == {"container-name": "fail"}
    assert found(docker={**node()["docker"], "containers": [{**mine[0], "owned": True}]}) == {}


@pytest.mark.field("B84")
def test_ports() -> None:
    taken = [{"port": 8888, "address": "0.0.0.0", "pid": 7, "process": "jupyter-lab"}]
    rows = judge(pair(), {"spark-1": node(listeners=taken), "spark-2": node()}, OPTIONS)
    assert [(row.check, row.node) for row in rows] == [("port", "spark-1")]
    assert "jupyter-lab (pid 7)" in rows[0].found
    ours = {**node()["docker"], "containers": [{"name": "x", "owned": True, "state": "running"}]}
    assert found(listeners=taken, docker=ours) == {}


@pytest.mark.field("B35")
def test_memory_is_judged_only_where_a_start_will_happen() -> None:
    low = {**node()["memory"], "available_bytes": 50 * GIB}
    assert found(memory=low) == {"memory": "fail"}
    assert found(Options(min_available_bytes=109 * GIB, start=False), memory=low) == {}
    ours = {**node()["docker"], "containers": [{"name": "x", "owned": True, "state": "running"}]}
    assert found(memory=low, docker=ours) == {}


def test_memory_that_the_driver_keeps_is_called_by_its_name() -> None:
    info = memory.parse_meminfo((GB10 / "mem-meminfo-after-stop-driver-retains-80G.txt").read_text())
    low = {
        **node()["memory"],
        "available_bytes": info["MemAvailable"],
        "unaccounted_bytes": memory.unaccounted(info),
    }
    rows = judge(pair(), {"spark-1": node(memory=low), "spark-2": node()}, OPTIONS)
    assert "driver keeps" in rows[0].remedy


EARLYOOM = {"unit": "earlyoom.service", "active": True, "argv": ["earlyoom", "-m", "10"]}
OOMD = {"unit": "systemd-oomd.service", "active": True, "managed": ["-.slice"]}
FOREIGN = {"unit": "dgx-anti-oom.service", "active": True, "argv": ["anti-oom"]}


@pytest.mark.field("B41")
@pytest.mark.parametrize(
    ("killer", "policy", "level"),
    [
        (EARLYOOM, "refuse", "fail"),
        (EARLYOOM, "report", "warn"),
        (EARLYOOM, "adjust", None),
        (EARLYOOM, "disable", None),
        (EARLYOOM | {"argv": ["earlyoom", "-m", "2,1"]}, "refuse", None),
        (EARLYOOM | {"active": False}, "refuse", None),
        (OOMD, "refuse", "fail"),
        (OOMD, "adjust", None),
        (OOMD | {"managed": []}, "refuse", None),
        (FOREIGN, "adjust", "fail"),
        (FOREIGN, "disable", None),
    ],
)
def test_memory_killers_are_judged_as_the_guard_judges_them(
    killer: dict[str, Any], policy: str, level: str | None
) -> None:
    """Preflight comes first: what it refuses, `guard_killers` could never settle."""
    seen = found(Options(killers=policy), systemd={"memory_killers": [killer]})
    assert seen == ({"memory-killer": level} if level else {})


@pytest.mark.field("B41")
def test_the_gentlest_redline_of_a_node_counts_for_killers() -> None:
    """earlyoom at 2.4 GiB is under the redline of 4 of most, and above that of the replica with 2."""
    low = {"memory_killers": [EARLYOOM | {"argv": ["earlyoom", "-m", "2,1"]}]}
    assert found(Options(), systemd=low) == {}
    assert found(Options(guard_replicas={"alpha": {"samples": 3}}), systemd=low) == {}
    gentle = Options(guard_replicas={"alpha": {"redline_gib": 2}})
    assert found(gentle, systemd=low) == {"memory-killer": "fail"}


@pytest.mark.field("B67")
def test_disk_needs_on_one_filesystem_add_up() -> None:
    needs = (
        {"path": "/var/lib/sparkfleet", "bytes": 500 * GIB, "what": "checkpoint"},
        {"path": "/var/lib/sparkfleet", "bytes": 300 * GIB, "what": "engram"},
        {"path": "/var/lib/sparkfleet", "bytes": 200 * GIB, "what": "rank file", "rank": 0},
    )
    options = Options(disk_needs=needs)
    rows = judge(pair(), {"spark-1": node(), "spark-2": node()}, options)
    assert [(row.check, row.node) for row in rows] == [("disk", "spark-1")]
    assert "checkpoint 500.0 GiB, engram 300.0 GiB, rank file 200.0 GiB" in rows[0].wanted


@pytest.mark.field("B60")
def test_data_on_a_network_filesystem() -> None:
    paths = {"paths": {"/var/lib/sparkfleet": {"mountpoint": "/srv", "fstype": "nfs4", "network": True}}}
    assert found(disk=paths) == {"disk-network": "fail"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"exists": False, "size_bytes": None, "mode": None}, "is absent"),
        ({"exists": True, "size_bytes": None, "mode": None}, "is no file"),
        ({"exists": True, "size_bytes": 0, "mode": "0600"}, "is empty"),
        ({"exists": True, "size_bytes": 9, "mode": "0640"}, "readable by others (mode 0640)"),
        ({"exists": True, "size_bytes": 9, "mode": "0600"}, ""),
        ({"exists": None, "size_bytes": None, "mode": None, "network": True}, ""),
    ],
)
def test_a_file_with_a_secret(facts: dict[str, Any], words: str) -> None:
    wanted = {"node": "spark-1", "name": "ranks_api_key_file", "path": "/etc/key", "private": True}
    disk = {"paths": {"/etc/key": facts}}
    rows = judge(
        pair(), {"spark-1": node(disk=disk), "spark-2": node(disk=disk)}, Options(secret_files=(wanted,))
    )
    told = [row for row in rows if row.check == "secret-file"]
    assert [row.node for row in told] == (["spark-1"] if words else [])
    assert all(words in row.found and "ranks_api_key_file" in row.remedy for row in told)


@pytest.mark.field("B08", "B12")
def test_rails_with_foreign_files_or_a_bond() -> None:
    net = halves()
    net["enp1s0f0np0"]["addresses"] = [
        {"cidr": "10.0.0.1/24", "family": "inet"},
        {"cidr": "10.0.22.1/24", "family": "inet"},
    ]
    files = [{"path": "/etc/netplan/60-old.yaml", "netdevs": ["enp1s0f0np0"], "owned": False}]
    plan = {**node()["netplan"], "files": files}
    first = node(net=net, netplan=plan)
    rows = judge(pair(), {"spark-1": first, "spark-2": node()}, OPTIONS)
    assert [row.check for row in rows] == ["netplan-foreign"]
    assert "60-old.yaml" in rows[0].found and "10.0.22.1/24" in rows[0].found
    assert judge(pair(), {"spark-1": first, "spark-2": node()}, Options(takeover=True)) == []
    net["enp1s0f0np0"].update(master="bond0")
    assert "bond" in {
        row.check for row in judge(pair(), {"spark-1": node(net=net), "spark-2": node()}, OPTIONS)
    }


def test_a_foreign_file_that_says_the_same_is_adopted() -> None:
    net = halves()
    net["enp1s0f0np0"]["addresses"] = [{"cidr": "10.77.0.1/30", "family": "inet"}]
    files = [{"path": "/etc/netplan/60-old.yaml", "netdevs": ["enp1s0f0np0"], "owned": False}]
    made = {"enp1s0f0np0": {"addresses": ["10.77.0.1/30"], "mtu": 9000}}
    first = node(net=net, netplan={**node()["netplan"], "files": files, "generated": made})
    assert judge(pair(), {"spark-1": first, "spark-2": node()}, OPTIONS) == []


@pytest.mark.field("B11")
def test_rail_speed() -> None:
    net = halves()
    net["enp1s0f0np0"]["speed"] = 100000
    assert found(net=net) == {"rail-speed": "warn"}


@pytest.mark.field("B20")
def test_mixed_gid_indexes_once_the_addresses_are_there() -> None:
    net = halves()
    gids = {}
    for number, (netdev, hca) in enumerate(
        (("enp1s0f0np0", "hca-0000-p0"), ("enP2p1s0f0np0", "hca-0002-p0"))
    ):
        net[netdev]["addresses"] = [{"cidr": f"10.77.{number}.1/30", "family": "inet"}]
        gids[hca] = {
            "gids": [{"index": 3 + number, "type": "RoCE v2", "ipv4": f"10.77.{number}.1", "ndev": netdev}]
        }
    rows = judge(pair(), {"spark-1": node(net=net, rdma=gids), "spark-2": node()}, OPTIONS)
    mine = [row for row in rows if row.node == "spark-1"]
    assert [row.check for row in mine] == ["gid"]
    assert "hca-0000-p0 has 3" in mine[0].found and "hca-0002-p0 has 4" in mine[0].found


@pytest.mark.field("B15")
def test_a_firewall_that_keeps_the_ranks_apart_is_refused_with_the_rules_that_open_it() -> None:
    def wall(*rules: tuple[str, str, str], **over: Any) -> dict[str, Any]:
        rows = [{"to": to, "action": action, "source": source} for to, action, source in rules]
        return {"installed": True, "active": True, "default_input": "DROP", "rules": rows, **over}

    def refused(firewall: dict[str, Any]) -> list[Refusal]:
        return judge(pair(), {"spark-1": node(firewall=firewall), "spark-2": node()}, OPTIONS)

    ssh = ("22/tcp", "ALLOW", "Anywhere")
    first = refused(wall(ssh))
    assert [(row.check, row.node, row.level) for row in first] == [("firewall", "spark-1", "fail")]
    assert first[0].remedy == (
        "ufw allow in on enp1s0f0np0 from 10.77.0.0/30; ufw allow in on enP2p1s0f0np0 from 10.77.1.0/30; "
        "or set fabric_open_firewall: true"
    )
    half = ("Anywhere on enp1s0f0np0", "ALLOW", "10.77.0.0/30")
    assert refused(wall(ssh, half))[0].remedy.startswith(
        "ufw allow in on enP2p1s0f0np0 from 10.77.1.0/30; or"
    )
    other = ("Anywhere on enP2p1s0f0np0", "ALLOW", "10.77.0.0/16")
    assert refused(wall(ssh, half, other)) == []
    # The first rule that speaks of the rail decides, as in ufw.
    assert len(refused(wall(("Anywhere on enp1s0f0np0", "DENY", "Anywhere"), half, other))) == 1
    assert refused(wall(("Anywhere", "ALLOW", "10.77.0.0/16"))) == []
    # One node of the rail is not the rail, and a port is not all ports.
    assert len(refused(wall(("Anywhere on enp1s0f0np0", "ALLOW", "10.77.0.2"), other))) == 1
    assert refused(wall(ssh, active=False)) == []
    assert refused(wall(ssh, default_input="ACCEPT")) == []
    assert [row.level for row in refused(wall(rules=None))] == ["warn"]
    # With leave to add rules only a rule that says no is in the way.
    opening = Options(open_firewall=True)
    assert found(opening, firewall=wall(ssh)) == {}
    shut = wall(("Anywhere on enp1s0f0np0", "DENY", "Anywhere"))
    rows = judge(pair(), {"spark-1": node(firewall=shut), "spark-2": node()}, opening)
    assert [(row.check, row.remedy) for row in rows] == [
        ("firewall", "remove the rule that denies it (ufw status numbered)")
    ]
    softened = Options(warn=("firewall",))
    assert found(softened, firewall=wall(ssh)) == {"firewall": "warn"}


@pytest.mark.field("B16")
def test_pcie_errors_of_this_boot() -> None:
    line = "pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:00:00.0"
    log = {"known": True, "fatal": 2, "uncorrected": 1, "lines": [line]}
    rows = judge(pair(), {"spark-1": node(kernel_log=log), "spark-2": node()}, OPTIONS)
    assert [(row.check, row.node, row.level, row.warnable) for row in rows] == [
        ("pcie-errors", "spark-1", "fail", True)
    ]
    assert line in rows[0].found and rows[0].found.startswith("2 kernel lines")
    assert "on all its nodes" in rows[0].remedy
    assert found(kernel_log={"known": True, "fatal": 0, "uncorrected": 1, "lines": ["x"]}) == {
        "pcie-errors": "warn"
    }
    assert found(kernel_log={"known": True, "fatal": 0, "uncorrected": 0, "lines": []}) == {}


@pytest.mark.field("B10")
def test_the_rdma_mtu_is_judged_once_the_rail_is_what_it_should_be() -> None:
    net = halves()
    net["enp1s0f0np0"]["addresses"] = [{"cidr": "10.77.0.1/30", "family": "inet"}]
    small = {"hca-0000-p0": {"fw_ver": "28.45.4028", "active_mtu": 1024, "gids": []}}

    def rows(options: Options = OPTIONS) -> list[Refusal]:
        return judge(pair(), {"spark-1": node(net=net, rdma=small), "spark-2": node()}, options)

    assert [(row.check, row.node, row.level) for row in rows()] == [("rdma-mtu", "spark-1", "fail")]
    assert rows(Options(rdma_mtu=0)) == []
    assert [row.level for row in rows(Options(warn=("rdma-mtu",)))] == ["warn"]
    net["enp1s0f0np0"]["mtu"] = 1500
    assert rows() == []  # the role fabric sets it, then it is judged


@pytest.mark.field("E08")
def test_memory_in_pieces_is_warned_of_before_a_start() -> None:
    def found(page: int, *blocks: int, **more: Any) -> list[tuple[str, str]]:
        one = node()
        one["kernel"]["page_size"] = page
        one["memory"]["buddyinfo"] = [{"node": 0, "zone": "Normal", "free_blocks": list(blocks)}]
        one.update(more)
        rows = judge(pair(), {"spark-1": one, "spark-2": node()}, OPTIONS)
        return [(row.level, row.found) for row in rows if row.check == "memory-pieces"]

    large = 65536  # order 8 is 16 MiB, order 9 is 32 MiB
    assert found(large, 9, 9, 9, 9, 9, 9, 9, 9, 10, 20) == [("warn", "50 free blocks of 16 MiB")]
    assert found(large, 0, 0, 0, 0, 0, 0, 0, 0, 10, 25) == []
    assert found(4096, *[1] * 11) == [], "4 MiB is the largest block there: nothing is known"


@pytest.mark.field("B87")
def test_sudo_comes_first() -> None:
    rows = judge(
        pair(),
        {"spark-1": node(os={"arch": "x86"}), "spark-2": node()},
        OPTIONS,
        sudo={"spark-1": "Missing sudo password"},
    )
    assert rows[0].check == "sudo"


def test_an_unreachable_node_is_one_line_with_its_reason() -> None:
    rows = judge(pair(), {"spark-1": node()}, OPTIONS, messages={"spark-2": "Connection\n refused"})
    assert [(row.check, row.node, row.found) for row in rows] == [
        ("unreachable", "spark-2", "Connection refused")
    ]


def test_engine_and_pins() -> None:
    options = Options(
        known_engines=("tensorfold_native",),
        pins={"engine_commit": {"value": "", "where_to_get": "the seed checkout"}, "x": {"value": "1"}},
    )
    rows = preflight.inventory_refusals(pair(engine="nope"), options)
    assert sorted({row.check for row in rows}) == ["engine-unknown", "pin-unset"]
    assert any(row.remedy == "the seed checkout" for row in rows)


def test_warnings_by_variable_only_where_that_is_sane() -> None:
    low = {**node()["memory"], "available_bytes": GIB}
    options = Options(min_available_bytes=109 * GIB, warn=("memory", "kernel-denied"))
    seen = found(options, memory=low, kernel={"release": "6.17.0-1008-nvidia"})
    assert seen == {"memory": "warn", "kernel-denied": "fail"}


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown preflight option portz"):
        Options.of({"portz": []})


def test_the_table_fits_80_columns_with_the_indent_of_the_callback() -> None:
    rows = judge(
        pair(),
        {"spark-1": node(os={"arch": "x" * 200})},
        OPTIONS,
        messages={"spark-2": "no \x1b[31m way " * 30},
    )
    table = preflight.table(rows)
    assert max(len(line) for line in table.splitlines()) <= 72
    assert "\x1b" not in table


def test_json_is_data() -> None:
    report = preflight_filter.preflight_report(
        pair(), {"spark-1": {"probe": node()}}, {"min_available_bytes": 0}
    )
    loaded = json.loads(report["json"])
    assert loaded["failed"] is True
    assert loaded["rows"][0]["check"] == "unreachable"


def checks_of_the_code() -> dict[str, set[str]]:
    """{check: what its rows may be} from the source: "fail", "soft" (a fail that may be a warning), "warn"."""
    found: dict[str, set[str]] = {}
    for name in ("preflight.py", "rails.py"):
        tree = ast.parse((ROOT / "plugins/module_utils" / name).read_text())
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "Refusal":
                continue
            if not isinstance(call.args[0], ast.Constant):
                continue  # the comparison of nodes: its rules are below
            words = {word.arg: word.value for word in call.keywords}
            level = words.get("level")
            soft = isinstance(words.get("warnable"), ast.Constant)
            always = isinstance(level, ast.Constant) and level.value == "warn"
            found.setdefault(str(call.args[0].value), set()).add(
                "warn" if always else "soft" if soft else "fail"
            )
    different = {
        "kernel": {"release": "other", "cmdline": ""},
        "gpu": {"present": True, "driver": "590.48.01", "processes": []},
        "docker": {**node()["docker"], "storage_driver": "overlayfs"},
        "os": {"arch": "x86_64", "dgx_release": "other", "bios_version": "other"},
        "rdma": {"hca-0000-p0": {"fw_ver": "other", "gids": []}},
        "memory": {**node()["memory"], "total_bytes": 100 * GIB, "swap_total_bytes": 0},
    }
    newer = {**different, "gpu": {"present": True, "driver": "580.1", "processes": []}}
    for over in (different, newer):
        for row in preflight.parity("alpha", {"spark-1": node(), "spark-2": node(**over)}):
            kind = "warn" if row.level == "warn" else "soft" if row.warnable else "fail"
            found.setdefault(row.check, set()).add(kind)
    return found


def test_every_check_is_documented_as_it_is() -> None:
    """Each id in the code has a row in docs/preflight.md with a remedy and what preflight_warn does to it, and the
    other way round."""
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (.*) \| (.+) \| (yes|no|-) \|$",
        (ROOT / "docs/preflight.md").read_text(),
        re.M,
    )
    documented = {check: may for check, _when, _remedy, may in rows}
    assert len(documented) == len(rows)
    code = {
        check: "yes" if "soft" in kinds else "no" if "fail" in kinds else "-"
        for check, kinds in checks_of_the_code().items()
    }
    assert documented == code
    assert sorted(code) == sorted(preflight.CHECKS)


def test_a_misspelt_check_in_preflight_warn_is_refused() -> None:
    rows = preflight.inventory_refusals(pair(), Options(warn=("memori", "port", "xyz")))
    assert [(row.check, row.remedy) for row in rows] == [
        ("warn-unknown", "did you mean memory?"),
        ("warn-unknown", "docs/preflight.md lists them"),
    ]


def test_rows_that_follow_from_another_one_are_left_out() -> None:
    denied = {"present": True, "denied": True, "known": False}
    closed = {"installed": True, "active": True, "default_input": "DROP", "rules": None}
    unread = [{"what": "the kernel log", "need": "root"}]
    seen = {"spark-1": node(docker=denied, firewall=closed, missing_privileges=unread), "spark-2": node()}
    rows = judge(pair(), seen, OPTIONS, sudo={"spark-1": "Missing sudo password"})
    assert [(row.check, row.node) for row in rows] == [("sudo", "spark-1")]
    # Without the refusal of root they are what there is to say.
    assert {row.check for row in judge(pair(), seen, OPTIONS)} == {"docker-denied", "firewall", "not-read"}
    other = node(gpu={"present": True, "driver": "590.48.01", "processes": []}, os={"arch": "x86_64"})
    rows = judge(pair(), {"spark-1": other, "spark-2": node()}, OPTIONS)
    assert [row.check for row in rows] == ["parity-driver", "architecture"]
    hung = node(gpu={"present": False, "reason": "nvidia-smi did not answer"}, timeouts=["nvidia-smi -q"])
    assert [row.check for row in judge(pair(), {"spark-1": hung, "spark-2": node()}, OPTIONS)] == ["gpu"]
    low = {**node()["memory"], "available_bytes": 105 * GIB, "cma_total_bytes": 0, "cma_free_bytes": 9 * GIB}
    assert found(memory=low) == {"kernel-kho": "fail"}
    assert set(found(memory={**low, "available_bytes": 90 * GIB})) == {"kernel-kho", "memory"}


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("spark@10.0.0.2: Permission denied (publickey,password).", "ansible_ssh_private_key_file"),
        ("Invalid/incorrect password: Permission denied, please try again.", "ansible_user"),
        ("Host key verification failed.", "fingerprint"),
        ("ssh: Could not resolve hostname spark-9: Name or service not known", "ansible_host"),
        ("ssh: connect to host 10.0.0.2 port 22: Connection refused", "ansible_port"),
        ("ssh: connect to host 10.0.0.2 port 22: Connection timed out", "power"),
        ("to use the 'ssh' connection type with passwords, you must install the sshpass program", "sshpass"),
        ("something else", "check power, network and SSH"),
    ],
)
def test_the_remedy_answers_what_ssh_said(said: str, remedy: str) -> None:
    rows = judge(pair(), {"spark-1": node()}, OPTIONS, messages={"spark-2": f"Failed to connect: {said}"})
    assert [(row.check, row.node) for row in rows] == [("unreachable", "spark-2")]
    assert remedy in rows[0].remedy


def test_a_failed_task_says_one_line() -> None:
    seen = {"spark-1": node(os={"arch": "x86_64"}), "spark-2": node(systemd={"memory_killers": []})}
    rows = judge(pair(), seen, OPTIONS)
    assert preflight.brief(rows) == "preflight: 1 refusal, see the report above: architecture (spark-1)"
    assert preflight.brief([*rows] * 5).endswith("architecture (spark-1) and 2 more")


def test_pins_of_every_replica_and_their_form() -> None:
    hostvars = {
        "a": {"sparkfleet_replica": "alpha", "rev": "0" * 40},
        "b": {"sparkfleet_replica": "beta", "rev": "main", "image_context": "/x"},
    }
    wanted = [
        {"name": "rev", "pattern": "[0-9a-f]{40}", "where_to_get": "there"},
        {"name": "commit", "unless": "image_context"},
    ]
    pins = preflight_filter.preflight_pins(["a", "b"], hostvars, wanted)
    assert list(pins) == ["rev (replica alpha)", "commit (replica alpha)", "rev (replica beta)"]
    rows = preflight.inventory_refusals(pair(), Options(pins=pins))
    assert [row.found for row in rows] == [
        "commit (replica alpha) is not set",
        "rev (replica beta) is 'main'",
    ]
