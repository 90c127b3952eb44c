# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The endpoint of a replica as a client sees it, and what the ranks say about how they run.

``/health`` answers 200 while a rank is dead (field B80), so a replica counts as serving only after a
generation, and a generation counts only when its text is more than one repeated character.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .docker_api import DockerApi, DockerError
from .host_io import Host, Refusal
from .launch import older
from .peer_wire import PeerRefused, PeerUnreachable, ask, read_key
from .rank_state import agent_view, container_view, install_id

Json = dict[str, Any]

PROMPT = "Count from one to five in words, separated by commas."
GIB = 1 << 30
#: Bytes of log that are searched for the transport: its start, where NCCL reports.
LOG_BYTES = 16 << 20


#: A line of the text format of Prometheus: name, labels, value.
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})? +([-+\d.eE]+)(?: +\d+)?$")


class Activity(NamedTuple):
    """How many requests run, and the counters that move while any does (None for one that is not shown)."""

    running: int
    counters: tuple[Any, ...]


def metric_values(text: str) -> dict[str, float]:
    """Metrics by name, summed over their labels. Some builds write ``tensorfold:x`` for ``tensorfold_x``, so
    a colon reads as an underscore."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match:
            name = match.group(1).replace(":", "_")
            try:
                found[name] = found.get(name, 0.0) + float(match.group(2))
            except ValueError:
                continue
    return found


def _activity(names: Mapping[str, Any], values: Mapping[str, Any]) -> Activity | None:
    running = values.get(str(names.get("running", "")).replace(":", "_"))
    counters = tuple(values.get(str(name).replace(":", "_")) for name in names.get("progress", []))
    if not isinstance(running, (int, float)) or all(value is None for value in counters):
        return None
    return Activity(int(running), counters)


class Endpoint:
    """An OpenAI-compatible server.

    :param key: API key, sent as a bearer token; never shown.
    :param timeout: seconds for an ordinary request.
    """

    def __init__(self, host: str, port: int, key: str = "", timeout: float = 10.0) -> None:
        self.host, self.port, self.key, self.timeout = host, port, key, timeout

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> tuple[int, Any]:
        """Status and JSON answer (text when it is none). Raises ``OSError`` when nobody answers."""
        link = http.client.HTTPConnection(
            self.host, self.port, timeout=self.timeout if timeout is None else timeout
        )
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode("utf-8")
            headers["Content-Type"] = "application/json"
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            link.request(method, path, data, headers)
            answer = link.getresponse()
            text = answer.read(4 << 20).decode("utf-8", "replace")
            status = answer.status
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP answer: {error!r}") from error
        finally:
            link.close()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def models(self, path: str = "/v1/models") -> list[str]:
        """The model ids that are served. Raises ``Refusal`` on an error status, ``OSError`` without
        answer.
        """
        status, answer = self.request("GET", path)
        if status == 401:
            raise Refusal(
                "the endpoint wants an API key", "401", "200", "give ranks_api_key or ranks_api_key_file"
            )
        if status != 200 or not isinstance(answer, dict):
            raise Refusal(
                f"GET {path} failed", f"{status} {str(answer)[:200]}", "200 and a list", "see the log"
            )
        return [str(row.get("id")) for row in answer.get("data") or [] if isinstance(row, dict)]

    def health(self, path: str = "/health") -> Json:
        """The counters; empty when the endpoint has none or does not answer."""
        try:
            status, answer = self.request("GET", path)
        except OSError:
            return {}
        return answer if status == 200 and isinstance(answer, dict) else {}

    def activity(self, names: Mapping[str, Any], page: object = None) -> Activity | str:
        """What the engine works on, without a request that takes a slot; a sentence where nothing can be
        known.

        :param names: the profile's ``health``. With an API key the health page hides its counters, and the
            metrics page, which takes the key, has them under names of its own.
        :param page: the health page, when it was read already.
        :raises OSError: nobody answers.
        """
        if page is None:
            _status, page = self.request("GET", str(names.get("path", "/health")))
        found = _activity(names, page if isinstance(page, dict) else {})
        if found is not None:
            return found
        other = names.get("metrics")
        if not other:
            return "the health page shows no counters, and the engine profile names no metrics page"
        status, text = self.request("GET", str(other["path"]))
        if status in (401, 403):
            return f"the health page shows no counters, and {other['path']} does not take the key ({status})"
        found = _activity(other, metric_values(text)) if status == 200 and isinstance(text, str) else None
        return found or f"neither the health page nor {other['path']} ({status}) shows the counters"

    def chat(self, model: str, prompt: str, max_tokens: int, timeout: float) -> str:
        """The text of one greedy completion with thinking off.

        :raises Refusal: an error status, a time-out, or a text that is empty or one repeated character
            (collapsed weights or mismatched files, field "!!!!").
        """
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        try:
            status, answer = self.request("POST", "/v1/chat/completions", body, timeout)
        except TimeoutError as error:
            raise Refusal(
                "the model loaded but does not generate",
                f"no reply within {timeout:g} s",
                "a reply",
                "a rank is dead or stalled: see the logs of all ranks, then restart the replica",
            ) from error
        except OSError as error:
            raise Refusal("the smoke test got no answer", str(error), "a reply", "see the logs") from error
        if status != 200:
            raise Refusal("the smoke test failed", f"{status} {str(answer)[:300]}", "200", "see the logs")
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        check_reply(text)
        return str(text)


def check_reply(text: object) -> None:
    """Refuse a reply that no healthy model gives."""
    stripped = re.sub(r"\s+", "", text) if isinstance(text, str) else ""
    if not stripped:
        raise Refusal(
            "the smoke test got an empty reply",
            repr(text)[:80],
            "text",
            "see the logs; thinking may have used up max_tokens, or the weights are damaged",
        )
    if len(set(stripped)) == 1:
        raise Refusal(
            "the smoke test got one repeated character",
            repr(text)[:80],
            "text",
            "the weights have collapsed: check the rank files against the model lock and make them again",
        )


def peer_states(host: Host, launch: Mapping[str, Any]) -> list[Json]:
    """The state of every other rank as its node tells it; ``error`` where nobody answered."""
    try:
        key = read_key(host, str(launch["replica"]))
    except Refusal as refusal:
        return [
            {"name": other["name"], "rank": other["rank"], "error": str(refusal)} for other in launch["peers"]
        ]
    states = []
    for other in launch["peers"]:
        row: Json = {"name": other["name"], "rank": other["rank"]}
        try:
            row.update(
                ask(other["addresses"], int(launch["peer_port"]), key, str(launch["replica"]), "state")
            )
        except (PeerUnreachable, PeerRefused) as error:
            row["error"] = str(error)
        states.append(row)
    return states


def _ended(name: str, rank: object, message: str, tail: Sequence[str]) -> str:
    lines = "".join(f"\n    {line}" for line in tail[-25:])
    return f"rank {rank} on {name}: {message}{lines}"


def wait_ready(
    host: Host,
    launch: Mapping[str, Any],
    endpoint: Endpoint,
    wait_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait until the endpoint lists the served model; returns the seconds it took.

    :raises Refusal: at once when a rank of the replica has ended, with the last log lines of all ranks; at
    the end of ``wait_s`` otherwise.
    """
    gate = launch["gates"]["ready"]
    begin, asked = clock(), 0.0
    last = "no answer yet"
    while True:
        try:
            served = endpoint.models(str(gate["path"]))
            if not launch["served_name"] or launch["served_name"] in served:
                return clock() - begin
            raise Refusal(
                "the endpoint serves another model",
                ", ".join(served) or "none",
                launch["served_name"],
                f"something else listens on port {endpoint.port}, or served_name differs",
            )
        except OSError as error:
            last = str(error) or type(error).__name__
        mine = agent_view(host, str(launch["replica"]))
        # The peers are asked less often than the endpoint: every 15 s, as the seed author's launcher does.
        states: list[Json] = []
        if clock() - asked >= 15 or not mine["alive"]:
            asked = clock()
            states = peer_states(host, launch)
        dead = [row for row in states if "error" not in row and not row["alive"]]
        if not mine["alive"] or dead:
            lines = [
                _ended(
                    str(launch["node"]), launch["rank"], str(mine.get("message", "")), mine.get("tail") or []
                )
            ]
            lines += [
                _ended(
                    row["name"],
                    row["rank"],
                    row.get("message") or row.get("error", ""),
                    row.get("tail") or [],
                )
                for row in states
            ]
            raise Refusal(
                "a rank ended before the model answered\n  " + "\n  ".join(lines),
                "",
                "all ranks running",
                "see the lines above; whole logs are in the log directory of each node",
            )
        if clock() - begin >= wait_s:
            raise Refusal(
                "the engine does not get ready",
                f"{last} after {wait_s:g} s; the ranks run",
                f"{launch['served_name']} on port {endpoint.port}",
                "see docker logs of the ranks; a larger ranks_wait_timeout gives a cold disk more time",
            )
        sleep(float(gate["interval_s"]))


