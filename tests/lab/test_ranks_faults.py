"""Faults of a served replica: each has the right end state, word in the status and message.

Needs a lab that serves (``site.yml`` ran); brings it up itself otherwise. A start costs most of the time, so a
test says what it begins with: ``serving`` and ``stopped`` bring that about only when the test before left
something else. Tests that change settings are at the end, where they share them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.fault import switch
from lab.testing import Node, eventually, lab, nodes
from tests.proof.prove import ROOT, Run, play

pytestmark = pytest.mark.lab

REPLICA = "lab"
NAME = "dsv41-1017-exl3-tf"
UNIT = f"sparkfleet-rank@{REPLICA}.service"
BOOT_UNIT = f"sparkfleet-boot@{REPLICA}.service"
LOCK = f"/var/lib/sparkfleet/locks/{REPLICA}.lock"
LAUNCH = f"/etc/sparkfleet/replicas/{REPLICA}/launch.json"
LOGS = "/var/lib/sparkfleet/logs"
HEAD, WORKER = "spark-1", "spark-2"
Pair = dict[str, Node]


def inventory() -> str:
    return str(lab().directory / "inventory")


def run(playbook: str, *words: str, **variables: object) -> Run:
    extra = [*words, *(["-e", json.dumps(variables)] if variables else [])]
    return play(f"playbooks/{playbook}.yml" if playbook != "site" else "site.yml", inventory(), extra=extra)


def good(playbook: str, **variables: object) -> Run:
    """A run that must succeed."""
    done = run(playbook, **variables)
    assert done.rc == 0, done.output[-4000:]
    return done


def refused(playbook: str, *said: str, **variables: object) -> str:
    """The text of a run that must be refused and say these words."""
    done = run(playbook, **variables)
    text = " ".join(done.output.split())
    assert done.rc == 2, text[-4000:]
    for words in said:
        assert words in text, f"{words!r} is not in: {text[-4000:]}"
    return text


def status(tmp: Path, probe: str = "auto") -> dict[str, Any]:
    """The report of one replica; the run itself fails when it does not serve."""
    target = tmp / "status.json"
    target.unlink(missing_ok=True)
    done = run("status", status_json=str(target), status_probe=probe)
    report: dict[str, Any] = json.loads(target.read_text())[REPLICA]
    assert done.rc == (0 if report["exit"] == 0 else 2), done.output
    return report


def containers(node: Node) -> dict[str, str]:
    """Name to id of what runs on a node."""
    text = node.text("docker", "ps", "--no-trunc", "--format", "{{.Names}} {{.ID}}")
    return dict(line.split(" ", 1) for line in text.splitlines())


def ids(pair: Pair) -> dict[str, str]:
    return {name: containers(node)[NAME] for name, node in pair.items()}


def nothing_runs(pair: Pair) -> bool:
    return all(NAME not in containers(node) for node in pair.values())


def agent(node: Node) -> dict[str, Any]:
    found = node.run("cat", f"/run/sparkfleet/{REPLICA}/rank.json")
    return dict(json.loads(found.text)) if found.status == 0 else {}


def starts(node: Node) -> int:
    """Containers that the agent of this node has made since its journal begins."""
    return node.text("journalctl", "-u", UNIT, "--no-pager").count("creating the container")


@contextmanager
def faulty(where: Iterable[Node], name: str, value: str | None = None) -> Iterator[None]:
    """A fault switch that is on, on some nodes, inside the block."""
    with ExitStack() as stack:
        for node in where:
            stack.enter_context(node.fault(name, value))
        yield


def unit(node: Node) -> str:
    return node.run("systemctl", "is-active", UNIT).text.strip()


def ended(node: Node) -> bool:
    return unit(node) not in ("active", "activating", "deactivating")


def all_ended(pair: Pair, seconds: float = 90) -> None:
    eventually(lambda: all(ended(node) for node in pair.values()), "both ranks to end", seconds)
    assert nothing_runs(pair), "half a pair serves nobody"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = {node.name: node for node in nodes()}
    if any(node.run("test", "-e", LAUNCH).status for node in found.values()):
        good("site")
    yield found
    good("start")


@pytest.fixture
def serving(pair: Pair) -> Pair:
    """All ranks run, undisturbed; what the test before left is started again."""
    healthy = all(
        unit(node) == "active" and agent(node).get("phase") == "running" and containers(node).get(NAME)
        for node in pair.values()
    )
    if not healthy:
        good("start")
    return pair


@pytest.fixture
def stopped(pair: Pair) -> Pair:
    """No rank runs."""
    if not (nothing_runs(pair) and all(ended(node) for node in pair.values())):
        good("stop")
    return pair


# -- a rank that ends while the replica serves


@pytest.mark.field("B76", "T14", "E18")
@pytest.mark.parametrize("victim", [WORKER, HEAD])
def test_a_dead_rank_takes_its_replica_down_and_start_brings_it_back(
    serving: Pair, tmp_path: Path, victim: str
) -> None:
    other = HEAD if victim == WORKER else WORKER
    serving[victim].text("docker", "kill", NAME)
    all_ended(serving)
    assert "exit code 137" in agent(serving[victim])["message"]
    assert f"on {victim} is gone" in agent(serving[other])["message"]
    report = status(tmp_path)
    assert (report["verdict"], report["exit"]) == ("failed", 5)
    good("start")
    assert status(tmp_path)["verdict"] == "serving"


@pytest.mark.field("B76", "B77")
def test_half_a_pair_is_restarted_whole(serving: Pair, tmp_path: Path) -> None:
    """The worker's agent is shot, so that nothing tells the head; its container is left behind, stale."""
    before = ids(serving)
    serving[WORKER].text("systemctl", "kill", "-s", "KILL", UNIT)
    eventually(lambda: ended(serving[WORKER]), "the agent to end", 30)
    report = status(tmp_path, "never")
    assert (report["verdict"], report["exit"]) == ("half", 5)
    assert [rank["verdict"] for rank in report["ranks"]][1] == "stale"
    good("start")
    after = ids(serving)
    assert all(after[name] != before[name] for name in before)


