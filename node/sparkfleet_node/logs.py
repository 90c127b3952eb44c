"""Logs of ranks: saved compressed with their time in the name, the newest kept."""

from __future__ import annotations

import contextlib
import gzip
import logging
import re
import shutil
import time
from pathlib import Path

from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi, DockerError
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Host

LOG = logging.getLogger(__name__)
#: Free bytes that stay on the disk of the logs: a log must not fill the disk that Docker needs to stop a
#: rank.
KEEP_FREE = 256 << 20


def tail(docker: DockerApi, container: str, lines: int = 25) -> list[str]:
    """The last lines of a container's log; empty when it cannot be read."""
    try:
        data = b"".join(docker.container_logs(container, tail=lines))
    except DockerError:
        return []
    return data.decode("utf-8", "replace").splitlines()[-lines:]


def names(directory: Path, replica: str, rank: int) -> list[Path]:
    """Saved logs of one rank, oldest first."""
    wanted = re.compile(rf"{re.escape(replica)}-(\d{{8}}-\d{{6}})-rank{rank}(?:\.(\d+))?\.log\.gz")
    found = []
    for path in directory.glob("*.log.gz"):
        match = wanted.fullmatch(path.name)
        if match:
            found.append((match.group(1), int(match.group(2) or 0), path))
    return [path for _stamp, _number, path in sorted(found)]


def save(
    host: Host, docker: DockerApi, container: str, *, directory: str, replica: str, rank: int, keep: int
) -> tuple[str, str]:
    """Save a container's whole log as ``<replica>-YYYYmmdd-HHMMSS-rankN.log.gz`` and drop all but ``keep``.

    :returns: ``(path, warning)``; the path is empty when nothing was saved. Never raises: stopping a rank
    does not depend on its log. ``keep`` 0 saves none.
    """
    if keep <= 0:
        return "", ""
    folder = host.path(directory)
    partial = folder / f".{replica}-rank{rank}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        if shutil.disk_usage(folder).free < KEEP_FREE:
            return "", f"the log was not saved: less than {KEEP_FREE >> 20} MiB free in {directory}"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        target, number = folder / f"{replica}-{stamp}-rank{rank}.log.gz", 0
        while target.exists():
            number += 1
            target = folder / f"{replica}-{stamp}-rank{rank}.{number}.log.gz"
        with gzip.open(partial, "wb", compresslevel=6) as out:
            for data in docker.container_logs(container, timestamps=True):
                out.write(data)
        partial.chmod(0o640)
        partial.rename(target)
        for old in names(folder, replica, rank)[:-keep]:
            old.unlink()
    except (OSError, DockerError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        return "", f"the log was not saved: {error}"
    return f"{directory.rstrip('/')}/{target.name}", ""
