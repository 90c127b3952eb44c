"""The Docker engine, through its socket. No answer is "unknown", never "nothing runs here" (B72)."""

from __future__ import annotations

import json
from typing import Any

from .reader import Reader

OWN_LABEL = "sparkfleet.install"
IMAGE_LABEL = "sparkfleet.content"


def container(row: dict[str, Any]) -> dict[str, Any]:
    names = [str(name).lstrip("/") for name in row.get("Names") or []]
    labels = dict(row.get("Labels") or {})
    return {
        "id": row.get("Id"),
        "name": names[0] if names else None,
        "image": row.get("Image"),
        "state": row.get("State"),
        "status": row.get("Status"),
        "labels": labels,
        "owned": OWN_LABEL in labels,
    }


def read(reader: Reader) -> dict[str, Any]:
    """present: the engine answered or is installed. denied: it is there, this account may not ask it.
    known: `containers` is the truth."""
    found: dict[str, Any] = {
        "present": False,
        "denied": False,
        "known": False,
        "reason": None,
        "server_version": None,
        "storage_driver": None,
        "runtimes": [],
        "default_runtime": None,
        "root_dir": None,
        "cgroup_driver": None,
        "live_restore": None,
        "architecture": None,
        "networks": [],
        "containers": [],
        "image_bytes": None,
        "daemon_json": reader.exists("/etc/docker/daemon.json"),
    }
    ok, info = reader.docker("/info")
    if not ok:
        found["reason"] = info
        found["denied"] = info == "denied"
        found["present"] = info != "absent"
        if found["denied"]:
            reader.denied("/var/run/docker.sock", "root or group docker")
        return found
    found.update(
        present=True,
        server_version=info.get("ServerVersion"),
        storage_driver=info.get("Driver"),
        runtimes=sorted(info.get("Runtimes") or {}),
        default_runtime=info.get("DefaultRuntime"),
        root_dir=info.get("DockerRootDir"),
        cgroup_driver=info.get("CgroupDriver"),
        live_restore=info.get("LiveRestoreEnabled"),
        architecture=info.get("Architecture"),
    )
    ok, rows = reader.docker("/networks")
    if ok:
        found["networks"] = sorted(
            str(config["Subnet"])
            for row in rows
            for config in ((row.get("IPAM") or {}).get("Config") or [])
            if config.get("Subnet")
        )
    ok, rows = reader.docker("/images/json", {"filters": json.dumps({"label": [IMAGE_LABEL]})})
    if ok:
        found["image_bytes"] = max((int(row.get("Size") or 0) for row in rows), default=0)
    ok, rows = reader.docker("/containers/json", {"all": True})
    if ok:
        found["known"] = True
        found["containers"] = sorted((container(row) for row in rows), key=lambda row: str(row["name"]))
    else:
        found["reason"] = rows
    return found
