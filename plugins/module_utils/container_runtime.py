"""The container engine of a node: known, with the nvidia runtime where the engine profile asks for it.

Packages are never installed, replaced or upgraded here: DGX OS ships Docker and the NVIDIA toolkit, and an
upgrade of
either is an upgrade of the node. dockerd takes a new runtime by SIGHUP, without a restart, so containers
stay up.
"""

from __future__ import annotations

import grp
import json
import pwd
import re
import time
from collections.abc import Sequence
from typing import Any

from .daemon_json import PATH, with_nvidia_runtime
from .docker_api import DockerApi, DockerError
from .host_io import Host, Refusal, text_diff

#: Oldest Docker with everything that is used of its API (1.41).
MINIMUM = "20.10"
#: Seconds that dockerd may take to show a new runtime after a reload.
RELOAD_S = 5.0


def version_tuple(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: "29.2.1+dfsg" is (29, 2, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group(0).split(".")) if match else ()


def summary(version: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """What the rest of the collection wants to know of an engine, from `/version` and `/info`."""
    driver = str(info.get("Driver", ""))
    # The containerd image store names its snapshotter as the driver and says so in DriverStatus; overlay2 is
    # the
    # classic store. Image ids mean different things in the two.
    status = {str(pair[0]): str(pair[1]) for pair in info.get("DriverStatus") or [] if len(pair) == 2}
    containerd = status.get("driver-type", "").startswith("io.containerd.snapshotter")
    return {
        "version": str(version.get("Version", "")),
        "api_version": str(version.get("ApiVersion", "")),
        "architecture": str(version.get("Arch", "")),
        "os": str(version.get("Os", "")),
        "store": "containerd" if containerd else "classic",
        "driver": driver,
        "root_dir": str(info.get("DockerRootDir", "")),
        "cgroup_driver": str(info.get("CgroupDriver", "")),
        "cgroup_version": str(info.get("CgroupVersion", "")),
        "runtimes": sorted(info.get("Runtimes") or {}),
        "default_runtime": str(info.get("DefaultRuntime", "")),
        "live_restore": bool(info.get("LiveRestoreEnabled", False)),
        "cdi": sorted(info.get("CDISpecDirs") or []),
    }


def missing_members(users: Sequence[str], group: str = "docker") -> list[str]:
    """Users that are not members of the group. Raises Refusal for a user or group that does not exist."""
    if not users:
        return []
    try:
        entry = grp.getgrnam(group)
    except KeyError:
        raise Refusal(
            f"there is no group {group}",
            "",
            group,
            "install Docker as DGX OS ships it, which makes the group",
        ) from None
    found = []
    for user in users:
        try:
            primary = pwd.getpwnam(user).pw_gid
        except KeyError:
            raise Refusal(
                "a user for the docker group does not exist",
                user,
                "an account",
                "correct container_runtime_users",
            ) from None
        if user not in entry.gr_mem and primary != entry.gr_gid:
            found.append(user)
    return found


def _engine(api: DockerApi) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        return api.version(), api.info()
    except DockerError as error:
        raise Refusal(
            "Docker does not answer",
            str(error),
            f"a Docker engine on {api.socket_path}",
            "`systemctl status docker`; DGX OS ships Docker, install it as your vendor says if it is missing",
        ) from error


def ensure(
    host: Host,
    *,
    nvidia: bool,
    nvidia_path: str,
    users: Sequence[str],
    minimum: str,
    allow_restart: bool,
    socket: str,
    check: bool,
    api: DockerApi | None = None,
) -> dict[str, Any]:
    """Make the engine usable for ranks. Returns changed, diff, warnings and the `runtime` summary."""
    docker = api or DockerApi(socket)
    version, info = _engine(docker)
    known = summary(version, info)
    if version_tuple(known["version"]) < version_tuple(minimum):
        raise Refusal(
            "Docker is too old",
            known["version"] or "unknown",
            f"{minimum} or newer",
            "upgrade Docker on the node",
        )
    diff = []
    text = host.read(PATH)
    new_text = None
    reload_needed = False
    if nvidia:
        new_text = with_nvidia_runtime(text, nvidia_path)
        reload_needed = "nvidia" not in known["runtimes"]
        if host.which(nvidia_path) is None and (new_text is not None or reload_needed):
            raise Refusal(
                "the NVIDIA container runtime is missing",
                "no such program",
                nvidia_path,
                "install nvidia-container-toolkit from the repository that DGX OS is set up with",
            )
    if new_text is not None:
        diff.append(text_diff(PATH, text, new_text))
    if reload_needed:
        before = "\n".join(known["runtimes"]) + "\n"
        diff.append(
            text_diff("runtimes docker", before, "\n".join(sorted([*known["runtimes"], "nvidia"])) + "\n")
        )
    joining = missing_members(users)
    diff += [text_diff(f"group docker member {user}", "no\n", "yes\n") for user in joining]

    if diff and not check:
        if new_text is not None:
            host.write(PATH, new_text)
        if reload_needed:
            known = _reload(host, docker, allow_restart)
        for user in joining:
            answer = host.run(["usermod", "-a", "-G", "docker", user])
            if not answer.ok:
                raise Refusal(
                    f"{user} did not join the docker group", answer.text, "a member", "`usermod -a -G docker`"
                )
        left = missing_members(users)
        if left:
            raise Refusal(
                "users did not join the docker group", ", ".join(left), "members", "`getent group docker`"
            )
    return {"changed": bool(diff), "diff": diff, "warnings": [], "runtime": known}


def _reload(host: Host, docker: DockerApi, allow_restart: bool, wait_s: float = RELOAD_S) -> dict[str, Any]:
    """SIGHUP, then look; a restart only where it is allowed and nothing runs."""
    answer = host.run(["systemctl", "reload", "docker.service"], timeout=60.0)
    # The signal is answered before the daemon has read its file again.
    end = time.monotonic() + wait_s
    known = summary(*_engine(docker))
    while "nvidia" not in known["runtimes"] and time.monotonic() < end:
        time.sleep(0.2)
        known = summary(*_engine(docker))
    if "nvidia" in known["runtimes"]:
        return known
    running = docker.container_list(all_states=False)
    owned = [c for c in running if (c.get("Labels") or {}).get("sparkfleet.install")]
    if running or not allow_restart:
        raise Refusal(
            "Docker did not take the nvidia runtime by a reload",
            f"runtimes {', '.join(known['runtimes'])}; {len(running)} containers run, "
            f"{len(owned)} of them ours. {answer.text}",
            "the runtime nvidia in `docker info`",
            "stop the replica, then set container_runtime_allow_restart: true",
        )
    restarted = host.run(["systemctl", "restart", "docker.service"], timeout=180.0)
    known = summary(*_engine(docker))
    if "nvidia" not in known["runtimes"]:
        raise Refusal(
            "Docker runs without the nvidia runtime after a restart",
            restarted.text or json.dumps(known["runtimes"]),
            "the runtime nvidia in `docker info`",
            "`journalctl -u docker`",
        )
    return known
