"""The link between the ranks: rendezvous, the RDMA ring (over the addresses of the rails), NCCL's checks.

No RDMA is done here. Each device is resolved in sysfs as the engine and NCCL resolve it, refused when they
would refuse it, and then carried by one TCP connection between the two addresses that its GIDs hold, so that
every rail really moves its share of the bytes.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from . import faults
from .errors import EngineError, say

MAGIC = b"TFDSINFO"
INFO = struct.Struct("<8sIIII")  # magic, layout version, world, rank, devices
ENDPOINT = struct.Struct("<4sHI")  # IPv4 address, port, path MTU
FRAME = struct.Struct("<I8s")  # bytes of the payload, schedule tag
INFO_VERSION = 1
PATH_MTUS = (4096, 2048, 1024, 512, 256)
RETRY_S = 0.2


def root() -> Path:
    """Where /sys and /proc are looked for: the machine, or a tree that a test made."""
    return Path(os.environ.get("LAB_ENGINE_ROOT", "/"))


@dataclass(frozen=True)
class Rail:
    """One resolved RDMA device."""

    device: str
    gid_index: int
    address: str
    path_mtu: int


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table, as sysfs shows it."""

    value: str
    kind: str
    netdev: str

    @property
    def ipv4(self) -> str | None:
        try:
            mapped = ipaddress.IPv6Address(self.value).ipv4_mapped
        except ValueError:
            return None
        return str(mapped) if mapped else None


def _attribute(path: Path) -> str:
    """A sysfs attribute; an empty slot answers EINVAL, which is an empty value here."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def gid(device: str, index: int) -> Gid:
    """The entry `index` of port 1 of a device; an empty slot is all zero."""
    port = root() / "sys/class/infiniband" / device / "ports/1"
    value = _attribute(port / "gids" / str(index)) or "::"
    attributes = port / "gid_attrs"
    return Gid(
        value, _attribute(attributes / "types" / str(index)), _attribute(attributes / "ndevs" / str(index))
    )


def path_mtu(netdev: str) -> int:
    """The RDMA MTU that fits the netdev's MTU (9000 gives 4096, 1500 gives 1024)."""
    text = _attribute(root() / "sys/class/net" / netdev / "mtu") if netdev else ""
    mtu = int(text) if text.isdigit() else 1500
    return next((value for value in PATH_MTUS if value + 70 <= mtu), PATH_MTUS[-1])


def rdma_rails(devices: str | None) -> list[Rail]:
    """Resolve TF_RDMA_DEVICES with TF_RDMA_GID_INDEX (5 when unset); VerbsFailed for what verbs refuse."""
    rails: list[Rail] = []
    text = os.environ.get("TF_RDMA_GID_INDEX", "")
    try:
        index = int(text) if text else 5
    except ValueError as error:
        raise EngineError("InvalidCharacter") from error
    for device in (devices or "").split(","):
        if not device:
            continue
        base = root() / "sys/class/infiniband" / device
        if not base.is_dir():
            raise EngineError("VerbsFailed", f"RDMA {device}: no such device")
        if "ACTIVE" not in _attribute(base / "ports/1/state"):
            raise EngineError("VerbsFailed", f"RDMA {device}: port 1 is not active")
        entry = gid(device, index)
        if entry.kind != "RoCE v2" or entry.ipv4 is None:
            kind = entry.kind or "empty"
            raise EngineError("VerbsFailed", f"RDMA {device}: gid_index={index} is {entry.value} ({kind})")
        rails.append(Rail(device, index, entry.ipv4, path_mtu(entry.netdev)))
    return rails


