# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where a rank keeps what on its node, what state it is in, and what that means for its replica.

Shared by the modules, the node agent and the status playbook, so that they cannot disagree. Reads of the node
go through ``host_io.Host`` and ``DockerApi``; the verdicts are pure.

The state of a replica is a function of ALL its ranks: a pair with one rank up serves nobody, although its
health endpoint answers 200 (field B76, B80).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .docker_api import DockerApi, DockerError
from .host_io import Host, Refusal, unit_state
from .probe.net import gid_table
from .probe.reader import Reader
from .rails import RailError, choose_gid, one_gid_index

Json = dict[str, Any]

ETC = "/etc/sparkfleet"
REPLICAS = f"{ETC}/replicas"
SECRETS = f"{ETC}/secrets"
INSTALL_ID = f"{ETC}/install-id"
RUN = "/run/sparkfleet"
PEER_UNIT = "sparkfleet-peer.service"
RANK_TEMPLATE = "sparkfleet-rank@.service"
BOOT_TEMPLATE = "sparkfleet-boot@.service"
UNIT_DIR = "/etc/systemd/system"

#: Phases of the agent's status file in which a rank holds, or is about to hold, its container.
LIVE_PHASES = ("checking", "waiting", "starting", "running", "stopping")


def launch_path(replica: str) -> str:
    return f"{REPLICAS}/{replica}/launch.json"


def key_path(replica: str) -> str:
    return f"{REPLICAS}/{replica}/peer.key"


def status_path(replica: str) -> str:
    return f"{RUN}/{replica}/rank.json"


def boot_note(replica: str) -> str:
    """The file by which ``boot`` tells the rank that nobody asked for this start but the boot itself."""
    return f"{RUN}/{replica}/boot.json"


def plan_path(replica: str) -> str:
    """What was planned for the launch of this node, kept beside it for whoever explains a failure."""
    return f"{REPLICAS}/{replica}/plan.json"


def rank_unit(replica: str) -> str:
    return f"sparkfleet-rank@{replica}.service"


def boot_unit(replica: str) -> str:
    """The unit that is enabled when a replica starts at boot."""
    return f"sparkfleet-boot@{replica}.service"


def install_id(host: Host) -> str:
    """The id that marks what this installation owns; empty on a node that has none yet."""
    return (host.read(INSTALL_ID) or "").strip()


def read_json(host: Host, path: str) -> Json | None:
    """A JSON object file, or None when absent. Raises ``Refusal`` when it is damaged."""
    text = host.read(path)
    if text is None or not text.strip():
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Refusal(f"{path} is damaged", str(error), "a JSON object", "run site.yml again") from error
    if not isinstance(value, dict):
        raise Refusal(f"{path} is damaged", type(value).__name__, "a JSON object", "run site.yml again")
    return value


def gid_now(host: Host, launch: Mapping[str, Any]) -> int | None:
    """The index that the agent would resolve now, or None when there is none."""
    if not launch["gid"].get("wanted"):
        return None
    reader = Reader(root=str(host.root))
    choices = []
    try:
        for rail in launch["rails"]:
            hca = str(rail["rdma"])
            rows = gid_table(reader, f"/sys/class/infiniband/{hca}/ports/1")
            ip = str(rail["address"]).partition("/")[0]
            choices.append(choose_gid({hca: {"gids": rows}}, hca, str(rail["netdev"]), ip))
        return one_gid_index(choices)
    except RailError:
        return None


def owned(labels: Mapping[str, Any] | None, replica: str, install: str) -> bool:
    """Whether a container is ours: install id AND replica. A name alone never makes it ours."""
    labels = labels or {}
    return (
        bool(install)
        and labels.get("sparkfleet.install") == install
        and labels.get("sparkfleet.replica") == replica
    )


def container_view(docker: DockerApi, name: str, replica: str, install: str) -> Json:
    """The container of a rank: ``state`` is absent, running, stopped, foreign or unknown.

    Unknown means that Docker did not answer; nothing may be concluded from it.
    """
    try:
        found = docker.container_find(name)
    except DockerError as error:
        return {"state": "unknown", "error": str(error)}
    if found is None:
        return {"state": "absent"}
    labels = (found.get("Config") or {}).get("Labels") or {}
    state = found.get("State") or {}
    view: Json = {
        "id": str(found.get("Id", "")),
        "image": str((found.get("Config") or {}).get("Image", "")),
        "started_at": str(state.get("StartedAt", "")),
        "exit_code": state.get("ExitCode"),
        "oom_killed": bool(state.get("OOMKilled")),
        "launch": str(labels.get("sparkfleet.launch", "")),
        "running": bool(state.get("Running")),
    }
    if not owned(labels, replica, install):
        view["state"] = "foreign"
    else:
        view["state"] = "running" if view["running"] else "stopped"
    return view


def process_alive(host: Host, pid: object) -> bool:
    return isinstance(pid, int) and pid > 0 and host.exists(f"/proc/{pid}")


def agent_view(host: Host, replica: str) -> Json:
    """The agent's own status file; ``alive`` tells whether the process that wrote it still runs."""
    try:
        status = read_json(host, status_path(replica)) or {}
    except Refusal:
        status = {}
    status["alive"] = process_alive(host, status.get("pid")) and status.get("phase") in LIVE_PHASES
    return status


