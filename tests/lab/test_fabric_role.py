"""The role fabric on two nodes: from every start to the right end or to one clear refusal, and `changed=0`
after."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from lab.testing import Node, eventually, lab, nodes
from tests.proof.prove import Run, play, prove_check_mode

pytestmark = pytest.mark.lab
PLAYBOOK = "tests/lab/fabric.yml"
OWN = "/etc/netplan/40-cx7.yaml"
RAILS = ("enp1s0f0np0", "enP2p1s0f0np0")
OTHER = ("enp1s0f1np1", "enP2p1s0f1np1")
STATE = "/var/lib/sparkfleet/fabric"


NETWORKMANAGER = """[keyfile]
unmanaged-devices=interface-name:enP7s7;interface-name:docker0;interface-name:veth*

[device-rails]
match-device=interface-name:enp1s0f*,interface-name:enP2p1s0f*
managed=1
"""
NETWORKMANAGER_ALL = "network:\n  version: 2\n  renderer: NetworkManager\n"


def inventory() -> str:
    return str(lab().directory / "inventory")


def run(*extra: str, **variables: object) -> Run:
    words = ["-e", json.dumps(variables)] if variables else []
    return play(PLAYBOOK, inventory(), extra=[*words, *extra])


def preflight_failures() -> set[tuple[str, str]]:
    """(node, check) of what the playbook preflight refuses now."""
    result = play("playbooks/preflight.yml", inventory(), extra=["-e", "preflight_format=json"])
    loaded, _end = json.JSONDecoder().raw_decode(
        result.output[result.output.index("{\n", result.output.index("msg: |-")) :]
    )
    return {(row["node"], row["check"]) for row in loaded["rows"] if row["level"] == "fail"}


def planned(node: Node) -> list[str]:
    hosts = yaml.safe_load(Path(inventory(), "hosts.yml").read_text())["all"]["children"]["sparks"]["hosts"]
    return [rail["address"] for rail in hosts[node.name]["sparkfleet_rails"]]


def ipv4(node: Node, netdev: str) -> list[str]:
    rows = json.loads(node.text("ip", "-j", "-4", "address", "show", "dev", netdev) or "[]")
    return [
        f"{item['local']}/{item['prefixlen']}" for row in rows for item in row.get("addr_info", []) if item
    ]


def holds(node: Node, netdev: str, addresses: Sequence[str]) -> bool:
    return sorted(ipv4(node, netdev)) == sorted(addresses)


def gone(node: Node) -> bool:
    """Neither the file nor an address of it is there."""
    return ipv4(node, RAILS[0]) == [] and node.run("test", "-e", OWN).status != 0


def mtu(node: Node, netdev: str) -> int:
    return int(node.read(f"/sys/class/net/{netdev}/mtu"))


def seen(node: Node, netdev: str, name: str) -> str:
    """A sysfs file of a netdev that may just come or go."""
    result = node.run("cat", f"/sys/class/net/{netdev}/{name}")
    return result.text.strip() if result.status == 0 else ""


def right(node: Node, netdevs: Sequence[str] = RAILS) -> bool:
    return [ipv4(node, name) for name in netdevs] == [[one] for one in planned(node)] and all(
        mtu(node, name) == 9000 for name in netdevs
    )


def bare(node: Node) -> None:
    """Rails as a machine has them that nobody has set up: no file, no address, links down, MTU 1500."""
    node.run("systemctl", "stop", "sparkfleet-fabric-rollback.timer")
    node.run("rm", "-rf", STATE)
    node.text("sh", "-c", "cd /etc/netplan && find . -type f ! -name 00-base.yaml -delete")
    for name in (*RAILS, *OTHER):
        node.run("ip", "address", "flush", "dev", name)
        node.run("ip", "link", "set", name, "mtu", "1500")
    node.text("netplan", "generate")
    node.text("networkctl", "reload")
    for name in (*RAILS, *OTHER):
        node.run("ip", "address", "flush", "dev", name)
        node.run("ip", "link", "set", name, "mtu", "1500", "down")


def foreign(node: Node, name: str, addresses: dict[str, list[str]], mtu: int | None = 9000) -> None:
    """A netplan file that somebody else wrote, applied."""
    ethernets = {}
    for netdev, items in addresses.items():
        ethernets[netdev] = {
            "dhcp4": False,
            "link-local": [],
            "addresses": items,
            **({"mtu": mtu} if mtu else {}),
        }
    text = yaml.safe_dump({"network": {"version": 2, "ethernets": ethernets}})
    node.write(f"/etc/netplan/{name}", text, 0o600)
    node.text("netplan", "apply")
    for netdev, items in addresses.items():
        eventually(partial(holds, node, netdev, items), f"{items} on {netdev}")


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    both = nodes()
    for node in both:
        bare(node)
    yield both
    for node in both:
        bare(node)


def converged(both: tuple[Node, Node], result: Run, changed: int = 2) -> None:
    assert result.rc == 0, result.output[-3000:]
    assert result.changed_count() == changed, result.output[-3000:]
    assert all(right(node) for node in both)
    again = run()
    assert (again.rc, again.changed_count()) == (0, 0), again.output[-3000:]


def refused(result: Run, *words: str) -> None:
    assert result.rc != 0
    flat = " ".join(result.output.split())
    for word in words:
        assert word in flat, result.output[-3000:]


@pytest.mark.field("B03", "B10", "B18")
def test_check_mode_tells_the_truth_from_no_addresses(pair: tuple[Node, Node]) -> None:
    proof = prove_check_mode(PLAYBOOK, inventory())
    assert not proof.problems, proof.report()
    assert proof.real is not None and proof.real.changed_count() == 2
    for node in pair:
        assert right(node)
        assert node.text("stat", "-c", "%a %U", OWN) == "600 root"
        assert node.run("systemctl", "is-active", "sparkfleet-fabric-rollback.timer").status != 0
        # Only the cage with the cable; the other one is as it was.
        assert all(ipv4(node, name) == [] for name in OTHER)


@pytest.mark.field("B07")
def test_the_addresses_are_there_after_a_restart(pair: tuple[Node, Node]) -> None:
    assert run().rc == 0
    for node in pair:
        node.restart()
    for node in pair:
        eventually(partial(right, node), "the rails after a restart", 60)
    again = run()
    assert (again.rc, again.changed_count()) == (0, 0), again.output[-3000:]


def test_a_valid_foreign_set_up_is_adopted(pair: tuple[Node, Node]) -> None:
    for node in pair:
        foreign(node, "60-mine.yaml", {name: [one] for name, one in zip(RAILS, planned(node), strict=True)})
    result = run()
    assert (result.rc, result.changed_count()) == (0, 0), result.output[-3000:]
    for node in pair:
        assert node.run("test", "-e", OWN).status != 0


@pytest.mark.field("B08", "B95")
def test_a_stale_second_file_is_refused_then_taken_over(pair: tuple[Node, Node]) -> None:
    assert run().rc == 0
    first = pair[0]
    foreign(first, "60-old-mesh.yaml", {RAILS[0]: ["10.0.22.1/24", planned(first)[0]]})
    result = run()
    refused(result, "60-old-mesh.yaml", "fabric_takeover")
    assert result.changed_count() == 0
    converged(pair, run(fabric_takeover=True), changed=1)
    names = first.text("ls", "/etc/netplan").split()
    assert "60-old-mesh.yaml.sparkfleet-disabled" in names and "00-base.yaml" in names


def test_nvidias_own_file_is_not_ours(pair: tuple[Node, Node]) -> None:
    for number, node in enumerate(pair):
        foreign(
            node,
            "40-cx7.yaml",
            {RAILS[0]: [f"192.168.100.1{number}/24"], RAILS[1]: [f"192.168.101.1{number}/24"]},
            None,
        )
    refused(run(), "40-cx7.yaml", "fabric_takeover")
    converged(pair, run(fabric_takeover=True))


@contextmanager
def networkmanager(node: Node) -> Iterator[None]:
    """NetworkManager renders by default, as where Ubuntu's desktop was installed. It leaves the lab's own interface
    and Docker's alone, and must be told to take a veth."""
    node.write("/etc/NetworkManager/conf.d/10-lab.conf", NETWORKMANAGER)
    node.write("/etc/netplan/01-network-manager-all.yaml", NETWORKMANAGER_ALL, 0o600)
    node.text("systemctl", "unmask", "NetworkManager.service")
    node.text("systemctl", "enable", "--now", "NetworkManager.service")
    try:
        yield
    finally:
        node.text("systemctl", "disable", "--now", "NetworkManager.service")
        node.text("systemctl", "mask", "NetworkManager.service")
        node.text("sh", "-c", "rm -rf /run/NetworkManager /var/lib/NetworkManager/*")
        node.run("rm", "-f", "/etc/NetworkManager/conf.d/10-lab.conf")


