"""The host firewall as ufw keeps it. Other firewalls are not judged: a stock Spark has ufw, switched off."""

from __future__ import annotations

import re
from typing import Any

from .reader import Reader
from .system import parse_assignments


def parse_status(text: str) -> dict[str, Any]:
    """{active, rules: [{to, action, source}]} of `ufw status`, in the order in which ufw applies them.

    `active` is None when the text has no status line. Rules for outgoing and routed packets, and the IPv6 twins,
    are left out.
    """
    status = re.search(r"^Status: (\w+)", text, re.M)
    rules = []
    for line in text.splitlines():
        row = re.match(r"^(\S.*?)\s{2,}(ALLOW|DENY|REJECT|LIMIT)(?: (IN|OUT|FWD))?\s{2,}(\S.*)$", line)
        if row and row.group(3) in (None, "IN") and "(v6)" not in line:
            source = row.group(4).split("#", 1)[0].strip()
            rules.append({"to": row.group(1).strip(), "action": row.group(2), "source": source})
    return {"active": status.group(1) == "active" if status else None, "rules": rules}


def read(reader: Reader) -> dict[str, Any]:
    """installed, enabled (at boot), active (now), default_input (what happens without a rule), rules.

    Only root may ask ufw; for others `active` is what the configuration says and `rules` is None.
    """
    conf = parse_assignments(reader.text("/etc/ufw/ufw.conf") or "")
    enabled = conf.get("ENABLED", "").lower() == "yes"
    found: dict[str, Any] = {
        "installed": bool(conf),
        "enabled": enabled,
        "active": enabled,
        "default_input": parse_assignments(reader.text("/etc/default/ufw") or "").get("DEFAULT_INPUT_POLICY"),
        "rules": None,
    }
    if not conf:
        return found
    answer = reader.run(["ufw", "status"])
    status = parse_status(answer.stdout)
    if answer.ok and status["active"] is not None:
        found.update(active=status["active"], rules=status["rules"])
    elif enabled:
        reader.denied("ufw status", "root")
    return found
