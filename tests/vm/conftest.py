"""What the tests with virtual machines share: both machines, with an image in the Docker of the second."""

from __future__ import annotations

import pytest

from lab.vm.testing import Vm, pair

#: An image with busybox alone, imported where Docker is: the second machine.
IMAGE = """
set -e
docker image inspect lab/tools:1 >/dev/null 2>&1 && exit 0
mkdir -p /tmp/image/bin
cp /bin/busybox /tmp/image/bin/
for name in head sh cat dd sleep touch sha256sum; do ln -sf busybox /tmp/image/bin/$name; done
tar -C /tmp/image -c bin | docker import - lab/tools:1
"""


@pytest.fixture(scope="session")
def machines() -> tuple[Vm, Vm]:
    """Both machines: vm-1 serves, vm-2 has Docker and its image."""
    server, client = pair()
    client.text(IMAGE)
    return server, client
