"""Subcommand ``gate``: may the rank of a replica start on this node now?

The agent asks the same before every start, by hand, by Ansible or at boot. A check either holds, does not
hold yet (worth a bounded wait: rails and memory come late), or never will without somebody's help.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import re
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import (
    DockerApi,
    DockerError,
    DockerNotFound,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import (
    Host,
    Refusal,
    meminfo,
    unit_state,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.launch import is_volume
from ansible_collections.sparkfleet.serving.plugins.module_utils.nfs import ping, server_of
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_state import container_view
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError

from . import gid
from .common import load_launch, until

HELP = "check whether the rank of a replica may start on this node"

GIB = 1 << 30
CLOCK_UNIT = "sparkfleet-gpu-clocks.service"


def kernel(host: Host, _docker: DockerApi, _launch: Mapping[str, Any]) -> None:
    """The kexec handover fault hides about 26 GiB and fails every RDMA registration: CmaTotal 0, CmaFree
    not.
    """
    info = meminfo(host.read("/proc/meminfo") or "")
    if info.get("CmaTotal") == 0 and info.get("CmaFree", 0) > 0:
        raise Refusal(
            "this kernel has the kexec handover fault: RDMA memory cannot be registered",
            f"CmaTotal 0, CmaFree {info['CmaFree'] >> 10} kB",
            "CmaFree not above CmaTotal",
            "boot with kho=off, or a 6.17 kernel",
        )


def clocks(host: Host, _docker: DockerApi, _launch: Mapping[str, Any]) -> None:
    """Our clock unit, where it is installed, must have run (it comes before this one at boot): one slow node
    makes both wait, and a node at its default clocks has been seen to power off.
    """
    unit = unit_state(host, CLOCK_UNIT)
    if unit.load == "loaded" and unit.active != "active":
        raise Refusal(
            f"{CLOCK_UNIT} is {unit.active}, so the GPU clock is not held",
            unit.active,
            "active",
            f"see journalctl -u {CLOCK_UNIT}, then systemctl restart {CLOCK_UNIT}; or run site.yml",
        )


def rails(host: Host, _docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """Every rail has its address and a carrier."""
    answer = host.run(["ip", "-j", "-4", "address", "show"])
    try:
        rows = json.loads(answer.out) if answer.ok else []
    except ValueError:
        rows = []
    found = {
        (str(row.get("ifname")), str(item.get("local"))) for row in rows for item in row.get("addr_info", [])
    }
    for rail in launch["rails"]:
        netdev, address = str(rail["netdev"]), str(rail["address"]).partition("/")[0]
        if (netdev, address) not in found:
            has = ", ".join(sorted(item for name, item in found if name == netdev)) or "no IPv4 address"
            raise Refusal(
                f"rail {netdev} does not have its address",
                has,
                address,
                "netplan apply, or run site.yml, which sets the rails",
            )
        if (host.read(f"/sys/class/net/{netdev}/carrier") or "").strip() == "0":
            raise Refusal(
                f"rail {netdev} has no carrier", "0", "1", "seat the cable on both nodes, or start the peer"
            )


def index(host: Host, _docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """The GID index can be resolved now."""
    gid.resolve(host, launch, 0)


def devices(host: Host, _docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """The devices that the rank is given exist; a fabric without /dev/infiniband is no RDMA fabric."""
    for path in launch["container"]["devices"]:
        if launch["rails"] and not host.exists(path):
            raise Refusal(
                f"{path} does not exist", "absent", "present", "install rdma-core; check the ConnectX-7"
            )


def files(host: Host, _docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """Every mounted path exists, and the rank file directory holds this rank's file alone, in full size."""
    for mount in launch["container"]["mounts"]:
        # A writable directory is a cache of the rank; the agent makes it. Volumes are a check of their own.
        if mount["read_only"] and not is_volume(mount["source"]) and not host.exists(str(mount["source"])):
            raise Refusal(
                f"{mount['source']} does not exist (mounted at {mount['target']})",
                "absent",
                "present",
                "run site.yml, which prepares it",
            )
    name, size = launch["rank_file"].get("name"), launch["rank_file"].get("bytes")
    if not name:
        return
    for mount in launch["container"]["mounts"]:
        if mount["target"] != launch["rank_file"].get("target", "/rank-cache"):
            continue
        held = [
            entry for entry in host.listdir(mount["source"]) if re.fullmatch(r"rank\d+of\d+-.*\.bin", entry)
        ]
        if held != [name]:
            raise Refusal(
                f"{mount['source']} must hold exactly one rank file",
                ", ".join(held) or "none",
                name,
                "run site.yml, which makes it; move others away",
            )
        has = host.path(f"{mount['source']}/{name}").stat().st_size
        if size and has != size:
            raise Refusal(f"{name} has the wrong size", has, size, "remove it and run site.yml again")


