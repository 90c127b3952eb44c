"""The lab's images, made from Debian packages: nothing is pulled from a registry.

``mmdebstrap`` makes two root file systems (about a minute together), ``docker import`` and the classic
builder turn them into the node image (nodes, hub and cable run it) and the base image (what the lab engine is
built from, inside the nodes). Every step is keyed by a hash of what goes into it, so a second run finds its
result and does nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.errors import BuildError, ImageNotFound

from .config import LABEL, PREFIX, REPOSITORY, cache_directory

SUITE = "trixie"
MIRROR = "http://deb.debian.org/debian"
NODE_PACKAGES = (
    *(
        "systemd",
        "systemd-sysv",
        "dbus",
        "libpam-systemd",
        "udev",
        "sudo",
        "openssh-server",
        "kmod",
        "procps",
        "less",
    ),
    *("python3", "python3-apt", "python3-fusepy", "fuse3", "ca-certificates", "curl", "rsync"),
    *(
        "iproute2",
        "iputils-ping",
        "ethtool",
        "iptables",
        "netplan.io",
        "docker.io",
        "docker-cli",
        "docker-registry",
    ),
    # DGX OS has git; the hub serves a repository with it.
    "git",
    # As on DGX OS, and as off as there: NetworkManager is masked, ufw is not enabled; tests switch them on.
    *("network-manager", "ufw"),
)
BASE_PACKAGES = ("python3", "ca-certificates")
# huggingface_hub as pinned in pyproject.toml: the download runs in a container of the engine image.
BASE_WHEELS = ("huggingface_hub==2.4.0",)
BASE_PYTHON = "3.13"
SLIM = tuple(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale"))


def say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


@contextmanager
def alone() -> Iterator[None]:
    """Several labs that start at once on one machine share the caches: the first makes an image, the others wait."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def short_hash(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:12]


def tree_parts(root: Path) -> list[str | bytes]:
    """Paths, modes and contents of a directory's files, in order: what a hash of it covers."""
    parts: list[str | bytes] = []
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            parts += [str(path.relative_to(root)), oct(path.stat().st_mode & 0o111), path.read_bytes()]
    return parts


def rootfs(name: str, packages: tuple[str, ...]) -> tuple[Path, str]:
    """A root file system as a tar in the cache, made when it is not there. Returns its path and its hash."""
    key = short_hash([SUITE, MIRROR, *packages, *SLIM])
    cache = cache_directory()
    tar = cache / "rootfs" / f"{name}-{key}.tar"
    if tar.exists():
        return tar, key
    if shutil.which("mmdebstrap") is None:
        raise SystemExit("lab: mmdebstrap is not installed; `apt-get install mmdebstrap` provides it")
    debs = cache / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    tar.parent.mkdir(parents=True, exist_ok=True)
    log = tar.with_suffix(".log")
    say(f"making the {name} root file system (about a minute, once; log in {log})")
    partial = tar.with_suffix(".part.tar")
    archives = "/var/cache/apt/archives"
    command = [
        *("mmdebstrap", "--variant=minbase", "--mode=root", f"--include={','.join(packages)}"),
        *("--skip=download/empty", "--skip=essential/unlink"),
        f'--setup-hook=mkdir -p "$1"{archives}',
        f"--setup-hook=sync-in {debs} {archives}",
        f"--customize-hook=sync-out {archives} {debs}",
        f'--customize-hook=rm -rf "$1"{archives}/*',
        *SLIM,
        *('--aptopt=APT::Install-Recommends "false"', SUITE, str(partial), MIRROR),
    ]
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-8:])
        raise SystemExit(f"lab: mmdebstrap ended with {done.returncode}:\n{tail}")
    partial.rename(tar)
    return tar, key


def has_image(client: docker.DockerClient, tag: str) -> bool:
    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    return True


