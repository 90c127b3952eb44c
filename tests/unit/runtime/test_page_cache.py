"""The page cache is given back before a load, never under a rank, and never as a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import page_cache
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerUnreachable

from tests.unit.fake_host import FakeHost


class Docker:
    def __init__(self, running: int | None) -> None:
        self.running = running

    def container_list(self, **_options: Any) -> list[dict[str, Any]]:
        if self.running is None:
            raise DockerUnreachable("no socket")
        return [{}] * self.running


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.write("/proc/meminfo", "MemTotal: 127600524 kB\nMemFree: 3139656 kB\nMemAvailable: 111584904 kB\n")
    host.write(page_cache.DROP, "0\n")
    return host


def ensure(host: FakeHost, running: int | None = 0, **options: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"min_free_gib": 100.0, "check": False, "docker": Docker(running), **options}
    return page_cache.ensure(host, **chosen)


@pytest.mark.field("B38")
def test_dropped_when_little_is_free(host: FakeHost) -> None:
    result = ensure(host)
    assert result["dropped"] and not result["changed"] and host.read(page_cache.DROP) == "3\n"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"running": 1}, "a rank runs"),
        ({"running": None}, "a rank runs"),
        ({"min_free_gib": 1.0}, "enough is free"),
    ],
)
def test_left_alone(host: FakeHost, options: dict[str, Any], why: str) -> None:
    result = ensure(host, **options)
    assert not result["dropped"] and result["why"] == why and host.read(page_cache.DROP) == "0\n"


def test_check_mode_drops_nothing(host: FakeHost) -> None:
    assert ensure(host, check=True)["dropped"] and host.read(page_cache.DROP) == "0\n"
