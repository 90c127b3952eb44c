#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Make a tree of files here equal to a manifest, from another node over the fabric."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tree_copy
short_description: A proven copy of a tree from another node
description:
  - Compares a directory with a manifest and brings what is missing from a share that
    M(sparkfleet.serving.fabric_share) opened on another node.
  - Several files at once; a killed copy resumes; every file is proven by sha256; the directory gets its final
    name only when all of it is proven.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  state:
    description:
      - V(compared) only looks and never changes anything.
      - V(present) brings what is missing.
    type: str
    choices: [compared, present]
    default: present
  dest:
    description: Directory that will hold exactly these files.
    type: path
    required: true
  files:
    description: The manifest, a list of C(name), C(size) and C(sha256) (or C(blob_id)).
    type: list
    elements: dict
    required: true
  source:
    description: C(address), C(port) and C(folder) of the share. Needed for V(present) outside check mode.
    type: dict
    default: {}
  meta:
    description: Facts about the tree that are kept with its proof, such as the weights that it was made from.
    type: dict
    default: {}
  rate_limit_kib:
    description: Bound of one file's rate in KiB/s, to spare a link that also serves. 0 is no bound.
    type: int
    default: 0
extends_documentation_fragment:
  - sparkfleet.serving.transfer
  - sparkfleet.serving.transfer.proof
  - sparkfleet.serving.transfer.parallel
attributes:
  check_mode:
    description: Says how many files and bytes would come; opens no connection.
    support: full
  diff_mode:
    description: The proven files before and after.
    support: full
"""

EXAMPLES = r"""
- name: Engram tables from the head
  sparkfleet.serving.tree_copy:
    dest: /var/lib/sparkfleet/engram/deepseek-ai--DeepSeek-V4.1-Flash/dba1be0a40aa45a94ad051997016db3960a90277
    files: "{{ hostvars['spark-1'].__engram_fetch.files }}"
    source: {address: 10.77.0.1, port: 29873}
"""

RETURN = r"""
complete:
  description: Every file is there and proven.
  type: bool
  returned: always
needed:
  description: Something has (after V(present), had) to be brought.
  type: bool
  returned: always
files_needed:
  description: Files that were (check mode, would be) copied.
  type: int
  returned: always
bytes_needed:
  description: Their bytes.
  type: int
  returned: always
seconds:
  description: How long the copy with its proof took.
  type: float
  returned: when something was copied
"""

import contextlib
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.fabric_copy import SizeWatch, parse_source, pull, runner
from ..module_utils.tree import (
    Progress,
    TreeError,
    exclusive,
    inspect,
    manifest_digest,
    open_for_work,
    parse_files,
    place,
    proof_path,
    prove,
    read_proof,
    refuse_foreign,
    refuse_space,
    write_proof,
)
from ..module_utils.weights_module import (
    PARALLEL_ARGS,
    PROOF_ARGS,
    TRANSFER_ARGS,
    compare_tree,
    end_tree,
    movement,
    need_tool,
    own_parents,
    refusal,
    summary,
    tree_diff,
    tree_lock,
)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            **TRANSFER_ARGS,
            **PROOF_ARGS,
            **PARALLEL_ARGS,
            "state": {"type": "str", "choices": ["compared", "present"], "default": "present"},
            "dest": {"type": "path", "required": True},
            "files": {"type": "list", "elements": "dict", "required": True},
            "source": {"type": "dict", "default": {}},
            "meta": {"type": "dict", "default": {}},
            "rate_limit_kib": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    params = module.params
    root = Path(params["dest"])
    progress = Progress(Path(params["progress_file"]) if params["progress_file"] else None, "compare", 0)
    seconds = 0.0
    try:
        files = parse_files(params["files"])
        if not files:
            raise TreeError(f"the manifest of {root} is empty: nothing could be proven")
        proof = read_proof(proof_path(root))
        report, warnings, read = compare_tree(root, files, proof, params, progress=progress)
        fresh = (
            read or manifest_digest(proof.listing) != manifest_digest(files) or proof.meta != params["meta"]
        )
        before = report
        needed = not (report.complete and root.exists())
        proof.listing, proof.meta = files, params["meta"]
        changed = needed and params["state"] == "present"
        lock = tree_lock(params["data_dir"], "copy", root)
        diff = tree_diff(root, before, lock)
        if needed:
            refuse_space(root, report.needed_bytes - report.resumable, params["reserve_bytes"], str(root))
        if changed and not module.check_mode:
            source = parse_source(params["source"])
            rsync = need_tool("rsync", "rsync")
            own_parents(lock.parent)
            started = time.monotonic()
            with exclusive(lock, str(root)) as handle:
                own_parents(root.parent)
                work = open_for_work(root)
                report = inspect(work, files, proof)
                refuse_foreign(work, report.foreign)
                prove(work, report, proof, params["parallel"])
                progress.step(f"copy from {source.address}", report.needed_bytes)
                base = sum(item.size for item in report.proven)
                try:
                    with SizeWatch(work, base, progress.set):
                        pull(
                            rsync,
                            source,
                            work,
                            report.needed,
                            proof,
                            run=runner(handle),
                            parallel=params["parallel"],
                            limit_kib=params["rate_limit_kib"],
                        )
                except TreeError:
                    with contextlib.suppress(OSError):  # a full disk must not hide why the copy ended
                        write_proof(proof_path(root), proof)
                    raise
                write_proof(proof_path(root), proof)
                report = inspect(work, files, proof)
                if not report.complete:
                    raise TreeError(f"{root} is not whole after the copy: {summary(report)}")
                place(work, root)
            seconds = time.monotonic() - started
        if not module.check_mode and fresh and root.exists():
            write_proof(proof_path(root), proof)  # a proof is knowledge, not a change of the node's files
    except (TreeError, OSError) as exc:
        refusal(module, exc)
    finally:
        progress.close()
    more: dict[str, Any] = {"msg": movement("copy", before, root)} if needed else {}
    if seconds:
        more["seconds"] = round(seconds, 2)
    end_tree(
        module,
        root,
        before,
        report,
        warnings,
        changed=changed,
        needed=needed,
        diff=diff if changed else [],
        **more,
    )


if __name__ == "__main__":
    main()
