"""How a module ends: with a result, its warnings said, or with its refusal."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Refusal, finish


def ended(act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    answer = io.StringIO()
    with patch_module_args({}), contextlib.redirect_stdout(answer), contextlib.suppress(SystemExit):
        finish(AnsibleModule(argument_spec={}), act)
    found: dict[str, Any] = json.loads(answer.getvalue())
    return found


def test_warnings_are_said_and_are_no_result() -> None:
    found = ended(lambda: {"path": "/x", "warnings": ["the log was not saved"]})
    assert (found["changed"], found["path"]) == (False, "/x")
    assert "the log was not saved" in json.dumps(found["warnings"])
    assert "deprecations" not in found, "a key warnings in a result is on its way out of Ansible"


def test_a_refusal_fails_with_its_parts() -> None:
    def act() -> dict[str, Any]:
        raise Refusal("no room", "1 GiB", "2 GiB", "free some")

    found = ended(act)
    assert found["failed"]
    assert found["msg"].endswith("no room; found: 1 GiB; wanted: 2 GiB; remedy: free some")
