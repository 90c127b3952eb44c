"""The lock of a replica, the bundle and status of a node, and the endpoint as a client sees it."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import endpoint, rank_report, replica_lock
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal

from tests.unit.node.conftest import INSTALL, TreeHost, launch_of, put_launch
from tests.unit.node.fake_docker import FakeDocker

NAME = "dsv41-1017-exl3-tf"
LABELS = {"sparkfleet.install": INSTALL, "sparkfleet.replica": "spark-a"}


# -- lock


def test_one_of_two_runs_wins(node: TreeHost) -> None:
    path = replica_lock.lock_path("spark-a")
    assert replica_lock.acquire(node, path, "run-1", "ann", "laptop")["changed"]
    assert not replica_lock.acquire(node, path, "run-1", "ann", "laptop")["changed"]
    with pytest.raises(Refusal) as refused:
        replica_lock.acquire(node, path, "run-2", "bob", "desk")
    assert "ann on laptop for 0 min, run run-1" in str(refused.value.found)
    assert "ranks_break_lock=run-1" in refused.value.remedy
    assert not replica_lock.release(node, path, "run-2")["changed"]
    with pytest.raises(Refusal):
        replica_lock.acquire(node, path, "run-2", "bob", "desk", force="run-7")
    assert replica_lock.acquire(node, path, "run-2", "bob", "desk", force="run-1")["holder"]["owner"] == "bob"
    assert replica_lock.release(node, path, "run-2")["changed"]
    assert replica_lock.read(node, path) is None


def test_a_lock_that_somebody_else_broke_meanwhile_is_his(
    node: TreeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two people break the lock of one dead run; the second read it before the first had replaced it."""
    path = replica_lock.lock_path("spark-a")
    replica_lock.acquire(node, path, "dead", "ann", "laptop")
    stale = replica_lock.read(node, path)
    replica_lock.acquire(node, path, "run-1", "bob", "desk", force="dead")
    real, first = replica_lock.read, [stale]
    monkeypatch.setattr(replica_lock, "read", lambda h, p: first.pop() if first else real(h, p))
    with pytest.raises(Refusal) as refused:
        replica_lock.acquire(node, path, "run-2", "eve", "attic", force="dead")
    assert "bob on desk" in str(refused.value.found)
    holder = real(node, path)
    assert holder is not None and holder["run"] == "run-1"
    assert node.listdir("/var/lib/sparkfleet/locks") == ["spark-a.lock"]


def test_a_damaged_lock_is_a_lock(node: TreeHost) -> None:
    path = replica_lock.lock_path("spark-a")
    node.write(path, "garbage")
    with pytest.raises(Refusal, match="another run") as refused:
        replica_lock.acquire(node, path, "run", "a", "b", force="unknown")
    assert path in refused.value.remedy


