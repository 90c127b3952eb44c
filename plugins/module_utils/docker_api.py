# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The Docker Engine API over its Unix socket, with nothing but the standard library.

Modules on a node and the node agent use this; there is no Docker SDK on a Spark and none is installed.

Errors are told apart, because they mean different things to a caller that decides whether to start or stop:

* ``DockerUnreachable``: nobody answered (no socket, permission denied, refused, broken off). What runs on
  the node is then UNKNOWN. It never means "nothing runs here".
* ``DockerNotFound``: the daemon answered that the object does not exist.
* ``DockerConflict``: the daemon answered 409 (a name is taken, a container is running).
* ``DockerApiError``: any other refusal of the daemon, with its status and message.
* ``DockerStreamError``: a build, a load or a pull that reported an error inside its progress stream.

The API version is negotiated: the newest that both sides know. Docker 29 refuses clients below 1.44,
Debian 12 ships a daemon that ends at 1.41, so nothing can be fixed. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import struct
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Callable, Union

DEFAULT_SOCKET = "/var/run/docker.sock"
#: Newest API version whose shapes this file was written against (Docker 28.x).
NEWEST_API = (1, 51)
#: Oldest API version that has everything used here (Docker 20.10).
OLDEST_API = (1, 41)
#: Read size of streams: large enough for a 25 GB image, small enough to keep memory flat.
CHUNK = 1 << 20

Json = dict[str, Any]
Body = Union[bytes, IO[bytes], Iterable[bytes], None]


class DockerError(Exception):
    """Base of everything that can go wrong while talking to Docker."""


class DockerUnreachable(DockerError):
    """No answer from the socket: the state of containers is unknown, not empty."""


class DockerApiError(DockerError):
    """The daemon answered with an error status."""

    def __init__(self, status: int, message: str, what: str) -> None:
        super().__init__(f"{what}: Docker answered {status}: {message}")
        self.status = status
        self.message = message
        self.what = what


class DockerNotFound(DockerApiError):
    """The daemon says that the object does not exist (404)."""


class DockerConflict(DockerApiError):
    """The daemon says that the request conflicts with the object's state or name (409)."""


class DockerStreamError(DockerError):
    """An error reported inside a progress stream; ``lines`` holds the last progress lines."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines


class _UnixConnection(http.client.HTTPConnection):
    """http.client over a Unix stream socket."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self.timeout)
        try:
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        self.sock = sock


def parse_api_version(text: str) -> tuple[int, int]:
    """``"1.41"`` → ``(1, 41)``. Raises ``DockerError`` on anything else."""
    major, dot, minor = text.partition(".")
    if not dot or not major.isdigit() or not minor.isdigit():
        raise DockerError(f"not a Docker API version: {text!r}")
    return int(major), int(minor)


def negotiate(server: str, server_min: str) -> str:
    """The API version to speak with a daemon that offers ``server_min`` to ``server``.

    Newer daemons than we know are spoken to in our newest version while they accept it, else in their oldest.
    A daemon that ends below ``OLDEST_API`` is refused.
    """
    newest = parse_api_version(server)
    oldest = parse_api_version(server_min) if server_min else (1, 12)
    if newest < OLDEST_API:
        raise DockerError(
            f"this Docker engine speaks API {server}; {OLDEST_API[0]}.{OLDEST_API[1]} (Docker 20.10) "
            "or newer is needed: upgrade docker-ce or docker.io on the node"
        )
    chosen = max(min(newest, NEWEST_API), oldest)
    return f"{chosen[0]}.{chosen[1]}"


