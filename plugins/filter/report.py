# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The table that ends a run, for people who look rather than read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GIB = 1024**3


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks between them, a rule under the head."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * len(text[0].ljust(sum(widths) + 2 * (len(widths) - 1))), *text[1:]])


def _gib(count: Any) -> str:
    return f"{int(count) / GIB:.1f} GiB" if count is not None else "unknown"


def replica_table(nodes: Sequence[Mapping[str, Any]], redline_gib: float = 4.0) -> str:
    """One line a node, ordered by replica and rank.

    `nodes`: replica, rank, name, endpoint, context, release (any text), available_bytes (MemAvailable, may be None).
    The headroom is what is left above the redline, the MemAvailable under which the guard stops the replica.
    """
    rows = []
    for node in sorted(nodes, key=lambda row: (str(row["replica"]), int(row["rank"]))):
        available = node.get("available_bytes")
        headroom = None if available is None else int(available) - int(float(redline_gib) * GIB)
        first = int(node["rank"]) == 0
        rows.append(
            (
                str(node["replica"]) if first else "",
                f"{node['rank']} {node['name']}",
                str(node["endpoint"]) if first else "",
                str(node["context"]) if first else "",
                _gib(available),
                _gib(headroom),
                str(node.get("release") or "none"),
            )
        )
    head = ("replica", "rank node", "endpoint", "context", "available", "headroom", "release")
    return table(head, rows)


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Any]:
        return {"replica_table": replica_table}
