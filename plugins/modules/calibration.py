#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keep what a replica's first start measured."""

from __future__ import annotations

DOCUMENTATION = r"""
module: calibration
short_description: Keep the memory constants that a replica's own start measured
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Computes from MemAvailable before a start, when idle and at its lowest the constants of every rank of a replica, and
    keeps them in one JSON file on its head, where the module M(sparkfleet.serving.tensor_plan) takes them from.
  - They are stored once for the same plan, build and image, so a second run changes nothing, and anew when one of
    these differs or O(renew) asks for it.
  - Readings that cannot be of this replica alone are told and not kept; with O(renew) they fail.
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  directory:
    description: Where calibrations are kept.
    type: path
    default: /var/lib/sparkfleet/calibration
  plan:
    description: Digest of the plan that runs.
    type: str
    required: true
  engine_build:
    description: What builds the engine's image, as the plan gets it.
    type: str
    default: ''
  image_content:
    description: Content of the image that runs. Empty where it is not known yet, as in check mode.
    type: str
    default: ''
  terms:
    description: The plan's budget terms in rank order.
    type: list
    elements: dict
    required: true
  readings:
    description:
      - "C(before), C(idle) and C(lowest) in bytes in rank order, as the module M(sparkfleet.serving.endpoint_check)
        returns them in RV(sparkfleet.serving.endpoint_check#module:memory)."
    type: list
    elements: dict
    default: []
  starting:
    description: In check mode, a start goes before that will give readings.
    type: bool
    default: false
  busy:
    description: Requests that run now. Memory is not idle then, and nothing is kept.
    type: int
    default: 0
  renew:
    description:
      - Measure again although there are constants, after a representative load. The low-water mark counts then.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it. With O(starting) it predicts that readings will come.
  diff_mode:
    support: full
    description: Shows the file.
"""

EXAMPLES = r"""
- name: Keep what the first start measured
  sparkfleet.serving.calibration:
    replica: pair-1
    plan: "{{ plan.digest }}"
    image_content: "{{ image_result.content }}"
    terms: "{{ plan.budget.terms }}"
    readings: "{{ readings }}"
  become: true
"""

RETURN = r"""
path: {description: The file., returned: success, type: str}
ranks: {description: "The constants that are kept, by rank number.", returned: success, type: dict}
why_not: {description: "Why nothing was kept, where so.", returned: success, type: str}
"""

from datetime import datetime, timezone

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.calibration import ensure
from ..module_utils.host_io import Host, Refusal
from ..module_utils.safetensors import PlanError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "replica": {"type": "str", "required": True},
            "directory": {"type": "path", "default": "/var/lib/sparkfleet/calibration"},
            "plan": {"type": "str", "required": True},
            "engine_build": {"type": "str", "default": ""},
            "image_content": {"type": "str", "default": ""},
            "terms": {"type": "list", "elements": "dict", "required": True},
            "readings": {"type": "list", "elements": "dict", "default": []},
            "starting": {"type": "bool", "default": False},
            "busy": {"type": "int", "default": 0},
            "renew": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        result = ensure(Host(), module.params, now=now, check=module.check_mode)
    except PlanError as error:
        module.fail_json(msg=str(error), refusal=error.as_dict())
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    if result["why_not"]:
        module.warn(f"no calibration is kept: {result['why_not']}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
