"""Kernel NFS between two machines: shared, read through a container, hung, taken back. The order counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.testing import eventually
from lab.vm.testing import Vm, inventory
from tests.proof.prove import Run, compare_tasks, play

pytestmark = pytest.mark.lab
TREE = "/var/lib/sparkfleet/models/lab--tree/0123456789abcdef0123456789abcdef01234567"
OWN = "/etc/exports.d/sparkfleet-model.exports"
EXPORT = f"{TREE} 10.77.0.2(ro,sync,no_subtree_check,root_squash)"
#: A tree of two files, a token beside it, and exports of somebody else.
PREPARE = f"""
set -e
mkdir -p {TREE} /srv/foreign /srv/by-hand
echo '{{"model": "lab"}}' >{TREE}/config.json
dd if=/dev/urandom of={TREE}/table.bin bs=1M count=8 status=none
echo hf_secret >/var/lib/sparkfleet/models/token
echo '/srv/foreign 10.9.9.9(ro,no_subtree_check)' >/etc/exports
! systemctl is-enabled -q nfs-server || systemctl disable -q --now nfs-server
"""
#: What a run may change, as text: files and table of the exports, the server, volumes and containers.
SERVER = """
cat /etc/exports /etc/exports.d/*
exportfs -s
systemctl is-active nfs-server
systemctl is-enabled nfs-server
true
"""
CLIENT = "docker volume ls -q; docker ps -aq"


def share(*extra: str) -> Run:
    return play("tests/vm/nfs.yml", inventory(), extra=extra)


def words(run: Run) -> str:
    return " ".join(run.output.split())


@pytest.fixture(scope="module", autouse=True)
def prepared(machines: tuple[Vm, Vm]) -> Iterator[None]:
    server, _client = machines
    server.text(PREPARE)
    yield
    server.machine.resume()


@pytest.mark.field("B56", "B62")
def test_a_share_is_predicted_then_made_then_nothing(machines: tuple[Vm, Vm]) -> None:
    server, client = machines
    before = server.text(SERVER), client.text(CLIENT)
    check = share("--check", "--diff")
    assert check.rc == 0, check.output
    assert (server.text(SERVER), client.text(CLIENT)) == before
    real = share()
    assert real.rc == 0, real.output
    assert compare_tasks(check, real) == []
    assert len(real.changed()) == 2
    again = share()
    assert (again.rc, again.changed()) == (0, set()), again.output
    state = server.text(SERVER)
    assert EXPORT in state
    assert "/srv/foreign 10.9.9.9(ro,no_subtree_check)" in state, "a foreign export stays"
    assert state.splitlines()[-2:] == ["active", "enabled"]
    assert client.text(CLIENT).split() == ["sparkfleet-model"], "no container is left"


def test_a_container_reads_it_and_nobody_writes(machines: tuple[Vm, Vm]) -> None:
    server, client = machines
    seen = client.text(
        "docker run --rm --network none -v sparkfleet-model:/tree:ro lab/tools:1 sha256sum /tree/table.bin"
    )
    assert seen.split()[0] == server.text(f"sha256sum {TREE}/table.bin").split()[0]
    mount = client.text(
        "docker run --rm -v sparkfleet-model:/tree lab/tools:1 cat /proc/mounts | grep ' /tree '"
    )
    # A server offers what its memory allows (fs/nfsd/nfssvc.c, nfsd_max_blksize): 1 MiB from 4 GiB on, less here.
    size = min(1 << 20, int(server.text("cat /proc/fs/nfsd/max_block_size")))
    for option in ("nfs4", "vers=4.2", "hard", "nconnect=8", "timeo=600", f"rsize={size},", "addr=10.77.0.1"):
        assert option in mount, mount
    written = client.run("docker run --rm -v sparkfleet-model:/tree lab/tools:1 touch /tree/x")
    assert "Read-only file system" in written.text


@pytest.mark.field("B62")
def test_the_token_beside_the_tree_cannot_be_seen_and_one_inside_is_refused(machines: tuple[Vm, Vm]) -> None:
    server, client = machines
    seen = client.text("mount -t nfs4 10.77.0.1:/ /mnt && find /mnt -type f; umount /mnt")
    assert sorted(seen.split()) == [f"/mnt{TREE}/config.json", f"/mnt{TREE}/table.bin"]
    server.text(f"cp /var/lib/sparkfleet/models/token {TREE}/token")
    try:
        refused = share("--check", "-l", "vm-1")
    finally:
        server.text(f"rm {TREE}/token")
    assert refused.rc != 0
    assert "an access token; it is not exported" in words(refused)
    assert "hf_secret" not in refused.output


@pytest.mark.field("B57")
def test_a_server_that_hangs_is_said_and_hangs_nobody_else(machines: tuple[Vm, Vm]) -> None:
    server, client = machines
    # O_DIRECT, so that each read asks the server; a line for each read that came, a file for one that failed.
    reader = (
        "while :; do dd if=/tree/table.bin of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null "
        "&& echo >>/out/reads || touch /out/failed; sleep 0.2; done"
    )
    client.text(
        "mkdir -p /run/out /run/soft && docker run -d --name reader --network none -v sparkfleet-model:/tree:ro "
        f"-v /run/out:/out lab/tools:1 sh -c '{reader}'"
    )
    client.text(f"mount -t nfs4 -o ro,soft,timeo=20,retrans=1 10.77.0.1:{TREE} /run/soft")

    def reads() -> int:
        return int(client.text("wc -l </run/out/reads"))

    eventually(lambda: client.run("test -s /run/out/reads").status == 0, "the reader's first read", 60)
    server.machine.pause()
    try:
        refused = share("-l", "vm-2")
        assert refused.rc != 0
        assert "the NFS server 10.77.0.1:2049 did not answer in 5 s" in words(refused)
        # Soft turns a hang into a read error, which for weights is worse; hard waits. Docker answers all the same.
        soft = client.run("dd if=/run/soft/table.bin of=/dev/null bs=4096 count=1 iflag=direct")
        assert "Input/output error" in soft.text or "timed out" in soft.text, soft.text
        hung = reads()
        assert client.text("docker ps --format '{{.Names}}'") == "reader"
        assert reads() == hung, "a read came from a server that hangs"
    finally:
        server.machine.resume()
    eventually(lambda: reads() > hung, "the reader to go on", 300)
    assert client.run("test -e /run/out/failed").status != 0, "a hard mount never fails a read"
    busy = share("-e", "nfs_share_state=absent", "-l", "vm-2")
    assert "is in use" in words(busy), "a volume that a rank holds is not taken from it"
    client.text("docker rm -f reader >/dev/null; umount /run/soft")
    again = share()
    assert (again.rc, again.changed()) == (0, set()), again.output


@pytest.mark.field("B61")
def test_it_is_taken_back_and_what_others_export_stays(machines: tuple[Vm, Vm]) -> None:
    server, client = machines
    server.text("exportfs -i -o ro,no_subtree_check 10.9.9.9:/srv/by-hand")
    gone = share("-e", "nfs_share_state=absent")
    assert gone.rc == 0, gone.output
    assert len(gone.changed()) == 2
    state = server.text(SERVER)
    assert TREE not in state
    assert "/srv/by-hand" in state and "/srv/foreign" in state
    assert client.text(CLIENT) == ""
    again = share("-e", "nfs_share_state=absent")
    assert (again.rc, again.changed()) == (0, set())
    # The same kernel's server, started by somebody else.
    server.text("systemctl stop nfs-server && rpc.nfsd 1")
    try:
        refused = share("--check", "-l", "vm-1")
    finally:
        server.text("rpc.nfsd 0; systemctl start nfs-server")
    assert "nfs-server.service did not start it" in words(refused)
    assert server.run(f"test -e {OWN}").status != 0
