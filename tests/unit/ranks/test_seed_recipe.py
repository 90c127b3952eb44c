"""From the seed recipe to our variables: the table for people, the importer and the checkout."""

from __future__ import annotations

import re
import subprocess
import sys
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


# Names of the seed documents, of the seed author's launchers (config.sh, prepare.sh, start.sh; MIN_FREE_GB and
# the like are of sibling recipes) and of the engine's source, as they are documented.
DOCUMENTED = re.findall(
    r"\w+",
    """
WORKER FABRIC_PEER WORKER_HF_CACHE MODEL_ID MODEL_REVISION ABLIT ABLIT_REVISION HF_TOKEN CONTEXT PARALLEL DRAFTS
MIN_AVAIL_GIB MEMGUARD_GIB PREFILL_INTERLEAVE_MS PREPARE HF_CACHE NFS_VOLUME HEAD_NFS_SERVER NFS_PATH LOG_KEEP LOG_DIR
PORT HOST SERVED_NAME MASTER_PORT MAX_TOKENS THINKING CONTAINER_NAME IMAGE BASE_IMAGE TF_REPO TF_VERSION TF_REF
MIN_FREE_GB IMAGE_FREE_GB WAIT_TIMEOUT STOP_TIMEOUT NCCL_RAILS NCCL_CHANNELS NCCL_DEBUG STATE_DIR KERNEL_CACHE DRY_RUN
FOREGROUND PULL MEM_NEED_GIB MEM_CHECK MEM_FLOOR_GIB IMAGE_TAG IMAGE_DIGEST GHCR_IMAGE
TF_TP_WORLD TF_TP_MASTER TF_TP_PORT TF_DS_RANK_CACHE TF_DS_KIT TENSORFOLD_CUDA_KERNELS TF_DS_ENGRAM TF_DS_TOKEN_MAP
TF_RDMA_DEVICES TF_RDMA_GID_INDEX TF_DS_GRAPHS TF_DS_HC_SIDE TF_DS_L2_PREFETCH TF_DS_ENGRAM_AIO TF_DS_REPLAY_FLOOR
TF_DS_ROUND_ROWS TF_DS_STREAMS TF_DS_ROUND_MS TF_DS_SERVED_K TF_DS_FIX_K TF_DS_ARENA_GIB TF_DS_RDMA_KERNELS
TF_CUDA_DEVICE TF_CUDA_SEGMENTS TENSORFOLD_MEMORY_RESERVE_GIB TENSORFOLD_CUDA_MEMORY_LIMIT_GB TENSORFOLD_SEED_SALT
TENSORFOLD_API_KEY TENSORFOLD_NO_UPDATE_CHECK TF_DS_ENGRAM_LANES TF_DS_IDX_SPLIT TF_DS_IMAGE_CACHE
NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_IB_GID_INDEX
""",
)


def test_every_documented_name_has_a_row() -> None:
    assert sorted(set(DOCUMENTED) - set(table())) == []


def test_the_importer_executes_nothing_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    source = tmp_path / "local.sh"
    source.write_text(
        f'CONTEXT=524288\nTOUCH=$(touch {tmp_path}/never)\nHF_TOKEN=hf_canary\nMY_OWN=1\nTF_DS_IDX_SPLIT="1"\n'
    )

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "tools/import-local-sh"), str(source), *words],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", **environment},
        )

    done = run()
    assert done.returncode == 3
    assert yaml.safe_load(done.stdout) == {
        "sparkfleet_context": 524288,
        "ranks_settings": {"idx_split": True},
    }
    assert "not read:" in done.stderr and "TOUCH" in done.stderr and "unknown: MY_OWN" in done.stderr
    assert "canary" not in done.stdout + done.stderr
    assert not (tmp_path / "never").exists()
    over = run("--environment", CONTEXT="8192", MEM_CHECK="0")
    assert over.returncode == 1 and "refused: " in over.stderr and "MEM_CHECK" in over.stderr
    assert yaml.safe_load(over.stdout)["sparkfleet_context"] == 8192
