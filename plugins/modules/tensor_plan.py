#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plan the tensor split and the memory and disk budget of a replica (thin module over module_utils)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tensor_plan
short_description: Plan what every rank of a replica holds, and whether it fits
description:
  - Makes or reads the lock of a checkpoint, which is its identity by headers alone (files, sizes, tensors),
    from a folder, from a Hub-compatible server by HTTP ranges, or from a lock file, so that a replica can
    be planned before anything is downloaded.
  - Computes from it what every rank holds, name and size of its rank file, the memory budget of every node
    against the redline, the longest context, and the disk that one and two releases need.
  - Changes nothing but O(lock_cache) and O(source_cache), and those not in check mode.
options:
  directory:
    description: Checkpoint folder on the host. Only headers are read.
    type: path
  hub:
    description: A repository on a Hub-compatible server, read by ranges (about 20 MB for 210 GB).
    type: dict
    suboptions:
      endpoint:
        description: Address of the server.
        type: str
        default: https://huggingface.co
      repo:
        description: Owner and name.
        type: str
        required: true
      revision:
        description: Commit of 40 hex digits. A branch or tag is resolved on every run.
        type: str
        required: true
      token:
        description: Access token. Never put it into the environment of the task, which is part of a command line.
        type: str
      token_file:
        description:
          - File on the host that holds the token. Without it the environment variable E(HF_TOKEN) of the
            task is used.
        type: path
      timeout:
        description: Seconds to wait for one answer.
        type: float
        default: 30
  lock:
    description: A lock, as a path on the host or as the data itself.
    type: raw
  lock_cache:
    description:
      - File on the host where the lock is kept. A lock of the same commit, or of a folder whose files have
        not changed, is used again without reading headers.
    type: path
  verify:
    description:
      - Checkpoint folder on the host whose real headers must equal the lock. A difference fails, naming
        file, tensor, found and wanted. In check mode a folder that does not exist yet is no failure.
    type: path
  verify_hashes:
    description: Read every shard of O(verify) and compare its sha256 as well, where the lock knows it. Slow.
    type: bool
    default: false
  engine:
    description: The scheme that cuts the model. V(plain_tp) estimates and cannot be launched.
    type: str
    choices: [tensorfold_native, plain_tp]
    default: tensorfold_native
  world:
    description: Number of ranks.
    type: int
    default: 2
  context:
    description: Tokens of the shared pool. Has no default, because memory and time under load hang on it.
    type: int
    required: true
  parallel:
    description: Number of slots.
    type: int
    default: 4
  drafts:
    description: Load the draft blocks.
    type: bool
    default: true
  vision:
    description: Load the vision tower on rank 0.
    type: bool
    default: true
  parity:
    description: With world 4, share odd blocks between the pairs by expert number.
    type: bool
    default: false
  chunk:
    description: Prefill chunk in tokens.
    type: int
    default: 2048
  kv_format:
    description: Cache format. Empty is the engine's own.
    type: str
    choices: ['', fp4, fp8, fp8_split, bf16]
    default: ''
  redline_gib:
    description: MemAvailable in GiB under which the guard stops the replica.
    type: float
    default: 4.0
  reserve_gib:
    description: The engine's memory reserve in GiB. Without it the engine's own rule, max(4, MemTotal / 10).
    type: float
  min_avail_gib:
    description: Start gate in GiB of MemAvailable. Without it there is no gate beyond the budget itself.
    type: float
  mem_available_gib:
    description: Measured MemAvailable in GiB, one value or one a rank. Without it an idle desktop is assumed.
    type: list
    elements: float
  mem_total_gib:
    description: MemTotal in GiB, for the engine's reserve rule.
    type: float
  calibration:
    description:
      - Measured constants of this replica by rank number, as the calibration function of the collection
        returns them. With it a budget that falls under the redline refuses instead of warning.
    type: dict
    default: {}
  calibration_file:
    description:
      - File on the host where the module M(sparkfleet.serving.calibration) keeps what a first start measured. It
        counts only for the same plan and O(engine_build). A file that is absent counts for nothing, a damaged one
        warns.
    type: path
  engine_build:
    description: What builds the engine's image, as the calibration was kept with it.
    type: str
    default: ''
  situation:
    description:
      - V(start) judges free nodes. V(restart) and V(running) count what our rank holds now as available.
        V(prepare) judges writing the next rank file while our rank goes on serving. One value, or one a rank.
    type: list
    elements: str
    choices: [start, restart, running, prepare]
    default: [start]
  overlay:
    description:
      - A repository with other weights for some tensors of O(hub). The plan is that of both together, in the
        engine's own precedence.
    type: dict
    suboptions:
      endpoint:
        description: Address of a Hub-compatible server.
        type: str
        default: https://huggingface.co
      repo:
        description: Owner and name.
        type: str
        required: true
      revision:
        description: Commit.
        type: str
        required: true
      token:
        description: Access token.
        type: str
      token_file:
        description: File on the host that holds the token.
        type: path
      timeout:
        description: Seconds to wait for an answer.
        type: float
        default: 30
      lock_cache:
        description: File on the host that keeps the overlay's own lock.
        type: path
  engram:
    description: Where the Engram tables come from. Without it their size follows from the config.
    type: dict
    suboptions:
      directory:
        description:
          - Folder on the host with tables or shards that are used where they lie. The host itself then needs no room
            for them.
        type: path
      placement:
        description: V(local) gives every rank a copy of its own, V(nfs) rank 0 alone.
        type: str
        choices: [local, nfs]
        default: local
      names:
        description: Shards that hold the tables. Without them the index of the repository says which.
        type: list
        elements: str
        default: []
      endpoint:
        description: Address of a Hub-compatible server.
        type: str
        default: https://huggingface.co
      repo:
        description: Owner and name.
        type: str
      revision:
        description: Commit.
        type: str
      token:
        description: Access token.
        type: str
      token_file:
        description: File on the host that holds the token.
        type: path
  kit:
    description:
      - Where the engine's kit comes from. Sizes of its RoPE tables bound the context before it is downloaded.
    type: dict
    suboptions:
      directory:
        description: Folder of the kit on the host.
        type: path
      folder:
        description: Folder of the kit inside the repository.
        type: str
        default: kit
      endpoint:
        description: Address of a Hub-compatible server.
        type: str
        default: https://huggingface.co
      repo:
        description: Owner and name on the Hub, or the URL of a git repository, which git on the host reads.
        type: str
      revision:
        description: Commit.
        type: str
      token:
        description: Access token.
        type: str
      token_file:
        description: File on the host that holds the token.
        type: path
  source_cache:
    description:
      - File on the host where sizes of O(kit) and O(engram) are kept by commit, so that a second run asks no server.
    type: path
  disk_paths:
    description:
      - Paths on the host by location (C(models), C(engram), C(rank_files), C(docker), C(data)). With
        O(rank) the real filesystems behind them are judged for one and for two releases.
    type: dict
    default: {}
  disk_held:
    description: Bytes by location that already lie there and belong to what is planned.
    type: dict
    default: {}
  rank:
    description: The rank of this host, for O(disk_paths).
    type: int
  require_fit:
    description: Fail where the plan does not fit. Otherwise the verdict is only returned.
    type: bool
    default: false
