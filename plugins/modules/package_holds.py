#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Hold packages that must not be upgraded behind a running replica."""

from __future__ import annotations

DOCUMENTATION = r"""
module: package_holds
short_description: Hold kernel, driver, firmware and container packages
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Holds the installed packages that match, and names them to unattended-upgrades.
  - V(released) lifts only the holds that were set by this module.
options:
  state:
    description: Whether the packages are held.
    type: str
    choices: [held, released]
    default: held
  patterns:
    description:
      - Shell patterns of package names. None of them installs anything.
      - Needed to hold; a release goes by its own record.
    type: list
    elements: str
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows each package and the two files.
"""

EXAMPLES = r"""
- name: Keep the kernel
  sparkfleet.serving.package_holds:
    patterns: ["linux-image-*"]
  become: true
"""

RETURN = r"""
holds:
  description: Names of held packages.
  returned: success
  type: dict
  contains:
    ours: {description: Held by this module., type: list, elements: str}
    others: {description: Held by somebody else., type: list, elements: str}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host_io import Host, finish
from ..module_utils.package_holds import ensure


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
            "patterns": {"type": "list", "elements": "str"},
        },
        required_if=[("state", "held", ["patterns"])],
        supports_check_mode=True,
    )
    finish(
        module,
        lambda: ensure(
            Host(),
            held=module.params["state"] == "held",
            patterns=module.params["patterns"] or [],
            check=module.check_mode,
        ),
    )


if __name__ == "__main__":
    main()
