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
    description: Paths that stay although no release uses them yet.
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
  description: C(path), C(what) and C(bytes) (that removing it frees) of what is unused, or was before it went.
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

from ..module_utils import prune
from ..module_utils.docker_api import DockerApi, DockerError
from ..module_utils.tree import TreeError
from ..module_utils.weights_module import entry, lock_dir, refusal

EXPORTS = (Path("/etc/exports"), Path("/etc/exports.d"))


def texts(paths: list[Path]) -> dict[str, str]:
    """Path to text; one that is not readable as text is an error that says so."""
    return {str(path): path.read_text(encoding="utf-8") for path in paths}


def everything_used(params: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(path to user, what is unknown)."""
    markers = sorted(Path(params["releases"]).glob("*.json"))
    uses, unknown = prune.marker_uses({path.name: path.read_text(encoding="utf-8") for path in markers})
    launches = sorted(Path(params["launches"]).glob("*/launch.json"))
    more, blind = prune.launch_uses({path.parent.name: path.read_text(encoding="utf-8") for path in launches})
    uses.update(more)
    unknown += blind
    if Path(params["docker_socket"]).exists():
        try:
            uses.update(prune.container_uses(DockerApi(params["docker_socket"]).container_list()))
        except DockerError as exc:
            unknown.append(f"Docker does not say what its containers mount ({exc})")
    exports = [path for path in EXPORTS if path.is_file()]
    exports += sorted(path for folder in EXPORTS if folder.is_dir() for path in folder.glob("*.exports"))
    uses.update(prune.export_uses(texts(exports).values()))
    uses.update(dict.fromkeys(params["keep"], "the inventory"))
    return uses, unknown


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
        uses, unknown = everything_used(params)
        unknown += [
            f"a transfer is running (lock {name})" for name in prune.held_locks(lock_dir(params["data_dir"]))
        ]
        found = prune.survey(data)
        prune.mark(found, uses)
        unused = [item for item in found if item.unused]
        sizes = prune.freed_bytes([item.path for item in unused])
        changed = bool(unused) and params["state"] == "absent"
        if changed and unknown:
            raise TreeError(
                f"nothing is removed, because not everything is known: {'; '.join(unknown)}. Run the site again, "
                "which records it, or correct what is named"
            )
        if changed and not module.check_mode:
            for item in unused:
                prune.remove(item.path, data)
    except (TreeError, OSError, ValueError) as exc:
        refusal(module, exc)
    module.exit_json(
        changed=changed,
        unused=[{"path": str(one.path), "what": one.why, "bytes": sizes[one.path]} for one in unused],
        used=[{"path": str(one.path), "by": one.used_by} for one in found if one.used_by],
        foreign=[
            {"path": str(one.path), "files": one.foreign[:10]}
            for one in found
            if one.foreign and not one.used_by
        ],
        unknown=unknown,
        bytes=sum(sizes.values()),
        diff=[entry(f"tree {one.path}", f"{one.why} {sizes[one.path]}\n") for one in unused]
        if changed
        else [],
    )


if __name__ == "__main__":
    main()
