# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the modules that move and prove weights share: refusals in one form, predictions, tool lookup."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .tree import (
    FileSpec,
    Progress,
    Proof,
    Report,
    TreeError,
    human,
    inspect,
    partial_path,
    proof_path,
    prove,
    refuse_foreign,
)

#: Options of every module that moves or proves large files; documented by the fragment ``transfer``.
TRANSFER_ARGS: Mapping[str, Any] = {
    "data_dir": {"type": "path", "default": "/var/lib/sparkfleet"},
    "progress_file": {"type": "path", "default": ""},
}
PROOF_ARGS: Mapping[str, Any] = {
    "rehash": {"type": "bool", "default": False},
    "reserve_bytes": {"type": "int", "default": 5_000_000_000},
}
PARALLEL_ARGS: Mapping[str, Any] = {"parallel": {"type": "int", "default": 4}}
DOCKER_ARGS: Mapping[str, Any] = {"docker_socket": {"type": "path", "default": "/var/run/docker.sock"}}

#: Helper containers of ours carry this label with their purpose as value.
HELPER_LABEL = "sparkfleet.helper"
#: File names listed in a diff before it is cut short.
DIFF_LINES = 60


def refusal(module: Any, exc: Exception, **more: Any) -> NoReturn:
    """``fail_json`` with the node's own name in front."""
    node = os.uname().nodename
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        exc = TreeError(
            f"disk full at {exc.filename or 'the data directory'}; free space there and run again, what came is kept"
        )
    module.fail_json(msg=f"{node}: {exc}", node=node, refusal=type(exc).__name__, **more)
    raise AssertionError("unreachable")


def need_tool(name: str, package: str) -> str:
    """The absolute path of a program, or a refusal that names its package."""
    for folder in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        candidate = Path(folder) / name
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which(name)
    if found:
        return found
    raise TreeError(f"{name} is not installed; install the package {package}")


def listing(files: Sequence[FileSpec]) -> str:
    """Files with sizes, one a line, cut after ``DIFF_LINES``."""
    lines = [f"{item.name} {item.size}" for item in files[:DIFF_LINES]]
    if len(files) > DIFF_LINES:
        lines.append(f"and {len(files) - DIFF_LINES} more")
    return "".join(f"{line}\n" for line in lines)


def entry(header: str, before: str = "", after: str = "") -> dict[str, str]:
    """One entry of a diff. The header names the object: an absolute path, or ``KIND NAME``."""
    return {"before_header": header, "after_header": header, "before": before, "after": after}


def tree_diff(root: Path, report: Report, lock: Path) -> list[dict[str, str]]:
    """What bringing a tree changes: the tree, the proof beside it, and the lock file where it is new."""
    everything = sorted([*report.proven, *report.unproven, *report.needed], key=lambda item: item.name)
    kept = sorted([*report.proven, *report.unproven], key=lambda item: item.name)
    found = [entry(f"tree {root}", listing(kept), listing(everything)), entry(str(proof_path(root)))]
    return found if lock.exists() else [*found, entry(str(lock))]


def summary(report: Report) -> dict[str, Any]:
    """Counts of a report, as every module of this family returns them."""
    return {
        "complete": report.complete,
        "files_total": len(report.proven) + len(report.unproven) + len(report.needed),
        "files_needed": len(report.needed),
        "bytes_needed": report.needed_bytes,
        "bytes_resumable": report.resumable,
        "wrong": [f"{spec.name}: {why}" for spec, why in report.wrong],
    }


def listed(files: Sequence[FileSpec], proof: Proof) -> list[dict[str, Any]]:
    """A manifest as a result of a module, with the sha256 of what was proven."""
    proven = {name: seen.sha256 for name, seen in proof.files.items()}
    return [dict(item.as_dict(), sha256=proven.get(item.name, item.sha256)) for item in files]


def movement(verb: str, report: Report, root: Path) -> str:
    """``3 files, 1.20 GiB to fetch into PATH``."""
    return f"{len(report.needed)} files, {human(report.needed_bytes)} to {verb} into {root}"


def compare_tree(
    root: Path,
    files: Sequence[FileSpec],
    proof: Proof,
    params: Mapping[str, Any],
    *,
    progress: Progress,
    left: Path | None = None,
) -> tuple[Report, list[str], bool]:
    """(report, warnings, whether it was read) of a tree against its manifest, or of what an unfinished run left.

    Of a finished tree, whatever the proof does not cover is read. ``left``: where the unfinished one lies,
    if not where it is made.
    """
    report = inspect(root if root.exists() else left or partial_path(root), files, proof, params["rehash"])
    read = bool(report.unproven)
    if not root.exists():
        return report, [], read
    warnings = refuse_foreign(root, report.foreign)
    progress.step("proof", sum(item.size for item in report.unproven))
    prove(root, report, proof, params.get("parallel", 4), progress.add)
    return report, warnings, read


def end_tree(
    module: Any, root: Path, before: Report, after: Report, warnings: Sequence[str], **more: Any
) -> NoReturn:
    """End a module that brings a tree: counts of what was found, and whether it is whole now."""
    for text in warnings:
        module.warn(text)
    result = {**summary(before), "path": str(root), "complete": after.complete and root.exists(), **more}
    module.exit_json(**result)
    raise AssertionError("unreachable")


def lock_dir(data_dir: str) -> Path:
    """Where lock files live."""
    return Path(data_dir) / "locks"


def tree_lock(data_dir: str, kind: str, root: Path) -> Path:
    """The lock file of work on one tree."""
    return lock_dir(data_dir) / f"{kind}-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"


def own_parents(path: Path) -> None:
    """Make the parents of ``path``, readable for the unprivileged share and for containers."""
    missing = []
    place = path
    while not place.exists():
        missing.append(place)
        place = place.parent
    for item in reversed(missing):
        item.mkdir(mode=0o755)
        item.chmod(0o755)
