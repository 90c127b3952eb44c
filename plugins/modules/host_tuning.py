#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Kernel settings and limits that serving needs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_tuning
short_description: Set the few kernel settings and limits that serving needs
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Owns one file each under C(/etc/sysctl.d) and C(/etc/security/limits.d) and brings the running kernel to
    the same values.
  - A setting under O(at_least) is only ever raised, and a higher value in a file of somebody else is kept.
options:
  state:
    description: V(absent) removes the two files; the running values stay until the next boot.
    type: str
    choices: [present, absent]
    default: present
  at_least:
    description: Kernel settings with the least value that will do.
    type: dict
    default: {}
  equal:
    description: Kernel settings with an exact value.
    type: dict
    default: {}
  memlock_users:
    description: Accounts, groups (C(@name)) or V(*) that may lock unlimited memory in a new session.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows the files and the running values.
"""

EXAMPLES = r"""
- name: Room for the engine's asynchronous reads
  sparkfleet.serving.host_tuning:
    at_least:
      fs.aio-max-nr: 1048576
  become: true
"""

RETURN = r"""
tuning:
  description: Running values, and the swap of the node (equal swap on all nodes of a replica is a matter of
    parity).
  returned: success
  type: dict
  contains:
    sysctls: {description: Running value by name., type: dict}
    swap_total_bytes: {description: Size of the swap., type: int}
    swap_used_bytes: {description: Use of the swap., type: int}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host_io import Host, Refusal
from ..module_utils.host_tuning import ensure


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "at_least": {"type": "dict", "default": {}},
            "equal": {"type": "dict", "default": {}},
            "memlock_users": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        result = ensure(
            Host(),
            present=params["state"] == "present",
            at_least={name: int(value) for name, value in params["at_least"].items()},
            equal={name: str(value) for name, value in params["equal"].items()},
            memlock=params["memlock_users"],
            check=module.check_mode,
        )
    except ValueError as error:
        module.fail_json(msg=f"at_least takes whole numbers: {error}")
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    for text in result.pop("warnings"):
        module.warn(text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
