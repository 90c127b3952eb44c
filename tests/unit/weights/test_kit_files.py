"""What a kit from git lacks, made by the scripts that it carries, out of a local Hub."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.module_utils import kit, kit_files, tree
from ansible_collections.sparkfleet.serving.plugins.module_utils.model_lock import HubClient
from ansible_collections.sparkfleet.serving.plugins.module_utils.tree import TreeError

from .conftest import ROOT, Hub, run_module

ORIGINAL = "lab/DeepSeek-V4.1-Flash-1017"
Make = Callable[..., dict[str, Any]]


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Containers become processes: the paths of the binds take the place of the paths inside."""
    module = importlib.import_module("ansible_collections.sparkfleet.serving.plugins.modules.kit_files")
    seen: list[list[str]] = []

    def run(
        _self: Any,
        _purpose: str,
        argv: list[str],
        binds: list[str],
        hear: Any = None,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int, str, str]:
        assert hear is None
        paths = {bind.split(":")[1]: bind.split(":")[0] for bind in binds}

        def outside(word: str) -> str:
            inside = next((path for path in paths if word == path or word.startswith(f"{path}/")), "")
            return paths[inside] + word[len(inside) :] if inside else word

        seen.append(argv)
        known = {key: outside(value) for key, value in (environment or {}).items()}
        done = subprocess.run(
            [sys.executable, *(outside(word) for word in argv[1:])],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"], **known},
        )
        return done.returncode, done.stdout, done.stderr

    monkeypatch.setattr(module.EngineTools, "run", run)
    monkeypatch.setattr(module.EngineTools, "has_image", lambda _self: True)
    return seen


@pytest.fixture
def revision(repos: dict[str, Path], hub: Hub) -> str:
    """The original release on the Hub; its revision."""
    source = repos[ORIGINAL]
    shutil.copytree(source.parent, hub.root / ORIGINAL)
    return source.name


@pytest.fixture
def here(repos: dict[str, Path], tmp_path: Path) -> Path:
    """A kit from git on this node."""
    return Path(shutil.copytree(repos["lab/kit-from-git"] / "kit", tmp_path / "data/kit/lab--kit/aaaa"))


@pytest.fixture
def make(repos: dict[str, Path], here: Path, hub: Hub, revision: str) -> Make:
    def call(check: bool = False, **args: Any) -> dict[str, Any]:
        given = {
            "kit": str(here),
            "dest": f"{here}-made",
            "names": list(kit.GENERATED),
            "model_dir": str(repos["lab/DeepSeek-V4.1-Flash-1017-EXL3"]),
            "original_endpoint": hub.endpoint,
            "original_repo": ORIGINAL,
            "original_revision": revision,
            "data_dir": str(here.parents[2]),
            "reserve_bytes": 0,
            "image": "lab",
            **args,
        }
        return run_module("kit_files", given, check)

    return call


def test_they_are_predicted_made_and_then_nothing(
    make: Make, here: Path, repos: dict[str, Path], hub: Hub, calls: list[list[str]]
) -> None:
    predicted = make(check=True)
    assert (predicted["changed"], predicted["complete"], calls) == (True, False, [])
    assert [one["name"] for one in predicted["files"]] == sorted(kit.GENERATED)
    made = make()
    assert made["changed"] and made["complete"], made
    whole = hashes(repos["lab/kit"] / "kit")
    folder = Path(made["path"])
    assert hashes(folder) == {name: whole[name] for name in kit.GENERATED}, "the very files of a whole kit"
    assert {one["name"]: one["sha256"] for one in made["files"]} == hashes(folder)
    assert [entry["before_header"] for entry in predicted["diff"]] == [
        entry["before_header"] for entry in made["diff"]
    ]
    stats, count = hub.stats(), len(calls)
    again = make()
    assert (again["changed"], again["complete"], len(calls), hub.stats()) == (False, True, count, stats)
    assert not list(here.parent.glob(".*.partial"))


def test_only_the_small_tensors_of_the_original_are_read(hub: Hub, revision: str, tmp_path: Path) -> None:
    client = HubClient(hub.endpoint, ORIGINAL, revision)
    placed = json.loads((hub.root / ORIGINAL / revision / kit_files.INDEX).read_text())["weight_map"]
    biases = [name for name in placed if name.endswith(kit_files.BIAS_SUFFIX)]
    assert kit_files.small_original(client, tmp_path / "small") == len(biases) > 1
    total = sum(path.stat().st_size for path in (hub.root / ORIGINAL / revision).iterdir())
    assert client.received < total / 10
    assert not [path for path in (tmp_path / "small").iterdir() if path.stat().st_size > 1_000_000]


def test_a_view_of_both_is_a_whole_kit(make: Make, here: Path, calls: list[list[str]]) -> None:
    files = [
        {"name": name, "size": (here / name).stat().st_size, "sha256": sha}
        for name, sha in hashes(here).items()
    ]
    specs = tree.parse_files(files)
    proof = tree.Proof(listing=specs)
    tree.prove(here, tree.inspect(here, specs, proof), proof)
    tree.write_proof(tree.proof_path(here), proof)
    made = make()
    layers = {"kit": {"path": str(here), "files": files}, "made": made}
    view = run_module(
        "tree_view", {"dest": f"{here}-whole", "layers": layers, "data_dir": str(here.parents[2])}
    )
    assert view["complete"], view
    root = Path(view["path"])
    assert kit.check(root, tree.read_proof(tree.proof_path(root)), 4096) >= 4096