def import_rootfs(client: docker.DockerClient, name: str, packages: tuple[str, ...]) -> str:
    """The root file system as an image; returns its tag."""
    key = short_hash([SUITE, MIRROR, *packages, *SLIM])
    tag = f"{PREFIX}/{name}-rootfs:{key}"
    if not has_image(client, tag):
        tar, _ = rootfs(name, packages)
        say(f"importing {tag}")
        client.api.import_image_from_file(str(tar), repository=tag.partition(":")[0], tag=key)
    return tag


def pack(entries: dict[str, Path | str]) -> io.BytesIO:
    """A build context: path in the context -> a file, a directory, or a text."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, source in entries.items():
            if isinstance(source, str):
                info = tarfile.TarInfo(name)
                info.size = len(source.encode())
                archive.addfile(info, io.BytesIO(source.encode()))
            else:
                archive.add(source, name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    buffer.seek(0)
    return buffer


def build(client: docker.DockerClient, tag: str, context: io.BytesIO, arguments: dict[str, str]) -> None:
    say(f"building {tag}")
    try:
        client.images.build(
            fileobj=context,
            custom_context=True,
            tag=tag,
            buildargs=arguments,
            rm=True,
            forcerm=True,
            labels={LABEL: "image"},
        )
    except BuildError as error:
        lines = "".join(str(entry.get("stream", "")) for entry in error.build_log).splitlines()
        raise SystemExit("\n".join([f"lab: building {tag} failed:", *lines[-10:]])) from error


def node_image(client: docker.DockerClient) -> str:
    """The node image; returns its tag."""
    source = REPOSITORY / "lab"
    entries: dict[str, Path | str] = {
        "Dockerfile": source / "node/Dockerfile",
        "root": source / "node/root",
        "package/__init__.py": source / "__init__.py",
    }
    entries |= {f"package/node/{path.name}": path for path in sorted((source / "node").glob("*.py"))}
    entries |= {f"package/{part}": source / part for part in ("hub", "checkpoint")}
    parts: list[str | bytes] = list(entries)
    for entry in entries.values():
        if isinstance(entry, Path):
            parts += tree_parts(entry) if entry.is_dir() else [entry.read_bytes()]
    base = f"{PREFIX}/node-rootfs:{short_hash([SUITE, MIRROR, *NODE_PACKAGES, *SLIM])}"
    tag = f"{PREFIX}/node:{short_hash([base, *parts])}"
    if not has_image(client, tag):
        import_rootfs(client, "node", NODE_PACKAGES)
        build(client, tag, pack(entries), {"ROOTFS": base})
    return tag


def fetch_wheels(target: Path, wheels: Iterable[str], python: str) -> None:
    """Packages and what they need, unpacked into ``target`` for the lab's nodes with that Python (like "3.13")."""
    names = list(wheels)
    say(f"fetching {', '.join(names)}")
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *(
            "--target",
            str(target),
            "--only-binary=:all:",
            "--implementation=cp",
            f"--python-version={python}",
        ),
        *("--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64", *names),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lab: fetching {', '.join(names)} failed:\n{done.stderr}")


def base_image(client: docker.DockerClient) -> str:
    """The image that the lab engine is built from: Python and huggingface_hub; returns its tag."""
    base = f"{PREFIX}/base-rootfs:{short_hash([SUITE, MIRROR, *BASE_PACKAGES, *SLIM])}"
    recipe = (
        'ARG ROOTFS\nFROM $ROOTFS\nCOPY wheels/ /usr/lib/python3/dist-packages/\nCMD ["/usr/bin/python3"]\n'
    )
    tag = f"{PREFIX}/base:{short_hash([base, recipe, *BASE_WHEELS])}"
    if not has_image(client, tag):
        import_rootfs(client, "base", BASE_PACKAGES)
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "wheels"
            fetch_wheels(target, BASE_WHEELS, python=BASE_PYTHON)
            build(client, tag, pack({"Dockerfile": recipe, "wheels": target}), {"ROOTFS": base})
    return tag
