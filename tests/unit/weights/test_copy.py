"""Copies between nodes: a real rsync daemon with the configuration that a node runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import fabric_copy, tree
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError

from .conftest import ROOT, Share, fill, manifest, run_module

SIZES = {"config.json": 300, "a.safetensors": 3_000_000, "b.safetensors": 2_000_001, "deep/er/x y*.bin": 10}
Start = Callable[..., Share]


def copy(dest: Path, files: list[dict[str, Any]], check: bool = False, **args: Any) -> dict[str, Any]:
    given = {
        "dest": str(dest),
        "files": files,
        "data_dir": str(dest.parent / "data"),
        "reserve_bytes": 0,
        **args,
    }
    return run_module("tree_copy", given, check)


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def wait_for_lock(folder: Path) -> None:
    """Until the killed processes are gone: they hold the lock to their end."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            for lock in folder.iterdir():
                with tree.exclusive(lock, "tree"):
                    pass
        except TreeError:
            time.sleep(0.05)
        else:
            return


def test_a_copy_is_predicted_made_proven_and_then_nothing(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src", SIZES)
    one = share(source)
    dest = tmp_path / "node/tree"
    files = manifest(source)
    looked = copy(dest, files, state="compared")
    assert (looked["changed"], looked["needed"], looked["files_needed"]) == (False, True, 4)
    predicted = copy(dest, files, check=True)
    assert (predicted["changed"], predicted["bytes_needed"]) == (True, 5_000_311)
    assert not dest.parent.exists()
    made = copy(dest, files, source=one.source)
    assert (made["changed"], made["complete"]) == (True, True)
    assert contents(dest) == contents(source)
    assert sorted(path.name for path in dest.parent.iterdir()) == [".tree.proof.json", "data", "tree"]
    sent = one.sent()
    again = copy(dest, files, source=one.source)
    assert (again["changed"], again["complete"], one.sent()) == (False, True, sent)
    assert "diff" in made
    assert "a.safetensors 3000000" in made["diff"][0]["after"]


def test_a_folder_of_the_share_can_be_the_root(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src/rank/one", SIZES)
    made = copy(
        tmp_path / "n/t", manifest(source), source={**share(tmp_path / "src").source, "folder": "rank/one"}
    )
    assert made["complete"], made
    assert contents(tmp_path / "n/t") == contents(source)


@pytest.mark.field("B63")
@pytest.mark.parametrize("part", [10, 50, 90])
def test_a_killed_copy_resumes_and_nothing_had_its_final_name(
    tmp_path: Path, share: Start, part: int
) -> None:
    source = fill(tmp_path / "src", {"big.bin": 20_000_000})
    one = share(source)
    dest = tmp_path / "n/tree"
    files = manifest(source)
    script = (
        "import json, sys; sys.path[:0] = sys.argv[2:]; from tests.unit.weights.conftest import run_module; "
        "run_module('tree_copy', json.loads(sys.argv[1]))"
    )
    args = {
        "dest": str(dest),
        "files": files,
        "source": one.source,
        "data_dir": str(tmp_path / "n/data"),
        "reserve_bytes": 0,
        "rate_limit_kib": 8000,
    }
    child = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(args), str(ROOT), str(ROOT / "collections")],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    partial = tmp_path / "n/.tree.partial/big.bin"
    deadline = time.monotonic() + 30
    while (not partial.exists() or partial.stat().st_size < part * 200_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    wait_for_lock(tmp_path / "n/data/locks")
    have = partial.stat().st_size
    assert part * 200_000 <= have < 20_000_000
    assert not dest.exists()
    sent = one.sent()
    made = copy(dest, files, source=one.source)
    assert made.get("complete"), made
    assert made["bytes_resumable"] == have
    assert contents(dest) == contents(source)
    assert one.sent() - sent < 20_000_000 - have + 100_000


def test_a_killed_parent_leaves_the_lock_with_the_process_that_still_writes(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with tree.exclusive(lock, "tree") as handle:
        child = subprocess.Popen(["sleep", "30"], pass_fds=(handle,))
    with pytest.raises(TreeError, match="another run"), tree.exclusive(lock, "tree"):
        pass
    child.terminate()
    child.wait()
    with tree.exclusive(lock, "tree"):
        pass


def test_a_kept_part_that_is_wrong_is_brought_again_as_a_whole(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src", SIZES)
    dest = tmp_path / "n/tree"
    partial = tmp_path / "n/.tree.partial"
    partial.mkdir(parents=True)
    (partial / "a.safetensors").write_bytes(bytes(1_000_000))
    made = copy(dest, manifest(source), source=share(source).source)
    assert made.get("complete"), made
    assert contents(dest) == contents(source)


@pytest.mark.field("B63")
def test_a_source_that_holds_other_bytes_is_refused(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src", SIZES)
    files = manifest(source)
    data = bytearray((source / "a.safetensors").read_bytes())
    data[77] ^= 1
    (source / "a.safetensors").write_bytes(data)
    answer = copy(tmp_path / "n/tree", files, source=share(source).source)
    assert answer["failed"]
    assert "a.safetensors" in answer["msg"]
    assert "sha256" in answer["msg"]
    assert not (tmp_path / "n/tree").exists()


def test_a_truncated_source_file_is_refused(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src", SIZES)
    files = manifest(source)
    os.truncate(source / "b.safetensors", 1_000_000)
    answer = copy(tmp_path / "n/tree", files, source=share(source).source)
    assert answer["failed"]
    assert "1000000 bytes came instead of 2000001" in answer["msg"]


def test_a_dead_source_and_a_stranger_are_told_apart(tmp_path: Path, share: Start, monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    source = fill(tmp_path / "src", {"a": 5})
    files = manifest(source)
    one = share(source)
    one.stop()
    answer = copy(tmp_path / "n/tree", files, source=one.source)
    assert "does not answer" in answer["msg"]
    stranger = share(source, clients=("10.9.9.9",))
    answer = copy(tmp_path / "n/tree", files, source=stranger.source)
    assert "refuses this node" in answer["msg"]


def test_the_share_cannot_be_written(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src", {"a": 5})
    one = share(source)
    (tmp_path / "evil").write_text("x")
    done = subprocess.run(
        ["rsync", str(tmp_path / "evil"), f"rsync://127.0.0.1:{one.port}/{fabric_copy.MODULE}/"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "read only" in done.stderr
    assert not (source / "evil").exists()


def test_a_foreign_shard_in_the_tree_is_refused_and_stays(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src", SIZES)
    files = manifest(source)
    dest = tmp_path / "n/tree"
    one = share(source)
    copy(dest, files, source=one.source)
    (dest / "zz.safetensors").write_text("mine")
    answer = copy(dest, files, source=one.source)
    assert answer["failed"]
    assert "zz.safetensors" in answer["msg"]
    assert (dest / "zz.safetensors").read_text() == "mine"


def test_a_flipped_byte_is_repaired_on_demand(tmp_path: Path, share: Start) -> None:
    source = fill(tmp_path / "src", SIZES)
    files = manifest(source)
    dest = tmp_path / "n/tree"
    one = share(source)
    copy(dest, files, source=one.source)
    target = dest / "a.safetensors"
    before = target.stat()
    with target.open("r+b") as out:
        out.write(b"\xff\xff")
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not copy(dest, files, source=one.source)["changed"]
    repaired = copy(dest, files, source=one.source, rehash=True)
    assert (repaired["changed"], repaired["files_needed"], repaired["complete"]) == (True, 1, True)
    assert contents(dest) == contents(source)


def test_too_little_space_is_said_before_anything_moves(tmp_path: Path) -> None:
    files = [{"name": "a", "size": 1 << 60, "sha256": "0" * 64}]
    for check in (True, False):
        answer = copy(tmp_path / "n/tree", files, check=check)
        assert answer["failed"]
        assert "short" in answer["msg"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ([{"address": "10.0.0.1; rm", "clients": ["10.0.0.2"]}], "IP addresses"),
        ([{"address": "10.0.0.1", "clients": []}], "no client"),
        ([{"address": "10.0.0.1", "clients": ["*"]}], "IP addresses"),
    ],
)
def test_nothing_but_addresses_reaches_the_daemon(raw: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(TreeError, match=text):
        fabric_copy.parse_listen(raw)


def test_the_unit_ends_by_itself_and_serves_one_address() -> None:
    listen = fabric_copy.parse_listen([{"address": "10.77.0.1", "clients": ["10.77.0.2"]}])
    text = fabric_copy.daemon_config("/var/lib/sparkfleet/models", listen[0], 29873)
    assert "address = 10.77.0.1" in text
    assert "hosts allow = 10.77.0.2\nhosts deny = *" in text
    argv = fabric_copy.daemon_argv("u.service", Path("/run/x.conf"), "/usr/bin/rsync", 600)
    assert "RuntimeMaxSec=600" in argv
    assert "DynamicUser=yes" in argv
    with pytest.raises(TreeError, match="cannot be shared"):
        fabric_copy.daemon_config("/x\npath = /", listen[0], 1)
    with pytest.raises(TreeError, match="cannot name"):
        fabric_copy.unit_name("a;b", 0)