@pytest.fixture
def closed_umask() -> Iterator[None]:
    """What a hardened node gives to root."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_a_share_can_walk_what_was_made_under_a_closed_umask(
    make: Make, calls: list[list[str]], closed_umask: None
) -> None:
    root = Path(make()["path"])
    assert {path.stat().st_mode & 0o777 for path in (root, root / "vision")} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()} == {0o644}


def test_the_bias_of_another_release_is_refused_with_its_digest_and_taken_by_it(
    make: Make, here: Path, calls: list[list[str]]
) -> None:
    manifest = here / "MANIFEST"
    lines = [line for line in manifest.read_text().splitlines() if not line.endswith(kit.BIAS)]
    manifest.write_text("\n".join([*lines, f"{'0' * 64}  {kit.BIAS}"]) + "\n")
    refused = make()
    assert refused["failed"] and not Path(f"{here}-made").exists()
    assert f"The routing bias comes from {ORIGINAL} at" in refused["msg"]
    assert f"{kit.BIAS} has sha256" in refused["msg"] and f"instead of {'0' * 12}" in refused["msg"]
    digest = refused["msg"].rpartition("rank_files_bias_sha256: ")[2].strip()
    assert make(digests={kit.BIAS: digest})["changed"]
    assert make()["failed"], "what was taken by a word does not pass without it"


def test_rope_tables_of_another_model_are_refused(
    make: Make, tmp_path: Path, repos: dict[str, Path], calls: list[list[str]]
) -> None:
    config = json.loads((repos["lab/DeepSeek-V4.1-Flash-1017-EXL3"] / "config.json").read_text())
    config["text_config"]["rope_theta"] *= 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    refused = make(model_dir=str(tmp_path / "other"))
    assert "the tables are not those of the kit" in refused["msg"]
    assert "the config of another model" in refused["msg"]


def test_a_script_that_needs_the_engines_python_says_so_and_gets_it(
    make: Make, here: Path, tmp_path: Path, calls: list[list[str]]
) -> None:
    script = here / kit_files.ROPE_SCRIPT
    script.write_text("import tensorfold.families\n" + script.read_text().replace("from __future__", "# "))
    refused = make()
    assert "No module named 'tensorfold'" in refused["msg"]
    assert "name its folder src in rank_files_rope_source" in refused["msg"]
    family = tmp_path / "src/tensorfold/families"
    family.mkdir(parents=True)
    (family / "__init__.py").touch()
    made = make(rope_source=str(tmp_path / "src"))
    assert made.get("complete"), made


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"original_repo": ""}, "name it in rank_files_original_repo"),
        ({"original_revision": "main"}, "is not a commit id of 40 hex digits"),
        ({"original_repo": "lab/nothing"}, "wants a valid token"),
    ],
)
def test_an_original_that_does_not_answer_is_refused(
    make: Make, here: Path, settings: dict[str, str], sentence: str, calls: list[list[str]]
) -> None:
    refused = make(names=[kit.BIAS], **settings)
    assert sentence in refused["msg"]
    assert not Path(f"{here}-made").exists()
    assert not list(here.parent.glob(".*.partial"))


def test_a_damaged_table_is_made_again_and_a_strangers_file_stops_it(
    make: Make, here: Path, calls: list[list[str]]
) -> None:
    make()
    path = Path(f"{here}-made") / kit.ROPE_TABLES[0]
    path.write_bytes(b"X" + path.read_bytes()[1:])
    stranger = path.parent / "notes.txt"
    stranger.write_text("mine")
    refused = make()
    assert "notes.txt, which nothing of ours made" in refused["msg"]
    stranger.unlink()
    assert make()["changed"]
    assert not make()["changed"]


def test_the_role_makes_what_the_check_wants() -> None:
    values = yaml.safe_load((ROOT / "roles/rank_files/vars/main.yml").read_text())
    assert values["__rank_files_kit_generated"] == sorted(kit.GENERATED)


def test_both_forms_of_a_manifest_are_read() -> None:
    two = f"{'a' * 64}  aot/aot.json\n"
    four = (
        f"# Columns: sha256, bytes, origin, two-node, path\n{'a' * 64}      492770  git   -    aot/aot.json\n"
    )
    assert kit.parse_manifest(two) == kit.parse_manifest(four) == {"aot/aot.json": "a" * 64}


def test_rows_of_tables_that_will_be_made_come_from_their_document() -> None:
    document = json.dumps({"rows": 1114112, "half": 32}).encode()
    sizes = {"kit/rope.json": len(document), "kit/MANIFEST": 1}
    assert kit.rows_by_sizes(sizes, lambda _name: document, "kit") == 1114112
    with pytest.raises(TreeError, match="is absent"):
        kit.rows_by_sizes({**sizes, f"kit/{kit.ROPE_TABLES[0]}": 128}, lambda _name: document, "kit")
    with pytest.raises(TreeError, match="does not say how many rows"):
        kit.rows_by_sizes(sizes, lambda _name: b"{}", "kit")


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": {"layers.0.w": "a"}}'])
def test_an_index_without_biases_is_refused(index: bytes) -> None:
    with pytest.raises(TreeError, match="original release"):
        kit_files.wanted_tensors(index)


def test_what_the_real_scripts_say_is_explained() -> None:
    torch = "Traceback\nModuleNotFoundError: No module named 'torch'\n"
    assert "no PyTorch" in kit_files.why_rope_failed(torch, 1)
    differs = "rope-plain-cos.f32: 142606336 bytes, SHA256 DIFFERS from rope.json"
    assert "another PyTorch" in kit_files.why_rope_failed(differs, 1)
    assert kit_files.why_rope_failed("", 137) == "it ended with 137: "
