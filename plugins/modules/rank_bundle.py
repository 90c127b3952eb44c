#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What explains a failure of this node's rank, in one archive."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_bundle
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Gather what explains a failure of this node's rank
description:
  - Writes the log of the rank, its status, launch file, memory, kernel and unit lines into one archive on the
    node. Secrets are taken out.
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  directory:
    description: Where the archive is written; also where saved logs are looked for.
    type: path
    default: /var/lib/sparkfleet/logs
  keep:
    description: How many archives of this rank are kept.
    type: int
    default: 10
  docker_socket:
    description: Path of Docker's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
    description: Writes nothing and returns an empty path.
  diff_mode:
    support: none
    description: An archive of logs is no state of the node, so no change is reported.
"""

EXAMPLES = r"""
- name: Gather what explains the failure
  sparkfleet.serving.rank_bundle:
    replica: spark-a
  become: true
"""

RETURN = r"""
path:
  description: The archive on the node, empty when it could not be written.
  returned: always
  type: str
tail:
  description: Last log lines of the rank.
  returned: always
  type: list
  elements: str
message:
  description: What the agent said last.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerApi
from ..module_utils.host_io import Host, finish
from ..module_utils.rank_report import bundle


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "replica": {"type": "str", "required": True},
            "directory": {"type": "path", "default": "/var/lib/sparkfleet/logs"},
            "keep": {"type": "int", "default": 10},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode:
        module.exit_json(changed=False, path="", tail=[], message="")
    finish(
        module,
        lambda: bundle(
            Host(), DockerApi(params["docker_socket"]), params["replica"], params["directory"], params["keep"]
        ),
    )


if __name__ == "__main__":
    main()
