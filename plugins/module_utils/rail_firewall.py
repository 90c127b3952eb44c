# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""ufw between the rails: what lets the ranks through, and rules of our own for it.

Ranks meet on a known port and then talk on ports that nobody knows before, to their own address too (B15), so a rail
needs one rule: everything from its subnet, on its interface only. Our rules carry a comment; a rule without it is
somebody else's and is neither removed nor overridden.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .probe import firewall as probe_firewall
from .probe.reader import Reader

#: The comment by which a rule is ours.
COMMENT = "sparkfleet.serving rail"


class FirewallError(Exception):
    """ufw does not do what it was asked, or a foreign rule is in the way."""


def rule_opens(rule: Mapping[str, Any], netdev: str, network: str) -> bool | None:
    """What one ufw rule does to every packet from `network` on `netdev`: True lets them in, False does not,
    None when it speaks of something else (another interface, one port, a part of the network)."""
    target = str(rule["to"])
    place = re.match(r"^Anywhere(?: on (\S+))?$", target)
    if not place or place.group(1) not in (None, netdev):
        return None
    source = str(rule["source"])
    if source != "Anywhere":
        try:
            if not ipaddress.ip_network(network).subnet_of(ipaddress.ip_network(source)):  # type: ignore[arg-type]
                return None
        except (TypeError, ValueError):
            return None
    return bool(rule["action"] == "ALLOW")


def decided(rules: Iterable[Mapping[str, Any]], netdev: str, network: str) -> bool | None:
    """What the first rule that speaks of the rail says, as in ufw; None when no rule does."""
    answers = (rule_opens(rule, netdev, network) for rule in rules)
    return next((answer for answer in answers if answer is not None), None)


def filters(wall: Mapping[str, Any]) -> bool:
    """Whether the firewall of a probe drops what no rule lets in."""
    return bool(wall.get("active")) and str(wall.get("default_input") or "DROP") != "ACCEPT"


def rule_words(netdev: str, network: str) -> list[str]:
    """The rule of a rail as ufw is told it, without `ufw` and the comment."""
    return ["allow", "in", "on", netdev, "from", network]


def own_rules(added: str) -> list[tuple[str, str]]:
    """[(netdev, network)] of our rules in the output of `ufw show added`."""
    found = []
    for line in added.splitlines():
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        if (
            words[-2:] == ["comment", COMMENT]
            and words[:4] == ["ufw", "allow", "in", "on"]
            and len(words) == 9
        ):
            found.append((words[4], words[6]))
    return found


def plan(
    wanted: Sequence[tuple[str, str]], wall: Mapping[str, Any], own: Sequence[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(rules to add, rules of ours to remove). Nothing is added where the firewall is off, or where another rule lets
    the rail in already. Raises FirewallError when a foreign rule keeps the ranks out."""
    remove = [rule for rule in own if rule not in wanted]
    if not filters(wall):
        return [], remove
    if wall.get("rules") is None:
        raise FirewallError("the rules of ufw could not be read: become root")
    add = []
    for netdev, network in wanted:
        answer = decided(wall["rules"], netdev, network)
        if answer is False:
            raise FirewallError(
                f"a rule of ufw that is not ours keeps {network} out of {netdev}; remove it (ufw status numbered)"
            )
        if answer is None and (netdev, network) not in own:
            add.append((netdev, network))
    return add, remove


def read(reader: Reader) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """(the firewall as the probe shows it, our rules). Without ufw there is neither."""
    wall = probe_firewall.read(reader)
    if not wall["installed"]:
        return wall, []
    answer = reader.run(["ufw", "show", "added"])
    if not answer.ok:
        raise FirewallError(f"ufw show added failed: {(answer.stderr or answer.stdout).strip()}")
    return wall, own_rules(answer.stdout)


def apply(reader: Reader, add: Sequence[tuple[str, str]], remove: Sequence[tuple[str, str]]) -> None:
    commands = [["ufw", "delete", *rule_words(*rule)] for rule in remove]
    commands += [["ufw", *rule_words(*rule), "comment", COMMENT] for rule in add]
    for command in commands:
        answer = reader.run(command)
        if not answer.ok:
            raise FirewallError(f"{' '.join(command)} failed: {(answer.stderr or answer.stdout).strip()}")