def nccl_check() -> None:
    """NCCL's own start: HCA list, GID index (an empty text is read as 0) and socket interface."""
    interface = os.environ.get("NCCL_SOCKET_IFNAME")
    if interface and not (root() / "sys/class/net" / interface.lstrip("=^")).exists():
        say("NCCL WARN Bootstrap : no socket interface found")
        raise EngineError("NcclFailed", "NCCL error 2: unhandled system error")
    if faults.once("engine-nccl"):
        raise EngineError("NcclFailed", "NCCL error 2: unhandled system error")
    devices = [
        name.split(":")[0] for name in os.environ.get("NCCL_IB_HCA", "").lstrip("=").split(",") if name
    ]
    present = [name for name in devices if (root() / "sys/class/infiniband" / name).is_dir()]
    if faults.value("engine-socket") is not None:
        present = []
    informed = os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE")
    if not present:
        # NCCL does not fail here: it falls back to TCP, which costs half the speed.
        if informed:
            say(f"NCCL INFO NET/Socket : Using [0]{interface or 'lo'}")
        return
    text = os.environ.get("NCCL_IB_GID_INDEX")
    for device in present:
        if text is None:
            continue
        index = int(text) if text.lstrip("-").isdigit() else 0
        if index < 0:
            continue
        entry = gid(device, index)
        if set(entry.value) <= set("0:"):
            say(
                f"NCCL WARN Call to ibv_modify_qp failed with 61 No data available, on dev {device}:1,\n"
                f"        curr state INIT, next state RTR, local GID index {index}, "
                "local GID ::, remote GID ::"
            )
            raise EngineError("NcclFailed", "NCCL error: unhandled system error")
        if entry.kind != "RoCE v2" or entry.ipv4 is None:
            # A v1 entry or one without IPv4 is taken, and the queue pair then runs into its timeout.
            time.sleep(float(os.environ.get("LAB_ENGINE_NCCL_TIMEOUT_S", "60")))
            say(
                "NCCL WARN NET/IB : Got completion from peer with status=12 opcode=0 vendor err 129 "
                f"on dev {device}:1"
            )
            raise EngineError("NcclFailed", "NCCL error: unhandled system error")
    if informed:
        used = " ".join(f"[{number}]{device}:1/RoCE" for number, device in enumerate(present))
        say(f"NCCL INFO NET/IB : Using {used} [RO]; OOB {interface or 'lo'}")


