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
    if count is None:
        return "unknown"
    return f"{int(count) / GIB:.1f} GiB" if int(count) >= GIB // 10 else f"{int(count) / 1024**2:.1f} MiB"


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


def plan_table(plan: Mapping[str, Any]) -> str:
    """The plan of one replica: what each rank holds, needs and leaves, and the verdict."""
    ranks = {int(row["rank"]): row for row in plan["ranks"]}
    rows = []
    for node in plan["budget"]["nodes"]:
        rank = ranks[int(node["rank"])]
        rows.append(
            (
                f"rank {node['rank']}",
                str(rank["file_name"]),
                _gib(rank["file_bytes"]),
                f"{float(node['available_gib']):.1f} GiB",
                f"{float(node['worst_gib']):.1f} GiB",
                f"{float(node['required_available_gib']):.1f} GiB",
            )
        )
    budget = plan["budget"]
    head = ("", "rank file", "size", "available", "worst left", "needed to start")
    lines = [table(head, rows), f"{budget['verdict']}: {budget['reason']}"]
    if budget.get("largest_context") is not None:
        lines.append(f"largest context that fits: {budget['largest_context']}")
    own = all(node.get("calibrated") for node in budget["nodes"])
    lines.append(
        f"memory constants: {'measured on this replica' if own else 'of other builds, until a first start'}"
    )
    return "\n".join(lines)


# What the report says of a node: key, title, and where the probe has it.
ROWS = (
    ("kernel", "kernel", ("kernel", "release")),
    ("os", "DGX OS", ("os", "dgx_release")),
    ("driver", "GPU driver", ("gpu", "driver")),
    ("docker", "Docker", ("docker", "server_version")),
    ("store", "image store", ("docker", "storage_driver")),
    ("target", "boots into", ("systemd", "default_target")),
    ("memory", "memory", ("memory", "total_bytes")),
    ("available", "available", ("memory", "available_bytes")),
    ("rails", "rails up", ()),
    ("firmware", "ConnectX-7 firmware", ()),
    ("release", "release", ()),
)


def report_rows(_value: Any) -> list[dict[str, str]]:
    """Rows of the report in order: key and title."""
    return [{"key": key, "title": title} for key, title, _path in ROWS]


def _text(value: Any) -> str:
    """One cell: plain, on one line, without what would end a table's cell."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {item}" for key, item in value.items() if isinstance(item, (str, int)))
    return " ".join(str(value if value is not None else "unknown").split()).replace("|", "/")


def _values(host: Mapping[str, Any]) -> dict[str, str]:
    probe = host["__report_probe"].get("probe") or {}
    found = {}
    for key, _title, path in ROWS:
        value: Any = probe
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        if path:
            found[key] = _gib(value) if path[-1].endswith("_bytes") else _text(value)
    net, rdma = probe.get("net") or {}, probe.get("rdma") or {}
    rails = []
    for name, row in sorted(net.items()):
        if row.get("hca") and row.get("carrier"):
            addresses = ", ".join(str(entry["cidr"]) for entry in row.get("addresses") or [])
            rails.append(f"{name} mtu {row.get('mtu')} {addresses or 'no address'}")
    found["rails"] = _text("; ".join(rails) or "none")
    found["firmware"] = _text(", ".join(sorted({str(row.get("fw_ver")) for row in rdma.values()})) or "none")
    current = (host.get("__report_release") or {}).get("current") or {}
    found["release"] = _text(current.get("launch_hash") or "none")
    return found


def report_replicas(hosts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Nodes by replica and rank, each with the text of every row. `hosts` are host variables with a probe."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for host in hosts:
        groups.setdefault(str(host.get("sparkfleet_replica") or "none"), []).append(
            {
                "name": str(host["inventory_hostname"]),
                "rank": int(host.get("sparkfleet_rank") or 0),
                "values": _values(host),
            }
        )
    return [
        {"name": name, "nodes": sorted(nodes, key=lambda node: node["rank"])}
        for name, nodes in sorted(groups.items())
    ]


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Any]:
        return {
            "plan_table": plan_table,
            "replica_table": replica_table,
            "report_rows": report_rows,
            "report_replicas": report_replicas,
        }
