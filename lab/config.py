"""Names, addresses and paths of one lab instance.

Several instances live side by side on one machine, told apart by ``LAB_NAME`` (default ``lab``). Each has a
management network of its own; the rails are private to an instance, so their addresses are the same in all.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PREFIX = "sparklab"
LABEL = "sparkfleet.lab"
DEFAULT_NAME = "lab"
DEFAULT_SUBNET = 77
NODES = ("spark-1", "spark-2")
USER = "spark"
REGISTRY_PORT = 5000
HUB_PORT = 8080
HUB_NAME = "hub.lab"


def cache_directory() -> Path:
    """Downloaded packages and root file systems: ``LAB_CACHE`` or ``~/.cache/sparkfleet-lab``."""
    return Path(os.environ.get("LAB_CACHE") or Path.home() / ".cache/sparkfleet-lab")


@dataclass(frozen=True)
class Instance:
    """One lab. ``third`` is the third octet of its management network 172.31.N.0/24."""

    name: str
    third: int

    @property
    def network(self) -> str:
        return f"{PREFIX}-{self.name}"

    @property
    def subnet(self) -> str:
        return f"172.31.{self.third}.0/24"

    @property
    def gateway(self) -> str:
        return f"172.31.{self.third}.1"

    @property
    def hub_address(self) -> str:
        return f"172.31.{self.third}.10"

    def address(self, node: str) -> str:
        """Management address of ``spark-1`` or ``spark-2``."""
        return f"172.31.{self.third}.{11 + NODES.index(node)}"

    def container(self, part: str) -> str:
        """Container of a node, of ``hub`` or of ``cable``."""
        return f"{PREFIX}-{self.name}-{part}"

    def volume(self, part: str, purpose: str) -> str:
        return f"{PREFIX}-{self.name}-{part}-{purpose}"

    @property
    def directory(self) -> Path:
        """What the instance keeps: keys, known_hosts, inventory, and ``up.json`` while it is up."""
        return REPOSITORY / ".lab" / self.name

    @property
    def up_file(self) -> Path:
        return self.directory / "up.json"

    @property
    def ssh_config(self) -> Path:
        return self.directory / "ssh/config"


def third_octet(name: str) -> int:
    """The default lab has a fixed network; another gets one from its name (80 to 249)."""
    return DEFAULT_SUBNET if name == DEFAULT_NAME else 80 + zlib.crc32(name.encode()) % 170


def instance(name: str | None = None) -> Instance:
    """The instance of ``name``, of ``LAB_NAME`` in the environment, or the default one."""
    chosen = name or os.environ.get("LAB_NAME") or DEFAULT_NAME
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,20}", chosen):
        raise ValueError(f"LAB_NAME must be a short lower-case name, found {chosen!r}")
    return Instance(chosen, third_octet(chosen))
