"""Bring a lab instance up and down.

``up`` is safe to repeat: it makes what is missing and leaves what runs. Containers, networks and volumes
carry the label ``sparkfleet.lab=NAME``; nothing without it is ever touched.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.models.networks import Network
from docker.types import IPAMConfig, IPAMPool

from . import image
from .config import (
    HUB_NAME,
    HUB_PORT,
    LABEL,
    NODES,
    PREFIX,
    REGISTRY_PORT,
    REPOSITORY,
    USER,
    Instance,
    cache_directory,
    instance,
)
from .image import say
from .inventory import inventory_text
from .vm import machine as vm

BOOT_SECONDS = 90
Filters = dict[str, str | list[str] | bool]
BASE_NAME = "lab/base:1"
# What systemd, networkd and an inner Docker engine need. Not in it, on purpose: SYS_TIME, SYS_MODULE,
# SYS_RAWIO, SYS_BOOT, SYS_RESOURCE (and MAC_*, AUDIT_CONTROL, WAKE_ALARM, SYSLOG): a node must not reach this
# machine's clock, kernel or disks.
CAPABILITIES = (
    *(
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "FOWNER",
        "FSETID",
        "IPC_LOCK",
        "IPC_OWNER",
        "KILL",
    ),
    *(
        "LEASE",
        "LINUX_IMMUTABLE",
        "MKNOD",
        "NET_ADMIN",
        "NET_BIND_SERVICE",
        "NET_BROADCAST",
        "NET_RAW",
        "SETFCAP",
    ),
    *("SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_CHROOT", "SYS_NICE", "SYS_PTRACE", "SYS_TTY_CONFIG"),
)
# Docker's own list of harmless character devices applies as well; block devices are in neither.
DEVICES = ("/dev/fuse:/dev/fuse:rwm", "/dev/net/tun:/dev/net/tun:rwm")
DAEMON_SETTINGS: dict[str, dict[str, Any]] = {
    "spark-1": {"storage-driver": "overlay2"},
    "spark-2": {"features": {"containerd-snapshotter": True}},
}


def connect() -> docker.DockerClient:
    """The Docker engine of this machine. Waits long: a build or an import can keep it busy."""
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException as error:
        raise SystemExit(f"lab: no Docker engine answers ({error}); start one, or set DOCKER_HOST") from error
    return client


def daemon_json(node: str) -> str:
    """The node's /etc/docker/daemon.json as shipped: no nvidia runtime, and keys not to be lost."""
    common: dict[str, Any] = {
        "insecure-registries": [f"{HUB_NAME}:{REGISTRY_PORT}"],
        "log-driver": "json-file",
        "log-opts": {"max-size": "10m", "max-file": "3"},
    }
    return json.dumps(common | DAEMON_SETTINGS[node], indent=4) + "\n"


@dataclass(frozen=True)
class File:
    """A file to put into a container."""

    path: str
    text: str
    mode: int = 0o644
    owner: int = 0


def put(container: Container, files: list[File]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in files:
            parent = tarfile.TarInfo(str(Path(file.path).parent).lstrip("/"))
            if file.owner:  # a directory of the user's own, such as .ssh
                parent.type, parent.mode, parent.uid, parent.gid = (
                    tarfile.DIRTYPE,
                    0o700,
                    file.owner,
                    file.owner,
                )
                archive.addfile(parent)
            info = tarfile.TarInfo(file.path.lstrip("/"))
            info.size, info.mode, info.uid, info.gid = (
                len(file.text.encode()),
                file.mode,
                file.owner,
                file.owner,
            )
            archive.addfile(info, io.BytesIO(file.text.encode()))
    if not container.put_archive("/", buffer.getvalue()):
        raise SystemExit(f"lab: cannot put files into {container.name}")


def run_in(container: Container, *command: str, user: str = "root") -> tuple[int, str]:
    """Run a command in a container: exit status and output (both streams)."""
    done = container.exec_run(list(command), user=user)
    assert isinstance(done.output, bytes)
    return done.exit_code or 0, done.output.decode(errors="replace")


def make_keys(lab: Instance) -> None:
    """The instance's key pair, a host key for each node, known_hosts and an ssh configuration."""
    directory = lab.directory / "ssh"
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    known = []
    for name in ("id_ed25519", *(f"host-{node}" for node in NODES)):
        key = directory / name
        if not key.exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {lab.name}", "-f", str(key)]
            subprocess.run(command, check=True)
    for node in NODES:
        kind, public = (directory / f"host-{node}.pub").read_text(encoding="ascii").split()[:2]
        known.append(f"{lab.address(node)} {kind} {public}\n")
    (directory / "known_hosts").write_text("".join(known), encoding="ascii")
    config = "".join(f"Host {node}\n  HostName {lab.address(node)}\n\n" for node in NODES)
    config += (
        f"Host *\n  User {USER}\n  IdentityFile {directory}/id_ed25519\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {directory}/known_hosts\n  StrictHostKeyChecking yes\n"
    )
    lab.ssh_config.write_text(config, encoding="utf-8")


def write_inventory(lab: Instance) -> Path:
    """The inventory of this instance; the default one is also in the repository, as inventory/lab."""
    directory = lab.directory / "inventory"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "hosts.yml").write_text(inventory_text(lab, str(lab.directory / "ssh")), encoding="utf-8")
    shared = directory / "group_vars"
    if not shared.is_symlink():
        shared.symlink_to(os.path.relpath(REPOSITORY / "inventory/lab/group_vars", directory))
    return directory


