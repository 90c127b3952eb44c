# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

"""From the seed recipe (``start.sh`` with ``scripts/local.sh``) to the variables of this collection.

Three things, all on the controller and all without executing anything of the recipe:

* ``SETTINGS``: every name of the recipe and of its engine, with what it is here, or why it is refused.
  ``docs/from-start-sh.md`` is this table for people, and a test holds the two equal.
* ``read_assignments``: literal ``NAME=value`` lines of a shell file.
* ``read_checkout``: pins and patches from the user's own checkout of the recipe at a given commit.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

#: Kinds of a row. ``variable`` sets one, ``setting`` sets an entry of ranks_settings, ``inventory`` is
#: said by the
#: hosts of the inventory, ``always`` is what this collection always does, ``refused`` stops the import.
KINDS = ("variable", "setting", "inventory", "always", "refused")


@dataclass(frozen=True)
class Row:
    """One name of the recipe. ``target`` is a variable, a setting of the engine profile, or empty."""

    name: str
    kind: str
    target: str = ""
    note: str = ""
    convert: Callable[[str], Any] = str


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _size(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _gb(text: str) -> int:
    return int(float(text) * 1_000_000_000)


def _context(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise ValueError("0 means the model's window there; name the number of positions here")
    return int(text)


SETTINGS: tuple[Row, ...] = (
    Row("WORKER", "inventory", "ansible_host", "the host with sparkfleet_rank 1; its user is ansible_user"),
    Row("FABRIC_PEER", "inventory", "sparkfleet_rails", "rail addresses of both hosts"),
    Row("WORKER_HF_CACHE", "variable", "sparkfleet_data_dir", "one data directory, the same on all nodes"),
    Row("MODEL_ID", "variable", "sparkfleet_model_repo"),
    Row("MODEL_REVISION", "variable", "sparkfleet_model_revision", "a 40-hex commit, never a branch"),
    Row(
        "ABLIT", "variable", "sparkfleet_ablit", "own paths, rank files and release; nothing is mixed", _flag
    ),
    Row("ABLIT_REVISION", "variable", "sparkfleet_ablit_revision", "a 40-hex commit, never a branch"),
    Row(
        "HF_TOKEN",
        "variable",
        "sparkfleet_hub_token_file",
        "a 0600 file on the controller; the value is not imported",
    ),
    Row(
        "CONTEXT",
        "variable",
        "sparkfleet_context",
        "no default here: 524288 is practical, 1048576 the limit",
        _context,
    ),
    Row("PARALLEL", "variable", "sparkfleet_parallel", "", int),
    Row("DRAFTS", "variable", "sparkfleet_drafts", "", _flag),
    Row("MIN_AVAIL_GIB", "variable", "ranks_min_available_gib", "109 when unset", _size),
    Row("MEM_NEED_GIB", "variable", "ranks_min_available_gib", "the plan computes what is needed", _size),
    Row(
        "MEM_CHECK",
        "refused",
        "",
        "the memory gate cannot be turned off; lower ranks_min_available_gib; 1 is accepted",
    ),
    Row(
        "MEM_FLOOR_GIB", "variable", "guard_redline_gib", "one redline while loading and while serving", _size
    ),
    Row("MEMGUARD_GIB", "variable", "guard_redline_gib", "4 when unset", _size),
    Row("PREFILL_INTERLEAVE_MS", "setting", "prefill_interleave_ms", "seed patch 0005", int),
    Row("PREPARE", "always", "", "site.yml prepares what is missing and nothing else"),
    Row("HF_CACHE", "variable", "sparkfleet_data_dir"),
    Row("NFS_VOLUME", "always", "", "weights are local on every node; no volume is needed"),
    Row("HEAD_NFS_SERVER", "always", "", "weights are local on every node; nothing is exported"),
    Row("NFS_PATH", "always", "", "weights are local on every node; nothing is exported"),
    Row("LOG_KEEP", "variable", "ranks_log_keep", "10 when unset, as there", int),
    Row("LOG_DIR", "variable", "ranks_log_dir"),
    Row("PORT", "setting", "port", "8888 when unset, as there", int),
    Row("HOST", "setting", "host", "0.0.0.0 when unset, as there"),
    Row("SERVED_NAME", "variable", "sparkfleet_served_name"),
    Row("MASTER_PORT", "setting", "master_port", "29620 when unset, as there", int),
    Row("MAX_TOKENS", "setting", "max_tokens", "32768 when unset, as there", int),
    Row("THINKING", "setting", "thinking", "", _flag),
    Row("TEMPERATURE", "setting", "temperature", "1.0 when unset, as there", float),
    Row("TOP_P", "setting", "top_p", "0.95 when unset, as there", float),
    Row("TOP_K", "setting", "top_k", "20 when unset, as there", int),
    Row("CONTAINER_NAME", "variable", "ranks_container_name", "dsv41-1017-exl3-tf when unset, as there"),
    Row("IMAGE", "variable", "image_name", "the tag is made from the content"),
    Row("IMAGE_TAG", "always", "", "the tag is the content hash"),
    Row("IMAGE_DIGEST", "variable", "image_reference", "with image_source: digest"),
    Row("GHCR_IMAGE", "variable", "image_reference", "with image_source: digest, and a digest in it"),
    Row("BASE_IMAGE", "variable", "image_base", "by digest"),
    Row("TF_REPO", "variable", "sparkfleet_engine_repo"),
    Row("TF_REF", "variable", "sparkfleet_engine_commit", "a 40-hex commit"),
    Row("TF_VERSION", "variable", "sparkfleet_engine_commit", "a 40-hex commit"),
    Row(
        "MIN_FREE_GB", "variable", "checkpoint_reserve_bytes", "on top of what the lock says is missing", _gb
    ),
    Row("IMAGE_FREE_GB", "variable", "image_reserve_bytes", "", _gb),
    Row("WAIT_TIMEOUT", "variable", "ranks_wait_timeout", "1800 when unset, as there", int),
    Row("STOP_TIMEOUT", "variable", "ranks_stop_timeout", "30 when unset, as there", int),
    Row("NCCL_RAILS", "setting", "nccl_rails", "2 when unset, as there", int),
    Row("NCCL_CHANNELS", "setting", "nccl_channels", "4 when unset, as there", int),
    Row("NCCL_DEBUG", "setting", "nccl_debug", "INFO when unset, so that the transport can be checked"),
    Row("STATE_DIR", "always", "", "/etc/sparkfleet and /run/sparkfleet on the nodes"),
    Row("KERNEL_CACHE", "variable", "sparkfleet_data_dir", "cache/ below it"),
    Row("DRY_RUN", "always", "", "ansible-playbook site.yml --check --diff"),
    Row("FOREGROUND", "always", "", "systemd keeps each rank: sparkfleet-rank@REPLICA.service"),
    Row(
        "PULL",
        "variable",
        "image_source",
        "digest pulls, build builds",
        lambda text: "digest" if text == "1" else "build",
    ),
    Row("TENSORFOLD_MEMORY_RESERVE_GIB", "setting", "memory_reserve_gib", "10 when unset", _size),
    Row("TENSORFOLD_CUDA_MEMORY_LIMIT_GB", "setting", "memory_limit_gib", "", _size),
    Row("TENSORFOLD_CUDA_KERNELS", "always", "", "/kit/aot of the mounted kit"),
    Row("TENSORFOLD_SEED_SALT", "setting", "seed_salt", "", int),
    Row(
        "TENSORFOLD_API_KEY",
        "variable",
        "ranks_api_key_file",
        "a 0600 file on the head; the value is not imported",
    ),
    Row("TENSORFOLD_NO_UPDATE_CHECK", "always", "", "always 1"),
    Row("TF_TP_WORLD", "always", "", "the number of members of the replica"),
    Row("TF_TP_MASTER", "always", "", "the head's address on the first rail"),
    Row("TF_TP_PORT", "setting", "master_port", "", int),
    Row("TF_DS_RANK_CACHE", "always", "", "/rank-cache, with this rank's file alone"),
    Row("TF_DS_KIT", "always", "", "/kit"),
    Row("TF_DS_ENGRAM", "always", "", "/engram"),
    Row("TF_DS_TOKEN_MAP", "always", "", "/token-map/dsv41_token_map.json"),
    Row("TF_RDMA_DEVICES", "always", "", "the rails' devices; rdma_ring: false leaves it out"),
    Row(
        "TF_RDMA_GID_INDEX",
        "always",
        "",
        "found on the node at every start; ring_gid_fixed for a build that takes none",
    ),
    Row("TF_DS_GRAPHS", "setting", "graphs", "", _flag),
    Row("TF_DS_HC_SIDE", "setting", "hc_side", "", _flag),
    Row("TF_DS_L2_PREFETCH", "setting", "l2_prefetch", "", _flag),
    Row("TF_DS_ENGRAM_AIO", "setting", "engram_aio", "", _flag),
    Row("TF_DS_REPLAY_FLOOR", "setting", "replay_floor", "", _flag),
    Row("TF_DS_ROUND_ROWS", "setting", "round_rows", "", int),
    Row("TF_DS_STREAMS", "setting", "streams", "", int),
    Row("TF_DS_ROUND_MS", "setting", "round_ms"),
    Row("TF_DS_SERVED_K", "setting", "served_k"),
    Row("TF_DS_FIX_K", "setting", "fix_k", "", int),
    Row("TF_DS_ARENA_GIB", "setting", "arena_gib", "", _size),
    Row("TF_DS_RDMA_KERNELS", "setting", "rdma_kernels"),
    Row("TF_CUDA_DEVICE", "setting", "cuda_device", "", int),
    Row("TF_CUDA_SEGMENTS", "refused", "", "must be 1, which is the engine's default; 1 is accepted"),
    Row("TF_DS_ENGRAM_LANES", "setting", "engram_lanes", "seed patch", int),
    Row("TF_DS_IDX_SPLIT", "setting", "idx_split", "seed patch; both ranks get it", _flag),
    Row("TF_DS_IMAGE_CACHE", "setting", "image_cache", "seed patch 0006", _flag),
    Row("NCCL_SOCKET_IFNAME", "always", "", "the netdev of the node's first rail"),
    Row("NCCL_IB_HCA", "always", "", "the RDMA devices of the node's rails"),
    Row("NCCL_IB_GID_INDEX", "always", "", "found on the node at every start; gid_mode: auto leaves it out"),
)
BY_NAME: Mapping[str, Row] = {row.name: row for row in SETTINGS}
#: Values of a refused name that mean "as it is here anyway".
ACCEPTED = {"MEM_CHECK": "1", "TF_CUDA_SEGMENTS": "1"}
#: Names whose value is a secret and is never copied.
SECRETS = ("HF_TOKEN", "TENSORFOLD_API_KEY")


@dataclass
class Assignments:
    """What a shell file assigns literally, and the lines that are not such assignments."""

    values: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_DOUBLE = re.compile(r'"([^"\\$`]*)"')
_SINGLE = re.compile(r"'([^']*)'")
_BARE = re.compile(r"[A-Za-z0-9_@%+:,./=-]*")
#: ``NAME="${NAME:-value}"`` is how such files give a default; its value is literal.
_DEFAULT = re.compile(r'"?\$\{([A-Za-z_][A-Za-z0-9_]*):?-([^}$`"\\]*)\}"?')


def read_assignments(text: str, where: str = "local.sh") -> Assignments:
    """Literal assignments of a shell file. Nothing is executed or expanded; every other line is listed
    with its
    number, so that nobody believes that it was imported."""
    found = Assignments()
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        value = None
        if match:
            raw = match.group(2)
            for pattern in (_DOUBLE, _SINGLE, _BARE):
                plain = re.fullmatch(rf"({pattern.pattern})(?:\s+#.*|\s*)", raw)
                if plain:
                    inner = pattern.fullmatch(plain.group(1))
                    if inner:
                        value = inner.group(1) if inner.groups() else plain.group(1)
                    break
            if value is None:
                default = re.fullmatch(rf"(?:{_DEFAULT.pattern})(?:\s+#.*|\s*)", raw)
                if default and default.group(1) == match.group(1):
                    value = default.group(2)
        if match is None or value is None:
            found.refused.append(f"{where}:{number}: not a literal NAME=value: {stripped[:60]}")
            continue
        found.values[match.group(1)] = value
    return found


@dataclass
class Import:
    """Variables for the inventory, and everything that a person has to look at."""

    variables: Json = field(default_factory=dict)
    settings: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def translate(values: Mapping[str, str]) -> Import:
    """The recipe's assignments as variables of this collection. Unknown names are listed, never guessed."""
    result = Import()
    for name, text in values.items():
        row = BY_NAME.get(name)
        if row is None:
            result.unknown.append(name)
        elif row.kind == "refused":
            if text != ACCEPTED.get(name):
                result.problems.append(f"{name}={text}: {row.note}")
        elif name in SECRETS:
            result.notes.append(f"{name}: set {row.target} to {row.note}")
        elif row.kind in ("inventory", "always"):
            place = f"{row.target}: " if row.target else ""
            result.notes.append(f"{name}: {place}{row.note}")
        elif text == "":
            continue
        else:
            try:
                value = row.convert(text)
            except ValueError as error:
                result.problems.append(f"{name}={text}: {error}")
                continue
            goal = result.settings if row.kind == "setting" else result.variables
            if row.target in goal and goal[row.target] != value:
                result.notes.append(f"{name}: {row.target} was set already; {value} replaces it")
            goal[row.target] = value
    if result.settings:
        result.variables["ranks_settings"] = dict(result.settings)
    return result


