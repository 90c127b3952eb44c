"""The node in a directory and the fake Docker of the agent's tests."""

from tests.unit.node.conftest import api, docker, node

__all__ = ["api", "docker", "node"]
