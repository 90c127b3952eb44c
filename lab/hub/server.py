"""A Hub that the real `huggingface_hub` client downloads from: `server.py --root DIR --port N [--bind IP]`.

Standard library only, one file. DIR holds OWNER/NAME/REVISION/... (40 hex digits) and OWNER/NAME/refs/main,
as `python -m lab.checkpoint` writes them. A control file (DIR/.control.json, read anew for each request) sets
what the Hub refuses and breaks:

    {"tokens": {"hf_good": ["lab/private"]},      known tokens, and the gated repositories they may read
     "gated": ["lab/private"],                    repositories that need such a token to fetch a file
     "faults": {"lab/x/config.json": {"short": 100},        each body ends after 100 bytes
                "lab/x/model.safetensors": {"corrupt": true},  one byte of the body is wrong
                "lab/x/README.md": {"status": 503, "times": 2}},   the first two GETs get this status
                                                  ("times" goes with each of them)
     "rate": 4000000,                             each body comes with so many bytes a second at most
     "offline": true}                             every connection is closed without an answer

GET /_lab/stats counts requests and bytes by repository and path; POST /_lab/reset sets the counts to zero.
Tokens are never logged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = re.compile(r"[0-9a-f]{40}")
LFS_SUFFIXES = (".safetensors", ".f32", ".cubin", ".bin")
BLOCK = 1 << 20
DATE = "2026-10-17T00:00:00.000Z"


class Refused(Exception):
    """An HTTP error with the Hub's own error code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Store:
    """The repositories below the root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._digests: dict[tuple[str, int, int], tuple[str, str]] = {}
        self._lock = threading.Lock()

    def folder(self, repo: str, revision: str) -> tuple[Path, str]:
        """(folder, commit) of a repository at a revision."""
        base = self.root / repo
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or ".." in repo or not base.is_dir():
            raise Refused(404, "RepoNotFound", "Repository not found")
        commit = revision
        if not COMMIT.fullmatch(revision):
            reference = base / "refs" / revision
            if "/" in revision or not reference.is_file():
                raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            commit = reference.read_text(encoding="ascii").strip()
        if not (base / commit).is_dir():
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return base / commit, commit

    def file(self, folder: Path, name: str) -> Path:
        path = folder / name
        if ".." in Path(name).parts or not path.resolve().is_relative_to(self.root) or not path.is_file():
            raise Refused(404, "EntryNotFound", "Entry not found")
        return path

    def digests(self, path: Path) -> tuple[str, str]:
        """(sha256, git blob id), remembered by size and time."""
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        with self._lock:
            if key not in self._digests:
                sha256 = hashlib.sha256()
                blob = hashlib.sha1(f"blob {status.st_size}\0".encode(), usedforsecurity=False)
                with path.open("rb") as source:
                    while block := source.read(BLOCK):
                        sha256.update(block)
                        blob.update(block)
                self._digests[key] = (sha256.hexdigest(), blob.hexdigest())
            return self._digests[key]

    def listing(self, folder: Path) -> Iterator[tuple[str, Path]]:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path

    @staticmethod
    def is_lfs(path: Path) -> bool:
        return path.suffix in LFS_SUFFIXES


class Hub(ThreadingHTTPServer):
    """The server's shared state."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], root: Path, control: Path, log: Path | None) -> None:
        super().__init__(address, Handler)
        self.store = Store(root)
        self.control_path = control
        self.log_path = log
        self.lock = threading.Lock()
        self.counted = threading.Condition()
        self.active = 0
        self.reset()

    def reset(self) -> None:
        self.requests = 0
        self.sent = 0
        self.paths: dict[str, dict[str, int]] = {}
        self.failed: dict[str, int] = {}

    def control(self) -> dict[str, Any]:
        if not self.control_path.is_file():
            return {}
        document: dict[str, Any] = json.loads(self.control_path.read_text(encoding="utf-8"))
        return document

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until every other request is counted: a client has its answer a moment before that."""
        with self.counted:
            self.counted.wait_for(lambda: self.active == 0, seconds)

    def begin(self) -> None:
        with self.counted:
            self.active += 1

    def end(self) -> None:
        with self.counted:
            self.active -= 1
            self.counted.notify_all()

    def count(self, path: str, sent: int) -> None:
        with self.lock:
            self.requests += 1
            self.sent += sent
            entry = self.paths.setdefault(path, {"requests": 0, "bytes": 0})
            entry["requests"] += 1
            entry["bytes"] += sent

    def log(self, document: dict[str, Any]) -> None:
        line = json.dumps(document) + "\n"
        if self.log_path is None:
            sys.stderr.write(line)
            sys.stderr.flush()
        else:
            with self.lock, self.log_path.open("a", encoding="utf-8") as out:
                out.write(line)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """[begin, end) of a Range header; None without one. Refused with 416 when it lies outside."""
    if header is None:
        return None
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if not match or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if first:
        begin, end = int(first), min(int(last) + 1, size) if last else size
    else:
        begin, end = max(size - int(last), 0), size
    if begin >= size or begin >= end:
        raise Refused(416, "InvalidRange", "Range Not Satisfiable")
    return begin, end


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Hub
    protocol_version = "HTTP/1.1"
    status = 0
    sent = 0

    def log_message(self, format: str, *args: object) -> None:
        """The access log is written by `_serve`, with bytes."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        ours = self.path.startswith("/_lab/")
        if ours:
            self.server.settle()
        else:
            self.server.begin()
        try:
            self._answer()
        finally:
            if not ours:
                self.server.end()

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        query = urllib.parse.parse_qs(url.query)
        self.status, self.sent = 0, 0
        control = self.server.control()
        if control.get("offline") and not path.startswith("/_lab/"):
            self.close_connection = True
            return
        try:
            self._route(path, query, control)
        except Refused as error:
            self._refuse(error)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if not path.startswith("/_lab/"):
            self.server.count(path, self.sent)
            known = self._token() in control.get("tokens", {})
            self.server.log(
                {
                    "method": self.command,
                    "path": path,
                    "status": self.status,
                    "bytes": self.sent,
                    "range": self.headers.get("Range"),
                    "token": "none" if not self._token() else "known" if known else "unknown",
                }
            )

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()

    def _route(self, path: str, query: dict[str, list[str]], control: dict[str, Any]) -> None:
        if path == "/_lab/stats":
            hub = self.server
            self._json({"requests": hub.requests, "bytes": hub.sent, "paths": hub.paths})
            return
        if path == "/_lab/reset" and self.command == "POST":
            self.server.reset()
            self._json({})
            return
        self._check_token(control)
        if path == "/api/whoami-v2":
            if not self._token():
                raise Refused(401, "", "Invalid username or password.")
            self._json({"type": "user", "name": "lab", "auth": {"accessToken": {"role": "read"}}})
            return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path)
        if match:
            repo, kind, revision, below = match.groups()
            folder, commit = self._folder(repo, revision or "main")
            if kind == "tree":
                self._tree(folder, below or "", "true" in [v.lower() for v in query.get("recursive", [])])
            else:
                self._info(repo, folder, commit, "blobs" in query, control)
            return
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match:
            self._resolve(match[1], match[2], match[3], control)
            return
        raise Refused(404, "", "Not Found")

    def _folder(self, repo: str, revision: str) -> tuple[Path, str]:
        try:
            return self.server.store.folder(repo, revision)
        except Refused as error:
            # The real Hub does not tell a stranger whether a repository exists.
            if error.code == "RepoNotFound" and not self._token():
                raise Refused(401, "RepoNotFound", "Invalid username or password.") from error
            raise

    def _check_token(self, control: dict[str, Any]) -> None:
        if self._token() and "tokens" in control and self._token() not in control["tokens"]:
            raise Refused(401, "", "Invalid credentials in Authorization header")

    def _check_gate(self, repo: str, control: dict[str, Any]) -> None:
        if repo not in control.get("gated", []):
            return
        accepted = control.get("tokens", {}).get(self._token())
        if accepted is None:
            raise Refused(
                401, "GatedRepo", f"Access to model {repo} is restricted. You must be authenticated."
            )
        if repo not in accepted:
            raise Refused(403, "GatedRepo", f"Access to model {repo} is restricted: accept its terms first.")

    def _info(self, repo: str, folder: Path, commit: str, blobs: bool, control: dict[str, Any]) -> None:
        store = self.server.store
        siblings: list[dict[str, Any]] = []
        for name, path in store.listing(folder):
            entry: dict[str, Any] = {"rfilename": name}
            if blobs:
                sha256, blob = store.digests(path)
                size = path.stat().st_size
                entry.update({"size": size, "blobId": blob})
                if store.is_lfs(path):
                    entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
            siblings.append(entry)
        gated = "auto" if repo in control.get("gated", []) else False
        self._json(
            {
                "_id": commit[:24],
                "id": repo,
                "modelId": repo,
                "author": repo.partition("/")[0],
                "sha": commit,
                "lastModified": DATE,
                "createdAt": DATE,
                "private": False,
                "disabled": False,
                "gated": gated,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": siblings,
            }
        )

    def _tree(self, folder: Path, below: str, recursive: bool) -> None:
        store = self.server.store
        entries: list[dict[str, Any]] = []
        folders: set[str] = set()
        prefix = f"{below.rstrip('/')}/" if below else ""
        for name, path in store.listing(folder):
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folders.add(prefix + "/".join(parts[:depth]))
            if len(parts) > 1 and not recursive:
                continue
            sha256, blob = store.digests(path)
            size = path.stat().st_size
            entry: dict[str, Any] = {"type": "file", "oid": blob, "size": size, "path": name}
            if store.is_lfs(path):
                entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
            entries.append(entry)
        directories = [
            {
                "type": "directory",
                "oid": hashlib.sha256(name.encode()).hexdigest()[:40],
                "size": 0,
                "path": name,
            }
            for name in sorted(folders)
        ]
        self._json([*directories, *entries])

    def _resolve(self, repo: str, revision: str, name: str, control: dict[str, Any]) -> None:
        store = self.server.store
        folder, commit = self._folder(repo, revision)
        self._check_gate(repo, control)
        path = store.file(folder, name)
        fault = control.get("faults", {}).get(f"{repo}/{name}", {})
        if fault and self.command != "HEAD":
            with self.server.lock:
                seen = self.server.failed[path.name] = self.server.failed.get(path.name, 0) + 1
            if seen > int(fault.get("times", 1 << 30)):
                fault = {}
        if "status" in fault and self.command != "HEAD":
            raise Refused(int(fault["status"]), "", "fault switch")
        sha256, blob = store.digests(path)
        size = path.stat().st_size
        span = parse_range(self.headers.get("Range"), size)
        begin, end = span or (0, size)
        self.status = 206 if span else 200
        self.send_response(self.status)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("X-Repo-Commit", commit)
        lfs = store.is_lfs(path)
        self.send_header("ETag", f'"{sha256 if lfs else blob}"')
        if lfs:
            self.send_header("X-Linked-ETag", f'"{sha256}"')
            self.send_header("X-Linked-Size", str(size))
        if span:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if self.command != "HEAD":
            self._body(path, begin, end, {**fault, "rate": control.get("rate", 0)})

    def _body(self, path: Path, begin: int, end: int, fault: dict[str, Any]) -> None:
        stop = min(end, begin + int(fault["short"])) if "short" in fault else end
        wrong = path.stat().st_size // 2 if fault.get("corrupt") else -1
        with path.open("rb") as source:
            source.seek(begin)
            at = begin
            while at < stop:
                block = source.read(min(BLOCK, stop - at))
                if at <= wrong < at + len(block):
                    changed = bytearray(block)
                    changed[wrong - at] ^= 0x01
                    block = bytes(changed)
                self.wfile.write(block)
                at += len(block)
                self.sent += len(block)
                if fault["rate"]:
                    time.sleep(len(block) / int(fault["rate"]))
        if stop < end:
            self.close_connection = True

    def _json(self, document: object) -> None:
        data = json.dumps(document).encode()
        self.status = 200
        self.send_response(200)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
            self.sent += len(data)

    def _refuse(self, error: Refused) -> None:
        data = json.dumps({"error": error.message}).encode()
        self.status = error.status
        self.send_response(error.status)
        if error.code:
            self.send_header("X-Error-Code", error.code)
        self.send_header("X-Error-Message", error.message)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
            self.sent += len(data)


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped. Prints the port on stdout once it listens (`--port 0` takes a free one)."""
    parser = argparse.ArgumentParser(prog="server.py", description="stand-in of the Hugging Face Hub")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bind", default="0.0.0.0")
    parser.add_argument("--control", type=Path, help="default: ROOT/.control.json")
    parser.add_argument("--log", type=Path, help="access log, a JSON object a line (default: stderr)")
    options = parser.parse_args(argv)
    control = options.control or options.root / ".control.json"
    server = Hub((options.bind, options.port), options.root, control, options.log)
    print(server.server_address[1], flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
