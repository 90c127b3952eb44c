"""Faults of the cable and of the ports: what a technician or a firmware update does."""

from __future__ import annotations

from . import Fault

FAULTS = (
    Fault("cut-rail", "a rail loses its carrier on both nodes", "0, 1 or nothing for both", on_cable=True),
    Fault("no-cable", "the node has no ConnectX-7 functions: no netdevs, RDMA or PCI devices", on_cable=True),
    Fault("rail-rate", "limit what the node receives on each rail", "Mbit/s", on_cable=True, default="2000"),
    Fault("other-cage", "the cable sits in cage p1 of the node (takes up to five seconds)"),
    Fault("half-missing", "the RDMA and PCI devices of domain 0002 are absent"),
    Fault("link-speed", "speed that a port with carrier shows", "Mb/s", default="100000"),
    Fault(
        "mtu",
        "the second rail falls back to MTU 1500, as after a firmware capsule",
        act=("ip", "link", "set", "enP2p1s0f0np0", "mtu", "1500"),
        undo=("ip", "link", "set", "enP2p1s0f0np0", "mtu", "9000"),
    ),
)
