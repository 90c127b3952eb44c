"""What the engine's own parser says of a planned command."""

from __future__ import annotations

from typing import Any, cast

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import argv_check
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal

HEAD = {"refused": 2, "refusal": "BadArgument", "accepted": 1, "says": "neither a directory", "source": "MZ"}
FOLLOWER = {"refused": 2, "refusal": "BadArgument", "source": "BE"}
LAUNCH: dict[str, Any] = {
    "rank": 0,
    "container": {
        "image": "lab/engine:1",
        "argv": ["tensorfold", "serve", "/model", "--context", "4096"],
        "entrypoint": [],
        "env": {"TF_TP_WORLD": "2", "NCCL_IB_GID_INDEX": "${gid_index}"},
        "mounts": [{"type": "bind", "source": "/data/model", "target": "/model", "read_only": True}],
        "devices": ["/dev/infiniband"],
        "capabilities": ["IPC_LOCK"],
        "ulimits": {"memlock": -1},
        "labels": {"sparkfleet.replica": "pair-a"},
        "network": "host",
        "restart": "no",
        "ipc": "host",
        "shm_bytes": 0,
        "init": False,
        "oom_score_adj": 0,
        "gpus": "all",
        "runtime": "",
    },
}


@pytest.mark.parametrize(
    ("parser", "code", "said", "verdict"),
    [
        (HEAD, 1, "/model is neither a directory nor a model name in the cache", "accepted"),
        (HEAD, 2, "unknown argument --contxt", "refused"),
        (HEAD, 1, "error: BadArgument", "refused"),
        (HEAD, 1, "CUDA driver version is insufficient", "unclear"),
        (HEAD, 139, "", "unclear"),
        (FOLLOWER, 1, "error: FileNotFound", "unclear"),
        (FOLLOWER, 1, "error: BadArgument", "refused"),
    ],
)
def test_exit_codes_and_texts(parser: dict[str, Any], code: int, said: str, verdict: str) -> None:
    assert argv_check.judge(parser, code, said) == verdict


class Docker:
    """Runs nothing; keeps the request."""

    def __init__(self, code: int, said: str) -> None:
        self.answer = (code, b"", said.encode())
        self.body: dict[str, Any] = {}

    def run(self, _name: str, body: dict[str, Any], timeout: float) -> tuple[int, bytes, bytes]:

        assert timeout > 0, "a parser that hangs would hang the run"
        self.body = body
        return self.answer


def test_the_command_is_tried_with_nothing_of_the_host() -> None:
    docker = Docker(1, "x\n/model is neither a directory nor ...")
    found = argv_check.try_command(cast(DockerApi, docker), LAUNCH, 3, HEAD)
    assert found["verdict"] == "accepted"
    assert docker.body["Cmd"] == LAUNCH["container"]["argv"]
    assert "TF_TP_WORLD=2" in docker.body["Env"]
    host = docker.body["HostConfig"]
    assert host == {"NetworkMode": "none", "CapDrop": ["ALL"], "ReadonlyRootfs": True}
    assert "sparkfleet.replica" not in docker.body["Labels"], (
        "the guard and the status would take it for a rank"
    )


def test_a_command_that_the_engine_does_not_know_is_refused_with_its_words() -> None:
    docker = Docker(2, "unknown argument --contxt")
    with pytest.raises(Refusal, match="does not take the planned command of rank 0") as caught:
        argv_check.try_command(cast(DockerApi, docker), LAUNCH, None, HEAD)
    assert "unknown argument --contxt" in str(caught.value.found)
    assert "nothing was stopped" in caught.value.remedy
