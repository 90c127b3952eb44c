"""The real build context of TensorFold native: its stages as processes, against a local git repository."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import image_identity

CONTEXT = Path(__file__).parents[3] / "roles/image/files/tensorfold_native"
STAGES = CONTEXT / "stages"
BASE = "nvcr.io/nvidia/pytorch@sha256:" + "2" * 64


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, check=False, env=environment
    )


def git(repo: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=repo, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> tuple[Path, list[str]]:
    """A repository with two commits; returns it and the commits, oldest first."""
    root = tmp_path / "engine"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    commits = []
    for text in ("one\n", "two\n"):
        (root / "main.zig").write_text(text)
        git(root, "add", "main.zig")
        git(root, "commit", "--quiet", "--message", text)
        commits.append(git(root, "rev-parse", "HEAD"))
    return root, commits


def patch(repo: Path, before: str, after: str) -> str:
    return f"--- a/main.zig\n+++ b/main.zig\n@@ -1 +1 @@\n-{before}\n+{after}\n"


def test_exactly_the_named_commit_is_fetched_and_patched_in_order(
    tmp_path: Path, repo: tuple[Path, list[str]]
) -> None:
    root, commits = repo
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "0001-b.patch").write_text(patch(root, "one", "three"))
    (patches / "0002-a.patch").write_text(patch(root, "three", "four"))
    out = tmp_path / "out"
    done = run(STAGES / "fetch-source", f"file://{root}", commits[0], patches, out)
    assert done.returncode == 0, done.stderr
    assert (out / "main.zig").read_text() == "four\n"
    assert done.stdout.splitlines() == [
        f"fetch-source: applied {name}" for name in ("0001-b.patch", "0002-a.patch")
    ]


def test_a_patch_that_does_not_apply_and_a_moving_ref_are_refused(
    tmp_path: Path, repo: tuple[Path, list[str]]
) -> None:
    root, commits = repo
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "0001-x.patch").write_text(patch(root, "nine", "ten"))
    done = run(STAGES / "fetch-source", f"file://{root}", commits[1], patches, tmp_path / "a")
    assert (done.returncode, "0001-x.patch does not apply" in done.stderr) == (1, True)
    for ref in ("main", "", commits[1][:39], commits[1].upper()):
        done = run(STAGES / "fetch-source", f"file://{root}", ref, patches, tmp_path / "b")
        assert (done.returncode, "40 hex digits" in done.stderr) == (1, True)
    done = run(STAGES / "fetch-source", f"file://{root}", "f" * 40, patches, tmp_path / "c")
    assert done.returncode != 0


def test_the_compiler_is_proven_before_it_runs(tmp_path: Path) -> None:
    inside = tmp_path / "zig-aarch64-linux-0.17.0"
    inside.mkdir()
    (inside / "zig").write_text('#!/bin/sh\ntouch "$(dirname "$0")/ran"\necho 0.17.0\n')
    (inside / "zig").chmod(0o755)
    archive = tmp_path / "zig.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(inside, inside.name)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    out = tmp_path / "out"
    done = run(STAGES / "fetch-zig", f"file://{archive}", "0" * 64, "0.17.0", out)
    assert (done.returncode, digest in done.stderr, out.exists()) == (1, True, False)
    done = run(STAGES / "fetch-zig", f"file://{archive}", digest, "0.16.0", out)
    assert (done.returncode, "says it is 0.17.0" in done.stderr) == (1, True)
    assert run(STAGES / "fetch-zig", f"file://{archive}", digest, "0.17.0", tmp_path / "good").returncode == 0


def build(zig: Path | str, nvcc: Path | str, out: Path, source: Path) -> subprocess.CompletedProcess[str]:
    """The build stage in a source tree."""
    words = [str(zig), "aarch64-linux-gnu", "ReleaseSafe", "121", "3", str(nvcc), str(out)]
    return subprocess.run(
        [str(STAGES / "build"), *words], cwd=source, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("server", ["bin/tensorfold", "native/bin/tensorfold-native"])
def test_the_build_gives_the_names_that_a_launch_uses(tmp_path: Path, server: str) -> None:
    source = tmp_path / "source"
    (source / "tools/dsv41-zig/inputs").mkdir(parents=True)
    (source / "tools/dsv41-zig/inputs/make_token_map.py").write_text("print()\n")
    names = f"{server} bin/tf-dsv41-lanes bin/tf-dsv41-rank-cache bin/tf-dsv41-check"
    zig = tmp_path / "zig"
    zig.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/argv\nfor n in {names}; do mkdir -p $(dirname {tmp_path}/out/$n);'
        f" cp /bin/true {tmp_path}/out/$n; done\n"
    )
    zig.chmod(0o755)
    done = build(zig, "/bin/true", tmp_path / "out", source)
    assert done.returncode == 0, done.stderr
    assert "-Dsm=121" in (tmp_path / "argv").read_text().split()
    for name in ("tensorfold", "tf-dsv41-lanes", "tf-dsv41-rank-cache", "tf-dsv41-check"):
        assert os.access(tmp_path / "out/bin" / name, os.X_OK)
    assert (tmp_path / "out/tools/make_token_map.py").exists()


@pytest.mark.field("T23", "T46")
def test_the_build_names_what_it_lacks(tmp_path: Path) -> None:
    done = build("/bin/true", "/not/there/nvcc", tmp_path / "out", tmp_path)
    assert (done.returncode, "/not/there/nvcc is absent" in done.stderr) == (1, True)
    done = build("/bin/true", "/bin/true", tmp_path / "out", tmp_path)
    assert (done.returncode, "does not build tensorfold" in done.stderr) == (1, True)


def test_every_pin_is_an_argument_and_the_commit_has_no_default() -> None:
    text = (CONTEXT / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)(?:=(\S+))?$", text, re.M))
    assert arguments["BASE_IMAGE"] == ""
    assert "ARG TF_REF\n" in text
    assert re.fullmatch(r"[0-9a-f]{64}", arguments["ZIG_SHA256"])
    assert arguments["SM"] == "121"
    assert not re.search(r"^FROM (?!\$\{BASE_IMAGE\}|source )", text, re.M), (
        "every stage comes from the named base"
    )
    assert "--mount" not in text
    assert "<<" not in text


def test_the_context_gives_one_recipe(tmp_path: Path) -> None:
    recipe = image_identity.make_recipe(CONTEXT, "Dockerfile", {"TF_REF": "5" * 40}, BASE)
    names = {entry.name: entry for entry in recipe.entries}
    assert {"Dockerfile", "patches", "stages/build", "stages/fetch-source", "stages/fetch-zig"} <= set(names)
    assert all(entry.executable for name, entry in names.items() if name.startswith("stages/"))
