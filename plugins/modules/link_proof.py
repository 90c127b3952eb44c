#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
---
module: link_proof
short_description: Measure the rails of a DGX Spark between two nodes
version_added: 1.0.0
description:
  - Runs a bounded C(ib_write_bw) on each rail and says what its figure means. Start O(side=serve) on one
    node, then
    O(side=measure) on the other.
  - Without perftest nothing is measured, and the result says so; the RDMA MTU is read all the same. While
    ranks of this collection run, or with less than 4 GiB available, nothing is measured either.
author:
  - The sparkfleet founders (@sparkfleet)
options:
  side:
    description: V(serve) starts detached servers that end by themselves; V(measure) runs the clients.
    type: str
    choices: [serve, measure]
    required: true
  rails:
    description: The rails in order.
    type: list
    elements: dict
    required: true
    suboptions:
      address:
        description: Own address with prefix.
        type: str
        required: true
      netdev:
        description: Name of the interface. Empty means that the interface with the address is taken.
        type: str
        default: ''
      peer:
        description: Address of the other node on this rail. Only used by O(side=measure).
        type: str
        default: ''
  port:
    description: TCP port of rail 0; rail 1 takes the next one.
    type: int
    default: 12000
  seconds:
    description: How long each rail is measured, 1 to 30.
    type: int
    default: 5
  mtu:
    description: RDMA path MTU in bytes that every rail must have. V(0) does not ask.
    type: int
    default: 4096
  peer_reason:
    description: The RV(reason) that the peer gave for not listening. With one nothing is measured.
    type: str
    default: ''
attributes:
  check_mode:
    description: Nothing is measured in check mode.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the peer's packets
  sparkfleet.serving.link_proof:
    side: serve
    rails: [{address: 10.77.0.2/30}, {address: 10.77.1.2/30}]
  become: true
"""

RETURN = r"""
measured:
  description: Whether figures were taken.
  type: bool
  returned: always
reason:
  description: Why nothing was measured.
  type: str
  returned: always
rails:
  description: "One row a rail: netdev, hca, gid_index, active_mtu, average_gbps, peak_gbps, sent_bytes
    (counted by the
    device), verdict (healthy, stale_init, degraded, failed, small_mtu or not_measured), reason, ladder."
  type: list
  elements: dict
  returned: side measure
"""

import re
import socket
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import rails as rail
from ..module_utils.link_proof import (
    client_argv,
    judge,
    judge_mtu,
    parse_ib_write_bw,
    reason_not_to_measure,
)
from ..module_utils.probe import docker, memory, net, services
from ..module_utils.probe.reader import Reader

UNIT = "sparkfleet-link-proof"


def found_rails(reader: Reader, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rails with device and GID index now. Raises rail.RailError."""
    probe = net.read(reader)
    rows = []
    for number, one in enumerate(wanted):
        netdev = one["netdev"] or next(
            (
                name
                for name, row in probe["net"].items()
                if any(item["cidr"] == one["address"] for item in row["addresses"])
            ),
            "",
        )
        link = probe["net"].get(netdev)
        if link is None or not link["hca"]:
            raise rail.RailError(f"rail {number}: no interface with {one['address']} and an RDMA device")
        choice = rail.choose_gid(probe["rdma"], link["hca"], netdev, one["address"].split("/")[0])
        rows.append(
            {
                "netdev": netdev,
                "hca": link["hca"],
                "gid_index": choice.index,
                "link": link,
                "active_mtu": probe["rdma"][link["hca"]]["active_mtu"],
                "peer": one["peer"],
            }
        )
    return rows


def listening(reader: Reader, port: int) -> bool:
    rows = [
        row
        for name in ("tcp", "tcp6")
        for row in services.parse_proc_tcp(reader.text(f"/proc/net/{name}") or "")
    ]
    return any(row["port"] == port for row in rows)


def serve(module: AnsibleModule, reader: Reader, rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows):
        port = module.params["port"] + number
        unit = f"{UNIT}-{number}"
        reader.run(["systemctl", "stop", f"{unit}.service"])
        reader.run(["systemctl", "reset-failed", f"{unit}.service"])
        # Detached: a server that hangs on the SSH session dies with it, and the client then sees a
        # "firewall".
        limit = module.params["seconds"] * (number + 1) + 60
        started = reader.run(
            [
                "systemd-run",
                f"--unit={unit}",
                "--collect",
                f"--property=RuntimeMaxSec={limit}",
                "--description=Server of a bandwidth test between two nodes",
                *client_argv(row["hca"], row["gid_index"], port, module.params["seconds"]),
            ]
        )
        if not started.ok:
            module.fail_json(
                msg=f"{socket.gethostname()}: cannot start ib_write_bw: {started.stderr.strip()}"
            )
        for _attempt in range(50):
            if listening(reader, port):
                break
            time.sleep(0.1)
        else:
            module.fail_json(msg=f"{socket.gethostname()}: ib_write_bw does not listen on port {port}")
    module.exit_json(changed=False, measured=False, reason="", rails=[])


