#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Open and close a read-only share of one directory for the other nodes of a replica."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_share
short_description: A transient read-only share on the fabric
description:
  - Runs an rsync daemon as a transient systemd unit that serves one directory, read-only, on fabric addresses
    alone, to the named clients alone, as a user that owns nothing.
  - The unit ends by itself after O(max_seconds), also when the controller dies.
  - A share is a passing state of a run, so opening or closing it is never reported as a change.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  state:
    description: V(present) opens it, V(absent) closes it.
    type: str
    choices: [present, absent]
    default: present
  name:
    description: Name of the share, lower-case letters, digits and hyphens.
    type: str
    required: true
  path:
    description: Directory to serve. Needed for V(present).
    type: path
    default: ""
  listen:
    description: List of C(address) (of this node) and C(clients) (list of addresses).
    type: list
    elements: dict
    default: []
  port:
    description: TCP port.
    type: int
    default: 29873
  max_seconds:
    description: When the unit ends by itself.
    type: int
    default: 21600
attributes:
  check_mode:
    description: Does nothing in check mode.
    support: full
  diff_mode:
    description: A share is never a change.
    support: none
"""

EXAMPLES = r"""
- name: Let the worker read the checkpoint
  sparkfleet.serving.fabric_share:
    name: checkpoint
    path: /var/lib/sparkfleet/models
    listen:
      - address: 10.77.0.1
        clients: [10.77.0.2]
"""

RETURN = r"""
units:
  description: The transient units.
  type: list
  elements: str
  returned: always
"""

import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.fabric_copy import (
    PORT,
    RUN_DIR,
    answers,
    daemon_argv,
    daemon_config,
    parse_listen,
    unit_name,
)
from ..module_utils.tree import TreeError, write_atomic
from ..module_utils.weights_module import need_tool, refusal


def stop(module: AnsibleModule, unit: str) -> None:
    """Stop and forget a unit; an absent one is fine."""
    systemctl = need_tool("systemctl", "systemd")
    module.run_command([systemctl, "stop", unit])
    module.run_command([systemctl, "reset-failed", unit])


def start(module: AnsibleModule, unit: str, config: Path, address: str, port: int) -> None:
    """Start one share and wait until it answers."""
    argv = daemon_argv(unit, config, need_tool("rsync", "rsync"), module.params["max_seconds"])
    code, _out, err = module.run_command([need_tool(argv[0], "systemd"), *argv[1:]])
    deadline = time.monotonic() + 15
    while code == 0 and time.monotonic() < deadline:
        if answers(address, port):
            return
        time.sleep(0.1)
    _code, journal, _err = module.run_command(
        [need_tool("journalctl", "systemd"), "-u", unit, "-n", "5", "-o", "cat", "--no-pager"]
    )
    stop(module, unit)
    raise TreeError(
        f"the share on {address}:{port} does not answer: {(err or journal).strip()[-400:]}. Is {address} an "
        "address "
        "of this node's fabric, and may the port be used?"
    )


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "name": {"type": "str", "required": True},
            "path": {"type": "path", "default": ""},
            "listen": {"type": "list", "elements": "dict", "default": []},
            "port": {"type": "int", "default": PORT},
            "max_seconds": {"type": "int", "default": 21600},
        },
        supports_check_mode=True,
        required_if=[("state", "present", ("path", "listen"))],
    )
    module.run_command_environ_update = {"LC_ALL": "C"}
    params = module.params
    units = []
    try:
        if params["state"] == "absent":
            for number in range(max(1, len(params["listen"]))):
                units.append(unit_name(params["name"], number))
                if not module.check_mode:
                    stop(module, units[-1])
        else:
            path = Path(params["path"])
            if not module.check_mode and not path.is_dir():
                raise TreeError(f"{path} is not a directory, so it cannot be shared")
            for number, listen in enumerate(parse_listen(params["listen"])):
                unit = unit_name(params["name"], number)
                text = daemon_config(str(path), listen, params["port"])
                units.append(unit)
                if module.check_mode:
                    continue
                stop(module, unit)
                if answers(listen.address, params["port"]):
                    raise TreeError(
                        f"something else listens on {listen.address}:{params['port']}; choose another port "
                        "for the "
                        "share by the role's port variable"
                    )
                RUN_DIR.mkdir(mode=0o755, exist_ok=True)
                config = RUN_DIR / f"{unit.removesuffix('.service')}.conf"
                write_atomic(config, text.encode())
                start(module, unit, config, listen.address, params["port"])
    except (TreeError, OSError) as exc:
        refusal(module, exc)
    module.exit_json(changed=False, units=units)


if __name__ == "__main__":
    main()
