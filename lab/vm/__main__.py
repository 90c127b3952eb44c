"""``python -m lab.vm``: bring the two virtual machines up and down, and look into them."""

from __future__ import annotations

import argparse
import json
import os
import sys

from ..config import instance as chosen
from . import machine
from .image import image


def main(arguments: list[str] | None = None) -> int:
    top = argparse.ArgumentParser(prog="python -m lab.vm", description=__doc__)
    top.add_argument("--name", help="the instance (default: LAB_NAME, or `lab`)")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start both and wait until they have booted; safe to repeat")
    commands.add_parser("down", help="end both; the image stays in the cache")
    commands.add_parser("status", help="show their pids")
    commands.add_parser("image", help="make the image only")
    look = commands.add_parser("shell", help="log in to a machine, or run a command there")
    look.add_argument("machine", choices=machine.NAMES)
    look.add_argument("rest", nargs=argparse.REMAINDER)
    options = top.parse_args(arguments)
    lab = chosen(options.name)
    if options.command == "up":
        print(json.dumps(machine.up(lab), indent=2))
    elif options.command == "down":
        machine.down(lab)
    elif options.command == "image":
        print(image().directory)
    elif options.command == "status":
        pids = {one.name: one.pid for one in machine.machines(lab)}
        print("\n".join(f"{name}: {'down' if pid is None else f'pid {pid}'}" for name, pid in pids.items()))
        return 0 if all(pids.values()) else 1
    else:
        config = str(lab.directory / "vm/ssh/config")
        os.execvp("ssh", ["ssh", "-F", config, options.machine, *options.rest])  # noqa: S606
    return 0


if __name__ == "__main__":
    sys.exit(main())
