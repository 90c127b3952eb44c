# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters of the role preflight. The pure code is plugins/module_utils/preflight.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.sparkfleet.serving.plugins.module_utils import disk_needs as needs
from ansible_collections.sparkfleet.serving.plugins.module_utils import preflight as core
from ansible_collections.sparkfleet.serving.plugins.module_utils.rails import Refusal


def _report(rows: Sequence[Refusal]) -> dict[str, Any]:
    return {
        "failed": any(item.level == "fail" for item in rows),
        "rows": [item.as_dict() for item in rows],
        "table": core.table(rows),
        "json": core.as_json(rows),
        "brief": core.brief(rows),
    }


def _options(raw: Mapping[str, Any]) -> core.Options:
    try:
        return core.Options.of(raw)
    except (TypeError, ValueError) as error:
        raise AnsibleFilterError(str(error)) from error


def preflight_inventory(members: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """{failed, rows, table, json, brief} of the inventory alone, before any node is asked."""
    chosen = _options(options)
    return _report(core.soften(core.inventory_refusals(list(members), chosen), chosen.warn))


def preflight_report(
    members: Sequence[Mapping[str, Any]], seen: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """{failed, rows, table, json, brief} of everything. `seen` is {node: {probe?, message?, sudo?}}."""
    probes = {name: row["probe"] for name, row in seen.items() if row.get("probe")}
    messages = {name: str(row.get("message") or "") for name, row in seen.items()}
    sudo = {name: str(row["sudo"]) for name, row in seen.items() if row.get("sudo")}
    return _report(core.judge(list(members), probes, _options(options), messages, sudo))


def preflight_pins(
    hosts: Iterable[str], hostvars: Mapping[str, Any], wanted: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """The pins of all replicas of the play as the role takes them: {"NAME (replica R)": {value,
    where_to_get, pattern}}.

    `wanted` are rows of `name` (a variable), `where_to_get`, optionally `pattern` (a regular expression for the
    whole value), `unless` (a variable that makes the pin unneeded when it is set) and `only_if` (one that makes
    it needed when it is true).
    """
    found: dict[str, dict[str, str]] = {}
    for host in hosts:
        values = hostvars[host]
        for row in wanted:
            other = row.get("unless")
            if other and values.get(other):
                continue
            if row.get("only_if") and not boolean(values.get(row["only_if"]) or False, strict=False):
                continue
            label = f"{row['name']} (replica {values.get('sparkfleet_replica') or host})"
            value = values.get(row["name"])
            found[label] = {
                "value": "" if value is None else str(value),
                "where_to_get": str(row.get("where_to_get") or ""),
                "pattern": str(row.get("pattern") or ""),
            }
    return found


def disk_needs(
    plan: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    data_dir: str,
    *,
    model: str = "",
    engram: str = "",
    variant: str = "",
    overlay: Sequence[Mapping[str, Any]] = (),
    overlay_source: str = "",
    docker_root: str = needs.DOCKER_ROOT,
) -> list[dict[str, Any]]:
    """preflight_disk_needs of one replica from its plan; see module_utils/disk_needs.py. `model` and `engram` are
    REPO@REVISION."""
    try:
        return needs.disk_needs(
            plan,
            list(members),
            str(data_dir),
            model=model,
            engram=engram,
            variant=variant,
            overlay=list(overlay),
            overlay_source=overlay_source,
            docker_root=docker_root,
        )
    except needs.NeedsError as error:
        raise AnsibleFilterError(f"disk_needs: {error}") from error
    except (KeyError, TypeError) as error:
        raise AnsibleFilterError(f"disk_needs: the plan or a member lacks something: {error!r}") from error


def disk_report(
    members: Sequence[Mapping[str, Any]], seen: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """{failed, rows, table, json, brief} of the disks alone: what can only be judged once there is a plan."""
    chosen = _options(options)
    rows = core.disk_refusals(
        list(members), {name: row["probe"] for name, row in seen.items() if row.get("probe")}, chosen
    )
    return _report(core.soften(rows, chosen.warn))


class FilterModule:
    """Filters of the role preflight."""

    def filters(self) -> dict[str, Any]:
        return {
            "preflight_inventory": preflight_inventory,
            "preflight_report": preflight_report,
            "preflight_pins": preflight_pins,
            "disk_needs": disk_needs,
            "disk_report": disk_report,
        }
