#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A directory of hard links over proven trees."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tree_view
short_description: One directory over several proven trees
description:
  - Makes a directory whose files are hard links into trees that M(sparkfleet.serving.hub_fetch) has proven,
    under names that may differ, such as a checkpoint with the shards of an overlay in it.
  - It costs no bytes and reads none. The trees stay as they are, and their proof holds for the links too.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  dest:
    description: Directory that will hold exactly these links.
    type: path
    required: true
  layers:
    description: Name of a layer to its C(path) and C(files) (a manifest, as hub_fetch returns it).
    type: dict
    required: true
  links:
    description:
      - What the view holds, a list of C(name) (in the view), C(layer) and C(source) (name in the layer).
      - Empty takes every file of every layer by its own name, which no two layers may share.
    type: list
    elements: dict
    default: []
  data_dir:
    description: Data directory of sparkfleet, for lock files.
    type: path
    default: /var/lib/sparkfleet
attributes:
  check_mode:
    description: Says what would be linked.
    support: full
  diff_mode:
    description: The files before and after.
    support: full
"""

EXAMPLES = r"""
- name: A checkpoint with one replaced shard
  sparkfleet.serving.tree_view:
    dest: /var/lib/sparkfleet/models/owner--name/aaaa-bbbb
    layers:
      base: {path: /var/lib/sparkfleet/models/owner--name/aaaa, files: "{{ base_fetch.files }}"}
      overlay: {path: /var/lib/sparkfleet/models/other--overlay/bbbb, files: "{{ overlay_fetch.files }}"}
    links: "{{ planned.overlay.links }}"
"""

RETURN = r"""
complete:
  description: Every link is there.
  type: bool
  returned: always
path:
  description: The directory.
  type: str
  returned: always
files:
  description: The manifest of the view.
  type: list
  elements: dict
  returned: always
files_needed:
  description: Links that were (check mode, would be) made.
  type: int
  returned: always
"""

import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.overlay import every_file, inspect_view, link_into, parse_layers, parse_links, proof_of
from ..module_utils.tree import (
    TreeError,
    exclusive,
    partial_path,
    place,
    proof_path,
    read_proof,
    refuse_foreign,
    write_proof,
)
from ..module_utils.weights_module import own_parents, refusal, summary, tree_diff, tree_lock


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "layers": {"type": "dict", "required": True},
            "links": {"type": "list", "elements": "dict", "default": []},
            "data_dir": {"type": "path", "default": "/var/lib/sparkfleet"},
        },
        supports_check_mode=True,
    )
    params = module.params
    root = Path(params["dest"])
    try:
        layers = parse_layers(params["layers"])
        wanted = parse_links(params["links"] or every_file(layers), layers)
        report = before = inspect_view(root, wanted)
        warnings = refuse_foreign(root, report.foreign)
        changed = not report.complete
        lock = tree_lock(params["data_dir"], "view", root)
        diff = tree_diff(root, before, lock)
        if not module.check_mode and all(layer.path.is_dir() for layer in layers.values()):
            proof = proof_of(
                wanted, {layer.path: read_proof(proof_path(layer.path)) for layer in layers.values()}
            )
            if changed:
                own_parents(lock.parent)
                with exclusive(lock, str(root)):
                    own_parents(root.parent)
                    if root.is_dir():
                        link_into(root, wanted, before.needed)
                    else:
                        work = partial_path(root)
                        shutil.rmtree(work, ignore_errors=True)  # links of a run that died: nothing is lost
                        work.mkdir(mode=0o755)
                        link_into(work, wanted, before.needed)
                        place(work, root)
                report = inspect_view(root, wanted)
            if read_proof(proof_path(root)) != proof:
                write_proof(proof_path(root), proof)
        elif changed and not module.check_mode:
            raise TreeError(
                f"the layers of {root} are not there: {[str(one.path) for one in layers.values()]}"
            )
    except (TreeError, OSError) as exc:
        refusal(module, exc)
    for text in warnings:
        module.warn(text)
    result = summary(before)
    result.update(
        changed=changed,
        complete=report.complete,
        path=str(root),
        files=[spec.as_dict() for spec, _source in wanted],
        diff=diff if changed else [],
    )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
