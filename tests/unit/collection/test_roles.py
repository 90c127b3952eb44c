"""What every role promises by its form: the rules of the house that a reader can check without running anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
ROLE_IDS = [role.name for role in ROLES]
YAML_FILES = sorted(
    path
    for folder in ("roles", "playbooks")
    for path in (ROOT / folder).glob("**/*.yml")
    if "/collections/" not in str(path)
)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.is_file() else None


def tasks_of(document: Any) -> list[dict[str, Any]]:
    """Every task of a tasks file or a playbook, blocks flattened."""
    found: list[dict[str, Any]] = []
    for entry in document or []:
        if not isinstance(entry, dict):
            continue
        nested = [
            key
            for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers")
            if key in entry
        ]
        for key in nested:
            found.extend(tasks_of(entry[key]))
        if not nested:
            found.append(entry)
    return found


def test_there_are_roles() -> None:
    assert len(ROLES) >= 10


@pytest.mark.parametrize("role", ROLES, ids=ROLE_IDS)
def test_argument_specs_equal_the_defaults(role: Path) -> None:
    """A variable that a user can set is documented, and what is documented works."""
    defaults = set(load(role / "defaults" / "main.yml") or {})
    specs = load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    required = {name for name, option in specs.items() if option.get("required")}
    assert required & defaults == set(), "a required option has no default"
    assert set(specs) - required == defaults
    for name, option in specs.items():
        assert name.startswith(f"{role.name}_"), f"{name} lacks the prefix of its role"
        assert option.get("description"), f"{name} is not described"


@pytest.mark.parametrize("role", ROLES, ids=ROLE_IDS)
def test_defaults_agree_with_the_documented_defaults(role: Path) -> None:
    defaults = load(role / "defaults" / "main.yml") or {}
    specs = load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    for name, value in defaults.items():
        documented = specs[name].get("default", value)
        if isinstance(value, str) and "{{" in value:
            continue
        assert documented == value, f"{name}: documented {documented!r}, set {value!r}"


@pytest.mark.parametrize("role", ROLES, ids=ROLE_IDS)
def test_a_role_says_what_it_does(role: Path) -> None:
    readme = (role / "README.md").read_text()
    specs = load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    missing = [name for name in specs if name not in readme]
    assert not missing, f"roles/{role.name}/README.md does not name {missing}"


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_swallows_a_failure(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^\s*ignore_errors:", text, re.M)
    assert not re.search(r"^\s*failed_when:\s*(false|no)\b", text, re.M)
    assert "ansible.builtin.shell" not in text


@pytest.mark.field("B97")
@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_role_calls_nmcli(path: Path) -> None:
    """NetworkManager profiles are rendered from netplan on DGX OS; nmcli changes evaporate and are not idempotent."""
    assert "nmcli" not in path.read_text()


@pytest.mark.field("B51")
@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_task_installs_a_driver(path: Path) -> None:
    """The factory driver stack is held and reported, never replaced."""
    if path.name == "argument_specs.yml" or "package_holds" in path.parts:
        return
    document = load(path)
    for task in tasks_of(document if isinstance(document, list) else []):
        module = next((key for key in task if key.endswith((".apt", ".package"))), None)
        if module:
            assert "nvidia" not in str(task[module]), task.get("name")


@pytest.mark.field("C10")
def test_the_text_of_a_cable_decides_nothing() -> None:
    """The EEPROM of a good 200G cable claims 40G, so nothing of ours reads one (ethtool -m, mlxlink)."""
    for folder in ("plugins", "roles", "node", "playbooks"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".yml", ".j2", ".sh"):
                assert not re.search(r"\bethtool\b|\bmlxlink\b|eeprom", path.read_text(), re.I), path


@pytest.mark.field("B54")
@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_task_upgrades_the_system(path: Path) -> None:
    """A kernel or driver that arrives on both nodes of a pair at once is how whole pairs went down."""
    document = load(path)
    for task in tasks_of(document if isinstance(document, list) else []):
        module = next((key for key in task if key.endswith((".apt", ".package", ".dpkg_selections"))), None)
        arguments = task[module] if module and isinstance(task[module], dict) else {}
        assert "upgrade" not in arguments and arguments.get("state") != "latest", task.get("name")


@pytest.mark.field("B49", "B52")
@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_holds_are_opt_in_and_lifted_by_an_upgrade_only(path: Path) -> None:
    """A run that prepares or serves neither holds what nobody asked it to, nor lifts what is held."""
    document = load(path)
    for play in document if isinstance(document, list) and path.parent.name == "playbooks" else []:
        for role in play.get("roles", []):
            if role == "sparkfleet.serving.package_holds" or role.get("role", "").endswith(".package_holds"):
                assert "sparkfleet_hold_packages | default(false)" in role["when"]
    if path.name not in {"upgrade.yml", "argument_specs.yml"}:
        assert "package_holds_state: released" not in path.read_text(), "only an upgrade lifts holds"


@pytest.mark.field("B86")
def test_one_connection_a_node_serves_a_whole_run() -> None:
    """A login a poll wakes the desktop's callbacks; status asks each node once."""
    text = (ROOT / "ansible.cfg").read_text()
    assert "ControlMaster=auto" in text and "ControlPersist=" in text and "pipelining = True" in text
    plays = load(ROOT / "playbooks" / "status.yml")
    assert [len(play["tasks"]) for play in plays if play["hosts"] != "localhost"] == [1]


@pytest.mark.parametrize("role", ROLES, ids=ROLE_IDS)
def test_roles_name_no_inventory_group(role: Path) -> None:
    """A fleet holds many replicas; a role that reads a group works for one."""
    for path in role.glob("**/*.yml"):
        text = path.read_text()
        assert not re.search(r"\bgroups\[", text), path
        assert "group_names" not in text, path
        assert "sparkfleet_replica" not in text or path.name == "argument_specs.yml", (
            f"{path}: fleet variables belong to playbooks"
        )


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_facts_are_read_in_bracket_form(path: Path) -> None:
    """inject_facts_as_vars is off: ansible_hostname and its like are undefined."""
    assert not re.search(
        r"\{\{[^}]*\bansible_(hostname|distribution|architecture|os_family|kernel|memtotal_mb)\b",
        path.read_text(),
    )


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_secret_in_the_environment_of_a_task(path: Path) -> None:
    """Ansible writes a task's environment in front of the remote command, where every user of the node can read it."""
    document = load(path)
    for task in tasks_of(document if isinstance(document, list) else []):
        assert "TOKEN" not in str(task.get("environment", "")).upper(), task.get("name")
