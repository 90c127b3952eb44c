"""A Docker daemon that fits on a page: a Unix socket, containers in memory, refusals in its words."""

from __future__ import annotations

import contextlib
import json
import re
import socketserver
import struct
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


class FakeDocker:
    """State and behaviour. ``on_start`` may be set to a function called with each started container."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.containers: dict[str, dict[str, Any]] = {}
        self.images: dict[str, dict[str, Any]] = {}
        self.volumes: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, Any] = {}
        self.calls: list[str] = []
        self.changed = threading.Condition()
        self.api = ("1.47", "1.24")
        self.on_start: Any = None
        self.denied = False
        self.server: socketserver.ThreadingUnixStreamServer | None = None

    def __enter__(self) -> FakeDocker:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def address_string(self) -> str:
                return "local"

            def log_message(self, *_args: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.handle(self)

            do_POST = do_DELETE = do_GET

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self.server = Server(str(self.path), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    # -- what a test does to it

    def add(self, name: str, labels: dict[str, str], running: bool = True, log: str = "") -> str:
        identity = f"{len(self.containers) + 1:064x}"
        self.containers[identity] = {
            "Id": identity,
            "Name": f"/{name}",
            "Config": {"Labels": labels, "Image": "x", "Tty": False},
            "State": {
                "Running": running,
                "StartedAt": f"t{time.monotonic()}",
                "ExitCode": 0,
                "OOMKilled": False,
            },
            "log": log.encode(),
        }
        return identity

    def end(self, name: str, code: int = 0, log: str = "", oom: bool = False) -> None:
        with self.changed:
            found = self.find(name)
            found["State"].update({"Running": False, "ExitCode": code, "OOMKilled": oom})
            found["log"] += log.encode()
            self.changed.notify_all()

    def restart_by_hand(self, name: str) -> None:
        with self.changed:
            found = self.find(name)
            found["State"].update({"Running": True, "StartedAt": f"t{time.monotonic()}", "restarts": 1})
            self.changed.notify_all()

    def find(self, name: str) -> dict[str, Any]:
        for row in self.containers.values():
            if row["Id"].startswith(name) or row["Name"] == f"/{name}":
                return row
        raise KeyError(name)

    # -- the wire

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlparse(request.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        path = urllib.parse.unquote(re.sub(r"^/v\d+\.\d+", "", url.path))
        length = request.headers.get("Content-Length")
        if request.headers.get("Transfer-Encoding") == "chunked":
            raw = b""
            while size := int(request.rfile.readline(), 16):
                raw += request.rfile.read(size)
                request.rfile.readline()
            request.rfile.readline()
        else:
            raw = request.rfile.read(int(length or 0))
        self.calls.append(f"{request.command} {path}")
        status, answer = self.answer(request.command, path, query, raw)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if status in (204, 304):
            data = b""
        with contextlib.suppress(OSError):
            request.send_response(status)
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data)

    def answer(self, method: str, path: str, query: dict[str, str], raw: bytes) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"ApiVersion": self.api[0], "MinAPIVersion": self.api[1], "Version": "fake"}
        if path == "/_ping":
            return 200, b"OK"
        if self.denied:
            return 500, {"message": "the daemon is not well"}
        if path.startswith("/images/") and path.endswith("/json"):
            name = path[len("/images/") : -len("/json")]
            return (
                (200, self.images[name])
                if name in self.images
                else (404, {"message": f"No such image: {name}"})
            )
        if path.startswith("/volumes/"):
            name = path[len("/volumes/") :]
            return (
                (200, self.volumes[name])
                if name in self.volumes
                else (404, {"message": f"get {name}: no such volume"})
            )
        if path == "/build":
            self.bodies["build"] = (query, raw)
            lines: list[dict[str, Any]] = [{"stream": "Step 1/1 : FROM scratch\n"}]
            if raw == b"bad":
                lines.append({"error": "no step", "errorDetail": {"message": "COPY failed: no such file"}})
            else:
                lines.append({"aux": {"ID": "sha256:built"}})
            return 200, b"".join(json.dumps(line).encode() + b"\r\n" for line in lines)
        if path == "/images/load":
            self.bodies["load"] = raw
            return 200, json.dumps({"stream": "Loaded image: a:b\n"}).encode()
        if path == "/images/get":
            self.bodies["get"] = query
            return 200, b"TAR" * 1000
        if path == "/containers/create":
            return self.create(query["name"], json.loads(raw))
        if path == "/containers/json":
            wanted = json.loads(query.get("filters", "{}"))
            rows = [row for row in self.containers.values() if self.matches(row, wanted)]
            return 200, [{key: value for key, value in row.items() if key != "log"} for row in rows]
        return self.one(method, path, query)

    @staticmethod
    def matches(row: dict[str, Any], wanted: dict[str, list[str]]) -> bool:
        labels = row["Config"]["Labels"]
        have = {f"{key}={value}" for key, value in labels.items()} | set(labels)
        names = [pattern.strip("^$") for pattern in wanted.get("name", [])]
        return set(wanted.get("label", [])) <= have and (not names or row["Name"] in names)

    def create(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        with contextlib.suppress(KeyError):
            taken = self.find(name)
            return 409, {"message": f'Conflict. The container name "/{name}" is in use by {taken["Id"]}.'}
        identity = self.add(name, body.get("Labels", {}), running=False)
        self.bodies[name] = body
        return 201, {"Id": identity, "Warnings": []}

    def one(self, method: str, path: str, query: dict[str, str]) -> tuple[int, Any]:
        _empty, _kind, name, *rest = path.split("/")
        what = rest[0] if rest else ""
        try:
            row = self.find(name)
        except KeyError:
            return 404, {"message": f"No such container: {name}"}
        state = row["State"]
        if method == "DELETE":
            if state["Running"] and "force" not in query:
                return 409, {"message": "You cannot remove a running container"}
            with self.changed:
                self.containers.pop(row["Id"])
                state["Running"] = False
                self.changed.notify_all()
            return 204, b""
        if what == "json":
            return 200, {key: value for key, value in row.items() if key != "log"}
        if what == "logs":
            frames = b"".join(
                struct.pack(">BxxxL", 1, len(line)) + line for line in row["log"].splitlines(keepends=True)
            )
            return 200, frames
        if what == "start":
            if state["Running"]:
                return 304, b""
            state.update({"Running": True, "StartedAt": f"t{time.monotonic()}"})
            if self.on_start is not None:
                self.on_start(row)
            return 204, b""
        if what in ("stop", "kill"):
            if not state["Running"]:
                return (304, b"") if what == "stop" else (409, {"message": "is not running"})
            with self.changed:
                state.update({"Running": False, "ExitCode": 0 if what == "stop" else 137})
                self.changed.notify_all()
            return 204, b""
        if what == "wait":
            with self.changed:
                while state["Running"] and not state.pop("restarts", 0):
                    self.changed.wait(0.05)
            return 200, {"StatusCode": state["ExitCode"]}
        return 404, {"message": f"page not found: {method} {path}"}
