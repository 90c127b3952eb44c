"""What nobody uses is found and goes on request; everything else stays, whoever it belongs to."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import nfs, prune, shares, tree
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import DockerConflict

from .conftest import fill, manifest, run_module


def proven(root: Path, size: int = 1000, seed: int = 1) -> Path:
    """A tree as the modules leave it: files and the proof beside it."""
    fill(root, {"a.safetensors": size, "sub/config.json": 10}, seed)
    files = tree.parse_files(manifest(root))
    proof = tree.Proof()
    tree.prove(root, tree.inspect(root, files, proof), proof)
    proof.listing = files
    tree.write_proof(tree.proof_path(root), proof)
    return root


class Node:
    """A data directory with two releases, and what no release uses."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.launches = root / "replicas"
        self.used = proven(self.data / "models/o--m/v1")
        self.before = proven(self.data / "models/o--m/v0")
        self.old = proven(self.data / "models/o--m/v-1")
        self.launched = proven(self.data / "rank-files/v1/0123456789abcdef0123")
        self.rank_file = proven(self.data / "rank-files/v-1/0123456789abcdef0123")
        self.partial = fill(self.data / "engram/o--e/.v2.partial", {"x": 5})
        self.map = fill(self.data / "token-map/o--m/v-1", {"dsv41_token_map.json": 5})
        self.cache = fill(self.data / "cache/0123456789ab", {"k": 7})
        self.strange = [
            fill(self.data / "models/mine/v1", {"no-proof": 5}),
            fill(self.data / "cache/notes", {"x": 5}),
            fill(self.data / "mine", {"x": 5}),
        ]
        self.mark(self.used, self.before)
        (self.launches / "pair").mkdir(parents=True)
        self.launch(self.launched)

    def mark(self, current: Path | None, previous: Path | None) -> None:
        def release(path: Path | None) -> dict[str, Any]:
            return {"launch_hash": "x", **({"paths": [str(path)]} if path else {})}

        (self.data / "releases").mkdir(exist_ok=True)
        (self.data / "releases/pair.json").write_text(
            json.dumps({"schema": 1, "current": release(current), "previous": release(previous)})
        )

    def launch(self, path: Path) -> None:
        mounts = [{"source": str(path), "target": "/x"}]
        (self.launches / "pair/launch.json").write_text(json.dumps({"container": {"mounts": mounts}}))

    def run(self, state: str = "absent", check: bool = False, **more: Any) -> dict[str, Any]:
        given = {
            "state": state,
            "data_dir": str(self.data),
            "releases": str(self.data / "releases"),
            "launches": str(self.launches),
            "docker_socket": str(self.data / "no.sock"),
            **more,
        }
        return run_module("unused_data", given, check)

    @property
    def garbage(self) -> set[str]:
        return {str(path) for path in (self.old, self.rank_file, self.partial, self.map, self.cache)}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def names(answer: dict[str, Any]) -> set[str]:
    return {row["path"] for row in answer["unused"]}