def measure(module: AnsibleModule, reader: Reader, rows: list[dict[str, Any]]) -> None:
    found = []
    for number, row in enumerate(rows):
        argv = client_argv(
            row["hca"],
            row["gid_index"],
            module.params["port"] + number,
            module.params["seconds"],
            row["peer"],
        )
        counter = f"/sys/class/infiniband/{row['hca']}/ports/1/counters/port_xmit_data"
        before = reader.integer(counter)
        answer = reader.run(argv, module.params["seconds"] + 20.0)
        after = reader.integer(counter)
        figure = parse_ib_write_bw(answer.stdout)
        output = "did not end in time" if answer.timed_out else f"{answer.stdout}\n{answer.stderr}"
        shown = re.search(r"^\s*Mtu\s*:\s*(\d+)", answer.stdout, re.M)
        mtu = int(shown.group(1)) if shown else row["active_mtu"]
        verdict = judge(figure, row["link"], output, mtu, module.params["mtu"])
        found.append(
            {
                "netdev": row["netdev"],
                "hca": row["hca"],
                "gid_index": row["gid_index"],
                "peer": row["peer"],
                "active_mtu": mtu,
                "average_gbps": figure.average_gbps if figure else None,
                "peak_gbps": figure.peak_gbps if figure else None,
                # The counter counts words of four bytes.
                "sent_bytes": (after - before) * 4 if before is not None and after is not None else None,
                **verdict.as_dict(),
            }
        )
    module.exit_json(changed=False, measured=True, reason="", rails=found)


def unmeasured(module: AnsibleModule, reader: Reader, reason: str) -> None:
    """The rails with what is known without a test: their RDMA MTU."""
    rows = []
    if module.params["side"] == "measure":
        try:
            found = found_rails(reader, module.params["rails"])
        except rail.RailError as error:
            found, reason = [], f"{reason}; {error}"
        for row in found:
            small = judge_mtu(row["active_mtu"], module.params["mtu"])
            judged = small.as_dict() if small else {"verdict": "not_measured", "reason": reason, "ladder": []}
            rows.append(
                {
                    **{key: row[key] for key in ("netdev", "hca", "gid_index", "active_mtu", "peer")},
                    "average_gbps": None,
                    "peak_gbps": None,
                    "sent_bytes": None,
                    **judged,
                }
            )
    module.exit_json(changed=False, measured=False, reason=reason, rails=rows)


def main() -> None:
    suboptions = {
        "address": {"type": "str", "required": True},
        "netdev": {"type": "str", "default": ""},
        "peer": {"type": "str", "default": ""},
    }
    module = AnsibleModule(
        argument_spec={
            "side": {"type": "str", "choices": ["serve", "measure"], "required": True},
            "rails": {"type": "list", "elements": "dict", "options": suboptions, "required": True},
            "port": {"type": "int", "default": 12000},
            "seconds": {"type": "int", "default": 5},
            "mtu": {"type": "int", "default": 4096},
            "peer_reason": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        client_argv("", 0, 0, module.params["seconds"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    reader = Reader()
    if module.check_mode:
        module.exit_json(changed=False, measured=False, reason="check mode", rails=[])
    if reader.run(["ib_write_bw", "--version"]).absent:
        unmeasured(module, reader, "perftest is not installed")
    reason = reason_not_to_measure(docker.read(reader), memory.read(reader)["available_bytes"])
    if not reason and module.params["peer_reason"]:
        reason = f"the other node does not listen: {module.params['peer_reason']}"
    if reason:
        unmeasured(module, reader, reason)
    try:
        rows = found_rails(reader, module.params["rails"])
    except rail.RailError as error:
        module.fail_json(msg=f"{socket.gethostname()}: {error}")
    if module.params["side"] == "serve":
        serve(module, reader, rows)
    measure(module, reader, rows)


if __name__ == "__main__":
    main()
