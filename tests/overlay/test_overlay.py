"""The abliterated overlay by the whole job: predicted, served beside the first release, and back without a download.

Its kernel kit comes from a git repository, whose generated files are made here.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from lab import instance as lab_instance
from lab.config import HUB_NAME, NODES
from lab.config import instance as chosen
from tests.proof.prove import Proof, play, prove_check_mode
from tests.site.conftest import Lab

pytestmark = pytest.mark.lab

DATA = "/var/lib/sparkfleet"
OVERLAY = "lab/keys-DeepSeek-V4.1-Flash-1017-Abliterated"
KIT = f"git://{HUB_NAME}/kit"
TOKEN = "hf_TokenOfTheOverlay0123456789"
#: Trees of weights and rank files, each file with its sha256. Passing things and proofs are named with a dot.
SUMS = f"cd {DATA} && find models rank-files token-map -type f ! -path '*/.*' | sort | xargs sha256sum"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab that starts bare, with the first release serving and the overlay's repository gated."""
    found = Lab(chosen())
    lab_instance.up(found.instance)
    assert found.containers() == {}, "this test starts on a bare lab: make lab-down, then again"
    hub = found.instance.container("hub")
    control = json.dumps({"tokens": {TOKEN: [OVERLAY]}, "gated": [OVERLAY]})
    write = ["docker", "exec", "-i", hub, "sh", "-c", "cat > /srv/hub/.control.json"]
    subprocess.run(write, input=control, text=True, check=True)
    first = found.play("site.yml")
    assert first.returncode == 0, first.stdout[-3000:]
    yield found


def words(lab: Lab, token: str = "") -> list[str]:
    stamp = next(lab_instance.hub_content().glob(".generated-*.json"))
    revision = json.loads(stamp.read_text())[OVERLAY]["revision"]
    chosen_words: dict[str, Any] = {
        "sparkfleet_ablit": True,
        "sparkfleet_ablit_repo": OVERLAY,
        "sparkfleet_ablit_revision": revision,
        "sparkfleet_kit_repo": KIT,
        "sparkfleet_kit_revision": lab.on(NODES[0], "git", "ls-remote", KIT, "HEAD").split()[0],
        **({"sparkfleet_hub_token_file": token} if token else {}),
    }
    return ["-e", json.dumps(chosen_words)]


def data_of(lab: Lab, node: str) -> dict[str, str]:
    """Path to sha256, read by somebody else than the product."""
    return {
        line.split("  ", 1)[1]: line.split("  ", 1)[0] for line in lab.on(node, "sh", "-c", SUMS).splitlines()
    }


def marker(lab: Lab, node: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lab.on(node, "cat", f"{DATA}/releases/lab.json"))
    return found


def rank_files(found: dict[str, str]) -> dict[str, str]:
    return {path: digest for path, digest in found.items() if path.endswith(".bin")}


def given(lab: Lab) -> dict[str, int]:
    """Bytes of weights that the Hub has given so far, by path; headers are ranges of them."""
    with urllib.request.urlopen(f"http://{lab.instance.hub_address}:8080/_lab/stats", timeout=30) as answer:
        paths = json.load(answer)["paths"]
    return {path: row["bytes"] for path, row in paths.items() if path.endswith(".safetensors")}


@pytest.fixture(scope="module")
def first(lab: Lab) -> dict[str, Any]:
    """What the first release left: files, markers, an answer."""
    return {
        "files": {node: data_of(lab, node) for node in NODES},
        "markers": {node: marker(lab, node) for node in NODES},
        "answer": lab.ask(),
    }


@pytest.fixture(scope="module")
def proof(lab: Lab, first: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Proof:
    token = tmp_path_factory.mktemp("hub") / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    return prove_check_mode("site.yml", lab.inventory, words(lab, str(token)))


@pytest.mark.field("B66")
def test_without_the_token_it_is_refused_while_the_first_release_serves(
    lab: Lab, first: dict[str, Any]
) -> None:
    before = lab.containers()
    refused = play("site.yml", lab.inventory, extra=words(lab))
    assert refused.rc != 0
    text = " ".join(refused.output.split())
    assert OVERLAY in text and "token" in text, text[-2000:]
    assert refused.changed() == set()
    assert lab.containers() == before
    assert {node: data_of(lab, node) for node in NODES} == first["files"]


def test_the_switch_is_predicted_and_a_second_run_changes_nothing(proof: Proof) -> None:
    assert not proof.problems, proof.report()
    assert proof.again is not None and proof.real is not None
    assert proof.again.changed_count() == 0, proof.again.changed()
    assert TOKEN not in proof.real.output


def test_both_releases_lie_beside_each_other(lab: Lab, first: dict[str, Any], proof: Proof) -> None:
    for node in NODES:
        old, new = first["files"][node], data_of(lab, node)
        assert {path: new.get(path) for path in old} == old, "the first release was touched"
        (before,) = rank_files(old)
        (added,) = set(rank_files(new)) - {before}
        assert added.rpartition("/")[2] == before.rpartition("/")[2], "a name covers the layout"
        assert new[added] != new[before], "and not the weights"
        kept, now = first["markers"][node], marker(lab, node)
        assert now["previous"] == kept["current"]
        for key in ("launch_hash", "model_lock"):
            assert now["current"][key] != kept["current"][key]
        mounted = json.loads(lab.on(node, "docker", "inspect", "dsv41-1017-exl3-tf"))[0]["Mounts"]
        sources = {row["Source"] for row in mounted}
        assert f"{DATA}/{added.rpartition('/')[0]}" in sources
        assert f"{DATA}/{before.rpartition('/')[0]}" not in sources, "a launch mounts one"
        (kit,) = (row["Source"] for row in mounted if row["Destination"] == "/kit")
        assert kit.startswith(f"{DATA}/kit/{HUB_NAME}--kit/")
        hashed = "cd {} && find . -type f | sort | xargs sha256sum"
        whole = lab.on(node, "sh", "-c", hashed.format(f"{DATA}/kit/lab--kit/*"))
        assert lab.on(node, "sh", "-c", hashed.format(kit)) == whole, "a kit that was made is the whole kit"


def test_it_answers_with_other_weights_and_goes_back_without_a_download(
    lab: Lab, first: dict[str, Any], proof: Proof
) -> None:
    assert lab.ask() != first["answer"]
    both = {node: data_of(lab, node) for node in NODES}
    before = given(lab)
    assert before
    back = play("site.yml", lab.inventory)
    assert back.rc == 0, back.output[-3000:]
    assert given(lab) == before, "what is here came again"
    assert {node: data_of(lab, node) for node in NODES} == both
    assert lab.ask() == first["answer"]
    for node in NODES:
        now, old = marker(lab, node)["current"], first["markers"][node]["current"]
        assert {**now, "committed_at": ""} == {**old, "committed_at": ""}
    again = play("site.yml", lab.inventory)
    assert (again.rc, again.changed()) == (0, set()), again.output[-3000:]
