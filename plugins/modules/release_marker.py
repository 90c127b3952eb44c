#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Record what a replica runs on a node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release_marker
short_description: Record the release that a replica runs, and the one before
version_added: 1.0.0
author: The sparkfleet founders (@sparkfleet)
description:
  - Writes one JSON file a replica. Committing the release that is current changes nothing, not even its time.
  - Committing another release makes the current one the previous. Going back is committing the previous one.
options:
  state:
    description: V(committed) records a release, V(absent) removes the file, V(read) only reads it.
    type: str
    choices: [committed, absent, read]
    default: committed
  replica:
    description: Name of the replica.
    type: str
    required: true
  release:
    description:
      - The identity of what runs. C(image_content), C(model_lock), C(rank_file) and C(launch_hash) are
        required; C(paths) are the directories that it needs, for M(sparkfleet.serving.unused_data); further keys
        are kept as text.
    type: dict
  directory:
    description: Where the markers are kept.
    type: path
    default: /var/lib/sparkfleet/releases
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows the marker.
"""

EXAMPLES = r"""
- name: Record what the gates have passed
  sparkfleet.serving.release_marker:
    replica: pair-1
    release:
      image_content: 5b0c...
      model_lock: 91fe...
      rank_file: rank0of2-1f2e.bin
      launch_hash: 77aa...
  become: true
"""

RETURN = r"""
path: {description: The marker's file., returned: success, type: str}
current: {description: The current release with its time, or null., returned: success, type: dict}
previous: {description: The release before, or null., returned: success, type: dict}
"""

from datetime import datetime, timezone

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.host_io import Host, Refusal
from ..module_utils.release import ensure, marker_path, read


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["committed", "absent", "read"], "default": "committed"},
            "replica": {"type": "str", "required": True},
            "release": {"type": "dict"},
            "directory": {"type": "path", "default": "/var/lib/sparkfleet/releases"},
        },
        required_if=[("state", "committed", ("release",))],
        supports_check_mode=True,
    )
    params = module.params
    host = Host()
    try:
        if params["state"] == "read":
            marker = read(host, params["directory"], params["replica"]) or {}
            result = {
                "changed": False,
                "path": marker_path(params["directory"], params["replica"]),
                "current": marker.get("current"),
                "previous": marker.get("previous"),
            }
        else:
            result = ensure(
                host,
                params["directory"],
                params["replica"],
                params["release"] if params["state"] == "committed" else None,
                now=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                check=module.check_mode,
            )
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    module.exit_json(**result)


if __name__ == "__main__":
    main()
