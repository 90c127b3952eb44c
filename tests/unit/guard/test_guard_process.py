"""The guard with real processes: pidfd, notes, records, peers, health page; only memory and Docker stand
in."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.module_utils import peer_wire
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerUnreachable
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Answer, Host
from ansible_collections.sparkfleet.serving.plugins.module_utils.memory_guard import Policy, PolicyError

from node.sparkfleet_node import guard as node_guard
from node.sparkfleet_node.guard import Guard

ROOT = Path(__file__).parents[3]
INSTALL = "install-1"
IGNORE_TERM = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
OBEY = "import time; print('up', flush=True); time.sleep(60)"


class Node(Host):
    """A directory as a node, with a clock that the test moves."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.now = 1000.0
        self.commands: list[list[str]] = []

    def memory(self, gibibytes: float, **more: float) -> None:
        rows = {"MemTotal": 121.7, "MemAvailable": gibibytes, **more}
        self.write("/proc/meminfo", "".join(f"{k}: {int(v * (1 << 20))} kB\n" for k, v in rows.items()))

    def run(self, argv: Any, timeout: float = 20.0, stdin: str | None = None) -> Answer:
        del timeout, stdin
        self.commands.append(list(argv))
        return Answer(0, "", "")

    def clock(self) -> float:
        return self.now


class Docker:
    def __init__(self) -> None:
        self.pid = 0
        self.labels = {"sparkfleet.install": INSTALL, "sparkfleet.replica": "pair-1"}
        self.id = "c" * 64
        self.down = False
        self.posts: list[str] = []

    def _state(self) -> dict[str, Any]:
        if self.down:
            raise DockerUnreachable("no socket")
        return {
            "Id": self.id,
            "Config": {"Labels": self.labels, "Image": "x"},
            "State": {"Running": self.pid > 0, "Pid": self.pid, "StartedAt": "t"},
        }

    def container_find(self, _name: str) -> dict[str, Any] | None:
        return self._state() if self.pid else None

    def post(self, path: str) -> None:
        self.posts.append(path)
        if self.down:
            raise DockerUnreachable("no socket")

    def container_inspect(self, _name: str) -> dict[str, Any]:
        return self._state()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    host = Node(tmp_path)
    launch = {
        "schema": 1,
        "replica": "pair-1",
        "rank": 0,
        "node": "spark-1",
        "hash": "h1",
        "install_id": INSTALL,
        "container": {"name": "engine"},
        "peers": [{"name": "spark-2", "rank": 1, "addresses": ["10.77.0.2"]}],
        "peer_port": 29700,
        "ports": {"api": None},
        "health": {"path": "/health", "running": "requests_running", "progress": ["rounds_total"]},
    }
    host.write("/etc/sparkfleet/replicas/pair-1/launch.json", json.dumps(launch))
    host.write("/etc/sparkfleet/replicas/pair-1/peer.key", "k" * 40, 0o600)
    host.memory(50)
    return host


class Peers:
    """Answers of the other node's peer service."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.state: dict[str, Any] = {"alive": True, "now": 5.0, "guard": {"at": 5.0, "state": "watching"}}

    def __call__(
        self, _addresses: Any, _port: int, _key: bytes, _replica: str, op: str, body: Any = None, **_kw: Any
    ) -> Any:
        self.asked.append((op, dict(body or {})))
        if self.error is not None:
            raise self.error
        return self.state


@pytest.fixture
def docker() -> Docker:
    return Docker()


@pytest.fixture
def peers() -> Peers:
    return Peers()


def make(node: Node, docker: Docker, peers: Peers, **policy: Any) -> Guard:
    chosen = Policy(**policy)
    return Guard(node, docker, lambda _name: chosen, ask=peers, clock=node.clock)  # type: ignore[arg-type]


@pytest.fixture
def rank(docker: Docker) -> Iterator[Any]:
    """Start a process as the rank's container and let the guard see it."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str = OBEY) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        started.append(process)
        docker.pid = process.pid
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def samples(guard: Guard, node: Node, *values: float) -> None:
    for value in values:
        node.now += 0.5
        node.memory(value)
        guard.tick()


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.field("B35")
def test_sinking_memory_stops_the_rank_here_and_tells_the_peer(
    node: Node, docker: Docker, peers: Peers, rank: Any
) -> None:
    guard = make(node, docker, peers)
    process = rank()
    guard.attach()
    samples(guard, node, 20, 3.9, 5, 3.9)
    assert process.poll() is None, "one sample below, then above, then one below"
    samples(guard, node, 3.5)
    assert process.wait(5) == -signal.SIGTERM
    note = json.loads(node.read("/run/sparkfleet/pair-1/trip.json") or "{}")
    assert note["container"] == docker.id and "redline" in note["reason"]
    wait_for(lambda: [op for op, _body in peers.asked] == ["stop"])
    assert "redline on spark-1" in peers.asked[0][1]["reason"]
    wait_for(lambda: node.listdir("/var/lib/sparkfleet/guard"))
    record = json.loads(
        node.read(f"/var/lib/sparkfleet/guard/{node.listdir('/var/lib/sparkfleet/guard')[0]}") or ""
    )
    assert (
        record["cause"] == "redline"
        and len(record["samples"]) == 5
        and record["low_bytes"] == int(3.5 * (1 << 30))
    )
    samples(guard, node, 90)
    assert guard.state(guard.watches["pair-1"])["state"] == "tripped"


