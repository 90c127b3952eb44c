#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Make the files that a git copy of the kernel kit lacks."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kit_files
short_description: RoPE tables and image-routing data of a kernel kit from git
description:
  - Runs the kit's own scripts in a container of the engine image without network, in a directory of its own beside the
    kit, and compares what they made with the kit's MANIFEST.
  - The image-routing data is copied out of the original release, of which only these tensors are read, by ranges.
  - What was made is remembered with the release that it came from. A second run reads nothing and needs no network.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  kit:
    description: The kit that M(sparkfleet.serving.hub_fetch) has proven.
    type: path
    required: true
  dest:
    description: Directory that will hold exactly the files of O(names).
    type: path
    required: true
  names:
    description: The files that the kit lacks.
    type: list
    elements: str
    required: true
  model_dir:
    description: The checkpoint, for its config.
    type: path
    required: true
  original_endpoint:
    description: URL of the Hub that has the original release.
    type: str
    default: https://huggingface.co
  original_repo:
    description: The original release, C(OWNER/NAME). Needed for the image-routing data.
    type: str
    default: ""
  original_revision:
    description: Its commit id, 40 hex digits.
    type: str
    default: ""
  token:
    description: Access token.
    type: str
    default: ""
  token_file:
    description: A file on the node that holds the token, used when O(token) is empty and the file exists.
    type: path
    default: ""
  digests:
    description: File to the sha256 that is wanted instead of the one in MANIFEST.
    type: dict
    default: {}
  rope_source:
    description: Directory on the node that the RoPE script may import from, for a script that needs one.
    type: path
    default: ""
  image:
    description: Engine image with C(python3) and PyTorch. Needed only when something is missing.
    type: str
    default: ""
extends_documentation_fragment:
  - sparkfleet.serving.transfer
  - sparkfleet.serving.transfer.proof
  - sparkfleet.serving.transfer.docker
attributes:
  check_mode:
    description: Says what would be made.
    support: full
  diff_mode:
    description: The files before and after.
    support: full
"""

EXAMPLES = r"""
- name: What the kit from git lacks
  sparkfleet.serving.kit_files:
    kit: /var/lib/sparkfleet/kit/owner--kit/aaaa
    dest: /var/lib/sparkfleet/kit/owner--kit/aaaa-bbbb-made
    names: [rope-plain-cos.f32, rope-plain-sin.f32, rope-compressed-cos.f32, rope-compressed-sin.f32]
    model_dir: /var/lib/sparkfleet/models/owner--name/cccc
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
  description: The manifest with what was proven. In check mode, of files that are not there, names alone.
  type: list
  elements: dict
  returned: always
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import DockerError
from ..module_utils.engine_tools import EngineTools
from ..module_utils.fabric_copy import SizeWatch
from ..module_utils.hub_client import check_repo, token_of
from ..module_utils.kit import (
    BIAS,
    ROPE_DOCUMENT,
    ROPE_ROW_BYTES,
    ROPE_TABLES,
    read_manifest,
    rows_by_document,
)
from ..module_utils.kit_files import make_bias, make_tables, refuse_other, small_original
from ..module_utils.model_lock import HubClient
from ..module_utils.safetensors import PlanError
from ..module_utils.tree import (
    FileSpec,
    Progress,
    Proof,
    Seen,
    TreeError,
    digest_file,
    exclusive,
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
    own_parents,
    refusal,
    summary,
    tree_diff,
    tree_lock,
)

#: In the place of the digest of a file that is still to be made.
UNKNOWN = "0" * 40