@pytest.mark.field("B78")
def test_a_rank_restarted_by_hand(serving: Pair, tmp_path: Path) -> None:
    serving[WORKER].text("docker", "restart", "-t", "1", NAME)
    all_ended(serving)
    assert "restarted by hand" in agent(serving[WORKER])["message"]
    assert status(tmp_path)["exit"] == 5


def test_docker_restarted_under_a_serving_replica(serving: Pair, tmp_path: Path) -> None:
    serving[WORKER].text("systemctl", "restart", "docker")
    all_ended(serving, 200)
    assert status(tmp_path)["exit"] == 5


@pytest.mark.field("B80")
def test_an_engine_that_loads_and_then_stalls_is_healthy_and_stalled(serving: Pair, tmp_path: Path) -> None:
    worker, before = serving[WORKER], ids(serving)
    worker.text("docker", "pause", NAME)
    try:
        assert '"ok": true' in serving[HEAD].text("curl", "-s", "http://127.0.0.1:8888/health")
        report = status(tmp_path)
        assert (report["verdict"], report["exit"]) == ("stalled", 6)
        # A start is no success on it, and does not shoot what may only be slow.
        refused("start", "replica lab is stalled", "playbooks/restart.yml")
        assert ids(serving) == before
    finally:
        worker.text("docker", "unpause", NAME)


# -- what changes nothing


@pytest.mark.field("B19")
def test_a_drifted_index_is_told_and_used_by_the_next_start(serving: Pair, tmp_path: Path) -> None:
    before = ids(serving)
    with faulty(serving.values(), "gid-drift", "6"):
        report = status(tmp_path)
        assert all(
            any("GID index is 6 now and was 3" in note for note in rank["notes"]) for rank in report["ranks"]
        )
        assert good("start").changed_count() == 0
        assert ids(serving) == before, "a live fact restarts nothing"
        good("restart")
        for node in serving.values():
            env = node.text("docker", "inspect", "-f", "{{json .Config.Env}}", NAME)
            assert "NCCL_IB_GID_INDEX=6" in env and "TF_RDMA_GID_INDEX=6" in env
    # Back between two starts: the next one has the old index again.
    good("restart")
    env = serving[HEAD].text("docker", "inspect", "-f", "{{json .Config.Env}}", NAME)
    assert "NCCL_IB_GID_INDEX=3" in env


