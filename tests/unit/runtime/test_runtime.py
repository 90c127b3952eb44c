"""Docker: known, merged into, reloaded, and never restarted under a rank."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import container_runtime, daemon_json
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerUnreachable
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Answer, Refusal
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fake_host import FakeHost, fixture


class Engine:
    """What a Docker daemon answers; it reads daemon.json at a reload or a restart, as the real one does."""

    socket_path = "/var/run/docker.sock"

    def __init__(self, host: FakeHost) -> None:
        self.host = host
        self.runtimes = ["io.containerd.runc.v2", "runc"]
        self.running: list[dict[str, Any]] = []
        self.takes_reload = True
        self.down = False
        host.answers[("systemctl", "reload", "docker.service")] = lambda _argv: self._read(self.takes_reload)
        host.answers[("systemctl", "restart", "docker.service")] = lambda _argv: self._read(True)

    def _read(self, take: bool) -> Answer:
        if take:
            settings = json.loads(self.host.read(daemon_json.PATH) or "{}")
            self.runtimes = ["io.containerd.runc.v2", "runc", *settings.get("runtimes", {})]
        return Answer(0, "", "")

    def version(self) -> dict[str, Any]:
        if self.down:
            raise DockerUnreachable("no socket")
        return {"Version": "29.2.1", "ApiVersion": "1.53", "Arch": "arm64", "Os": "linux"}

    def info(self) -> dict[str, Any]:
        return {
            "Driver": "overlay2",
            "DriverStatus": [["Backing Filesystem", "extfs"]],
            "DockerRootDir": "/var/lib/docker",
            "Runtimes": {name: {} for name in self.runtimes},
            "DefaultRuntime": "runc",
        }

    def container_list(self, **_options: Any) -> list[dict[str, Any]]:
        return self.running


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


@pytest.fixture
def engine(host: FakeHost) -> Engine:
    return Engine(host)


def ensure(host: FakeHost, engine: Engine, **options: Any) -> dict[str, Any]:
    defaults = {
        "nvidia": True,
        "nvidia_path": "nvidia-container-runtime",
        "users": [],
        "minimum": "20.10",
        "allow_restart": False,
        "socket": engine.socket_path,
        "check": False,
    }
    return container_runtime.ensure(host, api=engine, **{**defaults, **options})  # type: ignore[arg-type]


@pytest.mark.field("B73")
def test_the_stock_engine_lacks_the_runtime() -> None:
    line = next(
        row for row in fixture("docker-info-stock-no-nvidia-runtime.txt").splitlines() if "Runtimes:" in row
    )
    assert "nvidia" not in line


def test_register_by_reload_then_nothing(host: FakeHost, engine: Engine) -> None:
    result = ensure(host, engine)
    assert result["changed"] and "nvidia" in result["runtime"]["runtimes"]
    assert ["systemctl", "restart", "docker.service"] not in host.calls
    host.calls.clear()
    assert not ensure(host, engine)["changed"] and host.calls == []


def test_check_mode(host: FakeHost, engine: Engine) -> None:
    predicted = ensure(host, engine, check=True)
    assert predicted["changed"] and host.calls == [] and not host.exists(daemon_json.PATH)


def test_nothing_is_written_unless_asked(host: FakeHost, engine: Engine) -> None:
    result = ensure(host, engine, nvidia=False)
    assert not result["changed"] and result["runtime"]["store"] == "classic"
    assert result["runtime"]["architecture"] == "arm64"


def test_foreign_keys_survive_in_order(host: FakeHost, engine: Engine) -> None:
    settings = {"log-driver": "journald", "runtimes": {"crun": {"path": "/usr/bin/crun"}}, "mtu": 9000}
    text = json.dumps(settings, indent=2)
    host.write(daemon_json.PATH, text)
    ensure(host, engine)
    after = host.read(daemon_json.PATH) or ""
    assert list(json.loads(after)) == ["log-driver", "runtimes", "mtu"]
    assert set(json.loads(after)["runtimes"]) == {"crun", "nvidia"}
    assert after.splitlines()[1].startswith('  "log-driver"'), "the file's own indentation"


@pytest.mark.parametrize("text", ['{"a": 1,}', "[]", '{"a": 1, "a": 2}', "not json", '{"runtimes": []}'])
def test_what_dockerd_cannot_read_is_refused_and_left(host: FakeHost, engine: Engine, text: str) -> None:
    host.write(daemon_json.PATH, text)
    with pytest.raises(Refusal):
        ensure(host, engine)
    assert host.read(daemon_json.PATH) == text


def test_another_program_under_the_name_is_refused(host: FakeHost, engine: Engine) -> None:
    host.write(daemon_json.PATH, '{"runtimes": {"nvidia": {"path": "/opt/mine"}}}')
    with pytest.raises(Refusal, match="another program"):
        ensure(host, engine)


def test_no_restart_under_a_rank(host: FakeHost, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.takes_reload = False
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**6, 9)).__next__)
    engine.running = [{"Labels": {"sparkfleet.install": "x"}}]
    with pytest.raises(Refusal, match="reload") as refused:
        ensure(host, engine, allow_restart=True)
    assert "1 of them ours" in str(refused.value.found)
    assert ["systemctl", "restart", "docker.service"] not in host.calls
    engine.running = []
    with pytest.raises(Refusal):
        ensure(host, engine)
    assert "nvidia" in ensure(host, engine, allow_restart=True)["runtime"]["runtimes"]


def test_docker_missing_or_old(host: FakeHost, engine: Engine) -> None:
    with pytest.raises(Refusal, match="too old"):
        ensure(host, engine, minimum="30.0")
    engine.down = True
    with pytest.raises(Refusal, match="does not answer"):
        ensure(host, engine)


def test_missing_toolkit_is_refused_before_the_file_is_touched(host: FakeHost, engine: Engine) -> None:
    host.tools.clear()
    with pytest.raises(Refusal, match="runtime is missing"):
        ensure(host, engine)
    assert not host.exists(daemon_json.PATH)


def test_unknown_user(host: FakeHost, engine: Engine) -> None:
    with pytest.raises(Refusal):
        ensure(host, engine, nvidia=False, users=["nobody-of-that-name"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=6), children, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8).filter(lambda key: key != "runtimes"), JSON, max_size=5))
def test_merging_keeps_everything(settings: dict[str, Any]) -> None:
    merged = daemon_json.with_nvidia_runtime(json.dumps(settings))
    assert merged is not None
    after = json.loads(merged)
    assert after.pop("runtimes") == {"nvidia": daemon_json.NVIDIA_RUNTIME}
    assert after == settings
    assert daemon_json.with_nvidia_runtime(merged) is None


def test_containerd_store_is_told_apart() -> None:
    info = {"Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    assert container_runtime.summary({}, info)["store"] == "containerd"
