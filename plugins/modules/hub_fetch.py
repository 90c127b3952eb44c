#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Bring files of a pinned Hub revision to this node and prove them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hub_fetch
short_description: Files of a pinned Hub revision, proven by size and sha256
description:
  - Brings files of one revision of one repository of a Hub-compatible endpoint into a directory, as real
    files.
  - The download is made by C(huggingface_hub) in a container of the engine image, resumes, and is proven
    against the manifest before the directory gets its final name.
  - What is proven is remembered by size, mtime and inode. A complete tree needs no network and no Docker.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  endpoint:
    description: URL of the Hub.
    type: str
    default: https://huggingface.co
  repo:
    description: Repository, C(OWNER/NAME).
    type: str
    required: true
  revision:
    description: Commit id, 40 hex digits.
    type: str
    required: true
  files:
    description:
      - The manifest, a list of C(name), C(size) and C(sha256) (or C(blob_id), the git blob id). One without
        a digest gets the one that the Hub lists for the pinned revision.
      - Empty takes every file of the revision below O(prefix) as the Hub lists it, and remembers that list.
    type: list
    elements: dict
    default: []
  names:
    description: With empty O(files), only these files of the Hub's list. All of them must be there.
    type: list
    elements: str
    default: []
  prefix:
    description: Folder of the repository that becomes the root of the tree.
    type: str
    default: ""
  dest:
    description: Directory that will hold exactly these files.
    type: path
    required: true
  image:
    description: Engine image with C(python3) and C(huggingface_hub). Needed only when something is missing.
    type: str
    default: ""
  token:
    description: Access token. Reaches the download as a 0600 file only.
    type: str
    default: ""
  token_file:
    description: A file on the node that holds the token, used when O(token) is empty and the file exists.
    type: path
    default: ""
extends_documentation_fragment:
  - sparkfleet.serving.transfer
  - sparkfleet.serving.transfer.proof
  - sparkfleet.serving.transfer.parallel
  - sparkfleet.serving.transfer.docker
attributes:
  check_mode:
    description: Says how many files and bytes would come, asks the Hub whether it would give them.
    support: full
  diff_mode:
    description: The proven files before and after.
    support: full
"""

EXAMPLES = r"""
- name: Checkpoint at its pin
  sparkfleet.serving.hub_fetch:
    repo: Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw
    revision: 64ba41b6c916a587db06eae2e19b7845f7be6e6b
    files: "{{ plan.lock.files }}"
    dest: /var/lib/sparkfleet/models/Mia-AiLab--DeepSeek-V4.1-Flash-EXL3-2.9bpw/64ba41b6c916a587db06eae2e1
    image: sparkfleet/engine:0123456789ab
"""

RETURN = r"""
complete:
  description: Every file is there and proven.
  type: bool
  returned: always
path:
  description: The directory.
  type: str
  returned: always
files:
  description: The manifest with what was proven (C(name), C(size), C(sha256), C(blob_id)).
  type: list
  elements: dict
  returned: always
files_needed:
  description: Files that were (check mode, would be) fetched.
  type: int
  returned: always
bytes_needed:
  description: Their bytes.
  type: int
  returned: always
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Callable

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerError
from ..module_utils.engine_tools import EngineTools
from ..module_utils.fabric_copy import RUN_DIR, SizeWatch
from ..module_utils.hub_client import (
    FETCH_SCRIPT,
    Hub,
    check_repo,
    dead_parts,
    explain,
    last_result,
    token_of,
)
from ..module_utils.tree import (
    FileSpec,
    Progress,
    Proof,
    Report,
    TreeError,
    complete_digests,
    exclusive,
    inspect,
    manifest_digest,
    open_for_work,
    parse_files,
    partial_path,
    place,
    proof_path,
    prove,
    read_proof,
    refuse_foreign,
    refuse_space,
    tree_size,
    write_proof,
)
from ..module_utils.weights_module import (
    DOCKER_ARGS,
    PARALLEL_ARGS,
    PROOF_ARGS,
    TRANSFER_ARGS,
    compare_tree,
    end_tree,
    listed,
    movement,
    own_parents,
    refusal,
    tree_diff,
    tree_lock,
)

