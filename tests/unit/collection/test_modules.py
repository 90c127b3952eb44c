"""The documentation of every module says what its argument spec says."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import basic

ROOT = Path(__file__).parents[3]
MODULES = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))
PACKAGE = "ansible_collections.sparkfleet.serving.plugins.modules"


class Captured(Exception):
    def __init__(self, spec: Mapping[str, Any], check: bool) -> None:
        self.spec, self.check = spec, check


def documented_by(name: str) -> Mapping[str, Any]:
    """Options of a module, those of its fragments included. A name in both is a contradiction."""
    documentation = yaml.safe_load(importlib.import_module(f"{PACKAGE}.{name}").DOCUMENTATION)
    options = dict(documentation.get("options") or {})
    for fragment in documentation.get("extends_documentation_fragment") or []:
        file, _dot, part = fragment.removeprefix("sparkfleet.serving.").partition(".")
        module = importlib.import_module(f"{PACKAGE.rpartition('.')[0]}.doc_fragments.{file}")
        more = yaml.safe_load(getattr(module.ModuleDocFragment, part.upper() or "DOCUMENTATION"))["options"]
        assert not set(more) & set(options), f"{fragment} and {name} both document {set(more) & set(options)}"
        options.update(more)
    return options


def capture(self: Any, argument_spec: Mapping[str, Any], **options: Any) -> None:
    raise Captured(argument_spec, bool(options.get("supports_check_mode")))


def differences(where: str, documented: Mapping[str, Any], spec: Mapping[str, Any]) -> list[str]:
    """Names, types, defaults, choices and requirements that differ."""
    found = [f"{where}{name}: only documented" for name in sorted(set(documented) - set(spec))]
    found += [f"{where}{name}: not documented" for name in sorted(set(spec) - set(documented))]
    for name in sorted(set(documented) & set(spec)):
        said, meant = documented[name], spec[name]
        for key, default in (
            ("type", "str"),
            ("required", False),
            ("default", None),
            ("choices", None),
            ("elements", None),
        ):
            left, right = said.get(key, default), meant.get(key, default)
            if key == "choices" and left is not None and right is not None:
                left, right = list(left), list(right)
            if left != right:
                found.append(f"{where}{name}: {key} is documented as {left!r} and is {right!r}")
        if not said.get("description"):
            found.append(f"{where}{name}: no description")
        if meant.get("options") or said.get("suboptions"):
            found += differences(f"{where}{name}.", said.get("suboptions") or {}, meant.get("options") or {})
    return found


@pytest.mark.parametrize("name", MODULES)
def test_documentation_equals_the_argument_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    monkeypatch.setattr(basic.AnsibleModule, "__init__", capture)
    with pytest.raises(Captured) as caught:
        module.main()
    documentation = yaml.safe_load(module.DOCUMENTATION)
    assert differences("", documented_by(name), caught.value.spec) == []
    assert caught.value.check, "every module supports check mode"
    assert {"check_mode", "diff_mode"} <= set(documentation["attributes"])
    assert documentation["module"] == name


@pytest.mark.parametrize("name", MODULES)
def test_examples_and_returns_are_data(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    tasks = yaml.safe_load(module.EXAMPLES)
    assert tasks and all(f"sparkfleet.serving.{name}" in str(task) for task in tasks)
    assert isinstance(yaml.safe_load(module.RETURN), dict)
