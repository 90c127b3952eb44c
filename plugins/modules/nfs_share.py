#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Export a model tree read-only over NFS, and mount it as a Docker volume."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nfs_share
short_description: A model tree over NFS, read-only, to named peers
description:
  - V(exported) writes one file of ours in C(/etc/exports.d), exports what it says and starts C(nfs-server.service)
    where it is not active. V(mounted) makes the Docker volume on the other side and reads a file through a container.
  - Never touches C(/etc/exports), files of others or exports that were made by hand, and never exports a directory
    that holds a Hub token.
  - Before Docker touches the volume, the server is asked over a socket that gives up after five seconds. A dead
    server hangs whoever touches a hard mount.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  state:
    description: What to make true. V(unexported) and V(unmounted) take it back.
    type: str
    choices: [exported, unexported, mounted, unmounted]
    required: true
  name:
    description: Name of the export. Its file is C(/etc/exports.d/sparkfleet-NAME.exports).
    type: str
    default: model
  path:
    description: The tree, on the server.
    type: path
    required: true
  clients:
    description: Fabric addresses that may mount it.
    type: list
    elements: str
    default: []
  server:
    description: Fabric address of the server, for V(mounted).
    type: str
    default: ""
  volume:
    description: Name of the Docker volume.
    type: str
    default: sparkfleet-model
  image:
    description: Image of the container that reads through the volume.
    type: str
    default: ""
  witness:
    description: File of the tree that is read through the volume.
    type: str
    default: config.json
  docker_socket:
    description: Socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    description: Predicts.
    support: full
  diff_mode:
    description: The export file or the volume's options.
    support: full
"""

EXAMPLES = r"""
- name: Export the model
  sparkfleet.serving.nfs_share:
    state: exported
    path: /var/lib/sparkfleet/models/owner--name/0123456789abcdef0123456789abcdef01234567
    clients: [10.77.0.2]
"""

RETURN = r"""
volume:
  description: Name of the volume.
  type: str
  returned: always
server_started:
  description: C(nfs-server.service) was (check mode, would be) enabled and started.
  type: bool
  returned: always
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerApi, DockerConflict, DockerError, DockerNotFound
from ..module_utils.engram import mount_of, parse_mounts
from ..module_utils.nfs import (
    KERNEL_PARTS,
    check_path,
    export_file,
    export_text,
    foreign,
    missing_clients,
    mounts_below,
    ping,
    refuse_filesystem,
    refuse_kernel,
    refuse_other_server,
    take_back,
    tokens_below,
    volume_difference,
    volume_options,
    withdraw,
)
from ..module_utils.shares import LABEL
from ..module_utils.tree import TreeError, nearest_existing, write_atomic
from ..module_utils.weights_module import entry, need_tool, refusal

EXPORTS = Path("/etc/exports")
EXPORTS_D = Path("/etc/exports.d")
FILESYSTEMS = Path("/proc/filesystems")
MOUNTINFO = Path("/proc/self/mountinfo")
THREADS = Path("/proc/fs/nfsd/threads")
UNIT = "nfs-server.service"
#: Seconds of silence after which a container that only reads one name is given up.
READ_SECONDS = 60


def other_exports(own: str) -> dict[str, str]:
    """Exports files but our own one: name to text."""
    files = [EXPORTS, *(sorted(EXPORTS_D.glob("*.exports")) if EXPORTS_D.is_dir() else [])]
    return {
        str(item): item.read_text(encoding="utf-8") for item in files if item.is_file() and item.name != own
    }


def kernel_has(module: AnsibleModule, kind: str) -> None:
    """Refuse a kernel that neither has a part of NFS nor can load it."""
    filesystems = FILESYSTEMS.read_text(encoding="utf-8")
    loadable = False
    if kind not in filesystems.split():
        tool = module.get_bin_path("modprobe", opt_dirs=["/sbin", "/usr/sbin"])
        command = [str(tool), "--dry-run", "--quiet", KERNEL_PARTS[kind][1]]
        loadable = tool is not None and module.run_command(command)[0] == 0
    refuse_kernel(filesystems, kind, loadable)


