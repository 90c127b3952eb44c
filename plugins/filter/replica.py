# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters over what the members of one replica say. The pure code is plugins/module_utils/rank_state.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ..module_utils.rank_state import EXIT_CODES, decide, serving_verdict


def replica_decision(planned: Any) -> dict[str, Any]:
    """What to do with a replica, from the C(planned) results of `rank_unit` of all its members in rank order.

    {problems: [...], restart: bool, write: bool, key: bool, why: [...], verdict: word}
    """
    if not isinstance(planned, list) or not all(isinstance(row, Mapping) for row in planned):
        raise AnsibleFilterError(
            "replica_decision: wanted the planned results of all members; a member is missing from this run "
            "(a replica is handled whole: do not limit a run to one of its nodes)"
        )
    return decide(planned)


def replica_status(states: Any) -> dict[str, Any]:
    """One verdict and one exit code from the `rank_status` results of all members in rank order."""
    rows = [row for row in states or [] if isinstance(row, Mapping)]
    verdict = serving_verdict(rows)
    return {"verdict": verdict, "exit": EXIT_CODES[verdict], "ranks": list(rows)}


class FilterModule:
    """Filters of the collection about whole replicas."""

    def filters(self) -> dict[str, Any]:
        return {"replica_decision": replica_decision, "replica_status": replica_status}
