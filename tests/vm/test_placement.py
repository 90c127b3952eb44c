"""Engram tables over the network: only when accepted, then mounted by the ranks; never taken for a local disk."""

from __future__ import annotations

import json

import pytest

from lab.vm.testing import Vm, inventory
from tests.proof.ask import ask
from tests.proof.prove import Run, compare_tasks, play
from tests.proof.tables import ROWS, script

pytestmark = pytest.mark.lab
TABLES = "/srv/extracted"
VOLUME = "sparkfleet-engram-0123456789ab"


def place(*extra: str) -> Run:
    return play("tests/vm/engram.yml", inventory(), extra=extra)


def prune(*extra: str) -> Run:
    return play("tests/vm/prune.yml", inventory(), extra=extra)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.field("B60")
def test_tables_over_nfs_are_placed_only_when_the_price_is_accepted(machines: tuple[Vm, Vm]) -> None:
    server, client = machines
    server.text(f"python3 - <<'END'\n{script(TABLES)}\nEND")
    refused = place()
    assert refused.rc != 0
    assert "around 940 µs over NFS instead of around 90 µs" in words(refused.output)
    assert "set engram_nfs_accepted to true" in words(refused.output)
    accepted = ("-e", "engram_nfs_accepted=true")
    check = place("--check", *accepted)
    assert check.rc == 0, check.output
    assert client.text("docker volume ls -q") == ""
    real = place(*accepted)
    assert real.rc == 0, real.output
    assert compare_tasks(check, real) == []
    assert "around 940 µs over NFS" in words(real.output), "the price is said each time"
    assert f"engram is {TABLES}, complete True" in words(real.output)
    assert f"engram is volume:{VOLUME}, complete True" in words(real.output)
    again = place(*accepted)
    assert (again.rc, again.changed()) == (0, set()), again.output
    seen = client.text(
        f"docker run --rm --network none -v {VOLUME}:/engram:ro lab/tools:1 sha256sum /engram/tables.safetensors"
    )
    assert seen.split()[0] == server.text(f"sha256sum {TABLES}/tables.safetensors").split()[0]


@pytest.mark.field("B60")
def test_a_network_is_refused_by_its_type_and_by_its_time(machines: tuple[Vm, Vm]) -> None:
    _server, client = machines
    client.text(
        f"mkdir -p /srv/local /run/far && mount -t nfs4 -o ro 10.77.0.1:{TABLES} /run/far && cp /run/far/* /srv/local/"
    )
    try:
        kind = ask(inventory(), "vm-2", "engram_check", path="/run/far")
        near = ask(inventory(), "vm-2", "engram_check", path="/srv/local", latency_limit_us=1e9)
        limit = 1.5 * near["latency_us"]
        far = ask(
            inventory(),
            "vm-2",
            "engram_check",
            path="/run/far",
            extra_fstypes=["nfs4"],
            latency_limit_us=limit,
        )
    finally:
        client.text("umount /run/far")
    assert "lies on nfs4 (10.77.0.1:" in kind["msg"]
    assert "around 90 µs a read on a local NVMe, around 940 µs over a network" in kind["msg"]
    assert (near["failed"], near["fstype"], near["tables"][0]["rows"]) == (False, "ext4", ROWS)
    assert far["failed"], "vouched for, and yet too slow"
    assert "a 4 KiB random read takes" in far["msg"]
    assert "local NVMe class is around 90 µs, network class around 940 µs" in far["msg"]
    assert f"the limit is {limit:.0f} µs" in far["msg"]


@pytest.mark.field("B60")
def test_back_on_local_disks_the_share_is_named_and_goes_on_request(machines: tuple[Vm, Vm]) -> None:
    """After the first test above: export and volume are there, and what a release may need stays until it is asked."""
    server, client = machines
    local = ("-e", "engram_placement=local")
    check = place("--check", *local)
    assert check.rc == 0, check.output
    back = place(*local)
    assert back.rc == 0, back.output
    assert compare_tasks(check, back) == []
    path = client.text("ls -d /var/lib/sparkfleet/engram/lab--tables/*")
    assert f"engram is {path}, complete True" in words(back.output)
    assert client.text(f"sha256sum <{path}/tables.safetensors") == server.text(
        f"sha256sum <{TABLES}/tables.safetensors"
    )
    export = f"/etc/exports.d/{VOLUME}.exports"
    said = words(back.output)
    assert f"vm-1 still has {export} (NFS export of {TABLES} to 10.77.0.2)" in said
    assert f"vm-2 still has {VOLUME} (Docker volume over NFS)" in said
    # The copy is what the inventory names now. A container that reads from the share keeps both of its sides.
    keep = ("-e", json.dumps({"prune_keep": [path]}))
    client.text(
        f"docker run -d --name reader --network none -v {VOLUME}:/engram:ro lab/tools:1 "
        "sh -c 'exec 3</engram/tables.safetensors; sleep 3600'"
    )
    try:
        listed = prune(*keep)
    finally:
        client.text("docker rm -f reader")
    assert (listed.rc, listed.changed()) == (0, set()), listed.output
    assert VOLUME not in listed.output
    words_of_removal = (*keep, "-e", "prune_remove=true")
    predicted = prune("--check", *words_of_removal)
    assert server.run(f"test -e {export}").status == 0
    assert client.text("docker volume ls -q") == VOLUME
    removed = prune(*words_of_removal)
    assert removed.rc == 0, removed.output
    assert {host for host, _task in removed.changed()} == {"vm-1", "vm-2"}
    assert predicted.changed() == removed.changed()
    assert server.run(f"test -e {export}").status != 0
    assert TABLES not in server.text("exportfs -s")
    assert client.text("docker volume ls -q") == ""
    assert server.run(f"test -e {TABLES}/tables.safetensors").status == 0, "tables of somebody else stay"
    again = prune(*words_of_removal)
    assert (again.rc, again.changed()) == (0, set()), again.output
    quiet = place(*local)
    assert (quiet.rc, quiet.changed()) == (0, set()), quiet.output
    assert "still has" not in quiet.output
