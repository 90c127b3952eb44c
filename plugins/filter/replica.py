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


def status_lines(report: Any) -> list[str]:
    """The report of `playbooks/status.yml` as lines for a person."""
    lines = []
    for replica, row in sorted(dict(report).items()):
        head: dict[str, Any] = next((rank for rank in row["ranks"] if rank.get("rank") == 0), {})
        why = f" ({head['why']})" if head.get("why") else ""
        lines.append(f"{replica}: {row['verdict']}{why}")
        for rank in row["ranks"]:
            gid = rank.get("gid") or {}
            facts = [f"rank {rank.get('rank')}", str(rank.get("node") or ""), str(rank.get("verdict"))]
            if rank.get("memory_available_gib") is not None:
                facts.append(f"{rank['memory_available_gib']} GiB available")
            if gid.get("now") is not None:
                facts.append(f"GID index {gid['now']}")
            if rank.get("launch"):
                facts.append(f"launch {rank['launch']}")
            lines.append("  " + ", ".join(fact for fact in facts if fact))
            lines += [f"    {note}" for note in rank.get("notes") or [] if note]
    return lines


class FilterModule:
    """Filters of the collection about whole replicas."""

    def filters(self) -> dict[str, Any]:
        return {
            "replica_decision": replica_decision,
            "replica_status": replica_status,
            "status_lines": status_lines,
        }
