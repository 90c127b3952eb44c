# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the Engram tables of a node are whole, local and fast enough.

While decoding the engine reads about 70 random rows of 4 KiB a step from these tables. On a local NVMe one
read takes around 90 µs, over NFS around 940 µs, and prompts are then about three times slower (field
problem B60).

The tables are two tensors a layer, ``…engram.embed.weight`` (F8_E4M3, ``[rows, 256]``) and
``…engram.embed.scale`` (F8_E8M0, ``[rows, 8]``): one scale per 32 weights, 264 bytes a row. The engine takes
every ``*.safetensors`` of the directory, wants both halves of each table and equal row counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .safetensors import HeaderError, TensorMeta, read_header
from .tree import TreeError

_HALF = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.engram\.embed\.(?P<half>weight|scale)\Z")
#: Weights that share one scale (256 weights and 8 scales a row).
WEIGHTS_PER_SCALE = 32
#: Median of a 4 KiB random read, µs: published for a local NVMe and for NFS over the same fabric.
LOCAL_US = 90.0
NETWORK_US = 940.0
#: Between the two classes (geometric mean of 90 and 940 is 291), with room for a busy local disk.
LIMIT_US = 400.0
BLOCK = 4096

#: File systems whose bytes lie on this node's own disks.
LOCAL_TYPES = frozenset({"ext4", "ext3", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"})
#: Known to go over a network or through a user-space process.
NETWORK_TYPES = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "glusterfs", "lustre", "afs", "virtiofs", "beegfs", "gpfs"}
)


