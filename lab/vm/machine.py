"""Start, watch and end the virtual machines of one lab instance.

Each is one QEMU process, known by its pid file. ssh comes through a forwarded port of the loopback address, the two
rails are datagrams between two ports of it, and the serial console is a log. Nothing outside ``.lab/NAME/vm`` is
written, and no bridge, tap or address of this machine is made.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ..config import USER, Instance
from ..image import say
from ..inventory import RAILS
from .image import Image, image
from .seed import File, archive

NAMES = ("vm-1", "vm-2")
#: A console, and nothing that costs time under emulation and is of no use here.
KERNEL_WORDS = (
    "console=ttyS0 systemd.unit=lab.target systemd.log_target=console mitigations=off audit=0 nokaslr apparmor=0 "
    "lsm=capability cryptomgr.notests"
)
PROGRAM = "qemu-system-x86_64"
#: The rails' netdevs are called as on a Spark.
NETDEVS = ("enp1s0f0np0", "enP2p1s0f0np0")
MTU = 9000
#: MiB. The second runs Docker.
MEMORY = {"vm-1": 768, "vm-2": 1024}
#: Seconds until ssh answers: about 60 alone on two cores, emulated; a busy machine takes its time.
BOOT_SECONDS = 600
#: Seconds in which a kernel under KVM has said its first word, where KVM can run Debian's kernel at all.
KVM_SECONDS = 20
FIRST_WORD = b"Linux version"


@dataclass(frozen=True)
class Machine:
    """One virtual machine of an instance."""

    lab: Instance
    name: str

    @property
    def directory(self) -> Path:
        return self.lab.directory / "vm"

    @property
    def number(self) -> int:
        return NAMES.index(self.name)

    @property
    def console(self) -> Path:
        return self.directory / f"{self.name}.console.log"

    @property
    def pid_file(self) -> Path:
        return self.directory / f"{self.name}.pid"

    @property
    def pid(self) -> int | None:
        """The pid of its QEMU, or None. A number that now belongs to somebody else is not ours."""
        try:
            pid = int(self.pid_file.read_text(encoding="ascii"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if str(self.pid_file).encode() in words else None

    def pause(self) -> None:
        """It stops in the middle of whatever it did, as a machine that hangs."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it as a power cut does: its disk is thrown away."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists() and self.pid is not None:
                time.sleep(0.05)
        self.pid_file.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            raise SystemExit(f"lab: {self.name} does not run")
        os.kill(pid, number)


def machines(lab: Instance) -> list[Machine]:
    return [Machine(lab, name) for name in NAMES]


def free_ports(kind: socket.SocketKind, count: int) -> list[int]:
    """Free ports of the loopback address, all different."""
    held = []
    try:
        for _ in range(count):
            one = socket.socket(socket.AF_INET, kind)
            held.append(one)
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def mac(number: int, nic: int) -> str:
    """Locally administered, and QEMU's own prefix: machine 0 or 1, netdev 0 (management), 1 and 2 (rails)."""
    return f"52:54:00:4c:{nic:02x}:{number + 1:02x}"


def seed(machine: Machine, keys: Path) -> bytes:
    """What makes this machine itself: name, links, keys. ``init`` copies /seed to its disk and reads /links."""
    links = [f"{mac(machine.number, 0)} management 10.0.2.15/24 1500\n"]
    for rail, netdev in enumerate(NETDEVS):
        links.append(f"{mac(machine.number, rail + 1)} {netdev} {RAILS[rail][machine.number]} {MTU}\n")
    files = [
        File("/links", "".join(links).encode()),
        File("/seed/etc/hostname", f"{machine.name}\n".encode()),
        File("/seed/etc/hosts", f"127.0.0.1 localhost {machine.name}\n".encode()),
        # With one systemd does not take this for the first boot, which would enable every unit.
        File("/seed/etc/machine-id", f"{uuid.uuid4().hex}\n".encode(), 0o444),
        File("/seed/etc/ssh/ssh_host_ed25519_key", (keys / f"host-{machine.name}").read_bytes(), 0o600),
        File(
            f"/seed/home/{USER}/.ssh/authorized_keys",
            (keys / "id_ed25519.pub").read_bytes(),
            0o600,
            owner=1000,
        ),
    ]
    return archive(files)