PROXY_NAMES = frozenset({"http_proxy", "https_proxy", "no_proxy", "all_proxy"})


def run_job(
    params: dict[str, Any], job: Path, work: Path, hear: Callable[[int, bytes], None]
) -> tuple[int, str]:
    """Run the script of ``job`` in a container of the engine image: (exit code, stderr)."""
    tools = EngineTools(params["docker_socket"], params["image"])
    tools.need_image()
    # We hold the lock, so a container of this name belongs to a run that died; what it brought is kept.
    purpose = "fetch-" + hashlib.sha256(str(work).encode()).hexdigest()[:12]
    argv, binds = ("python3", "/job/fetch.py"), (f"{job}:/job:ro", f"{work}:/fetch")
    code, _out, err = tools.run(purpose, argv, binds, hear, network="host")
    return code, err


def proxies() -> dict[str, str]:
    """Proxy settings of the task. They may hold a password, so they travel as a file, as the token does."""
    return {name: value for name, value in os.environ.items() if name.lower() in PROXY_NAMES}


def download(
    params: dict[str, Any], token: str, work: Path, files: list[FileSpec], progress: Progress
) -> None:
    """Bring files with huggingface_hub. Raises TreeError with the reason in words."""
    RUN_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    job = Path(tempfile.mkdtemp(prefix="fetch-", dir=RUN_DIR))
    output: list[str] = []
    pending = bytearray()

    def hear(kind: int, data: bytes) -> None:
        if kind != 1:
            return
        pending.extend(data)
        while b"\n" in pending:
            line, _nl, rest = bytes(pending).partition(b"\n")
            pending[:] = rest
            output.append(line.decode("utf-8", "replace"))
            del output[:-200]

    try:
        prefix = params["prefix"].strip("/")
        names = [f"{prefix}/{item.name}" if prefix else item.name for item in files]
        (job / "fetch.py").write_text(FETCH_SCRIPT, encoding="utf-8")
        (job / "token").touch(mode=0o600)
        (job / "token").write_text(token, encoding="utf-8")
        (job / "job.json").write_text(
            json.dumps(
                {
                    "endpoint": params["endpoint"],
                    "repo": params["repo"],
                    "revision": params["revision"],
                    "files": names,
                    "dest": "/fetch",
                    "home": "/fetch/.cache/home",
                    "parallel": params["parallel"],
                    "environment": proxies(),
                }
            ),
            encoding="utf-8",
        )
        with SizeWatch(work, tree_size(work), progress.set):
            code, err = run_job(params, job, work, hear)
    except DockerError as exc:
        raise TreeError(str(exc)) from exc
    finally:
        shutil.rmtree(job, ignore_errors=True)
    if pending:
        output.append(bytes(pending).decode("utf-8", "replace"))
    last = last_result(output)
    if code != 0 or not last.get("ok"):
        if not output:
            last = {"kind": "client", "message": err.strip()[-300:]}
        explain(last, params["repo"], params["revision"], bool(token), str(work))


def bring(
    params: dict[str, Any],
    token: str,
    root: Path,
    files: tuple[FileSpec, ...],
    *,
    proof: Proof,
    progress: Progress,
) -> Report:
    """Download what is missing, prove everything, give the tree its name."""
    own_parents(root.parent)
    stage = open_for_work(root)
    prefix = params["prefix"].strip("/")
    if prefix and not (stage / prefix).exists() and any(stage.iterdir()) and not (stage / ".cache").exists():
        # A damaged finished tree came back as the stage: put it where the download would put it.
        inner = stage.with_name(f"{stage.name}.inner")
        stage.replace(inner)
        (stage / prefix).parent.mkdir(parents=True)
        inner.replace(stage / prefix)
    work = stage / prefix if prefix else stage
    report = inspect(work, files, proof, rehash=False)
    prove(work, report, proof, params["parallel"])
    for attempt in (1, 2):
        if report.complete:
            break
        for spec, _why in report.wrong:
            with contextlib.suppress(OSError):
                (work / spec.name).unlink()
        for part in dead_parts(stage):
            with contextlib.suppress(OSError):
                part.unlink()
        needed = report.needed
        progress.step("download", report.needed_bytes)
        download(params, token, stage, needed, progress)
        report = inspect(work, files, proof)
        progress.step("proof", sum(item.size for item in report.unproven))
        prove(work, report, proof, params["parallel"], progress.add)
        write_proof(proof_path(root), proof)
        if report.complete:
            break
        if attempt == 2:
            first = (
                "; ".join(why for _spec, why in report.wrong[:3]) or f"{report.missing[0].name} did not come"
            )
            raise TreeError(
                f"{params['repo']} at {params['revision']} does not match its manifest after two downloads: "
                f"{first}. "
                "The endpoint serves other bytes than the lock names"
            )
    refuse_foreign(work, report.foreign)
    place(work, root)
    return report


