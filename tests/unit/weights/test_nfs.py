"""NFS exports: one file of ours, one tree, named clients, never a token."""

from __future__ import annotations

import importlib
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import nfs
from ansible_collections.sparkfleet.serving.plugins.module_utils.docker_api import (
    DockerApiError,
    DockerConflict,
    DockerNotFound,
    DockerUnreachable,
)
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError

from .conftest import run_module

EXPORTFS = """\
import pathlib, sys
table, files, words = pathlib.Path({table!r}), {files!r}, sys.argv[1:]
lines = table.read_text().splitlines() if table.exists() else []
if words == ["-s"]:
    print("\\n".join(lines))
elif words == ["-a"]:
    for file in sorted(pathlib.Path(files).glob("*.exports")):
        for line in file.read_text().splitlines():
            path, *clients = line.split("#")[0].split() or [""]
            lines += [f"{{path}}  {{one}}" for one in clients if f"{{path}}  {{one}}" not in lines]
elif words[0] == "-u":
    client, path = words[1].split(":")
    lines = [line for line in lines if not line.startswith(f"{{path}}  {{client}}(")]
else:
    sys.exit(f"exportfs: {{words}}")
table.write_text("\\n".join(lines))
"""


class Host:
    """The files that the module reads, and the programs that it runs, below a directory of the test."""

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
        self.threads = root / "threads"
        self.table = root / "etab"
        self.unit = root / "unit-active"
        self.unit.touch()
        self.modules = root / "modules-found"
        tools = root / "tools"
        tools.mkdir()
        self.exportfs = tools / "exportfs"
        source = EXPORTFS.format(table=str(self.table), files=str(self.exports_d))
        self.tool("exportfs", source, sys.executable)
        self.enabled = root / "unit-enabled"
        self.enabled.touch()
        self.systemctl(f"touch {self.unit}")
        self.tool("modprobe", f"test -e {self.modules}\n")
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        self.pinged: list[str] = []
        self.dead = ""
        self.docker = Docker()
        for name, value in (
            ("EXPORTS", self.exports),
            ("EXPORTS_D", self.exports_d),
            ("FILESYSTEMS", self.filesystems),
            ("MOUNTINFO", self.mountinfo),
            ("THREADS", self.threads),
            ("need_tool", lambda _name, _package: str(self.exportfs)),
            ("ping", self.ping),
            ("DockerApi", lambda _socket: self.docker),
        ):
            monkeypatch.setattr(self.module, name, value)

    def systemctl(self, start: str) -> None:
        """A stand-in that is asked for the server and starts it by this command."""
        active, enabled = f"test -e {self.unit}", f"test -e {self.enabled}"
        self.tool(
            "systemctl",
            f"case $1 in is-active) {active};; is-enabled) {enabled};; start) {start};; "
            f"enable) touch {self.enabled};; *) exit 9;; esac\n",
        )

    def tool(self, name: str, text: str, interpreter: str = "/bin/sh") -> None:
        path = self.exportfs.parent / name
        path.write_text(f"#!{interpreter}\n{text}")
        path.chmod(0o755)

    def ping(self, address: str) -> None:
        self.pinged.append(address)
        if self.dead:
            raise TreeError(self.dead)

    def own(self, name: str = "model") -> Path:
        return self.exports_d / nfs.export_file(name)

    def export(self, check: bool = False, **args: Any) -> dict[str, Any]:
        given = {"state": "exported", "path": str(self.tree), "clients": ["10.77.0.2"], **args}
        return run_module("nfs_share", given, check)

    def mount(self, check: bool = False, **args: Any) -> dict[str, Any]:
        given = {"state": "mounted", "path": "/srv/tree", "server": "10.77.0.1", "image": "x", **args}
        return run_module("nfs_share", given, check)