def local_view(host: Host, docker: DockerApi, replica: str) -> Json:
    """Everything that is known on this node about its rank of ``replica``, with a ``verdict``."""
    launch = read_json(host, launch_path(replica))
    unit = unit_state(host, rank_unit(replica))
    view: Json = {
        "replica": replica,
        "rank": None if launch is None else launch.get("rank"),
        "node": None if launch is None else launch.get("node"),
        "launch": None if launch is None else launch.get("hash"),
        "contract": None if launch is None else (launch.get("contract") or {}).get("digest"),
        "unit": {"load": unit.load, "active": unit.active, "sub": unit.sub},
        "starts_at_boot": unit_state(host, boot_unit(replica)).enabled == "enabled",
        "agent": agent_view(host, replica),
        "container": {"state": "absent"},
    }
    if launch is not None:
        name = str((launch.get("container") or {}).get("name", ""))
        view["container"] = container_view(docker, name, replica, install_id(host))
    view["verdict"] = rank_verdict(view)
    return view


def rank_verdict(view: Mapping[str, Any]) -> str:
    """One word for one rank.

    ``unknown`` (Docker did not answer), ``foreign`` (somebody else's container has the name), ``absent`` (no
    launch file), ``running``, ``starting``, ``stale`` (a container of ours that its unit does not hold, or of
    another launch), ``failed``, ``stopped``.
    """
    container = view["container"]
    unit = view["unit"]
    if container["state"] == "unknown":
        return "unknown"
    if container["state"] == "foreign":
        return "foreign"
    if view.get("launch") is None:
        return "absent"
    if container["state"] == "running":
        if unit["active"] == "activating":
            return "starting"
        if unit["active"] != "active" or container.get("launch") != view["launch"]:
            return "stale"
        started = (view.get("agent") or {}).get("container_started")
        if started and started != container.get("started_at"):
            return "stale"
        return "running"
    if unit["active"] in ("active", "activating", "reloading"):
        return "starting"
    if unit["active"] == "failed":
        return "failed"
    if unit["active"] == "deactivating":
        return "stopping"
    return "stopped"


def replica_verdict(verdicts: Sequence[str]) -> str:
    """One word for a replica from the words of its ranks.

    ``running`` only when every rank runs. ``half`` when some run and others do not. A rank that cannot be
    known makes the whole unknown: a start must not follow from it.
    """
    found = set(verdicts)
    if not found:
        return "absent"
    for word in ("unknown", "foreign"):
        if word in found:
            return word
    if found == {"running"}:
        return "running"
    if found == {"absent"}:
        return "absent"
    if found <= {"running", "starting"}:
        return "starting"
    if found & {"running", "stale", "starting"}:
        return "half"
    if "failed" in found:
        return "failed"
    if "stopping" in found:
        return "stopping"
    return "stopped"


#: Exit codes of the status playbook and of automation around it.
EXIT_CODES: dict[str, int] = {
    "serving": 0,
    "running": 0,
    "stopped": 3,
    "absent": 3,
    "starting": 4,
    "stopping": 4,
    "half": 5,
    "failed": 5,
    "stalled": 6,
    "foreign": 7,
    "unknown": 8,
}


def decide(members: Sequence[Mapping[str, Any]]) -> Json:
    """What a run has to do with a replica, from the ``planned`` results of all its members in rank order.

    Each entry has ``name``, ``verdict``, ``launch_wanted``, ``launch_now`` (of the running container or
    None), ``contract`` (the wanted one) and ``changes`` (files that differ).

    :returns: ``problems`` (refuse when not empty), ``restart`` (the ranks are stopped and started in order),
        ``write`` (something on the nodes differs), ``key`` (the nodes need one new peer key), ``why``
        (sentences) and ``verdict``.
    """
    problems: list[str] = []
    why: list[str] = []
    verdict = replica_verdict([str(member["verdict"]) for member in members])
    for member in members:
        if member["verdict"] == "unknown":
            problems.append(
                f"{member['name']}: Docker does not answer, so what runs there is unknown: "
                f"{member.get('error') or 'no reason given'}"
            )
        if member["verdict"] == "foreign":
            problems.append(
                f"{member['name']}: a foreign container has the name {member.get('container_name')}; "
                "wanted: the name free; remedy: remove it, or set ranks_container_name"
            )
    contracts = {str(member["contract"]) for member in members}
    if len(contracts) > 1:
        shown = ", ".join(f"{member['name']} {member['contract']}" for member in members)
        problems.append(
            f"the ranks would run with different contracts ({shown}): a setting differs between the members; "
            "remedy: give the ranks_ variables of a replica the same value on all its members"
        )
    for member in members:
        if member["verdict"] != "running":
            why.append(f"{member['name']} is {member['verdict']}")
        elif member["launch_now"] != member["launch_wanted"]:
            why.append(
                f"{member['name']} runs launch {member['launch_now']}, wanted {member['launch_wanted']}"
            )
    keys = {str(member.get("key", "")) for member in members}
    renew = len(keys) > 1 or "" in keys
    if renew and not why and any(member.get("secrets") for member in members):
        # The digest that stands for a secret is keyed with the peer key.
        why.append("the peer key is renewed, which is part of the launch")
    write = bool(why) or renew or any(m.get("changes") or not m.get("agent_present", True) for m in members)
    return {
        "problems": problems,
        "restart": bool(why),
        "write": write,
        "key": renew,
        "why": why,
        "verdict": verdict,
    }


def serving_verdict(states: Sequence[Mapping[str, Any]]) -> str:
    """One word for a replica from the ``rank_status`` results of its members: ``replica_verdict`` refined.

    A replica whose ranks all run is ``serving`` when its head answered a generation or its counters moved,
    ``stalled`` when requests run and nothing moves or a generation failed, else ``running``.
    """
    verdict = replica_verdict([str(state.get("verdict", "unknown")) for state in states])
    if verdict != "running":
        return verdict
    head: Mapping[str, Any] = next((state for state in states if state.get("rank") == 0), {})
    return str(head.get("serving") or "running")