def managed_by(node: Node, netdev: str) -> str:
    """The connection of NetworkManager that an interface has, or its state where it has none."""
    shown = node.text("nmcli", "-g", "GENERAL.STATE,GENERAL.CONNECTION", "device", "show", netdev).split("\n")
    return shown[1] if shown[1:] and shown[1] else shown[0]


@pytest.mark.field("B07", "C11")
def test_networkmanager_renders_the_rails_and_has_them_after_a_restart(pair: tuple[Node, Node]) -> None:
    with networkmanager(pair[0]), networkmanager(pair[1]):
        converged(pair, run())
        for node in pair:
            assert node.read(OWN).count("renderer: NetworkManager") == 2
            assert [managed_by(node, name) for name in RAILS] == [f"netplan-{name}" for name in RAILS]
            # The address of the connection and Docker's bridge are nobody's business.
            assert [managed_by(node, name) for name in ("enP7s7", "docker0")] == ["10 (unmanaged)"] * 2
        for node in pair:
            node.restart()
        for node in pair:
            eventually(partial(right, node), "the rails after a restart", 60)
        again = run()
        assert (again.rc, again.changed_count()) == (0, 0), again.output[-3000:]


@pytest.mark.field("B10")
def test_a_wrong_mtu_at_one_end_is_repaired(pair: tuple[Node, Node]) -> None:
    assert run().rc == 0
    pair[1].text("ip", "link", "set", RAILS[1], "mtu", "1500")
    converged(pair, run(), changed=1)