author:
  - The sparkfleet founders (@sparkfleet)
attributes:
  check_mode:
    description: Can run in check_mode and return changed status prediction without modifying target.
    support: full
  diff_mode:
    description: Will return details on what has changed when in diff mode.
    support: full
"""

EXAMPLES = r"""
- name: Plan a pair before anything is downloaded
  sparkfleet.serving.tensor_plan:
    hub:
      repo: "{{ checkpoint_repo }}"
      revision: "{{ checkpoint_revision }}"
    lock_cache: /var/lib/sparkfleet/locks/model.json
    context: 524288
    mem_available_gib: [116.2, 117.0]
  register: planned

- name: Make sure that the download is what was planned
  sparkfleet.serving.tensor_plan:
    lock: /var/lib/sparkfleet/locks/model.json
    verify: /var/lib/sparkfleet/models/owner--name/0123456789abcdef0123456789abcdef01234567
    context: 524288
"""

RETURN = r"""
plan:
  description: The plan, equal to what C(tools/sparkplan --json) prints.
  returned: success
  type: dict
  contains:
    ranks:
      description: Entries, bytes, index hash and file name of every rank.
      type: list
      elements: dict
    budget:
      description: Memory of every node, verdict, reason, longest context and levers.
      type: dict
    disk:
      description: Needs of every node, and of this host's filesystems where O(disk_paths) was given.
      type: list
      elements: dict
    digest:
      description: sha256 of what decides how ranks are cut and launched.
      type: str
