#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The lock of a replica on this node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: replica_lock
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Keep two runs from handling one replica at once
description:
  - Takes or gives back the lock file of a replica on this node. A lock of another run is refused with its
    owner, age and run id; only that id breaks it.
options:
  state:
    description: V(present) takes the lock, V(absent) gives it back.
    type: str
    choices: [present, absent]
    default: present
  replica:
    description: Name of the replica.
    type: str
    required: true
  run:
    description: Id of this run.
    type: str
    required: true
  owner:
    description: Who runs this.
    type: str
    default: unknown
  origin:
    description: The host that this is run from.
    type: str
    default: unknown
  break_lock:
    description: Run id of a dead run whose lock is to be broken.
    type: str
    default: ''
  directory:
    description: Where locks are.
    type: path
    default: /var/lib/sparkfleet/locks
attributes:
  check_mode:
    support: full
    description: Never takes a lock; reports success.
  diff_mode:
    support: none
    description: A lock lives as long as a run, so it is no change of the node and never reported as one.
"""

EXAMPLES = r"""
- name: Take the lock
  sparkfleet.serving.replica_lock:
    replica: spark-a
    run: 3e1b6a
    owner: ops
    origin: laptop
  become: true
"""

RETURN = r"""
holder:
  description: Who holds the lock afterwards.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host_io import Host, Refusal
from ..module_utils.replica_lock import acquire, lock_path, read, release


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "replica": {"type": "str", "required": True},
            "run": {"type": "str", "required": True},
            "owner": {"type": "str", "default": "unknown"},
            "origin": {"type": "str", "default": "unknown"},
            "break_lock": {"type": "str", "default": ""},
            "directory": {"type": "path", "default": "/var/lib/sparkfleet/locks"},
        },
        supports_check_mode=True,
    )
    params = module.params
    host = Host()
    path = lock_path(params["replica"], params["directory"])
    try:
        if module.check_mode:
            holder = read(host, path)
        elif params["state"] == "present":
            holder = acquire(
                host, path, params["run"], params["owner"], params["origin"], force=params["break_lock"]
            )["holder"]
        else:
            holder = release(host, path, params["run"])["holder"]
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    module.exit_json(changed=False, holder=holder)


if __name__ == "__main__":
    main()
