#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The Docker engine of a node, and the nvidia runtime in it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_runtime
short_description: Know the Docker engine of a node and register the nvidia runtime
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Reads version, architecture and image store of the engine. No package is installed, replaced or upgraded.
  - With O(nvidia_runtime) the runtime is merged into C(/etc/docker/daemon.json) and taken over by a reload,
    which keeps
    containers running. Keys of others survive; a file that is not valid JSON is refused and left as it is.
options:
  nvidia_runtime:
    description: Register the runtime C(nvidia). V(false) leaves the file alone.
    type: bool
    default: false
  nvidia_path:
    description: Name or path of the runtime's program.
    type: str
    default: nvidia-container-runtime
  users:
    description: Accounts that shall be members of the group C(docker). None is ever removed from it.
    type: list
    elements: str
    default: []
  minimum_version:
    description: The oldest acceptable Docker.
    type: str
    default: "20.10"
  allow_restart:
    description: Restart Docker when a reload does not bring the runtime. Refused while any container runs.
    type: bool
    default: false
  socket:
    description: Path of the engine's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows daemon.json, the runtimes and the new members.
"""

EXAMPLES = r"""
- name: Register the nvidia runtime
  sparkfleet.serving.container_runtime:
    nvidia_runtime: true
    users: [spark]
  become: true
"""

RETURN = r"""
runtime:
  description: The engine after the run (in check mode before it).
  returned: success
  type: dict
  contains:
    version: {description: Version of the engine., type: str}
    api_version: {description: Version of its API., type: str}
    architecture: {description: Architecture as Docker names it., type: str}
    store: {description: Image store, V(classic) or V(containerd)., type: str}
    driver: {description: Storage driver or snapshotter., type: str}
    root_dir: {description: Where the engine keeps its data., type: str}
    runtimes: {description: Names of the registered runtimes., type: list, elements: str}
    default_runtime: {description: The default among them., type: str}
    live_restore: {description: Whether containers survive a restart of the engine., type: bool}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.container_runtime import ensure
from ..module_utils.host_io import Host, finish


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "nvidia_runtime": {"type": "bool", "default": False},
            "nvidia_path": {"type": "str", "default": "nvidia-container-runtime"},
            "users": {"type": "list", "elements": "str", "default": []},
            "minimum_version": {"type": "str", "default": "20.10"},
            "allow_restart": {"type": "bool", "default": False},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    finish(
        module,
        lambda: ensure(
            Host(),
            nvidia=params["nvidia_runtime"],
            nvidia_path=params["nvidia_path"],
            users=params["users"],
            minimum=params["minimum_version"],
            allow_restart=params["allow_restart"],
            socket=params["socket"],
            check=module.check_mode,
        ),
    )


if __name__ == "__main__":
    main()
