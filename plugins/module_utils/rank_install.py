# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a node holds for its rank: launch file, keys, units. Compare, write, start, stop, remove.

The module ``rank_unit`` is a thin shell around this. Everything takes ``check`` and then only predicts.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from .argv_check import try_command
from .docker_api import DockerApi, DockerError, DockerNotFound
from .endpoint import Activity
from .host_io import Host, Refusal, text_diff, unit_state
from .launch import LaunchError, LaunchInput, Member, Rail, build, nccl_warning, render, role_of
from .probe.net import gid_table
from .probe.reader import Reader
from .rank_report import local_endpoint
from .rank_state import (
    BOOT_TEMPLATE,
    INSTALL_ID,
    PEER_UNIT,
    RANK_TEMPLATE,
    REPLICAS,
    RUN,
    SECRETS,
    UNIT_DIR,
    boot_note,
    boot_unit,
    container_view,
    gid_now,
    install_id,
    key_path,
    launch_path,
    local_view,
    plan_path,
    rank_unit,
    read_json,
    status_path,
)

Json = dict[str, Any]

RANK_UNIT_TEXT = """\
# Managed by sparkfleet.serving. The agent's path has its version; a new agent never restarts a rank.
[Unit]
Description=sparkfleet: this node's rank of replica %i
Documentation=https://github.com/sparkfleet/sparkfleet.serving
After=network-online.target docker.service {peer} sparkfleet-gpu-clocks.service
Wants=network-online.target {peer}
# No target wants a rank, so leaving the desktop (`systemctl isolate multi-user.target`) would stop it.
IgnoreOnIsolate=yes

[Service]
Type=notify
NotifyAccess=main
ExecStart={agent} rank --replica %i
# One attempt: a rank that ended is started again with its whole replica, in order.
Restart=no
TimeoutStartSec=1800
TimeoutStopSec={stop_s}
KillMode=mixed
OOMScoreAdjust=-800
"""

BOOT_UNIT_TEXT = """\
# Managed by sparkfleet.serving. Waits for the end of the boot, so that the rank's start never holds it up.
[Unit]
Description=sparkfleet: start this node's rank of replica %i once the system has booted
Documentation=https://github.com/sparkfleet/sparkfleet.serving

[Service]
Type=simple
ExecStart={agent} boot --replica %i

[Install]
WantedBy=multi-user.target
"""

PEER_UNIT_TEXT = """\
# Managed by sparkfleet.serving.
[Unit]
Description=sparkfleet: answers the ranks of the same replica on the rail addresses
Documentation=https://github.com/sparkfleet/sparkfleet.serving
After=network.target

[Service]
ExecStart={agent} peer
Restart=always
RestartSec=2
OOMScoreAdjust=-900

[Install]
WantedBy=multi-user.target
"""


def members_from(rows: Sequence[Mapping[str, Any]]) -> tuple[Member, ...]:
    """Member rows of the filter ``sparkfleet.serving.members`` → ``Member`` in rank order."""
    found = []
    for row in rows:
        rails = tuple(
            Rail(
                str(rail.get("address", "")),
                str(rail.get("netdev") or ""),
                str(rail.get("rdma") or rail.get("hca") or ""),
            )
            for rail in row.get("rails") or []
        )
        found.append(Member(str(row["name"]), int(row["rank"]), rails))
    return tuple(sorted(found, key=lambda member: member.rank))


def locate_rails(host: Host, rails: Sequence[Rail]) -> tuple[Rail, ...]:
    """Fill in netdev and RDMA device of rails by address, from the GID tables of this node.

    A rail that is not on this node keeps empty names; the launch then refuses or, on a bare node, the plan of
    the rails has given the names already.
    """
    if all(rail.netdev and rail.rdma for rail in rails):
        return tuple(rails)
    reader = Reader(root=str(host.root))
    where: dict[str, tuple[str, str]] = {}
    for hca in reader.names("/sys/class/infiniband"):
        for row in gid_table(reader, f"/sys/class/infiniband/{hca}/ports/1"):
            if row["ipv4"] and "v2" in str(row["type"]) and row["ndev"]:
                where.setdefault(str(row["ipv4"]), (str(row["ndev"]), hca))
    located = []
    for rail in rails:
        netdev, rdma = where.get(rail.ip, ("", ""))
        located.append(Rail(rail.address, rail.netdev or netdev, rail.rdma or rdma))
    return tuple(located)


