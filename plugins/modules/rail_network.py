#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
---
module: rail_network
short_description: Addresses and MTU of the rails of a DGX Spark, with a way back that needs nobody
version_added: 1.0.0
description:
  - Writes one netplan file, C(/etc/netplan/40-cx7.yaml), for the ConnectX-7 interfaces that carry a cable,
    and makes
    it true. Exactly one IPv4 address a rail remains.
  - Before anything is changed netplan validates the files in a temporary root, what is there is saved, and a
    timer is
    armed that brings it back. O(state=confirmed) disarms it after all peers have answered full-size packets.
  - Refuses when a rail carries the controller or the default route, when another file configures a rail, and
    when a rank
    of this collection runs and something would change.
author:
  - The sparkfleet founders (@sparkfleet)
options:
  state:
    description:
      - V(present) makes the addresses so and arms the rollback timer if something changed.
      - V(answered) pings all peers on all rails, and leaves the timer armed.
      - V(confirmed) pings them again and disarms the timer. Use it once V(answered) has succeeded on every member, so
        that a member which lost its controller does not go back alone.
      - V(absent) removes the file and brings back the files that were taken over.
    type: str
    choices: [present, answered, confirmed, absent]
    default: present
  rails:
    description: The rails in order, half 0 (PCI domain 0000) first.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: IPv4 address with prefix, such as V(10.77.0.1/30).
        type: str
        required: true
      netdev:
        description: Name of the interface. Empty means that the cage with a cable decides.
        type: str
        default: ''
      peers:
        description: Addresses of the other ranks on this rail.
        type: list
        elements: str
        default: []
  mtu:
    description: MTU of the rails in bytes.
    type: int
    default: 9000
  renderer:
    description: Who applies the file. V(auto) takes whoever manages the interface now.
    type: str
    choices: [auto, networkd, NetworkManager]
    default: auto
  takeover:
    description: Rename other files that configure a rail to C(*.sparkfleet-disabled) instead of refusing.
    type: bool
    default: false
  allow_disruptive:
    description: Change the rails although ranks of this collection run on the node.
    type: bool
    default: false
  rollback_seconds:
    description: After how many seconds without confirmation the old network comes back.
    type: int
    default: 120
  settle_seconds:
    description: How long to wait for the addresses to appear after applying.
    type: float
    default: 20.0
  confirm_seconds:
    description: How long to wait for the peers.
    type: float
    default: 30.0
attributes:
  check_mode:
    description: Predicts the file and the addresses, and validates the file in a temporary root. Links that
      are down
      stay down, so on a node whose links nobody has brought up the cage is a guess, with a warning.
    support: full
  diff_mode:
    description: Shows the file, files taken over, and live addresses.
    support: full
"""

EXAMPLES = r"""
- name: Address both rails of rank 0
  sparkfleet.serving.rail_network:
    rails:
      - {address: 10.77.0.1/30, peers: [10.77.0.2]}
      - {address: 10.77.1.1/30, peers: [10.77.1.2]}
  become: true

- name: Ask the peers, once every member has applied
  sparkfleet.serving.rail_network:
    state: answered
    rails:
      - {address: 10.77.0.1/30, peers: [10.77.0.2]}
      - {address: 10.77.1.1/30, peers: [10.77.1.2]}
  become: true

- name: Confirm, once every member has its answers
  sparkfleet.serving.rail_network:
    state: confirmed
    rails:
      - {address: 10.77.0.1/30, peers: [10.77.0.2]}
      - {address: 10.77.1.1/30, peers: [10.77.1.2]}
  become: true
"""

RETURN = r"""
rails:
  description: "The rails as they are: netdev, hca, pci, cage, address, mtu, peers."
  type: list
  elements: dict
  returned: state present, answered or confirmed
renderer:
  description: Who applies the file.
  type: str
  returned: state present
adopted:
  description: Foreign files that already give exactly what is wanted and were left alone.
  type: list
  elements: str
  returned: state present
taken_over:
  description: Foreign files that were (or would be) renamed.
  type: list
  elements: str
  returned: state present
pending:
  description: Whether the rollback timer waits for a confirmation.
  type: bool
  returned: state present
answered:
  description: True when every peer has answered on every rail.
  type: bool
  returned: state answered or confirmed
links:
  description: "One row for each rail and peer: netdev, peer, bytes, ok."
  type: list
  elements: dict
  returned: state answered or confirmed
