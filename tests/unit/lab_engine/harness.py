"""Two ranks of the lab engine as plain processes on loopback, with a made-up /sys and /proc each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT = Path(__file__).resolve().parents[3] / "lab/engine/context"
BIN = CONTEXT / "bin"
MEMINFO = "MemTotal:       127535084 kB\nMemFree:        121000000 kB\nMemAvailable:   {available} kB\n"
V2 = "RoCE v2"
RAILS = (("rocep1s0f0", "enp1s0f0np0", 1), ("roceP2p1s0f0", "enP2p1s0f0np0", 2))


def mapped(address: str) -> str:
    """An IPv4 address as a GID is written in sysfs."""
    parts = [int(part) for part in address.split(".")]
    return f"0000:0000:0000:0000:0000:ffff:{parts[0]:02x}{parts[1]:02x}:{parts[2]:02x}{parts[3]:02x}"


def set_gid(root: Path, device: str, index: int, value: str, kind: str, *, netdev: str = "") -> None:
    """One entry of the GID table of port 1."""
    port = root / "sys/class/infiniband" / device / "ports/1"
    for name, text in (("gids", value), ("gid_attrs/types", kind), ("gid_attrs/ndevs", netdev)):
        (port / name).mkdir(parents=True, exist_ok=True)
        (port / name / str(index)).write_text(text + "\n")


def fake_root(root: Path, rank: int, available: int = 119_000_000) -> Path:
    """Two RDMA devices with v1 and v2 entries, their netdevs at MTU 9000, and a meminfo."""
    for device, netdev, rail in RAILS:
        address = mapped(f"127.0.{rail}.{rank + 1}")
        set_gid(root, device, 0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1", netdev=netdev)
        set_gid(root, device, 1, "fe80:0000:0000:0000:0000:0000:0000:0001", V2, netdev=netdev)
        set_gid(root, device, 2, address, "IB/RoCE v1", netdev=netdev)
        set_gid(root, device, 3, address, V2, netdev=netdev)
        set_gid(root, device, 4, "0000:0000:0000:0000:0000:0000:0000:0000", "")
        (root / "sys/class/infiniband" / device / "ports/1/state").write_text("4: ACTIVE\n")
        (root / "sys/class/net" / netdev).mkdir(parents=True, exist_ok=True)
        (root / "sys/class/net" / netdev / "mtu").write_text("9000\n")
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(available=available))
    return root


@dataclass
class Inputs:
    """What a replica of the lab model reads."""

    model: Path
    engram: Path
    kit: Path
    rank_files: list[Path]
    token_map: Path


def environment(**more: str) -> dict[str, str]:
    """A clean environment for one engine process."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {**kept, "LAB_ENGINE_SHAPES": "any", "LAB_MEMORY_DIR": "/nonexistent", **more}


def tool(name: str, *args: object, shapes: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one of the programs to its end."""
    env = environment()
    if not shapes:
        del env["LAB_ENGINE_SHAPES"]
    command = [str(BIN / name), *(str(arg) for arg in args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def drop(command: list[str], flags: tuple[str, ...]) -> list[str]:
    """The command without these `--flag value` pairs."""
    result = list(command)
    for flag in flags:
        at = result.index(flag)
        del result[at : at + 2]
    return result


@dataclass
class Pair:
    """Rank 0 and rank 1 of one replica."""

    inputs: Inputs
    work: Path
    context: int = 8192
    head_env: dict[str, str] = field(default_factory=dict)
    worker_env: dict[str, str] = field(default_factory=dict)
    head_args: list[str] = field(default_factory=list)
    worker_args: list[str] = field(default_factory=list)
    without: tuple[str, ...] = ()
    rdma: bool = True
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.rendezvous = free_port()
        self.roots = [fake_root(self.work / f"root{rank}", rank) for rank in range(4)]
        self.url = f"http://127.0.0.1:{self.port}"

    def log(self, rank: int) -> str:
        path = self.work / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        """Start one rank; its output goes to a file."""
        inputs = self.inputs
        devices = ",".join(device for device, _, _ in RAILS)
        common = {
            "LAB_ENGINE_ROOT": str(self.roots[rank]),
            "LAB_ENGINE_RAIL_TIMEOUT_S": "2",
            "LAB_ENGINE_NCCL_TIMEOUT_S": "0",
            "TF_RDMA_GID_INDEX": "3",
            "TF_DS_REPLAY_FLOOR": "1",
        }
        if rank == 0:
            env = {
                "TF_TP_WORLD": "2",
                "TF_TP_MASTER": "127.0.0.1",
                "TF_TP_PORT": str(self.rendezvous),
                "TF_DS_RANK_CACHE": str(inputs.rank_files[0]),
                "TF_DS_KIT": str(inputs.kit),
                "TF_DS_ENGRAM": str(inputs.engram),
                "TF_DS_TOKEN_MAP": str(inputs.token_map),
                "TF_RDMA_DEVICES": devices if self.rdma else "",
                "TF_DS_GRAPHS": "1",
                **common,
                **self.head_env,
            }
            command = [str(BIN / "tensorfold"), "serve", str(inputs.model), "--port", str(self.port)]
            command += [
                "--name",
                "lab",
                "--context",
                str(self.context),
                "--temperature",
                "0",
                *self.head_args,
            ]
        else:
            env = {**common, **self.worker_env}
            command = [str(BIN / "tf-dsv41-lanes"), str(inputs.model), str(inputs.rank_files[rank])]
            command += [str(rank), str(len(inputs.rank_files))]
            command += ["127.0.0.1", str(self.rendezvous), str(inputs.kit), "--engram", str(inputs.engram)]
            command += ["--token-map", str(inputs.token_map), "--pool", str(self.context), "--graphs", "1"]
            if self.rdma:
                command += ["--rdma", devices]
            for flag in self.worker_args[::2]:
                if flag in command:
                    command = drop(command, (flag,))
            command = drop([*command, *self.worker_args], self.without)
        with (self.work / f"rank{rank}.log").open("wb") as log:
            self.processes[rank] = subprocess.Popen(
                command, env=environment(**env), stdout=log, stderr=subprocess.STDOUT
            )
        return self.processes[rank]

    def ready(self, seconds: float = 40) -> bool:
        """Whether /v1/models answers within the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.alive(0):
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                    return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.03)
        return False

    def linked(self, seconds: float = 40) -> bool:
        """Whether both ranks report their last rail within the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if all("rail 1: gid_index=3" in self.log(rank) for rank in (0, 1)):
                return True
            time.sleep(0.05)
        return False

    def alive(self, rank: int) -> bool:
        return self.processes[rank].poll() is None

    def up(self) -> Pair:
        """Start both ranks, the worker first, and wait for the server."""
        self.start(1)
        self.start(0)
        assert self.ready(), self.log(0) + self.log(1)
        return self

    def exit_code(self, rank: int, seconds: float = 40) -> int:
        return self.processes[rank].wait(timeout=seconds)

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