def refuse_export(path: str, own: str) -> None:
    """Refuse a tree that cannot or must not be exported."""
    mounts = parse_mounts(MOUNTINFO.read_text(encoding="utf-8"))
    refuse_filesystem(path, mount_of(str(nearest_existing(Path(path)).resolve()), mounts).fstype)
    hidden = mounts_below(path, mounts)
    if hidden:
        raise TreeError(
            f"{', '.join(hidden)} is a mount of its own below {path}: a client would see an empty directory there; "
            "put the files into the tree itself"
        )
    tokens = tokens_below(Path(path))
    if tokens:
        raise TreeError(f"{path} holds {tokens[0]}, an access token; it is not exported. Move the token away")
    others = foreign(path, other_exports(own))
    if others:
        raise TreeError(f"{'; '.join(others)}; remove that line or do without this role")


def server_state(module: AnsibleModule) -> tuple[bool, bool]:
    """(the server runs, it will run after a boot). Refuses one that somebody else started."""
    active = module.run_command(["systemctl", "is-active", "--quiet", UNIT])[0] == 0
    refuse_other_server(THREADS.read_text(encoding="ascii") if THREADS.exists() else "", active)
    enabled: bool = module.run_command(["systemctl", "is-enabled", "--quiet", UNIT])[0] == 0
    return active, enabled


def export(module: AnsibleModule, params: dict[str, Any], path: str) -> dict[str, Any]:
    """Make our file, the server and the kernel's table say that ``path`` is exported: the module's result."""
    name = export_file(params["name"])
    own = EXPORTS_D / name
    before = own.read_text(encoding="utf-8") if own.exists() else ""
    wanted = export_text(path, params["clients"])
    refuse_export(path, name)
    kernel_has(module, "nfsd")
    exportfs = need_tool("exportfs", "nfs-kernel-server")
    active, enabled = server_state(module)
    starts = not (active and enabled)
    table = module.run_command([exportfs, "-s"])[1]
    absent = missing_clients(wanted, table)
    changed = before != wanted or starts or bool(absent)
    if changed and not module.check_mode:
        if not Path(path).is_dir():
            raise TreeError(f"{path} is no directory, so there is nothing to export")
        # The server first: where it does not start, nothing is left behind.
        if starts:
            code, _out, said = module.run_command(["systemctl", "start", UNIT])
            if code != 0:
                raise TreeError(f"{UNIT} does not start: {said.strip()}; see `systemctl status {UNIT}`")
            code, _out, said = module.run_command(["systemctl", "enable", UNIT])
            if code != 0:
                raise TreeError(f"{UNIT} cannot be enabled: {said.strip()}")
        if before != wanted:
            EXPORTS_D.mkdir(mode=0o755, exist_ok=True)
            write_atomic(own, wanted.encode())
        withdraw(module.run_command, exportfs, before, wanted)
        # Not -r: it would drop what somebody exported by hand.
        _code, _out, said = module.run_command([exportfs, "-a"])
        absent = missing_clients(wanted, module.run_command([exportfs, "-s"])[1])
        if absent:
            raise TreeError(
                f"exportfs -s does not show {path} for {absent[0][1]} after the export: {said.strip() or 'no message'}"
            )
        ping("127.0.0.1")
    diff = [entry(str(own), before, wanted)] if before != wanted else []
    diff += [entry(f"unit {UNIT}", "", "enabled and active\n")] if starts else []
    if changed and not diff:
        lines = "".join(f"{place} {client}\n" for place, client in absent)
        diff = [entry("kernel export table", "", lines)]
    return {"changed": changed, "diff": diff, "server_started": starts}


def unexport(module: AnsibleModule, params: dict[str, Any]) -> dict[str, Any]:
    """Take our export back."""
    own = EXPORTS_D / export_file(params["name"])
    before = own.read_text(encoding="utf-8") if own.exists() else ""
    if before and not module.check_mode:
        take_back(module.run_command, need_tool("exportfs", "nfs-kernel-server"), own)
    return {"changed": bool(before), "diff": [entry(str(own), before, "")] if before else []}


def inspect(api: DockerApi, volume: str) -> dict[str, Any] | None:
    try:
        return api.volume_inspect(volume)
    except DockerNotFound:
        return None


def ours(found: dict[str, Any]) -> bool:
    return (found.get("Labels") or {}).get(LABEL[0]) == LABEL[1]


def remove(api: DockerApi, volume: str) -> None:
    """Remove a volume of ours that no container uses."""
    try:
        api.volume_remove(volume)
    except DockerConflict as exc:
        raise TreeError(
            f"the volume {volume} is in use ({exc.message}); stop what uses it first, while the server still answers"
        ) from exc


