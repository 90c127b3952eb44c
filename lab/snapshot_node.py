"""Read the state of one node as data. Runs inside the node (`python3 - < this file`), standard library only.

Everything that a role may change is an object: a path, a unit, an address, a link, a route, a kernel
setting, a
package, an image, a container, a volume, a runtime, a group member. The answer is JSON on stdout: kind ->
name -> state.
Nothing is changed by reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOTS = ("/etc", "/usr", "/opt", "/var/lib")
#: Hashed up to this size; larger files are told by size and time of change.
HASH_LIMIT = 4 << 20
#: Not entered: Docker's own stores (seen as images, containers and volumes instead), and what every process
# writes to.
SKIP = (
    "/var/lib/docker",
    "/var/lib/containerd",
    "/var/lib/systemd/random-seed",
    "/usr/share/doc",
    "/usr/share/man",
)
#: /usr is large and written by packages only; its files are told by size and time instead of a hash.
UNHASHED = ("/usr",)
SYSCTLS = ("fs", "kernel", "vm", "net/core", "net/ipv4/conf/all", "net/ipv4/conf/default")

Objects = dict[str, dict[str, Any]]


def run(*argv: str) -> str:
    """The output of a tool; empty when it is missing or fails."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def loads(text: str) -> Any:
    return json.loads(text) if text.strip() else []


def describe(path: str, root: str) -> dict[str, Any]:
    here = Path(path)
    info = here.lstat()
    entry: dict[str, Any] = {
        "mode": f"{stat.S_IMODE(info.st_mode):o}",
        "owner": f"{info.st_uid}:{info.st_gid}",
    }
    if stat.S_ISLNK(info.st_mode):
        return {"type": "link", "to": str(here.readlink())}
    if stat.S_ISDIR(info.st_mode):
        return {"type": "directory", **entry}
    if not stat.S_ISREG(info.st_mode):
        return {"type": "special", **entry}
    entry = {"type": "file", **entry, "size": info.st_size}
    if info.st_size > HASH_LIMIT or root in UNHASHED:
        return {**entry, "mtime": info.st_mtime_ns}
    return {**entry, "sha256": hashlib.sha256(here.read_bytes()).hexdigest()}


def paths(base: str, roots: tuple[str, ...] = ROOTS) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for root in roots:
        top = base.rstrip("/") + root
        stack = [top]
        while stack:
            folder = stack.pop()
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                name = entry.path[len(base.rstrip("/")) :]
                if name in SKIP or entry.name == "__pycache__":
                    continue
                try:
                    found[name] = describe(entry.path, root)
                except OSError:
                    continue  # gone between the listing and the look
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
    return found


def units() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in run("systemctl", "list-unit-files", "--plain", "--no-legend", "--no-pager").splitlines():
        fields = row.split()
        if len(fields) >= 2:
            found[fields[0]] = {"enabled": fields[1]}
    kinds = "--type=service,socket,timer,target,path"
    for row in run(
        "systemctl", "list-units", "--all", kinds, "--plain", "--no-legend", "--no-pager"
    ).splitlines():
        fields = row.split()
        # A unit that is inactive may be loaded or not: that depends on who mentioned it last.
        if len(fields) >= 4 and fields[1] != "not-found" and fields[2] != "inactive":
            found.setdefault(fields[0], {})["active"] = fields[2]
    ours = [name for name in found if name.startswith("sparkfleet-") and "@." not in name]
    for block in run("systemctl", "show", "-p", "Id,InvocationID", *ours).split("\n\n") if ours else []:
        values = dict(row.split("=", 1) for row in block.splitlines() if "=" in row)
        if values.get("Id") in found:
            found[values["Id"]]["run"] = values.get("InvocationID", "")
    return found