@pytest.mark.field("B06")
def test_a_changed_address_leaves_no_old_one(pair: tuple[Node, Node], tmp_path: Path) -> None:
    assert run().rc == 0
    source = Path(inventory())
    text = (
        (source / "hosts.yml")
        .read_text()
        .replace("10.77.0.5/30", "10.77.9.1/30")
        .replace("10.77.0.6/30", "10.77.9.2/30")
    )
    (tmp_path / "hosts.yml").write_text(text.replace("{{ inventory_dir }}", str(source)))
    result = play(PLAYBOOK, str(tmp_path / "hosts.yml"))
    assert result.rc == 0, result.output[-3000:]
    assert [ipv4(node, RAILS[1]) for node in pair] == [["10.77.9.1/30"], ["10.77.9.2/30"]]
    converged(pair, run())


@pytest.mark.field("B02")
def test_no_cable_is_one_refusal_and_a_cable_that_comes_later_converges(pair: tuple[Node, Node]) -> None:
    with pair[0].fault("no-cable"):
        eventually(
            lambda: pair[0].run("test", "-e", f"/sys/class/net/{RAILS[0]}").status != 0, "the device to go"
        )
        refused(run(), "no ConnectX-7 device on the bus")
    # The cable comes while the node runs: new devices, nothing remembered.
    eventually(lambda: seen(pair[0], OTHER[1], "phys_port_name") == "p1", "the device", 30)
    converged(pair, run())


@pytest.mark.field("B02", "B07")
def test_rails_that_come_back_with_the_cable_need_no_second_run(pair: tuple[Node, Node]) -> None:
    assert run().rc == 0
    with pair[0].fault("no-cable"):
        eventually(
            lambda: pair[0].run("test", "-e", f"/sys/class/net/{RAILS[0]}").status != 0, "the device to go"
        )
    eventually(
        lambda: pair[0].run("test", "-e", f"/sys/class/net/{RAILS[1]}").status == 0 and right(pair[0]),
        "addresses and MTU to return",
        30,
    )
    again = run()
    assert (again.rc, again.changed_count()) == (0, 0), again.output[-3000:]


