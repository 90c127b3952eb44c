"""What a node holds for its rank: compared, predicted, written once, removed without what is not ours."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerApi
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal
from ansible_collections.sparkfleet.serving.plugins.module_utils.rank_install import ensure

from tests.unit.launch.test_launch import PATHS, PROFILE
from tests.unit.node.conftest import TreeHost
from tests.unit.node.fake_docker import FakeDocker

NAME = "dsv41-1017-exl3-tf"
MEMBERS = [
    {
        "name": f"spark-{r + 1}",
        "rank": r,
        "rails": [{"address": f"10.77.0.{r + 1}/30"}, {"address": f"10.77.0.{r + 5}/30"}],
    }
    for r in range(2)
]


def params(state: str = "present", **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "state": state,
        "replica": "spark-a",
        "rank": 0,
        "members": MEMBERS,
        "rails": [],
        "engine": PROFILE,
        "settings": {"context": 524288},
        "image": "sparkfleet/tensorfold-native:0123456789ab",
        "image_content": "c" * 64,
        "paths": PATHS,
        "agent": "/usr/local/lib/sparkfleet/1/sparkfleet-node",
        "agent_sha256": "0",
        "log_dir": "/var/lib/sparkfleet/logs",
        "log_keep": 10,
        "release_dir": "/var/lib/sparkfleet/releases",
        "plan": {},
        "peer_port": 29630,
        "peer_key": "",
        "boot": None,
    }
    values.update(more)
    return values


@pytest.fixture
def bare(node: TreeHost) -> TreeHost:
    """The healthy node of the agent's tests before anything of ours is on it."""
    for path in ("etc/sparkfleet/replicas/spark-a/launch.json", "etc/sparkfleet/replicas/spark-a/peer.key"):
        (node.root / path).unlink()
    (node.root / "etc/sparkfleet/install-id").unlink()
    (node.root / "etc/sparkfleet/replicas/spark-a").rmdir()
    return node


def tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_it_is_written_once(bare: TreeHost, api: DockerApi) -> None:
    first = ensure(bare, api, params(peer_key="k" * 64), False)
    assert first["changed"]
    again = ensure(bare, api, params(), False)
    assert not again["changed"] and again["diff"] == []
    for path, mode in (("launch.json", 0o600), ("peer.key", 0o600)):
        assert (bare.root / "etc/sparkfleet/replicas/spark-a" / path).stat().st_mode & 0o777 == mode
    assert bare.unit("sparkfleet-peer.service")["ActiveState"] == "active"
    assert ["systemctl", "start", "sparkfleet-rank@spark-a.service"] not in bare.calls


def test_the_plan_stays_while_its_launch_does(bare: TreeHost, api: DockerApi) -> None:
    """Live numbers of a later plan write nothing; another launch brings its own plan."""
    path = bare.root / "etc/sparkfleet/replicas/spark-a/plan.json"
    ensure(bare, api, params(peer_key="k" * 64, plan={"available": 110.1}), False)
    again = ensure(bare, api, params(plan={"available": 99.9}), False)
    assert not again["changed"] and json.loads(path.read_text())["plan"] == {"available": 110.1}
    other = params(plan={"available": 99.9}, settings={"context": 8192})
    assert ensure(bare, api, other, False)["changed"]
    assert json.loads(path.read_text())["plan"] == {"available": 99.9}
    ensure(bare, api, params("absent"), False)
    assert not path.exists()


@pytest.mark.field("B81", "E13")
def test_an_image_that_does_not_state_its_nccl_is_warned_of(
    bare: TreeHost, api: DockerApi, docker: FakeDocker
) -> None:
    def warned(config: dict[str, Any]) -> str:
        docker.images[params()["image"]] = {"Id": "sha256:x", "Config": config}
        return " ".join(ensure(bare, api, params("planned", peer_key="k" * 64), False)["warnings"])

    assert "has no label sparkfleet.nccl" in warned({})
    assert "has no label" in warned({"Labels": {"sparkfleet.nccl": ""}})
    assert "states NCCL 2.28.9" in warned({"Labels": {"sparkfleet.nccl": "2.28.9"}})
    assert warned({"Labels": {"sparkfleet.nccl": "2.30.4+cuda13.0"}}) == ""
    docker.images.clear()
    assert ensure(bare, api, params("planned", peer_key="k" * 64), False)["warnings"] == []


