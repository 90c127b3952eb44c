# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters over what the host roles found on the members of one replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils.clocks import Reading, parity


def clock_parity(names: Any, facts: Any, key: str = "__gpu_clocks_result") -> list[str]:
    """Sentences about clocks that differ between the hosts `names`; none when they agree.

    `facts` maps host names to variables (`hostvars`); `key` is the registered result of the module
    gpu_clocks. A host that is not part of the run is passed over: nothing is known of it.
    """
    if not isinstance(names, (list, tuple)):
        raise AnsibleFilterError("clock_parity: wanted a list of host names")
    rows = []
    for name in names:
        try:
            result = facts[name][key]
        except (KeyError, TypeError):
            continue
        clocks = result.get("clocks") if isinstance(result, Mapping) else None
        if not clocks:
            continue
        pair, reading = clocks.get("confirmed"), clocks.get("reading")
        rows.append(
            (
                str(name),
                (int(pair[0]), int(pair[1])) if pair else None,
                Reading(**reading)._replace(driver=None) if reading else None,
            )
        )
    return parity(rows)


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        return {"clock_parity": clock_parity}
