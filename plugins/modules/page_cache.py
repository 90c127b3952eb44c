#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Give the page cache back before a load."""

from __future__ import annotations

DOCUMENTATION = r"""
module: page_cache
short_description: Give the page cache back before weights are loaded
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Writes dirty pages, then drops clean caches, when little memory is free and no rank of this collection
    runs.
  - It is an action on the moment, not a setting, and never reports a change.
options:
  min_free_gib:
    description: Drop only when MemFree is under this.
    type: float
    required: true
  socket:
    description: Path of the Docker socket, for the question whether a rank runs.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
    description: Says whether it would drop, and drops nothing.
  diff_mode:
    support: none
    description: There is nothing to show.
"""

EXAMPLES = r"""
- name: Give the page cache back before the ranks load
  sparkfleet.serving.page_cache:
    min_free_gib: 104
  become: true
"""

RETURN = r"""
dropped: {description: Whether caches were dropped (in check mode whether they would be)., returned: success,
  type: bool}
why: {description: Why not., returned: success, type: str}
free_bytes: {description: MemFree afterwards., returned: success, type: int}
freed_bytes: {description: Growth of MemFree., returned: success, type: int}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host_io import Host, finish
from ..module_utils.page_cache import ensure


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "min_free_gib": {"type": "float", "required": True},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    finish(
        module,
        lambda: ensure(
            Host(),
            min_free_gib=module.params["min_free_gib"],
            socket=module.params["socket"],
            check=module.check_mode,
        ),
    )


if __name__ == "__main__":
    main()
