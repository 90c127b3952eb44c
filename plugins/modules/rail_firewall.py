#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
---
module: rail_firewall
short_description: Let the ranks through ufw, on the rails only
version_added: 1.0.0
description:
  - Where ufw is active and no rule lets a rail's subnet in on the rail's interface, one rule a rail is added, with a
    comment that marks it. ufw is never switched on or off, and a rule without the comment is never removed.
  - Fails when a rule that is not ours keeps a rail closed, instead of going around it.
author:
  - The sparkfleet founders (@sparkfleet)
options:
  state:
    description: V(absent) removes the rules with our comment.
    type: str
    choices: [present, absent]
    default: present
  rails:
    description: The rails. A rule of ours for anything else is removed.
    type: list
    elements: dict
    default: []
    suboptions:
      netdev:
        description: Name of the interface.
        type: str
        required: true
      address:
        description: IPv4 address with prefix; its subnet is let in.
        type: str
        required: true
attributes:
  check_mode:
    description: Predicts the rules.
    support: full
  diff_mode:
    description: Shows the rules of ours before and after.
    support: full
"""

EXAMPLES = r"""
- name: Let the other ranks in on both rails
  sparkfleet.serving.rail_firewall:
    rails:
      - {netdev: enp1s0f0np0, address: 10.77.0.1/30}
      - {netdev: enP2p1s0f0np0, address: 10.77.1.1/30}
  become: true
"""

RETURN = r"""
active:
  description: Whether ufw drops what no rule lets in.
  type: bool
  returned: success
added:
  description: Rules that were (or would be) added, as words of ufw.
  type: list
  elements: str
  returned: success
removed:
  description: Rules of ours that were (or would be) removed.
  type: list
  elements: str
  returned: success
"""

import ipaddress
import socket

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import rail_firewall as core
from ..module_utils.probe.reader import Reader


def main() -> None:
    rail = {
        "netdev": {"type": "str", "required": True},
        "address": {"type": "str", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "rails": {"type": "list", "elements": "dict", "options": rail, "default": []},
        },
        supports_check_mode=True,
    )
    reader = Reader()
    try:
        wanted = [
            (row["netdev"], str(ipaddress.IPv4Interface(row["address"]).network))
            for row in module.params["rails"]
        ]
        if module.params["state"] == "absent":
            wanted = []
        wall, own = core.read(reader)
        add, remove = core.plan(wanted, wall, own)
        if not module.check_mode:
            core.apply(reader, add, remove)
    except (core.FirewallError, ValueError) as error:
        module.fail_json(msg=f"{socket.gethostname()}: {error}")
    after = [*(rule for rule in own if rule not in remove), *add]
    before, later = (
        "".join(f"ufw {' '.join(core.rule_words(*rule))}\n" for rule in rules) for rules in (own, after)
    )
    header = "rules of ufw with our comment"
    diff = [{"before_header": header, "after_header": header, "before": before, "after": later}]
    module.exit_json(
        changed=bool(add or remove),
        active=core.filters(wall),
        added=[" ".join(core.rule_words(*rule)) for rule in add],
        removed=[" ".join(core.rule_words(*rule)) for rule in remove],
        diff=diff if add or remove else [],
    )


if __name__ == "__main__":
    main()
