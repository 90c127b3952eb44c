#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Export a model tree read-only over NFS, and mount it as a Docker volume."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nfs_share
short_description: A model tree over NFS, read-only, to named peers
description:
  - V(exported) writes one file of ours in C(/etc/exports.d) and re-exports; V(mounted) makes the Docker
    volume on the other side and reads a file through a container.
  - Never touches C(/etc/exports) or files of others, and never exports a directory that holds a Hub token.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  state:
    description: What to make true. V(unexported) and V(unmounted) take it back.
    type: str
    choices: [exported, unexported, mounted, unmounted]
    required: true
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
    description: File of the tree that must be readable through the volume.
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
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerApi, DockerError, DockerNotFound
from ..module_utils.engram import mount_of, parse_mounts
from ..module_utils.nfs import (
    EXPORT_FILE,
    check_path,
    export_text,
    foreign,
    refuse_filesystem,
    refuse_kernel,
    tokens_below,
    volume_difference,
    volume_options,
)
from ..module_utils.tree import TreeError, nearest_existing, write_atomic
from ..module_utils.weights_module import HELPER_LABEL, need_tool, refusal

EXPORTS = Path("/etc/exports")
EXPORTS_D = Path("/etc/exports.d")
FILESYSTEMS = Path("/proc/filesystems")
MOUNTINFO = Path("/proc/self/mountinfo")


def other_exports() -> dict[str, str]:
    """Exports files of others: name to text."""
    files = [EXPORTS, *(sorted(EXPORTS_D.glob("*.exports")) if EXPORTS_D.is_dir() else [])]
    return {
        str(item): item.read_text(encoding="utf-8")
        for item in files
        if item.is_file() and item.name != EXPORT_FILE
    }


def export(module: AnsibleModule, path: str, wanted: str) -> tuple[bool, str]:
    """Make our export file say ``wanted`` (empty removes it): (changed, text before)."""
    own = EXPORTS_D / EXPORT_FILE
    before = own.read_text(encoding="utf-8") if own.exists() else ""
    if wanted:
        place = nearest_existing(Path(path)).resolve()
        refuse_filesystem(
            path, mount_of(str(place), parse_mounts(MOUNTINFO.read_text(encoding="utf-8"))).fstype
        )
        refuse_kernel(FILESYSTEMS.read_text(encoding="utf-8"), "nfsd")
        tokens = tokens_below(Path(path))
        if tokens:
            raise TreeError(
                f"{path} holds {tokens[0]}, an access token; it is not exported. Move the token away"
            )
        others = foreign(path, other_exports())
        if others:
            raise TreeError(
                f"{'; '.join(others)}, which already gives {path} away with options of its own; remove that "
                "line or "
                "do without this role"
            )
    if before == wanted:
        return False, before
    if not module.check_mode:
        exportfs = need_tool("exportfs", "nfs-kernel-server")
        if wanted:
            EXPORTS_D.mkdir(mode=0o755, exist_ok=True)
            write_atomic(own, wanted.encode())
        else:
            own.unlink()
        module.run_command([exportfs, "-ra"], check_rc=True)
        if wanted:
            _code, table, _err = module.run_command([exportfs, "-s"], check_rc=True)
            if path not in table:
                raise TreeError(
                    f"exportfs -s does not show {path} after the export; see journalctl -u nfs-server"
                )
    return True, before


def mount(module: AnsibleModule, params: dict[str, Any]) -> tuple[bool, str, str]:
    """Make the volume and read through it: (changed, before, after)."""
    wanted = volume_options(params["server"], params["path"])
    refuse_kernel(FILESYSTEMS.read_text(encoding="utf-8"), "nfs4")
    api = DockerApi(params["docker_socket"])
    after = "".join(f"{key}={value}\n" for key, value in wanted.items())
    try:
        found = api.volume_inspect(params["volume"])
    except DockerNotFound:
        found = None
    if found is not None:
        wrong = volume_difference(wanted, found.get("Options"))
        if wrong:
            raise TreeError(
                f"the volume {params['volume']} exists with other options ({'; '.join(wrong)}); the options "
                "of a volume "
                "never change. Remove it when no container uses it"
            )
        return False, after, after
    if not module.check_mode:
        api.volume_create(params["volume"], options=wanted, labels={HELPER_LABEL: "nfs"})
        spec = {
            "Image": params["image"],
            "Entrypoint": ["test", "-f", f"/tree/{params['witness']}"],
            "Cmd": [],
            "Labels": {HELPER_LABEL: "nfs"},
            "HostConfig": {"NetworkMode": "none", "Binds": [f"{params['volume']}:/tree:ro"]},
        }
        try:
            code, _out, _err = api.run(f"sparkfleet-nfs-{os.getpid()}", spec, timeout=60)
        except DockerError as exc:
            api.volume_remove(params["volume"])
            raise TreeError(f"the export of {params['server']} cannot be mounted: {exc}") from exc
        if code != 0:
            api.volume_remove(params["volume"])
            raise TreeError(
                f"{params['witness']} cannot be seen through the volume: export another directory"
            )
    return True, "", after


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["exported", "unexported", "mounted", "unmounted"],
                "required": True,
            },
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
    before = after = ""
    try:
        path = check_path(params["path"])
        if params["state"] == "exported":
            after = export_text(path, params["clients"])
            changed, before = export(module, path, after)
        elif params["state"] == "unexported":
            changed, before = export(module, path, "")
        elif params["state"] == "mounted":
            changed, before, after = mount(module, params)
        else:
            api = DockerApi(params["docker_socket"])
            changed = any(one["Name"] == params["volume"] for one in api.volume_list(f"{HELPER_LABEL}=nfs"))
            before = f"{params['volume']}\n" if changed else ""
            if changed and not module.check_mode:
                api.volume_remove(params["volume"])
    except (TreeError, DockerError, OSError, ValueError) as exc:
        refusal(module, exc)
    module.exit_json(
        changed=changed,
        volume=params["volume"],
        diff={"before": before, "after": after} if changed else {},
    )


if __name__ == "__main__":
    main()
