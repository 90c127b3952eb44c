"""Faults of a served replica: each has the right end state, word in the status and message.

Needs a lab that serves (``site.yml`` ran); brings it up itself otherwise. Each test leaves a serving replica.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.testing import Node, eventually, lab, nodes
from tests.proof.prove import Run, play

pytestmark = pytest.mark.lab

REPLICA = "lab"
NAME = "dsv41-1017-exl3-tf"
UNIT = f"sparkfleet-rank@{REPLICA}.service"
HEAD, WORKER = "spark-1", "spark-2"


def inventory() -> str:
    return str(lab().directory / "inventory")


def run(playbook: str, **variables: object) -> Run:
    words = ["-e", json.dumps(variables)] if variables else []
    return play(f"playbooks/{playbook}.yml" if playbook != "site" else "site.yml", inventory(), extra=words)


def status(tmp: Path, probe: str = "auto") -> dict[str, Any]:
    """The report of one replica; the run itself fails when it does not serve."""
    target = tmp / "status.json"
    target.unlink(missing_ok=True)
    done = run("status", status_json=str(target), status_probe=probe)
    report: dict[str, Any] = json.loads(target.read_text())[REPLICA]
    assert (done.rc == 0) == (report["exit"] == 0), done.output
    return report


def containers(node: Node) -> dict[str, str]:
    """Name to id and start of what runs on a node."""
    text = node.text("docker", "ps", "--no-trunc", "--format", "{{.Names}} {{.ID}}")
    return dict(line.split(" ", 1) for line in text.splitlines())


def agent(node: Node) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(node.read(f"/run/sparkfleet/{REPLICA}/rank.json"))
    return value


@contextmanager
def faulty(where: Iterable[Node], name: str, value: str | None = None) -> Iterator[None]:
    """A fault switch that is on, on some nodes, inside the block."""
    with ExitStack() as stack:
        for node in where:
            stack.enter_context(node.fault(name, value))
        yield


def ended(node: Node) -> bool:
    return node.run("systemctl", "is-active", UNIT).text.strip() not in (
        "active",
        "activating",
        "deactivating",
    )


@pytest.fixture(scope="module")
def pair() -> dict[str, Node]:
    return {node.name: node for node in nodes()}


@pytest.fixture(autouse=True)
def serving(pair: dict[str, Node]) -> Iterator[None]:
    """A serving replica before and after."""
    if not all(containers(node).get(NAME) for node in pair.values()):
        launched = all(
            node.run("test", "-e", f"/etc/sparkfleet/replicas/{REPLICA}/launch.json").status == 0
            for node in pair.values()
        )
        done = run("start" if launched else "site")
        assert done.rc == 0, done.output[-4000:]
    yield
    done = run("start")
    assert done.rc == 0, done.output[-4000:]


@pytest.mark.field("B76")
@pytest.mark.parametrize("victim", [WORKER, HEAD])
def test_a_dead_rank_takes_its_replica_down_and_start_brings_it_back(
    pair: dict[str, Node], tmp_path: Path, victim: str
) -> None:
    other = HEAD if victim == WORKER else WORKER
    pair[victim].text("docker", "kill", NAME)
    eventually(lambda: ended(pair[victim]) and ended(pair[other]), "the right end", 90)
    assert all(NAME not in containers(node) for node in pair.values()), "half a pair serves nobody"
    assert "exit code 137" in agent(pair[victim])["message"]
    assert f"on {victim} is gone" in agent(pair[other])["message"]
    report = status(tmp_path)
    assert report["verdict"] == "failed" and report["exit"] == 5
    done = run("start")
    assert done.rc == 0, done.output[-4000:]
    assert status(tmp_path)["verdict"] == "serving"


@pytest.mark.field("B77")
def test_half_a_pair_is_restarted_whole(pair: dict[str, Node], tmp_path: Path) -> None:
    """The worker's agent is shot, so that nothing tells the head; its container goes on."""
    before = containers(pair[HEAD])[NAME]
    pair[WORKER].text("systemctl", "kill", "-s", "KILL", UNIT)
    eventually(lambda: ended(pair[WORKER]), "the right end", 30)
    assert status(tmp_path, "never")["verdict"] in ("half", "failed")
    assert run("start").rc == 0
    assert containers(pair[HEAD])[NAME] != before
    assert status(tmp_path)["verdict"] == "serving"


@pytest.mark.field("B78")
def test_a_rank_restarted_by_hand(pair: dict[str, Node], tmp_path: Path) -> None:
    pair[WORKER].text("docker", "restart", "-t", "1", NAME)
    eventually(lambda: ended(pair[WORKER]) and ended(pair[HEAD]), "the right end", 90)
    assert all(NAME not in containers(node) for node in pair.values())
    assert status(tmp_path)["exit"] == 5