@pytest.mark.field("B05", "C09")
def test_a_cable_that_moves_to_the_other_cage_takes_the_rails_along(pair: tuple[Node, Node]) -> None:
    assert run().rc == 0
    first, second = pair
    with second.fault("other-cage"):
        eventually(lambda: seen(second, OTHER[0], "address").endswith(":11"), "cage p1")
        eventually(lambda: seen(second, OTHER[1], "phys_port_name") == "p1", "its port")
        # The cage without a cable has kept an address: two interfaces of one address would be a dead rail.
        second.text("ip", "address", "replace", planned(second)[0], "dev", RAILS[0])
        assert ("spark-2", "subnet-taken") not in preflight_failures()
        result = run()
        assert (result.rc, result.changed_count()) == (0, 1), result.output[-3000:]
        assert right(first) and right(second, OTHER)
        assert all(ipv4(second, name) == [] for name in RAILS)
        again = run()
        assert (again.rc, again.changed_count()) == (0, 0), again.output[-3000:]
        bare(second)
    eventually(lambda: seen(second, RAILS[0], "address").endswith(":11"), "cage p0")
    eventually(lambda: seen(second, RAILS[1], "phys_port_name") == "p0", "its port")


def dummy_rank(node: Node) -> None:
    """A container with the label of ours that does nothing: what the lab has of a rank that serves."""
    node.text("sh", "-c", "tar -cf - --files-from /dev/null | docker import - lab-empty")
    command = ["docker", "run", "-d", "--name", "lab-rank", "--network", "none"]
    command += ["--label", "sparkfleet.install=lab", "--label", "sparkfleet.replica=alpha"]
    for source, target in (("/usr", "/usr"), ("/usr/lib", "/lib"), ("/usr/lib64", "/lib64")):
        command += ["-v", f"{source}:{target}:ro"]
    node.text(*command, "lab-empty", "/usr/bin/sleep", "900")


@pytest.mark.field("B14")
def test_nothing_is_changed_or_measured_while_a_rank_runs(pair: tuple[Node, Node]) -> None:
    assert run().rc == 0
    first = pair[0]
    tool = (Path(__file__).parent / "ib_write_bw").read_text()
    try:
        for node in pair:
            node.write("/usr/local/bin/ib_write_bw", tool, 0o755)
        dummy_rank(first)
        quiet = run(fabric_measure="always")
        assert (quiet.rc, quiet.changed_count()) == (0, 0), quiet.output[-3000:]
        assert "not measured (ranks run (lab-rank)" in " ".join(quiet.output.split())
        result = run(fabric_mtu=8000)
        refused(result, "lab-rank", "fabric_allow_disruptive")
        assert right(first)
        first.text("docker", "rm", "-f", "lab-rank")
        # The other node may have gone ahead; it goes back, or is repaired.
        assert run().rc == 0
        converged(pair, run(), changed=0)
    finally:
        first.run("docker", "rm", "-f", "lab-rank")
        first.run("docker", "rmi", "lab-empty")
        for node in pair:
            node.run("rm", "-f", "/usr/local/bin/ib_write_bw")


def test_a_lost_controller_brings_the_old_network_back(pair: tuple[Node, Node]) -> None:
    """Only the first half of the role runs, as when the controller's link is cut; nobody confirms."""
    for node in pair:
        foreign(
            node,
            "40-cx7.yaml",
            {
                name: [f"10.88.{number}.{9 if node.name.endswith('1') else 10}/30"]
                for number, name in enumerate(RAILS)
            },
            1500,
        )
    before = {node.name: node.read(OWN) for node in pair}
    result = run("--tags", "fabric_apply", fabric_takeover=True, fabric_rollback_seconds=30)
    assert result.rc == 0, result.output[-3000:]
    assert all(right(node) for node in pair)
    for number, node in enumerate(pair):
        eventually(partial(holds, node, RAILS[1], [f"10.88.1.{9 + number}/30"]), "the old network", 90)
        assert ipv4(node, RAILS[0]) == [f"10.88.0.{9 + number}/30"]
        assert mtu(node, RAILS[0]) == 1500
        assert node.read(OWN) == before[node.name]


