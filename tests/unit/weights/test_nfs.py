"""NFS exports: one file of ours, one tree, named clients, never a token."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import nfs
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError

from .conftest import run_module


class Host:
    """The files that the module reads, below a directory of the test."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = importlib.import_module(
            "ansible_collections.sparkfleet.serving.plugins.modules.nfs_share"
        )
        self.exports_d = root / "exports.d"
        self.exports = root / "exports"
        self.tree = root / "tree"
        self.tree.mkdir()
        self.filesystems = root / "filesystems"
        self.filesystems.write_text("nodev\tnfsd\nnodev\tnfs4\n\text4\n")
        self.mountinfo = root / "mountinfo"
        self.mountinfo.write_text("22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n")
        self.table = root / "etab"
        tool = root / "exportfs"
        tool.write_text(f'#!/bin/sh\n[ "$1" = -s ] && cat {self.exports_d}/*.exports\ntouch {self.table}\n')
        tool.chmod(0o755)
        monkeypatch.setattr(self.module, "EXPORTS", self.exports)
        monkeypatch.setattr(self.module, "EXPORTS_D", self.exports_d)
        monkeypatch.setattr(self.module, "FILESYSTEMS", self.filesystems)
        monkeypatch.setattr(self.module, "MOUNTINFO", self.mountinfo)
        monkeypatch.setattr(self.module, "need_tool", lambda _name, _package: str(tool))

    def export(self, check: bool = False, **args: Any) -> dict[str, Any]:
        given = {"state": "exported", "path": str(self.tree), "clients": ["10.77.0.2"], **args}
        return run_module("nfs_share", given, check)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


@pytest.mark.field("B62")
def test_an_export_is_one_file_and_grows_by_no_run(host: Host) -> None:
    assert host.export(check=True)["changed"]
    assert not host.exports_d.exists()
    assert host.export()["changed"]
    own = host.exports_d / nfs.EXPORT_FILE
    text = own.read_text()
    assert f"{host.tree} 10.77.0.2(ro,sync,no_subtree_check,root_squash)\n" in text
    assert not host.export()["changed"]
    assert own.read_text() == text
    assert not host.exports.exists()
    assert host.export(state="unexported")["changed"]
    assert not own.exists()


@pytest.mark.field("B62")
@pytest.mark.parametrize("name", ["token", "sub/stored_tokens"])
def test_a_tree_with_a_token_is_never_exported(host: Host, name: str) -> None:
    (host.tree / name).parent.mkdir(exist_ok=True)
    (host.tree / name).write_text("hf_x")
    answer = host.export()
    assert "an access token" in answer["msg"]
    assert "hf_x" not in str(answer)


@pytest.mark.field("B61")
def test_somebody_elses_export_is_left_alone_and_named(host: Host) -> None:
    host.exports.write_text(f"# mine\n{host.tree.parent} *(rw)\n")
    answer = host.export()
    assert f"{host.exports} exports {host.tree.parent}" in answer["msg"]
    assert host.exports.read_text().startswith("# mine")


@pytest.mark.field("B56")
@pytest.mark.parametrize("fstype", ["overlay", "tmpfs", "fuse.sshfs", "nfs4"])
def test_what_the_kernel_cannot_export_is_refused(host: Host, fstype: str) -> None:
    host.mountinfo.write_text(f"22 1 0:1 / / rw - {fstype} x rw\n")
    assert f"lies on {fstype}" in host.export()["msg"]


def test_a_kernel_without_nfs_is_named(host: Host) -> None:
    host.filesystems.write_text("\text4\n")
    assert "no NFS server (module nfsd" in host.export()["msg"]
    answer = run_module(
        "nfs_share",
        {"state": "mounted", "path": str(host.tree), "server": "10.77.0.1", "image": "x"},
        check=True,
    )
    assert "no NFS client" in answer["msg"]


@pytest.mark.parametrize("path", ["/a b", "/x(rw)", "/../etc", "relative", "/x\n/y"])
def test_no_path_breaks_out_of_its_line(path: str) -> None:
    with pytest.raises(TreeError, match="cannot be exported"):
        nfs.export_text(path, ["10.0.0.1"])


def test_a_client_is_an_address() -> None:
    with pytest.raises(ValueError, match="does not appear"):
        nfs.export_text("/x", ["*"])
    with pytest.raises(TreeError, match="no client"):
        nfs.export_text("/x", [])


def test_a_volume_with_other_options_is_told_apart() -> None:
    wanted = nfs.volume_options("10.77.0.1", "/srv/tree")
    assert nfs.volume_difference(wanted, dict(wanted)) == []
    other = dict(wanted, o="addr=10.0.0.9,rw")
    assert nfs.volume_difference(wanted, other) == [f"o is addr=10.0.0.9,rw, wanted {wanted['o']}"]
    assert len(nfs.volume_difference(wanted, None)) == 3