@pytest.mark.field("B84")
@pytest.mark.parametrize("port", [8888, 29620])
def test_a_busy_port_is_named_and_left_alone(pair: dict[str, Node], port: int) -> None:
    head = pair[HEAD]
    assert run("stop").rc == 0
    head.text(
        "systemd-run", "--unit=squatter", "python3", "-m", "http.server", str(port), "--bind", "0.0.0.0"
    )
    try:
        eventually(lambda: f":{port}" in head.text("ss", "-ltn"), "the right end", 10)
        done = run("start")
        assert done.rc == 2
        words = " ".join(done.output.split())
        assert f"port {port} is in use" in words and "python3 (pid" in words
        assert head.run("systemctl", "is-active", "squatter").text.strip() == "active"
        assert all(NAME not in containers(node) for node in pair.values()), (
            "what had started is stopped again"
        )
    finally:
        head.run("systemctl", "stop", "squatter")


def test_a_foreign_container_of_the_same_name_and_image(pair: dict[str, Node], tmp_path: Path) -> None:
    worker = pair[WORKER]
    image = worker.text("docker", "inspect", "-f", "{{.Config.Image}}", NAME)
    assert run("stop").rc == 0
    worker.text("docker", "run", "-d", "--name", NAME, "--entrypoint", "sleep", image, "1000")
    try:
        done = run("start")
        assert done.rc == 2 and "foreign" in done.output
        assert status(tmp_path)["exit"] == 7
        assert NAME in containers(worker)
        assert run("stop").rc == 0
        assert NAME in containers(worker), "a stop takes only what is ours"
    finally:
        worker.text("docker", "rm", "-f", NAME)


@pytest.mark.field("B19")
def test_a_drifted_index_is_told_and_used_by_the_next_start(pair: dict[str, Node], tmp_path: Path) -> None:
    ids = {name: containers(node)[NAME] for name, node in pair.items()}
    with faulty(pair.values(), "gid-drift", "6"):
        report = status(tmp_path)
        assert any(
            "GID index is 6 now and was 3" in note for rank in report["ranks"] for note in rank["notes"]
        )
        assert {name: containers(node)[NAME] for name, node in pair.items()} == ids, (
            "a live fact restarts nothing"
        )
        assert run("restart").rc == 0
        for node in pair.values():
            env = node.text("docker", "inspect", "-f", "{{json .Config.Env}}", NAME)
            assert "NCCL_IB_GID_INDEX=6" in env and "TF_RDMA_GID_INDEX=6" in env
    assert run("restart").rc == 0


@pytest.mark.field("B82")
def test_a_tampered_switch_is_refused_before_anything_runs(pair: dict[str, Node]) -> None:
    worker, path = pair[WORKER], f"/etc/sparkfleet/replicas/{REPLICA}/launch.json"
    text = worker.read(path)
    launch = json.loads(text)
    launch["container"]["env"]["TF_DS_IDX_SPLIT"] = "1"
    launch["contract"]["switches"]["idx_split"] = "1"
    assert run("stop").rc == 0
    worker.write(path, json.dumps(launch), 0o600)
    try:
        done = run("start")
        assert done.rc == 2
        assert "switch idx_split" in " ".join(done.output.split())
        assert all(NAME not in containers(node) for node in pair.values())
    finally:
        worker.write(path, text, 0o600)


@pytest.mark.field("B80")
def test_an_engine_that_stalls_is_healthy_and_stalled(pair: dict[str, Node], tmp_path: Path) -> None:
    worker = pair[WORKER]
    worker.text("docker", "pause", NAME)
    try:
        assert '"ok": true' in pair[HEAD].text("curl", "-s", "http://127.0.0.1:8888/health")
        report = status(tmp_path)
        assert report["verdict"] == "stalled" and report["exit"] == 6
    finally:
        worker.text("docker", "unpause", NAME)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("engine-silent", "empty reply"), ("engine-collapsed", "one repeated character")],
)
def test_a_model_that_answers_nonsense_fails_the_start(pair: dict[str, Node], fault: str, words: str) -> None:
    with faulty([pair[HEAD]], fault):
        done = run("restart")
        assert done.rc == 2 and words in " ".join(done.output.split())
        assert all(NAME not in containers(node) for node in pair.values())
        for node in pair.values():
            assert "bundle-rank" in node.text("ls", "/var/lib/sparkfleet/logs")


def test_an_engine_that_never_gets_ready_has_an_end(pair: dict[str, Node]) -> None:
    with faulty(pair.values(), "engine-load", "600"):
        begin = time.monotonic()
        done = run("restart", ranks_wait_timeout=10)
        assert done.rc == 2 and "does not get ready" in " ".join(done.output.split())
        assert time.monotonic() - begin < 180
        assert all(NAME not in containers(node) for node in pair.values())