class CheckoutError(ValueError):
    """The checkout cannot be used; the message names what is wrong with it."""


#: What is read from the recipe's ``scripts/config.sh``: its names → the pins of this collection.
PINS = {
    "MODEL_ID": "sparkfleet_model_repo",
    "MODEL_REVISION": "sparkfleet_model_revision",
    "TF_REPO": "sparkfleet_engine_repo",
    "TF_REF": "sparkfleet_engine_commit",
    "TF_VERSION": "sparkfleet_engine_commit",
    "BASE_IMAGE": "image_base",
}
_HEX40 = re.compile(r"[0-9a-f]{40}")


def _git(checkout: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), *words], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise CheckoutError(f"{checkout}: git {words[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def read_checkout(path: str, commit: str) -> Json:
    """Pins and patches of the recipe, from a clean checkout at exactly ``commit``.

    :returns: ``commit``, ``pins`` (variable → value), ``patches`` (absolute paths in order) and ``other``
    (literal names of its config.sh that are no pins).
    :raises CheckoutError: not a checkout, another commit, local changes, or a layout that is not known;
    the file that is missing is named.
    """
    checkout = Path(path).expanduser()
    if not _HEX40.fullmatch(commit):
        raise CheckoutError(f"recipe commit {commit!r}: wanted 40 hex digits")
    if not (checkout / ".git").exists():
        raise CheckoutError(f"{checkout} is no git checkout; clone the seed repository there")
    head = _git(checkout, "rev-parse", "HEAD").strip()
    if head != commit:
        raise CheckoutError(f"{checkout} is at {head}, wanted {commit}: git -C {checkout} checkout {commit}")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no").strip()
    if changed:
        raise CheckoutError(f"{checkout} has local changes: {changed.splitlines()[0].strip()}")
    config, patches = checkout / "scripts" / "config.sh", checkout / "zig" / "patches"
    for wanted in (config, patches):
        if not wanted.exists():
            raise CheckoutError(
                f"unknown layout: {wanted.relative_to(checkout)} is not in {checkout} at {commit[:12]}"
            )
    values = read_assignments(config.read_text(encoding="utf-8"), "scripts/config.sh").values
    pins: dict[str, str] = {}
    for name, target in PINS.items():
        value = values.get(name, "")
        if not value or (target.endswith(("_revision", "_commit")) and not _HEX40.fullmatch(value)):
            continue
        pins[target] = value
    if not pins:
        raise CheckoutError(f"unknown layout: {config} assigns none of {', '.join(PINS)} literally")
    files = sorted(str(file.resolve()) for file in patches.glob("*.patch"))
    other = {name: value for name, value in values.items() if name not in PINS}
    return {"commit": head, "pins": pins, "patches": files, "other": other}