@dataclass(frozen=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    point: str
    fstype: str
    source: str


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def parse_mounts(text: str) -> list[Mount]:
    """Mounts in the order of the kernel's list (a later one on the same point hides the earlier)."""
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if separator and len(fields) >= 5 and len(rest) >= 2:
            found.append(Mount(_unescape(fields[4]), rest[0], _unescape(rest[1])))
    return found


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount:
    """The mount that holds an absolute path."""
    best = Mount("/", "unknown", "unknown")
    for mount in mounts:
        point = mount.point.rstrip("/")
        inside = path == mount.point or path.startswith(f"{point}/")
        if inside and len(mount.point) >= len(best.point):
            best = mount
    return best


def refuse_mount(path: str, mount: Mount, also: Sequence[str]) -> None:
    """Refuse a file system that is not known to be local. ``also`` names types that somebody vouches for."""
    if mount.fstype in LOCAL_TYPES or mount.fstype in also:
        return
    network = mount.fstype in NETWORK_TYPES or mount.fstype.startswith("fuse")
    why = "goes over a network or a user-space process" if network else "is not known to be a local disk"
    raise TreeError(
        f"{path} lies on {mount.fstype} ({mount.source} at {mount.point}), which {why}. Engram tables are "
        "read "
        f"at random while decoding: around {LOCAL_US:.0f} µs a read on a local NVMe, around {NETWORK_US:.0f} "
        "µs "
        "over a network, and prompts about three times slower. Put them on the node's own disk, or vouch for "
        "this type by engram_extra_fstypes"
    )


@dataclass(frozen=True)
class Verdict:
    """Judgement of a latency: ``local`` or ``network`` class, and the text that says so."""

    local: bool
    median_us: float
    text: str


def judge(samples_us: Sequence[float], limit_us: float = LIMIT_US) -> Verdict:
    """Class of a disk by the median of its 4 KiB random reads in µs, which forgives single slow reads."""
    if not samples_us:
        raise TreeError("no read was measured")
    median = statistics.median(samples_us)
    local = median <= limit_us
    text = (
        f"a 4 KiB random read takes {median:.0f} µs (median of {len(samples_us)}); local NVMe class is "
        "around "
        f"{LOCAL_US:.0f} µs, network class around {NETWORK_US:.0f} µs, the limit is {limit_us:.0f} µs"
    )
    return Verdict(local, median, text)


def measure(path: Path, count: int = 256, seed: int = 1) -> list[float]:
    """µs of ``count`` O_DIRECT reads of 4 KiB at random aligned places of a file, as the engine reads.

    Raises ``TreeError`` when the file system has no O_DIRECT (the engine then cannot use its AIO path).
    """
    size = path.stat().st_size
    blocks = size // BLOCK
    if blocks < 1:
        raise TreeError(f"{path} is too small to measure ({size} bytes)")
    places = random.Random(seed)  # noqa: S311 - places to read, not a secret
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as exc:
        raise TreeError(
            f"{path}: its file system refuses O_DIRECT ({exc.strerror}), which the engine needs"
        ) from exc
    buffer = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT wants
    samples = []
    try:
        for _ in range(count):
            offset = places.randrange(blocks) * BLOCK
            start = time.perf_counter()
            try:
                os.preadv(handle, [buffer], offset)
            except OSError as exc:
                raise TreeError(f"{path}: O_DIRECT read failed ({exc.strerror})") from exc
            samples.append((time.perf_counter() - start) * 1e6)
    finally:
        os.close(handle)
        with contextlib.suppress(BufferError):
            buffer.close()
    return samples


@dataclass(frozen=True)
class Table:
    """One Engram table: layer, rows, bytes a row, and the file of each half."""

    layer: int
    rows: int
    row_bytes: int
    weight_file: str
    scale_file: str


def tables(directory: Path, layers: Sequence[int] = ()) -> list[Table]:
    """The tables of a directory, from the headers. Raises ``TreeError`` with the engine's own error name."""
    halves: dict[int, dict[str, tuple[str, TensorMeta]]] = {}
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise TreeError(f"{directory} holds no *.safetensors (MissingEngramTable)")
    for shard in shards:
        try:
            header = read_header(shard)
        except HeaderError as exc:
            raise TreeError(str(exc)) from exc
        for name, meta in header.tensors.items():
            match = _HALF.match(name)
            if match is None:
                continue
            layer = halves.setdefault(int(match["layer"]), {})
            if match["half"] in layer:
                raise TreeError(
                    f"{directory}: {name} is in {layer[match['half']][0]} and in {shard.name}; keep one of "
                    "them"
                )
            layer[match["half"]] = (shard.name, meta)
    found = []
    for number in sorted(set(halves) | set(layers)):
        found.append(_table(directory, number, halves.get(number, {})))
    if layers and [table.layer for table in found] != sorted(layers):
        raise TreeError(
            f"{directory} holds Engram tables of layers {[table.layer for table in found]}, the model has "
            "them "
            f"in {sorted(layers)}"
        )
    if not found:
        raise TreeError(f"{directory} holds no Engram table (MissingEngramTable)")
    return found


def _table(directory: Path, number: int, halves: dict[str, tuple[str, TensorMeta]]) -> Table:
    for half, dtype in (("weight", "F8_E4M3"), ("scale", "F8_E8M0")):
        if half not in halves:
            raise TreeError(f"{directory}: layer {number} has no engram.embed.{half} (MissingEngramTable)")
        meta = halves[half][1]
        if meta.dtype != dtype or len(meta.shape) != 2:
            raise TreeError(
                f"{directory}: layer {number} engram.embed.{half} is {meta.dtype} {list(meta.shape)}, wanted "
                f"{dtype} with two dimensions (BadEngramTable)"
            )
    weight, scale = halves["weight"][1].shape, halves["scale"][1].shape
    if weight[0] != scale[0] or weight[1] != scale[1] * WEIGHTS_PER_SCALE:
        raise TreeError(
            f"{directory}: layer {number} has weights {list(weight)} and scales {list(scale)}; rows must be "
            f"equal and one scale belongs to {WEIGHTS_PER_SCALE} weights (BadEngramTable)"
        )
    return Table(number, weight[0], weight[1] + scale[1], halves["weight"][0], halves["scale"][0])
