"""Image, checkpoint, Engram tables and rank files on two nodes: predicted, brought, repaired, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import instance
from lab.config import HUB_NAME
from lab.testing import Node, engine, lab, nodes
from tests.proof.prove import Run, play, prove_check_mode

pytestmark = pytest.mark.lab
PLAYBOOK = "tests/lab/weights.yml"
DATA = "/var/lib/sparkfleet"
MODEL = f"{DATA}/models/lab--DeepSeek-V4.1-Flash-1017-EXL3"


def inventory() -> str:
    return str(lab().directory / "inventory")


def pins() -> dict[str, str]:
    stamp = next(instance.hub_content().glob(".generated-*.json"))
    return {name: entry["revision"] for name, entry in json.loads(stamp.read_text()).items()}


def words(**variables: object) -> list[str]:
    return ["-e", json.dumps({"weights_pins": pins(), **variables})]


def run(*extra: str, **variables: object) -> Run:
    return play(PLAYBOOK, inventory(), extra=[*words(**variables), *extra])


def rails(pair: list[Node]) -> None:
    for number, node in enumerate(pair, 1):
        for rail, netdev in enumerate(("enp1s0f0np0", "enP2p1s0f0np0")):
            node.run("ip", "link", "set", netdev, "up", "mtu", "9000")
            node.run("ip", "address", "replace", f"10.77.0.{number + 4 * rail}/30", "dev", netdev)


def bare(pair: list[Node]) -> None:
    for node in pair:
        node.run(
            "sh",
            "-c",
            "docker ps -aq | xargs -r docker rm -f; docker images -q | sort -u | xargs -r docker rmi -f",
        )
        node.run(
            "sh", "-c", f"rm -rf {DATA}/models {DATA}/engram {DATA}/kit {DATA}/token-map {DATA}/rank-files"
        )
        node.run("sh", "-c", f"rm -rf {DATA}/transfer {DATA}/locks /run/sparkfleet")


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    """Both nodes with rails and nothing else; left bare as well."""
    both = list(nodes())
    rails(both)
    bare(both)
    yield both
    bare(both)


def layers(node: Node) -> list[str]:
    found = json.loads(
        node.text("docker", "image", "inspect", *node.text("docker", "images", "-q", "lab/engine").split())
    )
    return [layer for image in found for layer in image["RootFS"]["Layers"]]


@pytest.mark.field("B69", "B70")
def test_all_of_it_is_predicted_brought_and_then_nothing(pair: list[Node]) -> None:
    proof = prove_check_mode(PLAYBOOK, inventory(), words())
    assert not proof.problems, proof.report()
    head, worker = pair
    assert layers(head) == layers(worker), "two stores, one image"
    stores = {node.text("docker", "info", "--format", "{{.Driver}}") for node in pair}
    assert len(stores) == 2, "the lab lost the difference that this test stands for"
    for node in pair:
        assert node.run("sh", "-c", f"ls {DATA}/transfer /run/sparkfleet/*.conf").status != 0, (
            "nothing passing stays"
        )
        assert "sparkfleet-share" not in node.text(
            "systemctl", "list-units", "--all", "--plain", "--no-legend"
        )
        assert len(node.text("sh", "-c", f"find {DATA}/rank-files -name '*.bin'").split()) == 1
        assert node.text("sh", "-c", f"find {DATA} -name '*.partial'") == ""
    assert int(worker.text("sh", "-c", f"ls {MODEL}/*/*.safetensors | wc -l")) == 1, "the vision shard alone"
    assert proof.again is not None
    assert "remote tasks" in proof.again.output


@pytest.mark.field("B63", "B64")
def test_damage_on_either_node_is_found_and_repaired(pair: list[Node]) -> None:
    head, worker = pair
    shard = worker.text("sh", "-c", f"ls {MODEL}/*/*.safetensors")
    first = head.text("sh", "-c", f"ls {MODEL}/*/*.safetensors | head -n 1")
    good = head.text("sha256sum", first).split()[0]
    # On the worker behind an unchanged time, on the head in the open: one byte, and one shard cut short.
    worker.text(
        "sh",
        "-c",
        f"cp -p {shard} /run/keep; printf X | dd of={shard} conv=notrunc; touch -r /run/keep {shard}",
    )
    second = head.text("sh", "-c", f"ls {MODEL}/*/*.safetensors | sed -n 2p")
    good_second = head.text("sha256sum", second).split()[0]
    head.text("sh", "-c", f"printf X | dd of={first} conv=notrunc; truncate -s -5000 {second}")
    open_damage = run(weights_roles=["image", "checkpoint"])
    assert open_damage.rc == 0, open_damage.output
    assert head.text("sha256sum", first).split()[0] == good
    assert head.text("sha256sum", second).split()[0] == good_second
    assert {host for host, _task in open_damage.changed()} == {"spark-1"}
    hidden = run(weights_roles=["image", "checkpoint"], checkpoint_rehash=True)
    assert hidden.rc == 0, hidden.output
    assert {host for host, _task in hidden.changed()} == {"spark-2"}
    assert worker.text("sha256sum", shard).split()[0] == head.text("sha256sum", shard).split()[0]


def test_a_damaged_rank_file_is_made_by_our_writer_with_the_engines_bytes(pair: list[Node]) -> None:
    worker = pair[1]
    path = worker.text("sh", "-c", f"find {DATA}/rank-files -name '*.bin'")
    good = worker.text("sha256sum", path).split()[0]
    worker.text(
        "sh", "-c", f"cp -p {path} /run/keep; printf X | dd of={path} conv=notrunc; touch -r /run/keep {path}"
    )
    done = run(rank_files_rehash=True, rank_files_writer="ours")
    assert done.rc == 0, done.output
    assert {host for host, _task in done.changed()} == {"spark-1", "spark-2"}
    assert worker.text("sha256sum", path).split()[0] == good
    assert worker.run("test", "-e", f"{DATA}/transfer").status != 0


def data_of(node: Node) -> dict[str, str]:
    """sha256 of every model file and rank file by path."""
    text = node.text(
        "sh", "-c", f"cd {DATA} && find models rank-files -type f ! -name '.*' | sort | xargs sha256sum"
    )
    return {line.split("  ", 1)[1]: line.split("  ", 1)[0] for line in text.splitlines()}


def test_what_a_kit_from_git_lacks_is_made_by_its_own_scripts(pair: list[Node]) -> None:
    """On rank 0, in the engine image; both nodes then have every file of a whole kit, bit for bit."""
    url = f"git://{HUB_NAME}/kit"
    commit = pair[0].text("git", "ls-remote", url, "HEAD").split()[0]
    given = words(
        weights_roles=["image", "checkpoint", "rank_files"],
        rank_files_kit_repo=url,
        rank_files_kit_revision=commit,
        rank_files_original_repo="lab/DeepSeek-V4.1-Flash-1017",
        rank_files_original_revision=pins()["lab/DeepSeek-V4.1-Flash-1017"],
    )
    proof = prove_check_mode(PLAYBOOK, inventory(), given)
    assert not proof.problems, proof.report()
    hashed = "cd {} && find . -type f | sort | xargs sha256sum"
    whole = pair[0].text("sh", "-c", hashed.format(f"{DATA}/kit/lab--kit/*"))
    trees = f"{DATA}/kit/{HUB_NAME}--kit/{commit}"
    view = f"{trees}-{pins()['lab/DeepSeek-V4.1-Flash-1017']}"
    for node in pair:
        assert node.text("sh", "-c", hashed.format(view)) == whole
    assert pair[1].run("test", "-e", trees).status != 0, "a member that only reads has one tree"
    table = "rope-plain-cos.f32"
    pair[0].text("sh", "-c", f"printf X | dd of={view}/{table} conv=notrunc")
    repaired = play(PLAYBOOK, inventory(), extra=given)
    assert repaired.rc == 0, repaired.output
    assert {host for host, _task in repaired.changed()} == {"spark-1"}
    assert pair[0].text("sh", "-c", hashed.format(view)) == whole


def test_two_releases_lie_side_by_side_and_a_switch_mixes_nothing(pair: list[Node]) -> None:
    before = [data_of(node) for node in pair]
    overlaid = run(weights_overlaid=True)
    assert overlaid.rc == 0, overlaid.output
    both = [data_of(node) for node in pair]
    for old, new in zip(before, both, strict=True):
        assert {path: new.get(path) for path in old} == old, "the first release was touched"
        added = {path for path in new if path not in old}
        assert len([path for path in added if path.endswith(".bin")]) == 1
        name = next(path for path in old if path.endswith(".bin")).rpartition("/")[2]
        other = next(path for path in added if path.endswith(name))
        assert new[other] != old[next(path for path in old if path.endswith(name))], "one name, other weights"
    for words in ({"weights_overlaid": True}, {}):
        again = run(**words)
        assert (again.rc, again.changed()) == (0, set()), again.output
    assert [data_of(node) for node in pair] == both


def test_what_no_release_uses_is_listed_and_goes_on_request(pair: list[Node]) -> None:
    """After the test above: the inventory names the first release, nobody the overlaid one."""
    both = [data_of(node) for node in pair]
    names = {
        "sparkfleet_model_revision": pins()["lab/DeepSeek-V4.1-Flash-1017-EXL3"],
        "sparkfleet_engram_revision": pins()["lab/DeepSeek-V4.1-Flash-1017"],
        "sparkfleet_kit_revision": pins()["lab/kit"],
    }
    revision = pins()["lab/keys-DeepSeek-V4.1-Flash-1017-Abliterated"]
    listed = play("playbooks/prune.yml", inventory(), extra=["-e", json.dumps(names)])
    assert (listed.rc, listed.changed()) == (0, set()), listed.output
    assert f"{DATA}/models/lab--keys-DeepSeek-V4.1-Flash-1017-Abliterated/{revision}" in listed.output
    assert [data_of(node) for node in pair] == both
    words = ["-e", json.dumps({**names, "prune_remove": True})]
    predicted = play("playbooks/prune.yml", inventory(), extra=[*words, "--check"])
    removed = play("playbooks/prune.yml", inventory(), extra=words)
    assert removed.rc == 0, removed.output
    assert {host for host, _task in removed.changed()} == {"spark-1", "spark-2"}
    assert predicted.changed() == removed.changed()
    for node, old in zip(pair, both, strict=True):
        assert data_of(node) == {path: digest for path, digest in old.items() if revision not in path}
    assert run().changed() == set(), "what stayed is whole"


LARGE, LARGE_REVISION, LARGE_FILES, LARGE_EACH = "lab/large", "1" * 40, 12, 20 << 20


@pytest.fixture
def large() -> Iterator[list[dict[str, object]]]:
    """A repository of a few hundred MB at the Hub, which gives each file slowly; its manifest."""
    hub = engine().containers.get(lab().container("hub"))

    def in_hub(text: str) -> str:
        done = hub.exec_run(["sh", "-c", text])
        assert done.exit_code == 0, done.output
        return str(done.output.decode())

    folder = f"/srv/hub/{LARGE}/{LARGE_REVISION}"
    in_hub(
        f"mkdir -p {folder} /srv/hub/{LARGE}/refs && cd {folder} && echo {LARGE_REVISION} > ../refs/main && "
        f"for n in $(seq 10 {9 + LARGE_FILES}); do head -c {LARGE_EACH} /dev/urandom > $n.safetensors; done; "
        """echo '{"rate": 10000000}' > /srv/hub/.control.json"""
    )
    sums = [line.split() for line in in_hub(f"cd {folder} && sha256sum *").splitlines()]
    yield [{"name": name, "size": LARGE_EACH, "sha256": digest} for digest, name in sums]
    in_hub(f"rm -rf /srv/hub/{LARGE} /srv/hub/.control.json")


@pytest.mark.field("B63")
def test_a_download_killed_at_10_50_and_90_percent_goes_on_each_time(
    pair: list[Node], large: list[dict[str, object]]
) -> None:
    head = pair[0]
    root = f"{DATA}/lab-fetch"
    tag = head.text("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", "lab/engine").split()[0]
    given = {"fetch_files": large, "fetch_revision": LARGE_REVISION, "fetch_image": tag}
    total = LARGE_FILES * LARGE_EACH
    sizes = f"$(find {root} -type f -printf '%s\\n' 2>/dev/null | awk '{{s+=$1}} END {{print s+0}}')"
    try:
        for share in (10, 50, 90):
            kill = "docker kill $(docker ps -q --filter name=sparkfleet-fetch-) >/dev/null 2>&1"
            watch = (
                f"for n in $(seq 3000); do if [ {sizes} -ge {total * share // 100} ]; then {kill} && exit 0; fi; "
                "sleep 0.02; done"
            )
            head.container.exec_run(["sh", "-c", watch], detach=True)
            killed = play("tests/lab/fetch.yml", inventory(), extra=["-e", json.dumps(given)])
            assert killed.rc != 0, f"{share} %: {killed.output}"
            assert head.run("test", "-e", f"{root}/tree").status != 0, "nothing carries its name"
            # Files that are whole are kept; of those on their way the client keeps nothing that it could go on with.
            whole = int(head.text("sh", "-c", f"ls {root}/.tree.partial/*.safetensors | wc -l").split()[-1])
            assert (whole + 2) * LARGE_EACH >= total * share // 100
        done = play("tests/lab/fetch.yml", inventory(), extra=["-e", json.dumps(given)])
        assert done.rc == 0, done.output
        sums = [line.split() for line in head.text("sh", "-c", f"cd {root}/tree && sha256sum *").splitlines()]
        assert [[one["sha256"], one["name"]] for one in large] == sums
        assert head.run("test", "-e", f"{root}/.tree.partial").status != 0
        again = play("tests/lab/fetch.yml", inventory(), extra=["-e", json.dumps(given)])
        assert (again.rc, again.changed()) == (0, set())
    finally:
        head.text("rm", "-rf", root)


def test_a_revision_that_is_not_there_and_a_foreign_shard_are_refused(pair: list[Node]) -> None:
    head, worker = pair
    before = [data_of(node) for node in pair]
    wrong = run(weights_roles=["image", "checkpoint"], weights_revision="f" * 40)
    assert wrong.rc != 0
    assert "f" * 40 in wrong.output and "404" in wrong.output
    folder = worker.text("sh", "-c", f"dirname $(ls {MODEL}/*/config.json)")
    for node in (head, worker):
        node.text("sh", "-c", f"echo mine > {folder}/zzz.safetensors")
        try:
            refused = run("--check", weights_roles=["image", "checkpoint"])
            assert node.read(f"{folder}/zzz.safetensors") == "mine"
        finally:
            node.text("rm", f"{folder}/zzz.safetensors")
        assert refused.rc != 0
        assert "zzz.safetensors" in refused.output and node.name in refused.output
    assert [data_of(node) for node in pair] == before


@pytest.mark.field("B60")
def test_tables_on_a_file_system_of_memory_are_refused(pair: list[Node]) -> None:
    worker = pair[1]
    worker.text("sh", "-c", f"mount -t tmpfs none {DATA}/engram")
    try:
        done = run("--check", weights_roles=["image", "engram"])
    finally:
        worker.text("umount", f"{DATA}/engram")
    assert done.rc != 0
    assert "lies on tmpfs" in " ".join(done.output.split())


@pytest.mark.field("B67")
def test_a_disk_that_is_too_small_is_said_with_numbers_and_nothing_is_left(pair: list[Node]) -> None:
    worker = pair[1]
    worker.text(
        "sh", "-c", f"mv {MODEL} {MODEL}.kept; mkdir -p {MODEL}; mount -t tmpfs -o size=1m none {MODEL}"
    )
    try:
        done = run(weights_roles=["image", "checkpoint"], checkpoint_reserve_bytes=0)
        left = worker.text("sh", "-c", f"find {MODEL} -type f")
    finally:
        worker.text("sh", "-c", f"umount {MODEL}; rmdir {MODEL}; mv {MODEL}.kept {MODEL}")
    assert done.rc != 0
    assert "short" in done.output
    assert "spark-2" in done.output
    assert left == ""


def test_a_changed_patch_builds_once_and_the_old_image_stays(pair: list[Node], tmp_path: Path) -> None:
    patch = tmp_path / "0005-x.patch"
    patch.write_text("--- a/x\n+++ b/x\n")
    done = run(weights_roles=["image"], weights_patches=[str(patch)])
    assert done.rc == 0, done.output
    assert done.output.count("Build the image where nobody has it") == 1
    assert {host for host, _task in done.changed()} == {"spark-1", "spark-2"}
    for node in pair:
        assert len(node.text("docker", "images", "--format", "{{.Tag}}", "lab/engine").split()) == 2
    again = run(weights_roles=["image"], weights_patches=[str(patch)])
    assert (again.rc, again.changed()) == (0, set())


def test_a_moved_tag_is_refused(pair: list[Node]) -> None:
    head = pair[0]
    tag = head.text("docker", "images", "--format", "{{.Tag}}", "lab/engine").split()
    kept = {
        name: head.text("docker", "image", "inspect", "-f", "{{.Id}}", f"lab/engine:{name}") for name in tag
    }
    one, two = tag
    head.text("docker", "tag", kept[one], f"lab/engine:{two}")
    head.text("docker", "tag", kept[two], f"lab/engine:{one}")
    try:
        done = run(weights_roles=["image"])
    finally:
        for name, image in kept.items():
            head.text("docker", "tag", image, f"lab/engine:{name}")
    assert done.rc != 0
    assert "the tag was moved" in " ".join(done.output.split())


@pytest.mark.field("B72")
def test_a_docker_that_does_not_answer_is_unknown_and_never_empty(pair: list[Node]) -> None:
    head = pair[0]
    head.text("systemctl", "stop", "docker.socket", "docker.service")
    try:
        done = run(weights_roles=["image"])
    finally:
        head.text("systemctl", "start", "docker.socket", "docker.service")
    assert done.rc != 0
    assert "spark-1" in done.output
    assert not done.changed()


@pytest.mark.field("E30")
def test_a_member_that_serves_does_not_build(pair: list[Node], tmp_path: Path) -> None:
    patch = tmp_path / "0006-y.patch"
    patch.write_text("--- a/y\n+++ b/y\n")
    image = pair[0].text("docker", "images", "-q", "lab/engine").split()[0]
    for node in pair:
        image = node.text("docker", "images", "-q", "lab/engine").split()[0]
        node.text(
            "docker",
            "run",
            "-d",
            "--network",
            "none",
            "--name",
            "serves",
            "--label",
            "sparkfleet.replica=x",
            image,
            "sleep",
            "600",
        )
    both = run("--check", weights_roles=["image"], weights_patches=[str(patch)])
    pair[1].text("docker", "rm", "-f", "serves")
    one = run("--check", weights_roles=["image"], weights_patches=[str(patch)])
    outage = run(
        "--check",
        weights_roles=["image"],
        weights_patches=[str(patch)],
        image_builder="spark-1",
        image_allow_outage=True,
    )
    pair[0].text("docker", "rm", "-f", "serves")
    assert both.rc != 0
    assert "image_allow_outage" in both.output
    assert one.rc == 0, one.output
    assert ("spark-2", "image : Build the image where nobody has it") in {
        (host, task.rpartition("sparkfleet.serving.")[2]) for host, task in one.changed()
    }
    assert outage.rc == 0, outage.output


def test_a_share_ends_by_itself_when_nobody_ends_it(pair: list[Node]) -> None:
    head, worker = pair
    done = play("tests/lab/share.yml", inventory(), extra=["-l", "spark-1"])
    assert done.rc == 0, done.output
    assert worker.run("rsync", "rsync://10.77.0.1:29999/tree/").status == 0
    # 5: the daemon refuses the client (rsync(1), EXIT VALUES). Not even the node itself may read.
    assert head.run("rsync", "rsync://10.77.0.1:29999/tree/").status == 5
    config = "/run/sparkfleet/sparkfleet-share-lonely-0.conf"
    head.text("sh", "-c", f"for n in $(seq 60); do test -e {config} || exit 0; sleep 0.5; done; exit 1")
    assert head.run("systemctl", "is-active", "-q", "sparkfleet-share-lonely-0").status != 0


def test_nfs_is_refused_where_the_kernel_has_none(pair: list[Node]) -> None:
    done = play("tests/lab/nfs.yml", inventory())
    assert done.rc != 0
    text = " ".join(done.output.split())
    assert "this kernel has no NFS server" in text or "lies on" in text