def test_check_mode_predicts_and_writes_nothing(bare: TreeHost, api: DockerApi) -> None:
    before = tree(bare.root)
    found = ensure(bare, api, params(), True)
    assert found["changed"] and tree(bare.root) == before
    assert not [call for call in bare.calls if call[0] == "systemctl" and call[1] != "show"]
    announced = {row["after_header"] for row in found["diff"]}
    ensure(bare, api, params(peer_key="k" * 64), False)
    written = {f"/{path}" for path in set(tree(bare.root)) - set(before)}
    assert written <= announced


def test_the_diff_shows_the_command_and_no_secret(bare: TreeHost, api: DockerApi) -> None:
    found = ensure(bare, api, params(peer_key="k" * 64, api_key="canary-key-123"), False)
    text = json.dumps(found)
    assert "docker run -d" in text and "resolved at start (now 3)" in text
    assert "canary" not in text and "k" * 64 not in text
    assert "canary" not in (bare.read("/etc/sparkfleet/replicas/spark-a/launch.json") or "")
    path = bare.root / "etc/sparkfleet/secrets/spark-a.api-key"
    assert path.read_text() == "canary-key-123\n" and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    renewed = ensure(bare, api, params("planned", api_key="another-key-456"), True)
    first = json.loads(bare.read("/etc/sparkfleet/replicas/spark-a/launch.json") or "{}")
    assert renewed["launch_wanted"] != first["hash"], "another key is another launch"


def test_a_readable_key_file_is_refused(bare: TreeHost, api: DockerApi) -> None:
    with pytest.raises(Refusal, match="absent or empty"):
        ensure(bare, api, params(api_key_file="/etc/key"), True)
    bare.write("/etc/key", "secret\n", 0o644)
    with pytest.raises(Refusal, match="readable by others"):
        ensure(bare, api, params(api_key_file="/etc/key"), True)


def test_rails_are_found_by_address(bare: TreeHost, api: DockerApi) -> None:
    found = ensure(bare, api, params("planned"), True)
    assert "NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0" in found["command"]
    assert "NCCL_SOCKET_IFNAME=enp1s0f0np0" in found["command"]
    assert found["gid_now"] == 3 and found["changed"] is False


def test_the_plan_of_the_rails_stands_in_on_a_bare_node(bare: TreeHost, api: DockerApi) -> None:
    import shutil

    shutil.rmtree(bare.root / "sys/class/infiniband")
    with pytest.raises(Refusal, match="no interface known for rail 0"):
        ensure(bare, api, params("planned"), True)
    rails = [
        {"address": "10.77.0.1/30", "netdev": "enp1s0f0np0", "hca": "rocep1s0f0"},
        {"address": "10.77.0.5/30", "netdev": "enP2p1s0f0np0", "hca": "roceP2p1s0f0"},
    ]
    found = ensure(bare, api, params("planned", rails=rails), True)
    assert "resolved at start (unknown yet)" in found["command"]


@pytest.mark.field("B19")
def test_a_drifted_index_changes_nothing(bare: TreeHost, api: DockerApi) -> None:
    from tests.unit.node.conftest import add_gid

    ensure(bare, api, params(peer_key="k" * 64), False)
    before = ensure(bare, api, params("planned"), False)
    for hca, netdev, address in (
        ("rocep1s0f0", "enp1s0f0np0", "10.77.0.1"),
        ("roceP2p1s0f0", "enP2p1s0f0np0", "10.77.0.5"),
    ):
        (bare.root / f"sys/class/infiniband/{hca}/ports/1/gids/3").unlink()
        add_gid(bare.root, hca, 6, address, netdev)
    after = ensure(bare, api, params("planned"), False)
    assert after["gid_now"] == 6 and after["launch_wanted"] == before["launch_wanted"]
    assert after["changes"] == before["changes"] == []