lock:
  description: Digests, files with size and sha256, and totals of the checkpoint.
  returned: success
  type: dict
overlay:
  description: >-
    Manifests of C(base) and C(overlay), and C(links): the files of both together, each with C(name),
    C(layer) and C(source) (M(sparkfleet.serving.tree_view)).
  returned: when O(overlay) is given
  type: dict
engram:
  description: Files, total and tables of the Engram source.
  returned: when O(engram) is given
  type: dict
rope_rows:
  description: Rows of the shortest RoPE table of the kit.
  returned: when O(kit) is given
  type: int
verified:
  description: Whether the folder of O(verify) equals the lock.
  returned: when O(verify) is given
  type: bool
"""

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import calibration, disk_budget, kit, model_lock, overlay, replica_plan
from ..module_utils.git_source import GitSource, is_git, shown
from ..module_utils.safetensors import PlanError
from ..module_utils.tree import TreeError

COMMIT = re.compile(r"[0-9a-f]{40}")


def _cached(path: str) -> model_lock.ModelLock | None:
    """The kept lock; a damaged one is made anew."""
    try:
        return model_lock.load(path) if path and Path(path).is_file() else None
    except PlanError:
        return None


def token_of(source: dict[str, Any]) -> str:
    """The token that was given, or that of the file, or the node's own environment."""
    return str(source["token"] or "") or model_lock.read_token(source["token_file"] or "")


def from_hub_or_kept(
    hub: dict[str, Any], kept: model_lock.ModelLock | None, *, overlay: bool
) -> model_lock.ModelLock:
    """The lock of a repository; the kept one where it is of the same commit."""
    if kept and kept.source.get("kind") == "hub" and kept.source.get("repo") == hub["repo"]:
        if kept.source.get("revision") == hub["revision"]:
            return kept
        client = model_lock.HubClient(
            hub["endpoint"], hub["repo"], hub["revision"], token_of(hub), timeout=hub["timeout"]
        )
        if client.list_files()[0] == kept.source.get("revision"):
            return kept
    return model_lock.from_hub(
        hub["endpoint"], hub["repo"], hub["revision"], token_of(hub), timeout=hub["timeout"], overlay=overlay
    )


def find_lock(params: dict[str, Any]) -> model_lock.ModelLock:
    """The lock from the one source that was given, or from the cache where that is the same."""
    kept = _cached(params["lock_cache"])
    if params["directory"]:
        if kept and kept.source.get("kind") == "directory":
            same = kept.source.get("fingerprint") == model_lock.directory_fingerprint(params["directory"])
            if same and kept.source.get("directory") == params["directory"]:
                return kept
        return model_lock.from_directory(params["directory"])
    if params["hub"]:
        return from_hub_or_kept(params["hub"], kept, overlay=False)
    given = params["lock"]
    if isinstance(given, dict):
        return model_lock.from_document(given)
    return model_lock.load(str(given))


def keep(module: AnsibleModule, path: str, text: str, result: dict[str, Any]) -> None:
    """Write a file where it differs from the kept one; report changed and the difference."""
    try:
        before = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        before = ""
    if before == text:
        return
    result["changed"] = True
    if module._diff:
        result.setdefault("diff", []).append(
            {"before_header": path, "after_header": path, "before": before, "after": text}
        )
    if module.check_mode:
        return
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=str(folder), prefix=".lock-")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    Path(temporary).chmod(0o644)
    module.atomic_move(temporary, path)


