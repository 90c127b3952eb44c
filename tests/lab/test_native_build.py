"""The real Dockerfile of TensorFold native, up to its build stage, by a Docker engine: compiler fetched and proven, one
commit of a local git repository fetched, patched in order and compiled for aarch64 by Zig 0.17.

What stands in: the base image (Debian with git), the source (an empty program under four names), ``nvcc``, and the
compiler's archive, which is packed from the PyPI package ``ziglang``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import platform
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker.errors
import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import (
    NEWEST_API,
    DockerApi,
    DockerApiError,
    DockerStreamError,
    parse_api_version,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_identity import (
    context_tar,
    make_recipe,
)

from lab import image
from lab.config import LABEL, cache_directory
from lab.testing import engine

pytestmark = pytest.mark.lab
CONTEXT = Path(__file__).parents[2] / "roles/image/files/tensorfold_native"
ZIG = "0.17.0"
#: What the fetch stage says that it needs of a base.
PACKAGES = ("git", "curl", "xz-utils", "ca-certificates", "python3")
NAMES = ("tensorfold", "tf-dsv41-lanes", "tf-dsv41-rank-cache", "tf-dsv41-check")
BUILD_ZIG = """const std = @import("std");

pub fn build(b: *std.Build) void {
    const target = b.standardTargetOptions(.{});
    const optimize = b.standardOptimizeOption(.{});
    const nvcc = b.option([]const u8, "nvcc", "the CUDA compiler") orelse "none";
    const sm = b.option(u32, "sm", "compute capability") orelse 0;
    const options = b.addOptions();
    options.addOption(u32, "sm", sm);
    options.addOption([]const u8, "nvcc", nvcc);
    const native = b.step("native", "the server");
    const module = b.createModule(.{
        .root_source_file = b.path("main.zig"),
        .target = target,
        .optimize = optimize,
    });
    module.addOptions("config", options);
    // One program under all names: what is compiled here says nothing of the engine, how it is compiled does.
    const program = b.addExecutable(.{ .name = "program", .root_module = module }).getEmittedBin();
    for ([_][]const u8{ "tensorfold", "tf-dsv41-lanes", "tf-dsv41-rank-cache", "tf-dsv41-check" }) |name| {
        const step = if (std.mem.eql(u8, name, "tensorfold")) native else b.getInstallStep();
        step.dependOn(&b.addInstallBinFile(program, name).step);
    }
}
"""
MAIN_ZIG = """const config = @import("config");

pub fn main() u8 {
    return if (config.sm == 121) 1 else 9;
}
"""


def zig_archive() -> Path:
    """A compiler archive as ziglang.org has it, from the wheel; kept in the lab's cache."""
    cache = cache_directory() / "zig"
    archive = cache / f"zig-{platform.machine()}-linux-{ZIG}.tar.xz"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(cache),
    ]
    subprocess.run([*command, f"ziglang=={ZIG}"], check=True, capture_output=True)
    (wheel,) = cache.glob(f"ziglang-{ZIG}-*.whl")
    partial = archive.with_suffix(".part")
    top = f"zig-{platform.machine()}-linux-{ZIG}"
    with zipfile.ZipFile(wheel) as source, tarfile.open(partial, "w:xz", preset=0) as out:
        for name in source.namelist():
            if not name.startswith(("ziglang/lib/", "ziglang/zig")) or name.endswith("/"):
                continue
            data = source.read(name)
            info = tarfile.TarInfo(f"{top}/{name.removeprefix('ziglang/')}")
            info.size, info.mode = len(data), 0o755 if name == "ziglang/zig" else 0o644
            out.addfile(info, io.BytesIO(data))
    wheel.unlink()
    partial.rename(archive)
    return archive


