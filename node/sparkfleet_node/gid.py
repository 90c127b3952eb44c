"""Subcommand ``gid``: the GID index that the rails of this node have now.

An index drifts with every interface event (field B19), so it is found at every start: by the rail's IPv4
address, type RoCE v2 and netdev, never by position.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.net import gid_table
from ansible_collections.sparkfleet.serving.plugins.module_utils.probe.reader import Reader
from ansible_collections.sparkfleet.serving.plugins.module_utils.rails import (
    RailError,
    choose_gid,
    one_gid_index,
)

from .common import Final, load_launch, until

HELP = "print the GID index of the rails of a replica"

WANTED = "one RoCE v2 entry with the rail's address on every rail, at one index"
REMEDY = "check `ip address` of the rails; bring both down and up together, or restart the node"


def resolve_now(host: Host, launch: Mapping[str, Any]) -> int:
    """The index that all rails share. Raises ``Refusal`` with the device, or with both when they differ."""
    reader = Reader(root=str(host.root))
    choices = []
    try:
        for rail in launch["rails"]:
            hca = str(rail["rdma"])
            table = gid_table(reader, f"/sys/class/infiniband/{hca}/ports/1")
            address = str(rail["address"]).partition("/")[0]
            choices.append(choose_gid({hca: {"gids": table}}, hca, str(rail["netdev"]), address))
    except RailError as error:
        raise Refusal(str(error), "", WANTED, REMEDY) from error
    try:
        index = one_gid_index(choices)
    except RailError as error:
        # Every rail has its entry, and entries stay where they are.
        raise Final(str(error), "", WANTED, REMEDY) from error
    fixed = launch["gid"].get("fixed")
    if fixed is not None and index != fixed:
        raise Final(
            f"this engine build has GID index {fixed} compiled in",
            f"index {index} on this node",
            f"index {fixed}",
            "use a build that takes TF_RDMA_GID_INDEX, or turn the engine's ring off (rdma_ring: false)",
        )
    return index


def resolve(host: Host, launch: Mapping[str, Any], wait_s: float | None = None) -> int | None:
    """``resolve_now`` with a bounded wait: entries appear late after a boot. None when none is wanted."""
    if not launch["gid"].get("wanted") and launch["gid"].get("fixed") is None:
        return None
    limit = float(launch["gid"].get("wait_s", 60)) if wait_s is None else wait_s
    return until(lambda: resolve_now(host, launch), limit)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replica", required=True)


def main(args: argparse.Namespace) -> int:
    """Print ``{"gid_index": N}``; exit 1 with the reason when there is none."""
    host = Host()
    try:
        index = resolve(host, load_launch(host, args.replica), 0)
    except Refusal as refusal:
        sys.stderr.write(refusal.as_failure()["msg"] + "\n")
        return 1
    json.dump({"gid_index": index}, sys.stdout)
    sys.stdout.write("\n")
    return 0
