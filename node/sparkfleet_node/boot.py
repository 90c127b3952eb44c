"""Subcommand ``boot``: start the rank of a replica once this system has booted.

The rank's own start may wait ten minutes for a peer. As a part of the boot it would hold the boot up for as
long, and a node that is still booting ignores an ordinary reboot. So a small service waits for the end of the
boot and then asks for the start.
"""

from __future__ import annotations

import argparse
import logging

from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, unit_state
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_state import boot_note, rank_unit

LOG = logging.getLogger(__name__)
HELP = "start the rank of a replica when the boot is over (for systemd)"

#: Seconds after which a boot that does not end (a hanging unit of somebody else) is no longer waited for.
LIMIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replica", required=True)


def begin(host: Host, replica: str) -> int:
    """Wait, then ask systemd for the start without waiting for it.

    The note tells the rank that only the boot asks: it then also wants a committed release and company.
    """
    state = host.run(["systemctl", "is-system-running", "--wait"], timeout=LIMIT_S)
    LOG.info("boot: the system is %s", state.out.strip() or f"still booting after {LIMIT_S:g} s")
    if unit_state(host, rank_unit(replica)).active in ("active", "activating", "reloading"):
        LOG.info("boot: somebody started the rank already")
        return 0
    host.write(boot_note(replica), "{}\n", 0o600)
    answer = host.run(["systemctl", "start", "--no-block", rank_unit(replica)])
    if not answer.ok:
        LOG.error("boot: %s", answer.text)
    return 0 if answer.ok else 1


def main(args: argparse.Namespace) -> int:
    """One attempt a boot."""
    return begin(Host(), args.replica)