class Stream:
    """A response body that the caller reads and closes; a context manager.

    ``read`` and iteration raise ``DockerUnreachable`` when the daemon goes away midway.
    """

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self.response = response

    def read(self, size: int = CHUNK) -> bytes:
        """Up to ``size`` bytes; ``b""`` at the end."""
        try:
            return self.response.read(size)
        except (OSError, http.client.HTTPException) as exc:
            raise DockerUnreachable(f"the Docker stream broke off: {exc}") from exc

    def __iter__(self) -> Iterator[bytes]:
        while True:
            data = self.read()
            if not data:
                return
            yield data

    def lines(self) -> Iterator[bytes]:
        """The body line by line, without line ends, as it arrives."""
        while True:
            try:
                line = self.response.readline()
            except (OSError, http.client.HTTPException) as exc:
                raise DockerUnreachable(f"the Docker stream broke off: {exc}") from exc
            if not line:
                return
            yield line.rstrip(b"\r\n")

    def close(self) -> None:
        """Drop the connection; the daemon stops sending."""
        with contextlib.suppress(OSError):
            self.response.close()
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def demultiplex(stream: Stream) -> Iterator[tuple[int, bytes]]:
    """Frames of a log stream of a container without a TTY: ``(1 stdout | 2 stderr, payload)``.

    Frame format: 1 byte stream, 3 bytes zero, 4 bytes big-endian length, payload
    (Docker Engine API, "Attach to a container", stream format). A frame cut short ends the iteration.
    """
    pending = b""
    for data in stream:
        pending += data
        while len(pending) >= 8:
            kind, length = struct.unpack(">BxxxL", pending[:8])
            if len(pending) < 8 + length:
                break
            yield kind, pending[8 : 8 + length]
            pending = pending[8 + length :]


def _progress_text(event: Mapping[str, Any]) -> str:
    """One human line of a progress event of build, load or pull; empty when it carries none."""
    if event.get("stream"):
        return str(event["stream"]).rstrip()
    if event.get("status"):
        parts = [str(event.get("id", "")), str(event["status"]), str(event.get("progress", ""))]
        return " ".join(part for part in parts if part)
    return ""


