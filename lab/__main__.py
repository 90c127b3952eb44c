"""``python -m lab``: bring the lab up and down, look into it, break it on purpose."""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import fault, image, instance
from .config import NODES, Instance
from .config import instance as chosen


def show_up(state: dict[str, object]) -> None:
    print(json.dumps(state, indent=2))


def shell(lab: Instance, node: str, command: list[str]) -> None:
    """Replace this process by an ssh session on the node."""
    if not lab.up_file.exists():
        raise SystemExit("lab: the lab is down; `make lab-up` brings it up")
    os.execvp("ssh", ["ssh", "-F", str(lab.ssh_config), node, *command])  # noqa: S606


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    top.add_argument("--name", help="the instance (default: LAB_NAME, or `lab`)")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="bring the lab up; safe to repeat")
    commands.add_parser("down", help="remove the instance; images and caches stay")
    commands.add_parser("purge", help="remove all that the lab ever made on this machine")
    commands.add_parser("status", help="show the instance's containers")
    commands.add_parser("images", help="make the images only")
    one = commands.add_parser("restart", help="reboot a node and wait for it")
    one.add_argument("node", choices=NODES)
    look = commands.add_parser("shell", help="log in to a node, or run a command there")
    look.add_argument("node", choices=NODES)
    look.add_argument("rest", nargs=argparse.REMAINDER)
    switch = commands.add_parser("fault", help="list the fault switches, or set one")
    switch.add_argument("fault", nargs="?", help="name of the switch")
    switch.add_argument("node", nargs="?", default="all", choices=[*NODES, "all"])
    switch.add_argument("state", nargs="?", default="on", choices=["on", "off"])
    switch.add_argument("--value", help="the switch's value (see the list)")
    clear = commands.add_parser("heal", help="set every fault switch off")
    clear.add_argument("node", nargs="?", default="all", choices=[*NODES, "all"])
    return top


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    lab = chosen(options.name)
    if options.command == "up":
        show_up(instance.up(lab))
    elif options.command == "down":
        instance.down(lab)
    elif options.command == "purge":
        instance.purge()
    elif options.command == "images":
        client = instance.connect()
        with image.alone():
            print(image.node_image(client), image.base_image(client), sep="\n")
    elif options.command == "status":
        states = instance.status(lab)
        print("\n".join(f"{name}: {state}" for name, state in states.items()) or f"lab {lab.name} is down")
        return 0 if states and all(state == "running" for state in states.values()) else 1
    elif options.command == "restart":
        instance.restart(lab, options.node)
    elif options.command == "shell":
        shell(lab, options.node, options.rest)
    elif options.command == "heal":
        fault.heal(lab, options.node)
    elif options.fault is None:
        print(fault.listing())
    else:
        fault.switch(lab, options.fault, options.node, options.state == "on", options.value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
