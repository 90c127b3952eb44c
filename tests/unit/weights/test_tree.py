"""Trees, manifests and proofs."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import tree
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError
from hypothesis import given
from hypothesis import strategies as st

from .conftest import fill, manifest

SIZES = {"config.json": 300, "model-00001-of-00002.safetensors": 70_000, "sub/last.bin": 1}


def proven(root: Path) -> tuple[tuple[tree.FileSpec, ...], tree.Proof]:
    files = tree.parse_files(manifest(root))
    proof = tree.Proof()
    assert tree.prove(root, tree.inspect(root, files, proof), proof).complete
    return files, proof


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "-rf", "a\nb", ".", "a/."])
def test_a_name_never_leaves_the_tree(name: str) -> None:
    with pytest.raises(TreeError, match="plain path"):
        tree.parse_files([{"name": name, "size": 1, "sha256": "0" * 64}])


@given(st.text(min_size=1, max_size=40))
def test_every_accepted_name_stays_below_its_root(name: str) -> None:
    try:
        tree.check_name(name)
    except TreeError:
        return
    assert os.path.normpath(f"/root/{name}").startswith("/root/")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"name": "a", "size": -1, "sha256": "0" * 64}, "size of -1"),
        ({"name": "a", "size": 1, "sha256": "xyz"}, "not a sha256"),
        ({"name": "a", "size": 1}, "neither sha256"),
        ({"name": "a"}, "needs name and size"),
        ({"name": "a", "size": 1, "blob_id": "12"}, "git blob"),
    ],
)
def test_a_manifest_that_proves_nothing_is_refused(entry: dict[str, Any], text: str) -> None:
    with pytest.raises(TreeError, match=text):
        tree.parse_files([entry])


def test_small_files_get_their_digest_from_the_list_of_the_pinned_revision() -> None:
    bare = tree.parse_files([{"name": "a", "size": 1}], digests=False)
    listed = tree.parse_files([{"name": "a", "size": 1, "blob_id": "1" * 40}])
    assert tree.complete_digests(bare, listed) == listed
    with pytest.raises(TreeError, match="do not belong together"):
        tree.complete_digests(tree.parse_files([{"name": "a", "size": 2}], digests=False), listed)


def test_a_git_blob_id_proves_a_small_file(tmp_path: Path) -> None:
    # `printf 'hello\\n' | git hash-object --stdin`
    (tmp_path / "a").write_bytes(b"hello\n")
    good = tree.FileSpec("a", 6, "", "ce013625030ba8dba906f756967f9e9ca394464a")
    assert tree.prove_one(tmp_path, good).sha256.startswith("5891b5b522d5df08")
    with pytest.raises(TreeError, match="git blob"):
        tree.prove_one(tmp_path, tree.FileSpec("a", 6, "", "0" * 40))


@pytest.mark.field("B63", "B64")
def test_a_proof_holds_for_the_same_inode_size_and_mtime_only(tmp_path: Path) -> None:
    root = fill(tmp_path / "t", SIZES)
    files, proof = proven(root)
    assert tree.inspect(root, files, proof).complete
    target = root / "model-00001-of-00002.safetensors"
    data = bytearray(target.read_bytes())
    data[1000] ^= 1
    target.write_bytes(data)
    report = tree.prove(root, tree.inspect(root, files, proof), proof)
    assert [spec.name for spec, _why in report.wrong] == ["model-00001-of-00002.safetensors"]
    assert "sha256" in report.wrong[0][1]


@pytest.mark.field("B64")
def test_rehash_finds_what_hides_behind_an_unchanged_time(tmp_path: Path) -> None:
    root = fill(tmp_path / "t", SIZES)
    files, proof = proven(root)
    target = root / "config.json"
    before = target.stat()
    with target.open("r+b") as out:
        out.write(b"X")
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tree.inspect(root, files, proof).complete
    assert not tree.prove(root, tree.inspect(root, files, proof, rehash=True), proof).complete


def test_a_second_look_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fill(tmp_path / "t", SIZES)
    files, proof = proven(root)
    kept = tree.proof_path(root)
    tree.write_proof(kept, proof)

    def never(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(tree, "digest_file", never)
    again = tree.read_proof(kept)
    assert tree.prove(root, tree.inspect(root, files, again), again).complete


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {"a": 1}}', '{"files": {"a": {"size": "x"}}}'])
def test_a_broken_proof_proves_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "proof"
    path.write_text(text)
    assert tree.read_proof(path) == tree.Proof()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    root = fill(tmp_path / "t", SIZES)
    files, proof = proven(root)
    (root / "config.json").unlink()
    (root / "sub/last.bin").unlink()
    (root / "sub/last.bin").symlink_to("/etc/passwd")
    with (root / "model-00001-of-00002.safetensors").open("ab") as out:
        out.truncate(40_000)
    report = tree.inspect(root, files, proof)
    assert [spec.name for spec in report.missing] == ["config.json"]
    assert {spec.name: why for spec, why in report.wrong} == {
        "model-00001-of-00002.safetensors": "40000 bytes instead of 70000",
        "sub/last.bin": "not a regular file",
    }
    assert report.needed_bytes == 70_301
    assert report.resumable == 40_000


def test_a_foreign_shard_is_refused_and_other_foreign_files_are_told(tmp_path: Path) -> None:
    assert tree.refuse_foreign(tmp_path, ["notes.txt"]) == [f"{tmp_path}: foreign file notes.txt"]
    with pytest.raises(TreeError, match=r"zz\.safetensors"):
        tree.refuse_foreign(tmp_path, ["notes.txt", "zz.safetensors"])


@pytest.mark.field("B67")
def test_space_is_judged_on_the_filesystem_that_takes_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)
        return os.statvfs_result((4096, 4096, 1000, 100, 100, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    tree.refuse_space(tmp_path / "not" / "there", 400_000, 9_000, "x")
    with pytest.raises(TreeError, match=r"needs 390.62 KiB .* 400.00 KiB are free: 92.97 KiB short"):
        tree.refuse_space(tmp_path / "not" / "there", 400_000, 104_800, "x")
    assert asked == [tmp_path, tmp_path]


def test_only_one_run_works_on_a_tree(tmp_path: Path) -> None:
    lock = tmp_path / "locks/x"
    with (
        tree.exclusive(lock, "the tree"),
        pytest.raises(TreeError, match="another run"),
        tree.exclusive(lock, "it"),
    ):
        pass
    with tree.exclusive(lock, "the tree"):
        pass


def test_a_damaged_tree_loses_its_name_before_it_is_repaired(tmp_path: Path) -> None:
    root = fill(tmp_path / "t", SIZES)
    (tmp_path / ".t.partial").mkdir()
    work = tree.open_for_work(root)
    assert not root.exists()
    assert (work / "config.json").exists()
    (work / ".cache").mkdir()
    tree.place(work, root)
    assert sorted(path.name for path in root.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "sub",
    ]
    assert not work.exists()


def test_progress_is_written_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "p/progress.json"
    progress = tree.Progress(path, "copy", 100)
    progress.add(40)
    assert '"done": 40' in path.read_text()
    progress.close()
    assert not path.exists()


@pytest.mark.parametrize("kept", [0, 30_000])
def test_a_file_is_digested_while_it_grows(tmp_path: Path, kept: int) -> None:
    data = os.urandom(300_000)
    spec = tree.parse_files([{"name": "s/x", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}])[
        0
    ]
    path = tmp_path / "s/x"
    path.parent.mkdir()
    if kept:
        path.write_bytes(data[:kept])
    with tree.Follower(path, spec) as follower:
        with path.open("ab") as out:
            for at in range(kept, len(data), 50_000):
                out.write(data[at : min(at + 50_000, len(data))])
                out.flush()
                time.sleep(0.005)
        seen = follower.finish()
    assert (seen.sha256, seen.size) == (spec.sha256, len(data))


def test_a_follower_of_wrong_bytes_of_a_replaced_file_and_of_nothing_ends(tmp_path: Path) -> None:
    spec = tree.parse_files([{"name": "x", "size": 4, "sha256": hashlib.sha256(b"good").hexdigest()}])[0]
    path = tmp_path / "x"
    with tree.Follower(path, spec):
        pass
    path.write_bytes(b"evil")
    with tree.Follower(path, spec) as follower, pytest.raises(TreeError, match="sha256"):
        follower.finish()
    with tree.Follower(path, spec) as follower:
        time.sleep(0.05)
        path.unlink()
        path.write_bytes(b"good")
        assert follower.finish().sha256 == spec.sha256
