"""The Docker socket over http.client: versions, errors by kind, streams."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import docker_api as D

from tests.unit.node.fake_docker import FakeDocker


@pytest.mark.parametrize(
    ("server", "oldest", "chosen"),
    [
        ("1.41", "1.12", "1.41"),  # Debian 12
        ("1.47", "1.24", "1.47"),
        ("1.99", "1.44", "1.51"),  # newer than known, still speaks ours
        ("1.99", "1.60", "1.60"),  # speaks none of ours: its oldest
    ],
)
def test_versions_are_negotiated(server: str, oldest: str, chosen: str) -> None:
    assert D.negotiate(server, oldest) == chosen


def test_an_old_engine_is_refused() -> None:
    with pytest.raises(D.DockerError, match=r"Docker 20\.10"):
        D.negotiate("1.39", "1.12")


def test_no_socket_is_unknown_and_not_empty(tmp_path: Path) -> None:
    with pytest.raises(D.DockerUnreachable, match="not installed or not started"):
        D.DockerApi(str(tmp_path / "absent")).container_list()


def test_a_dead_socket_is_unknown(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "dead"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(D.DockerUnreachable):
        D.DockerApi(str(path)).container_list()


def test_a_denied_socket_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_self: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(D._UnixConnection, "connect", denied)
    with pytest.raises(D.DockerUnreachable, match="unknown"):
        D.DockerApi("/var/run/docker.sock").container_list()


def test_errors_by_kind(docker: FakeDocker, api: D.DockerApi) -> None:
    assert api.ping()
    assert api.api_version == "1.47"
    with pytest.raises(D.DockerNotFound) as missing:
        api.container_inspect("none")
    assert "No such container" in missing.value.message
    assert api.container_find("none") is None
    api.container_create("a", {"Labels": {"x": "1"}})
    with pytest.raises(D.DockerConflict, match="in use"):
        api.container_create("a", {})
    docker.denied = True
    with pytest.raises(D.DockerApiError, match="not well"):
        api.container_inspect("a")


def test_a_container_from_create_to_gone(docker: FakeDocker, api: D.DockerApi) -> None:
    identity = api.container_create("a", {"Labels": {"x": "1"}})
    assert api.container_start(identity) and not api.container_start(identity)
    assert len(api.container_list(["x=1"], "a")) == 1
    assert api.container_list(["x=2"]) == []
    docker.end("a", 7, "one\ntwo\n")
    assert api.container_wait(identity) == 7
    assert b"".join(api.container_logs(identity)) == b"one\ntwo\n"
    assert not api.container_stop(identity, 1)
    assert api.container_remove(identity) and not api.container_remove(identity)


def test_run_leaves_nothing(docker: FakeDocker, api: D.DockerApi) -> None:
    docker.on_start = lambda row: docker.end(row["Id"], 3, "out\n")
    seen: list[bytes] = []
    code, out, err = api.run("tool", {"Image": "x"}, on_output=lambda _kind, data: seen.append(data))
    assert (code, out, err) == (3, b"out\n", b"")
    assert seen == [b"out\n"]
    assert docker.containers == {}


def test_build_streams_the_context_and_reports_its_error(docker: FakeDocker, api: D.DockerApi) -> None:
    lines: list[str] = []
    assert (
        api.image_build(iter([b"ab", b"c"]), tags=["x:1"], buildargs={"A": "1"}, on_line=lines.append)
        == "sha256:built"
    )
    query, raw = docker.bodies["build"]
    assert raw == b"abc" and query["t"] == "x:1" and query["version"] == "1"
    assert lines == ["Step 1/1 : FROM scratch"]
    assert not {"memory", "memswap", "cpuquota", "cpuperiod"} & set(query)
    api.image_build(b"ok", memory=1 << 30, cpus=3)
    query, _raw = docker.bodies["build"]
    assert (query["memory"], query["memswap"]) == (str(1 << 30),) * 2, "without swap"
    assert (query["cpuquota"], query["cpuperiod"]) == ("300000", "100000")
    with pytest.raises(D.DockerStreamError, match="COPY failed") as failed:
        api.image_build(b"bad")
    assert failed.value.lines == ["Step 1/1 : FROM scratch"]


def test_save_asks_for_one_platform_where_it_can(docker: FakeDocker, api: D.DockerApi) -> None:
    with api.image_save(["a:b"], "linux/arm64") as stream:
        assert b"".join(stream) == b"TAR" * 1000
    assert "platform" not in docker.bodies["get"], "1.47 has no such choice"
    docker.api = ("1.48", "1.24")
    newer = D.DockerApi(str(docker.path))
    with newer.image_save(["a:b"], "linux/arm64") as stream:
        stream.read()
    assert '"architecture": "arm64"' in docker.bodies["get"]["platform"]
    assert newer.image_load(iter([b"x", b"y"])) == ["Loaded image: a:b"]
    assert docker.bodies["load"] == b"xy"
