"""Fault switches: what a lab can be made to suffer.

A family of faults is one module in this package with a tuple ``FAULTS``; adding a file adds its switches. A
switch that is on is a file: in the node under /var/lib/lab/faults/NAME (it survives a reboot), or, when
``on_cable``, in the cable container under /var/lib/lab/faults/NUMBER.NAME. Stand-ins look for the file each
time they are asked. A fault that must be acted out once (a command in the node) has ``act`` and ``undo``.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from ..config import NODES, Instance

DIRECTORY = "/var/lib/lab/faults"


@dataclass(frozen=True)
class Fault:
    """One switch. ``value`` says what ``--value`` means, ``default`` is used without it. ``act`` and
    ``undo`` are commands that root runs in the node; in them ``{value}`` stands for the value."""

    name: str
    summary: str
    value: str = ""
    on_cable: bool = False
    default: str = ""
    act: tuple[str, ...] = ()
    undo: tuple[str, ...] = ()


def known() -> dict[str, Fault]:
    """Every switch by name, from all modules of this package."""
    found: dict[str, Fault] = {}
    for module in pkgutil.iter_modules(__path__):
        for fault in importlib.import_module(f"{__name__}.{module.name}").FAULTS:
            if fault.name in found:
                raise ValueError(f"two fault switches are named {fault.name}")
            found[fault.name] = fault
    return found


def listing() -> str:
    rows = []
    for fault in sorted(known().values(), key=lambda each: each.name):
        value = f" [--value {fault.value}]" if fault.value else ""
        rows.append(f"{fault.name:<16} {fault.summary}{value}")
    return "\n".join(rows)


def chosen_nodes(node: str) -> tuple[str, ...]:
    return NODES if node == "all" else (node,)


def switch(lab: Instance, name: str, node: str = "all", on: bool = True, value: str | None = None) -> None:
    """Set a switch on one node or all. A bad name, or a lab that is down, is a SystemExit with a message."""
    from ..instance import File, connect, find, put, run_in

    fault = known().get(name)
    if fault is None:
        raise SystemExit(f"lab: no fault switch is named {name!r}; `python -m lab fault` lists them")
    setting = fault.default if value is None else value
    client = connect()
    for each in chosen_nodes(node):
        container = find(client, lab.container("cable" if fault.on_cable else each))
        if container is None:
            raise SystemExit("lab: the lab is down; `make lab-up` brings it up")
        path = f"{DIRECTORY}/{NODES.index(each) + 1}.{name}" if fault.on_cable else f"{DIRECTORY}/{name}"
        if on:
            run_in(container, "mkdir", "-p", DIRECTORY)
            put(container, [File(path, setting + "\n")])
        else:
            run_in(container, "rm", "-f", path)
        command = fault.act if on else fault.undo
        if command:
            status, output = run_in(container, *(word.replace("{value}", setting) for word in command))
            if status:
                raise SystemExit(f"lab: switching {name} on {each} failed: {output}")


def heal(lab: Instance, node: str = "all") -> None:
    """Set every switch off that is on."""
    from ..instance import connect, find, run_in

    client = connect()
    for each in chosen_nodes(node):
        for fault in known().values():
            container = find(client, lab.container("cable" if fault.on_cable else each))
            if container is None:
                raise SystemExit("lab: the lab is down; `make lab-up` brings it up")
            path = (
                f"{DIRECTORY}/{NODES.index(each) + 1}.{fault.name}"
                if fault.on_cable
                else f"{DIRECTORY}/{fault.name}"
            )
            if run_in(container, "test", "-e", path)[0] == 0:
                switch(lab, fault.name, each, on=False)