def make_keys(lab: Instance) -> Path:
    keys = lab.directory / "vm/ssh"
    keys.mkdir(parents=True, exist_ok=True)
    keys.chmod(0o700)
    for name in ("id_ed25519", *(f"host-{name}" for name in NAMES)):
        if not (keys / name).exists():
            command = [
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                f"lab {lab.name}",
                "-f",
                str(keys / name),
            ]
            subprocess.run(command, check=True)
    return keys


def accelerator(found: Image) -> str:
    """``kvm`` where it runs Debian's kernel, else ``tcg`` (emulation). LAB_VM_ACCEL decides instead.

    That /dev/kvm opens says little: a paravirtual KVM takes the machine and its kernel never says a word.
    """
    chosen = os.environ.get("LAB_VM_ACCEL")
    if chosen:
        return chosen
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    note = found.directory / "accelerator"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    known = note.read_text(encoding="ascii").split() if note.exists() else []
    if known[:1] == [boot]:
        return known[1]
    command = [
        *(
            PROGRAM,
            "-accel",
            "kvm",
            "-cpu",
            "host",
            "-m",
            "256",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
        ),
        *("-serial", "stdio", "-kernel", str(found.kernel), "-append", "console=ttyS0 earlyprintk=serial"),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as one:
        assert one.stdout is not None
        os.set_blocking(one.stdout.fileno(), False)
        said = b""
        end = time.monotonic() + KVM_SECONDS
        while FIRST_WORD not in said and one.poll() is None and time.monotonic() < end:
            said += one.stdout.read() or b""
            time.sleep(0.1)
        one.kill()
    verdict = "kvm" if FIRST_WORD in said else "tcg"
    note.write_text(f"{boot} {verdict}\n", encoding="ascii")
    return verdict


def arguments(
    machine: Machine, found: Image, accel: str, ssh_port: int, rails: list[tuple[int, int]]
) -> list[str]:
    """The whole QEMU command. ``rails``: this end's and the other end's port of each."""
    network = [
        *("-netdev", f"user,id=m,restrict=on,hostfwd=tcp:127.0.0.1:{ssh_port}-:22"),
        *("-device", f"virtio-net-pci,netdev=m,mac={mac(machine.number, 0)},romfile="),
    ]
    for number, (mine, other) in enumerate(rails):
        network += [
            *("-netdev", f"socket,id=r{number},udp=127.0.0.1:{other},localaddr=127.0.0.1:{mine}"),
            *(
                "-device",
                f"virtio-net-pci,netdev=r{number},mac={mac(machine.number, number + 1)},host_mtu={MTU},romfile=",
            ),
        ]
    speed = (
        ["-accel", "kvm", "-cpu", "host"]
        if accel == "kvm"
        else ["-accel", "tcg,thread=multi", "-cpu", "qemu64"]
    )
    return [
        *(PROGRAM, "-name", f"sparklab-{machine.lab.name}-{machine.name}", *speed, "-smp", "1"),
        *("-m", str(MEMORY[machine.name]), "-nodefaults", "-no-user-config", "-display", "none"),
        *("-kernel", str(found.kernel), "-initrd", str(machine.directory / f"{machine.name}.initrd")),
        *("-append", KERNEL_WORDS),
        # Writes go to a layer of the machine's own, in a file without a name that ends with the process.
        *("-drive", f"file={found.disk},if=none,id=root,format=raw,snapshot=on,cache=unsafe"),
        *("-device", "virtio-blk-pci,drive=root", "-device", "virtio-rng-pci", *network),
        *("-serial", f"file:{machine.console}", "-pidfile", str(machine.pid_file), "-daemonize"),
    ]


def inventory_text(ports: dict[str, int], keys: Path) -> str:
    """YAML inventory: the two machines are the members of the replica ``vm``."""
    lines = [
        "# Written by `python -m lab.vm`; the ports are those of this start.",
        "all:",
        "  vars:",
        f"    ansible_user: {USER}",
        "    ansible_host: 127.0.0.1",
        f"    ansible_ssh_private_key_file: {keys}/id_ed25519",
        f'    ansible_ssh_common_args: "-o UserKnownHostsFile={keys}/known_hosts"',
        "    ansible_python_interpreter: /usr/bin/python3",
        "    ansible_timeout: 60",
        "    sparkfleet_replica: vm",
        f"    sparkfleet_world: {len(NAMES)}",
        "  hosts:",
    ]
    for rank, name in enumerate(NAMES):
        lines += [f"    {name}:", f"      ansible_port: {ports[name]}", f"      sparkfleet_rank: {rank}"]
        lines += ["      sparkfleet_rails:", *(f"        - address: {rail[rank]}" for rail in RAILS)]
    return "\n".join(lines) + "\n"


def write_access(lab: Instance, keys: Path, ports: dict[str, int]) -> None:
    """known_hosts, an ssh configuration and the inventory for the ports of this start."""
    known, config = "", ""
    for name in NAMES:
        kind, public = (keys / f"host-{name}.pub").read_text(encoding="ascii").split()[:2]
        known += f"[127.0.0.1]:{ports[name]} {kind} {public}\n"
        config += f"Host {name}\n  HostName 127.0.0.1\n  Port {ports[name]}\n\n"
    config += (
        f"Host *\n  User {USER}\n  IdentityFile {keys}/id_ed25519\n  IdentitiesOnly yes\n  ConnectTimeout 60\n"
        f"  UserKnownHostsFile {keys}/known_hosts\n  StrictHostKeyChecking yes\n  LogLevel ERROR\n"
    )
    (keys / "known_hosts").write_text(known, encoding="ascii")
    (keys / "config").write_text(config, encoding="utf-8")
    folder = lab.directory / "vm/inventory"
    folder.mkdir(exist_ok=True)
    (folder / "hosts.yml").write_text(inventory_text(ports, keys), encoding="utf-8")


def ssh(
    machine: Machine, *command: str, timeout: float | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of the ordinary user, with ``text`` as its input; words are joined as ssh joins them."""
    words = ["ssh", "-F", str(machine.directory / "ssh/config"), machine.name, *command]
    return subprocess.run(
        words, capture_output=True, text=True, errors="replace", check=False, timeout=timeout, input=text
    )


def up(lab: Instance) -> dict[str, object]:
    """Both machines, booted; those that run already are left alone. Returns what ``up.json`` then says."""
    if shutil.which(PROGRAM) is None:
        raise SystemExit(f"lab: {PROGRAM} is not installed; `tools/bootstrap vm` installs it")
    state_file = lab.directory / "vm/up.json"
    if state_file.exists() and all(machine.pid for machine in machines(lab)):
        found: dict[str, object] = json.loads(state_file.read_text(encoding="utf-8"))
        return found
    down(lab)
    source = image()
    keys = make_keys(lab)
    accel = accelerator(source)
    ports = dict(zip(NAMES, free_ports(socket.SOCK_STREAM, len(NAMES)), strict=True))
    ends = free_ports(socket.SOCK_DGRAM, 2 * len(NETDEVS))
    write_access(lab, keys, ports)
    say(f"starting {' and '.join(NAMES)} under {accel} (consoles: {lab.directory}/vm/*.console.log)")
    for machine in machines(lab):
        start = source.initramfs.read_bytes() + seed(machine, keys)
        (machine.directory / f"{machine.name}.initrd").write_bytes(start)
        pairs = list(zip(ends[::2], ends[1::2], strict=True))
        rails = [pair if machine.number == 0 else (pair[1], pair[0]) for pair in pairs]
        command = arguments(machine, source, accel, ports[machine.name], rails)
        environment = {**os.environ, "TMPDIR": str(machine.directory)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            down(lab)
            raise SystemExit(f"lab: QEMU ended with {done.returncode}: {done.stderr.strip()}")
    for machine in machines(lab):
        wait_for_boot(machine)
    state: dict[str, object] = {
        "name": lab.name,
        "accelerator": accel,
        "inventory": str(lab.directory / "vm/inventory"),
        "ssh": {name: f"127.0.0.1:{port}" for name, port in ports.items()},
    }
    state_file.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return state


def wait_for_boot(machine: Machine) -> None:
    """Until it has reached its target. Raises ``SystemExit`` with the console's last lines."""
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end and machine.pid is not None:
        try:
            # As root: without D-Bus nobody else reaches systemd.
            if (
                ssh(machine, "sudo", "systemctl", "is-active", "lab.target", timeout=90).stdout.strip()
                == "active"
            ):
                return
        except subprocess.TimeoutExpired:
            continue
        time.sleep(1)
    tail = "\n".join(machine.console.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
    down(machine.lab)
    raise SystemExit(f"lab: {machine.name} did not boot; the end of its console:\n{tail}")


def down(lab: Instance) -> None:
    """End the machines of this instance. Their keys and the image stay."""
    (lab.directory / "vm/up.json").unlink(missing_ok=True)
    for machine in machines(lab):
        machine.stop()
        (machine.directory / f"{machine.name}.initrd").unlink(missing_ok=True)