def test_a_management_link_cut_in_the_middle_brings_the_old_network_back_on_both(
    pair: tuple[Node, Node],
) -> None:
    """The link goes while the first node applies: the second one, which could go on, goes back with it."""
    first = pair[0]
    gateway = first.text("ip", "-4", "route", "show", "default").split()
    wait = f"until [ -e {STATE}/pending.json ]; do sleep 0.05; done; ip link set enP7s7 down"
    first.text("systemd-run", "--unit=lab-cut", "--collect", "sh", "-c", wait)
    # The controller notices within seconds; with the defaults of ansible.cfg it takes a minute.
    ssh = "-o ControlMaster=no -o ControlPath=none -o ServerAliveInterval=2 -o ServerAliveCountMax=3"
    words = ["-e", json.dumps({"fabric_rollback_seconds": 60})]
    try:
        result = play(PLAYBOOK, inventory(), extra=words, env={"ANSIBLE_SSH_ARGS": ssh})
        refused(result, "UNREACHABLE", "spark-2: spark-1 did not confirm the rails")
        for node in pair:
            eventually(partial(gone, node), "the way back", 120)
    finally:
        first.run("systemctl", "stop", "lab-cut.service")
        first.text("ip", "link", "set", "enP7s7", "up")
        first.text("ip", "route", "replace", *gateway)
    converged(pair, run())


def test_a_rail_cut_in_the_middle_brings_the_old_network_back(pair: tuple[Node, Node]) -> None:
    result = run("--tags", "fabric_apply", fabric_rollback_seconds=40)
    assert result.rc == 0, result.output[-3000:]
    with pair[0].fault("cut-rail", "1"):
        refused(run(fabric_confirm_seconds=2), RAILS[1])
        for node in pair:
            eventually(
                partial(gone, node),
                "the way back",
                90,
            )
    for node in pair:
        assert node.run("systemctl", "is-failed", "sparkfleet-fabric-rollback.service").status != 0
    converged(pair, run())


@pytest.mark.field("B94")
def test_the_interface_of_the_connection_is_never_a_rail(pair: tuple[Node, Node], tmp_path: Path) -> None:
    source = Path(inventory())
    text = (source / "hosts.yml").read_text().replace("{{ inventory_dir }}", str(source))
    for number in (0, 1):
        address = planned(pair[number])[0]
        text = text.replace(f"- address: {address}", f"- {{address: {address}, netdev: enP7s7}}")
        address = planned(pair[number])[1]
        text = text.replace(f"- address: {address}", f"- {{address: {address}, netdev: {RAILS[1]}}}")
    (tmp_path / "hosts.yml").write_text(text)
    refused(play(PLAYBOOK, str(tmp_path / "hosts.yml")), "enP7s7")


def reaches(source: Node, target: str, port: int = 34567) -> bool:
    """Whether a TCP connection comes through within two seconds."""
    code = f"import socket; socket.create_connection(({target!r}, {port}), 2)"
    return source.run("python3", "-c", code).status == 0


def rail_rules(node: Node) -> int:
    return node.text("ufw", "show", "added").count("comment 'sparkfleet.serving rail'")


