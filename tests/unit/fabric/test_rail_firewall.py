"""Rules of ufw for the rails: what is added, what is ours, what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import rail_firewall
from ansible_collections.sparkfleet.serving.plugins.module_utils.rail_firewall import FirewallError

RAILS = [("enp1s0f0np0", "10.77.0.0/30"), ("enP2p1s0f0np0", "10.77.1.0/30")]
# As `ufw show added` of ufw 0.36 prints it.
ADDED = """Added user rules (see 'ufw status' for running firewall):
ufw allow 22/tcp
ufw allow in on enp1s0f0np0 from 10.77.0.0/30
ufw allow in on enp1s0f0np0 from 10.77.9.0/30 comment 'sparkfleet.serving rail'
ufw allow in on enP2p1s0f0np0 from 10.77.1.0/30 comment 'my own'
ufw allow in on enP2p1s0f0np0 from 10.77.1.0/30 to any port 22 proto tcp comment 'sparkfleet.serving rail'
ufw limit 23 comment 'it\'s'
"""


def wall(*rules: tuple[str, str, str], **over: Any) -> dict[str, Any]:
    rows = [{"to": to, "action": action, "source": source} for to, action, source in rules]
    return {"installed": True, "active": True, "default_input": "DROP", "rules": rows, **over}


def test_only_rules_of_our_form_with_our_comment_are_ours() -> None:
    assert rail_firewall.own_rules(ADDED) == [("enp1s0f0np0", "10.77.9.0/30")]
    assert rail_firewall.own_rules("ufw deny 'unclosed\n(None)\n") == []


@pytest.mark.field("B15")
def test_what_is_missing_is_added_and_what_is_stale_goes() -> None:
    stale = ("enp1s0f0np0", "10.77.9.0/30")
    ssh = ("22/tcp", "ALLOW", "Anywhere")
    half = ("Anywhere on enp1s0f0np0", "ALLOW", "10.77.0.0/30")
    other = ("Anywhere on enP2p1s0f0np0", "ALLOW", "10.77.1.0/30")
    assert rail_firewall.plan(RAILS, wall(ssh), [stale]) == (RAILS, [stale])
    assert rail_firewall.plan(RAILS, wall(ssh, half), []) == (RAILS[1:], [])
    assert rail_firewall.plan(RAILS, wall(ssh, half, other), RAILS) == ([], [])
    # A rule of somebody else does as well, and then none of ours is needed.
    assert rail_firewall.plan(RAILS, wall(("Anywhere", "ALLOW", "10.77.0.0/16")), []) == ([], [])
    assert rail_firewall.plan([], wall(half), RAILS) == ([], RAILS)


def test_a_firewall_that_is_off_or_open_is_left_alone() -> None:
    assert rail_firewall.plan(RAILS, wall(active=False), []) == ([], [])
    assert rail_firewall.plan(RAILS, wall(default_input="ACCEPT"), []) == ([], [])
    assert rail_firewall.plan(RAILS, {"installed": False}, []) == ([], [])


def test_a_foreign_rule_is_never_overridden_and_unread_rules_are_not_none() -> None:
    with pytest.raises(FirewallError, match=r"not ours keeps 10\.77\.0\.0/30 out of enp1s0f0np0"):
        rail_firewall.plan(RAILS, wall(("Anywhere on enp1s0f0np0", "DENY", "Anywhere")), [])
    with pytest.raises(FirewallError, match="become root"):
        rail_firewall.plan(RAILS, wall(rules=None), [])
