#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Does a replica serve?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: endpoint_check
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Check that a replica really serves
description:
  - Runs on a node of the replica and takes everything from the launch file that the node has.
  - On the head it waits for the model list, then asks for one greedy completion with thinking off, and fails
    on an empty reply or one repeated character. It fails at once when a rank of the replica ends, with the
    last log lines of all ranks, which it asks from their nodes over the rails.
  - On every node it looks for the transport in the rank's log (NCCL over TCP fails) and at the rail counters.
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  wait_s:
    description: Seconds to wait for the model list. The engine profile's when not given.
    type: float
  ready:
    description: Whether to wait for the model list. Head only, ignored elsewhere.
    type: bool
    default: true
  smoke:
    description: Whether to ask for a completion. Head only, ignored elsewhere.
    type: bool
    default: true
  evidence:
    description: Whether to look at the log and the counters of this node's rank.
    type: bool
    default: false
  prompt:
    description: Prompt of the smoke test.
    type: str
    default: Count from one to five in words, separated by commas.
  docker_socket:
    description: Path of Docker's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
    description: Reads only. Where no rank runs, as on a bare node, it predicts success.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Wait until the replica serves
  sparkfleet.serving.endpoint_check:
    replica: spark-a
    wait_s: 1800
  become: true
"""

RETURN = r"""
models:
  description: Model ids that the endpoint lists.
  returned: on the head
  type: list
  elements: str
ready_s:
  description: Seconds until the endpoint listed the served model.
  returned: on the head
  type: float
reply:
  description: Reply to the smoke test.
  returned: on the head, when smoke is true
  type: str
smoke_s:
  description: Seconds that the reply took.
  returned: on the head, when smoke is true
  type: float
health:
  description: The endpoint's own counters.
  returned: on the head
  type: dict
busy:
  description: Requests that run now, by the endpoint's own counter.
  returned: on the head
  type: int
memory:
  description:
    - MemAvailable of this node in bytes, C(before) the rank was started, now (C(idle)) and the C(lowest) since then.
      Null where it is not known.
  returned: success, outside of predictions
  type: dict
evidence:
  description: What shows the transport.
  returned: when evidence is true
  type: list
  elements: str
predicted:
  description: Nothing was asked because nothing runs and this is check mode.
  returned: in check mode
  type: bool
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerApi
from ..module_utils.endpoint import evidence, wait_ready
from ..module_utils.host_io import Host, Refusal
from ..module_utils.rank_report import local_endpoint, memory_readings
from ..module_utils.rank_state import agent_view, launch_path, read_json


def check(host: Host, docker: DockerApi, launch: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Everything that the parameters ask for. Raises ``Refusal``."""
    result: dict[str, Any] = {"changed": False, "warnings": []}
    if launch["rank"] == 0:
        endpoint = local_endpoint(host, launch)
        gates = launch["gates"]
        result["endpoint"] = f"http://{endpoint.host}:{endpoint.port}/v1"
        if params["ready"]:
            wait_s = gates["ready"]["timeout_s"] if params["wait_s"] is None else params["wait_s"]
            result["ready_s"] = round(wait_ready(host, launch, endpoint, float(wait_s)), 1)
        if params["smoke"]:
            begin = time.monotonic()
            smoke = gates.get("smoke") or {}
            result["reply"] = endpoint.chat(
                launch["served_name"],
                params["prompt"],
                int(smoke.get("max_tokens", 32)),
                float(smoke.get("timeout_s", 300)),
            )
            result["smoke_s"] = round(time.monotonic() - begin, 2)
        result["models"] = endpoint.models(str(gates["ready"]["path"]))
        health = launch.get("health") or {}
        result["health"] = endpoint.health(str(health.get("path", "/health")))
        running = result["health"].get(str(health.get("running", "requests_running")))
        result["busy"] = running if isinstance(running, int) else 0
        granted = result["health"].get("context_length")
        if isinstance(granted, int) and isinstance(launch["context"], int) and granted < launch["context"]:
            raise Refusal(
                "the engine granted a smaller context than was asked for",
                granted,
                launch["context"],
                "lower sparkfleet_context, or free memory on the head",
            )
    if params["evidence"]:
        found = evidence(host, docker, launch)
        result["warnings"] += found.pop("warnings")
        result.update(found)
    result["memory"] = memory_readings(host, str(launch["replica"]))
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "replica": {"type": "str", "required": True},
            "wait_s": {"type": "float"},
            "ready": {"type": "bool", "default": True},
            "smoke": {"type": "bool", "default": True},
            "evidence": {"type": "bool", "default": False},
            "prompt": {"type": "str", "default": "Count from one to five in words, separated by commas."},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    host = Host()
    try:
        launch = read_json(host, launch_path(params["replica"]))
        if module.check_mode and (launch is None or not agent_view(host, params["replica"])["alive"]):
            module.exit_json(changed=False, predicted=True)
        if launch is None:
            raise Refusal(
                f"no replica {params['replica']} on this node",
                f"{launch_path(params['replica'])} is absent",
                "a launch file",
                "run site.yml",
            )
        result = check(host, DockerApi(params["docker_socket"]), launch, params)
    except Refusal as refusal:
        module.fail_json(**refusal.as_failure())
    except OSError as error:
        module.fail_json(msg=f"the endpoint does not answer: {error}", error=str(error))
    for text in result.pop("warnings"):
        module.warn(text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