def test_a_rank_that_dies_while_it_loads_ends_the_start_at_once(pair: dict[str, Node]) -> None:
    with faulty([pair[WORKER]], "engine-crash", "load"):
        begin = time.monotonic()
        done = run("restart")
        assert done.rc == 2 and "137" in done.output
        assert time.monotonic() - begin < 180
        assert all(NAME not in containers(node) for node in pair.values())


def test_an_unreachable_peer_is_refused(pair: dict[str, Node]) -> None:
    assert run("stop").rc == 0
    pair[HEAD].text("systemctl", "stop", "sparkfleet-peer")
    try:
        done = run("start")
        assert done.rc == 2
        assert "cannot be reached on the rails" in " ".join(done.output.split())
    finally:
        pair[HEAD].text("systemctl", "start", "sparkfleet-peer")


def test_a_forged_peer_message_changes_nothing(pair: dict[str, Node]) -> None:
    ids = {name: containers(node)[NAME] for name, node in pair.items()}
    script = (
        "import json,socket\n"
        "s=socket.create_connection(('10.77.0.1',29630),5);f=s.makefile('rwb');f.readline()\n"
        "f.write(json.dumps({'replica':'lab','op':'stop','nonce':'n','body':'{}','mac':'0'*64}).encode()+b'\\n');f.flush()\n"
        "print(repr(f.readline()))\n"
    )
    assert pair[WORKER].text("python3", "-c", script) == "b''"
    assert "not sealed with the key" in pair[HEAD].text("journalctl", "-u", "sparkfleet-peer", "-n", "20")
    assert {name: containers(node)[NAME] for name, node in pair.items()} == ids


def test_docker_restarted_under_a_serving_replica(pair: dict[str, Node], tmp_path: Path) -> None:
    pair[WORKER].text("systemctl", "restart", "docker")
    eventually(lambda: ended(pair[WORKER]) and ended(pair[HEAD]), "the right end", 200)
    assert status(tmp_path)["exit"] == 5
    assert run("start").rc == 0


def test_a_lock_of_another_run_is_refused_and_broken_by_its_id(pair: dict[str, Node]) -> None:
    """A controller that was killed leaves its lock."""
    lock = json.dumps({"run": "dead-run", "owner": "ann", "host": "laptop", "since": time.time() - 7200})
    path = f"/var/lib/sparkfleet/locks/{REPLICA}.lock"
    pair[WORKER].write(path, lock)
    done = run("restart")
    words = " ".join(done.output.split())
    assert done.rc == 2 and "ann on laptop for 2 h 0 min, run dead-run" in words
    assert run("restart", ranks_break_lock="dead-run").rc == 0
    for node in pair.values():
        assert node.run("test", "-e", path).status != 0, "the lock is given back"


def test_stop_is_idempotent_and_saves_the_logs(pair: dict[str, Node], tmp_path: Path) -> None:
    before = {
        name: node.run("ls", "/var/lib/sparkfleet/logs").text.count("-rank") for name, node in pair.items()
    }
    assert run("stop").rc == 0
    again = run("stop")
    assert again.rc == 0 and again.changed_count() == 0
    assert status(tmp_path)["exit"] == 3
    for name, node in pair.items():
        assert NAME not in containers(node)
        assert node.text("ls", "/var/lib/sparkfleet/logs").count("-rank") >= min(before[name] + 1, 10)


def test_one_setting_restarts_the_replica_once_and_in_order(pair: dict[str, Node]) -> None:
    done = run("site", ranks_settings={"top_k": 30})
    assert done.rc == 0, done.output[-4000:]
    started = {
        name: node.text("docker", "inspect", "-f", "{{.State.StartedAt}}", NAME)
        for name, node in pair.items()
    }
    assert started[WORKER] < started[HEAD]
    assert "--top-k 30" in pair[HEAD].text("docker", "inspect", "-f", '{{join .Config.Cmd " "}}', NAME)
    assert run("site").rc == 0


@pytest.mark.parametrize("which", [[WORKER], [HEAD, WORKER]])
def test_nodes_that_restart_come_back_serving(
    pair: dict[str, Node], tmp_path: Path, which: list[str]
) -> None:
    for name in which:
        pair[name].restart()
    if len(which) == 1:
        # The other rank ended when its peer's node said that the rank is gone; nothing starts half a pair.
        def judged() -> bool:
            return status(tmp_path, "never")["verdict"] in ("failed", "half", "starting", "running")

        eventually(judged, "a verdict", 120)
        return
    eventually(lambda: status(tmp_path)["verdict"] == "serving", "the right end", 300)
