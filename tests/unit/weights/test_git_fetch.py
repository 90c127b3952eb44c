"""A kit's folder out of a git repository, from a real git daemon on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import git_source, kit
from ansible_collections.sparkfleet.serving.plugins.module_utils.git_source import (
    GitSource,
    check_git,
    reason,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError, partial_path

from .conftest import run_module

WHO = ("-c", "user.name=x", "-c", "user.email=x@localhost")
FILES = {
    "MANIFEST": b"list\n",
    "rope.json": b'{"rows": 4113}\n',
    "aot/cubins/one.cubin": bytes(range(256)) * 40,
}


@dataclass
class Server:
    """A repository `kit` behind `git daemon`."""

    repo: Path
    url: str
    process: subprocess.Popen[bytes]
    first: str = ""
    last: str = ""

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *WHO, *words], cwd=self.repo, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")
        return self.git("rev-parse", "HEAD")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_port(port: int) -> None:
    deadline = time.monotonic() + 15
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, "git daemon does not answer"
            time.sleep(0.05)
        else:
            return


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    repo = tmp_path / "served/kit"
    repo.mkdir(parents=True)
    port = free_port()
    words = [
        f"--base-path={repo.parent}",
        "--export-all",
        "--reuseaddr",
        "--listen=127.0.0.1",
        f"--port={port}",
    ]
    process = subprocess.Popen(["git", "daemon", *words], stderr=subprocess.DEVNULL)
    found = Server(repo, f"git://127.0.0.1:{port}/kit", process)
    found.git("init", "--quiet", "--initial-branch=main")
    for name, data in FILES.items():
        path = repo / "kit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (repo / "README.md").write_text("outside the folder\n")
    found.first = found.commit()
    (repo / "kit/later").write_text("of the second commit\n")
    found.last = found.commit()
    await_port(port)
    yield found
    found.stop()


def fetch(server: Server, dest: Path, check: bool = False, **args: Any) -> dict[str, Any]:
    given = {
        "repo": server.url,
        "revision": server.first,
        "prefix": "kit",
        "dest": str(dest),
        "data_dir": str(dest.parent / "data"),
        "reserve_bytes": 0,
        **args,
    }
    return run_module("git_fetch", given, check)


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_the_folder_at_its_commit_and_nothing_else(server: Server, tmp_path: Path) -> None:
    dest = tmp_path / "trees/kit"
    predicted = fetch(server, dest, check=True)
    assert (predicted["changed"], predicted["files_needed"]) == (True, 3)
    assert not dest.parent.exists(), "check mode writes nothing"
    done = fetch(server, dest)
    assert done["complete"] and contents(dest) == FILES
    assert done["bytes_needed"] == predicted["bytes_needed"] == sum(map(len, FILES.values()))
    assert (
        [item["name"] for item in predicted["files"]]
        == [item["name"] for item in done["files"]]
        == sorted(FILES)
    )
    assert [item["before_header"] for item in done["diff"]] == [
        item["before_header"] for item in predicted["diff"]
    ]
    blobs = {item["name"]: item["blob_id"] for item in done["files"]}
    assert blobs == {name: server.git("rev-parse", f"{server.first}:kit/{name}") for name in FILES}
    server.stop()
    again = fetch(server, dest)
    assert (again["changed"], again["files"]) == (False, done["files"]), "a complete tree needs no network"


def test_what_is_damaged_comes_again_and_what_is_whole_stays(server: Server, tmp_path: Path) -> None:
    dest = tmp_path / "kit"
    fetch(server, dest)
    kept = (dest / "MANIFEST").stat()
    (dest / "rope.json").write_bytes(b'{"rows": 9999}\n')
    repaired = fetch(server, dest)
    assert (repaired["changed"], repaired["files_needed"], contents(dest)) == (True, 1, FILES)
    after = (dest / "MANIFEST").stat()
    assert (after.st_ino, after.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    (dest / "rope.json").write_bytes(b'{"rows": 9999}\n')
    os.utime(dest / "rope.json", ns=(kept.st_mtime_ns, kept.st_mtime_ns))
    assert fetch(server, dest, rehash=True)["files_needed"] == 1
    assert contents(dest) == FILES


def test_what_a_dead_run_left_is_used(server: Server, tmp_path: Path) -> None:
    dest = tmp_path / "kit"
    work = partial_path(dest)
    work.mkdir()
    (work / "MANIFEST").write_bytes(FILES["MANIFEST"])
    (work / "rope.json").write_bytes(FILES["rope.json"][:5])
    inode = (work / "MANIFEST").stat().st_ino
    assert fetch(server, dest)["complete"]
    assert contents(dest) == FILES and (dest / "MANIFEST").stat().st_ino == inode
    assert not work.exists()


def test_another_commit_takes_its_files(server: Server, tmp_path: Path) -> None:
    done = fetch(server, tmp_path / "kit", revision=server.last)
    assert (tmp_path / "kit/later").is_file() and len(done["files"]) == 4


def test_a_foreign_shard_is_refused(server: Server, tmp_path: Path) -> None:
    dest = tmp_path / "kit"
    fetch(server, dest)
    (dest / "stray.safetensors").write_bytes(b"x")
    assert "does not name" in fetch(server, dest)["msg"]
    assert (dest / "stray.safetensors").exists()


def test_a_full_disk_is_said_before_anything_is_written(server: Server, tmp_path: Path) -> None:
    dest = tmp_path / "trees/kit"
    for check in (True, False):
        assert "short" in fetch(server, dest, check, reserve_bytes=1 << 60)["msg"]
        assert not dest.parent.exists()


def test_refusals_of_the_server(server: Server, tmp_path: Path) -> None:
    dest = tmp_path / "kit"
    wanted = {
        "no such commit": {"revision": "0" * 40},
        "no such repository": {"repo": server.url.replace("/kit", "/other")},
        "no files below folder/": {"prefix": "folder"},
        "is not a commit id": {"revision": "main"},
        "cannot be reached": {"repo": f"git://127.0.0.1:{free_port()}/kit"},
    }
    for text, args in wanted.items():
        for check in (True, False):
            assert text in fetch(server, dest, check, **args)["msg"]
    assert not dest.exists()
    assert not partial_path(dest).exists()


def test_links_submodules_and_pointers_are_no_files(server: Server, tmp_path: Path) -> None:
    (server.repo / "kit/link").symlink_to("rope.json")
    linked = server.commit()
    (server.repo / "kit/link").unlink()
    (server.repo / "kit/rope.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )
    pointed = server.commit()
    dest = tmp_path / "tree"
    assert "kit/link is a symbolic link" in fetch(server, dest, revision=linked)["msg"]
    for check in (True, False):
        assert "lies in git-lfs" in fetch(server, dest, check, revision=pointed)["msg"]
    assert not partial_path(dest).exists()
    assert not dest.exists()


def test_a_server_that_gives_no_single_commit_is_read_whole(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COUNT", "1"), ("KEY_0", "protocol.version"), ("VALUE_0", "0")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert fetch(server, tmp_path / "kit")["complete"]
    assert contents(tmp_path / "kit") == FILES
    assert "no commit" in fetch(server, tmp_path / "other", revision="1" * 40)["msg"]


def test_nothing_is_left_of_the_repository(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    fetch(server, tmp_path / "kit")
    fetch(server, tmp_path / "other", revision="0" * 40)
    assert list(scratch.iterdir()) == []


def test_a_node_without_git_says_which_package(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str, package: str) -> str:
        raise TreeError(f"{name} is not installed; install the package {package}")

    monkeypatch.setattr(git_source, "need_tool", absent)
    assert "install the package git" in fetch(server, tmp_path / "kit")["msg"]


def test_the_plan_reads_the_rows_of_a_kit_in_git(server: Server) -> None:
    with GitSource(server.url, server.first, "kit") as source:
        sizes = {item.name: item.size for item in source.listing()}
        assert kit.rows_by_sizes(sizes, source.read) == 4113


def test_git_of_the_node_is_asked_with_its_own_configuration(server: Server, tmp_path: Path) -> None:
    """A mirror that root configured is used: the commit proves what comes."""
    (tmp_path / ".gitconfig").write_text(f'[url "{server.url}"]\n\tinsteadOf = https://git.invalid/kit\n')
    assert fetch(server, tmp_path / "tree", repo="https://git.invalid/kit")["complete"]
    assert contents(tmp_path / "tree") == FILES


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/kit", "no URL of a git repository"),
        ("https://host/", "no URL of a git repository"),
        ("ext::sh -c id://x", "no URL of a git repository"),
        ("https://ghp_secret@host/o/n", "holds a secret"),
        ("https://user:secret@host/o/n", "holds a secret"),
        ("ssh://git:secret@host/o/n", "holds a secret"),
        ("git://secret@host/o/n", "holds a secret"),
        ("https://host/o/n?token=secret", "holds a secret"),
        ("https://ghp_secret@host", "holds a secret"),
        ("ftp://user:secret@host/o/n", "holds a secret"),
        ("https://secret@[bad/o/n", "is no URL"),
        ("FILE:///srv/kit", "no URL of a git repository"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(TreeError, match=said) as refused:
        check_git(url, "a" * 40)
    if "secret" in url:
        assert "ghp_" not in str(refused.value)
        assert str(refused.value).count("secret") == str(refused.value).count("a secret")


def test_the_user_of_ssh_is_no_secret() -> None:
    check_git("ssh://git@host/o/n", "a" * 40)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "fatal: could not read Username for 'https://github.com': terminal prompts disabled\n",
            "or it is private",
        ),
        ("fatal: Authentication failed for 'https://github.com/o/n/'\n", "or it is private"),
        (
            "git@github.com: Permission denied (publickey).\nfatal: Could not read from remote repository.\n",
            "private",
        ),
        ("remote: Not Found\nfatal: repository 'https://host/o/n/' not found\n", "no such repository"),
        ("fatal: '/srv/x' does not appear to be a git repository\n", "no such repository"),
        ("fatal: unable to access 'https://h/': Could not resolve host: h\n", "cannot be reached"),
        (
            "fatal: unable to access 'https://h/': Failed to connect to h port 443 after 2 ms\n",
            "cannot be reached",
        ),
        (
            "fatal: unable to access 'https://h/': Operation too slow. Less than 1000 bytes/sec\n",
            "cannot be reached",
        ),
        ("fatal: remote error: upload-pack: not our ref 00\n", "no such commit"),
        ("Host key verification failed.\nfatal: Could not read from remote repository.\n", "known_hosts"),
        (
            "fatal: detected dubious ownership in '/k'\nfatal: Could not read from remote repository.\n",
            "detected dubious",
        ),
        ("error: unable to write file: No space left on device\nfatal: unpack-objects failed\n", "is full"),
        (
            "fatal: unable to access 'https://h/o/n/': The requested URL returned error: 403\n",
            "or it is private",
        ),
        (
            "fatal: unable to access 'https://h/': Received HTTP code 407 from proxy after CONNECT\n",
            "the proxy wants",
        ),
        ("something else\n", "the fetch failed"),
    ],
)
def test_what_git_says_gets_a_meaning(said: str, meant: str) -> None:
    text = reason(said, "https://h/o/n", "a" * 40)
    assert meant in text
    assert "https://h/o/n at aaaa" in text


@pytest.mark.parametrize(
    ("repo", "folder"),
    [
        ("owner/name", "owner--name"),
        ("https://github.com/owner/na.me.git", "github.com--owner--na.me"),
        ("ssh://git@host:22/o/n/", "git--host--22--o--n"),
        ("file:///srv/kit", "srv--kit"),
    ],
)
def test_the_folder_of_a_repository_is_a_plain_name(repo: str, folder: str) -> None:
    assert git_source.repo_folder(repo) == folder


def test_what_git_says_is_repeated_without_a_secret() -> None:
    said = "fatal: could not read Password for 'http://ghp_x@host': terminal prompts disabled\n"
    text = reason(said, "https://h/o/n", "a" * 40)
    assert "ghp_x" not in text
    assert "or it is private" in text


@pytest.mark.parametrize("folder", ["./kit", "kit/.", "kit//aot", "..", "kit/..", ":/kit"])
def test_a_folder_has_one_name(server: Server, tmp_path: Path, folder: str) -> None:
    said = fetch(server, tmp_path / "kit", prefix=folder)["msg"]
    assert "not a plain path" in said or "no files below" in said
    assert not (tmp_path / "kit").exists()


def test_a_link_in_the_place_of_a_folder_is_not_followed(server: Server, tmp_path: Path) -> None:
    dest = tmp_path / "kit"
    fetch(server, dest)
    outside = tmp_path / "outside"
    (dest / "aot").rename(outside)
    (outside / "cubins/one.cubin").write_bytes(b"foreign")
    (dest / "aot").symlink_to(outside)
    assert "is a symbolic link" in fetch(server, dest)["msg"]
    assert (outside / "cubins/one.cubin").read_bytes() == b"foreign"


def test_roots_own_way_to_call_ssh_is_used(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "ssh"
    script.write_text(f"#!/bin/sh\nexec git upload-pack {server.repo}\n")
    script.chmod(0o755)
    (tmp_path / ".gitconfig").write_text(f"[core]\n\tsshCommand = {script}\n")
    assert fetch(server, tmp_path / "tree", repo="ssh://git@git.invalid/kit")["complete"]
