# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Pack the node agent: ``node/sparkfleet_node`` and what it imports of ``module_utils`` into one zipapp.

Reproducible: the same sources give the same bytes on every controller. Entries are sorted, stored without
compression (the output of a compressor depends on its version) and dated 1980. Runs on the controller.
"""

from __future__ import annotations

import ast
import hashlib
import io
import zipfile
from pathlib import Path

PACKAGE = "ansible_collections.sparkfleet.serving.plugins.module_utils"
#: Isolated mode: neither PYTHON* variables nor a user's site directory change what root runs.
SHEBANG = b"#!/usr/bin/env -S /usr/bin/python3 -I\n"
MAIN = "import sys\n\nfrom sparkfleet_node.cli import main\n\nsys.exit(main())\n"
INSTALL_ROOT = "/usr/local/lib/sparkfleet"


def _imported(path: Path, package: list[str], root: Path) -> set[Path]:
    """Files of ``module_utils`` that one file imports; ``package`` is its own package below module_utils."""
    found: set[Path] = set()
    for item in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        names: list[list[str]] = []
        if isinstance(item, ast.ImportFrom) and item.level:
            base = package[: len(package) - (item.level - 1)]
            stem = [*base, *(item.module.split(".") if item.module else [])]
            names = [stem, *([*stem, alias.name] for alias in item.names)]
        elif isinstance(item, ast.ImportFrom) and (item.module or "").startswith(PACKAGE):
            stem = (item.module or "")[len(PACKAGE) :].strip(".").split(".")
            stem = [part for part in stem if part]
            names = [stem, *([*stem, alias.name] for alias in item.names)]
        for name in names:
            for candidate in (root.joinpath(*name).with_suffix(".py"), root.joinpath(*name, "__init__.py")):
                if name and candidate.is_file():
                    found.add(candidate)
    return found


def sources(collection: Path) -> dict[str, str]:
    """Name in the archive → text, of everything that is packed."""
    utils = collection / "plugins" / "module_utils"
    files = {
        f"sparkfleet_node/{path.name}": path
        for path in sorted((collection / "node" / "sparkfleet_node").glob("*.py"))
    }
    wanted: set[Path] = set()
    todo: list[tuple[Path, list[str]]] = [(path, []) for path in files.values()]
    while todo:
        path, package = todo.pop()
        for found in _imported(path, package, utils) - wanted:
            wanted.add(found)
            todo.append((found, list(found.relative_to(utils).parts[:-1])))
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    base = PACKAGE.replace(".", "/")
    for path in wanted:
        texts[f"{base}/{path.relative_to(utils).as_posix()}"] = path.read_text(encoding="utf-8")
    # Namespace packages inside a zip need directory entries; plain packages do not.
    for name in list(texts):
        parts = name.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            texts.setdefault("/".join([*parts[:depth], "__init__.py"]), "")
    texts["__main__.py"] = MAIN
    return texts


def build(collection: Path, version: str) -> tuple[bytes, str]:
    """The zipapp and the first 12 hex digits of the sha256 of its sources.

    The name of an agent version is ``<collection version>-<digest>``: equal sources install to one path.
    """
    texts = sources(collection)
    seal = hashlib.sha256()
    for name in sorted(texts):
        data = texts[name].encode("utf-8")
        seal.update(f"{name}\0{len(data)}\0".encode() + data)
    digest = seal.hexdigest()[:12]
    mark = texts["sparkfleet_node/__init__.py"]
    mark = mark.replace('VERSION = "source"', f'VERSION = "{version}"')
    texts["sparkfleet_node/__init__.py"] = mark.replace('DIGEST = "unpacked"', f'DIGEST = "{digest}"')
    out = io.BytesIO()
    out.write(SHEBANG)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(texts):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.create_system = 3
            archive.writestr(entry, texts[name].encode("utf-8"))
    return out.getvalue(), digest


def collection_version(collection: Path) -> str:
    """The version in galaxy.yml, or in MANIFEST.json of an installed collection."""
    galaxy = collection / "galaxy.yml"
    if galaxy.is_file():
        for line in galaxy.read_text(encoding="utf-8").splitlines():
            if line.startswith("version:"):
                return line.partition(":")[2].strip().strip("\"'")
    manifest = collection / "MANIFEST.json"
    if manifest.is_file():
        import json

        return str(json.loads(manifest.read_text(encoding="utf-8"))["collection_info"]["version"])
    return "0"


def install_path(version: str, digest: str) -> str:
    """Where a node has this agent."""
    return f"{INSTALL_ROOT}/{version}-{digest}/sparkfleet-node"
