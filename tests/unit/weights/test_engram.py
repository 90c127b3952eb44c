"""Engram tables: where they may lie, whether they are whole, how fast they are read."""

from __future__ import annotations

import hashlib
import importlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import engram, nfs
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError, digest_file

from .conftest import run_module

MOUNTS = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
23 22 0:21 / /proc rw shared:2 - proc proc rw
40 22 0:50 / /srv/hub ro,relatime shared:30 - nfs4 10.77.0.1:/hub rw,vers=4.2,proto=tcp
41 22 0:51 / /mnt/with\040blank rw - fuse.sshfs user@host:/x rw
42 22 0:52 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw,lowerdir=/a
43 22 0:53 / /data rw - xfs /dev/nvme1n1 rw
44 22 0:54 / /data rw - nfs 10.0.0.1:/data rw
"""


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A safetensors file of zeros."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return path


def table(layer: int, rows: int = 100, prefix: str = "") -> dict[str, tuple[str, list[int]]]:
    base = f"{prefix}layers.{layer}.engram.embed"
    return {f"{base}.scale": ("F8_E8M0", [rows, 8]), f"{base}.weight": ("F8_E4M3", [rows, 256])}


@pytest.mark.field("B60", "B59")
@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/var/lib/sparkfleet/engram", "ext4"),
        ("/srv/hub/engram", "nfs4"),
        ("/srv/hubris", "ext4"),
        ("/mnt/with blank/x", "fuse.sshfs"),
        ("/data/x", "nfs"),
        ("/var/lib/docker/overlay2/x/merged/var", "overlay"),
    ],
)
def test_the_mount_that_holds_a_path_decides(path: str, fstype: str) -> None:
    mount = engram.mount_of(path, engram.parse_mounts(MOUNTS))
    assert mount.fstype == fstype
    if fstype == "ext4":
        engram.refuse_mount(path, mount, [])
    else:
        with pytest.raises(TreeError, match=r"around 90 µs .* around 940 µs") as caught:
            engram.refuse_mount(path, mount, [])
        assert ("network or a user-space" in str(caught.value)) == (fstype != "overlay")
        engram.refuse_mount(path, mount, [fstype])


@pytest.mark.field("B60")
@pytest.mark.parametrize(
    ("centre", "local"),
    [(85.0, True), (90.0, True), (150.0, True), (399.0, True), (500.0, False), (940.0, False)],
)
def test_the_class_of_a_disk_is_its_median(centre: float, local: bool) -> None:
    # Half of the reads are slow by chance (a busy disk): the median does not care.
    slow = [centre * (2 + number % 30) for number in range(100)]
    verdict = engram.judge([centre] * 156 + slow)
    assert verdict.local is local
    assert "90 µs" in verdict.text
    assert "940 µs" in verdict.text


def test_nothing_measured_is_no_verdict() -> None:
    with pytest.raises(TreeError, match="no read"):
        engram.judge([])


def test_a_real_measurement_reads_with_o_direct(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(1 << 20))
    assert len(engram.measure(path, 8)) == 8
    path.write_bytes(b"x")
    with pytest.raises(TreeError, match="too small"):
        engram.measure(path)


def test_whole_tables_are_described(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", table(1))
    write(tmp_path / "b.safetensors", {**table(14, 50, "model."), "other": ("U8", [4])})
    found = engram.tables(tmp_path, [14, 1])
    assert [(one.layer, one.rows, one.row_bytes) for one in found] == [(1, 100, 264), (14, 50, 264)]


@pytest.mark.field("T18")
@pytest.mark.parametrize(
    ("tensors", "layers", "text"),
    [
        ({"layers.1.engram.embed.weight": ("F8_E4M3", [10, 256])}, [], "MissingEngramTable"),
        ({**table(1), "layers.1.engram.embed.scale": ("F8_E8M0", [9, 8])}, [], "BadEngramTable"),
        ({**table(1), "layers.1.engram.embed.scale": ("F8_E8M0", [100, 4])}, [], "BadEngramTable"),
        ({**table(1), "layers.1.engram.embed.weight": ("U8", [100, 256])}, [], "BadEngramTable"),
        (table(1), [1, 14], "MissingEngramTable"),
        (table(2), [1], "MissingEngramTable"),
        ({"x": ("U8", [3])}, [], "MissingEngramTable"),
    ],
)
def test_a_broken_table_has_the_engines_own_name(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], layers: list[int], text: str
) -> None:
    write(tmp_path / "a.safetensors", tensors)
    with pytest.raises(TreeError, match=text):
        engram.tables(tmp_path, layers)


@pytest.mark.field("T21")
def test_a_truncated_shard_and_a_double_half_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", table(1))
    write(tmp_path / "b.safetensors", table(1))
    with pytest.raises(TreeError, match=r"a\.safetensors and in b\.safetensors"):
        engram.tables(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TreeError, match=r"a\.safetensors"):
        engram.tables(tmp_path)


def test_the_module_judges_a_directory_that_is_not_there_by_its_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = engram.parse_mounts(Path("/proc/self/mountinfo").read_text())
    here = engram.mount_of(str(tmp_path.resolve()), kinds).fstype
    answer = run_module(
        "engram_check", {"path": str(tmp_path / "not/yet"), "extra_fstypes": [here]}, check=True
    )
    assert (answer["changed"], answer["present"], answer["fstype"]) == (False, False, here)
    write(tmp_path / "a.safetensors", table(1, 4000))
    args = {"path": str(tmp_path), "extra_fstypes": [here], "layers": [1], "samples": 8}
    slow = run_module("engram_check", {**args, "latency_limit_us": 0.001})
    assert slow["failed"]
    assert "latency_policy" in slow["msg"]
    warned = run_module("engram_check", {**args, "latency_limit_us": 0.001, "latency_policy": "warn"})
    assert warned["tables"] == [
        {
            "layer": 1,
            "rows": 4000,
            "row_bytes": 264,
            "weight_file": "a.safetensors",
            "scale_file": "a.safetensors",
        }
    ]
    assert "Put the tables on a local NVMe" in json.dumps(warned.get("warnings")) + capsys.readouterr().err


def test_tables_without_a_manifest_get_one_and_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "given"
    here.mkdir()
    write(here / "a.safetensors", table(1, 4000))
    write(here / "b.safetensors", table(14, 4000))
    write(here / "other.safetensors", {"x": ("U8", [3])})
    kind = engram.mount_of(
        str(here.resolve()), engram.parse_mounts(Path("/proc/self/mountinfo").read_text())
    ).fstype
    keep = tmp_path / "data/.tables.proof.json"
    args = {
        "path": str(here),
        "extra_fstypes": [kind],
        "samples": 8,
        "latency_limit_us": 1e9,
        "proof": str(keep),
    }
    module = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.engram_check")
    read: list[str] = []

    def digest(path: Path, size: int, blob: bool) -> tuple[str, str]:
        read.append(path.name)
        return digest_file(path, size, blob)

    monkeypatch.setattr(module, "digest_file", digest)
    predicted = run_module("engram_check", args, check=True)
    assert (predicted["changed"], keep.exists()) == (True, False)
    made = run_module("engram_check", args)
    assert made["changed"]
    assert (
        made["files"]
        == predicted["files"]
        == [
            {
                "name": name,
                "size": (here / name).stat().st_size,
                "sha256": hashlib.sha256((here / name).read_bytes()).hexdigest(),
                "blob_id": "",
            }
            for name in ("a.safetensors", "b.safetensors")
        ]
    )
    read.clear()
    again = run_module("engram_check", args)
    assert (again["changed"], again["files"], read) == (False, made["files"], [])
    (here / "b.safetensors").write_bytes((here / "b.safetensors").read_bytes()[:-1] + b"X")
    touched = run_module("engram_check", args)
    assert (touched["changed"], read) == (True, ["b.safetensors"])
    read.clear()
    assert run_module("engram_check", {**args, "rehash": True})["files"] == touched["files"]
    assert read == ["a.safetensors", "b.safetensors"]


def test_shares_of_an_earlier_placement_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Docker:
        def volume_list(self, label: str) -> list[dict[str, Any]]:
            key, _equals, value = label.partition("=")
            return [{"Name": f"sparkfleet-engram-{digit * 12}", "Labels": {key: value}} for digit in "ab"]

    module = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.engram_check")
    monkeypatch.setattr(module, "EXPORTS_D", tmp_path)
    monkeypatch.setattr(module, "DockerApi", lambda _socket: Docker())
    (tmp_path / "sparkfleet-engram-aaaaaaaaaaaa.exports").write_text(nfs.export_text("/srv/a", ["10.77.0.2"]))
    (tmp_path / "sparkfleet-model.exports").write_text(nfs.export_text("/srv/b", ["10.77.0.2"]))
    kinds = engram.parse_mounts(Path("/proc/self/mountinfo").read_text())
    kind = engram.mount_of(str(tmp_path.resolve()), kinds).fstype
    given = {"path": str(tmp_path / "none"), "extra_fstypes": [kind], "docker_socket": str(tmp_path)}
    export = f"{tmp_path}/sparkfleet-engram-aaaaaaaaaaaa.exports (NFS export of /srv/a to 10.77.0.2)"
    volumes = [f"sparkfleet-engram-{digit * 12} (Docker volume over NFS)" for digit in "ab"]
    assert run_module("engram_check", given)["shares_left"] == [export, *volumes]
    assert run_module("engram_check", {**given, "share": "engram-" + "a" * 12})["shares_left"] == volumes[1:]