def labels(lab: Instance) -> dict[str, str]:
    return {LABEL: lab.name}


def make_network(client: docker.DockerClient, lab: Instance) -> None:
    for network in client.networks.list(names=[f"^{lab.network}$"]):
        if (network.attrs.get("Labels") or {}).get(LABEL) == lab.name:
            return
        raise SystemExit(f"lab: a network {lab.network} exists that the lab did not make")
    pool = IPAMPool(subnet=lab.subnet, gateway=lab.gateway)
    try:
        client.networks.create(
            lab.network, driver="bridge", ipam=IPAMConfig(pool_configs=[pool]), labels=labels(lab)
        )
    except APIError as error:
        raise SystemExit(
            f"lab: cannot make network {lab.subnet} ({error.explanation}); try another LAB_NAME"
        ) from error


def find(client: docker.DockerClient, name: str) -> Container | None:
    try:
        return client.containers.get(name)
    except NotFound:
        return None


def ensure(
    client: docker.DockerClient, lab: Instance, part: str, tag: str, create: Callable[[], Container]
) -> Container:
    """The running container of a part of the lab: found, started or made."""
    container = find(client, lab.container(part))
    if container is None:
        container = create()
    elif container.labels.get(LABEL) != lab.name:
        raise SystemExit(f"lab: a container {container.name} exists that the lab did not make")
    elif tag not in (container.image.tags if container.image else []):
        say(f"{container.name} runs an older image; `lab down` and `lab up` would renew it")
    container.reload()
    if container.status != "running":
        container.start()
    return container


def networking(lab: Instance, client: docker.DockerClient, address: str, alias: str) -> dict[str, Any]:
    endpoint = client.api.create_endpoint_config(ipv4_address=address, aliases=[alias])
    return {"network": lab.network, "networking_config": {lab.network: endpoint}}


def create_node(client: docker.DockerClient, lab: Instance, tag: str, node: str) -> Container:
    volumes = {
        lab.volume(node, "docker"): {"bind": "/var/lib/docker", "mode": "rw"},
        lab.volume(node, "containerd"): {"bind": "/var/lib/containerd", "mode": "rw"},
        # Model data lies on the root disk of a Spark, which is ext4; a container's own root is an overlay.
        lab.volume(node, "data"): {"bind": "/var/lib/sparkfleet", "mode": "rw"},
    }
    for volume in volumes:
        client.volumes.create(volume, labels=labels(lab))
    container = client.containers.create(
        tag,
        name=lab.container(node),
        hostname=node,
        labels=labels(lab),
        cap_drop=["ALL"],
        cap_add=list(CAPABILITIES),
        devices=list(DEVICES),
        security_opt=["seccomp=unconfined", "apparmor=unconfined"],
        cgroupns="private",
        tmpfs={"/run": "exec,mode=755", "/run/lock": "", "/tmp": "exec"},
        volumes=volumes,
        restart_policy={
            "Name": "always"
        },  # `systemctl reboot` ends PID 1; Docker starts it again: that is the reboot
        extra_hosts={HUB_NAME: lab.hub_address},
        **networking(lab, client, lab.address(node), node),
    )
    secrets = lab.directory / "ssh"
    public = (secrets / "id_ed25519.pub").read_text(encoding="ascii")
    files = [
        File("/etc/docker/daemon.json", daemon_json(node)),
        File("/etc/ssh/ssh_host_ed25519_key", (secrets / f"host-{node}").read_text(encoding="ascii"), 0o600),
        File("/etc/ssh/ssh_host_ed25519_key.pub", (secrets / f"host-{node}.pub").read_text(encoding="ascii")),
        File(f"/home/{USER}/.ssh/authorized_keys", public, 0o600, owner=1000),
    ]
    put(container, files)
    return container