def test_a_new_agent_restarts_the_peer_service_and_no_rank(bare: TreeHost, api: DockerApi) -> None:
    ensure(bare, api, params(peer_key="k" * 64), False)
    launch = bare.read("/etc/sparkfleet/replicas/spark-a/launch.json")
    bare.calls.clear()
    assert ensure(bare, api, params(agent="/usr/local/lib/sparkfleet/2/sparkfleet-node"), False)["changed"]
    assert ["systemctl", "restart", "sparkfleet-peer.service"] in bare.calls
    assert not [
        call for call in bare.calls if "sparkfleet-rank@spark-a.service" in call and call[1] != "show"
    ]
    assert bare.read("/etc/sparkfleet/replicas/spark-a/launch.json") == launch


def test_start_at_boot_is_only_touched_when_asked(bare: TreeHost, api: DockerApi) -> None:
    ensure(bare, api, params(peer_key="k" * 64), False)
    unit = bare.unit("sparkfleet-boot@spark-a.service")
    assert unit["UnitFileState"] == "disabled"
    assert ensure(bare, api, params(boot=True), False)["changed"]
    assert unit["UnitFileState"] == "enabled"
    assert not ensure(bare, api, params(boot=True), False)["changed"]
    assert not ensure(bare, api, params(), False)["changed"]
    assert ensure(bare, api, params(boot=False), False)["changed"]


def deployed(bare: TreeHost, api: DockerApi) -> dict[str, Any]:
    ensure(bare, api, params(peer_key="k" * 64), False)
    launch: dict[str, Any] = json.loads(bare.read("/etc/sparkfleet/replicas/spark-a/launch.json") or "{}")
    return launch


def test_a_start_that_fails_says_why(bare: TreeHost, api: DockerApi) -> None:
    deployed(bare, api)

    def fails(name: str) -> tuple[int, str, str]:
        bare.unit(name)["ActiveState"] = "failed"
        status = {
            "phase": "failed",
            "message": "the container ended with exit code 1: NoTokenMap",
            "tail": ["a", "b"],
        }
        bare.write("/run/sparkfleet/spark-a/rank.json", json.dumps(status))
        return 1, "", "Job for sparkfleet-rank@spark-a.service failed"

    bare.on_start = fails
    with pytest.raises(Refusal, match=r"rank 0 of spark-a did not start: .*NoTokenMap\n  a\n  b"):
        ensure(bare, api, params("started"), False)


def test_started_and_stopped_are_idempotent(
    bare: TreeHost,
    api: DockerApi,
    docker: FakeDocker,
) -> None:
    launch = deployed(bare, api)

    def starts(name: str) -> tuple[int, str, str]:
        bare.unit(name)["ActiveState"] = "active"
        docker.add(NAME, launch["container"]["labels"])
        return 0, "", ""

    bare.on_start = starts
    assert ensure(bare, api, params("started"), False)["changed"]
    assert not ensure(bare, api, params("started"), False)["changed"]
    assert ensure(bare, api, params("started", restart=True), True)["changed"], "a stop goes before it"
    predicted = ensure(bare, api, params("stopped"), True)
    assert (predicted["changed"], predicted["ran"]) == (True, True)
    announced = [diff["after_header"] for diff in predicted["diff"]]
    assert announced == ["unit sparkfleet-rank@spark-a.service", f"tree {launch['logs']['dir']}"]
    assert ensure(bare, api, params("stopped"), False)["changed"]
    assert docker.containers == {}
    again = ensure(bare, api, params("stopped"), False)
    assert (again["changed"], again["ran"]) == (False, False)


@pytest.mark.parametrize(("running", "said"), [(3, ["3 requests were running and are cut off"]), (0, [])])
def test_a_stop_says_what_it_cuts_off(
    bare: TreeHost, api: DockerApi, docker: FakeDocker, running: int, said: list[str]
) -> None:
    class Health(BaseHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"requests_running": running, "rounds_total": 1}).encode())

    launch = deployed(bare, api)
    docker.add(NAME, launch["container"]["labels"])
    bare.unit("sparkfleet-rank@spark-a.service")["ActiveState"] = "active"
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        launch["ports"]["api"] = server.server_address[1]
        bare.write("/etc/sparkfleet/replicas/spark-a/launch.json", json.dumps(launch), 0o600)
        assert ensure(bare, api, params("stopped"), False)["warnings"] == said
        server.shutdown()


