"""Subcommand ``peer``: one small service a node on its rail addresses, for the ranks of the same replica.

It answers what a rank, a gate or the guard of another node must know without a controller: the launch
contract, the state of the rank here, and "stop your rank".

One request a connection, one JSON line each way. The server opens with a nonce; a request carries an HMAC
(SHA-256, key of the replica from a 0600 file) over both nonces and everything it says, and so does the
answer. A message without the right HMAC is dropped and logged; it learns nothing, not even whether the
replica exists.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import logging
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi, DockerError
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.launch import PEER_PORT, contract_differences
from ansible_collections.sparkfleet.serving.plugins.module_utils.peer_wire import (
    LIMIT,
    TIMEOUT,
    mac,
    read_key,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_state import (
    REPLICAS,
    agent_view,
    container_view,
    launch_path,
    read_json,
)

from .common import boot_id, since_boot

LOG = logging.getLogger(__name__)
HELP = "serve the ranks of the same replica on the rail addresses"
Json = dict[str, Any]

#: Linux's IP_FREEBIND: bind a rail address that is not there yet (at boot).
IP_FREEBIND = 15
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


# -- what a node answers -------------------------------------------------------------------------------------


def answer_contract(host: Host, replica: str, body: Json) -> Json:
    """This node's contract, and what differs from the one in the request."""
    launch = read_json(host, launch_path(replica)) or {}
    contract = launch.get("contract") or {}
    return {
        "rank": launch.get("rank"),
        "node": launch.get("node"),
        "contract": contract.get("digest", ""),
        "differences": contract_differences(contract, body.get("contract") or {}),
    }


def answer_state(host: Host, replica: str, _body: Json) -> Json:
    """What the agent of this node's rank says, and whether it lives."""
    launch = read_json(host, launch_path(replica)) or {}
    agent = agent_view(host, replica)
    guard = None
    with contextlib.suppress(Refusal):
        guard = read_json(host, f"/run/sparkfleet/{replica}/guard.json")
    return {
        "rank": launch.get("rank"),
        "node": launch.get("node"),
        "launch": launch.get("hash"),
        "contract": (launch.get("contract") or {}).get("digest", ""),
        "phase": agent.get("phase", "none"),
        "message": agent.get("message", ""),
        "alive": bool(agent["alive"]),
        "since": agent.get("since"),
        "exit": agent.get("exit"),
        "run": agent.get("run"),
        "partners": agent.get("partners", {}),
        "tail": agent.get("tail", []),
        "guard": guard,
        "boot_id": boot_id(host),
        "up_s": round(since_boot(host), 1),
        "now": round(time.time(), 1),
    }


def kill_rank(host: Host, docker: DockerApi, replica: str, reason: str, by: str) -> bool:
    """Kill this node's rank at once and leave the reason for its agent; only a container that is ours.

    The guard calls it for its own node and asks the peers for the same. False when nothing of ours ran.
    """
    launch = read_json(host, launch_path(replica)) or {}
    name = str((launch.get("container") or {}).get("name", ""))
    if not name:
        return False
    view = container_view(docker, name, replica, str(launch.get("install_id", "")))
    if view["state"] != "running":
        return False
    note = {"reason": reason, "by": by, "at": round(time.time(), 1), "container": view["id"]}
    with contextlib.suppress(OSError):
        host.write(f"/run/sparkfleet/{replica}/trip.json", json.dumps(note) + "\n", 0o600)
    docker.container_kill(view["id"])
    return True


def answer_stop(host: Host, replica: str, body: Json) -> Json:
    """Kill the rank here: its peer is at the redline, or lost."""
    try:
        done = kill_rank(
            host, DockerApi(), replica, str(body.get("reason", "")), str(body.get("by", "a peer"))
        )
    except DockerError as error:
        return {"stopped": False, "error": str(error)}
    return {"stopped": done}


