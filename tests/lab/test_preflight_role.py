"""The role preflight on the lab: one report of everything, before anything is touched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.testing import Node, eventually, lab, nodes
from tests.proof.prove import Run, play

pytestmark = pytest.mark.lab
PLAYBOOK = "playbooks/preflight.yml"


def inventory() -> Path:
    return Path(lab().directory / "inventory")


def run(*extra: str, source: str | None = None, **variables: object) -> Run:
    words = ["-e", json.dumps(variables)] if variables else []
    return play(PLAYBOOK, source or str(inventory()), extra=[*words, *extra])


def rows(result: Run) -> dict[tuple[str, str], dict[str, str]]:
    """{(node, check): row} of a run with preflight_format=json."""
    start = result.output.index("{", result.output.index("msg: |-"))
    loaded, _end = json.JSONDecoder().raw_decode(result.output[start:])
    return {(row["node"], row["check"]): row for row in loaded["rows"]}


def failing(result: Run) -> set[tuple[str, str]]:
    return {key for key, row in rows(result).items() if row["level"] == "fail"}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    yield nodes()


def test_a_lab_as_it_should_be_passes_and_asks_each_node_once(pair: tuple[Node, Node]) -> None:
    result = run()
    assert result.rc == 0, result.output[-3000:]
    assert result.changed_count() == 0
    assert "1 remote tasks" in result.output
    table = [line for line in result.output.splitlines() if line.startswith("        ")]
    assert table and max(len(line) for line in table) <= 80


def test_it_works_in_check_mode(pair: tuple[Node, Node]) -> None:
    assert run("--check").rc == 0


def test_half_a_pair_is_refused_before_any_node_is_asked(pair: tuple[Node, Node]) -> None:
    result = run("--limit", "spark-2")
    assert result.rc != 0
    assert "half-pair" in result.output and "no rank 0" in result.output
    assert "Read the node" not in result.output


#: What the lab's inventory finds beside itself, and an altered copy in another place does not.
ELSEWHERE: dict[str, object] = {"image_context": "/nowhere", "sparkfleet_inventory_ready": True}


def altered(tmp_path: Path, old: str, new: str) -> str:
    """The lab's inventory with one change, in another place."""
    text = (inventory() / "hosts.yml").read_text().replace("{{ inventory_dir }}", str(inventory()))
    assert old in text
    (tmp_path / "hosts.yml").write_text(text.replace(old, new))
    (tmp_path / "group_vars").symlink_to(inventory() / "group_vars")
    return str(tmp_path)


def test_one_address_twice_is_refused_before_any_node_is_asked(
    pair: tuple[Node, Node], tmp_path: Path
) -> None:
    result = run(source=altered(tmp_path, "10.77.0.2/30", "10.77.0.1/30"), **ELSEWHERE)
    assert result.rc != 0
    assert "address-twice" in result.output
    assert "Read the node" not in result.output


def test_an_unknown_engine_and_an_empty_pin(pair: tuple[Node, Node]) -> None:
    result = run(preflight_format="json", sparkfleet_engine="nope", sparkfleet_model_revision="main")
    assert {check for _node, check in failing(result)} == {"engine-unknown", "pin-unset"}
    assert "Read the node" not in result.output


def test_a_missing_node_is_one_line_beside_the_rest(pair: tuple[Node, Node], tmp_path: Path) -> None:
    source = altered(
        tmp_path, f"ansible_host: {pair[1].address}", "ansible_host: 127.0.0.1\n          ansible_port: 1"
    )
    with pair[0].fault("kho"):
        result = run(source=source, preflight_format="json", **ELSEWHERE)
    # Kexec handover also takes 9.3 GiB, so the memory row may stand beside it.
    assert failing(result) - {("spark-1", "memory")} == {
        ("spark-1", "kernel-kho"),
        ("spark-2", "unreachable"),
    }
    assert "refused" in rows(result)["spark-2", "unreachable"]["found"].lower()


@pytest.mark.field("B48")
@pytest.mark.parametrize(
    ("fault", "value", "check"),
    [("kho", None, "kernel-kho"), ("smi-lost", None, "gpu"), ("sink-memory", "60", "memory")],
)
def test_faults_of_one_node(pair: tuple[Node, Node], fault: str, value: str | None, check: str) -> None:
    with pair[1].fault(fault, value):
        assert ("spark-2", check) in failing(run(preflight_format="json"))
    assert run().rc == 0


@pytest.mark.field("B84")
def test_a_foreign_listener_is_named_and_left_alone(pair: tuple[Node, Node]) -> None:
    node = pair[0]
    node.text("systemd-run", "--unit=lab-jupyter", "--collect", "python3", "-m", "http.server", "8888")
    try:
        eventually(lambda: ":22B8" in node.read("/proc/net/tcp"), "the listener")
        result = run(preflight_format="json")
        assert failing(result) == {("spark-1", "port")}
        assert "8888 is taken by python3" in rows(result)["spark-1", "port"]["found"]
        assert node.run("systemctl", "is-active", "lab-jupyter").status == 0
        assert run(preflight_warn=["parity-storage", "port"]).rc == 0
    finally:
        node.run("systemctl", "stop", "lab-jupyter")


