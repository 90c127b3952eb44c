#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""This node's rank of a replica."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_unit
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Hold, start and stop this node's rank of a replica
description:
  - Renders the launch of this node's rank from an engine profile, writes the launch file, the keys and the
    systemd units, and starts or stops the unit. The container itself is created by the node agent.
  - A rank is never started or stopped for its own sake. The order over the nodes of a replica is the caller's
    (the role C(ranks)); the agent refuses a rank whose turn it is not.
options:
  state:
    description:
      - V(planned) reads and compares and never changes anything.
      - V(tried) lets the engine's own argument parser read the planned command, in a container without network, and
        refuses a command that it does not take.
      - V(present) writes what differs, and starts and stops no rank.
      - V(started) starts the unit and waits until the container runs. V(stopped) stops it; the log is saved.
      - V(absent) stops it and removes what belongs to the replica.
    type: str
    choices: [planned, tried, present, started, stopped, absent]
    default: present
  replica:
    description: Name of the replica.
    type: str
    required: true
  rank:
    description: Rank of this node. Needed for V(planned) and V(present).
    type: int
    default: 0
  members:
    description: "All members in rank order: C(name), C(rank), C(rails) (list of C(address))."
    type: list
    elements: dict
    default: []
  rails:
    description: "This node's rails in order: C(address), C(netdev), C(hca). Empty: found by address."
    type: list
    elements: dict
    default: []
  engine:
    description: The engine profile (schema 1).
    type: dict
    default: {}
  settings:
    description: Settings of the engine; its profile lists them.
    type: dict
    default: {}
  extra_env:
    description: More environment for every rank. What the profile manages is refused.
    type: dict
    default: {}
  extra_args:
    description: More arguments by V(all), V(head) or V(workers). What the profile manages is refused.
    type: dict
    default: {}
  image:
    description: Reference of the image as this node has it.
    type: str
    default: ''
  image_content:
    description: Content hash of the image; it stands for the image in the launch hash.
    type: str
    default: ''
  model:
    description: "Identity of the model: C(id), C(revision), C(lock)."
    type: dict
    default: {}
  rank_file:
    description: "This rank's file: C(name), C(bytes)."
    type: dict
    default: {}
  paths:
    description: Host paths by the names that the profile's mounts use.
    type: dict
    default: {}
  container_name:
    description: Name of the container instead of the profile's.
    type: str
    default: ''
  stop_grace:
    description: Seconds between SIGTERM and SIGKILL instead of the profile's.
    type: int
  min_available_gib:
    description: Memory gate in GiB instead of the profile's.
    type: float
  log_dir:
    description: Where logs of ended ranks are kept.
    type: str
    default: /var/lib/sparkfleet/logs
  log_keep:
    description: How many logs of this rank are kept; 0 saves none.
    type: int
    default: 10
  release_dir:
    description: Where the release markers are. A start at boot wants this launch to be the committed release.
    type: str
    default: /var/lib/sparkfleet/releases
  plan:
    description: The plan behind this launch, kept beside it for whoever explains a failure.
    type: dict
    default: {}
  peer_port:
    description: Port of the peer service on the rail addresses.
    type: int
    default: 29630
  peer_key:
    description: Key of the peer services of this replica, the same on all its nodes.
    type: str
    default: ''
  api_key:
    description: API key, written to a 0600 file on the head.
    type: str
    default: ''
  api_key_file:
    description: Path of a 0600 file on the head that holds the API key.
    type: str
    default: ''
  install_id:
    description: Install id for a node that has none yet; random when empty.
    type: str
    default: ''
  agent:
    description: Path of the node agent on this node.
    type: str
    default: ''
  agent_sha256:
    description: sha256 of the node agent.
    type: str
    default: ''
  boot:
    description: Whether the rank starts at boot. Left as it is when not given.
    type: bool
  restart:
    description: In check mode, predict a start although the rank runs, because a stop goes before it.
    type: bool
    default: false
  docker_socket:
    description: Path of Docker's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
    description: Predicts the change without making it.
  diff_mode:
    support: full
    description: Shows the whole docker run of the rank; secrets by name only.
