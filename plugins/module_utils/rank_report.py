# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a node tells about its rank: the status for people and automation, the bundle for a failure."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .docker_api import DockerApi, DockerError
from .endpoint import PROMPT, Activity, Endpoint
from .host_io import Host, Refusal, meminfo
from .rank_state import (
    RUN,
    agent_view,
    gid_now,
    key_path,
    launch_path,
    local_view,
    plan_path,
    rank_unit,
    read_json,
    status_path,
)

Json = dict[str, Any]
GIB = 1 << 30
#: Where the guard writes down what it saw (``sparkfleet-node guard``).
GUARD_RECORDS = "/var/lib/sparkfleet/guard"

#: Kernel lines that explain failures on a Spark (tensorfold.md 7, field B54); healthy starts print some too.
KERNEL = re.compile(r"NVRM|Xid|AER:|mlx5|Out of memory|oom-kill|nvme|I/O error|segfault", re.IGNORECASE)
#: What looks like a secret wherever it stands.
SECRET = re.compile(
    r"hf_[A-Za-z0-9]{8,}|(?i:bearer\s+)[A-Za-z0-9._~+/=-]{8,}|sk-[A-Za-z0-9_-]{8,}"
    r"|(?i:(?:api[_-]?key|token|password|secret)[\"']?\s*[=:]\s*[\"']?)[^\s\"',}]{6,}"
)


def api_key(host: Host, launch: Mapping[str, Any]) -> str:
    """The API key from the file that the launch mounts; empty when the replica has none."""
    if not launch.get("api_key"):
        return ""
    for mount in launch["container"]["mounts"]:
        if mount["target"].endswith("/api-key"):
            return (host.read(mount["source"]) or "").strip()
    return ""


def local_endpoint(host: Host, launch: Mapping[str, Any], timeout: float = 10.0) -> Endpoint:
    """The endpoint as it is reached on the head itself."""
    bound = str(launch["ports"].get("api_host") or "")
    address = "127.0.0.1" if bound in ("", "0.0.0.0", "::") else bound  # noqa: S104
    return Endpoint(address, int(launch["ports"]["api"]), api_key(host, launch), timeout)


def number(health: Mapping[str, Any], path: str) -> float:
    """A number of ``/health`` by its dotted path; 0 where there is none."""
    value: Any = health
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


def _activity(endpoint: Endpoint, names: Mapping[str, Any], page: Json) -> Activity | str:
    try:
        return endpoint.activity(names, page)
    except OSError as error:
        return f"the counters cannot be read: {error}"