def test_a_forged_peer_message_changes_nothing(serving: Pair) -> None:
    before = ids(serving)
    script = (
        "import json,socket\n"
        "s=socket.create_connection(('10.77.0.1',29630),5);f=s.makefile('rwb');f.readline()\n"
        "f.write(json.dumps({'replica':'lab','op':'stop','nonce':'n','body':'{}','mac':'0'*64}).encode()+b'\\n');f.flush()\n"
        "print(repr(f.readline()))\n"
    )
    assert serving[WORKER].text("python3", "-c", script) == "b''"
    assert "not sealed with the key" in serving[HEAD].text(
        "journalctl", "-u", "sparkfleet-peer", "-n", "20", "--no-pager"
    )
    assert ids(serving) == before


def test_the_lock_of_another_run_is_refused_on_all_members(serving: Pair) -> None:
    """It lies on one node only, and is of no use to a run in check mode."""
    before = ids(serving)
    lock = json.dumps({"run": "dead-run", "owner": "ann", "host": "laptop", "since": time.time() - 7200})
    serving[WORKER].write(LOCK, lock)
    try:
        refused("restart", "ann on laptop for 2 h 0 min, run dead-run", "nothing was touched")
        assert run("restart", "--check").rc == 0
        assert ids(serving) == before
        assert serving[WORKER].read(LOCK) == lock
        assert serving[HEAD].run("test", "-e", LOCK).status, "the lock of the refused run is given back"
    finally:
        serving[WORKER].run("rm", "-f", LOCK)


@pytest.mark.field("T40")
def test_a_controller_killed_during_a_start(pair: Pair, tmp_path: Path) -> None:
    """Its lock stays, is refused with owner and age, and only its own run id breaks it."""
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "playbooks/restart.yml"]
    with faulty(pair.values(), "engine-load", "25"):
        controller = subprocess.Popen(
            [*command, "-i", inventory()],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "USER": "ann"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            begun = time.time()
            eventually(
                lambda: (
                    agent(pair[HEAD]).get("phase") == "running" and float(agent(pair[HEAD])["since"]) > begun
                ),
                "the head's rank to be started",
                150,
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(controller.pid, signal.SIGKILL)
            controller.wait()
    dead = [json.loads(node.read(LOCK)) for node in pair.values()]
    assert dead[0]["run"] == dead[1]["run"] and dead[0]["owner"] == "ann"
    refused("restart", "another run holds this replica", "ann on ", " min, run " + dead[0]["run"])
    refused("restart", "another run holds this replica", ranks_break_lock="of-somebody-else")
    good("restart", ranks_break_lock=dead[0]["run"])
    assert status(tmp_path)["verdict"] == "serving"
    for node in pair.values():
        assert node.run("test", "-e", LOCK).status, "the lock is given back"


# -- stop


def test_stop_is_idempotent_and_saves_the_logs(serving: Pair, tmp_path: Path) -> None:
    before = {name: node.run("ls", LOGS).text.count("-rank") for name, node in serving.items()}
    good("stop")
    assert good("stop").changed_count() == 0
    report = status(tmp_path)
    assert (report["verdict"], report["exit"]) == ("stopped", 3)
    for name, node in serving.items():
        assert NAME not in containers(node)
        assert node.text("ls", LOGS).count("-rank") >= min(before[name] + 1, 10)
        newest = agent(node)["log"]
        assert newest.endswith(".log.gz") and "NET/IB" in node.text("zcat", newest)


@contextmanager
def full_disk(node: Node) -> Iterator[None]:
    """The directory of the logs is a disk without a free byte."""
    node.text("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", LOGS)
    try:
        node.run("dd", "if=/dev/zero", f"of={LOGS}/filler", "bs=4k")
        yield
    finally:
        node.text("umount", LOGS)


def test_a_full_disk_for_logs_stops_no_stop_and_hides_no_reason(pair: Pair, tmp_path: Path) -> None:
    worker = pair[WORKER]
    with full_disk(worker), faulty([worker], "engine-crash", "load"):
        text = refused("restart", "137", "the bundle was not written", "rank 1: killed")
        assert "the log was not saved" in text
        assert nothing_runs(pair)
        assert worker.text("ls", "-A", LOGS) == "filler"
    assert status(tmp_path)["exit"] == 5
    assert "bundle-rank0" in pair[HEAD].text("ls", LOGS)


# -- starts that are refused before anything runs


@pytest.mark.field("B84")
@pytest.mark.parametrize("port", [8888, 29620])
def test_a_busy_port_is_named_and_left_alone(stopped: Pair, port: int) -> None:
    head = stopped[HEAD]
    head.text(
        "systemd-run", "--unit=squatter", "python3", "-m", "http.server", str(port), "--bind", "0.0.0.0"
    )
    try:
        eventually(lambda: f":{port}" in head.text("ss", "-ltn"), "the squatter", 10)
        refused("start", f"port {port} is in use", "python3 (pid")
        assert unit_is_active(head, "squatter")
        assert nothing_runs(stopped), "what had started is stopped again"
    finally:
        head.run("systemctl", "stop", "squatter")


def unit_is_active(node: Node, name: str) -> bool:
    return node.run("systemctl", "is-active", name).text.strip() == "active"


def test_a_foreign_container_of_the_same_name_and_image(stopped: Pair, tmp_path: Path) -> None:
    worker = stopped[WORKER]
    image = json.loads(worker.read(LAUNCH))["container"]["image"]
    worker.text("docker", "run", "-d", "--name", NAME, "--entrypoint", "sleep", image, "1000")
    try:
        refused("start", "foreign")
        assert status(tmp_path)["exit"] == 7
        good("stop")
        assert NAME in containers(worker), "a stop takes only what is ours"
    finally:
        worker.text("docker", "rm", "-f", NAME)


@pytest.mark.field("B82")
def test_a_tampered_switch_is_refused_before_anything_runs(stopped: Pair) -> None:
    worker, text = stopped[WORKER], stopped[WORKER].read(LAUNCH)
    launch = json.loads(text)
    launch["container"]["env"]["TF_DS_IDX_SPLIT"] = "1"
    launch["contract"]["switches"]["idx_split"] = "1"
    worker.write(LAUNCH, json.dumps(launch), 0o600)
    try:
        refused("start", "switch idx_split")
        assert nothing_runs(stopped)
    finally:
        worker.write(LAUNCH, text, 0o600)


@pytest.mark.field("B20")
def test_rails_at_different_indexes_are_refused_with_both_named(stopped: Pair) -> None:
    with faulty([stopped[WORKER]], "gid-drift", "6:1"):
        refused("start", "rocep1s0f0 has 3, roceP2p1s0f0 has 6", "at one index")
        assert nothing_runs(stopped)


def test_an_unreachable_peer_is_refused(stopped: Pair) -> None:
    stopped[HEAD].text("systemctl", "stop", "sparkfleet-peer")
    try:
        refused("start", "peer spark-1 (rank 0) cannot be reached on the rails")
        assert nothing_runs(stopped)
    finally:
        stopped[HEAD].text("systemctl", "start", "sparkfleet-peer")


# -- starts that fail on the way


@pytest.mark.field("T37", "T45", "E16")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("engine-silent", "empty reply"),
        ("engine-collapsed", "one repeated character"),
        ("engine-socket", "NCCL runs over TCP"),
    ],
)
def test_a_model_that_answers_badly_fails_the_start(pair: Pair, fault: str, words: str) -> None:
    bundles = {name: node.run("ls", LOGS).text.count("bundle-rank") for name, node in pair.items()}
    with faulty([pair[HEAD]], fault):
        refused("restart", words)
    assert nothing_runs(pair)
    for name, node in pair.items():
        assert node.text("ls", LOGS).count("bundle-rank") >= min(bundles[name] + 1, 10)


