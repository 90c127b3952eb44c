#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What no release uses: listed, and removed on request."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unused_data
short_description: List or remove model files that no release uses
description:
  - Looks at every checkpoint, table, kit, rank file, token map, kernel cache and unfinished transfer that this
    collection laid down below its data directory, and says who uses it.
  - Used is what a release marker (current or previous), a launch file, a container, an NFS export or O(keep)
    names. Unknown is never unused. Nothing else below the data directory is ever looked at.
  - NFS exports and Docker volumes that the role C(engram) made for tables over NFS are looked at as well.
    An export is used while a client of it is connected, too.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  state:
    description:
      - V(listed) only looks.
      - V(absent) removes what is unused.
    type: str
    choices: [listed, absent]
    default: listed
  data_dir:
    description: Data directory of sparkfleet.
    type: path
    default: /var/lib/sparkfleet
  releases:
    description: Where the release markers are kept.
    type: path
    default: /var/lib/sparkfleet/releases
  launches:
    description: Directory with one directory a replica that holds its launch file.
    type: path
    default: /etc/sparkfleet/replicas
  keep:
    description:
      - Paths that stay although no release uses them yet. C(export:NAME) names an NFS export, C(volume:NAME) a Docker
        volume.
    type: list
    elements: path
    default: []
  docker_socket:
    description: Socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    description: Says what would be removed.
    support: full
  diff_mode:
    description: The directories that go.
    support: full
"""

EXAMPLES = r"""
- name: What could go
  sparkfleet.serving.unused_data:
"""

RETURN = r"""
unused:
  description:
    - C(path), C(what) and C(bytes) (that removing it frees) of what is unused, or was before it went. The path of an
      export is its file, that of a volume C(volume:NAME).
  type: list
  elements: dict
  returned: always
used:
  description: C(path) and C(by).
  type: list
  elements: dict
  returned: always
foreign:
  description: C(path) of trees that hold files which nobody here wrote, with their C(files). They stay.
  type: list
  elements: dict
  returned: always
unknown:
  description: What could not be asked. Nothing is removed while there is any.
  type: list
  elements: str
  returned: always
bytes:
  description: Bytes that removing all of it frees.
  type: int
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import prune, shares
from ..module_utils.docker_api import DockerApi, DockerConflict, DockerError
from ..module_utils.nfs import take_back
from ..module_utils.shares import Share
from ..module_utils.tree import TreeError
from ..module_utils.weights_module import entry, lock_dir, need_tool, refusal

EXPORTS = Path("/etc/exports")
EXPORTS_D = Path("/etc/exports.d")
NFS_CLIENTS = Path("/proc/fs/nfsd/clients")


def everything_used(params: dict[str, Any]) -> tuple[dict[str, str], list[Share], list[str]]:
    """(path or key of a share to user, shares that nobody uses, what is unknown)."""
    markers = sorted(Path(params["releases"]).glob("*.json"))
    uses, unknown = prune.marker_uses({path.name: path.read_text(encoding="utf-8") for path in markers})
    launches = sorted(Path(params["launches"]).glob("*/launch.json"))
    more, blind = prune.launch_uses({path.parent.name: path.read_text(encoding="utf-8") for path in launches})
    uses.update(more)
    unknown += blind
    uses.update(dict.fromkeys(params["keep"], "the inventory"))
    found = shares.exports(EXPORTS_D)
    if Path(params["docker_socket"]).exists():
        try:
            api = DockerApi(params["docker_socket"])
            uses.update(prune.container_uses(api.container_list()))
            found += shares.volumes(api.volume_list("=".join(shares.LABEL)))
        except DockerError as exc:
            unknown.append(f"Docker does not say what its containers mount ({exc})")
    clients = shares.connected(NFS_CLIENTS)
    idle = [one for one in found if not shares.user_of(one, uses, clients)]
    # An export that goes as well holds its tree no more.
    going = {one.place for one in idle}
    files = [EXPORTS, *(sorted(EXPORTS_D.glob("*.exports")) if EXPORTS_D.is_dir() else [])]
    texts = [path.read_text(encoding="utf-8") for path in files if path.is_file() and str(path) not in going]
    uses.update(prune.export_uses(texts))
    return uses, idle, unknown


def take(module: AnsibleModule, share: Share) -> None:
    """Take an export or a volume of ours back."""
    if share.key.startswith(shares.EXPORT):
        take_back(module.run_command, need_tool("exportfs", "nfs-kernel-server"), Path(share.place))
        return
    try:
        DockerApi(module.params["docker_socket"]).volume_remove(share.place)
    except DockerConflict as exc:
        raise TreeError(
            f"the volume {share.place} is in use ({exc.message}); stop what uses it first"
        ) from exc


def path_of(share: Share) -> str:
    """What a row calls a share."""
    return share.place if share.key.startswith(shares.EXPORT) else share.key


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["listed", "absent"], "default": "listed"},
            "data_dir": {"type": "path", "default": "/var/lib/sparkfleet"},
            "releases": {"type": "path", "default": "/var/lib/sparkfleet/releases"},
            "launches": {"type": "path", "default": "/etc/sparkfleet/replicas"},
            "keep": {"type": "list", "elements": "path", "default": []},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    data = Path(params["data_dir"])
    try:
        uses, idle, unknown = everything_used(params)
        unknown += [
            f"a transfer is running (lock {name})" for name in prune.held_locks(lock_dir(params["data_dir"]))
        ]
        found = prune.survey(data)
        prune.mark(found, uses)
        unused = [item for item in found if item.unused]
        sizes = prune.freed_bytes([item.path for item in unused])
        changed = bool(unused or idle) and params["state"] == "absent"
        if changed and unknown:
            raise TreeError(
                f"nothing is removed, because not everything is known: {'; '.join(unknown)}. Run the site again, "
                "which records it, or correct what is named"
            )
        if changed and not module.check_mode:
            for share in idle:
                take(module, share)
            for item in unused:
                prune.remove(item.path, data)
    except (TreeError, DockerError, OSError, ValueError) as exc:
        refusal(module, exc)
    rows = [{"path": path_of(one), "what": one.what, "bytes": 0} for one in idle]
    rows += [{"path": str(one.path), "what": one.why, "bytes": sizes[one.path]} for one in unused]
    diff = [entry(one.place if one.tree else f"volume {one.place}", f"{one.what}\n") for one in idle]
    diff += [entry(f"tree {one.path}", f"{one.why} {sizes[one.path]}\n") for one in unused]
    module.exit_json(
        changed=changed,
        unused=rows,
        used=[{"path": str(one.path), "by": one.used_by} for one in found if one.used_by],
        foreign=[
            {"path": str(one.path), "files": one.foreign[:10]}
            for one in found
            if one.foreign and not one.used_by
        ],
        unknown=unknown,
        bytes=sum(sizes.values()),
        diff=diff if changed else [],
    )


if __name__ == "__main__":
    main()
