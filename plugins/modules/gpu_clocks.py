#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ceiling of the graphics clock, now and at every boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_clocks
short_description: Hold the graphics clock of a GB10 under a ceiling
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Installs one systemd unit that sets the ceiling after C(nvidia-persistenced) at every boot, and starts it
    now.
  - The driver has no read-back for a locked clock. The state is therefore the text of the unit, that it is
    enabled and
    active, and the line with the confirmed pair that this very run of the unit left in the journal. A clock
    that reads
    above the ceiling proves that the lock was lost, and it is set again.
  - A lock is a ceiling only; a floor is accepted by the driver and not honoured.
options:
  state:
    description: V(present) sets the ceiling, V(absent) removes the unit and frees the clock.
    type: str
    choices: [present, absent]
    default: present
  min_mhz:
    description: Lower end of the pair.
    type: int
    default: 0
  max_mhz:
    description: The ceiling.
    type: int
    default: 2200
  nvidia_smi:
    description: Name or path of the tool.
    type: str
    default: nvidia-smi
  foreign:
    description:
      - What to do about a unit of somebody else that sets the clock. V(report) leaves it and refuses when
        its ceiling differs.
      - V(take_over) disables it and keeps its file.
    type: str
    choices: [report, take_over]
    default: report
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows the unit's text and the state of the unit.
"""

EXAMPLES = r"""
- name: Hold the clock under 2200 MHz
  sparkfleet.serving.gpu_clocks:
    max_mhz: 2200
  become: true
"""

RETURN = r"""
clocks:
  description: What is known of the lock after the run (in check mode before it).
  returned: success
  type: dict
  contains:
    requested: {description: The wanted pair in MHz., type: list, elements: int}
    confirmed: {description: The pair that the driver confirmed in this run of the unit., type: list,
      elements: int}
    verdict:
      description: What one reading says (V(in_force) under load, V(unproven) when idle, V(lost),
        V(low_power), V(unknown)).
      type: str
    reading: {description: The reading itself; what the driver does not give is null., type: dict}
    reasons: {description: Why the lock was set (again)., type: list, elements: str}
    foreign: {description: Units of others that set a clock., type: list, elements: dict}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.clocks import ensure_absent, ensure_present
from ..module_utils.host_io import Host, Refusal


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "min_mhz": {"type": "int", "default": 0},
            "max_mhz": {"type": "int", "default": 2200},
            "nvidia_smi": {"type": "str", "default": "nvidia-smi"},
            "foreign": {"type": "str", "choices": ["report", "take_over"], "default": "report"},
        },
        supports_check_mode=True,
    )
    params = module.params
    host = Host()
    try:
        if params["state"] == "absent":
            result = ensure_absent(host, params["nvidia_smi"], module.check_mode)
        else:
            if not 0 <= params["min_mhz"] <= params["max_mhz"]:
                raise Refusal(
                    "the clock pair is not a range",
                    f"{params['min_mhz']},{params['max_mhz']}",
                    "0 <= min_mhz <= max_mhz",
                    "set gpu_clocks_max_mhz",
                )
            result = ensure_present(
                host,
                params["min_mhz"],
                params["max_mhz"],
                nvidia_smi=params["nvidia_smi"],
                foreign_policy=params["foreign"],
                check=module.check_mode,
            )
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    for text in result.pop("warnings"):
        module.warn(text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
