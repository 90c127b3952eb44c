"""What may happen to a copy of a few hundred MB between two nodes: it ends proven or refused, never in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from lab.testing import Node, eventually, lab, nodes
from tests.proof.prove import Run, play

pytestmark = pytest.mark.lab
PLAYBOOK = "tests/lab/transfer.yml"
ROOT = "/var/lib/sparkfleet/lab-transfer"
COPY = f"{ROOT}/copies/tree"
PARTIAL = f"{ROOT}/copies/.tree.partial"
FILES = 4
EACH = 60 << 20
TOTAL = FILES * EACH
#: KiB/s of each of two files at once: about 15 s for all of it.
SLOW = 8_000
RAILS = ("enp1s0f0np0", "enP2p1s0f0np0")

#: Waits inside a node until a directory holds so many bytes, then runs a command: nothing is timed from outside.
WATCH = r"""
import os, subprocess, sys, time
root, wanted, command = sys.argv[1], int(sys.argv[2]), sys.argv[3]
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    found = 0
    for folder, _names, files in os.walk(root):
        for name in files:
            try:
                found += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                pass
    if found >= wanted:
        subprocess.run(["sh", "-c", command], check=False)
        break
    time.sleep(0.02)
"""
#: The module (rsync's parent) and rsync, both without a word of warning.
KILL = (
    "until pgrep -x rsync >/dev/null; do sleep 0.01; done; "
    "kill -9 $(for p in $(pgrep -x rsync); do ps -o ppid= -p $p; echo $p; done)"
)


def rails(pair: list[Node]) -> None:
    for number, node in enumerate(pair, 1):
        for rail, netdev in enumerate(RAILS):
            node.run("ip", "link", "set", netdev, "up", "mtu", "9000")
            node.run("ip", "address", "replace", f"10.77.0.{number + 4 * rail}/30", "dev", netdev)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    both = list(nodes())
    rails(both)
    head = both[0]
    head.text(
        "sh",
        "-c",
        f"rm -rf {ROOT}; mkdir -p {ROOT}/source && cd {ROOT}/source && "
        f"for n in $(seq {FILES}); do head -c {EACH} /dev/urandom > $n.bin; done",
    )
    yield both
    for node in both:
        node.run("sh", "-c", f"systemctl stop 'sparkfleet-share-lab-transfer*'; rm -rf {ROOT}")


@pytest.fixture(scope="module")
def manifest(pair: list[Node]) -> list[dict[str, Any]]:
    lines = pair[0].text("sh", "-c", f"cd {ROOT}/source && sha256sum *").splitlines()
    return [{"name": line.split()[1], "size": EACH, "sha256": line.split()[0]} for line in lines]


@pytest.fixture(autouse=True)
def bare(pair: list[Node]) -> None:
    rails(pair)
    pair[1].text("sh", "-c", f"rm -rf {ROOT}/copies /var/lib/sparkfleet/locks")


def copy(files: list[dict[str, Any]], *words: str, **variables: object) -> Run:
    inventory = str(lab().directory / "inventory")
    return play(PLAYBOOK, inventory, extra=["-e", json.dumps({"transfer_files": files, **variables}), *words])


def at(worker: Node, share: int, command: str) -> None:
    """Run ``command`` in ``worker`` once it holds ``share`` percent of the tree."""
    worker.write(f"{ROOT}/watch.py", WATCH)
    argv = ["python3", f"{ROOT}/watch.py", f"{ROOT}/copies", str(TOTAL * share // 100), command]
    worker.container.exec_run(argv, detach=True)


def held(node: Node, path: str) -> int:
    """Bytes below a path."""
    sizes = f"find {path} -type f -printf '%s\\n' 2>/dev/null | awk '{{s+=$1}} END {{print s+0}}'"
    return int(node.text("sh", "-c", sizes).split()[-1])


def absent(node: Node) -> bool:
    """Nothing carries the final name."""
    return node.run("test", "-e", COPY).status != 0


def received(node: Node) -> int:
    """Bytes that came over both rails since the node started."""
    return sum(int(node.read(f"/sys/class/net/{rail}/statistics/rx_bytes")) for rail in RAILS)


def whole(node: Node, manifest: list[dict[str, Any]]) -> bool:
    """The final tree, read by somebody else than the product."""
    sums = node.text("sh", "-c", f"cd {COPY} && sha256sum *").splitlines()
    return [line.split() for line in sums] == [[one["sha256"], one["name"]] for one in manifest]


def finish(worker: Node, manifest: list[dict[str, Any]]) -> None:
    """The next run brings it, and one more does nothing and reads nothing."""
    done = copy(manifest)
    assert done.rc == 0, done.output
    assert whole(worker, manifest)
    assert worker.run("test", "-e", PARTIAL).status != 0
    # Times of last access tell whether a byte was read: two days old is more than relatime keeps. The control
    # is read, so that a file system without such times cannot make this pass.
    worker.text("sh", "-c", f"echo x > {ROOT}/control; touch -a -d '2 days ago' {ROOT}/control {COPY}/*")
    before = worker.text("sh", "-c", f"stat -c %X {COPY}/*")
    again = copy(manifest)
    assert (again.rc, again.changed()) == (0, set()), again.output
    assert worker.text("sh", "-c", f"stat -c %X {COPY}/*") == before, "a second run read data"
    control = worker.text("stat", "-c", "%X", f"{ROOT}/control")
    worker.text("cat", f"{ROOT}/control")
    assert worker.text("stat", "-c", "%X", f"{ROOT}/control") != control


@pytest.mark.field("B63")
def test_a_copy_killed_at_10_50_and_90_percent_resumes_each_time(
    pair: list[Node], manifest: list[dict[str, Any]]
) -> None:
    worker = pair[1]
    kept = 0
    for share in (10, 50, 90):
        at(worker, share, KILL)
        killed = copy(manifest, transfer_limit_kib=SLOW)
        assert killed.rc != 0, killed.output
        assert absent(worker)
        eventually(lambda: worker.run("pgrep", "-x", "rsync").status != 0, "the end of rsync")
        now = held(worker, PARTIAL)
        assert kept <= now < TOTAL and now >= TOTAL * share // 100, "what came is kept"
        kept = now
    before = received(worker)
    finish(worker, manifest)
    assert received(worker) - before < TOTAL - kept + TOTAL // 10, "what was there came again"


@pytest.mark.parametrize("victim", ["source", "receiver"])
def test_a_node_that_dies_in_the_middle(
    pair: list[Node], manifest: list[dict[str, Any]], victim: str
) -> None:
    head, worker = pair
    node = head if victim == "source" else worker
    with ThreadPoolExecutor(max_workers=1) as pool:
        running: Future[Run] = pool.submit(copy, manifest, transfer_limit_kib=SLOW)
        eventually(lambda: held(worker, f"{ROOT}/copies") > TOTAL // 4, "a quarter of the copy", 90)
        node.container.kill()
        node.restart()
        rails(pair)
        died = running.result()
    assert died.rc != 0, died.output
    assert absent(worker)
    if victim == "source":
        assert "10.77.0.1" in died.output, "the source is named"
    finish(worker, manifest)


def test_a_source_that_ends_is_named_and_what_came_is_kept(
    pair: list[Node], manifest: list[dict[str, Any]]
) -> None:
    head, worker = pair
    with ThreadPoolExecutor(max_workers=1) as pool:
        running: Future[Run] = pool.submit(copy, manifest, transfer_limit_kib=SLOW)
        eventually(lambda: held(worker, f"{ROOT}/copies") > TOTAL // 4, "a quarter of the copy", 90)
        head.text("systemctl", "stop", "sparkfleet-share-lab-transfer-0")
        dead = running.result()
    assert dead.rc != 0
    text = " ".join(dead.output.split())
    assert "from 10.77.0.1:29998" in text, text
    assert absent(worker)
    assert held(worker, PARTIAL) > TOTAL // 4
    finish(worker, manifest)


@pytest.mark.field("B67")
def test_a_disk_that_fills_up_in_the_middle(pair: list[Node], manifest: list[dict[str, Any]]) -> None:
    worker = pair[1]
    worker.text(
        "sh", "-c", f"mkdir -p {ROOT}/copies; mount -t tmpfs -o size={TOTAL + (8 << 20)} none {ROOT}/copies"
    )
    try:
        # It was enough when it began: somebody else writes meanwhile.
        at(worker, 30, f"head -c {TOTAL // 2} /dev/zero > {ROOT}/copies/somebody-else")
        full = copy(manifest, transfer_limit_kib=SLOW)
        text = " ".join(full.output.split())
        assert full.rc != 0
        assert "disk full" in text, text
        assert absent(worker)
        short = copy(manifest)
        assert "short" in " ".join(short.output.split()), short.output
        worker.text("rm", f"{ROOT}/copies/somebody-else")
        done = copy(manifest)
        assert done.rc == 0, done.output
        assert whole(worker, manifest)
    finally:
        worker.run("umount", f"{ROOT}/copies")


@pytest.mark.field("B63", "B64")
@pytest.mark.parametrize("damage", ["flipped", "truncated", "lost", "wrong source"])
def test_damage_ends_in_a_proven_tree_or_a_refusal(
    pair: list[Node], manifest: list[dict[str, Any]], damage: str
) -> None:
    head, worker = pair
    assert copy(manifest).rc == 0
    last = f"{COPY}/{manifest[-1]['name']}"
    if damage == "wrong source":
        path = f"{ROOT}/source/{manifest[-1]['name']}"
        head.text("sh", "-c", f"cp {path} /run/good; printf XXXXXXXX | dd of={path} conv=notrunc 2>/dev/null")
        worker.text("rm", last)
        try:
            refused = copy(manifest)
        finally:
            head.text("sh", "-c", f"cat /run/good > {path}; rm /run/good")
        assert refused.rc != 0
        assert manifest[-1]["name"] in refused.output and "sha256" in refused.output
        assert absent(worker), "a tree that is not whole has lost its name"
    else:
        how = {
            "flipped": f"printf XXXXXXXX | dd of={last} bs=1 seek=1000000 conv=notrunc 2>/dev/null",
            "truncated": f"truncate -s -1000 {last}",
            "lost": f"rm {last}",
        }[damage]
        worker.text("sh", "-c", how)
        predicted = copy(manifest, "--check")
        assert {host for host, _task in predicted.changed()} == {"spark-2"}
    before = received(worker)
    finish(worker, manifest)
    assert received(worker) - before < 2 * EACH, "one file was wrong, one came"


def test_a_foreign_shard_and_a_foreign_note(pair: list[Node], manifest: list[dict[str, Any]]) -> None:
    worker = pair[1]
    assert copy(manifest).rc == 0
    worker.text("sh", "-c", f"echo mine > {COPY}/notes.txt")
    told = copy(manifest)
    assert (told.rc, told.changed()) == (0, set())
    assert "foreign file notes.txt" in " ".join(told.output.split())
    worker.text("sh", "-c", f"echo mine > {COPY}/zzz.safetensors")
    for words in (["--check"], []):
        refused = copy(manifest, *words)
        assert refused.rc != 0 and "zzz.safetensors" in refused.output
    assert worker.read(f"{COPY}/zzz.safetensors") == worker.read(f"{COPY}/notes.txt") == "mine"
