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
  - Changes nothing. Where the tables are not there yet, only the file system is judged.
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
attributes:
  check_mode:
    description: Reads only.
    support: full
  diff_mode:
    description: Never changes anything.
    support: none
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
  description: Layer, rows and bytes a row of each table.
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
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.engram import judge, measure, mount_of, parse_mounts, refuse_mount, tables
from ..module_utils.tree import TreeError, nearest_existing
from ..module_utils.weights_module import refusal


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
        },
        supports_check_mode=True,
    )
    params = module.params
    path = Path(params["path"])
    found = []
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
    except (TreeError, OSError) as exc:
        refusal(module, exc)
    module.exit_json(
        changed=False,
        present=present,
        fstype=mount.fstype,
        tables=[{"layer": one.layer, "rows": one.rows, "row_bytes": one.row_bytes} for one in found],
        latency_us=round(latency, 1),
        verdict=verdict,
    )


if __name__ == "__main__":
    main()