class DockerApi:
    """One Docker daemon. Cheap to make; connects on first use; every call is one connection.

    :param socket_path: path of the daemon's Unix socket.
    :param timeout: seconds that an ordinary call may take; calls that wait for long work take their own.
    """

    def __init__(self, socket_path: str = DEFAULT_SOCKET, timeout: float = 60.0) -> None:
        self.socket_path = socket_path
        self.timeout = timeout
        self._version: str | None = None

    # -- transport -------------------------------------------------------------------------------------

    def _open(
        self,
        method: str,
        path: str,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        forever: bool = False,
    ) -> Stream:
        limit = None if forever else (self.timeout if timeout is None else timeout)
        connection = _UnixConnection(self.socket_path, limit)
        sent = dict(headers or {})
        chunked = body is not None and not isinstance(body, bytes)
        if chunked:
            sent["Transfer-Encoding"] = "chunked"
        try:
            connection.request(method, path, body=body, headers=sent, encode_chunked=chunked)
            response = connection.getresponse()
        except PermissionError as exc:
            connection.close()
            raise DockerUnreachable(
                f"permission denied on {self.socket_path}: what runs here is unknown (run as root)"
            ) from exc
        except FileNotFoundError as exc:
            connection.close()
            raise DockerUnreachable(
                f"{self.socket_path} does not exist: Docker is not installed or not started"
            ) from exc
        except socket.timeout as exc:
            connection.close()
            raise DockerUnreachable(
                f"{self.socket_path} did not answer {method} {path} in {limit} s"
            ) from exc
        except BrokenPipeError as exc:
            # The daemon may refuse a large upload early and close; its answer says why.
            try:
                response = connection.getresponse()
            except (OSError, http.client.HTTPException):
                connection.close()
                raise DockerUnreachable(f"{self.socket_path}: connection broken off: {exc}") from exc
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            raise DockerUnreachable(f"{self.socket_path}: {exc or type(exc).__name__}") from exc
        except BaseException:
            connection.close()
            raise
        if response.status >= 400:
            self._raise(Stream(connection, response), method, path)
        return Stream(connection, response)

    @staticmethod
    def _raise(stream: Stream, method: str, path: str) -> None:
        with stream:
            raw = stream.read(65536)
        status = stream.response.status
        try:
            message = str(json.loads(raw.decode("utf-8"))["message"])
        except (ValueError, KeyError, TypeError):
            message = raw.decode("utf-8", "replace").strip() or stream.response.reason
        what = f"{method} {path.partition('?')[0]}"
        kinds = {404: DockerNotFound, 409: DockerConflict}
        raise kinds.get(status, DockerApiError)(status, message, what)

    def _path(self, path: str, query: Mapping[str, Any] | None = None) -> str:
        pairs = []
        for key, value in (query or {}).items():
            if value is None or value is False:
                continue
            if value is True:
                pairs.append((key, "1"))
            elif isinstance(value, (dict, list)):
                pairs.append((key, json.dumps(value, sort_keys=True)))
            else:
                pairs.append((key, str(value)))
        text = f"/v{self.api_version}{path}"
        return f"{text}?{urllib.parse.urlencode(pairs)}" if pairs else text

    @staticmethod
    def _quote(name: str) -> str:
        return urllib.parse.quote(name, safe="")

    def _json(self, stream: Stream) -> Any:
        with stream:
            raw = b"".join(stream)
        if not raw.strip():
            return None
        try:
            return json.loads(raw.decode("utf-8"))
        except ValueError as exc:
            raise DockerUnreachable(f"Docker's answer is not JSON: {raw[:80]!r}") from exc

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """GET a JSON answer of any path below the version prefix."""
        return self._json(self._open("GET", self._path(path, query)))

    def post(
        self,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """POST JSON (or nothing) and return the JSON answer, or None."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        data = json.dumps(body).encode("utf-8") if body is not None else None
        return self._json(self._open("POST", self._path(path, query), data, headers, timeout=timeout))

    def delete(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """DELETE and return the JSON answer, or None."""
        return self._json(self._open("DELETE", self._path(path, query)))

    def _progress(
        self, stream: Stream, on_line: Callable[[str], None] | None = None
    ) -> tuple[list[str], list[Json]]:
        """Read a stream of JSON progress lines to its end: (last 200 text lines, aux objects)."""
        kept: list[str] = []
        aux: list[Json] = []
        with stream:
            for raw in stream.lines():
                if not raw.strip():
                    continue
                try:
                    event = json.loads(raw.decode("utf-8"))
                except ValueError:
                    event = {"stream": raw.decode("utf-8", "replace")}
                if isinstance(event.get("aux"), dict):
                    aux.append(event["aux"])
                for line in _progress_text(event).splitlines():
                    kept.append(line)
                    del kept[:-200]
                    if on_line is not None:
                        on_line(line)
                if event.get("error"):
                    detail = event.get("errorDetail")
                    text = detail.get("message") if isinstance(detail, dict) else None
                    raise DockerStreamError(str(text or event["error"]), kept)
        return kept, aux

    # -- daemon ----------------------------------------------------------------------------------------

    @property
    def api_version(self) -> str:
        """The negotiated version, such as ``"1.41"``."""
        if self._version is None:
            answer = self._json(self._open("GET", "/version"))
            self._version = negotiate(str(answer.get("ApiVersion", "")), str(answer.get("MinAPIVersion", "")))
        return self._version

    def api_at_least(self, wanted: str) -> bool:
        """Whether the negotiated version is ``wanted`` or newer."""
        return parse_api_version(self.api_version) >= parse_api_version(wanted)

    def ping(self) -> bool:
        """True when the daemon answers; raises ``DockerUnreachable`` otherwise."""
        with self._open("GET", "/_ping") as stream:
            stream.read(64)
        return True

    def version(self) -> Json:
        """``GET /version``: Version, ApiVersion, MinAPIVersion, Os, Arch, KernelVersion."""
        answer: Json = self.get("/version")
        return answer

    def info(self) -> Json:
        """``GET /info``: Driver, DockerRootDir, Runtimes, DefaultRuntime and more."""
        answer: Json = self.get("/info")
        return answer

    # -- images ----------------------------------------------------------------------------------------

    def image_inspect(self, name: str) -> Json:
        """One image by name, digest or id. Raises ``DockerNotFound``."""
        answer: Json = self.get(f"/images/{self._quote(name)}/json")
        return answer

    def image_list(self, label: str | None = None, reference: str | None = None) -> list[Json]:
        """Images, filtered by ``key`` or ``key=value`` label and by reference pattern."""
        filters: Json = {}
        if label:
            filters["label"] = [label]
        if reference:
            filters["reference"] = [reference]
        answer: list[Json] = self.get("/images/json", {"filters": filters} if filters else None) or []
        return answer

    def image_tag(self, name: str, repo: str, tag: str) -> None:
        """Give an image another name."""
        self.post(f"/images/{self._quote(name)}/tag", {"repo": repo, "tag": tag})

    def image_remove(self, name: str, force: bool = False) -> list[Json]:
        """Untag or remove an image; returns what Docker untagged and deleted."""
        answer: list[Json] = self.delete(f"/images/{self._quote(name)}", {"force": force}) or []
        return answer

    def image_pull(
        self,
        name: str,
        *,
        platform: str = "",
        auth: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        timeout: float = 600.0,
    ) -> list[str]:
        """Pull ``repo:tag`` or ``repo@sha256:...``; returns the last progress lines.

        ``timeout`` bounds the silence between two lines, not the whole pull.
        """
        headers = {}
        if auth:
            headers["X-Registry-Auth"] = base64.urlsafe_b64encode(json.dumps(dict(auth)).encode()).decode()
        query = {"fromImage": name, "platform": platform or None}
        if "@" not in name and ":" not in name.rpartition("/")[2]:
            query["tag"] = "latest"  # without a tag the API pulls every tag of the repository
        stream = self._open("POST", self._path("/images/create", query), headers=headers, timeout=timeout)
        return self._progress(stream, on_line)[0]

    def image_build(
        self,
        context: Body,
        *,
        tags: Iterable[str] = (),
        dockerfile: str = "Dockerfile",
        buildargs: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        target: str = "",
        platform: str = "",
        pull: bool = False,
        no_cache: bool = False,
        network: str = "",
        memory: int = 0,
        cpus: int = 0,
        on_line: Callable[[str], None] | None = None,
        timeout: float = 3600.0,
    ) -> str:
        """Build with the classic builder (part of every daemon, no plugin) and return the image id.

        :param context: a tar of the build context: bytes, a binary file, or an iterable of bytes.
        :param memory: bytes that one step may take, without swap; 0 for no limit.
        :param cpus: processors that one step may use; 0 for no limit.
        :param timeout: seconds of silence that are allowed between two progress lines.
        :raises DockerStreamError: a step failed; ``.lines`` holds the end of the build's output.
        """
        query: list[tuple[str, str]] = [("t", tag) for tag in tags]
        plain: dict[str, Any] = {
            "dockerfile": dockerfile,
            "buildargs": json.dumps(dict(buildargs or {}), sort_keys=True),
            "labels": json.dumps(dict(labels or {}), sort_keys=True),
            "rm": "1",
            "forcerm": "1",
            "version": "1",
        }
        optional = {"target": target, "platform": platform, "networkmode": network}
        plain.update({key: value for key, value in optional.items() if value})
        if memory:
            plain.update(memory=memory, memswap=memory)
        if cpus:
            plain.update(cpuperiod=100_000, cpuquota=100_000 * cpus)
        if pull:
            plain["pull"] = "1"
        if no_cache:
            plain["nocache"] = "1"
        query.extend((key, str(value)) for key, value in plain.items())
        path = f"/v{self.api_version}/build?{urllib.parse.urlencode(query)}"
        stream = self._open("POST", path, context, {"Content-Type": "application/x-tar"}, timeout=timeout)
        lines, aux = self._progress(stream, on_line)
        for item in reversed(aux):
            if item.get("ID"):
                return str(item["ID"])
        for line in reversed(lines):
            if line.startswith("Successfully built "):
                return str(self.image_inspect(line.rpartition(" ")[2])["Id"])
        raise DockerStreamError("the build ended without an image id", lines)

    def image_save(self, names: Iterable[str], platform: str = "", timeout: float = 600.0) -> Stream:
        """The tar stream of images; read it and close it.

        ``platform`` such as ``linux/arm64`` keeps a multi-platform index from being saved with absent blobs;
        daemons below API 1.48 have no such choice and ignore it here.
        """
        pairs = [("names", name) for name in names]
        if platform and self.api_at_least("1.48"):
            system, _slash, rest = platform.partition("/")
            architecture, _slash, variant = rest.partition("/")
            wanted = {"os": system, "architecture": architecture}
            if variant:
                wanted["variant"] = variant
            pairs.append(("platform", json.dumps(wanted)))
        path = f"/v{self.api_version}/images/get?{urllib.parse.urlencode(pairs)}"
        return self._open("GET", path, timeout=timeout)

    def image_load(
        self, tar: Body, on_line: Callable[[str], None] | None = None, timeout: float = 3600.0
    ) -> list[str]:
        """Load a tar made by ``image_save``: bytes, a binary file or an iterable; returns progress lines."""
        stream = self._open(
            "POST",
            self._path("/images/load", {"quiet": True}),
            tar,
            {"Content-Type": "application/x-tar"},
            timeout=timeout,
        )
        return self._progress(stream, on_line)[0]

    # -- containers ------------------------------------------------------------------------------------

    def container_list(
        self, labels: Iterable[str] = (), name: str = "", all_states: bool = True
    ) -> list[Json]:
        """Containers (also stopped ones) whose labels (``key`` or ``key=value``) and exact name match."""
        filters: Json = {}
        wanted = list(labels)
        if wanted:
            filters["label"] = wanted
        if name:
            filters["name"] = [f"^/{name}$"]
        query: Json = {"all": all_states}
        if filters:
            query["filters"] = filters
        answer: list[Json] = self.get("/containers/json", query) or []
        return answer

    def container_inspect(self, name: str) -> Json:
        """One container by name or id. Raises ``DockerNotFound``."""
        answer: Json = self.get(f"/containers/{self._quote(name)}/json")
        return answer

    def container_find(self, name: str) -> Json | None:
        """``container_inspect``, or None when the daemon says that it does not exist."""
        try:
            return self.container_inspect(name)
        except DockerNotFound:
            return None

    def container_create(self, name: str, spec: Mapping[str, Any], platform: str = "") -> str:
        """Create a container from the API's create body; returns its id. ``DockerConflict``: name taken."""
        answer = self.post("/containers/create", {"name": name, "platform": platform or None}, spec)
        return str(answer["Id"])

    def container_start(self, name: str) -> bool:
        """Start; False when it ran already."""
        with self._open("POST", self._path(f"/containers/{self._quote(name)}/start")) as stream:
            return stream.response.status != 304

    def container_stop(self, name: str, grace: int = 10) -> bool:
        """SIGTERM, then SIGKILL after ``grace`` seconds; False when it was stopped already."""
        path = self._path(f"/containers/{self._quote(name)}/stop", {"t": grace})
        with self._open("POST", path, timeout=self.timeout + grace) as stream:
            return stream.response.status != 304

    def container_kill(self, name: str, signal: str = "SIGKILL") -> None:
        """Send a signal. ``DockerConflict`` when it does not run."""
        self.post(f"/containers/{self._quote(name)}/kill", {"signal": signal})

    def container_wait(self, name: str, timeout: float | None = None) -> int:
        """Wait until it does not run and return its exit code. Without ``timeout`` waits for ever."""
        path = self._path(f"/containers/{self._quote(name)}/wait", {"condition": "not-running"})
        answer = self._json(self._open("POST", path, timeout=timeout, forever=timeout is None))
        return int(answer["StatusCode"])

    def container_remove(self, name: str, force: bool = False, volumes: bool = True) -> bool:
        """Remove; False when it did not exist."""
        try:
            self.delete(f"/containers/{self._quote(name)}", {"force": force, "v": volumes})
        except DockerNotFound:
            return False
        return True

    def container_logs(
        self,
        name: str,
        *,
        tail: int | None = None,
        timestamps: bool = False,
        since: int | None = None,
        tty: bool = False,
    ) -> Iterator[bytes]:
        """The log of a container, stdout and stderr interleaved as Docker kept them, in pieces."""
        for _kind, data in self.container_log_frames(
            name, tail=tail, timestamps=timestamps, since=since, tty=tty
        ):
            yield data

    def container_log_frames(
        self,
        name: str,
        *,
        tail: int | None = None,
        timestamps: bool = False,
        since: int | None = None,
        follow: bool = False,
        tty: bool = False,
        timeout: float | None = None,
    ) -> Iterator[tuple[int, bytes]]:
        """Log frames ``(1 stdout | 2 stderr, bytes)``; ``follow`` goes on until the container ends."""
        query = {
            "stdout": True,
            "stderr": True,
            "follow": follow,
            "timestamps": timestamps,
            "tail": "all" if tail is None else tail,
            "since": since,
        }
        path = self._path(f"/containers/{self._quote(name)}/logs", query)
        with self._open("GET", path, timeout=timeout, forever=follow and timeout is None) as stream:
            if tty:
                for data in stream:
                    yield 1, data
            else:
                yield from demultiplex(stream)

    def run(
        self,
        name: str,
        spec: Mapping[str, Any],
        on_output: Callable[[int, bytes], None] | None = None,
        timeout: float | None = None,
    ) -> tuple[int, bytes, bytes]:
        """Create, start, follow, wait for and remove a short-lived container.

        :param timeout: seconds of silence after which it is killed; None waits for ever.
        :returns: exit code, stdout and stderr (the last 1 MiB of each). The container is removed whatever
            happens. Raises ``DockerConflict`` when the name is taken: never by removing what has it.
        """
        out: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        identity = self.container_create(name, spec)
        try:
            self.container_start(identity)
            for kind, data in self.container_log_frames(identity, follow=True, timeout=timeout):
                kept = out.setdefault(kind, bytearray())
                kept += data
                del kept[:-CHUNK]
                if on_output is not None:
                    on_output(kind, data)
            code = self.container_wait(identity, timeout=self.timeout)
        finally:
            self.container_remove(identity, force=True)
        return code, bytes(out[1]), bytes(out[2])

    # -- volumes ---------------------------------------------------------------------------------------

    def volume_list(self, label: str | None = None) -> list[Json]:
        """Volumes, filtered by label."""
        answer = self.get("/volumes", {"filters": {"label": [label]}} if label else None)
        found: list[Json] = (answer or {}).get("Volumes") or []
        return found

    def volume_inspect(self, name: str) -> Json:
        """One volume. Raises ``DockerNotFound``."""
        answer: Json = self.get(f"/volumes/{self._quote(name)}")
        return answer

    def volume_create(
        self,
        name: str,
        driver: str = "local",
        options: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Json:
        """Create a volume. An existing one with other options is Docker's error, never changed."""
        body = {
            "Name": name,
            "Driver": driver,
            "DriverOpts": dict(options or {}),
            "Labels": dict(labels or {}),
        }
        answer: Json = self.post("/volumes/create", body=body)
        return answer

    def volume_remove(self, name: str) -> bool:
        """Remove; False when it did not exist."""
        try:
            self.delete(f"/volumes/{self._quote(name)}")
        except DockerNotFound:
            return False
        return True
