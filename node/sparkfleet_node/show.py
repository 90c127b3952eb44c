"""Subcommand ``show``: the launch of this node's rank as the docker run that it amounts to."""

from __future__ import annotations

import argparse
import sys

from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host, Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.launch import render

from .common import load_launch
from .gid import resolve

HELP = "print what the rank of a replica runs on this node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replica", required=True)


def main(args: argparse.Namespace) -> int:
    """Print the command; what is only resolved at start says so, with the value of now."""
    host = Host()
    try:
        launch = load_launch(host, args.replica)
    except Refusal as refusal:
        sys.stderr.write(refusal.as_failure()["msg"] + "\n")
        return 1
    try:
        index = resolve(host, launch, 0)
    except Refusal:
        index = None
    sys.stdout.write(render(launch, index))
    return 0
