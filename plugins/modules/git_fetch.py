#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Bring a folder of a git repository at a commit to this node and prove it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: git_fetch
short_description: A folder of a git repository at one commit, proven by its blob ids
description:
  - Brings the files of one folder of a git repository at one commit into a directory, as real files and without a
    checkout around them.
  - Every file is compared with its blob id before the directory gets its final name.
  - What is proven is remembered by size, mtime and inode. A complete tree needs no network and no C(git).
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  repo:
    description:
      - URL of the repository (V(https), V(http), V(git), V(ssh) or V(file)), without a secret in it. What git on the
        node is configured with holds, such as a proxy or a credential helper.
    type: str
    required: true
  revision:
    description: Commit id, 40 hex digits.
    type: str
    required: true
  prefix:
    description: Folder of the repository that becomes the root of the tree.
    type: str
    default: ""
  dest:
    description: Directory that will hold exactly these files.
    type: path
    required: true
extends_documentation_fragment:
  - sparkfleet.serving.transfer
  - sparkfleet.serving.transfer.proof
attributes:
  check_mode:
    description:
      - Says how many files and bytes would come. What is not known yet is asked of the repository, in a directory that
        is removed.
    support: full
  diff_mode:
    description: The proven files before and after.
    support: full
"""

EXAMPLES = r"""
- name: The kernel kit from git
  sparkfleet.serving.git_fetch:
    repo: https://github.com/bertholomus/deepseek-v4.1-tensorfold-tp2-2xgb10
    revision: 0123456789abcdef0123456789abcdef01234567
    prefix: kit
    dest: /var/lib/sparkfleet/kit/github.com--bertholomus--deepseek-v4.1-tensorfold-tp2-2xgb10/0123456789abcdef0123
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

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.git_source import GitSource
from ..module_utils.tree import (
    FileSpec,
    Progress,
    Proof,
    Report,
    TreeError,
    exclusive,
    inspect,
    open_for_work,
    place,
    proof_path,
    prove,
    read_proof,
    refuse_foreign,
    refuse_space,
    write_proof,
)
from ..module_utils.weights_module import (
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


def bring(
    source: GitSource, root: Path, files: tuple[FileSpec, ...], proof: Proof, progress: Progress
) -> Report:
    """Write what is missing, prove everything, give the tree its name."""
    own_parents(root.parent)
    work = open_for_work(root)
    report = prove(work, inspect(work, files, proof), proof)
    progress.step("git", report.needed_bytes)
    for spec in report.needed:
        source.export(spec.name, work)
        progress.add(spec.size)
    report = prove(work, inspect(work, files, proof), proof)
    if not report.complete:
        raise TreeError(
            f"{work} does not hold what was written there: {report.wrong[0][1]}; look at the disk"
        )
    refuse_foreign(work, report.foreign)
    write_proof(proof_path(root), proof)
    place(work, root)
    return report


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            **TRANSFER_ARGS,
            **PROOF_ARGS,
            "repo": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "prefix": {"type": "str", "default": ""},
            "dest": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    root = Path(params["dest"])
    progress = Progress(Path(params["progress_file"]) if params["progress_file"] else None, "compare", 0)
    try:
        proof = read_proof(proof_path(root))
        pin: dict[str, Any] = {key: params[key] for key in ("repo", "revision", "prefix")}
        with GitSource(params["repo"], params["revision"], params["prefix"]) as source:
            progress.step("git")
            files = (proof.listing if proof.meta == pin else ()) or source.listing()
            report, warnings, read = compare_tree(root, files, proof, params, progress=progress)
            before, fresh = report, read or proof.meta != pin
            changed = not (report.complete and root.exists())
            proof.listing, proof.meta = files, pin
            lock = tree_lock(params["data_dir"], "fetch", root)
            diff = tree_diff(root, before, lock)
            if changed:
                # Whatever stands in the way is said before anything is written, in check mode too.
                source.listing()
                refuse_space(root, report.needed_bytes, params["reserve_bytes"], params["repo"])
            if changed and not module.check_mode:
                with exclusive(lock, str(root)):
                    report = bring(source, root, files, proof, progress)
            elif fresh and not module.check_mode:
                write_proof(proof_path(root), proof)
    except (TreeError, OSError) as exc:
        refusal(module, exc)
    finally:
        progress.close()
    more = {"msg": movement("fetch", before, root), "diff": diff} if changed else {"diff": []}
    end_tree(module, root, before, report, warnings, changed=changed, files=listed(files, proof), **more)


if __name__ == "__main__":
    main()