"""

import socket

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.probe.reader import Reader
from ..module_utils.rail_apply import ApplyError, Plan, RailNode, Wanted
from ..module_utils.rails import RailError


def shown(plan: Plan) -> list[dict[str, object]]:
    return [
        {
            "netdev": half.netdev,
            "hca": half.hca,
            "pci": half.pci,
            "cage": half.cage,
            "address": one.address,
            "mtu": plan.mtu,
            "peers": list(one.peers),
        }
        for half, one in zip(plan.halves, plan.wanted)
    ]


def present(module: AnsibleModule, node: RailNode, wanted: list[Wanted]) -> None:
    params = module.params

    def plan_now() -> Plan:
        return node.plan(
            wanted, params["mtu"], params["renderer"], params["takeover"], raise_links=not module.check_mode
        )

    plan = plan_now()
    if any(half.state == "admin_down" for half in plan.halves):
        module.warn("the links are down, so the cage that carries the cable is not known yet")
    if plan.changed:
        running = node.owned_ranks()
        if running and not params["allow_disruptive"]:
            raise ApplyError(
                f"ranks run: {', '.join(running)}",
                wanted="no running rank while the rails change",
                remedy="stop the replica first, or set fabric_allow_disruptive: true",
                diff=plan.diff(),
            )
        if not module.check_mode:
            if node.pending() is not None:
                # An unconfirmed change is under way: the way back must lead to what was there before it.
                node.rollback()
                plan = plan_now()
            node.apply(plan, params["rollback_seconds"], params["settle_seconds"])
    node.lower_again(plan.netdevs)
    module.exit_json(
        changed=plan.changed,
        diff=plan.diff(),
        rails=shown(plan),
        renderer=plan.renderer,
        adopted=plan.adopted,
        taken_over=plan.disable,
        pending=node.pending() is not None,
    )


def answered(module: AnsibleModule, node: RailNode, wanted: list[Wanted], keep: bool) -> None:
    params = module.params
    plan = node.plan(wanted, params["mtu"], params["renderer"], params["takeover"], raise_links=False)
    if module.check_mode:
        # Predicted changes have not been made, so there is nothing to confirm.
        module.exit_json(changed=False, rails=shown(plan), links=[])
    if plan.live_differs:
        raise ApplyError(f"the rails are {plan.live_before}", wanted=plan.live_after())
    links = node.ask(plan, params["confirm_seconds"])
    if keep:
        node.keep()
    module.exit_json(changed=False, rails=shown(plan), links=links, answered=True)


def absent(module: AnsibleModule, node: RailNode) -> None:
    ours, disabled = node.undo_plan()
    changed = ours or bool(disabled)
    if changed:
        running = node.owned_ranks()
        if running and not module.params["allow_disruptive"]:
            raise ApplyError(f"ranks run: {', '.join(running)}", remedy="stop the replica first")
        if not module.check_mode:
            node.undo()
    module.exit_json(changed=changed, taken_over=disabled)


def main() -> None:
    rail = {
        "address": {"type": "str", "required": True},
        "netdev": {"type": "str", "default": ""},
        "peers": {"type": "list", "elements": "str", "default": []},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["present", "answered", "confirmed", "absent"],
                "default": "present",
            },
            "rails": {"type": "list", "elements": "dict", "options": rail, "default": []},
            "mtu": {"type": "int", "default": 9000},
            "renderer": {"type": "str", "choices": ["auto", "networkd", "NetworkManager"], "default": "auto"},
            "takeover": {"type": "bool", "default": False},
            "allow_disruptive": {"type": "bool", "default": False},
            "rollback_seconds": {"type": "int", "default": 120},
            "settle_seconds": {"type": "float", "default": 20.0},
            "confirm_seconds": {"type": "float", "default": 30.0},
        },
        supports_check_mode=True,
    )
    node = RailNode(Reader(), tmp=module.tmpdir)
    wanted = [Wanted(row["address"], row["netdev"], tuple(row["peers"])) for row in module.params["rails"]]
    try:
        if module.params["state"] == "absent":
            absent(module, node)
        elif not wanted:
            module.exit_json(changed=False, rails=[], links=[], pending=False, answered=True)
        elif module.params["state"] == "present":
            present(module, node, wanted)
        else:
            answered(module, node, wanted, keep=module.params["state"] == "confirmed")
    except (ApplyError, RailError) as error:
        node.lower_again()
        details = error.details if isinstance(error, ApplyError) else {}
        remedy = details.get("remedy")
        text = f"{socket.gethostname()}: {error}"
        module.fail_json(
            msg=f"{text}. Remedy: {remedy}" if remedy else text, node=socket.gethostname(), **details
        )


if __name__ == "__main__":
    main()
