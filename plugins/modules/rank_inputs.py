#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Rank files by the engine's own tool or our writer, and the token map by the engine's own script."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rank_inputs
short_description: Rank files and token map from a checkpoint
description:
  - Makes the rank files that are asked for, and the Engram token map, with the engine's own tools in a
    container of the engine image without network, and proves what came out.
  - Where an engine build lacks the rank file tool, our own writer makes the same file, byte for byte, from
    the headers and the plan's own rules.
  - A rank file's name must be the one of the plan. It covers the layout only, so the variant (the weights
    that it was cut from) is part of its directory and of its proof.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  state:
    description:
      - V(compared) only looks.
      - V(present) makes what is missing.
      - V(released) removes rank files that were made here for another node (a passing state, never a change).
    type: str
    choices: [compared, present, released]
    default: present
  ranks:
    description:
      - Rank files to look at or make. C(rank), C(file_name) (from the plan), C(root) (directory that holds
        one directory per index hash), optional C(size) (or C(file_bytes), the plan's name) in bytes,
        optional C(passing) for a file that only waits here for another node.
    type: list
    elements: dict
    default: []
  world:
    description: Ranks of the replica.
    type: int
    default: 2
  flags:
    description: Further arguments of the tool, such as C(--no-dspark).
    type: list
    elements: str
    default: []
  variant:
    description: Identity of the weights (model revision or lock hash); files of others are not accepted.
    type: str
    default: ""
  model_dir:
    description: The checkpoint.
    type: path
    default: ""
  token_map:
    description: Where the token map belongs. Empty leaves it out.
    type: path
    default: ""
  kit:
    description: The kernel kit that is checked against its MANIFEST. Empty, or not there yet, checks nothing.
    type: path
    default: ""
  kit_digests:
    description: File of the kit to the sha256 that is wanted instead of the one in its MANIFEST.
    type: dict
    default: {}
  rope_rows:
    description: Rows that the kit's RoPE tables must have.
    type: int
    default: 0
  image:
    description: Engine image.
    type: str
    default: ""
  writer:
    description:
      - V(engine) runs O(tool) in the engine image.
      - V(ours) writes the file with the collection's own code, on the node itself.
    type: str
    choices: [engine, ours]
    default: engine
  tool:
    description: Name of the rank file tool in the image.
    type: str
    default: tf-dsv41-rank-cache
  token_map_tool:
    description: Path of the token map script in the image.
    type: str
    default: /opt/tensorfold/tools/make_token_map.py
  min_available_bytes:
    description: MemAvailable needed while a rank file is written (the tool holds the embedding twice).
    type: int
    default: 5368709120
extends_documentation_fragment:
  - sparkfleet.serving.transfer
  - sparkfleet.serving.transfer.proof
  - sparkfleet.serving.transfer.docker
attributes:
  check_mode:
    description: >-
      Says what would be made. Where the checkpoint is there already, the name that the writer would give is
      compared with the plan's.
    support: full
  diff_mode:
    description: Files before and after.
    support: full
"""

EXAMPLES = r"""
- name: Both rank files on the head
  sparkfleet.serving.rank_inputs:
    ranks:
      - {rank: 0, file_name: rank0of2-274304f92f5400805bf9.bin, root: /var/lib/sparkfleet/rank-files/64ba41b}
    variant: 64ba41b6c916a587db06eae2e19b7845f7be6e6b
    model_dir: /var/lib/sparkfleet/models/Mia-AiLab--DeepSeek-V4.1-Flash-EXL3-2.9bpw/64ba41b
    image: sparkfleet/engine:0123456789ab
"""

RETURN = r"""
ranks:
  description: Per rank C(rank), C(present), C(path) (directory), C(files) (manifest of that directory).
  type: list
  elements: dict
  returned: always
token_map_present:
  description: The token map is there.
  type: bool
  returned: always
rank_needed:
  description: A rank file has (after V(present), had) to be made.
  type: bool
  returned: always
needed:
  description: Something has (after V(present), had) to be made.
  type: bool
  returned: always
"""

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Union

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerError
from ..module_utils.engine_tools import EngineTools
from ..module_utils.fabric_copy import SizeWatch
from ..module_utils.kit import check as check_kit
from ..module_utils.rank_file import check_frame, explain, parse_name
from ..module_utils.rank_writer import Source, plan_rank, write_rank_file
from ..module_utils.safetensors import PlanError
from ..module_utils.split import RankLayout
from ..module_utils.tree import (
    FileSpec,
    Progress,
    Proof,
    Seen,
    TreeError,
    digest_file,
    exclusive,
    human,
    inspect,
    partial_path,
    place,
    proof_path,
    prove,
    read_proof,
    refuse_space,
    write_proof,
)
from ..module_utils.weights_module import (
    DOCKER_ARGS,
    PROOF_ARGS,
    TRANSFER_ARGS,
    entry,
    lock_dir,
    own_parents,
    refusal,
)

Rank = dict[str, Any]


def rank_dir(item: Rank) -> Path:
    """``ROOT/HASH20``: one directory per index hash, so that a launch mounts exactly one rank file."""
    return Path(item["root"]) / parse_name(item["file_name"]).index


def look(item: Rank, variant: str, rehash: bool, forget: bool = False) -> dict[str, Any]:
    """State of one rank file: proven by its own digest, framed right, cut from the right weights.

    ``forget`` takes a file that was found wrong out of the proof, so that nobody trusts it again.
    """
    folder = rank_dir(item)
    proof = read_proof(proof_path(folder))
    found: dict[str, Any] = {
        "rank": int(item["rank"]),
        "path": str(folder),
        "file": str(folder / item["file_name"]),
        "present": False,
        "files": [],
        "why": "absent",
    }
    if not folder.is_dir():
        return found
    if not proof.listing:
        found["why"] = "no proof beside it"
        return found
    if proof.meta.get("variant", variant) != variant:
        found["why"] = f"cut from other weights ({proof.meta.get('variant')})"
        return found
    report = prove(folder, inspect(folder, proof.listing, proof, rehash), proof, 1)
    if report.wrong and forget:
        write_proof(proof_path(folder), proof)
    if not report.complete or [spec.name for spec in proof.listing] != [item["file_name"]]:
        found["why"] = "; ".join(why for _spec, why in report.wrong) or "not the file of the plan"
        return found
    size = int(item.get("size") or item.get("file_bytes") or 0)
    if size and proof.listing[0].size != size:
        found["why"] = f"{proof.listing[0].size} bytes instead of the plan's {size}"
        return found
    try:
        check_frame(folder / item["file_name"], rows=rehash)
    except (TreeError, OSError) as exc:
        found["why"] = str(exc)
        return found
    found.update(present=True, why="", files=[spec.as_dict() for spec in proof.listing])
    return found


def available_memory() -> int:
    """MemAvailable in bytes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise TreeError("/proc/meminfo has no MemAvailable")


class Tools(EngineTools):
    """The engine's own tools for rank files and the token map."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__(params["docker_socket"], params["image"])
        self._params = params

    def name(self, item: Rank) -> str:
        """The file name that the engine's tool would give, by ``--index-only`` through a pipe."""
        digest = hashlib.sha256()

        def hear(kind: int, data: bytes) -> None:
            if kind == 1:
                digest.update(data)

        argv = [self._params["tool"], "/model", "/out", str(item["rank"]), str(self._params["world"])]
        code, _out, err = self.run(
            f"rank-index-{item['rank']}",
            [*argv, *self._params["flags"], "--index-only"],
            [f"{self._params['model_dir']}:/model:ro"],
            hear,
        )
        if code != 0:
            raise TreeError(f"{self._params['tool']} refuses the checkpoint: {explain(err, code)}")
        return f"rank{item['rank']}of{self._params['world']}-{digest.hexdigest()[:20]}.bin"

    def write(self, item: Rank, out: Path, progress: Progress) -> str:
        """Write one rank file into an empty directory. The tool does not say what it wrote: ``""``."""
        argv = [self._params["tool"], "/model", "/out", str(item["rank"]), str(self._params["world"])]
        with SizeWatch(out, 0, progress.set):
            code, _out, err = self.run(
                f"rank-file-{item['rank']}",
                [*argv, *self._params["flags"]],
                [f"{self._params['model_dir']}:/model:ro", f"{out}:/out"],
            )
        if code != 0:
            raise TreeError(f"{self._params['tool']} failed for rank {item['rank']}: {explain(err, code)}")
        return ""

    def token_map(self, out: Path) -> None:
        """Write the token map."""
        code, stdout, err = self.run(
            "token-map",
            ["python3", self._params["token_map_tool"], "/model", f"/out/{out.name}"],
            [f"{self._params['model_dir']}:/model:ro", f"{out.parent}:/out"],
        )
        if code != 0:
            raise TreeError(f"the token map tool ended with {code}: {(err or stdout).strip()[-300:]}")
        check_token_map(out)


class OurWriter:
    """Rank files by our own code."""

    def __init__(self, params: dict[str, Any]) -> None:
        self._params = params
        self._planned: tuple[int, RankLayout, dict[str, Source]] | None = None

    def _plan(self, rank: int) -> tuple[RankLayout, dict[str, Source]]:
        if self._planned is None or self._planned[0] != rank:
            self._planned = None  # one plan at a time: at full size it is some hundred MB
            found = plan_rank(
                Path(self._params["model_dir"]), self._params["world"], rank, self._params["flags"]
            )
            self._planned = (rank, *found)
        return self._planned[1:]

    def name(self, item: Rank) -> str:
        """The file name that belongs to the checkpoint, from its headers."""
        return self._plan(int(item["rank"]))[0].file_name

    def write(self, item: Rank, out: Path, progress: Progress) -> str:
        """Write one rank file into an empty directory; returns the sha256 of what was written."""
        layout, sources = self._plan(int(item["rank"]))
        return write_rank_file(Path(self._params["model_dir"]), out, layout, sources, progress.add)


Writer = Union[Tools, OurWriter]


def agree(writer: Writer, item: Rank, params: dict[str, Any]) -> None:
    """Refuse when the file would get another name than the plan expects."""
    found, wanted = writer.name(item), item["file_name"]
    if found != wanted:
        who = "the engine's tool" if params["writer"] == "engine" else "our writer"
        raise TreeError(
            f"{who} would write {found}, the plan expects {wanted}: checkpoint, flags and plan do not "
            "belong together. Make the model lock for this revision again, or correct the engine's flags"
        )


def can_ask(tools: Tools) -> bool:
    """Whether the engine's tool can be run now; before the image is there, check mode has nothing to ask."""
    try:
        return tools.has_image()
    except DockerError:
        return False


def check_token_map(path: Path) -> None:
    """A JSON list of integers, not empty (what the engine reads)."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise TreeError(f"{path} is not a token map: {exc}") from exc
    if not isinstance(raw, list) or not raw or not all(type(item) is int for item in raw):
        raise TreeError(f"{path} is not a token map: a list of integers is needed; remove it and run again")


def make_rank(writer: Writer, item: Rank, params: dict[str, Any], progress: Progress) -> None:
    """One rank file: name agreed with the plan, written aside, framed right, hashed, placed."""
    folder = rank_dir(item)
    wanted = item["file_name"]
    agree(writer, item, params)
    own_parents(folder.parent)
    size = int(item.get("size") or item.get("file_bytes") or 0)
    refuse_space(folder, size, params["reserve_bytes"], f"rank file {wanted}")
    memory = available_memory()
    if memory < params["min_available_bytes"]:
        raise TreeError(
            f"writing a rank file needs {human(params['min_available_bytes'])} of memory, {human(memory)} are "
            "available; stop what uses it or wait"
        )
    out = partial_path(folder)
    shutil.rmtree(out, ignore_errors=True)  # the tool refuses a directory with leftovers of the same rank
    out.mkdir(mode=0o755)
    try:
        progress.step(f"rank file {item['rank']}", size)
        written = writer.write(item, out, progress)
        path = out / wanted
        if not path.is_file():
            there = sorted(item.name for item in out.iterdir())
            raise TreeError(f"the tool ended well but {wanted} is not there: {there}")
        check_frame(path)
        progress.step(f"proof of rank file {item['rank']}", path.stat().st_size)
        path.chmod(0o644)
        sha256, _blob = digest_file(path, path.stat().st_size, False, progress.add)
        if written and sha256 != written:
            raise TreeError(
                f"{path} was written with sha256 {written} and is read with {sha256}: the disk lies"
            )
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    info = path.stat()
    if folder.exists():
        shutil.rmtree(folder)
    spec = FileSpec(wanted, info.st_size, sha256)
    meta = {"variant": params["variant"], "image": params["image"], "writer": params["writer"]}
    write_proof(proof_path(folder), Proof({wanted: Seen.of(info, sha256)}, (spec,), meta))
    place(out, folder)


def make_token_map(tools: Tools, target: Path) -> None:
    """The token map, written aside and placed."""
    own_parents(target.parent)
    work = target.parent / f".{target.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o755)
    try:
        tools.token_map(work / target.name)
        (work / target.name).chmod(0o644)
        (work / target.name).replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def release(params: dict[str, Any]) -> None:
    """Remove rank files that were made here for another node."""
    for item in params["ranks"]:
        folder = rank_dir(item)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(partial_path(folder), ignore_errors=True)
        with contextlib.suppress(OSError):
            proof_path(folder).unlink()
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # only when nothing else waits there
            folder.parent.parent.rmdir()


def announced(missing: list[Rank], token_map: Path | None, lock: Path) -> list[dict[str, str]]:
    """What making these inputs will have changed. A file that only waits for another node is no change."""
    found = []
    for item in missing:
        if not item.get("passing"):
            folder = rank_dir(item)
            found += [entry(f"tree {folder}", "", f"{item['file_name']}\n"), entry(str(proof_path(folder)))]
    if token_map is not None:
        found.append(entry(str(token_map)))
    return found if lock.exists() or not found else [*found, entry(str(lock))]


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            **TRANSFER_ARGS,
            **PROOF_ARGS,
            **DOCKER_ARGS,
            "state": {"type": "str", "choices": ["compared", "present", "released"], "default": "present"},
            "ranks": {"type": "list", "elements": "dict", "default": []},
            "world": {"type": "int", "default": 2},
            "flags": {"type": "list", "elements": "str", "default": []},
            "variant": {"type": "str", "default": ""},
            "model_dir": {"type": "path", "default": ""},
            "token_map": {"type": "path", "default": ""},
            "kit": {"type": "path", "default": ""},
            "kit_digests": {"type": "dict", "default": {}},
            "rope_rows": {"type": "int", "default": 0},
            "image": {"type": "str", "default": ""},
            "writer": {"type": "str", "choices": ["engine", "ours"], "default": "engine"},
            "tool": {"type": "str", "default": "tf-dsv41-rank-cache"},
            "token_map_tool": {"type": "str", "default": "/opt/tensorfold/tools/make_token_map.py"},
            "min_available_bytes": {"type": "int", "default": 5 << 30},
        },
        supports_check_mode=True,
    )
    params = module.params
    progress = Progress(Path(params["progress_file"]) if params["progress_file"] else None, "compare", 0)
    token_map = Path(params["token_map"]) if params["token_map"] else None
    diff: list[dict[str, str]] = []
    try:
        if params["state"] == "released":
            if not module.check_mode:
                release(params)
            module.exit_json(changed=False, ranks=[], token_map_present=False, needed=False)
        if params["kit"] and Path(params["kit"]).is_dir():
            kit = Path(params["kit"])
            check_kit(kit, read_proof(proof_path(kit)), params["rope_rows"], params["kit_digests"])
        forget = not module.check_mode
        ranks = [look(item, params["variant"], params["rehash"], forget) for item in params["ranks"]]
        map_there = token_map is None or token_map.is_file()
        if token_map is not None and map_there:
            check_token_map(token_map)
        missing = [item for item, state in zip(params["ranks"], ranks) if not state["present"]]
        needed = bool(missing) or not map_there
        lock = lock_dir(params["data_dir"]) / "rank-inputs"
        diff = announced(missing, token_map if not map_there else None, lock)
        changed = needed and params["state"] == "present"
        tools = Tools(params)
        writer: Writer = tools if params["writer"] == "engine" else OurWriter(params)
        if changed and module.check_mode and (Path(params["model_dir"]) / "config.json").is_file():
            # Nothing is written: the name alone is asked, where there is something to ask.
            for item in missing if params["writer"] == "ours" or can_ask(tools) else []:
                agree(writer, item, params)
        if changed and not module.check_mode:
            if params["writer"] == "engine" or not map_there:
                tools.need_image()
            own_parents(lock_dir(params["data_dir"]))
            with exclusive(lock, "rank files"):
                if token_map is not None and not map_there:
                    make_token_map(tools, token_map)
                for item in missing:
                    make_rank(writer, item, params, progress)
            ranks = [look(item, params["variant"], False) for item in params["ranks"]]
            map_there = True
            bad = [f"{state['file']}: {state['why']}" for state in ranks if not state["present"]]
            if bad:
                raise TreeError("made, but not right: " + "; ".join(bad))
    except (TreeError, PlanError, DockerError, OSError) as exc:
        refusal(module, exc)
    finally:
        progress.close()
    module.exit_json(
        changed=changed,
        needed=needed,
        rank_needed=bool(missing),
        ranks=ranks,
        token_map_present=map_there,
        diff=diff if changed else [],
    )


if __name__ == "__main__":
    main()