class Sources:
    """What is known of kit and Engram source by commit, kept so that a second run asks no server."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        except (OSError, ValueError):
            document = {}
        if isinstance(document, dict):
            self.kept = document

    def of(self, kind: str, source: dict[str, Any], make: Callable[[], Any]) -> Any:
        """A plain value from the source, or the kept one of the same commit."""
        where = [source["endpoint"], source["repo"], source["revision"]]
        key = " ".join([kind, *map(str, where), *source.get("names", []), source.get("folder", "")]).strip()
        pinned = bool(COMMIT.fullmatch(str(source["revision"])))
        value = self.kept[key] if pinned and key in self.kept else make()
        if pinned:
            self.found[key] = value
        return value

    @property
    def text(self) -> str:
        return json.dumps(self.found, indent=1, sort_keys=True) + "\n"


def _needs(source: dict[str, Any], what: str) -> None:
    if not source["repo"] or not source["revision"]:
        raise PlanError(f"bad-{what}", "needs a directory, or repo and revision", tensor=what)


def find_engram(params: dict[str, Any], sources: Sources) -> model_lock.EngramTables | None:
    """The Engram tables of the given source."""
    engram = params["engram"]
    if not engram:
        return None
    if engram["directory"]:
        return model_lock.engram_from_directory(engram["directory"])
    _needs(engram, "engram")

    def ask() -> dict[str, Any]:
        found = model_lock.engram_from_hub(
            engram["endpoint"], engram["repo"], engram["revision"], token_of(engram), names=engram["names"]
        )
        return {
            "files": [list(item) for item in found.files],
            "tables": {str(layer): list(shape) for layer, shape in found.tables.items()},
            "revision": found.revision,
        }

    try:
        value = sources.of("engram", engram, ask)
        return model_lock.EngramTables(
            [model_lock.LockFile(*row) for row in value["files"]],
            {int(layer): (int(rows), int(size)) for layer, (rows, size) in value["tables"].items()},
            str(value["revision"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            "bad-cache", f"is damaged: {error!r}", file=str(params["source_cache"]), remedy="remove it"
        ) from None


def engram_ranks(params: dict[str, Any]) -> list[int] | None:
    """The ranks that get a copy of the Engram tables; None where no source is given."""
    engram = params["engram"]
    if not engram:
        return None
    holders = [0] if engram["placement"] == "nfs" else list(range(params["world"]))
    return [rank for rank in holders if rank != 0 or not engram["directory"]]


def find_rope_rows(params: dict[str, Any], sources: Sources) -> int | None:
    """Rows of the RoPE tables of the given kit. Raises PlanError for a kit that lacks them."""
    source = params["kit"]
    if not source:
        return None
    try:
        if source["directory"]:
            root = Path(source["directory"])
            sizes = {path.name: path.stat().st_size for path in root.iterdir() if path.is_file()}
            return kit.rows_by_sizes(sizes, lambda name: (root / name).read_bytes())
        _needs(source, "kit")

        def ask() -> int:
            if is_git(source["repo"]):
                with GitSource(source["repo"], source["revision"], source["folder"]) as checkout:
                    sizes = {item.name: item.size for item in checkout.listing()}
                    return kit.rows_by_sizes(sizes, checkout.read)
            client = model_lock.HubClient(
                source["endpoint"], source["repo"], source["revision"], token_of(source)
            )
            listed = client.list_files()[1]
            sizes = {item.name: item.size for item in listed}
            return kit.rows_by_sizes(sizes, lambda name: client.read(name, 0, sizes[name]), source["folder"])

        return int(sources.of("kit", source, ask))
    except TreeError as error:
        where = source["directory"] or f"{shown(source['repo'])}@{source['revision']}"
        raise PlanError("bad-kit", str(error), file=where) from None


def find_calibration(params: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(what was given, or what the host keeps; warnings). A damaged file is said and counts for nothing."""
    if params["calibration"] or not params["calibration_file"]:
        return dict(params["calibration"]), []
    path = Path(params["calibration_file"])
    try:
        return calibration.parse(path.read_text(encoding="utf-8"), str(path)), []
    except FileNotFoundError:
        return {}, []
    except (OSError, UnicodeDecodeError, PlanError) as error:
        return {}, [f"the kept calibration is not used: {error}"]