Operation = Callable[[Host, str, Json], Json]
#: What a peer may ask. The guard and later parts add theirs with ``OPERATIONS["name"] = function``.
OPERATIONS: dict[str, Operation] = {
    "contract": answer_contract,
    "state": answer_state,
    "stop": answer_stop,
}


# -- server --------------------------------------------------------------------------------------------------


class _Handler(socketserver.StreamRequestHandler):
    timeout = TIMEOUT

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, PeerServer)  # noqa: S101  # narrows the type
        nonce = secrets.token_hex(16)
        try:
            self.wfile.write(json.dumps({"nonce": nonce}).encode("ascii") + b"\n")
            line = self.rfile.readline(LIMIT + 1)
            reply = self.reply(server.host, nonce, line)
            if reply is None:
                LOG.warning(
                    "peer: dropped a message from %s: not sealed with the key", self.client_address[0]
                )
                return
            self.wfile.write(json.dumps(reply).encode("utf-8") + b"\n")
        except OSError as error:
            LOG.info("peer: %s: %s", self.client_address[0], error)

    @staticmethod
    def reply(host: Host, nonce: str, line: bytes) -> Json | None:
        """The sealed answer to one request line; None drops it."""
        if len(line) > LIMIT:
            return None
        try:
            message = json.loads(line.decode("utf-8"))
            replica, op, text = str(message["replica"]), str(message["op"]), str(message["body"])
            theirs, seal = str(message["nonce"]), str(message["mac"])
        except (ValueError, KeyError, TypeError):
            return None
        if not NAME.fullmatch(replica):
            return None
        try:
            key = read_key(host, replica)
        except (Refusal, OSError, ValueError):
            return None
        if not hmac.compare_digest(seal, mac(key, "request", nonce, theirs, replica, op, text)):
            return None
        operation = OPERATIONS.get(op)
        body: Json
        try:
            body = (
                {"error": f"no operation {op}"}
                if operation is None
                else operation(host, replica, json.loads(text))
            )
        except (Refusal, ValueError, OSError) as error:
            body = {"error": str(error)}
        answer = json.dumps(body, default=str)
        return {"body": answer, "mac": mac(key, "reply", nonce, theirs, answer)}


class PeerServer(socketserver.ThreadingTCPServer):
    """The service on one address."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, host: Host, address: str, port: int) -> None:
        self.host = host
        super().__init__((address, port), _Handler, bind_and_activate=False)
        self.socket.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        try:
            self.server_bind()
            self.server_activate()
        except BaseException:
            self.server_close()
            raise


def own_addresses(host: Host) -> tuple[set[str], int]:
    """Rail addresses and port of all replicas that have a launch file on this node."""
    addresses: set[str] = set()
    port = PEER_PORT
    for replica in host.listdir(REPLICAS):
        try:
            launch = read_json(host, launch_path(replica))
        except Refusal as refusal:
            LOG.warning("peer: %s", refusal)
            continue
        if launch is not None:
            addresses |= {str(rail["address"]).partition("/")[0] for rail in launch["rails"]}
            port = int(launch.get("peer_port") or port)
    return addresses, port


# -- the subcommand ---------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none: addresses and port come from the launch files."""
    del parser


def main(_args: argparse.Namespace) -> int:
    """Serve until stopped. Looks every 10 s for replicas that were added or taken away."""
    host = Host()
    servers: dict[str, PeerServer] = {}
    while True:
        addresses, port = own_addresses(host)
        for address in set(servers) - addresses:
            servers[address].shutdown()
            servers.pop(address).server_close()
        for address in addresses - set(servers):
            try:
                server = PeerServer(host, address, port)
            except OSError as error:
                sys.stderr.write(f"peer: cannot listen on {address}:{port}: {error}\n")
                continue
            threading.Thread(target=server.serve_forever, name=address, daemon=True).start()
            servers[address] = server
            LOG.info("peer: listening on %s:%s", address, port)
        time.sleep(10)