def keyed_digest(key: str, secret: str) -> str:
    """What stands in for a secret in a hash: an HMAC with the replica's key, which never leaves the nodes."""
    return hmac.new(key.encode("utf-8"), secret.encode("utf-8"), hashlib.sha256).hexdigest()[:20]


def key_fingerprint(key: str) -> str:
    """Tells whether two nodes have the same key; 256 random bits, so its digest gives nothing away."""
    return (
        hashlib.sha256(b"sparkfleet peer key\0" + key.strip().encode("utf-8")).hexdigest()[:16] if key else ""
    )


class Node:
    """One node's side of one replica.

    :param params: the parameters of ``rank_unit`` (see its documentation).
    """

    def __init__(self, host: Host, docker: DockerApi, params: Mapping[str, Any]) -> None:
        self.host = host
        self.docker = docker
        self.params = params
        self.replica = str(params["replica"])
        self.launch: Json | None = None
        self.key = str(params.get("peer_key") or (host.read(key_path(self.replica)) or "")).strip()
        self.install = install_id(host)

    # -- what is wanted ------------------------------------------------------------------------------------

    def api_key(self) -> tuple[str, str, bool]:
        """``(path on this node, content, write it)``; empty path without a key or on another rank."""
        if int(self.params["rank"]) != 0:
            return "", "", False
        given = str(self.params.get("api_key") or "").strip()
        if given:
            return f"{SECRETS}/{self.replica}.api-key", given, True
        path = str(self.params.get("api_key_file") or "")
        if not path:
            return "", "", False
        text = self.host.read(path)
        if text is None or not text.strip():
            raise Refusal(
                "the API key file is absent or empty",
                path,
                "a 0600 file with the key on the head node",
                "write it there, or give ranks_api_key",
            )
        if self.host.path(path).stat().st_mode & 0o077:
            raise Refusal(
                f"{path} is readable by others", "group or others", "mode 0600", f"chmod 600 {path}"
            )
        return path, text.strip(), False

    def wanted(self) -> Json:
        """The launch of this node. Raises ``Refusal`` with every problem."""
        if self.launch is not None:
            return self.launch
        params = self.params
        rank = int(params["rank"])
        members = list(members_from(params["members"]))
        own = [
            Rail(
                str(row["address"]),
                str(row.get("netdev") or ""),
                str(row.get("hca") or row.get("rdma") or ""),
            )
            for row in params.get("rails") or []
        ]
        for position, member in enumerate(members):
            if member.rank == rank:
                rails = locate_rails(self.host, own or list(member.rails))
                members[position] = Member(member.name, member.rank, rails)
        path, content, _write = self.api_key()
        secrets = {"api_key": (path, keyed_digest(self.key, content))} if path else {}
        try:
            self.launch = build(
                params["engine"],
                LaunchInput(
                    replica=self.replica,
                    rank=rank,
                    members=tuple(members),
                    image=str(params["image"]),
                    image_content=str(params.get("image_content") or ""),
                    model={str(k): str(v) for k, v in (params.get("model") or {}).items()},
                    rank_file=dict(params.get("rank_file") or {}),
                    paths={str(k): str(v) for k, v in (params.get("paths") or {}).items()},
                    settings=dict(params.get("settings") or {}),
                    extra_env={str(k): str(v) for k, v in (params.get("extra_env") or {}).items()},
                    extra_args=dict(params.get("extra_args") or {}),
                    secrets=secrets,
                    container_name=str(params.get("container_name") or ""),
                    stop_grace=params.get("stop_grace"),
                    install_id=self.install,
                    min_available_gib=params.get("min_available_gib"),
                    log_dir=str(params["log_dir"]),
                    log_keep=int(params["log_keep"]),
                    peer_port=int(params["peer_port"]),
                    release_dir=str(params["release_dir"]),
                ),
            )
        except LaunchError as error:
            raise Refusal(
                "the launch of this rank is refused: " + "; ".join(error.problems),
                "",
                "",
                "correct the ranks_ variables named above; nothing was changed",
            ) from error
        return self.launch

    def files(self) -> list[tuple[str, str, int, bool]]:
        """Wanted files: path, text, mode, secret."""
        launch = self.wanted()
        agent = str(self.params["agent"])
        grace = int(launch["container"]["stop_grace"])
        wanted = [
            (INSTALL_ID, self.install + "\n", 0o644, False),
            (f"{UNIT_DIR}/{PEER_UNIT}", PEER_UNIT_TEXT.format(agent=agent), 0o644, False),
            (
                f"{UNIT_DIR}/{BOOT_TEMPLATE}",
                BOOT_UNIT_TEXT.format(agent=agent),
                0o644,
                False,
            ),
            (
                f"{UNIT_DIR}/{RANK_TEMPLATE}",
                RANK_UNIT_TEXT.format(agent=agent, peer=PEER_UNIT, stop_s=grace + 90),
                0o644,
                False,
            ),
            (key_path(self.replica), self.key + "\n", 0o600, True),
            (
                launch_path(self.replica),
                json.dumps(launch, indent=1, sort_keys=True) + "\n",
                0o600,
                False,
            ),
        ]
        plan = self.params.get("plan") or {}
        if plan:
            wanted.append((plan_path(self.replica), self.planned_text(launch, plan), 0o644, False))
        path, content, write = self.api_key()
        if write:
            wanted.append((path, content + "\n", 0o600, True))
        return wanted

    def planned_text(self, launch: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
        """The plan of this launch as it was when the launch was written.

        A plan has live numbers in it (MemAvailable). They must not make a later run write anything, so a plan
        stays as it is while its launch does.
        """
        try:
            kept = read_json(self.host, plan_path(self.replica))
        except Refusal:
            kept = None
        if kept is not None and kept.get("launch") == launch["hash"]:
            return self.host.read(plan_path(self.replica)) or ""
        return json.dumps({"launch": launch["hash"], "plan": plan}, indent=1, sort_keys=True) + "\n"

    def mode(self, path: str) -> int | None:
        try:
            return self.host.path(path).stat().st_mode & 0o777
        except FileNotFoundError:
            return None

    def differences(self) -> list[tuple[str, str, int, bool]]:
        """The wanted files that are absent, differ in text, or have another mode."""
        return [
            (path, text, mode, secret)
            for path, text, mode, secret in self.files()
            if self.host.read(path) != text or self.mode(path) != mode
        ]

    def unit_changes(self) -> list[str]:
        """What systemd would have to be told: ``enable UNIT``, ``disable UNIT``, ``start UNIT``."""
        changes = []
        peer = unit_state(self.host, PEER_UNIT)
        if peer.enabled != "enabled":
            changes.append(f"enable {PEER_UNIT}")
        if peer.active != "active":
            changes.append(f"start {PEER_UNIT}")
        boot = self.params.get("boot")
        if boot is not None:
            unit = boot_unit(self.replica)
            is_on = unit_state(self.host, unit).enabled == "enabled"
            if is_on != bool(boot):
                changes.append(f"{'enable' if boot else 'disable'} {unit}")
        return changes

    # -- states --------------------------------------------------------------------------------------------

    def identify(self) -> None:
        """Give the node an install id when it has none yet (also predicted in check mode)."""
        if not self.install:
            self.install = str(self.params.get("install_id") or uuid.uuid4().hex)

    def planned(self) -> Json:
        """Read only: what runs, what is wanted, what differs."""
        self.identify()
        launch = self.wanted()
        view = local_view(self.host, self.docker, self.replica)
        if view["verdict"] in ("absent", "stopped", "failed"):
            # Without a launch file nobody looked at the container's name yet.
            view["container"] = self.look(launch)
            if view["container"]["state"] in ("foreign", "unknown"):
                view["verdict"] = view["container"]["state"]
        agent = str(self.params["agent"])
        present = self.host.exists(agent) and (
            hashlib.sha256(self.host.path(agent).read_bytes()).hexdigest() == str(self.params["agent_sha256"])
        )
        index = gid_now(self.host, launch)
        return {
            "changed": False,
            "warnings": self.image_warnings(launch),
            "replica": self.replica,
            "rank": launch["rank"],
            "name": launch["node"],
            "verdict": view["verdict"],
            "error": view["container"].get("error", ""),
            "launch_wanted": launch["hash"],
            "launch_now": view["container"].get("launch") or None,
            "contract": launch["contract"]["digest"],
            "container_name": launch["container"]["name"],
            "secrets": launch["secrets"],
            "container": view["container"],
            "changes": [path for path, _text, _mode, _secret in self.differences()] + self.unit_changes(),
            "agent_present": present,
            "key": key_fingerprint(self.host.read(key_path(self.replica)) or ""),
            "gid_now": index,
            "gid_started": view["agent"].get("gid_index") if view["verdict"] == "running" else None,
            "command": render(launch, index),
        }

    def image_warnings(self, launch: Mapping[str, Any]) -> list[str]:
        """What the labels of the image leave to be said; nothing of an image that is not here yet."""
        rule = launch["gates"].get("nccl")
        if not rule:
            return []
        image = str(launch["container"]["image"])
        try:
            found = self.docker.image_inspect(image)
        except DockerError:
            return []
        text = nccl_warning(rule, image, (found.get("Config") or {}).get("Labels") or {})
        return [text] if text else []

    def tried(self) -> Json:
        """Ask the engine's own parser about the planned command; starts nothing that is left."""
        self.identify()
        launch = self.wanted()
        role = role_of(int(launch["rank"]))
        parser = ((self.params["engine"].get("image") or {}).get("parser") or {}).get(role)
        if not parser:
            return {"changed": False, "parser": {"verdict": "not asked", "said": ""}}
        found = try_command(self.docker, launch, gid_now(self.host, launch), parser)
        return {"changed": False, "parser": found}

    def look(self, launch: Mapping[str, Any]) -> Json:
        return container_view(self.docker, str(launch["container"]["name"]), self.replica, self.install)

    def present(self, check: bool) -> Json:
        """Write what differs, load the units, keep the peer service up to date. Starts and stops no rank."""
        self.identify()
        if not self.key:
            if not check:
                raise Refusal("no peer key was given and none is on the node", "", "a key", "set peer_key")
            self.key = "predicted"
        launch = self.wanted()
        diffs = []
        different = self.differences()
        index = gid_now(self.host, launch)
        for path, text, mode, secret in different:
            before = self.host.read(path)
            if path == launch_path(self.replica):
                old = None
                try:
                    old = read_json(self.host, path)
                except Refusal:
                    before = "damaged\n"
                if old is not None:
                    before = self.summary(old, index)
                diffs.append(text_diff(path, before, self.summary(launch, index)))
                diffs += self.brought(launch, old)
            elif secret:
                diffs.append(
                    text_diff(path, None if before is None else "a secret\n", f"a secret, mode {mode:04o}\n")
                )
            else:
                diffs.append(text_diff(path, before, text))
        changes = self.unit_changes()
        units = {path for path, *_rest in different if path.startswith(UNIT_DIR)}
        reload_peer = f"{UNIT_DIR}/{PEER_UNIT}" in units and f"start {PEER_UNIT}" not in changes
        for change in changes:
            diffs.append(text_diff(f"unit {change.split()[1]}", "", change + "\n"))
        result: Json = {
            "changed": bool(different or changes),
            "diff": diffs,
            "launch": launch["hash"],
            "command": render(launch, index),
        }
        if check:
            return result
        for path, text, mode, _secret in different:
            folder = self.host.path(path).parent
            if not folder.exists():
                folder.mkdir(parents=True, mode=0o700 if str(path).startswith(SECRETS) else 0o755)
            self.host.write(path, text, mode)
        if units or changes:
            self.systemctl("daemon-reload")
        for change in changes:
            self.systemctl(*change.split())
        if reload_peer:
            self.systemctl("restart", PEER_UNIT)
        left = [path for path, *_rest in self.differences()] + self.unit_changes()
        if left:
            raise Refusal(
                "what was written did not stay", ", ".join(left), "no difference", "look for another manager"
            )
        return result

    def brought(self, launch: Mapping[str, Any], old: Mapping[str, Any] | None) -> list[dict[str, str]]:
        """What the start that follows a new launch brings: another container, and the folders it fills."""
        before = f"launch {old['hash']}\n" if old is not None and "hash" in old else None
        if before == f"launch {launch['hash']}\n":
            return []
        name = launch["container"]["name"]
        return [
            text_diff(f"container {name}", before, f"launch {launch['hash']}\n"),
            *(
                text_diff(mount["source"], None, "a folder of the rank\n")
                for mount in launch["container"]["mounts"]
                if not mount["read_only"] and not self.host.exists(mount["source"])
            ),
        ]

    @staticmethod
    def summary(launch: Mapping[str, Any], index: int | None) -> str:
        """What a person wants to see of a launch file in a diff."""
        try:
            text = render(launch, index)
        except (KeyError, TypeError, AttributeError):
            return "of another version\n"
        rails = ", ".join(f"{rail['address']} {rail['netdev']} {rail['rdma']}" for rail in launch["rails"])
        memory, logs = launch["memory"], launch["logs"]
        return (
            f"{text}# launch {launch['hash']}, contract {launch['contract']['digest']}\n"
            f"# rails {rails or 'none'}\n"
            f"# gate {memory['min_available_gib']} GiB available; logs {logs['dir']}, {logs['keep']} kept\n"
        )

    def systemctl(self, *words: str, timeout: float = 60.0) -> None:
        answer = self.host.run(["systemctl", *words], timeout=timeout)
        if not answer.ok:
            raise Refusal(
                f"systemctl {' '.join(words)} failed",
                answer.text,
                "success",
                f"journalctl -u {words[-1]} on this node",
            )

    def started(self, check: bool, restart: bool) -> Json:
        """Start this rank and wait until its container runs. The replica's order is the caller's."""
        view = local_view(self.host, self.docker, self.replica)
        running = view["verdict"] == "running"
        if running and not (check and restart):
            return {"changed": False, "verdict": "running", "container": view["container"]}
        unit = rank_unit(self.replica)
        diff = text_diff(f"unit {unit}", f"{view['verdict']}\n", "running\n")
        if check:
            return {"changed": True, "verdict": "running", "diff": [diff]}
        if view["verdict"] == "stale":
            self.halt(view)
        # Somebody asks for this start: a note of the boot that nobody took does not count for it.
        self.host.remove(boot_note(self.replica))
        self.host.run(["systemctl", "reset-failed", unit])
        answer = self.host.run(["systemctl", "start", unit], timeout=1860.0)
        after = local_view(self.host, self.docker, self.replica)
        if not answer.ok or after["verdict"] != "running":
            agent = after["agent"]
            tail = agent.get("tail") or []
            raise Refusal(
                f"rank {after['rank']} of {self.replica} did not start: "
                f"{agent.get('message') or answer.text or 'no reason given'}"
                + ("\n  " + "\n  ".join(tail[-25:]) if tail else ""),
                after["verdict"],
                "running",
                f"journalctl -u {unit} on this node; the whole log: {agent.get('log') or 'none was saved'}",
            )
        return {
            "changed": True,
            "verdict": after["verdict"],
            "container": after["container"],
            "gid_index": after["agent"].get("gid_index"),
            "diff": [diff],
        }

    def halt(self, view: Mapping[str, Any]) -> None:
        """Stop the unit, then whatever of ours is left without one."""
        unit = rank_unit(self.replica)
        grace = int(self.params.get("stop_grace") or 30)
        self.systemctl("stop", unit, timeout=grace + 150.0)
        left = view["container"]
        if left.get("id") and left["state"] in ("running", "stopped"):
            try:
                found = self.docker.container_find(left["id"])
                if found is not None:
                    self.docker.container_stop(left["id"], grace)
                    self.docker.container_remove(left["id"], force=True)
            except DockerNotFound:
                pass

    def cut_off(self, view: Mapping[str, Any]) -> str:
        """What a stop of the head does to clients; the engine has no way to let them end."""
        launch = read_json(self.host, launch_path(self.replica))
        if launch is None or launch["ports"]["api"] is None or view["verdict"] != "running":
            return ""
        try:
            seen = local_endpoint(self.host, launch, 3.0).activity(launch.get("health") or {})
        except OSError:
            return ""
        if isinstance(seen, Activity) and seen.running:
            return f"{seen.running} requests were running and are cut off"
        return ""

    def stopped(self, check: bool) -> Json:
        """Stop this rank: gracefully, then hard; its agent saves the log. Nothing to stop is no error."""
        view = local_view(self.host, self.docker, self.replica)
        if view["verdict"] == "unknown":
            raise Refusal(
                "Docker does not answer, so what runs here is unknown",
                view["container"].get("error", ""),
                "an answer",
                "systemctl status docker",
            )
        container = view["container"]["state"]
        live = view["unit"]["active"] in ("active", "activating", "deactivating")
        if not live and container not in ("running", "stopped"):
            return {"changed": False, "ran": False, "verdict": view["verdict"]}
        diff = [text_diff(f"unit {rank_unit(self.replica)}", f"{view['verdict']}\n", "stopped\n")]
        logs = (read_json(self.host, launch_path(self.replica)) or {}).get("logs") or {}
        if live and container == "running" and logs.get("keep"):
            # By its folder: the name has the time of the stop in it, and the oldest go when there are too many.
            diff.append(text_diff(f"tree {logs['dir']}", "", "the log of this rank\n"))
        cut_off = "" if check else self.cut_off(view)
        if not check:
            self.halt(view)
            after = local_view(self.host, self.docker, self.replica)
            if after["container"]["state"] == "running":
                raise Refusal(
                    "the rank still runs after the stop", after["container"]["id"], "no container", ""
                )
            view = after
        return {
            "changed": True,
            "ran": True,
            "verdict": "stopped",
            "log": view["agent"].get("log", ""),
            "warnings": [text for text in [cut_off, str(view["agent"].get("log_warning") or "")] if text],
            "message": view["agent"].get("message", ""),
            "diff": diff,
        }

    def absent(self, check: bool) -> Json:
        """Stop, then remove what belongs to this replica; units stay while another replica uses them."""
        result = self.stopped(check)
        diffs = list(result.get("diff", []))
        folder = f"{REPLICAS}/{self.replica}"
        paths = [f"{folder}/{name}" for name in self.host.listdir(folder)]
        paths += [path for path in (f"{SECRETS}/{self.replica}.api-key",) if self.host.exists(path)]
        others = [name for name in self.host.listdir(REPLICAS) if name != self.replica]
        units = []
        if not others:
            ours = (PEER_UNIT, RANK_TEMPLATE, BOOT_TEMPLATE)
            units = [f"{UNIT_DIR}/{name}" for name in ours if self.host.exists(f"{UNIT_DIR}/{name}")]
        diffs += [text_diff(path, "present\n", None) for path in [*paths, *units]]
        enabled = unit_state(self.host, boot_unit(self.replica)).enabled == "enabled"
        changed = bool(result["changed"] or paths or units or enabled)
        if not check and changed:
            if enabled:
                self.systemctl("disable", boot_unit(self.replica))
            if units:
                self.host.run(["systemctl", "disable", "--now", PEER_UNIT])
            for path in [*paths, *units, status_path(self.replica)]:
                self.host.remove(path)
            for empty in (folder, f"{RUN}/{self.replica}"):
                if self.host.path(empty).is_dir() and not self.host.listdir(empty):
                    self.host.path(empty).rmdir()
            if units:
                self.systemctl("daemon-reload")
        return {"changed": changed, "verdict": "absent", "diff": diffs}


def ensure(host: Host, docker: DockerApi, params: Mapping[str, Any], check: bool) -> Json:
    """One call of the module. Docker errors become refusals that name them."""
    node = Node(host, docker, params)
    state = params["state"]
    try:
        if state == "planned":
            return node.planned()
        if state == "tried":
            return node.tried()
        if state == "present":
            return node.present(check)
        if state == "started":
            return node.started(check, bool(params.get("restart")))
        if state == "stopped":
            return node.stopped(check)
        return node.absent(check)
    except DockerError as error:
        raise Refusal(
            "Docker refused or did not answer", str(error), "", "systemctl status docker"
        ) from error
