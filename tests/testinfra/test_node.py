"""What a node of a serving replica looks like, asked of the machine itself, in the lab and on a real fleet:

pytest '--hosts=ansible://all?force_ansible=True' --ansible-inventory=inventory/mine --sudo tests/testinfra
"""

from __future__ import annotations

import json
from typing import Any


def variables(host: Any) -> dict[str, Any]:
    return dict(host.ansible.get_variables())


def test_the_rails_carry_one_address_each_and_jumbo_frames(host: Any) -> None:
    for rail in variables(host)["sparkfleet_rails"]:
        rows = [line.split() for line in host.check_output("ip -o -4 address show").splitlines()]
        (netdev,) = [row[1] for row in rows if row[3] == rail["address"]]
        assert [row[3] for row in rows if row[1] == netdev] == [rail["address"]]
        assert host.file(f"/sys/class/net/{netdev}/mtu").content_string.strip() == "9000"


def test_the_rails_come_from_one_private_netplan_file(host: Any) -> None:
    plan = host.file("/etc/netplan/40-cx7.yaml")
    assert plan.exists and plan.user == "root" and plan.mode == 0o600


def test_the_clock_ceiling_is_set_at_every_boot(host: Any) -> None:
    unit = host.service("sparkfleet-gpu-clocks")
    assert unit.is_enabled and unit.is_running


def test_the_next_boot_has_no_desktop(host: Any) -> None:
    assert host.check_output("systemctl get-default") == "multi-user.target"


def test_the_guard_watches(host: Any) -> None:
    unit = host.service("sparkfleet-guard")
    assert unit.is_enabled and unit.is_running


def test_the_rank_runs_and_docker_does_not_restart_it(host: Any) -> None:
    replica = variables(host)["sparkfleet_replica"]
    assert host.service(f"sparkfleet-rank@{replica}").is_running
    (found,) = host.check_output("docker ps -q --filter label=sparkfleet.replica=%s", replica).split()
    row = json.loads(host.check_output("docker inspect %s", found))[0]
    assert row["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_only_the_head_listens(host: Any) -> None:
    listens = host.socket("tcp://0.0.0.0:8888").is_listening
    assert listens == (int(variables(host)["sparkfleet_rank"]) == 0)
