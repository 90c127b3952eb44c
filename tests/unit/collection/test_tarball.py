"""The release tarball holds what a user needs and nothing that only developers need."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_collection_builds_a_clean_tarball(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    # Tracked files as they are in the working tree: what a fresh clone would build from.
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listing.decode().split("\0")):
        source, target = ROOT / name, clone / name
        if not source.exists() and not source.is_symlink():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    subprocess.run(
        ["ansible-galaxy", "collection", "build", str(clone), "--output-path", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    (tarball,) = tmp_path.glob("sparkfleet-serving-*.tar.gz")
    with tarfile.open(tarball) as archive:
        names = archive.getnames()
    tops = {name.split("/", 1)[0] for name in names}
    assert not tops & {
        "collections",
        "lab",
        "tests",
        "molecule",
        "bench",
        "Makefile",
        ".ci",
        ".config",
        ".venv",
        ".lab",
    }
    assert {
        "plugins",
        "roles",
        "playbooks",
        "inventory",
        "templates",
        "models",
        "node",
        "README.md",
        "LICENSE",
    } <= tops
    assert not [name for name in names if name.startswith("playbooks/collections") or "__pycache__" in name]
    assert not [name for name in names if name.startswith("inventory/lab")]