@pytest.mark.field("B15")
def test_ranks_get_through_ufw_by_rules_of_our_own_and_on_the_rails_only(pair: tuple[Node, Node]) -> None:
    first, second = pair
    foreign = "ufw allow from 10.99.0.0/24 comment 'my own'"
    try:
        first.text("ufw", "allow", "22/tcp")
        first.text(*foreign.replace("'my own'", "").split(), "my own")
        first.text("ufw", "--force", "enable")
        first.text("systemd-run", "--unit=lab-port", "--collect", "python3", "-m", "http.server", "34567")
        announced = run("--check", "--diff", fabric_open_firewall=True)
        assert (announced.rc, announced.changed_count()) == (0, 3), announced.output[-3000:]
        assert "+ufw allow in on enp1s0f0np0 from 10.77.0.0/30" in announced.output
        assert rail_rules(first) == 0
        result = run(fabric_open_firewall=True)
        assert (result.rc, result.changed_count()) == (0, 3), result.output[-3000:]
        assert rail_rules(first) == 2
        rail_address = planned(first)[0].partition("/")[0]
        assert reaches(second, rail_address) and not reaches(second, first.address)
        # Without the rule nobody comes through, although the peers answer pings.
        first.text("ufw", "delete", "allow", "in", "on", RAILS[0], "from", "10.77.0.0/30")
        assert not reaches(second, rail_address)
        result = run(fabric_open_firewall=True)
        assert (result.rc, result.changed_count()) == (0, 1), result.output[-3000:]
        assert reaches(second, rail_address)
        again = run(fabric_open_firewall=True)
        assert (again.rc, again.changed_count()) == (0, 0), again.output[-3000:]
        result = run(fabric_state="absent")
        assert (result.rc, result.changed_count()) == (0, 3), result.output[-3000:]
        assert rail_rules(first) == 0 and foreign in first.text("ufw", "show", "added")
    finally:
        first.run("systemctl", "stop", "lab-port.service")
        first.run("sh", "-c", "ufw --force reset && rm -f /etc/ufw/*.20*")


def test_undo(pair: tuple[Node, Node]) -> None:
    assert run().rc == 0
    result = run(fabric_state="absent")
    assert (result.rc, result.changed_count()) == (0, 2), result.output[-3000:]
    for node in pair:
        assert all(ipv4(node, name) == [] for name in RAILS)
        assert node.run("test", "-e", OWN).status != 0
    again = run(fabric_state="absent")
    assert (again.rc, again.changed_count()) == (0, 0)


VERDICTS = {
    "92.57 92.60 1024": "small_mtu",
    "12.86 12.90": "stale_init",
    "60.00 60.10": "degraded",
    "0.23 7.31": "degraded",
    "norow": "failed",
}


@pytest.mark.field("B01", "C06", "C07")
def test_the_verdict_follows_the_figure(pair: tuple[Node, Node]) -> None:
    tool = (Path(__file__).parent / "ib_write_bw").read_text()
    try:
        for node in pair:
            node.write("/usr/local/bin/ib_write_bw", tool, 0o755)
        result = run(fabric_measure_seconds=1)
        assert result.rc == 0, result.output[-3000:]
        flat = " ".join(result.output.split())
        assert "): healthy," in flat and "spark-1 to spark-2 on enP2p1s0f0np0" in flat
        assert "to spark-2" not in run().output, "nothing changed, nothing is measured"
        for setting, verdict in VERDICTS.items():
            pair[1].write("/var/lib/lab/bandwidth", setting + "\n")
            result = run(fabric_measure_seconds=1, fabric_measure="always")
            assert result.rc != 0, setting
            flat = " ".join(result.output.split())
            assert f"): {verdict}," in flat, result.output[-3000:]
            assert "spark-2 to spark-1" in flat, "the other direction was the bad one"
        assert run(fabric_measure_seconds=1, fabric_measure="always", fabric_allow_degraded=True).rc == 0
    finally:
        for node in pair:
            node.run("rm", "-f", "/usr/local/bin/ib_write_bw", "/var/lib/lab/bandwidth")


def test_a_second_change_before_the_first_is_confirmed_still_leads_back_to_the_start(
    pair: tuple[Node, Node],
) -> None:
    first = pair[0]
    foreign(first, "60-old.yaml", {RAILS[0]: ["10.88.0.9/30"]}, 1500)
    assert run("--tags", "fabric_apply", fabric_takeover=True, fabric_rollback_seconds=300).rc == 0
    assert (
        run("--tags", "fabric_apply", fabric_takeover=True, fabric_rollback_seconds=40, fabric_mtu=8000).rc
        == 0
    )
    assert mtu(first, RAILS[0]) == 8000
    eventually(lambda: ipv4(first, RAILS[0]) == ["10.88.0.9/30"], "the old network", 120)
    assert first.run("test", "-e", "/etc/netplan/60-old.yaml").status == 0
    assert first.run("test", "-e", OWN).status != 0