def test_an_engine_that_never_gets_ready_has_an_end(pair: Pair) -> None:
    with faulty(pair.values(), "engine-load", "600"):
        begin = time.monotonic()
        refused("restart", "does not get ready", ranks_wait_timeout=10)
        assert time.monotonic() - begin < 180
        assert nothing_runs(pair)


def test_a_rank_that_dies_while_it_loads_ends_the_start_at_once(pair: Pair) -> None:
    with faulty([pair[WORKER]], "engine-crash", "load"):
        begin = time.monotonic()
        refused("restart", "137")
        assert time.monotonic() - begin < 180, "not after the half hour that a load may take"
        assert nothing_runs(pair)


def test_rails_cut_while_the_engine_loads_end_the_start(pair: Pair) -> None:
    """The guards find it, since neither engine would ever end; nothing is retried behind the owner's back."""
    before = {name: starts(node) for name, node in pair.items()}
    with faulty(pair.values(), "engine-load", "400"), ThreadPoolExecutor() as pool:
        begun = time.time()
        start = pool.submit(run, "restart")
        eventually(
            lambda: agent(pair[HEAD]).get("phase") == "running" and float(agent(pair[HEAD])["since"]) > begun,
            "the head's rank to be started",
            150,
        )
        switch(lab(), "cut-rail")
        try:
            done = start.result()
        finally:
            switch(lab(), "cut-rail", on=False)
    text = " ".join(done.output.split())
    assert done.rc == 2 and "has not answered on any rail for" in text, text[-4000:]
    assert nothing_runs(pair)
    assert {name: starts(node) - before[name] for name, node in pair.items()} == {HEAD: 1, WORKER: 1}


