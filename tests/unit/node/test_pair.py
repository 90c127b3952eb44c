"""Two agents with their peer services: who starts, in which order, and who ends with whom."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi

from node.sparkfleet_node import peer, rank
from tests.unit.node.conftest import launch_of, make_node, put_launch
from tests.unit.node.fake_docker import FakeDocker

NAME = "dsv41-1017-exl3-tf"
ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Spark:
    """One node: files, Docker and the peer service on its own loopback address."""

    def __init__(self, tmp: Path, number: int, port: int) -> None:
        self.host = make_node(tmp / f"node-{number}", number)
        self.docker = FakeDocker(tmp / f"docker-{number}.sock")
        self.launch = launch_of(number)
        self.launch["peer_port"] = port
        for other in self.launch["peers"]:
            other["addresses"] = [ADDRESSES[other["rank"]]]
        put_launch(self.host, self.launch)
        marker = {"schema": 1, "replica": "spark-a", "current": {"launch_hash": self.launch["hash"]}}
        self.host.write("/var/lib/sparkfleet/releases/spark-a.json", json.dumps(marker))
        self.host.write(f"/proc/{os.getpid()}/comm", "agent")  # the agents of this test live in one process
        self.server = peer.PeerServer(self.host, ADDRESSES[number], port)
        self.agent: rank.Rank | None = None
        self.thread = threading.Thread()
        self.code: int | None = None

    def go(self, agent: rank.Rank) -> None:
        self.code = agent.run()

    def start(self, at_boot: bool = False) -> None:
        if at_boot:
            self.host.write("/run/sparkfleet/spark-a/boot.json", "{}")
        api = DockerApi(str(self.docker.path), timeout=5)
        self.agent = rank.Rank(self.host, api, self.launch, every_s=0.1)
        self.agent.wait_s = lambda: 5.0  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.go, args=(self.agent,), daemon=True)
        self.thread.start()

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.host.read("/run/sparkfleet/spark-a/rank.json") or "{}"))

    def phase(self) -> str:
        return str(self.status().get("phase", "none"))

    def boot(self, up_s: float = 5.0) -> None:
        """The node has just restarted: /run is empty, nothing of ours runs."""
        (self.host.root / "run/sparkfleet/spark-a/rank.json").unlink(missing_ok=True)
        self.docker.containers.clear()
        self.host.userspace = str(int((time.monotonic() - up_s) * 1e6))

    def started_at(self) -> float:
        return float(self.docker.find(NAME)["State"]["StartedAt"].lstrip("t"))


def until(what: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Spark, Spark]]:
    monkeypatch.setattr(rank, "COMPANY_S", 0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = (Spark(tmp_path, 0, port), Spark(tmp_path, 1, port))
    for node in nodes:
        node.docker.__enter__()
        node.docker.images["sparkfleet/tensorfold-native:0123456789ab"] = {"Id": "sha256:x"}
        threading.Thread(target=node.server.serve_forever, args=(0.05,), daemon=True).start()
    yield nodes
    for node in nodes:
        if node.agent is not None:
            node.agent.stop.set()
            node.thread.join(10)
        node.server.shutdown()
        node.server.server_close()
        node.docker.__exit__(None, None, None)


def serve(head: Spark, worker: Spark) -> None:
    worker.start()
    head.start()
    until(lambda: head.phase() == worker.phase() == "running")


@pytest.mark.parametrize("first", [0, 1])
def test_two_nodes_that_boot_start_in_order(pair: tuple[Spark, Spark], first: int) -> None:
    head, worker = pair
    for node in pair:
        node.boot()
    pair[first].start(at_boot=True)
    time.sleep(0.3)
    pair[1 - first].start(at_boot=True)
    until(lambda: head.phase() == worker.phase() == "running")
    assert worker.started_at() < head.started_at()


@pytest.mark.field("B77")
@pytest.mark.parametrize("alone", [0, 1])
def test_a_node_that_boots_alone_starts_nothing(pair: tuple[Spark, Spark], alone: int) -> None:
    serve(*pair)
    mine, other = pair[alone], pair[1 - alone]
    time.sleep(0.3)  # each has met the other
    mine.docker.end(NAME, 137)
    mine.thread.join(10)
    other.thread.join(10)
    assert other.code == rank.EXIT_PEER_LOST and other.docker.containers == {}
    mine.boot()
    mine.start(at_boot=True)
    mine.thread.join(20)
    assert mine.code == rank.EXIT_REFUSED and mine.docker.containers == {}
    assert "does not start with this node" in mine.status()["message"]


def test_a_stop_of_one_ends_the_other_in_peace(pair: tuple[Spark, Spark]) -> None:
    serve(*pair)
    head, worker = pair
    assert head.agent is not None
    time.sleep(0.3)
    head.agent.stop.set()
    head.thread.join(10)
    worker.thread.join(10)
    assert head.code == worker.code == 0
    assert head.docker.containers == worker.docker.containers == {}


@pytest.mark.field("B78")
def test_the_worker_alone_started_anew_is_not_joined_by_the_old_head(pair: tuple[Spark, Spark]) -> None:
    serve(*pair)
    head, worker = pair
    time.sleep(0.3)
    assert worker.agent is not None
    # Its agent is gone without a word, and another one starts before the head has counted its silence.
    worker.host.write(
        "/run/sparkfleet/spark-a/rank.json",
        json.dumps({**worker.status(), "run": "another", "phase": "checking"}),
    )
    head.thread.join(10)
    assert head.code == rank.EXIT_PEER_LOST
    assert "started anew" in head.status()["message"]
