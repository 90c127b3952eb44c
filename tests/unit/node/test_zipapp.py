"""The agent as it is delivered: reproducible, self-contained, standard library only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from ansible_collections.sparkfleet.serving.plugins.plugin_utils.node_build import (
    build,
    install_path,
    sources,
)

ROOT = Path(__file__).parents[3]


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    first, digest = build(ROOT, "1.0.0")
    assert build(ROOT, "1.0.0") == (first, digest)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/build-node"), str(tmp_path / "agent")],
        capture_output=True,
        check=True,
    )
    assert digest in done.stdout.decode()
    assert install_path("1.0.0", digest) == f"/usr/local/lib/sparkfleet/1.0.0-{digest}/sparkfleet-node"


def test_it_runs_alone(tmp_path: Path) -> None:
    data, digest = build(ROOT, "9.9.9")
    path = tmp_path / "sparkfleet-node"
    path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-I", str(path), "version"], capture_output=True, check=True, cwd=tmp_path
    )
    told = json.loads(done.stdout)
    assert told["version"] == "9.9.9" and told["digest"] == digest
    shown = subprocess.run(
        [sys.executable, "-I", str(path), "--help"], capture_output=True, check=True, text=True
    )
    for command in ("rank", "peer", "gid", "gate", "show", "version"):
        assert command in shown.stdout


def test_only_the_standard_library_is_imported() -> None:
    for name, text in sources(ROOT).items():
        for item in ast.walk(ast.parse(text)):
            names = []
            if isinstance(item, ast.Import):
                names = [alias.name for alias in item.names]
            elif isinstance(item, ast.ImportFrom) and not item.level:
                names = [item.module or ""]
            for imported in names:
                top = imported.partition(".")[0]
                ours = top in ("ansible_collections", "sparkfleet_node")
                assert ours or top in sys.stdlib_module_names, f"{name} imports {imported}"


def test_nothing_else_is_packed(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    path.write_bytes(build(ROOT, "1")[0])
    names = zipfile.ZipFile(path).namelist()
    assert not [name for name in names if "/modules/" in name or name.endswith(("split.py", "budget.py"))]
