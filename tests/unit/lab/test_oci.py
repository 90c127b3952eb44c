"""The OCI runtime wrapper: what it logs, what it relaxes, what it adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.node import oci

UNLIMITED = 2**64 - 1


def spec(*, host: bool = True) -> dict[str, Any]:
    kinds = ["pid", "mount"] if host else ["pid", "mount", "network", "ipc"]
    return {
        "process": {
            "args": ["tensorfold", "serve"],
            "env": ["PATH=/usr/bin", "HF_TOKEN=hf_secret", "NVIDIA_VISIBLE_DEVICES=all"],
            "rlimits": [
                {"type": "RLIMIT_MEMLOCK", "soft": UNLIMITED, "hard": UNLIMITED},
                {"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 4096},
            ],
            "capabilities": {
                "bounding": ["CAP_IPC_LOCK", "CAP_SYS_RESOURCE"],
                "effective": ["CAP_SYS_RESOURCE"],
            },
            "oomScoreAdj": -500,
        },
        "hooks": {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]},
        "linux": {
            "namespaces": [{"type": kind} for kind in kinds],
            "devices": [{"path": "/dev/infiniband/uverbs0"}],
        },
        "mounts": [
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            {"destination": "/model", "type": "bind", "source": "/var/lib/model", "options": ["ro"]},
        ],
    }


def test_the_log_keeps_the_request_and_no_environment_value() -> None:
    entry = oci.record(spec(), "abc", "runc")
    assert entry["rlimits"]["RLIMIT_MEMLOCK"] == [UNLIMITED, UNLIMITED]
    assert entry["capabilities"] == ["CAP_IPC_LOCK", "CAP_SYS_RESOURCE"]
    assert entry["devices"] == ["/dev/infiniband/uverbs0"]
    assert (entry["gpus"], entry["host_network"], entry["host_ipc"]) == ("all", True, True)
    assert [mount["destination"] for mount in entry["mounts"]] == ["/model"]
    assert "hf_secret" not in str(entry)
    assert "HF_TOKEN" in entry["env_names"]
    private = oci.record(spec(host=False), "abc", "runc")
    assert (private["host_network"], private["host_ipc"]) == (False, False)


def test_relaxing_takes_only_what_the_machine_refuses() -> None:
    asked = spec()
    oci.relax(asked, {14}, {"RLIMIT_MEMLOCK": 8388608}, 0)
    process = asked["process"]
    assert process["capabilities"] == {"bounding": ["CAP_IPC_LOCK"], "effective": []}
    assert process["rlimits"][0] == {"type": "RLIMIT_MEMLOCK", "soft": 8388608, "hard": 8388608}
    assert process["rlimits"][1] == {"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 4096}
    assert process["oomScoreAdj"] == 0


def test_a_container_on_the_host_network_gets_the_nodes_sysfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _path: True)
    asked = spec()
    oci.inject(asked)
    by_place = {mount["destination"]: mount for mount in asked["mounts"]}
    assert by_place["/sys"]["source"] == "/sys"
    assert "ro" in by_place["/sys"]["options"]
    assert {"/proc/meminfo", "/proc/swaps", "/run/lab/memory", "/usr/bin/nvidia-smi"} <= set(by_place)


def test_a_bridged_container_without_a_gpu_gets_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _path: True)
    asked = spec(host=False)
    asked["hooks"], asked["process"]["env"] = {}, []
    oci.inject(asked)
    by_place = {mount["destination"]: mount for mount in asked["mounts"]}
    assert by_place["/sys"]["type"] == "sysfs"
    assert "/usr/bin/nvidia-smi" not in by_place
    assert "/proc/meminfo" in by_place


@pytest.mark.parametrize(
    "arguments",
    [
        ["create", "--bundle", "/b", "id"],
        ["create", "--bundle=/b", "id"],
        ["--log", "x", "create", "-b", "/b", "id"],
    ],
)
def test_the_bundle_is_found(arguments: list[str]) -> None:
    assert oci.bundle_of(arguments) == Path("/b")


def test_capability_numbers_are_the_kernels() -> None:
    numbers = {"SYS_ADMIN": 21, "SYS_RESOURCE": 24, "IPC_LOCK": 14, "CHECKPOINT_RESTORE": 40}
    assert {name: oci.CAPABILITIES.index(name) for name in numbers} == numbers
