# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Lookup of the packed node agent."""

from __future__ import annotations

DOCUMENTATION = r"""
name: node_agent
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Pack the node agent and tell where it belongs
description:
  - Packs the agent of this collection into one reproducible zipapp on the controller, below
    C($XDG_CACHE_HOME/sparkfleet) (C(~/.cache/sparkfleet)), and returns where it is and where a node has it.
options: {}
"""

EXAMPLES = r"""
- name: Install the node agent
  ansible.builtin.copy:
    src: "{{ agent.path }}"
    dest: "{{ agent.dest }}"
    mode: "0755"
  vars:
    agent: "{{ lookup('sparkfleet.serving.node_agent') }}"
"""

RETURN = r"""
_raw:
  description: C(path) on the controller, C(sha256) of the file, C(version), C(digest) and C(dest) on a node.
  type: list
  elements: dict
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from ..plugin_utils.node_build import build, collection_version, install_path


class LookupModule(LookupBase):  # type: ignore[misc]
    """See DOCUMENTATION."""

    def run(self, terms: Any, variables: Any = None, **kwargs: Any) -> list[dict[str, str]]:  # noqa: ARG002
        """One dictionary; no terms are taken."""
        if terms or kwargs:
            raise AnsibleLookupError("sparkfleet.serving.node_agent takes no terms")
        collection = Path(__file__).resolve().parents[2]
        version = collection_version(collection)
        data, digest = build(collection, version)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkfleet"
        target = cache / f"{version}-{digest}" / "sparkfleet-node"
        try:
            if not target.is_file() or target.read_bytes() != data:
                target.parent.mkdir(parents=True, exist_ok=True)
                handle, temporary = tempfile.mkstemp(dir=str(target.parent))
                with os.fdopen(handle, "wb") as stream:
                    stream.write(data)
                Path(temporary).chmod(0o755)
                Path(temporary).replace(target)
        except OSError as error:
            raise AnsibleLookupError(f"cannot write the node agent to {cache}: {error}") from error
        return [
            {
                "path": str(target),
                "sha256": hashlib.sha256(data).hexdigest(),
                "version": f"{version}-{digest}",
                "digest": digest,
                "dest": install_path(version, digest),
            }
        ]
