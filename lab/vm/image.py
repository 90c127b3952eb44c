"""The disk of a virtual machine, its kernel and its initramfs, made from Debian packages and kept in the cache."""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..config import USER, cache_directory
from ..image import MIRROR, SLIM, SUITE, alone, say, short_hash, tree_parts
from .seed import Directory, File, archive

ROOT = Path(__file__).parent / "root"
INIT = Path(__file__).parent / "init"
PACKAGES = (
    *(
        "linux-image-amd64",
        "busybox-static",
        "xz-utils",
        "systemd",
        "systemd-sysv",
        "sudo",
        "openssh-server",
        "kmod",
    ),
    *(
        "procps",
        "python3",
        "iproute2",
        "nfs-kernel-server",
        "nfs-common",
        "docker.io",
        "docker-cli",
        "iptables",
        "rsync",
    ),
)
#: Bytes of the disk. Only what is written takes room.
SIZE = 3 << 30
#: Modules that are kept, by path below the kernel's directory, and those that the way to the root disk needs.
KEPT = (
    "(crypto|lib|fs/(ext4|jbd2|mbcache|nfs|nfsd|nfs_common|lockd|netfs|overlayfs|fuse|exportfs|configfs)"
    "|net/(sunrpc|core|dns_resolver|ipv4/udp_tunnel|ipv6/ip6_udp_tunnel)|drivers/(virtio|infiniband/core|infiniband/sw/rxe"
    "|block/virtio_blk|net/virtio_net|net/net_failover|char/hw_random/virtio-rng))"
)
FIRST = "virtio_pci virtio_blk virtio_net ext4"
#: Seconds each under emulation, and of no use here. (Names as `systemctl mask` takes them.)
MASKED = (
    *(
        "dev-hugepages.mount",
        "dev-mqueue.mount",
        "proc-sys-fs-binfmt_misc.automount",
        "sys-fs-fuse-connections.mount",
    ),
    *(
        "sys-kernel-config.mount",
        "sys-kernel-debug.mount",
        "sys-kernel-tracing.mount",
        "kmod-static-nodes.service",
    ),
    *(
        "ldconfig.service",
        "systemd-ask-password-console.path",
        "systemd-binfmt.service",
        "systemd-firstboot.service",
    ),
    *(
        "systemd-hibernate-clear.service",
        "systemd-hwdb-update.service",
        "systemd-journal-catalog-update.service",
    ),
    *("systemd-journal-flush.service", "systemd-journald.service", "systemd-journald.socket", "tmp.mount"),
    *("systemd-journald-dev-log.socket", "systemd-machine-id-commit.service", "systemd-modules-load.service"),
    *(
        "systemd-random-seed.service",
        "systemd-remount-fs.service",
        "systemd-sysctl.service",
        "systemd-sysusers.service",
    ),
    *(
        "systemd-tmpfiles-setup-dev-early.service",
        "systemd-tmpfiles-setup-dev.service",
        "systemd-udevd.service",
    ),
    *("systemd-tmpfiles-setup.service", "systemd-udev-trigger.service", "systemd-update-done.service"),
    # Helpers of NFS 3, whose locks nobody takes here. (rpcbind stays: the server does not start without it.)
    *(
        "rpc-statd.service",
        "rpc-statd-notify.service",
        "nfs-idmapd.service",
    ),
    *("auth-rpcgss-module.service", "nfs-blkmap.service"),
)
#: What systemd runs at each `daemon-reload`, so at each `systemctl enable`; those of NFS stay.
GENERATORS = (
    *(
        "cryptsetup",
        "debug",
        "fstab",
        "getty",
        "gpt-auto",
        "hibernate-resume",
        "integritysetup",
        "rc-local",
        "run",
    ),
    *("ssh", "system-update", "sysv", "tpm2", "veritysetup"),
)
HOOKS = (
    # A key of the image would be everybody's; each machine gets its own at boot.
    'rm -f "$1"/etc/ssh/ssh_host_*',
    f"chroot \"$1\" useradd --create-home --shell /bin/bash --uid 1000 --password '*' {USER}",
    'chmod 0440 "$1"/etc/sudoers.d/spark',
    f'chroot "$1" systemctl mask {" ".join(MASKED)}',
    'mkdir -p "$1"/etc/systemd/system-generators',
    f"for name in {' '.join(GENERATORS)}; do "
    'ln -s /dev/null "$1/etc/systemd/system-generators/systemd-$name-generator"; done',
    'chroot "$1" systemctl disable nfs-server.service docker.service containerd.service',
    # Unpacking a module costs more under emulation than loading it.
    f"cd \"$1\"/lib/modules/*/kernel && find . -name '*.ko.xz' | grep -vE '^./{KEPT}' | xargs rm && "
    "find . -name '*.ko.xz' | xargs xz -d",
    f'version=$(ls "$1"/lib/modules) && chroot "$1" depmod "$version" && '
    f'chroot "$1" modprobe --set-version "$version" --show-depends --all {FIRST} >"$1"/boot/first',
    'rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*',
)