def verify(module: AnsibleModule, lock: model_lock.ModelLock, result: dict[str, Any]) -> None:
    """Set the downloaded folder against the lock; a difference fails."""
    path = module.params["verify"]
    if not path:
        return
    if module.check_mode and not Path(path).is_dir():
        result["verified"] = False
        return
    problems = model_lock.verify_directory(lock, path, hashes=module.params["verify_hashes"])
    result["verified"] = not problems
    if problems:
        raise (
            problems[0]
            if len(problems) == 1
            else PlanError(
                "lock-mismatch",
                f"{path} is not what the lock says, {len(problems)} differences, first: {problems[0]}",
                remedy="fetch the checkpoint again, or plan with the lock of what is there",
            )
        )


def run(module: AnsibleModule) -> dict[str, Any]:
    """Lock, plan, judge. Raises PlanError for bad input."""
    params = module.params
    result: dict[str, Any] = {"changed": False}
    lock = find_lock(params)
    if lock.source.get("kind") == "reconstructed":
        raise PlanError(
            "reconstructed-lock",
            "is reconstructed, its headers were never seen: good for sparkplan, not for a replica",
            tensor="lock",
            remedy="give hub or directory",
        )
    base, merged = lock, None
    if params["overlay"]:
        changes = from_hub_or_kept(params["overlay"], _cached(params["overlay"]["lock_cache"]), overlay=True)
        merged = overlay.merge(base, changes)
        lock = merged.lock
        result["overlay"] = {
            "base": overlay.manifest(base.files, [item.name for item in base.files]),
            "overlay": overlay.manifest(changes.files, list(changes.shards)),
            "links": [link._asdict() for link in merged.links],
        }
    sources = Sources(params["source_cache"])
    tables = find_engram(params, sources)
    rope_rows = find_rope_rows(params, sources)
    measured, told = find_calibration(params)
    request = replica_plan.Request(
        context=params["context"],
        world=params["world"],
        engine=params["engine"],
        parallel=params["parallel"],
        drafts=params["drafts"],
        vision=params["vision"],
        parity=params["parity"],
        chunk=params["chunk"],
        kv_format=params["kv_format"],
        redline_gib=params["redline_gib"],
        reserve_gib=params["reserve_gib"],
        min_avail_gib=params["min_avail_gib"],
        mem_available_gib=params["mem_available_gib"] or None,
        mem_total_gib=params["mem_total_gib"],
        calibration=measured,
        engine_build=params["engine_build"],
        rope_rows=rope_rows,
        situation=params["situation"][0] if len(params["situation"]) == 1 else params["situation"],
        engram_bytes=tables.total_bytes if tables else None,
        engram_ranks=engram_ranks(params),
    )
    plan, _split = replica_plan.make_plan(lock, request)
    plan["warnings"] += told
    if rope_rows is not None:
        result["rope_rows"] = rope_rows
    if tables:
        result["engram"] = {
            "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in tables.files],
            "total_bytes": tables.total_bytes,
            "tables": {str(layer): list(shape) for layer, shape in tables.tables.items()},
            "revision": tables.revision,
        }
        plan["warnings"] += replica_plan.engram_differences(lock.config, tables.tables)
    if params["disk_paths"] and params["rank"] is not None:
        held = {name: int(value) for name, value in params["disk_held"].items()}
        found = disk_budget.probe_filesystems({k: str(v) for k, v in params["disk_paths"].items()}, held)
        rows = [
            {
                "name": fs.name,
                "available_bytes": fs.available,
                "type": fs.kind,
                "locations": list(fs.locations),
                "held_bytes": fs.held,
            }
            for fs in found
        ]
        judged = disk_budget.disk_for_node(plan, params["rank"], rows)
        plan["disk"] = [judged if row["rank"] == params["rank"] else row for row in plan["disk"]]
    if params["lock_cache"]:
        keep(module, params["lock_cache"], model_lock.dumps(base), result)
    if merged is not None and params["overlay"]["lock_cache"]:
        keep(module, params["overlay"]["lock_cache"], model_lock.dumps(changes), result)
    if params["source_cache"]:
        keep(module, params["source_cache"], sources.text, result)
    verify(module, lock, result)
    result["plan"] = plan
    result["lock"] = lock.summary()
    return result


