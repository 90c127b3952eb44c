# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Lookup of a shipped engine profile."""

from __future__ import annotations

DOCUMENTATION = r"""
name: engine_profile
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Read an engine profile that the collection ships
description:
  - Gives the profile of that name from the role C(ranks) as data, for what is decided before the ranks are.
options:
  _terms:
    description: Names of profiles.
    required: true
    type: list
    elements: str
"""

EXAMPLES = r"""
- name: Show which runtime the engine asks for
  ansible.builtin.debug:
    msg: "{{ lookup('sparkfleet.serving.engine_profile', 'tensorfold_native').container.runtime | default('none') }}"
"""

RETURN = r"""
_raw:
  description: One profile a name.
  type: list
  elements: dict
"""

from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

PROFILES = Path(__file__).resolve().parents[2] / "roles" / "ranks" / "vars" / "engines"


class LookupModule(LookupBase):  # type: ignore[misc]
    """See DOCUMENTATION."""

    def run(self, terms: Any, variables: Any = None, **kwargs: Any) -> list[Any]:  # noqa: ARG002
        """The profiles by name; an unknown one is an error that lists the known ones."""
        known = {path.stem: path for path in sorted(PROFILES.glob("*.yml"))}
        unknown = [str(term) for term in terms if term not in known]
        if unknown:
            raise AnsibleLookupError(
                f"no engine profile {', '.join(unknown)}; wanted: one of {', '.join(known)}; "
                "remedy: correct sparkfleet_engine in the inventory, or give ranks_engine_profile"
            )
        return [yaml.safe_load(known[term].read_text(encoding="utf-8")) for term in terms]
