"""From the seed recipe to our variables: the table for people, the importer and the checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.plugin_utils import seed_recipe as S

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "from-start-sh.md").read_text()
PROFILE = yaml.safe_load((ROOT / "roles/ranks/vars/engines/tensorfold_native.yml").read_text())


def table() -> dict[str, tuple[str, str]]:
    part = PAGE.partition("## Every name")[2]
    return {
        name: (here, note)
        for name, here, note in re.findall(r"^\| `(\w+)` \| (.+?) \| (.*?) ?\|$", part, re.M)
    }


def test_the_page_is_the_importers_table() -> None:
    shown = table()
    assert list(shown) == [row.name for row in S.SETTINGS]
    for row in S.SETTINGS:
        here, note = shown[row.name]
        assert note == row.note
        wanted = {
            "setting": f"`ranks_settings.{row.target}`",
            "variable": f"`{row.target}`",
            "inventory": f"`{row.target}`",
            "always": "always",
            "refused": "refused",
        }[row.kind]
        assert here == wanted


def test_every_target_exists() -> None:
    variables: set[str] = set()
    for spec in (ROOT / "roles").glob("*/meta/argument_specs.yml"):
        variables |= set(yaml.safe_load(spec.read_text())["argument_specs"]["main"]["options"])
    named = "\n".join(
        path.read_text() for folder in ("inventory", "playbooks") for path in (ROOT / folder).rglob("*.yml")
    )
    for row in S.SETTINGS:
        if row.kind == "setting":
            assert row.target in PROFILE["settings"], row.name
        elif row.kind == "variable":
            known = row.target in variables or re.search(rf"\b{row.target}\b", named)
            assert known, f"{row.name}: nothing takes {row.target}"
        assert row.note or row.kind in ("setting", "variable"), f"{row.name} gives no reason"


def test_every_setting_of_the_profile_can_be_brought() -> None:
    reachable = {row.target for row in S.SETTINGS if row.kind == "setting"}
    by_variable = {"context", "parallel", "drafts", "served_name"}
    ours = {"rdma_ring", "gid_mode", "ring_gid_fixed"}  # decided by the recipe's script there
    assert set(PROFILE["settings"]) - reachable - by_variable == ours


def test_every_environment_variable_of_the_engine_is_in_the_table() -> None:
    spelled = {
        spelling["env"]
        for setting in PROFILE["settings"].values()
        for who in ("all", "head", "workers")
        for spelling in setting.get(who, [])
        if "env" in spelling
    }
    spelled |= {entry["name"] for entries in PROFILE["env"].values() for entry in entries}
    unlisted = spelled - {row.name for row in S.SETTINGS}
    assert unlisted == {"HF_HUB_OFFLINE", "CUDA_CACHE_PATH", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"}


def test_only_literal_lines_are_read() -> None:
    found = S.read_assignments(
        "# comment\n"
        "A=1\n"
        'export B="two words"  # why\n'
        "C='$HOME stays'\n"
        'D="${D:-4}"\n'
        "E=\n"
        'BAD1="$HOME"\n'
        "BAD2=$(touch /tmp/never)\n"
        "BAD3=`id`\n"
        'BAD4="${OTHER:-4}"\n'
        "rm -rf /\n"
        "F=a;rm\n"
    )
    assert found.values == {"A": "1", "B": "two words", "C": "$HOME stays", "D": "4", "E": ""}
    assert [line.split(":")[1] for line in found.refused] == ["7", "8", "9", "10", "11", "12"]


def test_values_are_translated() -> None:
    result = S.translate(
        {
            "CONTEXT": "524288",
            "DRAFTS": "0",
            "MIN_AVAIL_GIB": "109",
            "IMAGE_FREE_GB": "35",
            "TF_DS_IDX_SPLIT": "1",
            "PORT": "8889",
            "TEMPERATURE": "0.7",
            "PARALLEL": "",
            "HF_TOKEN": "hf_canary",
            "WORKER": "user@host",
            "WHAT": "1",
            "ABLIT": "1",
        }
    )
    assert result.variables == {
        "sparkfleet_ablit": True,
        "sparkfleet_context": 524288,
        "sparkfleet_drafts": False,
        "ranks_min_available_gib": 109,
        "image_reserve_bytes": 35_000_000_000,
        "ranks_settings": {"idx_split": True, "port": 8889, "temperature": 0.7},
    }
    assert result.unknown == ["WHAT"] and result.problems == []
    assert "canary" not in repr(result)


@pytest.mark.parametrize(
    "pair", [("ABLIT", "2"), ("CONTEXT", "0"), ("DRAFTS", "yes"), ("TF_CUDA_SEGMENTS", "2"), ("PORT", "x")]
)
def test_what_cannot_be_brought_is_refused(pair: tuple[str, str]) -> None:
    assert S.translate(dict([pair])).problems


@pytest.fixture
def checkout(tmp_path: Path) -> tuple[Path, str]:
    root = tmp_path / "recipe"
    (root / "scripts").mkdir(parents=True)
    (root / "zig/patches").mkdir(parents=True)
    (root / "scripts/config.sh").write_text(
        f'MODEL_ID="a/b"\nMODEL_REVISION="{"1" * 40}"\nTF_REF=main\nCONTEXT=1048576\nX=$(y)\n'
    )
    for name in ("0006-b.patch", "0005-a.patch"):
        (root / "zig/patches" / name).write_text("diff\n")
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return root, head


def test_pins_and_patches_come_from_the_checkout(checkout: tuple[Path, str]) -> None:
    root, head = checkout
    found = S.read_checkout(str(root), head)
    assert found["pins"] == {"sparkfleet_model_repo": "a/b", "sparkfleet_model_revision": "1" * 40}
    assert [Path(path).name for path in found["patches"]] == ["0005-a.patch", "0006-b.patch"]
    assert found["other"] == {"CONTEXT": "1048576"}


def test_any_other_checkout_is_refused_by_name(checkout: tuple[Path, str], tmp_path: Path) -> None:
    root, head = checkout
    with pytest.raises(S.CheckoutError, match="40 hex"):
        S.read_checkout(str(root), "main")
    with pytest.raises(S.CheckoutError, match="wanted 0000"):
        S.read_checkout(str(root), "0" * 40)
    with pytest.raises(S.CheckoutError, match="no git checkout"):
        S.read_checkout(str(tmp_path), head)
    (root / "scripts/config.sh").write_text("changed\n")
    with pytest.raises(S.CheckoutError, match="local changes"):
        S.read_checkout(str(root), head)
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "commit", "-qam", "y"], check=True)
    other = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    with pytest.raises(S.CheckoutError, match="assigns none of"):
        S.read_checkout(str(root), other)
    subprocess.run([*git, "rm", "-rq", "zig"], check=True)
    subprocess.run([*git, "commit", "-qm", "z"], check=True)
    last = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    with pytest.raises(S.CheckoutError, match="unknown layout: zig/patches"):
        S.read_checkout(str(root), last)
