"""The GID table of a real kernel, RDMA over Ethernet: read with its holes, and the index found in it."""

from __future__ import annotations

import json

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.launch import LAUNCH_SCHEMA
from ansible_collections.sparkfleet.serving.plugins.plugin_utils.node_build import build

from lab.vm.testing import Vm, inventory
from tests.proof.ask import ask
from tests.proof.prove import ROOT

pytestmark = pytest.mark.lab
RAILS = (("rocep1s0f0", "enp1s0f0np0", "10.77.0.1"), ("roceP2p1s0f0", "enP2p1s0f0np0", "10.77.0.5"))
#: Both rails as on a Spark. Of two more addresses on each the first goes again: that leaves a hole.
LINKS = "modprobe rdma_rxe" + "".join(
    f" && rdma link add {hca} type rxe netdev {netdev} && ip address add 10.99.{number}.1/24 dev {netdev} "
    f"&& ip address add 10.98.{number}.1/24 dev {netdev} && ip address del 10.99.{number}.1/24 dev {netdev}"
    for number, (hca, netdev, _address) in enumerate(RAILS)
)
LAUNCH = {
    "schema": LAUNCH_SCHEMA,
    "rails": [{"rdma": hca, "netdev": netdev, "address": f"{address}/30"} for hca, netdev, address in RAILS],
    "gid": {"wanted": True, "wait_s": 0},
}


@pytest.mark.field("B19", "B24")
def test_the_index_is_found_in_a_kernels_own_table(machines: tuple[Vm, Vm]) -> None:
    server, _client = machines
    server.text(LINKS)
    base = "/sys/class/infiniband/rocep1s0f0/ports/1"
    raw = server.text(f"cd {base}/gids && for one in $(seq 0 9); do echo $one $(cat $one); done")
    filled = {
        int(line.split()[0]): line.split()[1] for line in raw.splitlines() if line.split()[1].strip("0:")
    }
    holes = set(range(max(filled))) - set(filled)
    assert holes, "the kernel left no hole, so this shows nothing"
    for hole in holes:
        assert "Invalid argument" in server.run(f"cat {base}/gid_attrs/types/{hole}").text
    devices = ask(inventory(), "vm-1", "spark_probe", gather_subset=["net", "rdma"])["probe"]["rdma"]
    for hca, netdev, address in RAILS:
        (row,) = [row for row in devices[hca]["gids"] if row["ipv4"] == address]
        assert (row["type"], row["ndev"]) == ("RoCE v2", netdev)
        assert devices[hca]["netdev"] == netdev
    assert {row["index"] for row in devices["rocep1s0f0"]["gids"]} == set(filled)
    (wanted,) = [row["index"] for row in devices["rocep1s0f0"]["gids"] if row["ipv4"] == RAILS[0][2]]
    agent, _digest = build(ROOT, "vm")
    server.text("mkdir -p /etc/sparkfleet/replicas/vm")
    server.write("/root/agent", agent)
    server.write("/etc/sparkfleet/replicas/vm/launch.json", json.dumps(LAUNCH).encode())
    assert json.loads(server.text("python3 /root/agent gid --replica vm")) == {"gid_index": wanted}
    # The rail goes down and up and gets an address first that it had not: the index drifts, and is found again.
    server.text(
        "cd / && for word in flush 'add 10.99.0.1/24' 'add 10.77.0.1/30'; do ip address $word dev enp1s0f0np0; done"
    )
    drifted = server.run("python3 /root/agent gid --replica vm")
    assert drifted.status == 1
    # An unfinished launch: what it uses cannot be known.
    server.text("rm -r /etc/sparkfleet/replicas/vm")
    assert "rocep1s0f0" in drifted.text and "roceP2p1s0f0" in drifted.text, (
        "the rails do not share an index any more"
    )