def git(repo: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=repo, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@dataclass
class World:
    """What a build gets: arguments of the real Dockerfile, and the base."""

    arguments: dict[str, str]
    base: str
    commits: list[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("engine")
    repo = root / "engine"
    (repo / "tools/dsv41-zig/inputs").mkdir(parents=True)
    (repo / "tools/dsv41-zig/inputs/make_token_map.py").write_text("print()\n")
    (repo / "build.zig").write_text(BUILD_ZIG)
    (repo / "LICENSE").write_text("x\n")
    git(repo, "init", "--quiet", "--initial-branch=main")
    git(repo, "config", "uploadpack.allowAnySHA1InWant", "true")
    commits = []
    for text in (MAIN_ZIG, MAIN_ZIG + "// later\n"):
        (repo / "main.zig").write_text(text)
        git(repo, "add", ".")
        git(repo, "commit", "--quiet", "--message", "x")
        commits.append(git(repo, "rev-parse", "HEAD"))
    archive = zig_archive()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(archive.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = free_port()
    words = [
        "--reuseaddr",
        "--listen=127.0.0.1",
        f"--port={port}",
        f"--base-path={root}",
        "--export-all",
        str(root),
    ]
    daemon = subprocess.Popen(["git", "daemon", *words])
    base = ""
    try:
        base = image.import_rootfs(engine(), "source", PACKAGES)
        yield World(
            {
                "TF_REPO": f"git://127.0.0.1:{port}/engine",
                "TF_REF": commits[0],
                "ZIG_VERSION": ZIG,
                "ZIG_URL": f"http://127.0.0.1:{server.server_port}/{archive.name}",
                "ZIG_SHA256": hashlib.sha256(archive.read_bytes()).hexdigest(),
                "NVCC": "/bin/true",
                "JOBS": "2",
            },
            base,
            commits,
        )
    finally:
        daemon.terminate()
        daemon.wait()
        server.shutdown()
        if base:
            forget_steps(base)


def forget_steps(base: str) -> None:
    """Remove the nameless images of steps upon the base, which a build that failed leaves in the engine."""
    client = engine()
    rows = client.api.images(all=True)
    root = client.images.get(base).id
    children: dict[str, list[str]] = {}
    for row in rows:
        children.setdefault(row["ParentId"], []).append(row["Id"])
    named = {row["Id"] for row in rows if any("<none>" not in tag for tag in row["RepoTags"] or [])}

    def below(identity: str) -> Iterator[str]:
        for child in children.get(identity, []):
            yield from below(child)
            if child not in named:
                yield child

    for identity in below(root):
        with contextlib.suppress(docker.errors.APIError):  # gone with the one above it
            client.api.remove_image(identity)


@contextlib.contextmanager
def built(world: World, patches: list[Path], target: str, **arguments: str) -> Iterator[str]:
    """The image of a stage, built by the collection's own client; removed again."""
    given = {**world.arguments, **arguments, "BASE_IMAGE": world.base}
    recipe = make_recipe(
        CONTEXT, "Dockerfile", given, world.base, patches=patches, allow_tag=True, target=target
    )
    tag = f"sparklab/native-test:{recipe.content[:12]}"
    api = DockerApi()
    api.image_build(
        context_tar(recipe),
        tags=[tag],
        buildargs=given,
        labels={LABEL: "image"},
        target=target,
        network="host",
        memory=4 << 30,
        cpus=2,
    )
    try:
        yield tag
    finally:
        api.image_remove(tag)


def said(tag: str, *argv: str) -> str:
    code, out, err = DockerApi().run(
        f"sparklab-native-{tag.rpartition(':')[2]}",
        {
            "Image": tag,
            "Entrypoint": [argv[0]],
            "Cmd": list(argv[1:]),
            "Labels": {LABEL: "test"},
            "HostConfig": {"NetworkMode": "none"},
        },
        timeout=60,
    )
    assert code == 0, err
    return out.decode()


def patch(path: Path, before: str, after: str) -> Path:
    path.write_text(f"--- a/LICENSE\n+++ b/LICENSE\n@@ -1 +1 @@\n-{before}\n+{after}\n")
    return path


def test_the_real_dockerfile_fetches_proves_patches_and_compiles(world: World, tmp_path: Path) -> None:
    patches = [patch(tmp_path / "0005-b.patch", "x", "y"), patch(tmp_path / "0001-a.patch", "y", "z")]
    with built(world, patches, "build") as tag:
        text = said(tag, "sh", "-c", "cat /tensorfold/LICENSE; cd /tensorfold && git rev-parse HEAD")
        assert text.split() == ["z", world.commits[0]], "exactly this commit, patched in the order given"
        assert said(tag, "/opt/zig/zig", "version").strip() == ZIG
        code = (
            "import sys\n"
            "for name in sys.argv[1:]:\n"
            "    data = open('/opt/tensorfold/bin/' + name, 'rb').read(20)\n"
            "    print(data[:4] == b'\\x7fELF', int.from_bytes(data[18:20], 'little'))\n"
        )
        # 183 is EM_AARCH64 (elf.h): what the target argument asks for, whatever machine builds.
        assert said(tag, "python3", "-c", code, *NAMES).splitlines() == ["True 183"] * len(NAMES)
        assert said(tag, "cat", "/opt/tensorfold/tools/make_token_map.py") == "print()\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ZIG_SHA256": "0" * 64}, "fetch-zig: http"),
        ({"TF_REF": "main"}, "wanted the 40 hex digits"),
        ({"TF_REF": "f" * 40}, "returned a non-zero code"),
    ],
)
def test_what_is_not_what_it_should_be_ends_the_build(
    world: World, arguments: dict[str, str], words: str
) -> None:
    with pytest.raises(DockerStreamError) as caught, built(world, [], "source", **arguments):
        pass
    assert words in " ".join([str(caught.value), *caught.value.lines])


def test_a_patch_that_does_not_apply_ends_the_build_with_its_name(world: World, tmp_path: Path) -> None:
    wrong = patch(tmp_path / "0007-w.patch", "absent", "y")
    with pytest.raises(DockerStreamError) as caught, built(world, [wrong], "source"):
        pass
    assert "0001-w.patch does not apply" in " ".join(caught.value.lines)


def test_a_real_engine_is_spoken_to_in_the_newest_version_that_both_know() -> None:
    said = engine().version()
    major, minor = parse_api_version(said["ApiVersion"])
    api = DockerApi()
    assert parse_api_version(api.api_version) == min((major, minor), NEWEST_API)
    assert api.info()["ServerVersion"] == said["Version"]
    api._version = f"{major}.{minor + 1}"
    with pytest.raises(DockerApiError, match="too new"):
        api.info()