def main() -> None:
    """Module entry."""
    hub = {
        "endpoint": {"type": "str", "default": "https://huggingface.co"},
        "repo": {"type": "str", "required": True},
        "revision": {"type": "str", "required": True},
        "token": {"type": "str", "no_log": True},
        "token_file": {"type": "path", "no_log": False},
        "timeout": {"type": "float", "default": 30},
    }
    changes = {**hub, "lock_cache": {"type": "path"}}
    source = {
        "directory": {"type": "path"},
        "endpoint": {"type": "str", "default": "https://huggingface.co"},
        "repo": {"type": "str"},
        "revision": {"type": "str"},
        "token": {"type": "str", "no_log": True},
        "token_file": {"type": "path", "no_log": False},
    }
    engram = {
        **source,
        "placement": {"type": "str", "default": "local", "choices": ["local", "nfs"]},
        "names": {"type": "list", "elements": "str", "default": []},
    }
    kit_source = {**source, "folder": {"type": "str", "default": "kit"}}
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path"},
            "hub": {"type": "dict", "options": hub},
            "overlay": {"type": "dict", "options": changes},
            "lock": {"type": "raw"},
            "lock_cache": {"type": "path"},
            "verify": {"type": "path"},
            "verify_hashes": {"type": "bool", "default": False},
            "engine": {
                "type": "str",
                "default": "tensorfold_native",
                "choices": ["tensorfold_native", "plain_tp"],
            },
            "world": {"type": "int", "default": 2},
            "context": {"type": "int", "required": True},
            "parallel": {"type": "int", "default": 4},
            "drafts": {"type": "bool", "default": True},
            "vision": {"type": "bool", "default": True},
            "parity": {"type": "bool", "default": False},
            "chunk": {"type": "int", "default": 2048},
            "kv_format": {"type": "str", "default": "", "choices": ["", "fp4", "fp8", "fp8_split", "bf16"]},
            "redline_gib": {"type": "float", "default": 4.0},
            "reserve_gib": {"type": "float"},
            "min_avail_gib": {"type": "float"},
            "mem_available_gib": {"type": "list", "elements": "float"},
            "mem_total_gib": {"type": "float"},
            "calibration": {"type": "dict", "default": {}},
            "situation": {
                "type": "list",
                "elements": "str",
                "default": ["start"],
                "choices": ["start", "restart", "running", "prepare"],
            },
            "calibration_file": {"type": "path"},
            "engine_build": {"type": "str", "default": ""},
            "engram": {"type": "dict", "options": engram},
            "kit": {"type": "dict", "options": kit_source},
            "source_cache": {"type": "path"},
            "disk_paths": {"type": "dict", "default": {}},
            "disk_held": {"type": "dict", "default": {}},
            "rank": {"type": "int"},
            "require_fit": {"type": "bool", "default": False},
        },
        mutually_exclusive=[["directory", "hub", "lock"]],
        required_one_of=[["directory", "hub", "lock"]],
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except PlanError as error:
        module.fail_json(msg=str(error), refusal=error.as_dict())
    except (OSError, TypeError, ValueError) as error:
        module.fail_json(msg=f"the plan cannot be made: {error}")
    verdict = result["plan"]["budget"]
    if module.params["require_fit"] and verdict["verdict"] == "does_not_fit":
        levers = ", ".join(f"{row['lever']} +{row['gain_gib']} GiB" for row in verdict["levers"][:3])
        module.fail_json(
            msg=f"does not fit: {verdict['reason']}; what buys most: {levers or 'nothing'}", **result
        )
    for text in result["plan"]["warnings"]:
        module.warn(text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
