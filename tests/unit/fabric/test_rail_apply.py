"""Deciding what to do about the rails of a node, on built trees with a small stand-in for netplan. Applying
for real is
tested on the lab (tests/lab/test_fabric_role.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.module_utils import rail_apply, rails
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.reader import Answer, Reader
from ansible_collections.sparkfleet.serving.plugins.module_utils.rail_apply import (
    ApplyError,
    Plan,
    RailNode,
    Wanted,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.rails import RailError

RAILS = ("enp1s0f0np0", "enP2p1s0f0np0")
PCI = {
    "enp1s0f0np0": "0000:01:00.0",
    "enp1s0f1np1": "0000:01:00.1",
    "enP2p1s0f0np0": "0002:01:00.0",
    "enP2p1s0f1np1": "0002:01:00.1",
}
WANTED = (Wanted("10.77.0.1/30", peers=("10.77.0.2",)), Wanted("10.77.1.1/30", peers=("10.77.1.2",)))


class Spark(Reader):
    """A node as a tree. `addresses` are live; `netplan generate --root-dir` is played with PyYAML; every
    other command
    is noted and answers from `answers` (default: success, no output)."""

    def __init__(self, root: Path) -> None:
        super().__init__(root=str(root))
        self.addresses: dict[str, list[str]] = {"enP7s7": ["192.168.1.10/24"]}
        self.routes: list[dict[str, Any]] = [{"dst": "default", "dev": "enP7s7", "gateway": "192.168.1.1"}]
        self.answers: dict[str, Answer] = {}
        self.ran: list[str] = []
        for name, pci in PCI.items():
            self.link(name, up=name in RAILS, port="p1" if "f1" in name else "p0", pci=pci)
        self.link("enP7s7", up=True, port=None, pci="0007:01:00.0", driver="r8127", mtu=1500)
        self.put("/etc/netplan/00-base.yaml", "network:\n  version: 2\n  renderer: networkd\n")

    def put(self, name: str, text: str) -> None:
        target = self.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def link(
        self,
        name: str,
        *,
        up: bool,
        port: str | None,
        pci: str,
        driver: str = "mlx5_core",
        mtu: int = 9000,
        admin: bool = True,
    ) -> None:
        base = f"/sys/class/net/{name}"
        self.put(f"{base}/carrier", "1\n" if up else "0\n")
        self.put(f"{base}/flags", "0x1003\n" if admin else "0x1002\n")
        self.put(f"{base}/mtu", f"{mtu}\n")
        self.put(f"{base}/address", "00:00:00:00:00:01\n")
        if port:
            self.put(f"{base}/phys_port_name", port + "\n")
        bus = self.path(f"/sys/bus/pci/devices/{pci}")
        bus.mkdir(parents=True, exist_ok=True)
        self.path(f"/sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        if not (bus / "driver").is_symlink():
            (bus / "driver").symlink_to(f"../../drivers/{driver}")
            self.path(f"{base}/device").symlink_to(bus)

    def run(self, argv: list[str], timeout: float | None = None) -> Answer:  # noqa: ARG002
        text = " ".join(argv)
        if text == "ip -j address show":
            rows = [
                {
                    "ifname": name,
                    "addr_info": [
                        {"family": "inet", "local": item.split("/")[0], "prefixlen": int(item.split("/")[1])}
                        for item in items
                    ],
                }
                for name, items in self.addresses.items()
            ]
            return Answer(0, json.dumps(rows))
        if text == "ip -j -4 route show":
            return Answer(0, json.dumps(self.routes))
        if argv[:3] == ["netplan", "generate", "--root-dir"] and "netplan" not in self.answers:
            return self.generate(Path(argv[3]))
        self.ran.append(text)
        if argv[:2] == ["ip", "link"] and argv[-1] == "up":
            self.put(f"/sys/class/net/{argv[-2]}/flags", "0x1003\n")
        return self.answers.get(argv[0], Answer(0))

    @staticmethod
    def generate(root: Path) -> Answer:
        merged: dict[str, dict[str, Any]] = {}
        for file in sorted((root / "etc/netplan").glob("*.yaml")):
            loaded = yaml.safe_load(file.read_text())["network"]
            for name, row in (loaded.get("ethernets") or {}).items():
                here = merged.setdefault(name, {"addresses": []})
                here["addresses"] += [one for one in row.pop("addresses", []) if one not in here["addresses"]]
                here.update(row)
        out = root / "run/systemd/network"
        out.mkdir(parents=True)
        profiles = root / "run/NetworkManager/system-connections"
        for name, row in merged.items():
            if row.get("renderer") == "NetworkManager":
                # As netplan 1.1 writes it.
                profiles.mkdir(parents=True, exist_ok=True)
                addresses = "\n".join(f"address{n}={one}" for n, one in enumerate(row["addresses"], 1))
                (profiles / f"netplan-{name}.nmconnection").write_text(
                    f"[connection]\nid=netplan-{name}\ntype=ethernet\ninterface-name={name}\n\n"
                    f"[ethernet]\nwake-on-lan=0\nmtu={row.get('mtu', 0)}\n\n"
                    f"[ipv4]\nmethod={'auto' if row.get('dhcp4') else 'manual'}\n{addresses}\n\n"
                    "[ipv6]\nmethod=disabled\n"
                )
                continue
            lines = [
                "[Match]",
                f"Name={name}",
                "[Link]",
                *([f"MTUBytes={row['mtu']}"] if "mtu" in row else []),
            ]
            lines += ["[Network]", *(["DHCP=ipv4"] if row.get("dhcp4") else [])]
            lines += [f"Address={one}" for one in row["addresses"]]
            (out / f"10-netplan-{name}.network").write_text("\n".join(lines) + "\n")
        return Answer(0)


@pytest.fixture
def spark(tmp_path: Path) -> Spark:
    return Spark(tmp_path)


def plan(spark: Spark, wanted: tuple[Wanted, ...] = WANTED, **over: Any) -> Plan:
    return RailNode(spark).plan(wanted, 9000, **over)


def settled(spark: Spark) -> None:
    spark.addresses.update({RAILS[0]: ["10.77.0.1/30"], RAILS[1]: ["10.77.1.1/30"]})


def test_from_nothing_a_file_and_two_rails_are_announced(spark: Spark) -> None:
    found = plan(spark)
    assert found.changed and found.write and found.live_differs
    assert [row["after_header"] for row in found.diff()] == [
        "/etc/netplan/40-cx7.yaml",
        "rail enp1s0f0np0",
        "rail enP2p1s0f0np0",
        "tree /var/lib/sparkfleet/fabric",
    ]
    assert "10.77.1.1/30, mtu 9000" in found.diff()[2]["after"]


def test_nothing_to_do_is_nothing_announced(spark: Spark) -> None:
    settled(spark)
    spark.put("/etc/netplan/40-cx7.yaml", plan(spark).text)
    found = plan(spark)
    assert not found.changed
    assert found.diff() == []


@pytest.mark.field("B94")
def test_the_interface_of_the_connection_and_of_the_default_route_is_refused(
    spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark.routes = [{"dst": "default", "dev": RAILS[0], "gateway": "10.0.0.1"}]
    with pytest.raises(ApplyError, match="default route"):
        plan(spark)
    spark.routes = []
    spark.addresses[RAILS[1]] = ["10.77.1.1/30"]
    monkeypatch.setattr(rail_apply, "ssh_server_address", lambda _reader: "10.77.1.1")
    with pytest.raises(ApplyError, match="Ansible came through it"):
        plan(spark)


def test_the_address_of_the_connection_is_found_behind_sudo(
    spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, parent, environ in (
        (30, 20, "PATH=/bin"),
        (20, 10, "SUDO_USER=x"),
        (10, 1, "A=b\0SSH_CONNECTION=10.0.0.9 5 10.0.0.1 22\0"),
    ):
        spark.put(f"/proc/{pid}/status", f"Name:\tx\nPPid:\t{parent}\n")
        spark.put(f"/proc/{pid}/environ", environ)
    monkeypatch.setattr("os.getpid", lambda: 30)
    assert rail_apply.ssh_server_address(spark) == "10.0.0.1"
    spark.put("/proc/10/environ", "A=b")
    assert rail_apply.ssh_server_address(spark) is None


@pytest.mark.field("B08", "B95")
def test_a_foreign_file_is_refused_then_taken_over(spark: Spark) -> None:
    settled(spark)
    spark.put(
        "/etc/netplan/60-old.yaml",
        f"network:\n  ethernets:\n    {RAILS[0]}:\n      addresses: [10.0.22.1/24]\n",
    )
    with pytest.raises(ApplyError, match=r"60-old\.yaml") as caught:
        plan(spark)
    assert "fabric_takeover" in caught.value.details["remedy"]
    found = plan(spark, takeover=True)
    assert found.disable == ["/etc/netplan/60-old.yaml"]
    assert found.write


def test_a_foreign_file_that_gives_the_same_is_adopted(spark: Spark) -> None:
    settled(spark)
    rows = {name: {"addresses": [one.address], "mtu": 9000} for name, one in zip(RAILS, WANTED, strict=True)}
    spark.put("/etc/netplan/60-mine.yaml", yaml.safe_dump({"network": {"ethernets": rows}}))
    found = plan(spark)
    assert (found.adopted, found.changed) == (["/etc/netplan/60-mine.yaml"], False)
    # The same file without the MTU would lose it at the next boot: not adopted.
    for row in rows.values():
        row.pop("mtu")
    spark.put("/etc/netplan/60-mine.yaml", yaml.safe_dump({"network": {"ethernets": rows}}))
    with pytest.raises(ApplyError, match=r"60-mine\.yaml"):
        plan(spark)


@pytest.mark.field("B07", "B97")
def test_a_networkmanager_profile_is_a_foreign_file(spark: Spark) -> None:
    spark.put(
        "/etc/NetworkManager/system-connections/x.nmconnection", f"[connection]\ninterface-name={RAILS[0]}\n"
    )
    with pytest.raises(ApplyError, match=r"x\.nmconnection"):
        plan(spark)


def test_who_renders(spark: Spark) -> None:
    assert plan(spark).renderer == "networkd"
    spark.put("/etc/netplan/00-base.yaml", "network:\n  version: 2\n  renderer: NetworkManager\n")
    assert "renderer: NetworkManager" in plan(spark).text
    spark.put("/etc/netplan/00-base.yaml", "network:\n  version: 2\n")
    spark.answers["systemctl"] = Answer(3, "inactive\nactive\n")
    assert RailNode(spark).renderer(RailNode(spark).probe(), RAILS) == "NetworkManager"
    spark.answers["systemctl"] = Answer(3, "active\nactive\n")
    assert RailNode(spark).renderer(RailNode(spark).probe(), RAILS) == "networkd"
    # What netplan made for the interface says more than the global line (Founders Edition and MSI differ).
    spark.put(
        f"/run/NetworkManager/system-connections/netplan-{RAILS[0]}.nmconnection",
        "[ipv4]\nmethod=manual\naddress1=10.0.0.1/24\n[ethernet]\nmtu=9000\n",
    )
    probe = RailNode(spark).probe()
    assert RailNode(spark).renderer(probe, RAILS) == "NetworkManager"
    assert probe["netplan"]["generated"][RAILS[0]]["addresses"] == ["10.0.0.1/24"]


def as_networkmanager(spark: Spark, address: str = "10.0.0.1/24") -> None:
    """The rails as a node has them whose desktop manages every interface."""
    spark.put(
        "/etc/netplan/01-network-manager-all.yaml", "network:\n  version: 2\n  renderer: NetworkManager\n"
    )
    spark.path("/etc/netplan/00-base.yaml").unlink()
    spark.put(
        f"/run/NetworkManager/system-connections/netplan-{RAILS[0]}.nmconnection",
        f"[ipv4]\nmethod=manual\naddress1={address}\n[ethernet]\nmtu=9000\n",
    )


@pytest.mark.field("B07")
def test_networkmanager_as_renderer_is_planned_validated_and_applied_by_netplan(
    spark: Spark, tmp_path: Path
) -> None:
    as_networkmanager(spark)
    found = plan(spark)
    assert found.renderer == "NetworkManager" and found.write and not found.disable
    assert found.text.count("renderer: NetworkManager") == 2
    node = RailNode(spark, state_dir=str(tmp_path / "state"))
    script = node.save(found).read_text()
    assert "netplan apply" in script and "networkctl" not in script
    node.activate(RAILS, found.renderer)
    assert "netplan apply" in spark.ran
    assert not [text for text in spark.ran if text.startswith(("nmcli", "networkctl"))]
    # What netplan would make of a wrong file is seen through its profiles, too.
    found.mtu = 1500
    problem = node.validate(found, keep_foreign=False, own=True)
    assert problem is not None and "mtu 1500" in problem


def test_a_second_run_with_networkmanager_changes_nothing(spark: Spark) -> None:
    as_networkmanager(spark, "10.77.0.1/30")
    spark.put("/etc/netplan/40-cx7.yaml", plan(spark).text)
    settled(spark)
    assert not plan(spark).changed


def test_what_networkmanager_notes_of_others_is_no_foreign_profile(spark: Spark) -> None:
    """It writes such a file for every interface that networkd has configured while it runs."""
    spark.put(
        f"/run/NetworkManager/system-connections/{RAILS[0]}.nmconnection",
        f"[connection]\nid={RAILS[0]}\ntype=ethernet\nautoconnect=false\ninterface-name={RAILS[0]}\n"
        "[ipv4]\naddress1=10.77.0.1/30\nmethod=manual\n[.nmmeta]\nnm-generated=true\nvolatile=true\nexternal=true\n",
    )
    assert plan(spark).foreign == []
    taken = "/etc/NetworkManager/system-connections/mine.nmconnection.sparkfleet-disabled"
    spark.put(f"{taken}~", f"[connection]\ninterface-name={RAILS[0]}\n")
    assert plan(spark).foreign == []
    spark.put(taken, f"[connection]\ninterface-name={RAILS[0]}\n")  # NetworkManager would read this one
    with pytest.raises(ApplyError, match="other files configure a rail"):
        plan(spark)


def test_a_profile_that_is_taken_over_is_hidden_from_networkmanager_and_can_come_back(
    spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = spark.path("/etc/NetworkManager/system-connections")
    monkeypatch.setattr(rail_apply, "PROFILES", str(folder))
    spark.put("/etc/NetworkManager/system-connections/mine.nmconnection", "[connection]\n")
    path = f"{folder}/mine.nmconnection"
    hidden = rail_apply.disabled_name(path)
    assert hidden.endswith(".nmconnection.sparkfleet-disabled~")
    assert rail_apply.disabled_name("/etc/netplan/60-x.yaml") == "/etc/netplan/60-x.yaml.sparkfleet-disabled"
    Path(path).rename(hidden)
    node = RailNode(spark, state_dir=str(tmp_path / "state"))
    monkeypatch.setattr(spark, "names", lambda name: sorted(p.name for p in Path(name).glob("*")))
    assert node.undo_plan() == (False, [hidden])
    node.undo()
    assert Path(path).exists() and not Path(hidden).exists()
    assert "nmcli connection reload" in spark.ran


def test_rails_go_from_networkmanager_to_networkd_and_back(spark: Spark, tmp_path: Path) -> None:
    as_networkmanager(spark)
    found = plan(spark, renderer="networkd")
    node = RailNode(spark, state_dir=str(tmp_path / "state"))
    assert "netplan apply" in node.save(found).read_text()
    spark.answers["systemctl"] = Answer(0, "active\n")
    node.activate(RAILS, "networkd")
    assert "netplan apply" in spark.ran


@pytest.mark.field("B12")
def test_a_bonded_half_is_refused(spark: Spark) -> None:
    spark.path(f"/sys/class/net/{RAILS[0]}/master").symlink_to("../bond0")
    with pytest.raises(ApplyError, match="part of bond0"):
        plan(spark)


def test_links_that_nobody_brought_up_are_brought_up_to_look(spark: Spark) -> None:
    for name, pci in PCI.items():
        spark.link(name, up=name in RAILS, port="p1" if "f1" in name else "p0", pci=pci, admin=False)
        spark.path(f"/sys/class/net/{name}/carrier").unlink()  # EINVAL on hardware

    original = spark.run

    def run(argv: list[str], timeout: float | None = None) -> Answer:
        if argv[:2] == ["ip", "link"] and argv[-1] == "up":
            spark.put(f"/sys/class/net/{argv[-2]}/carrier", "1\n" if argv[-2] in RAILS else "0\n")
        return original(argv, timeout)

    spark.run = run  # type: ignore[method-assign]
    node = RailNode(spark)
    found = node.plan(WANTED, 9000)
    assert found.netdevs == list(RAILS)
    assert sorted(node.raised) == sorted(PCI)
    node.lower_again(RAILS)
    assert [text for text in spark.ran if text.endswith("down")] == [
        "ip link set dev enp1s0f1np1 down",
        "ip link set dev enP2p1s0f1np1 down",
    ]


def test_check_mode_guesses_the_cage_and_brings_nothing_up(spark: Spark) -> None:
    for name, pci in PCI.items():
        spark.link(name, up=False, port="p1" if "f1" in name else "p0", pci=pci, admin=False)
        spark.path(f"/sys/class/net/{name}/carrier").unlink()
    found = plan(spark, raise_links=False)
    assert found.netdevs == list(RAILS)
    assert not any("link" in text for text in spark.ran)


@pytest.mark.field("B02")
def test_a_named_rail_without_a_cable_is_refused(spark: Spark) -> None:
    wanted = (Wanted("10.77.0.1/30", "enp1s0f1np1"), Wanted("10.77.1.1/30", "enP2p1s0f1np1"))
    with pytest.raises(ApplyError, match="no carrier on enp1s0f1np1, enP2p1s0f1np1"):
        plan(spark, wanted)


def test_what_netplan_refuses_is_said_and_nothing_is_written(spark: Spark) -> None:
    spark.answers["netplan"] = Answer(1, "", "Error in network definition")
    with pytest.raises(ApplyError, match="Error in network definition"):
        plan(spark)
    spark.answers["netplan"] = Answer(None, absent=True)
    with pytest.raises(ApplyError, match=r"netplan\.io"):
        plan(spark)


def test_a_file_that_cannot_be_read_asks_for_root(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "00-base.yaml":
            raise PermissionError
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ApplyError, match="become"):
        plan(spark)


def test_the_way_back_restores_files_addresses_and_mtu(spark: Spark, tmp_path: Path) -> None:
    spark.addresses[RAILS[0]] = ["192.168.100.10/24"]
    spark.link(RAILS[0], up=True, port="p0", pci=PCI[RAILS[0]], mtu=1500)
    found = plan(spark)
    node = RailNode(spark, state_dir=str(tmp_path / "state"))
    script = node.save(found).read_text()
    assert "rm -f -- /etc/netplan/40-cx7.yaml" in script
    assert "ip -4 address flush dev enp1s0f0np0" in script
    assert "ip link set dev enp1s0f0np0 mtu 1500" in script
    assert "ip address replace 192.168.100.10/24 dev enp1s0f0np0" in script
    node.arm(tmp_path / "state/before/rollback.sh", 90)
    armed = next(text for text in spark.ran if text.startswith("systemd-run"))
    assert "--on-active=90s" in armed and "--unit=sparkfleet-fabric-rollback" in armed
    assert node.pending() is not None


@pytest.mark.field("B10")
def test_confirm_wants_full_packets_from_every_peer_and_tells_mtu_from_silence(
    spark: Spark, tmp_path: Path
) -> None:
    settled(spark)
    found = plan(spark)
    node = RailNode(spark, state_dir=str(tmp_path))
    (tmp_path / "pending.json").write_text("{}")
    spark.answers["ping"] = Answer(0, "2 packets transmitted, 2 received, 0% packet loss, time 1ms")
    assert node.pending() is not None
    rows = node.ask(found, 1)
    assert [(row["netdev"], row["peer"], row["ok"]) for row in rows] == [
        (RAILS[0], "10.77.0.2", True),
        (RAILS[1], "10.77.1.2", True),
    ]
    assert "-M do -s 8972" in next(text for text in spark.ran if text.startswith("ping"))
    # Asking alone keeps nothing: another member may not have its answers.
    assert node.pending() is not None
    assert "systemctl stop sparkfleet-fabric-rollback.timer" not in spark.ran
    node.keep()
    assert node.pending() is None
    assert "systemctl stop sparkfleet-fabric-rollback.timer" in spark.ran

    (tmp_path / "pending.json").write_text("{}")
    original = spark.run

    def small_only(argv: list[str], timeout: float | None = None) -> Answer:
        if argv[0] == "ping" and "8972" in argv:
            return Answer(1, "2 packets transmitted, 0 received, 100% packet loss")
        return original(argv, timeout)

    spark.run = small_only  # type: ignore[method-assign]
    with pytest.raises(ApplyError, match="small packets only: the MTU differs") as caught:
        node.ask(found, 0.1)
    assert caught.value.details["rollback_armed"] is True
    assert node.pending() is not None


@pytest.mark.field("B05")
def test_a_cable_that_moved_leaves_no_address_behind(spark: Spark, tmp_path: Path) -> None:
    others = ("enp1s0f1np1", "enP2p1s0f1np1")
    text = rails.render_netplan([(name, one.address) for name, one in zip(others, WANTED)], 9000, "networkd")
    spark.put("/etc/netplan/40-cx7.yaml", text)
    spark.addresses[others[0]] = ["10.77.0.1/30"]
    found = plan(spark)
    assert found.write and found.netdevs == list(RAILS)
    assert found.left == {
        others[0]: {"addresses": ["10.77.0.1/30"], "mtu": 9000},
        others[1]: {"addresses": [], "mtu": 9000},
    }
    announced = {row["before_header"]: row["after"] for row in found.diff()}
    assert announced[f"rail {others[0]}"] == f"{others[0]}: no IPv4, mtu 9000\n"
    assert f"rail {others[1]}" not in announced
    script = RailNode(spark, state_dir=str(tmp_path / "state")).save(found).read_text()
    assert f"ip address replace 10.77.0.1/30 dev {others[0]}" in script


def test_running_ranks_are_found_and_an_unknown_engine_is_not_empty(spark: Spark) -> None:
    rows = [
        {"Names": ["/r0"], "State": "running", "Labels": {"sparkfleet.install": "x"}},
        {"Names": ["/other"], "State": "running", "Labels": {}},
    ]
    spark._recorded = {"GET /info": {"ServerVersion": "1"}, "GET /containers/json": rows}
    assert RailNode(spark).owned_ranks() == ["r0"]
    spark._recorded = {"docker": "timeout"}
    with pytest.raises(ApplyError, match="does not say"):
        RailNode(spark).owned_ranks()
    spark._recorded = {}
    assert RailNode(spark).owned_ranks() == []


def test_more_rails_than_halves(spark: Spark) -> None:
    with pytest.raises(ApplyError, match="3 rails wanted"):
        plan(spark, (*WANTED, Wanted("10.77.2.1/30")))
    with pytest.raises(RailError):
        plan(spark, (Wanted("nonsense"), WANTED[1]))