def test_a_rank_that_does_not_end_is_killed_after_its_grace(
    node: Node, docker: Docker, peers: Peers, rank: Any
) -> None:
    guard = make(node, docker, peers, grace_s=3)
    process = rank(IGNORE_TERM)
    guard.attach()
    samples(guard, node, 3.9, 3.9)
    samples(guard, node, *[3.9] * 5)
    assert process.poll() is None
    samples(guard, node, 3.9)
    assert process.wait(5) == -signal.SIGKILL


def test_a_rank_that_eats_on_while_it_ends_is_killed_at_once(
    node: Node, docker: Docker, peers: Peers, rank: Any
) -> None:
    guard = make(node, docker, peers)
    process = rank(IGNORE_TERM)
    guard.attach()
    samples(guard, node, 3.9, 3.9, 1.9)
    assert process.wait(5) == -signal.SIGKILL
    wait_for(lambda: docker.posts == [f"/containers/{docker.id}/unpause"])


def test_stopping_needs_no_docker(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers)
    process = rank()
    guard.attach()
    docker.down = True
    guard.attach()
    samples(guard, node, 3, 3)
    assert process.wait(5) == -signal.SIGTERM


def test_foreign_containers_are_never_held(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers)
    docker.labels = {"sparkfleet.install": "somebody else", "sparkfleet.replica": "pair-1"}
    process = rank()
    guard.attach()
    samples(guard, node, 1, 1, 1)
    assert process.poll() is None and not guard.watches["pair-1"].running


def test_record_only(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers, action="record")
    process = rank()
    guard.attach()
    samples(guard, node, 3, 3, 3, 3)
    wait_for(lambda: len(node.listdir("/var/lib/sparkfleet/guard")) == 1)
    assert process.poll() is None and peers.asked == []


def test_silence_stops_here_and_a_forged_heartbeat_is_silence(
    node: Node, docker: Docker, peers: Peers, rank: Any
) -> None:
    guard = make(node, docker, peers)
    process = rank()
    guard.attach()
    guard.look_at_peers()
    node.now += 20
    peers.error = peer_wire.PeerRefused("answered with another key")
    guard.look_at_peers()
    samples(guard, node, 50)
    assert process.poll() is None
    node.now += 12
    guard.look_at_peers()
    samples(guard, node, 50)
    assert process.wait(5) == -signal.SIGTERM
    samples(guard, node, 50)
    state = guard.state(guard.watches["pair-1"])
    assert state["cause"] == "silence" and state["refused"] == ["answered with another key"]


def test_a_peer_whose_guard_restarts_is_alive(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers)
    process = rank()
    guard.attach()
    peers.state = {"alive": True, "now": 500.0, "guard": None}
    for _turn in range(30):
        guard.look_at_peers()
        node.now += 2
        samples(guard, node, 50)
    assert process.poll() is None
    assert guard.watches["pair-1"].peers[1].guard == "silent"


def test_a_stop_that_a_peer_asked_for_is_told(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers)
    process = rank()
    guard.attach()
    node.write(
        "/run/sparkfleet/pair-1/trip.json",
        json.dumps({"reason": "redline on spark-2", "container": docker.id}),
    )
    process.kill()
    process.wait()
    samples(guard, node, 100)
    state = guard.state(guard.watches["pair-1"])
    assert (state["cause"], state["reason"]) == ("peer", "redline on spark-2")