class Maker:
    """Makes the files in a directory of its own."""

    def __init__(self, params: dict[str, Any], progress: Progress) -> None:
        self._params = params
        self._progress = progress
        self._kit = Path(params["kit"])
        self._tools = EngineTools(params["docker_socket"], params["image"])

    def _run(
        self, purpose: str, argv: Sequence[str], binds: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[int, str, str]:
        return self._tools.run(f"kit-{purpose}", argv, binds, environment=environment)

    def make(self, work: Path) -> None:
        """Everything that is wanted into the empty directory ``work``. Raises TreeError or PlanError."""
        self._tools.need_image()
        names = set(self._params["names"])
        if names & set(ROPE_TABLES):
            self._tables(work)
        if BIAS in names:
            self._bias(work)
        for path in sorted(work.rglob("*"), reverse=True):
            if path.is_file() and path.relative_to(work).as_posix() not in names:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _tables(self, work: Path) -> None:
        document = self._kit / ROPE_DOCUMENT
        try:
            raw = document.read_bytes()
        except OSError as exc:
            raise TreeError(f"{document} cannot be read ({exc.strerror}): this is not a kit") from exc
        need = len(ROPE_TABLES) * rows_by_document(raw, str(document)) * ROPE_ROW_BYTES
        refuse_space(work, need, self._params["reserve_bytes"], "RoPE tables")
        (work / ROPE_DOCUMENT).write_bytes(raw)
        self._progress.step("RoPE tables", need)
        with SizeWatch(work, 0, self._progress.set):
            make_tables(self._run, self._kit, self._params["model_dir"], work, self._params["rope_source"])

    def _bias(self, work: Path) -> None:
        params = self._params
        if not params["original_repo"]:
            raise TreeError(
                f"the kit lacks {BIAS}, which comes out of the original release: name it in rank_files_original_repo "
                "and rank_files_original_revision"
            )
        check_repo(params["original_repo"], params["original_revision"])
        client = HubClient(
            params["original_endpoint"],
            params["original_repo"],
            params["original_revision"],
            token_of(params),
        )
        original = work / ".original"
        self._progress.step("image-routing data", 0)
        small_original(client, original)
        make_bias(self._run, self._kit, original, work)
        shutil.rmtree(original)


def bring(params: dict[str, Any], root: Path, pin: dict[str, Any], progress: Progress) -> Proof:
    """Make the files aside, compare them with MANIFEST, give the directory its name: the proof of it."""
    source = f"{params['original_repo']} at {params['original_revision'][:12]}"
    manifest = {**read_manifest(Path(params["kit"])), **params["digests"]}
    own_parents(root.parent)
    work = partial_path(root)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o755)
    try:
        Maker(params, progress).make(work)
        absent = [name for name in params["names"] if not (work / name).is_file()]
        if absent:
            raise TreeError(f"the kit's scripts ended well, but did not make {', '.join(absent)}")
        proof = Proof(meta=pin)
        for name in params["names"]:
            path = work / name
            path.chmod(0o644)
            sha256, _blob = digest_file(path, path.stat().st_size, False)
            proof.files[name] = Seen.of(path.stat(), sha256)
        refuse_other(manifest, {name: seen.sha256 for name, seen in proof.files.items()}, source)
        proof.listing = tuple(
            FileSpec(name, (work / name).stat().st_size, proof.files[name].sha256) for name in params["names"]
        )
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(root, ignore_errors=True)
    write_proof(proof_path(root), proof)
    place(work, root)
    return proof


def refuse_strangers(root: Path, names: Sequence[str]) -> None:
    """Refuse a directory with files that are not of ours: it is made anew as a whole. Raises TreeError."""
    if names:
        raise TreeError(f"{root} holds {', '.join(names[:5])}, which nothing of ours made; move it elsewhere")


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            **TRANSFER_ARGS,
            **PROOF_ARGS,
            **DOCKER_ARGS,
            "kit": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "names": {"type": "list", "elements": "str", "required": True},
            "model_dir": {"type": "path", "required": True},
            "original_endpoint": {"type": "str", "default": "https://huggingface.co"},
            "original_repo": {"type": "str", "default": ""},
            "original_revision": {"type": "str", "default": ""},
            "token": {"type": "str", "default": "", "no_log": True},
            "token_file": {"type": "path", "default": "", "no_log": False},
            "digests": {"type": "dict", "default": {}},
            "rope_source": {"type": "path", "default": ""},
            "image": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    params["names"] = sorted(set(params["names"]))
    root = Path(params["dest"])
    progress = Progress(Path(params["progress_file"]) if params["progress_file"] else None, "compare", 0)
    try:
        unmade = tuple(FileSpec(name, 0, "", UNKNOWN) for name in params["names"])
        # The digest is part of the pin: files that were taken under one word are looked at again under another.
        pin = {key: params[key] for key in ("kit", "original_repo", "original_revision", "digests")}
        proof = read_proof(proof_path(root))
        if proof.meta != pin or [spec.name for spec in proof.listing] != params["names"]:
            proof = Proof(listing=unmade)
        report = inspect(root, proof.listing, proof, params["rehash"])
        if root.is_dir():
            refuse_strangers(root, [name for name in report.foreign if name not in params["names"]])
            prove(root, report, proof, 1)
        before = report
        changed = not report.complete
        lock = tree_lock(params["data_dir"], "kit", root)
        diff = tree_diff(root, before, lock)
        if changed and not module.check_mode:
            own_parents(lock.parent)
            with exclusive(lock, str(root)):
                proof = bring(params, root, pin, progress)
            report = inspect(root, proof.listing, proof)
    except (TreeError, PlanError, DockerError, OSError) as exc:
        refusal(module, exc)
    finally:
        progress.close()
    result = summary(before)
    result.update(
        changed=changed,
        complete=report.complete,
        path=str(root),
        files=[spec.as_dict() for spec in proof.listing],
        diff=diff if changed else [],
    )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
