#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Check that Engram tables are local, whole and fast enough."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engram_check
short_description: Engram tables local, whole and fast enough
description:
  - Refuses a directory on a network or unknown file system, broken or missing table halves, and a disk whose
    4 KiB random reads are of network class.
  - Where the tables are not there yet, only the file system is judged.
  - Changes nothing but, with O(proof), the file that remembers their digests.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  path:
    description: Directory of the tables.
    type: path
    required: true
  layers:
    description: Layers that must have a table, from the model's configuration. Empty takes what is there.
    type: list
    elements: int
    default: []
  extra_fstypes:
    description: File system types accepted beside the known local ones.
    type: list
    elements: str
    default: []
  latency_limit_us:
    description: Largest accepted median of a 4 KiB random read in microseconds.
    type: float
    default: 400
  latency_policy:
    description: What a slower disk is.
    type: str
    choices: [refuse, warn]
    default: refuse
  samples:
    description: Reads a measurement.
    type: int
    default: 256
  proof:
    description:
      - File in which the sha256 of the table files are kept, by size, mtime and inode, for tables that came from
        elsewhere and have no manifest. With it RV(files) has digests; every file is read once.
    type: path
    default: ""
  rehash:
    description: With O(proof), read every byte again.
    type: bool
    default: false
  share:
    description: Name of the share that is in use; other shares of Engram tables are RV(shares_left).
    type: str
    default: ""
  docker_socket:
    description: Socket of the Docker engine, asked for volumes of earlier shares.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    description: Judges the same; with O(proof) reads the files and keeps nothing.
    support: full
  diff_mode:
    description: Names the proof.
    support: full
"""

EXAMPLES = r"""
- name: Tables are local and fast
  sparkfleet.serving.engram_check:
    path: /var/lib/sparkfleet/engram/deepseek-ai--DeepSeek-V4.1-Flash/dba1be0a40aa45a94ad051997016db3960a90277
    layers: [1, 14]
"""

RETURN = r"""
present:
  description: The directory has tables.
  type: bool
  returned: always
fstype:
  description: File system of the directory (or of its nearest existing parent).
  type: str
  returned: always
tables:
  description: Layer, rows, bytes a row and file names of the halves of each table.
  type: list
  elements: dict
  returned: always
files:
  description: With O(proof), the manifest of the table files (C(name), C(size), C(sha256)).
  type: list
  elements: dict
  returned: always
latency_us:
  description: Median of a 4 KiB random read; 0 when nothing was measured.
  type: float
  returned: always
verdict:
  description: The latency in words.
  type: str
  returned: always
shares_left:
  description:
    - NFS exports and Docker volumes of Engram tables on this node, made for another placement or revision, in words.
      Volumes are left out where Docker does not answer.
  type: list
  elements: str
  returned: always
"""

import contextlib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import shares
from ..module_utils.docker_api import DockerApi, DockerError
from ..module_utils.engram import Table, judge, measure, mount_of, parse_mounts, refuse_mount, tables
from ..module_utils.tree import (
    FileSpec,
    Proof,
    Seen,
    TreeError,
    digest_file,
    nearest_existing,
    read_proof,
    write_proof,
)
from ..module_utils.weights_module import entry, own_parents, refusal

EXPORTS_D = Path("/etc/exports.d")


def digests(path: Path, found: list[Table], known: Proof) -> tuple[list[FileSpec], Proof]:
    """Manifest of the files that hold the tables; only what ``known`` does not cover is read."""
    fresh = Proof(meta={"path": str(path)})
    names = sorted({name for table in found for name in (table.weight_file, table.scale_file)})
    for name in names:
        info = (path / name).stat()
        seen = known.files.get(name)
        if seen is None or not known.covers(FileSpec(name, seen.size, seen.sha256), info):
            sha256, _blob = digest_file(path / name, info.st_size, False)
            after = (path / name).stat()
            if (after.st_size, after.st_mtime_ns) != (info.st_size, info.st_mtime_ns):
                raise TreeError(f"{path / name} changed while it was read: something else writes there")
            seen = Seen.of(after, sha256)
        fresh.files[name] = seen
    return [FileSpec(name, seen.size, seen.sha256) for name, seen in sorted(fresh.files.items())], fresh


def shares_left(name: str, docker_socket: str) -> list[str]:
    """Shares of Engram tables on this node but the one that is in use, in words."""
    found = shares.exports(EXPORTS_D)
    if Path(docker_socket).exists():
        # Told, not judged: a Docker that does not answer is somebody else's refusal.
        with contextlib.suppress(DockerError):
            found += shares.volumes(DockerApi(docker_socket).volume_list("=".join(shares.LABEL)))
    return [one.text for one in found if one.name != name]


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "layers": {"type": "list", "elements": "int", "default": []},
            "extra_fstypes": {"type": "list", "elements": "str", "default": []},
            "latency_limit_us": {"type": "float", "default": 400.0},
            "latency_policy": {"type": "str", "choices": ["refuse", "warn"], "default": "refuse"},
            "samples": {"type": "int", "default": 256},
            "proof": {"type": "path", "default": ""},
            "rehash": {"type": "bool", "default": False},
            "share": {"type": "str", "default": ""},
            "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    params = module.params
    path = Path(params["path"])
    found: list[Table] = []
    files: list[FileSpec] = []
    changed = False
    latency = 0.0
    verdict = "not measured: the tables are not there yet"
    try:
        place = nearest_existing(path).resolve()
        mount = mount_of(str(place), parse_mounts(Path("/proc/self/mountinfo").read_text(encoding="utf-8")))
        refuse_mount(str(path), mount, params["extra_fstypes"])
        present = path.is_dir()
        if present:
            found = tables(path, params["layers"])
            largest = max(path.glob("*.safetensors"), key=lambda item: item.stat().st_size)
            judged = judge(measure(largest, params["samples"]), params["latency_limit_us"])
            for seed in (2, 3):
                if judged.local:
                    break
                # A disk that was busy for a moment is not a network: it is asked again before it is refused.
                again = judge(measure(largest, params["samples"], seed), params["latency_limit_us"])
                judged = min(judged, again, key=lambda one: one.median_us)
            latency, verdict = judged.median_us, judged.text
            if not judged.local:
                text = f"{path}: {verdict}. Put the tables on a local NVMe"
                if params["latency_policy"] == "refuse":
                    raise TreeError(f"{text}, or set engram_latency_policy to warn")
                module.warn(text)
            if params["proof"]:
                keep = Path(params["proof"])
                known = read_proof(keep)
                files, fresh = digests(path, found, Proof() if params["rehash"] else known)
                changed = fresh != known
                if changed and not module.check_mode:
                    own_parents(keep.parent)
                    write_proof(keep, fresh)
        left = shares_left(params["share"], params["docker_socket"])
    except (TreeError, OSError) as exc:
        refusal(module, exc)
    module.exit_json(
        changed=changed,
        diff=[entry(params["proof"])] if changed else [],
        present=present,
        fstype=mount.fstype,
        tables=[vars(one) for one in found],
        files=[one.as_dict() for one in files],
        latency_us=round(latency, 1),
        verdict=verdict,
        shares_left=left,
    )


if __name__ == "__main__":
    main()