def stall() -> None:
    """What a rank does when its peer is gone: nothing, for ever. RDMA and NCCL tell it nothing."""
    forever = threading.Event()
    while not forever.wait(3600):
        pass


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes`; a closed or broken connection stalls."""
    parts: list[bytes] = []
    while nbytes:
        try:
            part = connection.recv(min(nbytes, 1 << 20))
        except OSError:
            part = b""
        if not part:
            stall()
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


class Peer:
    """The connections to one other rank: control, and one for each rail."""

    def __init__(self, rank: int, control: socket.socket) -> None:
        self.rank = rank
        self.control = control
        self.rails: list[socket.socket] = []

    def send(self, tag: bytes, payload: bytes) -> None:
        """A command or a gather, cut over the rails (over the control connection without rails)."""
        channels = self.rails or [self.control]
        share = -(-len(payload) // len(channels))
        try:
            for number, channel in enumerate(channels):
                piece = payload[number * share : (number + 1) * share]
                channel.sendall(FRAME.pack(len(piece), tag) + piece)
        except OSError:
            stall()

    def receive(self, tag: bytes) -> bytes:
        """The peer's message of the same schedule. Another schedule's never completes ours."""
        while True:
            pieces: list[bytes] = []
            same = True
            for channel in self.rails or [self.control]:
                length, theirs = FRAME.unpack(receive(channel, FRAME.size))
                pieces.append(receive(channel, length))
                same = same and theirs == tag
            if same:
                return b"".join(pieces)


def _info(world: int, rank: int, devices: int) -> bytes:
    return INFO.pack(MAGIC, INFO_VERSION, world, rank, devices)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)


def _rail_timeout() -> float:
    return float(os.environ.get("LAB_ENGINE_RAIL_TIMEOUT_S", "20"))


def _log(rank: int, peer: int, rail: int, index: int, mtu: int) -> None:
    say(f"RDMA rank {rank} peer {peer} rail {rail}: gid_index={index} path_mtu={mtu}")


def lead(master: str, port: int, world: int, rails: list[Rail]) -> list[Peer]:
    """Rank 0: listen on its fabric address and take every other rank; BadInfo when one does not fit."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((master, port))
    except OSError as error:
        raise EngineError(
            "AddressUnavailable" if error.errno == 99 else "AddressInUse", f"{master}:{port}"
        ) from error
    listener.listen(world)
    peers: dict[int, Peer] = {}
    while len(peers) < world - 1:
        connection, _ = listener.accept()
        _prepare(connection)
        connection.settimeout(10)
        try:
            hello = connection.recv(INFO.size, socket.MSG_WAITALL)
        except OSError:
            hello = b""
        if not hello:  # something looked whether the port is open
            connection.close()
            continue
        connection.settimeout(None)
        connection.sendall(_info(world, 0, len(rails)))
        if len(hello) != INFO.size:
            raise EngineError("BadInfo")
        magic, version, their_world, rank, devices = INFO.unpack(hello)
        fits = (magic, version, their_world, devices) == (MAGIC, INFO_VERSION, world, len(rails))
        if not fits or not 0 < rank < world or rank in peers:
            raise EngineError("BadInfo")
        peer = Peer(rank, connection)
        _lead_rails(peer, rails)
        peers[rank] = peer
    listener.close()
    return [peers[rank] for rank in sorted(peers)]


def _lead_rails(peer: Peer, rails: list[Rail]) -> None:
    listeners = []
    for rail in rails:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((rail.address, 0))
        except OSError as error:
            raise EngineError(
                "VerbsFailed", f"RDMA {rail.device}: {rail.address} is not this node's"
            ) from error
        listener.listen(1)
        listener.settimeout(_rail_timeout())
        listeners.append(listener)
    for rail, listener in zip(rails, listeners, strict=True):
        port = listener.getsockname()[1]
        peer.control.sendall(ENDPOINT.pack(socket.inet_aton(rail.address), port, rail.path_mtu))
    for number, (rail, listener) in enumerate(zip(rails, listeners, strict=True)):
        try:
            connection, _ = listener.accept()
        except OSError as error:
            say(f"RDMA {rail.device}: transport retry exceeded, vendor_err 0x81")
            raise EngineError("VerbsFailed") from error
        _prepare(connection)
        theirs = ENDPOINT.unpack(receive(connection, ENDPOINT.size))[2]
        _log(0, peer.rank, number, rail.gid_index, min(rail.path_mtu, theirs))
        peer.rails.append(connection)
        listener.close()


def follow(master: str, port: int, rank: int, world: int, rails: list[Rail]) -> Peer:
    """Another rank: connect to rank 0, again and again while it loads."""
    while True:
        try:
            control = socket.create_connection((master, port), timeout=5)
            break
        except OSError:
            time.sleep(RETRY_S)
    _prepare(control)
    control.sendall(_info(world, rank, len(rails)))
    hello = control.recv(INFO.size, socket.MSG_WAITALL)
    if len(hello) != INFO.size:
        raise EngineError("BadInfo")
    magic, version, their_world, their_rank, devices = INFO.unpack(hello)
    if (magic, version, their_world, their_rank, devices) != (MAGIC, INFO_VERSION, world, 0, len(rails)):
        raise EngineError("BadInfo")
    peer = Peer(0, control)
    for number, rail in enumerate(rails):
        address, rail_port, theirs = ENDPOINT.unpack(receive(control, ENDPOINT.size))
        try:
            connection = socket.create_connection(
                (socket.inet_ntoa(address), rail_port),
                timeout=_rail_timeout(),
                source_address=(rail.address, 0),
            )
        except OSError as error:
            say(f"RDMA {rail.device}: transport retry exceeded, vendor_err 0x81")
            raise EngineError("VerbsFailed") from error
        _prepare(connection)
        connection.sendall(ENDPOINT.pack(socket.inet_aton(rail.address), 0, rail.path_mtu))
        _log(rank, 0, number, rail.gid_index, min(rail.path_mtu, theirs))
        peer.rails.append(connection)
    return peer