class Docker:
    """Volumes and the one container that reads. ``answer`` is what that container does."""

    def __init__(self) -> None:
        self.volumes: dict[str, dict[str, Any]] = {}
        self.answer: tuple[int, bytes, bytes] | Exception = (0, b"{", b"")
        self.used: set[str] = set()
        self.runs: list[dict[str, Any]] = []

    def volume_inspect(self, name: str) -> dict[str, Any]:
        if name not in self.volumes:
            raise DockerNotFound(404, f"get {name}: no such volume", "GET /volumes")
        return self.volumes[name]

    def volume_create(self, name: str, options: dict[str, str], labels: dict[str, str]) -> None:
        assert name not in self.volumes
        self.volumes[name] = {"Name": name, "Options": options, "Labels": labels}

    def volume_remove(self, name: str) -> None:
        if name in self.used:
            raise DockerConflict(409, f"remove {name}: volume is in use - [0123]", "DELETE /volumes")
        del self.volumes[name]

    def run(self, name: str, spec: dict[str, Any], timeout: float) -> tuple[int, bytes, bytes]:
        assert name.startswith("sparkfleet-nfs-")
        assert timeout > 0
        assert spec["HostConfig"]["Binds"][0].endswith(":ro")
        self.runs.append(spec)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


@pytest.mark.field("B62")
def test_an_export_is_one_file_and_grows_by_no_run(host: Host) -> None:
    host.table.write_text("/by/hand  10.9.9.9(rw)")
    assert host.export(check=True)["changed"]
    assert not host.exports_d.exists()
    assert host.export()["changed"]
    text = host.own().read_text()
    assert f"{host.tree} 10.77.0.2(ro,sync,no_subtree_check,root_squash)\n" in text
    assert host.pinged == ["127.0.0.1"]
    assert not host.export()["changed"]
    assert host.own().read_text() == text
    assert not host.exports.exists()
    assert host.export(state="unexported", check=True)["changed"]
    assert host.own().exists()
    assert host.export(state="unexported")["changed"]
    assert not host.export(state="unexported")["changed"]
    assert not host.own().exists()
    assert host.table.read_text().split() == ["/by/hand", "10.9.9.9(rw)"], (
        "what somebody exported by hand stays"
    )


def test_a_client_that_is_no_member_any_more_loses_the_tree(host: Host) -> None:
    host.export(clients=["10.77.0.2", "10.77.0.6"])
    assert host.export(clients=["10.77.0.6"])["changed"]
    assert host.table.read_text().split() == [str(host.tree), f"10.77.0.6({nfs.SERVER_OPTIONS})"]


def test_two_trees_have_two_files(host: Host) -> None:
    other = host.tree.parent / "other"
    other.mkdir()
    host.export()
    assert host.export(name="engram", path=str(other))["changed"]
    assert not host.export()["changed"]
    assert [path.name for path in sorted(host.exports_d.iterdir())] == [
        "sparkfleet-engram.exports",
        "sparkfleet-model.exports",
    ]
    assert "sparkfleet-model.exports exports" in host.export(name="third")["msg"]
    assert "cannot name an export" in host.export(name="../x")["msg"]


def test_a_server_that_is_off_is_announced_and_started(host: Host) -> None:
    host.unit.unlink()
    host.enabled.unlink()
    predicted = host.export(check=True)
    assert (predicted["changed"], predicted["server_started"]) == (True, True)
    assert not host.unit.exists()
    assert host.export()["server_started"]
    assert host.unit.exists() and host.enabled.exists()
    host.unit.unlink()
    again = host.export()
    assert [one["after_header"] for one in again["diff"]] == ["unit nfs-server.service"]


def test_a_server_that_does_not_start_leaves_nothing_behind(host: Host) -> None:
    host.unit.unlink()
    host.enabled.unlink()
    host.systemctl("echo 'Job for nfs-server.service failed' >&2; exit 1")
    assert "nfs-server.service does not start: Job for" in host.export()["msg"]
    assert not host.exports_d.exists()
    assert not host.enabled.exists(), "it would fail at each boot"


def test_an_export_that_the_kernel_lost_is_made_again(host: Host) -> None:
    host.export()
    host.table.write_text("")
    assert host.export(check=True)["changed"]
    assert host.export()["changed"]
    assert not host.export()["changed"]


def test_a_server_that_does_not_show_or_serve_the_export_is_an_error(host: Host) -> None:
    host.tool("exportfs", "echo 'exportfs: /x does not support NFS export' >&2\n")
    assert "does not support NFS export" in host.export()["msg"]
    host.own().unlink()
    host.tool("exportfs", EXPORTFS.format(table=str(host.table), files=str(host.exports_d)), sys.executable)
    host.dead = "nobody listens"
    assert "nobody listens" in host.export()["msg"]


@pytest.mark.field("B61")
def test_another_server_in_the_kernel_is_left_alone(host: Host) -> None:
    host.threads.write_text("8\n")
    assert not host.export(check=True).get("failed"), "the node's own server"
    host.unit.unlink()
    assert "with 8 threads and nfs-server.service did not start it" in host.export()["msg"]
    assert not host.exports_d.exists()


