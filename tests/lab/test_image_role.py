"""The engine image on two nodes with two kinds of store: built once, moved by layers, refused, kept, removed."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_identity import make_recipe

from lab.config import HUB_NAME, REGISTRY_PORT
from lab.testing import Node, engine, lab, nodes
from tests.proof.prove import Run, play, prove_check_mode

pytestmark = pytest.mark.lab
PLAYBOOK = "tests/lab/image.yml"
BASE = "hub.lab:5000/lab/base:1"
DATA = "/var/lib/sparkfleet"
REGISTRY = f"{HUB_NAME}:{REGISTRY_PORT}"
RAIL = "enp1s0f0np0"
BUILD = "Build the image where nobody has it"
BRING = "Bring the image from the node that has it"
FETCH = "Pull what somebody built from the same recipe"
#: Bytes of the topmost layer, random so that nothing packs it: what a change of the engine moves.
TOP = 24_000_000
DOCKERFILE = f"""ARG BASE_IMAGE
FROM ${{BASE_IMAGE}}
ARG JOBS=8
COPY patches/ /patches/
RUN cat /patches/*.patch > /applied; echo "$JOBS" > /jobs; \\
    cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max > /memory 2>/dev/null; \\
    cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max > /processors 2>/dev/null; \\
    python3 -c 'import os; open("/weights", "wb").write(os.urandom({TOP}))'
COPY probe /usr/local/bin/probe-of-the-lab
"""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small build context with a large layer."""
    root = tmp_path_factory.mktemp("context")
    (root / "patches").mkdir()
    (root / "patches/0000-base.patch").write_text("base\n")
    (root / "Dockerfile").write_text(DOCKERFILE)
    (root / "probe").write_text("#!/bin/sh\nexit 2\n")
    (root / "probe").chmod(0o755)
    return root


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    """Both nodes with rails and without images; left so as well."""
    both = list(nodes())
    for number, node in enumerate(both, 1):
        node.text("ip", "link", "set", RAIL, "up", "mtu", "9000")
        node.text("ip", "address", "replace", f"10.77.0.{number}/30", "dev", RAIL)
        bare(node)
    yield both
    for node in both:
        bare(node)
        node.run("ip", "address", "flush", "dev", RAIL)


def bare(node: Node) -> None:
    node.run("sh", "-c", "docker ps -aq | xargs -r docker rm -f")
    forget(node)
    node.run("sh", "-c", f"rm -rf {DATA}/transfer {DATA}/locks {DATA}/releases")


def forget(node: Node) -> None:
    """Every image away, and from containerd what Docker does not list of it."""
    node.run("sh", "-c", "docker images -aq --no-trunc | sort -u | xargs -r docker rmi -f")
    for what in ("images", "leases"):
        node.text("sh", "-c", f"ctr -n moby {what} ls -q | xargs -r ctr -n moby {what} rm --sync")


def whole(node: Node, name: str) -> bool:
    """Whether the node can give every layer of the image: ``docker save`` is silent about what it leaves out."""
    node.text("docker", "save", "-o", "/root/whole.tar", name)
    members = node.text("tar", "tf", "/root/whole.tar").split()
    (said,) = json.loads(node.text("tar", "xOf", "/root/whole.tar", "manifest.json") or "[{}]")
    node.text("rm", "/root/whole.tar")
    layers = said.get("Layers") or []
    return len(layers) == len(inspect(node, name)["RootFS"]["Layers"]) and set(layers) <= set(members)


def run(context: Path, *extra: str, **variables: object) -> Run:
    words = ["-e", json.dumps({"image_context": str(context), **variables})]
    return play(PLAYBOOK, str(lab().directory / "inventory"), extra=[*words, *extra])


def tags(node: Node, name: str = "lab/engine") -> list[str]:
    return node.text("docker", "images", "--format", "{{.Tag}}", name).split()


def inspect(node: Node, reference: str) -> dict[str, Any]:
    (found,) = json.loads(node.text("docker", "image", "inspect", reference))
    assert isinstance(found, dict)
    return found


def received(node: Node) -> int:
    return int(node.read(f"/sys/class/net/{RAIL}/statistics/rx_bytes"))


def did(done: Run) -> set[tuple[str, str]]:
    """(host, task) of what changed, without the role's name."""
    return {(host, task.rpartition(" : ")[2]) for host, task in done.changed()}


def text(done: Run) -> str:
    """The output on one line: Ansible breaks long messages."""
    return " ".join(done.output.split())


def refused(done: Run, *parts: str) -> None:
    """One failed run that changed nothing and says all of this."""
    assert done.rc != 0
    for part in parts:
        assert part in text(done), done.output[-3000:]
    assert "Traceback" not in done.output


def nothing_passing(pair: list[Node]) -> None:
    for node in pair:
        assert node.run("test", "-e", f"{DATA}/transfer").status != 0
        assert node.run("sh", "-c", "ls /run/sparkfleet/*.conf").status != 0
        assert "sparkfleet-share" not in node.text(
            "systemctl", "list-units", "--all", "--plain", "--no-legend"
        )
        assert [tag for tag in tags(node) if tag.startswith("building")] == []


@pytest.mark.field("B69", "B70")
def test_built_once_moved_once_then_nothing(pair: list[Node], context: Path) -> None:
    words = ["-e", json.dumps({"image_context": str(context)})]
    proof = prove_check_mode(PLAYBOOK, str(lab().directory / "inventory"), words)
    assert not proof.problems, proof.report()
    assert proof.real is not None
    assert did(proof.real) == {("spark-1", BUILD), ("spark-2", BRING)}
    head, worker = pair
    (tag,) = tags(head)
    assert tags(worker) == [tag]
    mine, other = (inspect(node, f"lab/engine:{tag}") for node in pair)
    assert mine["RootFS"]["Layers"] == other["RootFS"]["Layers"]
    assert mine["Id"] != other["Id"], (
        "the lab lost the difference between two stores that this test stands for"
    )
    assert (
        worker.text("docker", "run", "--rm", "--network=none", f"lab/engine:{tag}", "cat", "/applied")
        == "base"
    )
    # The store is whole: what was not moved is there as well (a containerd store can have an image in parts).
    assert whole(worker, f"lab/engine:{tag}")
    nothing_passing(pair)


def test_a_build_is_held_to_its_memory_and_processors(pair: list[Node], context: Path) -> None:
    """Written by a step of the build above: what the classic builder of each store really set."""
    head = pair[0]
    image = f"lab/engine:{tag_of(context)}"
    said = {
        name: head.text("docker", "run", "--rm", "--network=none", image, "cat", f"/{name}").split()
        for name in ("memory", "processors", "jobs")
    }
    assert said == {"memory": ["536870912"], "processors": said["processors"], "jobs": ["1"]}
    assert said["processors"][0] == "100000", said


def test_one_patch_changed_builds_once_and_moves_one_layer(
    pair: list[Node], context: Path, tmp_path: Path
) -> None:
    """In both directions: the receiver is the containerd store first, then overlay2 with a named builder."""
    head, worker = pair
    first = tag_of(context)
    size = inspect(head, f"lab/engine:{first}")["Size"]
    for builder, receiver, number in (("", worker, 1), ("spark-2", head, 2)):
        patch = tmp_path / f"{number}.patch"
        patch.write_text(f"change {number}\n")
        before = received(receiver)
        done = run(context, image_patches=[str(patch)], image_builder=builder)
        assert done.rc == 0, done.output
        assert did(done) == {(builder or "spark-1", BUILD), (receiver.name, BRING)}
        moved = received(receiver) - before
        assert TOP < moved < 1.2 * TOP < size / 2, "more than the changed layers moved"
        again = run(context, image_patches=[str(patch)], image_builder=builder)
        assert (again.rc, again.changed()) == (0, set()), again.output
        assert set(tags(head)) == set(tags(worker))
        assert len(tags(head)) == number + 1
        name = f"lab/engine:{tag_of(context, patch)}"
        assert all(whole(node, name) for node in pair)
        said = receiver.text("docker", "run", "--rm", "--network=none", name, "cat", "/applied")
        assert said == f"base\nchange {number}"
    nothing_passing(pair)


@pytest.mark.field("B70")
def test_an_image_built_upon_moved_layers_outlives_what_brought_them(
    pair: list[Node], context: Path, tmp_path: Path
) -> None:
    """The containerd node built the last one upon snapshots of the first: a pull brought no bytes of the base."""
    worker = pair[1]
    (newest, *others) = tags(worker)
    worker.text("docker", "rmi", *(f"lab/engine:{tag}" for tag in others))
    assert whole(worker, f"lab/engine:{newest}")
    assert (
        worker.text("docker", "run", "--rm", "--network=none", f"lab/engine:{newest}", "cat", "/jobs") == "1"
    )

    # Without it, only snapshots of the base are left.
    worker.text("docker", "rmi", f"lab/engine:{newest}")
    assert "moby-dangling" not in worker.text("ctr", "-n", "moby", "images", "ls", "-q")
    patch = tmp_path / "3.patch"
    patch.write_text("change 3\n")
    variables: dict[str, Any] = {"image_patches": [str(patch)], "image_builder": "spark-2"}
    done = run(context, **variables)
    refused(done, "spark-2:", f"layers of {BASE} unpacked only", "docker rmi, then docker image prune")
    assert not done.changed()
    assert tags(worker) == []
    worker.text("sh", "-c", f"docker rmi {BASE} && docker image prune -f")
    done = run(context, **variables)
    assert did(done) == {("spark-2", BUILD), ("spark-1", BRING)}, done.output
    assert all(whole(node, f"lab/engine:{tag_of(context, patch)}") for node in pair)


def test_a_move_that_was_cut_goes_on_where_it_was(pair: list[Node], context: Path) -> None:
    head, worker = pair
    (context / "patches/0001-cut.patch").write_text("cut\n")
    before = received(worker)

    def cut() -> None:
        deadline = time.monotonic() + 300
        while received(worker) - before < TOP // 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        worker.run("pkill", "-9", "-x", "rsync")

    killer = threading.Thread(target=cut)
    with head.fault("rail-rate", "40"), worker.fault("rail-rate", "40"):
        killer.start()
        broken = run(context)
        killer.join()
    assert broken.rc != 0, "the move ended before it was cut"
    assert "rsync ended with" in text(broken)
    assert did(broken) == {("spark-1", BUILD)}
    half = worker.text("sh", "-c", f"cat {DATA}/transfer/image-*/blobs/sha256/* | wc -c")
    assert int(half) >= TOP // 3
    before = received(worker)
    done = run(context)
    assert done.rc == 0, done.output
    assert did(done) == {("spark-2", BRING)}
    assert received(worker) - before < 1.1 * TOP - int(half), "what had come before the cut was moved again"
    nothing_passing(pair)


def test_a_program_that_does_not_run_never_gets_the_name(
    pair: list[Node], context: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "context"
    subprocess.run(["cp", "-r", str(context), str(broken)], check=True)
    (broken / "probe").write_text("#!/bin/sh\necho the kernel set is absent >&2\nexit 7\n")
    before = tags(pair[0])
    done = run(broken)
    refused(done, "ended with 7 instead of 2", "the kernel set is absent")
    assert not done.changed()
    assert tags(pair[0]) == before


def test_a_step_beyond_its_memory_is_ended_and_said(pair: list[Node], context: Path, tmp_path: Path) -> None:
    greedy = tmp_path / "context"
    subprocess.run(["cp", "-r", str(context), str(greedy)], check=True)
    with (greedy / "Dockerfile").open("a") as out:
        out.write("RUN python3 -c 'print(len(bytearray(700 << 20)))'\n")
    done = run(greedy, "-l", "spark-1", image_members=member(1))
    refused(done, "137: killed, as when a step takes more than image_build_memory_bytes, 536870912")


def member(number: int) -> list[dict[str, Any]]:
    """A replica of one node."""
    return [
        {"name": f"spark-{number}", "rank": 0, "rails": [{"address": f"10.77.0.{number}/30"}]},
    ]


def tag_of(context: Path, *patches: Path) -> str:
    """The tag that the recipe has."""
    recipe = make_recipe(context, "Dockerfile", {}, BASE, patches=patches, allow_tag=True)
    return recipe.content[:12]


@pytest.mark.field("B68")
def test_an_image_of_another_architecture_is_refused_before_anything_is_made(
    pair: list[Node], context: Path, tmp_path: Path
) -> None:
    patch = tmp_path / "arch.patch"
    patch.write_text("arch\n")
    name = f"lab/engine:{tag_of(context, patch)}"
    head = pair[0]
    head.text("sh", "-c", f"tar c -C /etc hostname | docker import --platform linux/arm64 - {name}")
    try:
        done = run(context, image_patches=[str(patch)])
    finally:
        head.text("docker", "rmi", name)
    refused(done, "spark-1:", "is built for arm64, this node is amd64", "exec format error")
    assert not done.changed()
    assert pair[1].text("docker", "ps", "-aq") == ""


def test_a_moved_tag_is_refused(pair: list[Node], context: Path) -> None:
    head = pair[0]
    tag = tag_of(context)
    other = next(one for one in tags(head) if one != tag)
    image = head.text("docker", "image", "inspect", "-f", "{{.Id}}", f"lab/engine:{tag}")
    head.text("docker", "tag", f"lab/engine:{other}", f"lab/engine:{tag}")
    try:
        done = run(context)
    finally:
        head.text("docker", "tag", image, f"lab/engine:{tag}")
    refused(done, "spark-1:", "the tag was moved")
    assert not done.changed()


@pytest.mark.field("B70")
def test_a_store_that_lost_a_blob_is_named_and_nothing_is_loaded(pair: list[Node], context: Path) -> None:
    """The containerd store names an image although a layer of it is gone (moby#49473)."""
    head, worker = pair
    tag = tag_of(context)
    name = f"lab/engine:{tag}"
    head.text("docker", "save", "-o", "/root/kept.tar", name)
    head.text("docker", "rmi", name)
    blob = worker.text(
        "sh",
        "-c",
        f"docker save {name} | tar xO manifest.json | grep -o 'blobs/sha256/[0-9a-f]*' | tail -n 1",
    )
    path = f"/var/lib/containerd/io.containerd.content.v1.content/{blob}"
    worker.text("mv", path, "/root/kept.blob")
    try:
        done = run(context)
        there = name in head.text("docker", "images", "--format", "{{.Repository}}:{{.Tag}}")
    finally:
        worker.text("mv", "/root/kept.blob", path)
        head.text("sh", "-c", "docker load -q -i /root/kept.tar; rm /root/kept.tar")
    refused(done, "spark-2:", "Docker")
    assert not done.changed()
    assert not there
    nothing_passing(pair)


@pytest.mark.field("B72")
def test_a_docker_that_may_not_be_asked_is_unknown_and_never_empty(pair: list[Node], context: Path) -> None:
    done = play("tests/lab/image_as_user.yml", str(lab().directory / "inventory"))
    refused(done, "permission denied on /var/run/docker.sock: what runs here is unknown")
    head = pair[0]
    head.text("systemctl", "stop", "docker.socket", "docker.service")
    try:
        stopped = run(context)
    finally:
        head.text("systemctl", "start", "docker.socket", "docker.service")
    refused(stopped, "spark-1:", "docker.sock")
    assert not stopped.changed()


def test_a_full_disk_is_said_with_numbers_before_anything_is_written(pair: list[Node], context: Path) -> None:
    worker = pair[1]
    name = f"lab/engine:{tag_of(context)}"
    worker.text("sh", "-c", f"docker save {name} > /root/kept.tar; docker rmi {name}")
    worker.text("sh", "-c", f"mkdir -p {DATA}/transfer && mount -t tmpfs -o size=1m none {DATA}/transfer")
    try:
        forget(worker)
        small = run(context)
    finally:
        worker.text("sh", "-c", f"umount {DATA}/transfer; rmdir {DATA}/transfer")
        worker.text("sh", "-c", "docker load -q -i /root/kept.tar; rm /root/kept.tar")
    refused(small, "spark-2:", f"of {DATA}/transfer", "MiB short", "Free that much")
    assert not small.changed()
    nothing_passing(pair)
    full = run(context, image_reserve_bytes=1 << 50, image_target="other")
    refused(full, "spark-1:", "building lab/engine:", "short")


def push(pair: list[Node], name: str, source: str) -> str:
    """Give an image of the head to the lab's registry; returns NAME@DIGEST."""
    head = pair[0]
    head.text("docker", "tag", source, f"{REGISTRY}/{name}")
    said = head.text("docker", "push", f"{REGISTRY}/{name}")
    head.text("docker", "rmi", f"{REGISTRY}/{name}")
    digest = re.findall(r"sha256:[0-9a-f]{64}", said)[-1]
    return f"{REGISTRY}/{name.partition(':')[0]}@{digest}"


def hub() -> Any:
    return engine().containers.get(lab().container("hub"))


@pytest.mark.field("B68")
def test_a_registry_serves_by_digest_and_wrong_bytes_are_refused(pair: list[Node], context: Path) -> None:
    reference = push(pair, "lab/by-digest:1", f"lab/engine:{tag_of(context)}")
    for node in pair:
        forget(node)
    variables: dict[str, Any] = {"image_source": "digest", "image_reference": reference}
    words = ["-e", json.dumps({"image_context": str(context), **variables})]
    proof = prove_check_mode(PLAYBOOK, str(lab().directory / "inventory"), words)
    assert not proof.problems, proof.report()
    assert proof.real is not None
    assert did(proof.real) == {(node.name, "Pull the image by its digest") for node in pair}
    layers = {str(inspect(node, reference)["RootFS"]["Layers"]) for node in pair}
    assert len(layers) == 1

    # A digest that the registry does not have.
    absent = run(context, **{**variables, "image_reference": reference[:-4] + "0000"})
    refused(absent, "cannot be pulled")
    assert not absent.changed()

    # An image of another architecture, by its own digest, does not stay.
    head = pair[0]
    head.text("sh", "-c", "tar c -C /etc hostname | docker import --platform linux/arm64 - lab/arm:1")
    arm = push(pair, "lab/arm:1", "lab/arm:1")
    head.text("docker", "rmi", "lab/arm:1")
    other = run(context, **{**variables, "image_reference": arm})
    refused(other, "arm64")
    assert not other.changed()
    for node in pair:
        assert node.run("docker", "image", "inspect", arm).status != 0

    # The registry gives other bytes than the digest names.
    for node in pair:
        forget(node)
    spoil = (
        "f=$(find /var/lib/docker-registry -path '*blobs*' -name data -size +20000k -newer /etc/hostname | "
        "xargs ls -t | head -n 1); printf X | dd of=$f conv=notrunc seek=1000 bs=1 2>/dev/null; echo $f"
    )
    code, said = hub().exec_run(["sh", "-c", spoil])
    assert (code, b"data" in said) == (0, True), said
    wrong = run(context, **variables)
    refused(wrong, "cannot be pulled", "gives other bytes than the digest names")
    assert not wrong.changed()
    for node in pair:
        assert node.run("docker", "image", "inspect", reference).status != 0


def test_a_builder_outside_the_replica_builds_for_it(pair: list[Node], context: Path) -> None:
    """spark-1 builds, the replica is spark-2 alone; the way is the address by which Ansible reaches spark-1."""
    for node in pair:
        forget(node)
    words = ["-l", "spark-2"]
    variables: dict[str, Any] = {"image_members": member(2), "image_builder": "spark-1"}
    check = run(context, "--check", *words, **variables)
    done = run(context, *words, **variables)
    assert done.rc == 0, done.output
    assert did(check) == did(done) == {("spark-2", BUILD), ("spark-2", BRING)}
    assert tags(pair[0]) == tags(pair[1]) != []
    again = run(context, *words, **variables)
    assert (again.rc, again.changed()) == (0, set())
    nothing_passing(pair)


def test_a_prebuilt_digest_takes_the_place_of_a_build_when_its_label_is_right(
    pair: list[Node], context: Path, tmp_path: Path
) -> None:
    head, worker = pair
    tag = tag_of(context)
    (context / "patches/0002-more.patch").write_text("more\n")
    prebuilt = push(pair, "lab/prebuilt:1", f"lab/engine:{tag}")
    other = run(context, image_prebuilt=prebuilt)
    refused(other, "it was built from another recipe")
    assert not other.changed()
    (context / "patches/0002-more.patch").unlink()
    for node in pair:
        forget(node)
    done = run(context, image_prebuilt=prebuilt)
    assert done.rc == 0, done.output
    assert did(done) == {("spark-1", FETCH), ("spark-2", BRING)}
    assert tags(head) == tags(worker) == [tag]
    again = run(context, image_prebuilt=prebuilt)
    assert (again.rc, again.changed()) == (0, set())


@pytest.mark.field("E30")
def test_who_serves_does_not_build_and_an_outage_is_said(
    pair: list[Node], context: Path, tmp_path: Path
) -> None:
    patch = tmp_path / "serving.patch"
    patch.write_text("serving\n")
    variables: dict[str, Any] = {"image_patches": [str(patch)]}
    for node in pair:
        image = f"lab/engine:{tags(node)[0]}"
        words = ["--network", "none", "--name", "serves", "--label", "sparkfleet.replica=pair-a"]
        node.text("docker", "run", "-d", *words, image, "sleep", "900")
    both = run(context, "--check", **variables)
    pair[1].text("docker", "rm", "-f", "serves")
    one = run(context, "--check", **variables)
    outage = run(context, "--check", **variables, image_builder="spark-1", image_allow_outage=True)
    pair[0].text("docker", "rm", "-f", "serves")
    refused(both, "spark-1:", "image_allow_outage", "Expected outage: pair-a", "about 6 minutes")
    assert one.rc == 0, one.output
    assert ("spark-2", BUILD) in did(one)
    assert outage.rc == 0, outage.output
    assert "Expected outage: pair-a" in text(outage)


def test_releases_keep_their_images_and_the_rest_goes_on_request(
    pair: list[Node], context: Path, tmp_path: Path
) -> None:
    head = pair[0]
    release = {"model_lock": "m", "rank_file": "r", "launch_hash": "l"}
    built: list[str] = []
    for number in range(4):
        small = tmp_path / f"{number}"
        small.mkdir()
        (small / "Dockerfile").write_text(f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}}\nENV N={number}\n")
        done = run(small, "-l", "spark-1", image_members=member(1), image_smoke=[])
        assert done.rc == 0, done.output
        built.append(tag_of(small))
    contents = [inspect(head, f"lab/engine:{tag}")["Config"]["Labels"]["sparkfleet.content"] for tag in built]
    marker = {
        "schema": 1,
        "replica": "pair-a",
        "current": {"image_content": contents[1], **release},
        "previous": {"image_content": contents[0], **release},
    }
    head.text("mkdir", "-p", f"{DATA}/releases")
    head.write(f"{DATA}/releases/pair-a.json", json.dumps(marker))
    head.text(
        "sh",
        "-c",
        f"printf 'FROM lab/engine:{built[2]}\\nENV MINE=1\\n' | docker build -q -t mine/own:1 - 2>&1",
    )
    kept = {*built[:2], built[3]}
    words = [
        "-e",
        json.dumps({"image_context": str(tmp_path / "3"), "image_members": member(1), "image_smoke": []}),
    ]
    named = run(tmp_path / "3", "-l", "spark-1", image_members=member(1), image_smoke=[])
    assert (named.rc, named.changed()) == (0, set())
    assert f"lab/engine:{built[2]}" in text(named)
    assert not [tag for tag in kept if f"lab/engine:{tag}" in text(named)]
    words += ["-e", json.dumps({"image_remove_old": True}), "-l", "spark-1"]
    proof = prove_check_mode(PLAYBOOK, str(lab().directory / "inventory"), words, nodes=["spark-1"])
    assert not proof.problems, proof.report()
    assert set(tags(head)) == kept
    assert tags(head, "mine/own") == ["1"], "what somebody built upon ours is not ours"
    head.write(f"{DATA}/releases/pair-a.json", "{")
    damaged = run(
        tmp_path / "3", "-l", "spark-1", image_members=member(1), image_smoke=[], image_remove_old=True
    )
    head.text("rm", "-r", f"{DATA}/releases")
    refused(damaged, "the release marker cannot be read")
    assert set(tags(head)) == kept