@dataclass(frozen=True)
class Image:
    """Files that QEMU starts a machine from. ``disk`` is never written: each machine has its own layer above it."""

    directory: Path

    @property
    def disk(self) -> Path:
        return self.directory / "root.img"

    @property
    def kernel(self) -> Path:
        return self.directory / "vmlinuz"

    @property
    def initramfs(self) -> Path:
        """What every machine gets; its own files follow in a second archive."""
        return self.directory / "initramfs"


def overlay() -> bytes:
    """The files of ``root/`` as a tar whose entries are root's, whoever owns this checkout."""
    buffer = io.BytesIO()

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(ROOT.rglob("*")):
            archive.add(path, str(path.relative_to(ROOT)), recursive=False, filter=owned)
    return buffer.getvalue()


def image() -> Image:
    """The image, made when it is not in the cache (three to six minutes, once)."""
    if platform.machine() != "x86_64":
        raise SystemExit(f"lab: the virtual machines are x86_64 and this machine is {platform.machine()}")
    key = short_hash(
        [
            SUITE,
            MIRROR,
            str(SIZE),
            *PACKAGES,
            *HOOKS,
            *SLIM,
            *tree_parts(ROOT),
            INIT.read_bytes(),
        ]
    )
    found = Image(cache_directory() / "vm" / key)
    with alone():
        if not found.directory.exists():
            make(found)
    return found


def make(wanted: Image) -> None:
    for program, package in (("mmdebstrap", "mmdebstrap"), ("mke2fs", "e2fsprogs")):
        if shutil.which(program) is None:
            raise SystemExit(f"lab: {program} is not installed; `tools/bootstrap vm` installs {package}")
    debs = cache_directory() / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    wanted.directory.parent.mkdir(parents=True, exist_ok=True)
    log = wanted.directory.with_suffix(".log")
    say(f"making the disk of the virtual machines (three to six minutes, once; log in {log})")
    with tempfile.TemporaryDirectory(dir=wanted.directory.parent, prefix="making-") as scratch:
        tree, files, target = Path(scratch, "tree"), Path(scratch, "root.tar"), Path(scratch, "image")
        files.write_bytes(overlay())
        target.mkdir()
        archives = "/var/cache/apt/archives"
        commands = [
            [
                *("mmdebstrap", "--variant=minbase", "--mode=root", "--format=directory"),
                *(f"--include={','.join(PACKAGES)}", "--skip=download/empty", "--skip=essential/unlink"),
                f'--setup-hook=mkdir -p "$1"{archives}',
                f"--setup-hook=sync-in {debs} {archives}",
                # Before the kernel is installed: its package makes the initramfs by these files.
                f"--essential-hook=tar-in {files} /",
                f"--customize-hook=sync-out {archives} {debs}",
                *(f"--customize-hook={hook}" for hook in HOOKS),
                *SLIM,
                *('--aptopt=APT::Install-Recommends "false"', SUITE, str(tree), MIRROR),
            ],
            ["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(target / "root.img"), f"{SIZE >> 20}M"],
        ]
        with log.open("w", encoding="utf-8") as output:
            for command in commands:
                done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
                if done.returncode:
                    tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-8:])
                    raise SystemExit(f"lab: {command[0]} ended with {done.returncode}:\n{tail}")
        (kernel,) = (tree / "boot").glob("vmlinuz-*")
        shutil.copy(kernel, target / "vmlinuz")
        (target / "initramfs").write_bytes(initramfs(tree))
        target.rename(wanted.directory)


def initramfs(tree: Path) -> bytes:
    """``init``, busybox and the modules that it loads, in their order."""
    files: list[File | Directory] = [
        File("/init", INIT.read_bytes(), 0o755),
        File("/bin/busybox", (tree / "bin/busybox").read_bytes(), 0o755),
        *(Directory(f"/{name}") for name in ("proc", "sys", "dev", "root")),
    ]
    order: list[str] = []
    for line in (tree / "boot/first").read_text(encoding="ascii").splitlines():
        word, _blank, path = line.partition(" ")
        if word == "insmod" and path.strip() not in order:
            order.append(path.strip())
    for number, path in enumerate(order):
        inside = tree / path.lstrip("/")
        files.append(File(f"/modules/{number:02d}-{inside.name}", inside.read_bytes()))
    return archive(files)
