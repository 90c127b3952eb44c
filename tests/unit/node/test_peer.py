"""The peer service: contract, state and stop, sealed with a key."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import peer_wire
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi

from node.sparkfleet_node import peer
from tests.unit.node.conftest import INSTALL, KEY, TreeHost, launch_of
from tests.unit.node.fake_docker import FakeDocker


@pytest.fixture
def port(node: TreeHost) -> Iterator[int]:
    server = peer.PeerServer(node, "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield int(server.server_address[1])
    server.shutdown()
    server.server_close()


def ask(
    port: int, op: str, body: dict[str, Any] | None = None, key: str = KEY, replica: str = "spark-a"
) -> Any:
    return peer_wire.ask(["127.0.0.1"], port, key.encode(), replica, op, body)


def test_contracts_are_compared(port: int) -> None:
    same = ask(port, "contract", {"contract": launch_of(1)["contract"]})
    assert same["differences"] == [] and same["rank"] == 0
    other = ask(port, "contract", {"contract": launch_of(1, idx_split=True)["contract"]})
    assert "switch idx_split: None here, '1' there" in other["differences"]


def test_the_state_is_the_agents(port: int, node: TreeHost) -> None:
    assert ask(port, "state")["phase"] == "none"
    pid = os.getpid()
    node.write(f"/proc/{pid}/comm", "x")
    node.write(
        "/run/sparkfleet/spark-a/rank.json", json.dumps({"phase": "running", "pid": pid, "message": "m"})
    )
    state = ask(port, "state")
    assert state["alive"] and state["phase"] == "running" and state["boot_id"] == "boot-1"
    node.write("/run/sparkfleet/spark-a/rank.json", json.dumps({"phase": "running", "pid": 999999999}))
    assert not ask(port, "state")["alive"], "an agent that died did not write so"


def test_a_forged_message_is_dropped_and_learns_nothing(port: int, node: TreeHost) -> None:
    for key, replica in (("x" * 64, "spark-a"), (KEY, "other"), (KEY, "../spark-a")):
        with pytest.raises(peer_wire.PeerRefused, match="dropped"):
            ask(port, "state", key=key, replica=replica)
    for raw in (b"junk\n", b"{}\n", b'{"replica": 1}\n', b"\xff\n", b"x" * 200000 + b"\n"):
        with socket.create_connection(("127.0.0.1", port), 5) as link, link.makefile("rwb") as stream:
            stream.readline()
            try:
                stream.write(raw)
                stream.flush()
                assert stream.readline() == b""
            except ConnectionError:
                pass  # the server closed before it had read all of it
    assert ask(port, "state")["rank"] == 0


def test_a_message_cannot_be_sent_again(port: int) -> None:
    """The seal covers the server's nonce of its own connection."""
    with socket.create_connection(("127.0.0.1", port), 5) as link, link.makefile("rwb") as stream:
        nonce = json.loads(stream.readline())["nonce"]
        seal = peer_wire.mac(KEY.encode(), "request", nonce, "n", "spark-a", "state", "{}")
        message = json.dumps({"replica": "spark-a", "op": "state", "nonce": "n", "body": "{}", "mac": seal})
        stream.write(message.encode() + b"\n")
        stream.flush()
        assert stream.readline()
    with socket.create_connection(("127.0.0.1", port), 5) as link, link.makefile("rwb") as stream:
        stream.readline()
        stream.write(message.encode() + b"\n")
        stream.flush()
        assert stream.readline() == b""


def test_parts_cannot_be_shifted() -> None:
    assert peer_wire.mac(b"k", "ab", "c") != peer_wire.mac(b"k", "a", "bc")


def test_an_answer_with_another_key_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            link, _address = listener.accept()
            with link, link.makefile("rwb") as stream:
                stream.write(b'{"nonce": "n"}\n')
                stream.flush()
                stream.readline()
                stream.write(b'{"body": "{}", "mac": "00"}\n')

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(peer_wire.PeerRefused, match="another key"):
            ask(listener.getsockname()[1], "state")


def test_silence_is_unreachable() -> None:
    with pytest.raises(peer_wire.PeerUnreachable):
        peer_wire.ask(["127.0.0.1"], 1, b"k" * 64, "spark-a", "state", timeout=1)


def test_a_readable_key_is_refused(node: TreeHost, port: int) -> None:
    (node.root / "etc/sparkfleet/replicas/spark-a/peer.key").chmod(0o644)
    with pytest.raises(peer_wire.PeerRefused):
        ask(port, "state")


def test_an_unknown_operation_is_an_error(port: int) -> None:
    with pytest.raises(peer_wire.PeerRefused, match="no operation"):
        ask(port, "reboot")


def test_kill_takes_only_what_is_ours(node: TreeHost, docker: FakeDocker, api: DockerApi) -> None:
    assert not peer.kill_rank(node, api, "spark-a", "redline", "guard")
    foreign = docker.add("dsv41-1017-exl3-tf", {})
    assert not peer.kill_rank(node, api, "spark-a", "redline", "guard")
    docker.containers.pop(foreign)
    docker.add("dsv41-1017-exl3-tf", {"sparkfleet.install": INSTALL, "sparkfleet.replica": "spark-a"})
    assert peer.kill_rank(node, api, "spark-a", "redline", "guard")
    assert docker.find("dsv41-1017-exl3-tf")["State"]["ExitCode"] == 137
    assert "redline" in (node.read("/run/sparkfleet/spark-a/trip.json") or "")


def test_addresses_come_from_the_launch_files(node: TreeHost) -> None:
    assert peer.own_addresses(node) == ({"10.77.0.1", "10.77.0.5"}, 29630)
