#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Run without a desktop."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headless
short_description: Start no desktop at boot, and say what still holds memory
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Sets the default target of systemd. Nothing is removed, and O(state=desktop) brings everything back.
  - With O(now) the running desktop is left too, unless that would stop Docker, the way in, or a unit of this
    collection.
options:
  state:
    description: What the next boot starts.
    type: str
    choices: [headless, desktop]
    default: headless
  now:
    description: Change the running system too (C(systemctl isolate)).
    type: bool
    default: false
  stop_units:
    description:
      - Further units to stop and disable, by full name. A unit that does not exist is passed over.
      - With O(state=desktop) those of them that are disabled are enabled and started again.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows the link of the default target and the units.
"""

EXAMPLES = r"""
- name: No desktop from the next boot on, and none now
  sparkfleet.serving.headless:
    now: true
  become: true
"""

RETURN = r"""
headless:
  description: The state after the run (in check mode before it).
  returned: success
  type: dict
  contains:
    default_target: {description: What the next boot starts., type: str}
    desktop_running: {description: Whether a desktop or display manager runs., type: bool}
    available_bytes: {description: MemAvailable., type: int}
    freed_bytes: {description: Growth of MemAvailable by this run., type: int}
    holders: {description: Names of processes with most resident memory, largest first., type: list,
      elements: dict}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.headless import ensure
from ..module_utils.host_io import Host, finish


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["headless", "desktop"], "default": "headless"},
            "now": {"type": "bool", "default": False},
            "stop_units": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    finish(
        module,
        lambda: ensure(
            Host(),
            desktop=module.params["state"] == "desktop",
            now=module.params["now"],
            stop_units=module.params["stop_units"],
            check=module.check_mode,
        ),
    )


if __name__ == "__main__":
    main()