# -- nodes that restart, with start on boot


def restart_all(pair: Pair) -> None:
    """As after a power cut: at once."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(Node.restart, pair.values()))


def test_nodes_that_restart_together_come_back_serving(serving: Pair, tmp_path: Path) -> None:
    before = ids(serving)
    restart_all(serving)
    eventually(lambda: status(tmp_path)["verdict"] == "serving", "the replica to serve", 300)
    after = ids(serving)
    assert all(after[name] != before[name] for name in before)


@pytest.mark.field("B77")
def test_a_node_that_restarts_alone_starts_no_half_of_a_replica(serving: Pair, tmp_path: Path) -> None:
    serving[WORKER].restart()
    eventually(lambda: unit(serving[WORKER]) == "failed", "the attempt at boot to end", 200)
    all_ended(serving)
    report = status(tmp_path)
    assert (report["verdict"], report["exit"]) == ("failed", 5)
    assert "rank 0 on spark-1 does not start with this node" in agent(serving[WORKER])["message"]
    # It sees the rank gone; its guard may find the silence of the restarting node first.
    assert "spark-2" in agent(serving[HEAD])["message"]


@pytest.mark.field("B77")
def test_what_no_gate_has_passed_is_not_started_at_boot(stopped: Pair, tmp_path: Path) -> None:
    """The worker's marker names another launch; the head's attempt has an end, too."""
    worker, path = stopped[WORKER], f"/var/lib/sparkfleet/releases/{REPLICA}.json"
    text = worker.read(path)
    marker = json.loads(text)
    marker["current"]["launch_hash"] = "0" * 20
    worker.write(path, json.dumps(marker))
    try:
        worker.restart()
        eventually(lambda: unit(worker) == "failed", "the attempt at boot to end", 200)
        assert "not the committed release" in agent(worker)["message"]
        assert status(tmp_path)["exit"] == 5
    finally:
        worker.write(path, text)


# -- other settings, shared by the tests below


@pytest.fixture(scope="module")
def other(pair: Pair) -> Iterator[dict[str, int]]:
    """Two settings are changed, one of the engine and one of the boot; how often each node started before."""
    good("start")
    before = {name: starts(node) for name, node in pair.items()}
    good("site", ranks_settings={"top_k": 30}, ranks_start_on_boot=False)
    yield before
    good("site")
    for node in pair.values():
        assert node.run("systemctl", "is-enabled", BOOT_UNIT).text.strip() == "enabled"


def test_one_setting_restarts_the_replica_once_and_in_order(pair: Pair, other: dict[str, int]) -> None:
    assert {name: starts(node) - other[name] for name, node in pair.items()} == {HEAD: 1, WORKER: 1}
    started = {
        name: node.text("docker", "inspect", "-f", "{{.State.StartedAt}}", NAME)
        for name, node in pair.items()
    }
    assert started[WORKER] < started[HEAD]
    assert "--top-k 30" in pair[HEAD].text("docker", "inspect", "-f", '{{join .Config.Cmd " "}}', NAME)


@pytest.mark.usefixtures("other")
def test_without_start_on_boot_nodes_that_restart_stay_stopped(serving: Pair, tmp_path: Path) -> None:
    """One of them first: the other rank ends with it and says why.

    A node that shuts down stops its rank in order and sends the other home; one that is cut off before that
    leaves a rank that finds its peer gone.
    """
    serving[HEAD].restart()
    all_ended(serving)
    assert unit(serving[HEAD]) == "inactive"
    worker = agent(serving[WORKER])
    assert "rank 0 on spark-1" in worker["message"]
    if worker["phase"] == "stopped":
        assert "a stop in order" in worker["message"] or "was stopped" in worker["message"]
    assert status(tmp_path)["verdict"] == worker["phase"]
    restart_all(serving)
    assert {unit(node) for node in serving.values()} == {"inactive"}
    report = status(tmp_path)
    assert (report["verdict"], report["exit"]) == ("stopped", 3)
