"""Subcommand ``version``."""

from __future__ import annotations

import argparse
import json
import sys

from . import DIGEST, VERSION

HELP = "print the version of the agent"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def main(_args: argparse.Namespace) -> int:
    """Print version and digest as JSON."""
    json.dump({"version": VERSION, "digest": DIGEST, "python": sys.version.split()[0]}, sys.stdout)
    sys.stdout.write("\n")
    return 0