def only(files: tuple[FileSpec, ...], names: list[str]) -> tuple[FileSpec, ...]:
    """The named files of a list; refuses a name that the list lacks."""
    if not names:
        return files
    absent = sorted(set(names) - {item.name for item in files})
    if absent:
        raise TreeError(
            f"the repository has no {', '.join(absent)} at this revision; correct the names or the revision"
        )
    return tuple(item for item in files if item.name in names)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            **TRANSFER_ARGS,
            **PROOF_ARGS,
            **PARALLEL_ARGS,
            **DOCKER_ARGS,
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "repo": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "dict", "default": []},
            "names": {"type": "list", "elements": "str", "default": []},
            "prefix": {"type": "str", "default": ""},
            "dest": {"type": "path", "required": True},
            "image": {"type": "str", "default": ""},
            "token": {"type": "str", "default": "", "no_log": True},
            "token_file": {"type": "path", "default": "", "no_log": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    root = Path(params["dest"])
    progress = Progress(Path(params["progress_file"]) if params["progress_file"] else None, "compare", 0)
    try:
        check_repo(params["repo"], params["revision"])
        hub = Hub(params["endpoint"], token_of(params))
        proof = read_proof(proof_path(root))
        pin = {key: params[key] for key in ("repo", "revision", "prefix", "names")}
        files = parse_files(params["files"], digests=False)
        if files and not all(item.sha256 or item.blob_id for item in files):
            # A lock made from headers has no digests of the small files; the pinned revision's list has.
            try:
                files = complete_digests(files, proof.listing if proof.meta == pin else ())
            except TreeError:
                files = complete_digests(
                    files, hub.listing(params["repo"], params["revision"], params["prefix"])
                )
        if not files:
            files = proof.listing if proof.meta == pin else ()
        if not files:
            files = only(hub.listing(params["repo"], params["revision"], params["prefix"]), params["names"])
        left = partial_path(root) / params["prefix"].strip("/")
        report, warnings, read = compare_tree(root, files, proof, params, progress=progress, left=left)
        fresh = read or manifest_digest(proof.listing) != manifest_digest(files) or proof.meta != pin
        before = report
        changed = not (report.complete and root.exists())
        proof.listing, proof.meta = files, pin
        if changed:
            # Whatever stands in the way is said before the first byte, in check mode too.
            hub.probe(
                params["repo"],
                params["revision"],
                "/".join(filter(None, [params["prefix"].strip("/"), (report.needed or list(files))[0].name])),
            )
            freed = sum(part.stat().st_size for part in dead_parts(partial_path(root)))
            refuse_space(
                root, report.needed_bytes - report.resumable - freed, params["reserve_bytes"], params["repo"]
            )
        lock = tree_lock(params["data_dir"], "fetch", root)
        diff = tree_diff(root, before, lock)
        if changed and not module.check_mode:
            with exclusive(lock, str(root)):
                report = bring(params, hub.token, root, files, proof=proof, progress=progress)
        if not module.check_mode and root.exists() and (changed or fresh):
            write_proof(proof_path(root), proof)
    except (TreeError, OSError) as exc:
        refusal(module, exc)
    finally:
        progress.close()
    more = {"msg": movement("fetch", before, root), "diff": diff} if changed else {"diff": []}
    end_tree(module, root, before, report, warnings, changed=changed, files=listed(files, proof), **more)


if __name__ == "__main__":
    main()
