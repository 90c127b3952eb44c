"""A lab node as a Spark: services, memory, driver, and containers that see what they would see on one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from lab import instance
from lab.inventory import inventory_text
from lab.testing import Node, eventually, lab, nodes

pytestmark = pytest.mark.lab
BASE = "hub.lab:5000/lab/base:1"


@pytest.fixture(scope="module")
def pair() -> tuple[Node, Node]:
    return nodes()


@pytest.fixture
def node(pair: tuple[Node, Node]) -> Node:
    return pair[0]


def docker(node: Node, *arguments: str) -> str:
    return node.text("docker", *arguments)


@pytest.fixture(scope="module")
def base(pair: tuple[Node, Node]) -> Iterator[str]:
    for node in pair:
        docker(node, "pull", "--quiet", BASE)
    yield BASE


def test_systemd_runs_without_a_failed_unit(pair: tuple[Node, Node]) -> None:
    for node in pair:
        assert node.text("systemctl", "is-system-running", "--wait") == "running"


def test_the_desktop_can_be_turned_off(node: Node) -> None:
    assert node.text("systemctl", "get-default") == "graphical.target"
    assert node.text("systemctl", "is-active", "display-manager.service") == "active"
    node.text("systemctl", "isolate", "multi-user.target")
    try:
        eventually(
            lambda: node.run("systemctl", "is-active", "gdm").text.strip() == "inactive", "gdm to stop"
        )
        eventually(
            lambda: (
                node.run("systemctl", "is-active", "docker", "ssh", "lab-hardware").text.split()
                == ["active"] * 3
            ),
            "the other services to be untouched",
        )
        assert "gnome-shell" not in node.text("nvidia-smi")
    finally:
        node.text("systemctl", "isolate", "graphical.target")


def test_the_ordinary_user_has_sudo_and_no_docker(node: Node) -> None:
    assert node.user("sudo", "-n", "id", "-u").text.strip() == "0"
    assert "docker" not in node.user("id", "-nG").text.split()


def test_ssh_checks_the_host_key() -> None:
    found = lab()
    command = ["ssh", "-F", str(found.ssh_config), "-o", "BatchMode=yes", "spark-2", "hostname"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "spark-2\n"
    command[3:3] = ["-o", "UserKnownHostsFile=/dev/null"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 255


def test_the_kernel_is_a_sparks(node: Node) -> None:
    assert node.read("/proc/sys/kernel/osrelease") == node.text("uname", "-r") == "6.17.0-1032-nvidia"
    assert node.read("/proc/cmdline").startswith("BOOT_IMAGE=/boot/vmlinuz-6.17.0-1032-nvidia root=")
    assert "DGX Spark" in node.read("/etc/dgx-release")


def test_model_data_lies_on_an_nvme_disk(node: Node) -> None:
    assert node.text("ls", "/sys/block") == "nvme0n1"
    numbers = node.text("mountpoint", "--fs-devno", "/var/lib/sparkfleet")
    assert node.text("realpath", f"/sys/dev/block/{numbers}").endswith("/block/nvme0n1/nvme0n1p2")


def test_one_node_has_overlay2_and_one_the_containerd_store(pair: tuple[Node, Node]) -> None:
    assert [docker(node, "info", "--format", "{{.Driver}}") for node in pair] == ["overlay2", "overlayfs"]


def test_the_same_image_has_two_ids_and_equal_layers(pair: tuple[Node, Node], base: str) -> None:
    seen = [json.loads(docker(node, "image", "inspect", base))[0] for node in pair]
    assert seen[0]["Id"] != seen[1]["Id"]
    assert seen[0]["RootFS"]["Layers"] == seen[1]["RootFS"]["Layers"]


def test_a_rank_container_sees_memory_and_rdma_and_its_request_is_logged(
    pair: tuple[Node, Node], base: str
) -> None:
    script = (
        "grep MemTotal /proc/meminfo; ls /sys/class/infiniband; nvidia-smi -L; nvidia-smi -lgc 0,1; ulimit -l"
    )
    for node in pair:
        text = docker(
            *(
                node,
                "run",
                "--rm",
                "--network",
                "host",
                "--ipc",
                "host",
                "--gpus",
                "all",
                "--cap-add",
                "IPC_LOCK",
            ),
            *("--ulimit", "memlock=-1:-1", "--device", "/dev/infiniband", base, "sh", "-c", script),
        )
        lines = text.splitlines()
        assert lines[0].split() == ["MemTotal:", "127535084", "kB"]
        assert {"rocep1s0f0", "roceP2p1s0f0"} <= set(lines)
        assert "GPU 0: NVIDIA GB10" in text
        assert "does not have permission to change clocks" in text
        request = json.loads(node.read("/var/log/lab-oci.jsonl").splitlines()[-1])
        assert request["rlimits"]["RLIMIT_MEMLOCK"] == [2**64 - 1, 2**64 - 1]
        assert request["gpus"] == "all"
        assert request["host_network"] and request["host_ipc"]
        assert "CAP_IPC_LOCK" in request["capabilities"]
        assert "/dev/infiniband/uverbs0" in request["devices"]


def test_a_bridged_container_reaches_the_hub_and_sees_the_nodes_memory(
    pair: tuple[Node, Node], base: str
) -> None:
    program = f"import urllib.request as u; print(u.urlopen('http://{lab().hub_address}:5000/v2/').status)"
    for node in pair:
        assert docker(node, "run", "--rm", "--memory", "256m", base, "python3", "-c", program) == "200"


def test_the_nvidia_runtime_works_once_registered(node: Node, base: str) -> None:
    settings = json.loads(node.read("/etc/docker/daemon.json"))
    assert "runtimes" not in settings
    registered = settings | {"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}}}
    node.write("/etc/docker/daemon.json", json.dumps(registered))
    try:
        node.text("systemctl", "restart", "docker")
        docker(
            node,
            "run",
            "--rm",
            "--runtime",
            "nvidia",
            "--env",
            "NVIDIA_VISIBLE_DEVICES=all",
            base,
            "nvidia-smi",
            "-L",
        )
        assert json.loads(node.read("/var/log/lab-oci.jsonl").splitlines()[-1])["runtime"] == "nvidia"
    finally:
        node.write("/etc/docker/daemon.json", json.dumps(settings, indent=4) + "\n")
        node.text("systemctl", "restart", "docker")


def available(node: Node) -> int:
    rows = dict(line.split(":") for line in node.read("/proc/meminfo").splitlines())
    return int(rows["MemAvailable"].split()[0])


CLAIM = """
import fcntl, sys, time
claim = open('/run/lab/memory/test', 'w'); fcntl.flock(claim, fcntl.LOCK_EX)
claim.write('52428800 tensorfold'); claim.flush(); print('held', flush=True); time.sleep(60)
"""


def test_a_ranks_memory_is_taken_from_the_node_and_given_back(node: Node, base: str) -> None:
    before = available(node)
    docker(node, "run", "--detach", "--rm", "--name", "lab-claim", base, "python3", "-c", CLAIM)
    try:
        eventually(lambda: before - available(node) == 52428800, "50 GiB less")
        apps = node.text(
            "nvidia-smi", "--query-compute-apps=process_name,used_memory", "--format=csv,noheader"
        )
        assert apps == "tensorfold, 51200 MiB"
    finally:
        docker(node, "kill", "lab-claim")
    eventually(lambda: available(node) == before, "the memory to come back")


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_the_hardware_comes_back_when_its_service_ends(node: Node, signal: str) -> None:
    node.text("systemctl", "kill", "--signal", signal, "lab-hardware")
    eventually(lambda: node.run("systemctl", "is-active", "lab-hardware").text != "active\n", "the end")
    eventually(lambda: node.run("systemctl", "is-active", "lab-hardware").text == "active\n", "the start", 30)
    assert node.read("/proc/meminfo").startswith("MemTotal:")
    assert node.read("/sys/class/net/enp1s0f0np0/phys_port_name") == "p0"
    assert node.read("/sys/class/net/enp1s0f0np0/speed") in ("-1", "200000")
    assert node.read("/sys/class/infiniband/rocep1s0f0/fw_ver") == "28.45.4028"


def test_memory_faults(node: Node) -> None:
    with node.fault("sink-memory", "2.5"):
        eventually(lambda: available(node) == int(2.5 * 1024 * 1024), "the sink")
    eventually(lambda: available(node) > 100 * 1024 * 1024, "the memory to come back")
    before = available(node)
    with node.fault("kho"):
        eventually(lambda: "CmaTotal:              0 kB" in node.read("/proc/meminfo"), "the broken kernel")
        assert available(node) < before
    eventually(lambda: available(node) == before, "the memory to come back")
    with node.fault("driver-retains"):
        eventually(lambda: available(node) < before - 70 * 1024 * 1024, "the pool")


def test_gpu_faults(node: Node) -> None:
    with node.fault("smi-hang"):
        assert node.run("timeout", "1", "nvidia-smi").status == 124
    with node.fault("smi-lost"):
        result = node.run("nvidia-smi", "-L")
        assert (result.status, result.text) == (6, "No devices were found\n")
    with node.fault("low-power"):
        assert node.text("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits") == "611"


def test_locking_clocks_needs_root(node: Node) -> None:
    refused = node.user("nvidia-smi", "-lgc", "0,2200")
    assert refused.status == 4
    text = node.user("sudo", "nvidia-smi", "-lgc", "0,2200").text
    assert text.splitlines() == [
        'GPU clocks set to "(gpuClkMin 0, gpuClkMax 2200)" for GPU 0000000F:01:00.0',
        "All done.",
    ]
    node.text("nvidia-smi", "-rgc")


def test_apt_works_in_a_node(node: Node) -> None:
    assert "Candidate" in node.text("apt-cache", "policy", "tmux") or node.text("apt-get", "update", "-q")


def test_the_inventory_is_that_of_the_instance() -> None:
    found = lab()
    assert (found.directory / "inventory/hosts.yml").read_text(encoding="utf-8") == inventory_text(
        found, str(found.directory / "ssh")
    )


def test_up_again_changes_nothing(pair: tuple[Node, Node]) -> None:
    def started() -> list[tuple[str, str]]:
        return [(str(node.container.id), node.container.attrs["State"]["StartedAt"]) for node in pair]

    before = started()
    instance.up(lab())
    assert started() == before