@pytest.mark.field("B15")
def test_a_firewall_between_the_rails_is_refused_with_the_rule_that_is_missing(
    pair: tuple[Node, Node],
) -> None:
    node = pair[1]
    try:
        node.text("ufw", "allow", "22/tcp")
        node.text("ufw", "allow", "in", "on", "enp1s0f0np0", "from", "10.77.0.0/30")
        node.text("ufw", "--force", "enable")
        result = run(preflight_format="json")
        assert failing(result) == {("spark-2", "firewall")}
        missing = "ufw allow in on enP2p1s0f0np0 from 10.77.0.4/30"
        assert rows(result)["spark-2", "firewall"]["remedy"].startswith(missing + "; or set ")
        node.text(*missing.split())
        assert run().rc == 0
    finally:
        node.run("sh", "-c", "ufw --force reset && rm -f /etc/ufw/*.20*")


KERNEL_LINES = sorted((Path(__file__).parents[1] / "fixtures/gb10").glob("kernel-*.txt"))
FATAL = {
    "AER": "pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:00:00.0",
    "mlx5": "mlx5_core 0000:01:00.0: mlx5_pci_err_detected Device state = 1 pci_status: 1. Enter",
}


@pytest.mark.field("B16", "C05", "C12")
def test_fatal_lines_of_the_kernel_are_refused_until_the_node_restarts(pair: tuple[Node, Node]) -> None:
    """What healthy nodes log is recorded: a corrected RxErr, 27 W, hot-plug events. None of it counts."""
    node = pair[1]
    healthy = [
        re.sub(r"^(\[[^]]*\] +|[0-9:]{8} |.* kernel: )", "", line)
        for path in KERNEL_LINES
        for line in path.read_text().splitlines()
        if not line.startswith("#")
    ]
    assert any("severity=Correctable" in line for line in healthy) and any("27W" in line for line in healthy)
    with node.fault("kernel-log", "\n".join(healthy)):
        said = node.text("journalctl", "--dmesg", "--boot", "--output=cat")
        assert all(line in said for line in healthy)
        assert ("spark-2", "pcie-errors") not in rows(run(preflight_format="json"))
        with node.fault("kernel-log", "\n".join(FATAL.values())):
            result = run(preflight_format="json")
            assert failing(result) == {("spark-2", "pcie-errors")}
            assert rows(result)["spark-2", "pcie-errors"]["found"].startswith("2 kernel lines of this boot:")
            node.restart()
            assert run().rc == 0


@pytest.mark.field("B67")
def test_the_disks_alone_with_what_lies_there_subtracted(pair: tuple[Node, Node]) -> None:
    def disk(gib: int) -> Run:
        need = {
            "node": "spark-2",
            "path": "/var/lib/sparkfleet/models/a/b",
            "bytes": gib * 2**30,
            "what": "it",
        }
        words = ["-e", json.dumps({"preflight_disk_needs": [need], "preflight_format": "json"})]
        return play("tests/lab/disk.yml", str(inventory()), extra=words)

    result = disk(1)
    assert (result.rc, result.changed_count()) == (0, 0), result.output[-3000:]
    assert failing(disk(10**6)) == {("spark-2", "disk")}
    folder = "/var/lib/sparkfleet/models/a"
    try:
        pair[1].text("mkdir", "-p", f"{folder}/b")
        pair[1].text("fallocate", "-l", "64M", f"{folder}/b/file")
        row = rows(disk(10**6))["spark-2", "disk"]
        assert "it 999999.9 GiB" in row["wanted"], row
    finally:
        pair[1].run("rm", "-rf", folder)


@pytest.mark.field("B18", "B87")
def test_sudo_that_wants_a_password_is_named_first_and_the_rest_is_read(pair: tuple[Node, Node]) -> None:
    node = pair[0]
    rule = node.read("/etc/sudoers.d/spark")
    try:
        node.write("/etc/sudoers.d/spark", rule.replace("NOPASSWD:", "") + "\n", 0o440)
        with node.fault("kho"):
            result = run(preflight_format="json")
        seen = list(rows(result))
        assert seen[0] == ("spark-1", "sudo"), seen
        assert "password" in rows(result)["spark-1", "sudo"]["found"]
        # What everybody may read is judged; what only root may read follows from the first row and is not said again.
        assert failing(result) == {("spark-1", "sudo"), ("spark-1", "kernel-kho")}
    finally:
        node.write("/etc/sudoers.d/spark", rule + "\n", 0o440)
    assert run().rc == 0