def test_many_at_once_and_one_wins(node: TreeHost) -> None:
    path, won = replica_lock.lock_path("spark-a"), []

    def race(run: str) -> None:
        try:
            replica_lock.acquire(node, path, run, "x", "y")
            won.append(run)
        except Refusal:
            pass

    threads = [threading.Thread(target=race, args=(f"run-{n}",)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_age_for_people() -> None:
    assert replica_lock.age(59) == "0 min" and replica_lock.age(3 * 3600 + 12 * 60) == "3 h 12 min"


# -- endpoint


class Server:
    """An OpenAI-compatible server that misbehaves on request."""

    def __init__(self) -> None:
        self.reply: Any = "one, two"
        self.models = ["DeepSeek-V4.1-Flash-1017"]
        self.health: list[dict[str, Any]] = [
            {"requests_running": 0, "rounds_total": 1, "context_length": 524288}
        ]
        self.delay = 0.0
        self.key = ""
        self.seen: list[dict[str, Any]] = []


@pytest.fixture
def served() -> Iterator[tuple[Server, endpoint.Endpoint]]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None:
            pass

        def send(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.send(200, state.health.pop(0) if len(state.health) > 1 else state.health[0])
            elif state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
                self.send(401, {"error": "no"})
            else:
                self.send(200, {"data": [{"id": name} for name in state.models]})

        def do_POST(self) -> None:
            state.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(state.delay)
            if isinstance(state.reply, int):
                self.send(state.reply, {"error": "broken"})
            else:
                self.send(200, {"choices": [{"message": {"content": state.reply}}]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield state, endpoint.Endpoint("127.0.0.1", server.server_address[1])
    server.shutdown()
    server.server_close()


@pytest.mark.field("T30")
def test_the_smoke_test_asks_for_a_plain_answer(served: tuple[Server, endpoint.Endpoint]) -> None:
    state, client = served
    assert client.chat("m", "say", 32, 5) == "one, two"
    assert state.seen == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "say"}],
            "temperature": 0,
            "max_tokens": 32,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]


@pytest.mark.field("T37", "E16")
@pytest.mark.parametrize(
    ("reply", "words"),
    [("", "empty reply"), ("  \n", "empty reply"), (None, "empty reply"),
     ("!!!!!!", "one repeated character"),
     ("a a a", "one repeated character"), (500, "the smoke test failed")],
)  # fmt: skip
def test_replies_of_a_broken_model_fail(
    served: tuple[Server, endpoint.Endpoint], reply: Any, words: str
) -> None:
    state, client = served
    state.reply = reply
    with pytest.raises(Refusal, match=words):
        client.chat("m", "say", 32, 5)


@pytest.mark.field("B80")
def test_a_stalled_engine_fails_although_it_is_healthy(served: tuple[Server, endpoint.Endpoint]) -> None:
    state, client = served
    state.delay = 2
    assert client.health() != {}
    with pytest.raises(Refusal, match="loaded but does not generate"):
        client.chat("m", "say", 32, 0.3)


def test_a_missing_key_is_named(served: tuple[Server, endpoint.Endpoint]) -> None:
    state, client = served
    state.key = "secret"
    with pytest.raises(Refusal, match="wants an API key"):
        client.models()
    client.key = "secret"
    assert client.models() == state.models


def alive(host: TreeHost, yes: bool = True, **more: Any) -> None:
    import os

    host.write(f"/proc/{os.getpid()}/comm", "x")
    status = {"phase": "running" if yes else "failed", "pid": os.getpid(), **more}
    host.write("/run/sparkfleet/spark-a/rank.json", json.dumps(status))


def test_waiting_ends_when_the_model_is_listed(
    node: TreeHost, served: tuple[Server, endpoint.Endpoint]
) -> None:
    alive(node)
    assert endpoint.wait_ready(node, {**launch_of(0), "peers": []}, served[1], 5) < 1


def test_another_model_on_the_port_is_refused(
    node: TreeHost, served: tuple[Server, endpoint.Endpoint]
) -> None:
    served[0].models = ["llama"]
    alive(node)
    with pytest.raises(Refusal, match="another model"):
        endpoint.wait_ready(node, {**launch_of(0), "peers": []}, served[1], 5)


@pytest.mark.field("E18")
def test_a_rank_that_ends_ends_the_wait_with_its_last_lines(node: TreeHost) -> None:
    alive(node, False, message="the container ended with exit code 1: NoKit", tail=["last line"])
    nobody = endpoint.Endpoint("127.0.0.1", 1)
    with pytest.raises(Refusal, match=r"rank 0 on spark-1: .*NoKit\n    last line"):
        endpoint.wait_ready(node, {**launch_of(0), "peers": []}, nobody, 30)


def test_an_engine_that_never_gets_ready_has_an_end(node: TreeHost) -> None:
    alive(node)
    now = [0.0]
    with pytest.raises(Refusal, match="does not get ready"):
        endpoint.wait_ready(
            node,
            {**launch_of(0), "peers": []},
            endpoint.Endpoint("127.0.0.1", 1),
            60,
            clock=lambda: now[0],
            sleep=lambda s: now.__setitem__(0, now[0] + s),
        )


def evidence(node: TreeHost, api: DockerApi, docker: FakeDocker, log: str, rank: int = 0) -> Any:
    docker.containers.clear()
    docker.add(NAME, LABELS, log=log)
    launch = launch_of(rank)
    return endpoint.evidence(node, api, launch)


@pytest.mark.field("T45")
def test_the_transport_is_looked_for(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    good = evidence(node, api, docker, "NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE\n")
    assert good["evidence"] and not good["warnings"]
    assert "nothing shows" in evidence(node, api, docker, "quiet\n")["warnings"][0]
    with pytest.raises(Refusal, match="over TCP"):
        evidence(
            node, api, docker, "NCCL INFO NET/IB : No device found.\nNCCL INFO NET/Socket : Using [0]enP7s7\n"
        )


def test_rail_counters_are_evidence(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    alive(node, rail_bytes={"rocep1s0f0": 4000})
    node.write("/sys/class/infiniband/rocep1s0f0/ports/1/counters/port_xmit_data", "5000000\n")
    found = evidence(node, api, docker, "quiet\n")
    assert "19 MiB went over rocep1s0f0" in found["evidence"][0]


@pytest.mark.field("E10")
def test_less_context_than_asked_for_is_refused(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    with pytest.raises(Refusal, match="granted less context"):
        evidence(node, api, docker, 'NET/IB\n{"rank": 1, "pool": 1024}\n', rank=1)
    assert evidence(node, api, docker, 'NET/IB\n{"pool": 524288}\n', rank=1)["granted"] == {"context": 524288}


def test_what_was_loaded_is_held_against_the_plan(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    def warned(text: str, planned_gib: float = 98.9) -> str:
        docker.containers.clear()
        docker.add(NAME, LABELS, log=f"NET/IB\n{text}\n")
        launch = launch_of(0)
        launch["rank_file"]["bytes"] = int(planned_gib * (1 << 30))
        return " ".join(endpoint.evidence(node, api, launch)["warnings"])

    line = "CUDA sm_121 device 0 (NVIDIA GB10, memory shared with the host): model {} GiB; 4 streams; x"
    assert warned(line.format("98.90")) == warned(line.format("104.32")) == ""
    assert "it loaded 60.00 GiB, and the rank file has 98.90 GiB" in warned(line.format("60.00"))
    assert "it loaded 120.00 GiB" in warned(line.format("120.00"))
    with pytest.raises(Refusal, match="granted less parallel"):
        warned(line.format("98.90").replace("4 streams", "2 streams"))


@pytest.mark.field("B81", "E13")
def test_an_old_nccl_in_the_log_is_warned_of(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    old = evidence(node, api, docker, "NCCL version 2.28.9+cuda13.0\nNET/IB\n")
    assert "the rank runs NCCL 2.28.9, wanted 2.30.4 or newer" in old["warnings"][0]
    for version in ("2.30.4", "2.30.10", "3.0"):
        assert not evidence(node, api, docker, f"NCCL version {version}+cuda13.0\nNET/IB\n")["warnings"]


def test_memory_is_read_of_the_rank_that_runs(node: TreeHost) -> None:
    node.write("/proc/meminfo", "MemTotal: 127535084 kB\nMemAvailable: 15000000 kB\n")
    alive(node, phase="running", container="abcdef0123456789", memory_before=118 << 30)
    guard = {"generation": "abcdef012345", "low": 14 << 30}
    node.write("/run/sparkfleet/spark-a/guard.json", json.dumps(guard))
    assert rank_report.memory_readings(node, "spark-a") == {
        "before": 118 << 30,
        "idle": 15000000 << 10,
        "lowest": 14 << 30,
    }
    node.write("/run/sparkfleet/spark-a/guard.json", json.dumps({**guard, "generation": "another"}))
    assert rank_report.memory_readings(node, "spark-a")["lowest"] is None, "that was another rank"
    node.write("/run/sparkfleet/spark-a/guard.json", "{ damaged")
    assert rank_report.memory_readings(node, "spark-a")["lowest"] is None
    alive(node, phase="starting", memory_before=118 << 30)
    assert set(rank_report.memory_readings(node, "spark-a").values()) == {None}


# -- status


def test_serving_is_proven_by_counters_or_a_generation(served: tuple[Server, endpoint.Endpoint]) -> None:
    state, client = served
    launch = launch_of(0)

    def ask(probe: str = "auto") -> Any:
        return rank_report.serving(client, launch, probe, sample_s=0, generation_s=0.3)

    assert ask()["serving"] == "serving" and len(state.seen) == 1
    assert ask("never")["serving"] == "running" and len(state.seen) == 1
    busy = {"requests_running": 1, "rounds_total": 5}
    state.health = [busy, {**busy, "rounds_total": 6}]
    assert ask()["serving"] == "serving" and len(state.seen) == 1, "a busy server is not asked for more"
    state.health = [busy, busy]
    stalled = ask()
    assert stalled["serving"] == "stalled" and "no counter moved" in stalled["why"]
    state.health = [busy, {**busy, "streams": {"decoding": 0, "prefilling": 1}}]
    assert ask()["serving"] == "running", "256K tokens are read for two minutes"
    state.health = [{"ok": True}]
    hidden = ask()
    assert hidden["serving"] == "running" and "shows the counters" in hidden["why"] and len(state.seen) == 1
    assert ask("always")["serving"] == "serving" and len(state.seen) == 2
    state.health = [{"requests_running": 0, "rounds_total": 9}]
    state.delay = 1
    assert ask()["serving"] == "stalled"
    assert rank_report.serving(endpoint.Endpoint("127.0.0.1", 1), launch, "auto")["serving"] == "starting"


@pytest.mark.field("B19")
def test_status_tells_of_drift(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    launch = {**launch_of(1), "rails": launch_of(0)["rails"]}
    put_launch(node, launch)
    docker.add(NAME, launch["container"]["labels"])
    node.unit("sparkfleet-rank@spark-a.service")["ActiveState"] = "active"
    alive(node, gid_index=5)
    found = rank_report.status(node, api, "spark-a", "never")
    assert found["verdict"] == "running" and found["gid"] == {"started": 5, "now": 3}
    assert "the GID index is 3 now and was 5" in found["notes"][0]


def test_status_on_a_node_that_has_nothing(node: TreeHost, api: DockerApi) -> None:
    assert rank_report.status(node, api, "nobody", "auto")["verdict"] == "absent"


# -- bundle


def test_a_bundle_is_redacted(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    launch = launch_of(0)
    launch["api_key"] = True
    launch["container"]["mounts"].append(
        {"source": "/etc/k", "target": "/run/secrets/api-key", "read_only": True}
    )
    node.write("/etc/k", "canary-in-a-file\n", 0o600)
    put_launch(node, launch)
    docker.add(
        NAME, LABELS, log="HF_TOKEN=hf_abcdefgh1234 Authorization: Bearer abc.def.ghi\nkey canary-in-a-file\n"
    )
    node.write("/var/lib/sparkfleet/guard/spark-a-20260101T000000Z-redline.json", '{"low_bytes": 77}')
    node.write("/var/lib/sparkfleet/guard/other-20260101T000000Z-redline.json", '{"low_bytes": 99}')
    node.write("/etc/sparkfleet/replicas/spark-a/plan.json", '{"plan": "of the head"}')
    found = rank_report.bundle(node, api, "spark-a", "/logs", 2)
    data = (node.root / found["path"].lstrip("/")).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        texts = {
            member.name.rpartition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }
    assert {"rank.log", "launch.json", "meminfo", "kernel.log", "unit.log", "view.json"} <= set(texts)
    assert "77" in texts["guard-records.json"] and "99" not in texts["guard-records.json"]
    assert "of the head" in texts["plan.json"] and {"buddyinfo", "guard.json"} <= set(texts)
    assert node.listdir("/logs") == [found["path"].rpartition("/")[2]]
    everything = "\n".join(texts.values()) + "\n".join(found["tail"])
    for secret in ("canary", "hf_abcdefgh1234", "abc.def.ghi", "k" * 64):
        assert secret not in everything


def test_a_full_disk_still_gives_the_last_lines(node: TreeHost, api: DockerApi, docker: FakeDocker) -> None:
    docker.add(NAME, LABELS, log="the end\n")
    node.write("/logs", "a file where the directory should be")
    found = rank_report.bundle(node, api, "spark-a", "/logs")
    assert found["path"] == "" and found["tail"] == ["the end"] and "not written" in found["warnings"][0]


def test_what_the_agent_kept_stands_in_for_a_log_that_was_not_saved(node: TreeHost, api: DockerApi) -> None:
    alive(node, False, tail=["rank 1: killed"], log_warning="the log was not saved: no room")
    found = rank_report.bundle(node, api, "spark-a", "/logs")
    assert found["tail"] == ["rank 1: killed"] and found["warnings"] == ["the log was not saved: no room"]


def test_a_bundle_that_does_not_fit_leaves_nothing_behind(
    node: TreeHost, api: DockerApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    def half(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    found = rank_report.bundle(node, api, "spark-a", "/logs")
    assert found["path"] == "" and "No space left" in found["warnings"][0]
    assert node.listdir("/logs") == []
