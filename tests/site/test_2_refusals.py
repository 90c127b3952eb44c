"""Bad input gets one clear refusal, before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.site.conftest import ROOT, Lab

pytestmark = pytest.mark.lab


def hosts(lab: Lab) -> dict[str, Any]:
    """The lab's two hosts with all their variables, to be bent by a test."""
    tree = yaml.safe_load(Path(lab.inventory, "hosts.yml").read_text())["all"]["children"]["sparks"]
    shared = {**yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text()), **tree["vars"]}
    for key, value in shared.items():
        if isinstance(value, str):
            shared[key] = value.replace("{{ inventory_dir }}", lab.inventory).replace(
                "inventory_dir", f"'{lab.inventory}'"
            )
    return {name: {**shared, **values} for name, values in tree["hosts"].items()}


def refused(lab: Lab, tmp_path: Path, found: dict[str, Any], *words: str) -> str:
    """The run ends with exactly one refusal that has these words, and no node was changed."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"all": {"hosts": found}}))
    before = lab.containers()
    done = lab.play("site.yml", inventory=str(inventory))
    text = done.stdout + done.stderr
    assert done.returncode != 0, text[-3000:]
    for word in words:
        assert word in text, f"{word!r} is missing:\n{text[-3000:]}"
    assert text.count("]: FAILED!") == 1, text[-3000:]
    assert "changed:" not in [line.split(" ")[0] for line in text.splitlines()]
    assert lab.containers() == before
    return text


def test_half_a_pair(lab: Lab, tmp_path: Path) -> None:
    found = hosts(lab)
    del found["spark-2"]
    refused(lab, tmp_path, found, "spark-1", "rank")


def test_one_address_twice(lab: Lab, tmp_path: Path) -> None:
    found = hosts(lab)
    found["spark-2"]["sparkfleet_rails"] = found["spark-1"]["sparkfleet_rails"]
    refused(lab, tmp_path, found, "10.77.0.1")


def test_a_missing_node(lab: Lab, tmp_path: Path) -> None:
    found = hosts(lab)
    found["spark-2"]["ansible_host"] = str(lab.instance.hub_address).rsplit(".", 1)[0] + ".250"
    refused(lab, tmp_path, found, "spark-2", "unreachable")


def test_an_unknown_engine(lab: Lab, tmp_path: Path) -> None:
    found = hosts(lab)
    for values in found.values():
        values["sparkfleet_engine"] = "warp_drive"
    refused(lab, tmp_path, found, "warp_drive", "tensorfold_native")


def test_an_unset_pin_says_where_it_is_found(lab: Lab, tmp_path: Path) -> None:
    found = hosts(lab)
    for values in found.values():
        values["sparkfleet_model_revision"] = ""
    refused(lab, tmp_path, found, "sparkfleet_model_revision", "[0-9a-f]{40}")


def test_a_misspelt_name_on_one_host(lab: Lab, tmp_path: Path) -> None:
    found = hosts(lab)
    found["spark-2"]["sparkfleet_contxt"] = 4096
    refused(lab, tmp_path, found, "spark-2", "sparkfleet_contxt", "sparkfleet_context?")


def test_a_key_file_that_the_head_lacks(lab: Lab, tmp_path: Path) -> None:
    found = hosts(lab)
    for values in found.values():
        values["ranks_api_key_file"] = "/etc/sparkfleet/none"
    text = refused(lab, tmp_path, found, "secret-file", "/etc/sparkfleet/none", "absent")
    assert "spark-2  secret-file" not in text, "only the head needs it"


@pytest.mark.parametrize(
    "text", ["--help", 'a"b', "a\nb", "{{ lookup('pipe', 'touch /tmp/owned') }}", "$(touch /tmp/owned)"]
)
def test_hostile_names_reach_no_shell_and_no_template_twice(lab: Lab, tmp_path: Path, text: str) -> None:
    """An inventory plugin or a form may hand over such a value; it is refused as it is, and never evaluated."""
    found = hosts(lab)
    for values in found.values():
        values["sparkfleet_replica"] = text
    inventory = tmp_path / "hosts.yml"
    marked = yaml.safe_dump({"all": {"hosts": found}}).replace(
        "sparkfleet_replica:", "sparkfleet_replica: !unsafe"
    )
    inventory.write_text(marked)
    done = lab.play("site.yml", inventory=str(inventory))
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "replica-name" in output and output.count("]: FAILED!") == 1
    assert not Path("/tmp/owned").exists()
    for node in ("spark-1", "spark-2"):
        assert lab.on(node, "sh", "-c", "ls /tmp/owned 2>/dev/null | cat") == ""


def test_with_the_lab_down_there_is_one_sentence(lab: Lab, tmp_path: Path) -> None:
    """`ansible-playbook site.yml` with no `-i` uses inventory/lab, which knows when its lab is not there."""
    up = ROOT / ".lab/lab/up.json"
    aside = up.rename(tmp_path / "up.json") if up.exists() else None
    try:
        done = lab.play("site.yml", inventory=str(ROOT / "inventory/lab"))
    finally:
        if aside:
            aside.rename(up)
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "make lab-up" in text and "inventory/example" in text
    assert "UNREACHABLE" not in text and text.count("]: FAILED!") == 1