@pytest.mark.field("B56")
def test_a_mount_below_the_tree_is_named(host: Host) -> None:
    with host.mountinfo.open("a") as file:
        file.write(f"23 22 0:9 / {host.tree}/shards rw - ext4 /dev/sdb1 rw\n")
    assert f"{host.tree}/shards is a mount of its own" in host.export()["msg"]


def test_a_tree_that_is_not_there_is_predicted_and_then_refused(host: Host) -> None:
    assert host.export(check=True, path="/srv/not/yet")["changed"]
    assert "/srv/not/yet is no directory" in host.export(path="/srv/not/yet")["msg"]
    assert not host.exports_d.exists()


@pytest.mark.field("B62")
@pytest.mark.parametrize("name", ["token", "sub/stored_tokens"])
def test_a_tree_with_a_token_is_never_exported(host: Host, name: str) -> None:
    (host.tree / name).parent.mkdir(exist_ok=True)
    (host.tree / name).write_text("hf_x")
    answer = host.export()
    assert "an access token" in answer["msg"]
    assert "hf_x" not in str(answer)


@pytest.mark.field("B61")
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{parent} *(rw)", "exports {parent}, which gives {tree} away"),
        ('"{tree}" -ro 10.0.0.0/8 10.1.0.1(rw)', "exports {tree}, which gives {tree} away"),
        ("/export *(ro,fsid=0,crossmnt)", "exports /export to * with fsid=0"),
        ("/export -fsid=root,ro \\\n 10.0.0.9", "exports /export to 10.0.0.9 with fsid=0"),
        ("/export *(ro) # {tree} *(rw)", ""),
        ("{tree}ish *(rw)", ""),
    ],
)
def test_somebody_elses_export_is_left_alone_and_named(host: Host, line: str, text: str) -> None:
    names = {"tree": host.tree, "parent": host.tree.parent}
    host.exports.write_text(f"# mine\n{line.format(**names)}\n")
    answer = host.export()
    assert bool(answer.get("failed")) is bool(text)
    assert f"{host.exports} {text.format(**names)}" in answer["msg"] if text else answer["changed"]
    assert host.exports.read_text() == f"# mine\n{line.format(**names)}\n"


@pytest.mark.field("B56", "E27")
@pytest.mark.parametrize("fstype", ["overlay", "tmpfs", "fuse.sshfs", "nfs4"])
def test_what_the_kernel_cannot_export_is_refused(host: Host, fstype: str) -> None:
    host.mountinfo.write_text(f"22 1 0:1 / / rw - {fstype} x rw\n")
    assert f"lies on {fstype}" in host.export()["msg"]


def test_a_kernel_without_nfs_is_named_and_one_that_can_load_it_is_taken(host: Host) -> None:
    host.filesystems.write_text("\text4\n")
    assert "no NFS server (module nfsd" in host.export()["msg"]
    assert "no NFS client" in host.mount(check=True)["msg"]
    host.modules.touch()
    assert host.export(check=True)["changed"]
    assert host.mount(check=True)["changed"]


@pytest.mark.field("B57")
def test_a_volume_is_made_read_and_read_again(host: Host) -> None:
    assert host.mount(check=True)["changed"]
    assert (host.pinged, host.docker.volumes) == ([], {}), "its export may be as new as the volume"
    assert host.mount()["changed"]
    assert host.docker.volumes["sparkfleet-model"]["Options"] == nfs.volume_options("10.77.0.1", "/srv/tree")
    again = host.mount()
    assert (again["changed"], len(host.docker.runs)) == (False, 2)
    host.dead = "the NFS server did not answer"
    for check in (True, False):
        assert "did not answer" in host.mount(check)["msg"]
    assert len(host.docker.runs) == 2, "Docker never touches a dead mount"
    assert host.mount(state="unmounted")["changed"], "taking it back asks no server"
    assert not host.mount(state="unmounted")["changed"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((1, b"", b"head: /tree/config.json: No such file or directory"), "No such file"),
        ((0, b"", b""), "it is empty"),
        (DockerApiError(500, "failed to mount local volume: permission denied", "POST"), "permission denied"),
        (DockerNotFound(404, "No such image: x", "POST /containers/create"), "name an image"),
        (DockerUnreachable("did not answer in 60 s"), "cannot be mounted"),
    ],
)
def test_a_volume_that_cannot_be_read_does_not_stay(
    host: Host, answer: tuple[int, bytes, bytes] | Exception, text: str
) -> None:
    host.docker.answer = answer
    assert text in host.mount()["msg"]
    assert not host.docker.volumes
    host.docker.answer = (0, b"{", b"")
    host.mount()
    host.docker.answer = answer
    assert text in host.mount()["msg"]
    assert host.docker.volumes, "one that was there before stays"