def network() -> Objects:
    links: dict[str, Any] = {}
    addresses: dict[str, Any] = {}
    for link in loads(run("ip", "-j", "addr")):
        name = link["ifname"]
        links[name] = {"mtu": link.get("mtu"), "up": "UP" in link.get("flags", [])}
        for address in link.get("addr_info", []):
            if address.get("local"):
                addresses[f"{name} {address['local']}/{address['prefixlen']}"] = {
                    "scope": address.get("scope")
                }
    routes: dict[str, Any] = {}
    for family in ("-4", "-6"):
        for route in loads(run("ip", "-j", family, "route", "show", "table", "all")):
            if route.get("type", "unicast") in {"unicast", "blackhole"} and route.get("dev") != "lo":
                key = f"{route.get('dev', '')} {route.get('dst')} via {route.get('gateway', 'link')}"
                routes[key] = {"metric": route.get("metric")}
    return {"link": links, "address": addresses, "route": routes}


def sysctls() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for top in SYSCTLS:
        for folder, _folders, files in os.walk(f"/proc/sys/{top}"):
            for name in files:
                path = Path(folder, name)
                try:
                    value = path.read_text(errors="replace").split()
                except OSError:
                    continue
                found[str(path)[len("/proc/sys/") :].replace("/", ".")] = " ".join(value)
    return found


def packages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    layout = "${Package}\\t${Version}\\t${db:Status-Want}\\t${db:Status-Status}\\n"
    for row in run("dpkg-query", "-W", "-f", layout).splitlines():
        name, version, want, status = row.split("\t")
        if status != "not-installed":
            found[name] = {"version": version, "want": want, "status": status}
    return found


def package_paths() -> dict[str, str]:
    """Package by path, from dpkg's own lists: a new package explains the files that it brings."""
    owners: dict[str, str] = {}
    for listing in sorted(Path("/var/lib/dpkg/info").glob("*.list")):
        for row in listing.read_text(errors="replace").splitlines():
            owners[row] = listing.stem.split(":")[0]
    return owners


def docker() -> Objects:
    images: dict[str, Any] = {}
    names = sorted(set(run("docker", "image", "ls", "-q", "--no-trunc").split()))
    for image in loads(run("docker", "image", "inspect", *names)) if names else []:
        for tag in image.get("RepoTags") or image.get("RepoDigests") or [image["Id"]]:
            images[tag] = {
                "layers": image.get("RootFS", {}).get("Layers", []),
                "labels": (image.get("Config") or {}).get("Labels") or {},
            }
    containers: dict[str, Any] = {}
    ids = run("docker", "ps", "-aq", "--no-trunc").split()
    for container in loads(run("docker", "inspect", *ids)) if ids else []:
        state = container["State"]
        containers[container["Name"].lstrip("/")] = {
            "id": container["Id"],
            "image": container["Config"]["Image"],
            "status": state["Status"],
            "started": state["StartedAt"],
            "labels": container["Config"].get("Labels") or {},
        }
    volumes: dict[str, Any] = {name: {} for name in run("docker", "volume", "ls", "-q").split()}
    information = loads(run("docker", "info", "--format", "{{json .}}")) or {}
    runtimes = {"docker": sorted(information.get("Runtimes") or {})}
    return {"image": images, "container": containers, "volume": volumes, "runtimes": runtimes}


def groups() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in Path("/etc/group").read_text().splitlines():
        name, _password, _gid, members = row.split(":")
        for member in filter(None, members.split(",")):
            found[f"{name} member {member}"] = {}
    return found


def snapshot() -> Objects:
    found: Objects = {
        "path": paths("/"),
        "unit": units(),
        "sysctl": sysctls(),
        "package": packages(),
        "group": groups(),
        "default": {"target": run("systemctl", "get-default").strip()},
        **network(),
        **docker(),
    }
    owners = package_paths()
    for name, entry in found["path"].items():
        if name in owners:
            entry["package"] = owners[name]
    return found


if __name__ == "__main__":
    json.dump(snapshot(), sys.stdout)