def mount(module: AnsibleModule, params: dict[str, Any], path: str) -> dict[str, Any]:
    """Make the volume and read through it: the module's result."""
    volume, server = params["volume"], params["server"]
    wanted = volume_options(server, path)
    kernel_has(module, "nfs4")
    api = DockerApi(params["docker_socket"])
    found = inspect(api, volume)
    wrong = volume_difference(wanted, found.get("Options")) if found is not None else []
    if found is not None and wrong and not ours(found):
        raise TreeError(
            f"the volume {volume} exists with other options ({'; '.join(wrong)}); the options of a volume never "
            "change. Remove it when no container uses it"
        )
    changed = found is None or bool(wrong)
    if not module.check_mode:
        ping(server)
        if found is not None and wrong:
            remove(api, volume)
        if changed:
            api.volume_create(volume, options=wanted, labels=dict([LABEL]))
        try:
            read_through(api, params)
        except TreeError:
            if changed:
                with contextlib.suppress(DockerError):
                    api.volume_remove(volume)
            raise
    elif not changed:
        # Where the volume is new, its export may be as well.
        ping(server)
    before = "".join(
        f"{key}={value}\n" for key, value in sorted(((found or {}).get("Options") or {}).items())
    )
    after = "".join(f"{key}={value}\n" for key, value in sorted(wanted.items()))
    return {"changed": changed, "diff": [entry(f"volume {volume}", before, after)] if changed else []}


def read_through(api: DockerApi, params: dict[str, Any]) -> None:
    """Read a byte of the witness through the volume, in a container that lives as long as that takes."""
    spec = {
        "Image": params["image"],
        "Entrypoint": ["head", "-c", "1", f"/tree/{params['witness']}"],
        "Cmd": [],
        "Labels": dict([LABEL]),
        "HostConfig": {
            "NetworkMode": "none",
            "Binds": [f"{params['volume']}:/tree:ro"],
            "LogConfig": {
                "Type": "json-file"
            },  # whatever the daemon's default is: what it reads is its output
        },
    }
    where = f"{params['path']} of {params['server']}"
    try:
        code, out, said = api.run(f"sparkfleet-nfs-{os.getpid()}", spec, timeout=READ_SECONDS)
    except DockerNotFound as exc:
        raise TreeError(f"{exc}; name an image that this node has, by the variable for it") from exc
    except DockerError as exc:
        raise TreeError(
            f"{where} cannot be mounted: {exc}. It must be exported to this node's address on the same rail"
        ) from exc
    # Not one byte: Docker's log has three for one that is no text, as the first of a table may be.
    if code != 0 or not out:
        text = said.decode("utf-8", "replace").strip() or "it is empty"
        raise TreeError(
            f"{params['witness']} cannot be read in {where} ({text}): export the directory that holds it, readable "
            "for everybody"
        )


def unmount(module: AnsibleModule, params: dict[str, Any]) -> dict[str, Any]:
    """Remove the volume if it is ours. Never asks the server, which may be gone for good."""
    api = DockerApi(params["docker_socket"])
    found = inspect(api, params["volume"])
    changed = found is not None and ours(found)
    if changed and not module.check_mode:
        remove(api, params["volume"])
    return {
        "changed": changed,
        "diff": [entry(f"volume {params['volume']}", f"{params['volume']}\n", "")] if changed else [],
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["exported", "unexported", "mounted", "unmounted"],
                "required": True,
            },
            "name": {"type": "str", "default": "model"},
            "path": {"type": "path", "required": True},
            "clients": {"type": "list", "elements": "str", "default": []},
            "server": {"type": "str", "default": ""},
            "volume": {"type": "str", "default": "sparkfleet-model"},
            "image": {"type": "str", "default": ""},
            "witness": {"type": "str", "default": "config.json"},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
        required_if=[("state", "exported", ["clients"]), ("state", "mounted", ["server", "image"])],
    )
    module.run_command_environ_update = {"LC_ALL": "C"}
    params = module.params
    result: dict[str, Any] = {}
    try:
        path = check_path(params["path"])
        if params["state"] == "exported":
            result = export(module, params, path)
        elif params["state"] == "unexported":
            result = unexport(module, params)
        elif params["state"] == "mounted":
            result = mount(module, params, path)
        else:
            result = unmount(module, params)
    except (TreeError, DockerError, OSError, ValueError) as exc:
        refusal(module, exc)
    module.exit_json(**{"server_started": False, **result}, volume=params["volume"])


if __name__ == "__main__":
    main()