def volumes(_host: Host, docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """Every Docker volume exists (Docker makes an empty one of a name that it does not know), and the server behind
    it answers: who touches a dead mount hangs, and Docker with it (field B57). A peer that boots may come late.
    """
    for mount in launch["container"]["mounts"]:
        name, target = mount["source"], mount["target"]
        if not is_volume(name):
            continue
        try:
            server = server_of(docker.volume_inspect(name).get("Options"))
            if server:
                ping(server)
        except DockerNotFound as error:
            raise Refusal(
                f"the Docker volume {name} does not exist (mounted at {target})",
                "absent",
                "present",
                "run site.yml, which makes it",
            ) from error
        except (TreeError, DockerError) as error:
            raise Refusal(
                f"the Docker volume {name} (mounted at {target}) cannot be used: {error}",
                "no answer",
                "an answer of the node that exports it",
                "start that node, then this rank",
            ) from error


def image(_host: Host, docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """The image is on this node; nothing is pulled at a start."""
    name = launch["container"]["image"]
    try:
        docker.image_inspect(name)
    except DockerNotFound as error:
        raise Refusal(f"image {name} is not on this node", "absent", "present", "run site.yml") from error
    except DockerError as error:
        raise Refusal("Docker does not answer", str(error), "an answer", "systemctl status docker") from error


def container(_host: Host, docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """Nobody else has the container's name."""
    name = launch["container"]["name"]
    view = container_view(docker, name, launch["replica"], launch["install_id"])
    if view["state"] == "unknown":
        raise Refusal("Docker does not answer", view["error"], "an answer", "systemctl status docker")
    if view["state"] == "foreign":
        raise Refusal(
            f"a container that is not ours has the name {name}",
            f"id {view['id'][:12]}, image {view['image']}, {'running' if view['running'] else 'stopped'}",
            "the name free",
            f"remove it yourself (docker rm {name}) or set ranks_container_name",
        )


def listener(host: Host, port: int) -> str:
    """Who listens on a TCP port: ``name (pid N)``, or what could be found out."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (host.read(table) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return "a process that cannot be seen"
    for entry in host.path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        links = set()
        with contextlib.suppress(OSError):
            for link in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    links.add(str(link.readlink()))
        if links & inodes:
            name = (host.read(f"/proc/{entry.name}/comm") or "a process").strip()
            return f"{name} (pid {entry.name})"
    return "a process of another namespace"


def free_port(address: str, port: int) -> bool:
    """Whether a TCP port can be bound. SO_REUSEADDR, so that connections in TIME_WAIT do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def ports(host: Host, docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """API and rendezvous port are free on the head; while our own container runs, it is the one that has
    them.
    """
    view = container_view(docker, launch["container"]["name"], launch["replica"], launch["install_id"])
    if view["state"] == "running":
        return
    for what, port in (("API", launch["ports"]["api"]), ("rendezvous", launch["ports"]["rendezvous"])):
        if port and not free_port("0.0.0.0", int(port)):  # noqa: S104
            raise Refusal(
                f"{what} port {port} is in use",
                listener(host, int(port)),
                "free",
                "stop what listens there, or set another port",
            )


def memory(host: Host, docker: DockerApi, launch: Mapping[str, Any]) -> None:
    """MemAvailable holds the gate and the engine's own admission (rank file plus reserve).

    While our rank runs its own use counts as available, so there is nothing to judge.
    """
    view = container_view(docker, launch["container"]["name"], launch["replica"], launch["install_id"])
    if view["state"] == "running":
        return
    info = meminfo(host.read("/proc/meminfo") or "")
    available = info.get("MemAvailable", 0)
    wanted = float(launch["memory"]["min_available_gib"] or 0) * GIB
    exact = int(launch["memory"].get("rank_file_bytes") or 0)
    reserve = launch["memory"].get("reserve_gib")
    if exact and reserve is not None:
        wanted = max(wanted, exact + float(reserve) * GIB)
    if available < wanted:
        named = sum(info.get(name, 0) for name in ("MemFree", "Cached", "Buffers", "AnonPages", "SUnreclaim"))
        hidden = max(0, info.get("MemTotal", 0) - named)
        raise Refusal(
            "not enough memory is available",
            f"{available / GIB:.1f} GiB available, {hidden / GIB:.1f} GiB in no category of /proc/meminfo "
            "(the driver's pool after a stop)",
            f"{wanted / GIB:.1f} GiB",
            "stop what uses memory (docker ps, a desktop session), wait, or restart the node",
        )


Check = Callable[[Host, DockerApi, Mapping[str, Any]], None]
#: Checks in order; those of the second list may hold a little later and are waited for.
FIRM: tuple[Check, ...] = (kernel, clocks, container, image, devices, files, ports)
LATE: tuple[Check, ...] = (rails, index, volumes, memory)


def check(
    host: Host,
    docker: DockerApi,
    launch: Mapping[str, Any],
    wait_s: float = 0.0,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Raise the first refusal. ``wait_s`` bounds each check that may hold later."""
    for one in FIRM:
        one(host, docker, launch)
    for one in LATE:
        until(lambda one=one: one(host, docker, launch), wait_s, stopped=stopped)  # type: ignore[misc]


def every(host: Host, docker: DockerApi, launch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All checks with their outcome, for people and for the role."""
    rows = []
    for one in FIRM + LATE:
        row: dict[str, Any] = {"check": one.__name__, "ok": True}
        try:
            one(host, docker, launch)
        except Refusal as refusal:
            row.update({"ok": False, **refusal.as_failure()})
        rows.append(row)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replica", required=True)


def main(args: argparse.Namespace) -> int:
    """Print every check as JSON; exit 1 when one does not hold."""
    host = Host()
    try:
        rows = every(host, DockerApi(), load_launch(host, args.replica))
    except Refusal as refusal:
        rows = [{"check": "launch", "ok": False, **refusal.as_failure()}]
    json.dump(rows, sys.stdout, indent=1, default=str)
    sys.stdout.write("\n")
    return 0 if all(row["ok"] for row in rows) else 1