def waits_for_the_other_then_starts(guard: Guard, node: Node, peers: Peers) -> None:
    """Neither starts before both are ready: no word, an old word and "not ready" hold it, "ready" lets it go."""
    assert node.commands == [], "the other node was not asked yet"
    held = {
        "at": 5.0,
        "state": "memory held",
        "ready": False,
        "restart": "memory has not come back since the stop",
    }
    peers.state = {"alive": False, "now": 5.0, "guard": held}
    guard.look_at_peers()
    samples(guard, node, 110)
    waits = "waiting for spark-2 (memory has not come back since the stop)"
    assert node.commands == [] and guard.state(guard.watches["pair-1"])["restart"] == waits
    assert guard.state(guard.watches["pair-1"])["ready"], "so that neither waits for the other for ever"
    for answer in (
        {**peers.state, "guard": {**held, "ready": True, "at": -60.0}},
        {**peers.state, "guard": {}},
    ):
        peers.state = answer
        guard.look_at_peers()
        samples(guard, node, 110)
        assert node.commands == [], "an old word of a guard, or none, is no word"
    peers.state = {"alive": False, "now": 5.0, "guard": {**held, "ready": True}}
    guard.look_at_peers()
    samples(guard, node, 110)
    wait_for(lambda: ["systemctl", "start", "--no-block", "sparkfleet-rank@pair-1.service"] in node.commands)