def test_a_witness_that_is_no_text_is_read(host: Host) -> None:
    host.docker.answer = (0, "\ufffd".encode(), b"")  # what Docker's log makes of a byte above 127
    assert host.mount()["changed"]


def test_a_foreign_volume_is_refused_and_an_older_one_of_ours_replaced(host: Host) -> None:
    host.docker.volume_create("sparkfleet-model", {"type": "nfs"}, {})
    assert "exists with other options" in host.mount()["msg"]
    assert not host.mount(state="unmounted")["changed"]
    host.docker.volume_remove("sparkfleet-model")
    host.mount(path="/srv/old")
    host.docker.used.add("sparkfleet-model")
    assert "is in use" in host.mount()["msg"]
    assert "is in use" in host.mount(state="unmounted")["msg"]
    host.docker.used.clear()
    assert host.mount(check=True)["changed"]
    assert host.mount()["changed"]
    assert host.docker.volumes["sparkfleet-model"]["Options"]["device"] == ":/srv/tree"


def reply(number: int, *words: int) -> bytes:
    body = struct.pack(f">{len(words) + 1}I", number, *words)
    return struct.pack(">I", 0x80000000 | len(body)) + body


@pytest.mark.field("B57")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1, 0, 0, 0, 0), None),
        ((1, 0, 1, 8, 7, 7, 0), None),
        ((1, 0, 0, 0, 2, 3, 3), "not as a server of NFS version 4"),
        ((1, 1, 0), "not as a server"),
        ((1, 0, 0), "not as a server"),
        ((), "is no NFS server: it hung up"),
        (None, "did not answer in 0.2 s"),
    ],
)
def test_only_an_answer_says_that_a_server_lives(words: tuple[int, ...] | None, text: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _peer = server.accept()
            with connection:
                call = connection.recv(4096)
                assert struct.unpack(">6I", call[8:32])[1:] == (2, 100003, 4, 0, 0)
                if words is None:
                    connection.recv(1)  # a kernel that hangs took the connection and says nothing
                elif words:
                    connection.sendall(reply(struct.unpack(">I", call[4:8])[0], *words))

        thread = threading.Thread(target=serve)
        thread.start()
        if text is None:
            nfs.ping("127.0.0.1", port, 5)
        else:
            with pytest.raises(TreeError, match=text):
                nfs.ping("127.0.0.1", port, 0.2 if words is None else 5)
        thread.join()
    with pytest.raises(TreeError, match="nobody listens"):
        nfs.ping("127.0.0.1", port, 5)


def test_the_server_of_a_volume_is_in_its_options() -> None:
    assert nfs.server_of(nfs.volume_options("10.77.0.1", "/srv/tree")) == "10.77.0.1"
    assert nfs.server_of({"type": "tmpfs", "o": "addr=x"}) == ""
    assert nfs.server_of(None) == ""


@pytest.mark.parametrize("path", ["/a b", "/x(rw)", "/../etc", "relative", "/x\n/y"])
def test_no_path_breaks_out_of_its_line(path: str) -> None:
    with pytest.raises(TreeError, match="cannot be exported"):
        nfs.export_text(path, ["10.0.0.1"])


def test_a_client_is_an_address() -> None:
    with pytest.raises(ValueError, match="does not appear"):
        nfs.export_text("/x", ["*"])
    with pytest.raises(TreeError, match="no client"):
        nfs.export_text("/x", [])


@pytest.mark.field("T35", "E28")
def test_a_volume_with_other_options_is_told_apart() -> None:
    wanted = nfs.volume_options("10.77.0.1", "/srv/tree")
    assert nfs.volume_difference(wanted, dict(wanted)) == []
    other = dict(wanted, o="addr=10.0.0.9,rw")
    assert nfs.volume_difference(wanted, other) == [f"o is addr=10.0.0.9,rw, wanted {wanted['o']}"]
    assert len(nfs.volume_difference(wanted, None)) == 3
