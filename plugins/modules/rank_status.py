#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Status of this node's rank."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_status
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Tell how this node's rank of a replica is
description:
  - Reads launch file, unit, container, GID index and memory of this node. On the head it also finds out
    whether the replica really serves, by its counters while requests run and by a short generation otherwise.
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  probe:
    description: V(auto) makes a generation only when no request runs, V(always) makes one, V(never) only
    reads. type: str
    choices: [auto, always, never]
    default: auto
  generation_s:
    description: Seconds that a generation may take.
    type: float
    default: 60
  docker_socket:
    description: Path of Docker's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
    description: Reads only.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: How is the rank?
  sparkfleet.serving.rank_status:
    replica: spark-a
  become: true
"""

RETURN = r"""
status:
  description:
    - "C(verdict) of the rank (running, starting, stopping, stopped, failed, stale, foreign, absent, unknown),
      C(rank), C(launch), C(contract), C(unit), C(container), C(agent), C(gid) at the start and now,
      C(memory_available_gib), C(guard) and C(notes)."
    - "On the head of a running replica also C(serving) (serving, stalled, starting, running), C(why) and
      C(health)."
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerApi
from ..module_utils.host_io import Host, Refusal
from ..module_utils.rank_report import status


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "replica": {"type": "str", "required": True},
            "probe": {"type": "str", "choices": ["auto", "always", "never"], "default": "auto"},
            "generation_s": {"type": "float", "default": 60},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        found = status(
            Host(),
            DockerApi(params["docker_socket"]),
            params["replica"],
            params["probe"],
            params["generation_s"],
        )
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    module.exit_json(changed=False, status=found)


if __name__ == "__main__":
    main()