def test_docker_that_does_not_answer_is_not_stopped(
    bare: TreeHost,
    api: DockerApi,
    docker: FakeDocker,
) -> None:
    deployed(bare, api)
    docker.denied = True
    with pytest.raises(Refusal, match="unknown"):
        ensure(bare, api, params("stopped"), False)


def test_a_foreign_container_is_never_stopped_or_removed(
    bare: TreeHost,
    api: DockerApi,
    docker: FakeDocker,
) -> None:
    docker.add(NAME, {"sparkfleet.install": "another"})
    assert ensure(bare, api, params("planned"), False)["verdict"] == "foreign"
    deployed(bare, api)
    ensure(bare, api, params("stopped"), False)
    ensure(bare, api, params("absent"), False)
    assert docker.find(NAME)["State"]["Running"]


def test_absent_leaves_what_other_replicas_need(bare: TreeHost, api: DockerApi) -> None:
    deployed(bare, api)
    bare.write("/etc/sparkfleet/replicas/other/launch.json", "{}")
    ensure(bare, api, params("absent"), False)
    assert bare.exists("/etc/systemd/system/sparkfleet-peer.service")
    assert not bare.exists("/etc/sparkfleet/replicas/spark-a")
    deployed(bare, api)
    bare.remove("/etc/sparkfleet/replicas/other/launch.json")
    (bare.root / "etc/sparkfleet/replicas/other").rmdir()
    assert ensure(bare, api, params("absent"), True)["changed"]
    assert ensure(bare, api, params("absent"), False)["changed"]
    assert not bare.exists("/etc/systemd/system/sparkfleet-peer.service")
    assert not ensure(bare, api, params("absent"), False)["changed"]


def test_a_damaged_launch_file_is_replaced(bare: TreeHost, api: DockerApi) -> None:
    deployed(bare, api)
    bare.write("/etc/sparkfleet/replicas/spark-a/launch.json", "{", 0o600)
    assert ensure(bare, api, params(), False)["changed"]
    assert not ensure(bare, api, params(), False)["changed"]


def test_wrong_settings_change_nothing(bare: TreeHost, api: DockerApi) -> None:
    before = tree(bare.root)
    with pytest.raises(Refusal, match="context: has no default"):
        ensure(bare, api, params(settings={}, peer_key="k" * 64), False)
    assert tree(bare.root) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_the_engines_own_parser_reads_the_command_and_nothing_of_it_stays(
    bare: TreeHost, docker: FakeDocker, api: DockerApi, rank: int
) -> None:
    rails = [
        {"address": f"10.77.0.{rank + 1}/30", "netdev": "enp1s0f0np0", "hca": "rocep1s0f0"},
        {"address": f"10.77.0.{rank + 5}/30", "netdev": "enP2p1s0f0np0", "hca": "roceP2p1s0f0"},
    ]
    said = "/model is neither a directory nor a model name in the cache"
    docker.on_start = lambda row: docker.end(row["Id"], 1, f"{said}\n")
    found = ensure(bare, api, params("tried", rank=rank, rails=rails), False)
    verdict = "accepted" if rank == 0 else "unclear"
    assert found == {"changed": False, "parser": {"verdict": verdict, "said": f"exit code 1: {said}"}}
    docker.on_start = lambda row: docker.end(row["Id"], 2, "BadArgument: unknown argument --pool\n")
    with pytest.raises(Refusal, match=f"does not take the planned command of rank {rank}"):
        ensure(bare, api, params("tried", rank=rank, rails=rails), False)
    assert docker.containers == {}
    silent = {**PROFILE, "image": {"binaries": []}}
    assert ensure(bare, api, params("tried", engine=silent), False)["parser"]["verdict"] == "not asked"