def serving(
    endpoint: Endpoint,
    launch: Mapping[str, Any],
    probe: str,
    *,
    sample_s: float = 5.0,
    generation_s: float = 60.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Json:
    """Does the head really serve? ``/health`` alone proves nothing, so either its counters move while
    requests run, or a generation is made when none runs (or when asked for).

    :param probe: ``auto`` as above, ``always`` makes a generation, ``never`` only reads.
    :returns: ``serving`` (serving, stalled, starting or running), ``why`` and ``health``.
    """
    names = launch.get("health") or {}
    path = str(names.get("path", "/health"))
    try:
        served = endpoint.models(str(launch["gates"]["ready"]["path"]))
    except OSError as error:
        return {"serving": "starting", "why": f"the endpoint does not answer yet: {error}", "health": {}}
    except Refusal as refusal:
        return {"serving": "stalled", "why": str(refusal), "health": {}}
    if launch["served_name"] and launch["served_name"] not in served:
        return {"serving": "stalled", "why": f"it serves {', '.join(served) or 'nothing'}", "health": {}}
    first = endpoint.health(path)
    if probe == "never":
        return {"serving": "running", "why": "no generation was asked for", "health": first}
    if probe == "auto":
        seen = _activity(endpoint, names, first)
        if isinstance(seen, str):
            # It would queue behind requests that nobody sees.
            why = f"{seen}; -e status_probe=always makes a generation"
            return {"serving": "running", "why": why, "health": first}
        if seen.running:
            sleep(sample_s)
            second = endpoint.health(path)
            later = _activity(endpoint, names, second)
            busy = f"{seen.running} requests run"
            if later != seen:
                return {"serving": "serving", "why": f"{busy} and counters move", "health": second}
            if number(second, str(names.get("prefilling", ""))):
                why = f"{busy}; a prompt is read, which takes minutes and moves no counter"
                return {"serving": "running", "why": why, "health": second}
            why = f"{busy} and no counter moved in {sample_s:g} s"
            return {"serving": "stalled", "why": why, "health": second}
    try:
        reply = endpoint.chat(str(launch["served_name"]), PROMPT, 8, generation_s)
    except Refusal as refusal:
        return {"serving": "stalled", "why": f"{refusal} ({refusal.found})", "health": first}
    return {"serving": "serving", "why": f"it answered {reply[:40]!r}", "health": endpoint.health(path)}


def status(host: Host, docker: DockerApi, replica: str, probe: str, generation_s: float = 60.0) -> Json:
    """One node's status, for ``playbooks/status.yml``."""
    view = local_view(host, docker, replica)
    launch = read_json(host, launch_path(replica))
    info = meminfo(host.read("/proc/meminfo") or "")
    view["memory_available_gib"] = round(info.get("MemAvailable", 0) / GIB, 2)
    view["guard"] = None
    try:
        view["guard"] = read_json(host, f"{RUN}/{replica}/guard.json")
    except Refusal as refusal:
        view["notes"] = [str(refusal)]
    notes = view.setdefault("notes", [])
    if launch is None:
        return view
    started, now = view["agent"].get("gid_index"), gid_now(host, launch)
    view["gid"] = {"started": started, "now": now}
    if view["verdict"] == "running" and started != now:
        notes.append(
            f"the GID index is {now} now and was {started} at the start: the next start uses the new one; "
            "new connections of the running ranks may fail"
        )
    if view["verdict"] == "failed":
        notes.append(str(view["agent"].get("message", "")))
    if view["verdict"] == "running" and launch["rank"] == 0:
        view.update(serving(local_endpoint(host, launch), launch, probe, generation_s=generation_s))
        view["endpoint"] = f"port {launch['ports']['api']}, model {launch['served_name']}"
    return view


def memory_readings(host: Host, replica: str) -> dict[str, int | None]:
    """MemAvailable in bytes of this node: ``before`` the running rank was started (by its agent), now (``idle``, where
    no request runs), and the ``lowest`` since its start (by the guard). None where nobody knows."""
    agent = agent_view(host, replica)
    if not agent["alive"] or agent.get("phase") != "running":
        return {"before": None, "idle": None, "lowest": None}
    try:
        guard = read_json(host, f"{RUN}/{replica}/guard.json") or {}
    except Refusal:
        guard = {}
    same = bool(guard.get("generation")) and str(agent.get("container", "")).startswith(
        str(guard["generation"])
    )
    return {
        "before": agent.get("memory_before"),
        "idle": meminfo(host.read("/proc/meminfo") or "").get("MemAvailable"),
        "lowest": guard.get("low") if same else None,
    }


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """Take known secrets and what looks like one out of a text."""
    for secret in secrets:
        if len(secret) >= 4:
            text = text.replace(secret, "<secret>")
    return SECRET.sub("<secret>", text)


def known_secrets(host: Host, replica: str, launch: Mapping[str, Any] | None) -> tuple[str, ...]:
    found = [(host.read(key_path(replica)) or "").strip()]
    if launch is not None:
        found.append(api_key(host, launch))
    return tuple(secret for secret in found if secret)


def saved_log(host: Host, path: str) -> str:
    """A saved log as text (its last 2 MiB); empty when there is none."""
    if not path:
        return ""
    try:
        with gzip.open(host.path(path), "rb") as stream:
            return stream.read()[-(2 << 20) :].decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""


def guard_records(host: Host, replica: str) -> str:
    """The last five records of the guard: why it ended a replica, with the low-water mark and the last samples."""
    names = [name for name in host.listdir(GUARD_RECORDS) if name.startswith(f"{replica}-")]
    return "\n".join(host.read(f"{GUARD_RECORDS}/{name}") or "" for name in names[-5:])


def bundle(host: Host, docker: DockerApi, replica: str, directory: str, keep: int = 10) -> Json:
    """Write what explains a failure into one archive, redacted: ``<replica>-<time>-bundle-rankN.tar.gz``.

    :returns: ``path`` (empty when the disk is full), ``tail`` (last log lines), ``message`` (the agent's).
    """
    launch = read_json(host, launch_path(replica))
    view = local_view(host, docker, replica)
    rank = view["rank"] if view["rank"] is not None else "x"
    secrets = known_secrets(host, replica, launch)
    log = ""
    if view["container"].get("id"):
        try:
            log = b"".join(docker.container_logs(view["container"]["id"], tail=5000)).decode(
                "utf-8", "replace"
            )
        except DockerError as error:
            log = f"the log cannot be read: {error}\n"
    log = log or saved_log(host, str(view["agent"].get("log") or ""))
    log = log or "".join(f"{line}\n" for line in view["agent"].get("tail") or [])
    kernel = host.run(["journalctl", "-k", "-b", "-n", "5000", "--no-pager", "-o", "short-iso"]).out
    texts = {
        "rank.log": log,
        "status.json": host.read(status_path(replica)) or "",
        "view.json": json.dumps(view, indent=1, sort_keys=True, default=str),
        "launch.json": host.read(launch_path(replica)) or "",
        "plan.json": host.read(plan_path(replica)) or "",
        "guard-records.json": guard_records(host, replica),
        "guard.json": host.read(f"{RUN}/{replica}/guard.json") or "",
        "trip.json": host.read(f"{RUN}/{replica}/trip.json") or "",
        "meminfo": host.read("/proc/meminfo") or "",
        "buddyinfo": host.read("/proc/buddyinfo") or "",
        "kernel.log": "\n".join(line for line in kernel.splitlines() if KERNEL.search(line)) + "\n",
        "unit.log": host.run(["journalctl", "-u", rank_unit(replica), "-n", "300", "--no-pager"]).out,
        "peer.log": host.run(["journalctl", "-u", "sparkfleet-peer", "-n", "100", "--no-pager"]).out,
        "addresses": host.run(["ip", "-br", "address"]).out,
        "disk": host.run(["df", "-h"]).out,
    }
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    name = f"{replica}-{stamp}-bundle-rank{rank}.tar.gz"
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for entry, text in sorted(texts.items()):
            raw = redact(text, secrets).encode("utf-8")
            member = tarfile.TarInfo(f"{name[:-7]}/{entry}")
            member.size, member.mode, member.mtime = len(raw), 0o640, int(time.time())
            archive.addfile(member, io.BytesIO(raw))
    tail = [redact(line, secrets) for line in log.splitlines()[-25:]]
    result: Json = {
        "path": "",
        "tail": tail,
        "message": view["agent"].get("message", ""),
        "verdict": view["verdict"],
        "warnings": [text for text in [str(view["agent"].get("log_warning") or "")] if text],
    }
    try:
        folder = host.path(directory)
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        target, partial = folder / name, folder / f".{name}.partial"
        try:
            partial.write_bytes(data.getvalue())
            partial.chmod(0o640)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        olds = sorted(Path(folder).glob(f"{replica}-*-bundle-rank*.tar.gz"))
        for old in olds[: -max(1, keep)]:
            old.unlink()
        result["path"] = f"{directory.rstrip('/')}/{name}"
    except OSError as error:
        result["warnings"].append(f"the bundle was not written: {error}")
    return result