def files(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*")}


def test_it_is_listed_first_and_removed_on_request_alone(node: Node) -> None:
    before = files(node.data)
    listed = node.run("listed")
    predicted = node.run(check=True)
    assert (listed["changed"], predicted["changed"]) == (False, True)
    assert names(listed) == names(predicted) == node.garbage
    assert files(node.data) == before
    removed = node.run()
    assert removed["changed"] and names(removed) == node.garbage
    assert not any(Path(path).exists() for path in node.garbage)
    for path in (node.used, node.before, node.launched, *node.strange):
        assert path.is_dir()
    assert not tree.proof_path(node.old).exists() and tree.proof_path(node.used).exists()
    assert not (node.data / "rank-files/v-1").exists(), "an empty parent goes too"
    again = node.run()
    assert (again["changed"], again["unused"]) == (False, [])


def test_who_uses_what_is_said(node: Node) -> None:
    used = {row["path"]: row["by"] for row in node.run("listed")["used"]}
    assert used[str(node.used)] == "current release of pair"
    assert used[str(node.before)] == "previous release of pair"
    assert used[str(node.launched)] == "launch of pair"


def test_what_the_inventory_names_stays(node: Node) -> None:
    assert names(
        node.run("listed", keep=[str(node.old), str(node.data / "rank-files/v-1")])
    ) == node.garbage - {
        str(node.old),
        str(node.rank_file),
    }


def test_a_tree_with_somebody_elses_file_stays_and_is_named(node: Node) -> None:
    (node.old / "notes.txt").write_text("mine")
    (node.map / "other.json").write_text("mine")
    answer = node.run()
    assert {row["path"] for row in answer["foreign"]} == {str(node.old), str(node.map)}
    assert (node.old / "notes.txt").read_text() == "mine"
    assert node.map.is_dir() and not node.cache.exists()


@pytest.mark.parametrize("break_it", ["paths", "previous", "marker", "launch", "lock"])
def test_unknown_is_never_unused(node: Node, break_it: str) -> None:
    held = None
    if break_it == "paths":
        node.mark(None, node.before)
    elif break_it == "previous":
        node.mark(node.used, None)
    elif break_it == "marker":
        (node.data / "releases/pair.json").write_text("{")
    elif break_it == "launch":
        (node.launches / "pair/launch.json").write_text("[]")
    else:
        (node.data / "locks").mkdir()
        held = (node.data / "locks/fetch-0123").open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        before = files(node.data)
        assert len(node.run("listed")["unknown"]) == 1
        for check in (True, False):
            assert "nothing is removed" in node.run(check=check)["msg"]
        assert files(node.data) == before
    finally:
        if held is not None:
            held.close()


def test_a_launch_without_a_container_is_unknown_and_says_what_it_lacks(node: Node) -> None:
    (node.launches / "pair/launch.json").write_text("{}")
    (sentence,) = node.run("listed")["unknown"]
    assert sentence == "the launch file of pair cannot be read (KeyError('container'))"


def test_a_docker_that_does_not_answer_is_unknown(node: Node) -> None:
    (node.data / "no.sock").write_text("not a socket")
    assert "Docker does not say" in node.run()["msg"]
    assert node.old.exists()


def test_a_container_and_an_export_are_users_of_what_they_hold() -> None:
    found = [
        prune.Found(Path("/d/models/o--m/v1"), "models"),
        prune.Found(Path("/d/engram/o--e/v1"), "engram"),
    ]
    uses = prune.container_uses(
        [{"Names": ["/x"], "Mounts": [{"Source": "/d/models/o--m/v1/sub"}, {"Type": "tmpfs"}]}]
    )
    uses.update(prune.export_uses(['# a\n"/d/engram" 10.77.0.2(ro)\n']))
    prune.mark(found, uses)
    assert [one.used_by for one in found] == ["container x", "an NFS export"]
    other = [prune.Found(Path("/d/models/o--m/v10"), "models")]
    prune.mark(other, uses)
    assert other[0].unused, "a name that begins alike is another directory"


def test_a_link_elsewhere_frees_nothing(node: Node) -> None:
    shard = node.old / "a.safetensors"
    (node.used / "a.safetensors").unlink()
    os.link(shard, node.used / "a.safetensors")
    rows = {row["path"]: row["bytes"] for row in node.run("listed")["unused"]}
    assert rows[str(node.old)] == 10
    shutil.rmtree(node.used)
    rows = {row["path"]: row["bytes"] for row in node.run("listed")["unused"]}
    assert rows[str(node.old)] == 1010


def test_links_are_not_followed(node: Node, tmp_path: Path) -> None:
    outside = proven(tmp_path / "outside/o--m/v9")
    (node.data / "models/o--x").mkdir()
    (node.data / "models/o--x/v9").symlink_to(outside)
    (node.data / "kit").symlink_to(tmp_path / "outside")
    node.run()
    assert outside.is_dir()


ONE, TWO = "engram-0123456789ab", "engram-ba9876543210"
LABELS = dict([shares.LABEL])


class Docker:
    """Volumes and containers of a node."""

    def __init__(self) -> None:
        self.volumes: dict[str, dict[str, str]] = {}
        self.containers: list[dict[str, Any]] = []
        self.busy = False

    def container_list(self) -> list[dict[str, Any]]:
        return self.containers

    def volume_list(self, label: str) -> list[dict[str, Any]]:
        key, _equals, value = label.partition("=")
        return [
            {"Name": name, "Labels": labels}
            for name, labels in self.volumes.items()
            if labels.get(key) == value
        ]

    def volume_remove(self, name: str) -> None:
        if self.busy:
            raise DockerConflict(409, "volume is in use - [0123]", "DELETE /volumes")
        del self.volumes[name]


class Shares:
    """A node with exports and volumes: of two revisions, by hand, and of the role nfs_share alone."""

    def __init__(self, node: Node, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.docker = Docker()
        self.exports_d = root / "exports.d"
        self.exports_d.mkdir()
        self.clients = root / "clients"
        self.taken: list[list[str]] = []
        for name in (ONE, TWO, "model"):
            self.export(name)
            self.docker.volumes[f"sparkfleet-{name}"] = LABELS
        self.docker.volumes["sparkfleet-engram-000000000000"] = {}
        (self.exports_d / "mine.exports").write_text("/srv/mine *(ro)\n")
        (node.data / "no.sock").touch()
        module = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.unused_data")
        monkeypatch.setattr(module, "EXPORTS", root / "exports")
        monkeypatch.setattr(module, "EXPORTS_D", self.exports_d)
        monkeypatch.setattr(module, "NFS_CLIENTS", self.clients)
        monkeypatch.setattr(module, "DockerApi", lambda _socket: self.docker)
        monkeypatch.setattr(module, "need_tool", lambda name, _package: name)
        monkeypatch.setattr(module.AnsibleModule, "run_command", lambda _self, argv: self.taken.append(argv))

    def export(self, name: str) -> None:
        tree_of = self.node.data / "engram/o--e" / name
        (self.exports_d / nfs.export_file(name)).write_text(nfs.export_text(str(tree_of), ["10.77.0.2"]))

    def uses(self, *paths: str) -> None:
        """A release that needs these, and the directories that the node's data expects."""
        both = {"paths": [str(self.node.used), *paths]}
        marker = {"schema": 1, "current": both, "previous": {"paths": [str(self.node.before)]}}
        (self.node.data / "releases/pair.json").write_text(json.dumps(marker))

    def unused(self, **more: Any) -> set[str]:
        rows = self.node.run("listed", **more)["unused"]
        found = {Path(row["path"]).stem for row in rows if "engram-" in row["path"]}
        return {name.removeprefix("volume:sparkfleet-").removeprefix("sparkfleet-") for name in found}

    def left(self) -> set[str]:
        return {path.name for path in self.exports_d.iterdir()} | set(self.docker.volumes)


@pytest.fixture
def shared(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shares:
    return Shares(node, tmp_path, monkeypatch)


def test_a_share_that_no_release_needs_is_listed_and_goes_with_its_tree(shared: Shares) -> None:
    given = proven(shared.node.data / "engram/o--e" / ONE)
    shared.uses(f"export:{TWO}", f"volume:sparkfleet-{TWO}")
    before = shared.left()
    listed, predicted = shared.node.run("listed"), shared.node.run(check=True)
    rows = {row["path"]: row["what"] for row in listed["unused"]}
    file = shared.exports_d / nfs.export_file(ONE)
    assert rows[str(file)] == f"NFS export of {given} to 10.77.0.2"
    assert rows[f"volume:sparkfleet-{ONE}"] == "Docker volume over NFS"
    assert str(given) in rows, "an export that goes holds its tree no more"
    assert shared.unused() == {ONE}
    assert predicted["changed"] and names(predicted) == names(listed)
    assert shared.left() == before and shared.taken == []
    removed = shared.node.run()
    assert removed["changed"] and names(removed) == names(listed)
    assert before - shared.left() == {file.name, f"sparkfleet-{ONE}"}, (
        "of others and of other roles all is there"
    )
    assert shared.taken == [["exportfs", "-u", f"10.77.0.2:{given}"]]
    assert not given.exists()
    assert not shared.node.run()["changed"]


def test_who_needs_a_share_keeps_it(shared: Shares) -> None:
    assert shared.unused() == {ONE, TWO}
    assert shared.unused(keep=[f"export:{ONE}", f"volume:sparkfleet-{ONE}"]) == {TWO}
    (shared.clients / "7").mkdir(parents=True)
    (shared.clients / "7/info").write_text('clientid: 0x1\naddress: "10.77.0.2:790"\nname: "x"\n')
    rows = {row["path"] for row in shared.node.run("listed")["unused"]}
    assert not any(path.endswith(".exports") for path in rows), "a client reads from it"
    (shared.clients / "7/info").write_text('address: "10.77.0.20:790"\n')
    assert shared.unused() == {ONE, TWO}
    shared.docker.containers = [
        {"Names": ["/r"], "Mounts": [{"Type": "volume", "Name": f"sparkfleet-{ONE}", "Source": "/var/lib/x"}]}
    ]
    mounts = [{"source": f"sparkfleet-{TWO}", "target": "/engram"}]
    (shared.node.launches / "pair/launch.json").write_text(json.dumps({"container": {"mounts": mounts}}))
    rows = {row["path"] for row in shared.node.run("listed")["unused"]}
    assert not any(path.startswith("volume:") for path in rows)


def test_a_volume_that_is_taken_meanwhile_is_an_error(shared: Shares) -> None:
    shared.docker.busy = True
    assert "is in use" in shared.node.run()["msg"]
    assert shared.node.old.exists(), "shares first"
