"""The example inventory is what a user copies; the lab may only override what has to differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]

# Addresses and keys, model and pins, image, and what the machine is.
ALLOWED = {
    "ansible_host",
    "ansible_ssh_private_key_file",
    "ansible_ssh_common_args",
    "ansible_python_interpreter",
    "sparkfleet_context",
    "sparkfleet_hub_endpoint",
    "sparkfleet_model_repo",
    "sparkfleet_model_revision",
    "sparkfleet_engram_repo",
    "sparkfleet_engram_revision",
    "sparkfleet_kit_repo",
    "sparkfleet_kit_revision",
    "sparkfleet_engine_commit",
    "image_name",
    "image_context",
    "image_base",
    "image_allow_base_tag",
    "image_build_args",
    "sparkfleet_architecture",
    "preflight_warn",
}


def test_the_overrides_hold_nothing_else() -> None:
    overrides = yaml.safe_load((ROOT / "lab/overrides.yml").read_text())
    assert set(overrides) <= ALLOWED


def test_the_overrides_agree_with_the_lab_inventory() -> None:
    overrides = yaml.safe_load((ROOT / "lab/overrides.yml").read_text())
    lab = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())
    shared = {key for key in overrides if key in lab and key not in {"image_context"}}
    assert len(shared) >= 10
    assert {key: overrides[key] for key in shared} == {key: lab[key] for key in shared}


def test_the_example_invents_no_pin() -> None:
    example = yaml.safe_load((ROOT / "inventory/example/group_vars/all.yml").read_text())
    for name in (
        "sparkfleet_model_revision",
        "sparkfleet_engram_repo",
        "sparkfleet_engram_revision",
        "sparkfleet_kit_revision",
        "sparkfleet_engine_commit",
    ):
        assert example[name] == "", name


def test_the_overrides_hold_on_the_controller_too() -> None:
    """Extra vars reach the implicit localhost, where reports are shown and `inventory_dir` is not defined."""
    words = (
        "adhoc",
        "localhost",
        "-i",
        "inventory/example",
        "-m",
        "ansible.builtin.debug",
        "-e",
        "@lab/overrides.yml",
    )
    done = subprocess.run(
        [sys.executable, "-m", "ansible", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
