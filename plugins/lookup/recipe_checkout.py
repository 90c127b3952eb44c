# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Lookup of the seed recipe's pins."""

from __future__ import annotations

DOCUMENTATION = r"""
name: recipe_checkout
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
short_description: Read pins and patches from a checkout of the seed recipe
description:
  - Reads C(scripts/config.sh) and C(zig/patches) of the user's own checkout of the seed repository on the
    controller, at exactly the given commit and without local changes. Nothing of it is executed.
options:
  _terms:
    description: Path of the checkout.
    required: true
  commit:
    description: The commit that the checkout must be at, 40 hex digits.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Show the pins
  ansible.builtin.debug:
    msg: "{{ lookup('sparkfleet.serving.recipe_checkout', '~/recipe', commit=recipe_commit).pins }}"
"""

RETURN = r"""
_raw:
  description: C(commit), C(pins) (variable to value), C(patches) (paths in order), C(other).
  type: list
  elements: dict
"""

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from ..plugin_utils.seed_recipe import CheckoutError, read_checkout


class LookupModule(LookupBase):  # type: ignore[misc]
    """See DOCUMENTATION."""

    def run(self, terms: Any, variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        """One dictionary a checkout."""
        self.set_options(var_options=variables, direct=kwargs)
        try:
            return [read_checkout(str(term), str(self.get_option("commit"))) for term in terms]
        except CheckoutError as error:
            raise AnsibleLookupError(str(error)) from error