def hub_content() -> Path:
    """What the Hub stand-in serves: the generated checkpoint, Engram shards and kit, kept in the cache."""
    source = REPOSITORY / "lab/checkpoint"
    target = cache_directory() / "hub" / image.short_hash(image.tree_parts(source))
    command = [sys.executable, "-m", "lab.checkpoint", str(target)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lab: making the checkpoint failed:\n{done.stderr}")
    return target


def create_hub(client: docker.DockerClient, lab: Instance, tag: str, seed: str) -> Container:
    volumes = {seed: {"bind": "/seed/docker-registry", "mode": "ro"}}
    container = client.containers.create(
        tag,
        command=["/usr/bin/python3", "-m", "lab.node.hub"],
        name=lab.container("hub"),
        hostname="hub",
        labels=labels(lab),
        volumes=volumes,
        restart_policy={"Name": "always"},
        stop_signal="SIGTERM",
        **networking(lab, client, lab.hub_address, HUB_NAME),
    )
    if not container.put_archive("/", image.pack({"srv/hub": hub_content()})):
        raise SystemExit(f"lab: cannot put the checkpoint into {container.name}")
    return container


def create_cable(client: docker.DockerClient, lab: Instance, tag: str) -> Container:
    return client.containers.create(
        tag,
        command=["/usr/bin/python3", "-m", "lab.node.cable", *(lab.container(node) for node in NODES)],
        name=lab.container("cable"),
        hostname="cable",
        labels=labels(lab),
        cap_add=["NET_ADMIN", "SYS_PTRACE"],  # SYS_PTRACE opens a node's /proc/PID/ns/net
        pid_mode="host",
        network_mode="none",
        volumes={"/var/run/docker.sock": {"bind": "/var/run/docker.sock", "mode": "rw"}},
        restart_policy={"Name": "always"},
        init=True,
        stop_signal="SIGTERM",
    )


def registry_seed(client: docker.DockerClient, node_tag: str, base_tag: str) -> str:
    """A volume with a registry's storage that holds ``lab/base:1``, made once; returns its name."""
    volume = f"{PREFIX}-registry-seed-{base_tag.rpartition(':')[2]}"
    try:
        client.volumes.get(volume)
    except NotFound:
        pass
    else:
        return volume
    say(f"pushing {BASE_NAME} into the registry's storage")
    scratch = f"{volume}-making"
    client.volumes.create(scratch, labels={LABEL: "cache"})
    # The port is published on the loopback address because a Docker engine trusts only a local registry
    # without TLS.
    registry = client.containers.run(
        node_tag,
        command=["/usr/bin/python3", "-m", "lab.node.hub"],
        detach=True,
        labels={LABEL: "cache"},
        ports={f"{REGISTRY_PORT}/tcp": ("127.0.0.1", 0)},
        volumes={scratch: {"bind": "/var/lib/docker-registry", "mode": "rw"}},
        stop_signal="SIGTERM",
    )
    try:
        registry.reload()
        published = registry.ports[f"{REGISTRY_PORT}/tcp"]
        assert published, "the registry's port is not published"
        port = published[0]["HostPort"]
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/v2/"), "the registry", 20)
        repository, _, tag = BASE_NAME.partition(":")
        remote = f"127.0.0.1:{port}/{repository}"
        client.images.get(base_tag).tag(remote, tag)
        try:
            for line in client.images.push(remote, tag=tag, stream=True, decode=True):
                if "error" in line:
                    raise SystemExit(f"lab: pushing {BASE_NAME} failed: {line['error']}")
        finally:
            client.images.remove(f"{remote}:{tag}")
        client.volumes.create(volume, labels={LABEL: "cache"})
        client.containers.run(
            node_tag,
            command=["/bin/cp", "-a", "/from/.", "/to/"],
            remove=True,
            volumes={scratch: {"bind": "/from", "mode": "ro"}, volume: {"bind": "/to", "mode": "rw"}},
        )
    finally:
        registry.remove(force=True)
        client.volumes.get(scratch).remove(force=True)
    return volume


def accepts(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def answers(url: str) -> bool:
    """True when a server answers; a published port alone accepts before anyone listens behind it."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def wait_for(ready: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"lab: waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.1)


def is_booted(container: Container) -> bool:
    try:
        _, state = run_in(container, "systemctl", "is-system-running")
    except APIError:  # between two lives of a node that reboots
        return False
    return state.strip() in ("running", "degraded")


def has_rails(container: Container) -> bool:
    status, _ = run_in(container, "test", "-e", "/sys/class/net/enP2p1s0f1np1/device")
    return status == 0


def wait_for_node(lab: Instance, node: str, container: Container) -> None:
    wait_for(
        lambda: is_booted(container), f"{node} to boot (see `docker logs {container.name}`)", BOOT_SECONDS
    )
    wait_for(
        lambda: has_rails(container), f"the rails of {node} (see `docker logs {lab.container('cable')}`)", 30
    )
    wait_for(lambda: accepts(lab.address(node), 22), f"sshd of {node}", 30)


def up(lab: Instance) -> dict[str, Any]:
    """Bring the instance up; returns what ``up.json`` then says."""
    client = connect()
    make_keys(lab)
    inventory = write_inventory(lab)
    with image.alone():
        tag = image.node_image(client)
        seed = registry_seed(client, tag, image.base_image(client))
    make_network(client, lab)
    with ThreadPoolExecutor() as pool:
        hub = pool.submit(ensure, client, lab, "hub", tag, lambda: create_hub(client, lab, tag, seed))
        makers = {node: partial(create_node, client, lab, tag, node) for node in NODES}
        started = {node: pool.submit(ensure, client, lab, node, tag, make) for node, make in makers.items()}
        nodes = {node: future.result() for node, future in started.items()}
        ensure(client, lab, "cable", tag, lambda: create_cable(client, lab, tag))
        hub.result()
        for waiting in [
            pool.submit(wait_for_node, lab, node, container) for node, container in nodes.items()
        ]:
            waiting.result()
    state = {
        "name": lab.name,
        "inventory": str(inventory.relative_to(REPOSITORY)),
        "subnet": lab.subnet,
        "nodes": {node: lab.address(node) for node in NODES},
        "registry": f"{HUB_NAME}:{REGISTRY_PORT}",
        "base_image": f"{HUB_NAME}:{REGISTRY_PORT}/{BASE_NAME}",
        "hub": f"http://{HUB_NAME}:{HUB_PORT}",
        "hub_address": lab.hub_address,
        "image": tag,
    }
    lab.up_file.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return state


def link_ends(networks: list[Network]) -> list[str]:
    """This machine's ends of the links of all containers on these networks: what their bridges hold."""
    bridges = [Path("/sys/class/net", f"br-{str(network.id)[:12]}", "brif") for network in networks]
    return [end.name for bridge in bridges if bridge.is_dir() for end in bridge.iterdir()]


def unplug(ends: list[str]) -> None:
    """Remove what is left of these links once their containers are gone.

    A node renames the interface that the engine gave it (eth0 becomes enP7s7), so the engine does not find it again,
    and this machine's end stays until the kernel ends the node's network: as long as anything is left in it.
    """
    for end in ends:
        if Path("/sys/class/net", end).exists():
            subprocess.run(["ip", "link", "del", end], capture_output=True, check=False)
    wait_for(
        lambda: not any(Path("/sys/class/net", end).exists() for end in ends), "the nodes' links to go", 30
    )


def down(lab: Instance) -> None:
    """Remove the instance's containers, volumes, network and virtual machines. Images, caches and keys stay."""
    vm.down(lab)
    client = connect()
    lab.up_file.unlink(missing_ok=True)
    mine: Filters = {"label": f"{LABEL}={lab.name}"}
    containers = client.containers.list(all=True, filters=mine)
    networks = client.networks.list(filters=mine)
    ends = link_ends(networks)
    # The cable first: it would plug a node in again.
    for container in sorted(containers, key=lambda each: each.name != lab.container("cable")):
        container.remove(force=True, v=True)
    unplug(ends)
    for volume in client.volumes.list(filters=mine):
        volume.remove(force=True)
    for network in networks:
        network.remove()


def purge() -> None:
    """Remove all that the lab ever made on this machine: instances, images, volumes, caches, keys."""
    client = connect()
    every: Filters = {"label": LABEL}
    networks = client.networks.list(filters=every)
    ends = link_ends(networks)
    for container in client.containers.list(all=True, filters=every):
        container.remove(force=True, v=True)
    unplug(ends)
    for volume in client.volumes.list(filters=every):
        volume.remove(force=True)
    for network in networks:
        network.remove()
    for kind in ("node", "base", "base-rootfs", "node-rootfs", "source-rootfs", "bare"):
        for found in client.images.list(name=f"{PREFIX}/{kind}"):
            client.images.remove(str(found.id), force=True)
    shutil.rmtree(cache_directory(), ignore_errors=True)
    for path in (REPOSITORY / ".lab").glob("*/vm"):
        vm.down(instance(path.parent.name))
    for path in (REPOSITORY / ".lab").glob("*"):
        # The pid and the log of an engine that bootstrap started: it still runs, and its pid is how to end it.
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def restart(lab: Instance, node: str) -> None:
    """Reboot a node and wait until it is back, rails plugged in."""
    client = connect()
    container = client.containers.get(lab.container(node))
    container.restart(timeout=20)
    wait_for_node(lab, node, container)


def status(lab: Instance) -> dict[str, str]:
    """State of each container of the instance; empty when it is down."""
    client = connect()
    found = client.containers.list(all=True, filters={"label": f"{LABEL}={lab.name}"})
    return dict(sorted((str(container.name), container.status) for container in found))