def _log_text(docker: DockerApi, container: str) -> str:
    kept = bytearray()
    for data in docker.container_logs(container):
        kept += data
        if len(kept) > LOG_BYTES:
            break
    return kept.decode("utf-8", "replace")


def evidence(host: Host, docker: DockerApi, launch: Mapping[str, Any]) -> Json:
    """What this node's rank shows about its transport and what it granted.

    :returns: ``evidence`` and ``warnings``, lists of sentences, and ``granted``.
    :raises Refusal: the log shows what must not be (NCCL over TCP), or less was granted than asked for.
    """
    view = container_view(docker, str(launch["container"]["name"]), str(launch["replica"]), install_id(host))
    if view["state"] != "running":
        raise Refusal("this node's rank does not run", view["state"], "running", "start the replica")
    try:
        text = _log_text(docker, view["id"])
    except DockerError as error:
        raise Refusal("the log of this node's rank cannot be read", str(error), "its log", "") from error
    shown: list[str] = []
    warnings: list[str] = []
    for rule in launch["gates"].get("log", []):
        line = next((line.strip() for line in text.splitlines() if rule["match"] in line), None)
        if line is None:
            continue
        if rule["verdict"] == "fail":
            raise Refusal(
                f"{rule['why']}",
                line[:300],
                f"no {rule['match']} in the log",
                "check NCCL_IB_HCA and the GID index of both nodes (sparkfleet-node gid), then restart",
            )
        if rule["verdict"] == "warn":
            warnings.append(f"{rule['why']}: {line[:200]}")
        else:
            shown.append(f"{rule['why']}: {line[:200]}")
    before = agent_view(host, str(launch["replica"])).get("rail_bytes") or {}
    for hca, now in rail_bytes(host, launch).items():
        moved = now - int(before.get(hca, now))
        if moved > 1 << 20:
            shown.append(f"{moved >> 20} MiB went over {hca} since the start")
    role = "head" if launch["rank"] == 0 else "workers"
    granted: Json = {}
    for rule in launch["gates"].get("granted", []):
        if rule["on"] != role:
            continue
        found = re.search(rule["match"], text)
        if not found:
            continue
        granted[rule["what"]] = int(found.group(1))
        wanted = launch.get(rule["what"])
        if isinstance(wanted, int) and granted[rule["what"]] < wanted:
            raise Refusal(
                f"the engine granted less {rule['what']} than was asked for",
                granted[rule["what"]],
                wanted,
                "lower the context, or free memory on this node",
            )
    warnings += loaded_warnings(launch, role, text)
    nccl = launch["gates"].get("nccl")
    version = re.search(nccl["match"], text) if nccl else None
    if nccl and version and older(version.group(1), nccl["minimum"]):
        warnings.append(
            f"the rank runs NCCL {version.group(1)}, wanted {nccl['minimum']} or newer: {nccl['why']}"
        )
    if launch["peers"] and not shown:
        warnings.append("nothing shows yet that this rank uses RDMA: neither its log nor the rail counters")
    return {"evidence": shown, "warnings": warnings, "granted": granted}


