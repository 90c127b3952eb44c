"""Command line of the agent. A subcommand is a module of this package that is named in ``COMMANDS``.

Such a module has ``HELP`` (one line), ``add_arguments(parser)`` and ``main(args) -> int``. One that is not
packed is not offered.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence

COMMANDS = ("rank", "boot", "peer", "gid", "gate", "show", "guard", "version")


def parser() -> argparse.ArgumentParser:
    """The argument parser with every subcommand that is packed."""
    top = argparse.ArgumentParser(prog="sparkfleet-node", description="Node agent of sparkfleet.serving.")
    subcommands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if importlib.util.find_spec(f"{__package__}.{name}") is None:
            continue
        module = importlib.import_module(f".{name}", __package__)
        one = subcommands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(one)
        one.set_defaults(run=module.main)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its return value is the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    args = parser().parse_args(argv)
    return int(args.run(args))
