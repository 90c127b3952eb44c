#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The memory and peer guard of a node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: guard
short_description: Run the guard that stops a rank before memory runs out
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Writes the guard's settings and its unit, and keeps it enabled and running. The agent that the unit starts
    has to be there.
  - Looks for other programs that end processes for memory and compares them with the redline.
options:
  state:
    description: Whether the guard runs.
    type: str
    choices: [present, absent]
    default: present
  agent:
    description: Path of the node agent. Required with O(state=present).
    type: str
  defaults:
    description: Settings of all replicas on the node, by the names of the guard's policy.
    type: dict
    default: {}
  replicas:
    description: Settings by replica that differ.
    type: dict
    default: {}
  records:
    description: Folder of the records with the last samples.
    type: path
    default: /var/lib/sparkfleet/guard
  killers:
    description:
      - What to do about another killer whose rules conflict. V(refuse), V(report) it as a warning,
        V(adjust) its floor to the hard redline by a drop-in beside its unit, or V(disable) its unit.
    type: str
    choices: [refuse, report, adjust, disable]
    default: refuse
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows the settings and the unit.
"""

EXAMPLES = r"""
- name: Guard this node
  sparkfleet.serving.guard:
    agent: /usr/local/lib/sparkfleet/1.0.0-abc/sparkfleet-node
    defaults:
      redline_gib: 4
  become: true
"""

RETURN = r"""
guard:
  description: The guard after the run (in check mode before it).
  returned: success
  type: dict
  contains:
    active: {description: Whether it runs., type: bool}
    enabled: {description: Whether it starts at boot., type: bool}
    killers: {description: Other killers found active, each with its floor and conflict., type: list,
      elements: dict}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.guard_setup import ensure
from ..module_utils.host_io import Host, finish
from ..module_utils.memory_guard import RECORDS


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "agent": {"type": "str"},
            "defaults": {"type": "dict", "default": {}},
            "replicas": {"type": "dict", "default": {}},
            "records": {"type": "path", "default": RECORDS},
            "killers": {
                "type": "str",
                "choices": ["refuse", "report", "adjust", "disable"],
                "default": "refuse",
            },
        },
        required_if=[("state", "present", ("agent",))],
        supports_check_mode=True,
    )
    params = module.params
    finish(
        module,
        lambda: ensure(
            Host(),
            present=params["state"] == "present",
            agent=params["agent"] or "",
            defaults=params["defaults"],
            replicas=params["replicas"],
            killers=params["killers"],
            records=params["records"],
            check=module.check_mode,
        ),
    )


if __name__ == "__main__":
    main()