def loaded_warnings(launch: Mapping[str, Any], role: str, text: str) -> list[str]:
    """Where the engine says that it loaded another amount of weights than the rank file holds.

    A warning: which parts the engine counts is not known exactly. Its number has two decimals.
    """
    planned = int((launch.get("rank_file") or {}).get("bytes") or 0) / GIB
    warnings = []
    for rule in launch["gates"].get("loaded", []):
        found = re.search(rule["match"], text) if rule["on"] == role and planned else None
        if found is None:
            continue
        loaded, slack = float(found.group(1)), 0.01 + planned / 100
        if not planned - slack <= loaded <= planned + slack + float(rule["more_gib"]):
            warnings.append(
                f"the engine says it loaded {loaded:.2f} GiB, and the rank file has {planned:.2f} GiB: "
                "compare the rank file with the plan (tf-dsv41-check in the image)"
            )
    return warnings


def rail_bytes(host: Host, launch: Mapping[str, Any]) -> dict[str, int]:
    """Bytes sent on each RDMA device since boot (the counter counts 4-byte words)."""
    found = {}
    for rail in launch["rails"]:
        text = host.read(f"/sys/class/infiniband/{rail['rdma']}/ports/1/counters/port_xmit_data") or ""
        if text.strip().isdigit():
            found[str(rail["rdma"])] = int(text) * 4
    return found