"""

EXAMPLES = r"""
- name: See what would be done
  sparkfleet.serving.rank_unit:
    state: planned
    replica: spark-a
    rank: 0
    members: "{{ members }}"
    engine: "{{ profile }}"
    settings: {context: 524288}
    image: registry.example/engine@sha256:0000
    paths: "{{ paths }}"
    agent: "{{ agent.dest }}"
    agent_sha256: "{{ agent.sha256 }}"
  become: true

- name: Stop this node's rank
  sparkfleet.serving.rank_unit:
    state: stopped
    replica: spark-a
  become: true
"""

RETURN = r"""
verdict:
  description: running, starting, stopping, stopped, failed, stale, foreign, absent or unknown.
  returned: when a state was read
  type: str
launch_wanted:
  description: Hash of the launch that the parameters ask for.
  returned: state is planned
  type: str
launch_now:
  description: Hash of the launch that the container on this node has.
  returned: state is planned
  type: str
contract:
  description: Digest of what all ranks of the replica must have equal.
  returned: state is planned
  type: str
changes:
  description: Files and unit changes that differ from what is wanted.
  returned: state is planned
  type: list
  elements: str
key:
  description: Fingerprint of the peer key on this node, empty when there is none.
  returned: state is planned
  type: str
agent_present:
  description: Whether the agent is on this node.
  returned: state is planned
  type: bool
gid_now:
  description: GID index that a start would use now.
  returned: state is planned
  type: int
parser:
  description: C(verdict) (accepted, unclear or not asked) and what the engine C(said) of the planned command.
  returned: state is tried
  type: dict
command:
  description: The rank as the docker run that it amounts to.
  returned: state is planned or present
  type: str
ran:
  description: Whether there was something to stop (in check mode, is).
  returned: state is stopped
  type: bool
log:
  description: Path of the saved log.
  returned: state is stopped
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerApi
from ..module_utils.host_io import Host, finish
from ..module_utils.rank_install import ensure


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "choices": ["planned", "tried", "present", "started", "stopped", "absent"],
                "default": "present",
            },
            "replica": {"type": "str", "required": True},
            "rank": {"type": "int", "default": 0},
            "members": {"type": "list", "elements": "dict", "default": []},
            "rails": {"type": "list", "elements": "dict", "default": []},
            "engine": {"type": "dict", "default": {}},
            "settings": {"type": "dict", "default": {}},
            "extra_env": {"type": "dict", "default": {}},
            "extra_args": {"type": "dict", "default": {}},
            "image": {"type": "str", "default": ""},
            "image_content": {"type": "str", "default": ""},
            "model": {"type": "dict", "default": {}},
            "rank_file": {"type": "dict", "default": {}},
            "paths": {"type": "dict", "default": {}},
            "container_name": {"type": "str", "default": ""},
            "stop_grace": {"type": "int"},
            "min_available_gib": {"type": "float"},
            "log_dir": {"type": "str", "default": "/var/lib/sparkfleet/logs"},
            "log_keep": {"type": "int", "default": 10},
            "release_dir": {"type": "str", "default": "/var/lib/sparkfleet/releases"},
            "plan": {"type": "dict", "default": {}},
            "peer_port": {"type": "int", "default": 29630},
            "peer_key": {"type": "str", "default": "", "no_log": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "api_key_file": {"type": "str", "default": "", "no_log": False},
            "install_id": {"type": "str", "default": ""},
            "agent": {"type": "str", "default": ""},
            "agent_sha256": {"type": "str", "default": ""},
            "boot": {"type": "bool"},
            "restart": {"type": "bool", "default": False},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        required_if=[
            ("state", "planned", ["agent", "agent_sha256"]),
            ("state", "tried", ["agent", "agent_sha256"]),
            ("state", "present", ["agent", "agent_sha256"]),
        ],
        supports_check_mode=True,
    )
    finish(
        module,
        lambda: ensure(Host(), DockerApi(module.params["docker_socket"]), module.params, module.check_mode),
    )


if __name__ == "__main__":
    main()