def test_a_worker_that_was_sent_home_learns_why(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    """The head ends in order and its worker with it, before the worker's node is asked for anything."""
    guard = make(node, docker, peers, restarts=1, restart_backoff_s=1)
    process = rank()
    guard.attach()
    process.terminate()
    process.wait()
    docker.pid = 0
    samples(guard, node, 110)
    told = {"at": 900.0, "state": "tripped", "cause": "redline", "reason": "2 samples", "tripped_at": 700.0}
    peers.state = {"alive": False, "now": 900.0, "guard": told}
    guard.look_at_peers()
    assert guard.watches["pair-1"].reason == "", "a trip of long ago is another one"
    peers.state = {"alive": False, "now": 900.0, "guard": {**told, "tripped_at": 898.0}}
    guard.look_at_peers()
    state = guard.state(guard.watches["pair-1"])
    assert (state["cause"], state["reason"]) == ("peer", "redline on spark-2: 2 samples")
    node.now += 5
    samples(guard, node, 110)
    waits_for_the_other_then_starts(guard, node, peers)


def test_restart_is_opt_in_and_waits(
    node: Node, docker: Docker, peers: Peers, rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guard = make(node, docker, peers, restarts=1, restart_backoff_s=60)
    process = rank()
    guard.attach()
    samples(guard, node, 3, 3)
    process.wait(5)
    docker.pid = 0
    samples(guard, node, 40)
    node.now += 61
    samples(guard, node, 40)
    assert node.commands == [], "memory has not come back"
    samples(guard, node, 110)
    waits_for_the_other_then_starts(guard, node, peers)
    count = len(node.commands)
    node.now += 500
    samples(guard, node, 110)
    assert len(node.commands) == count, "once a trip"
    said = [
        line.split("not started again: ")[1] for line in caplog.text.splitlines() if "not started" in line
    ]
    assert [words.split()[0] for words in said] == ["waiting", "memory", "waiting", "waiting", "waiting"], (
        said
    )
    assert guard.state(guard.watches["pair-1"])["restart"] == "restart 1 of 1"
    process = rank()
    guard.attach()
    samples(guard, node, 3, 3)
    process.wait(5)
    docker.pid = 0
    node.now += 500
    samples(guard, node, 110)
    assert len(node.commands) == count
    assert guard.state(guard.watches["pair-1"])["restart"] == "1 restarts in 24 h are the limit"


def test_a_stop_on_purpose_is_not_restarted(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers, restarts=3, restart_backoff_s=1)
    process = rank()
    guard.attach()
    samples(guard, node, 50)
    process.terminate()
    process.wait()
    docker.pid = 0
    node.now += 100
    samples(guard, node, 110, 110)
    assert node.commands == []


def test_memory_that_never_comes_back_is_said_once(
    node: Node, docker: Docker, peers: Peers, rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guard = make(node, docker, peers)
    process = rank()
    guard.attach()
    process.kill()
    process.wait()
    docker.pid = 0
    samples(guard, node, 38)
    node.now += 130
    samples(guard, node, 38, 38, 38)
    assert len([r for r in caplog.records if "has not come back" in r.getMessage()]) == 1
    assert guard.state(guard.watches["pair-1"])["state"] == "memory held"


def test_a_new_run_begins_a_new_low_water_mark(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers)
    first = rank()
    guard.attach()
    samples(guard, node, 10)
    first.kill()
    first.wait()
    samples(guard, node, 9)
    docker.id = "d" * 64
    rank()
    guard.attach()
    samples(guard, node, 70)
    state = guard.state(guard.watches["pair-1"])
    assert state["low"] == 70 << 30 and state["generation"] == "d" * 12


class Health(http.server.BaseHTTPRequestHandler):
    page: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        body = json.dumps(self.page).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        """Quiet."""


def test_stall(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    """With rank 1 dead, generation stalls while /health still answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = "/etc/sparkfleet/replicas/pair-1/launch.json"
    launch = json.loads(node.read(path) or "")
    launch["ports"]["api"] = server.server_address[1]
    node.write(path, json.dumps(launch))
    guard = make(node, docker, peers, stall_s=100)
    process = rank()
    guard.attach()
    Health.page = {"requests_running": 0, "rounds_total": 5}
    guard.look_at_api()
    node.now += 1000
    guard.look_at_api()
    samples(guard, node, 50)
    assert process.poll() is None, "idle is not stalled"
    Health.page = {"requests_running": 1, "rounds_total": 6}
    guard.look_at_api()
    node.now += 99
    guard.look_at_api()
    samples(guard, node, 50)
    assert process.poll() is None
    Health.page = {"requests_running": 1, "rounds_total": 7}
    guard.look_at_api()
    node.now += 60
    samples(guard, node, 50)
    assert process.poll() is None, "it moved"
    server.shutdown()
    server.server_close()
    node.now += 60
    guard.look_at_api()
    samples(guard, node, 50)
    assert process.wait(5) == -signal.SIGTERM, (
        "a server that stopped answering with requests in it has stalled"
    )
    assert guard.watches["pair-1"].cause == "stall"


class Keyed(http.server.BaseHTTPRequestHandler):
    """A server with an API key, as TensorFold has it: /health says that it lives, /metrics takes the key."""

    metrics = ""
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        key = self.headers.get("Authorization", "")
        type(self).seen.append((self.path, key))
        status, body = 404, "no such page"
        if self.path == "/health":
            status, body = 200, '{"ok": true}'
        elif self.path == "/metrics" and self.metrics:
            status, body = (200, self.metrics) if key == "Bearer a-long-secret" else (401, "a key")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_args: Any) -> None:
        """Quiet."""


def page(running: int, rounds: int) -> str:
    return (
        "# TYPE tensorfold_requests_inflight gauge\n"
        f'tensorfold_requests_inflight{{model="m"}} {running}\n'
        f'tensorfold_decode_rounds_total{{model="m"}} {rounds}\n'
    )


@pytest.fixture
def keyed(node: Node) -> Iterator[type[Keyed]]:
    """The head of a replica with an API key; its launch is that of the shipped profile."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Keyed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    profile = yaml.safe_load((ROOT / "roles/ranks/vars/engines/tensorfold_native.yml").read_text())
    path = "/etc/sparkfleet/replicas/pair-1/launch.json"
    launch = json.loads(node.read(path) or "")
    launch["ports"] = {"api": server.server_address[1], "api_host": "127.0.0.1"}
    launch["health"], launch["api_key"] = profile["health"], True
    secret = "/etc/sparkfleet/replicas/pair-1/api-key"
    launch["container"]["mounts"] = [{"source": secret, "target": "/run/secrets/api-key", "read_only": True}]
    node.write(path, json.dumps(launch))
    node.write(secret, "a-long-secret\n", 0o600)
    Keyed.metrics, Keyed.seen = "", []
    yield Keyed
    server.shutdown()
    server.server_close()


def test_a_stall_is_seen_through_an_api_key(
    node: Node,
    docker: Docker,
    peers: Peers,
    rank: Any,
    *,
    keyed: type[Keyed],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The health page hides its counters from everybody; the metrics page has them for the key."""
    guard = make(node, docker, peers, stall_s=100)
    process = rank()
    guard.attach()
    for running, rounds in ((0, 5), (1, 6), (1, 7)):
        keyed.metrics = page(running, rounds)
        node.now += 90
        guard.look_at_api()
    node.now += 90
    guard.look_at_api()
    samples(guard, node, 50)
    assert process.poll() is None, "a counter moved 90 s ago"
    node.now += 11
    guard.look_at_api()
    samples(guard, node, 50)
    assert process.wait(5) == -signal.SIGTERM
    watch = guard.watches["pair-1"]
    assert (watch.cause, watch.unjudged) == ("stall", "")
    assert ("/metrics", "Bearer a-long-secret") in keyed.seen
    guard.write()
    wait_for(lambda: node.listdir("/var/lib/sparkfleet/guard"))
    written = [path.read_text() for path in node.root.rglob("*guard*/*.json")]
    written += [path.read_text() for path in (node.root / "run").rglob("*") if path.is_file()]
    assert not any("a-long-secret" in text for text in [*written, caplog.text])


def test_what_shows_no_counters_is_not_judged_and_says_so(
    node: Node,
    docker: Docker,
    peers: Peers,
    rank: Any,
    *,
    keyed: type[Keyed],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A build without a metrics page, a key that is not taken: no verdict, and status says why."""
    guard = make(node, docker, peers, stall_s=1)
    process = rank()
    guard.attach()
    for _ in range(3):
        guard.look_at_api()
    assert "/metrics (404)" in guard.state(guard.watches["pair-1"])["unjudged"]
    keyed.metrics = page(1, 1)
    node.write("/etc/sparkfleet/replicas/pair-1/api-key", "another\n", 0o600)
    guard.look_at_api()
    assert "does not take the key (401)" in guard.state(guard.watches["pair-1"])["unjudged"]
    assert caplog.text.count("a stall cannot be seen") == 2, "each reason once"
    node.now += 1000
    samples(guard, node, 50)
    assert process.poll() is None


def test_state_and_metrics_are_written(node: Node, docker: Docker, peers: Peers, rank: Any) -> None:
    guard = make(node, docker, peers)
    rank()
    guard.attach()
    samples(guard, node, 33)
    guard.write()
    state = json.loads(node.read("/run/sparkfleet/pair-1/guard.json") or "")
    assert state["state"] == "watching" and state["available"] == 33 << 30
    assert 'sparkfleet_guard_rank_running{replica="pair-1"} 1' in (
        node.read("/run/sparkfleet/guard.prom") or ""
    )


def test_settings_by_replica(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    assert node_guard.load_settings(host)[0]("any") == Policy()
    host.write(
        node_guard.CONFIG, json.dumps({"defaults": {"redline_gib": 5}, "replicas": {"b": {"silence_s": 9}}})
    )
    policies, _records = node_guard.load_settings(host)
    assert policies("a").redline_gib == 5 and policies("b").redline_gib == 5 and policies("b").silence_s == 9
    wrong: list[dict[str, Any]] = [{"default": {}}, {"replicas": {"a": {"interval_s": 1}}}]
    for bad in wrong:
        host.write(node_guard.CONFIG, json.dumps(bad))
        with pytest.raises(PolicyError):
            node_guard.load_settings(host)


def test_low_memory_is_said_once_and_shown(
    node: Node, docker: Docker, peers: Peers, rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guard = make(node, docker, peers)
    rank()
    guard.attach()
    samples(guard, node, 20, 7, 7.5, 8.5, 7)
    assert len([r for r in caplog.records if "the redline is 4" in r.getMessage()]) == 1
    assert guard.state(guard.watches["pair-1"])["warning"]
    samples(guard, node, 9.5)
    assert not guard.state(guard.watches["pair-1"])["warning"]


def test_the_limit_of_restarts_outlives_the_guard(
    node: Node, docker: Docker, peers: Peers, rank: Any
) -> None:
    guard = make(node, docker, peers, restarts=1, restart_backoff_s=1)
    process = rank()
    guard.attach()
    samples(guard, node, 3, 3)
    process.wait(5)
    docker.pid = 0
    samples(guard, node, 110)
    node.now += 10
    samples(guard, node, 110)
    guard.look_at_peers()
    samples(guard, node, 110)
    wait_for(lambda: len(node.commands) == 2)
    guard.write()
    later = make(node, docker, peers, restarts=1, restart_backoff_s=1)
    process = rank()
    later.attach()
    samples(later, node, 3, 3)
    process.wait(5)
    docker.pid = 0
    samples(later, node, 110)
    node.now += 1000
    samples(later, node, 110)
    later.look_at_peers()
    samples(later, node, 110)
    assert len(node.commands) == 2


def test_the_loop_ends_on_request_and_samples_until_then(node: Node, docker: Docker, peers: Peers) -> None:
    guard = Guard(node, docker, lambda _name: Policy(interval_s=0.05), ask=peers)  # type: ignore[arg-type]
    thread = threading.Thread(target=guard.run)
    thread.start()
    wait_for(lambda: guard.samples >= 3)
    guard.stop.set()
    thread.join(5)
    assert not thread.is_alive()


def test_the_guard_kills_nothing_by_name() -> None:
    text = Path(node_guard.__file__).read_text()
    assert "pkill" not in text and "killall" not in text and "os.kill(" not in text
