"""The proof harness is itself proven: it finds what was not announced, and what was announced in vain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import snapshot, snapshot_node
from tests.proof import prove

UNIT = "sparkfleet-gpu-clocks.service"


def file(sha: str = "a", **more: Any) -> dict[str, Any]:
    return {"type": "file", "mode": "644", "owner": "0:0", "size": 1, "sha256": sha, **more}


FOLDER = {"type": "directory", "mode": "755", "owner": "0:0"}


def run(*tasks: dict[str, Any]) -> prove.Run:
    changed: dict[str, list[str]] = {}
    for task in tasks:
        changed.setdefault(task["host"], []).append(task["task"])
    return prove.Run(0, "", {"changed": changed, "tasks": list(tasks)})


def task(name: str, *headers: str, host: str = "spark-1") -> dict[str, Any]:
    return {
        "host": host,
        "task": name,
        "diff": [{"before_header": h, "after_header": h, "before": "", "after": ""} for h in headers],
    }


def nodes(**kinds: Any) -> dict[str, snapshot.Snapshot]:
    return {"spark-1": kinds}


def test_first_proof_both_ways() -> None:
    assert prove.compare_tasks(run(task("a")), run(task("a"))) == []
    assert "did not announce" in prove.compare_tasks(run(), run(task("a")))[0]
    assert "changed nothing" in prove.compare_tasks(run(task("a")), run())[0]
    assert prove.compare_tasks(run(task("a", host="spark-2")), run(task("a")))


def second(check: prove.Run, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return prove.compare_nodes(check, nodes(**before), nodes(**after), snapshot.load_rules())[0]


def test_a_unit_explains_its_links_and_its_start() -> None:
    path = f"/etc/systemd/system/{UNIT}"
    link = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
    after = {
        "path": {path: file(), link: {"type": "link", "to": path}},
        "unit": {UNIT: {"enabled": "enabled", "active": "active", "run": "1"}},
    }
    before: dict[str, Any] = {"path": {}, "unit": {}}
    assert second(run(task("clocks", path, f"unit {UNIT}")), before, after) == []
    problems = second(run(task("clocks", path)), before, after)
    assert problems == [f"spark-1: not announced: path {link} added"]
    assert len(second(run(), before, after)) == 3


def test_a_changed_byte_and_a_changed_mode_are_found() -> None:
    before = {"path": {"/etc/a": file("a"), "/etc/b": file("b")}}
    after = {"path": {"/etc/a": file("x"), "/etc/b": {**file("b"), "mode": "600"}}}
    assert second(run(task("t", "/etc/a")), before, after) == [
        "spark-1: not announced: path /etc/b changed (mode)"
    ]


def test_what_was_announced_in_vain_is_found() -> None:
    assert second(run(task("t", "/etc/a", "sysctl vm.x")), {"path": {}}, {"path": {}}) == [
        "spark-1: announced and unchanged: path /etc/a",
        "spark-1: announced and unchanged: sysctl vm.x",
    ]


def test_folders_above_an_announced_file_are_explained_and_files_beside_it_are_not() -> None:
    after = {"path": {"/opt/x": FOLDER, "/opt/x/y": file(), "/opt/x/z": file()}}
    assert second(run(task("t", "/opt/x/y")), {"path": {}}, after) == [
        "spark-1: not announced: path /opt/x/z added"
    ]
    assert second(run(task("t", "tree /opt/x")), {"path": {}}, after) == []


def test_a_package_explains_its_files_and_dpkg_only_with_it() -> None:
    before: dict[str, Any] = {"path": {}, "package": {}}
    after = {
        "path": {"/usr/bin/tool": file(package="tool"), "/var/lib/dpkg/status": file()},
        "package": {"tool": {"version": "1"}},
    }
    assert second(run(task("t", "package tool")), before, after) == []
    assert len(second(run(), before, after)) == 3


def test_builtin_modules_are_understood() -> None:
    record: list[dict[str, Any]] = [
        {
            "host": "spark-1",
            "task": "copy",
            "diff": [{"before_header": "/etc/a (content)", "after_header": "dynamically generated"}],
        },
        {
            "host": "spark-1",
            "task": "file",
            "diff": {"before": {"path": "/etc/b"}, "after": {"path": "/etc/b"}},
        },
        {"host": "spark-2", "task": "copy", "diff": [{"after_header": "/etc/other"}]},
        {"host": "spark-1", "task": "none", "diff": None},
    ]
    assert [str(note) for note in snapshot.announced(record, "spark-1")] == ["path /etc/a", "path /etc/b"]


def test_exclusions_have_reasons_and_hide_no_more_than_they_say(tmp_path: Path) -> None:
    rules = snapshot.load_rules()
    assert all(len(rule.reason) >= 10 for rule in rules)
    for kind, name in (
        ("path", "/etc/systemd/system/x.service"),
        ("path", "/etc/docker/daemon.json"),
        ("path", "/etc/netplan/40-cx7.yaml"),
        ("sysctl", "fs.aio-max-nr"),
        ("sysctl", "vm.swappiness"),
        ("unit", "docker.socket"),
        ("unit", UNIT),
        ("address", "enp1s0f0np0 10.77.0.1/30"),
        ("container", "x"),
        ("image", "x"),
    ):
        change = snapshot.Change(kind, name, None, {})
        assert not any(rule.covers(change) for rule in rules), f"{kind} {name} is hidden"
    bad = tmp_path / "rules.yml"
    bad.write_text("- {kind: path, match: '*', reason: ''}\n")
    with pytest.raises(ValueError, match="needs a reason"):
        snapshot.load_rules(bad)


def test_the_collector_reads_a_tree(tmp_path: Path) -> None:
    (tmp_path / "etc/a").mkdir(parents=True)
    (tmp_path / "etc/a/file").write_text("x")
    (tmp_path / "etc/link").symlink_to("a/file")
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/big").write_bytes(b"0" * 10)
    found = snapshot_node.paths(str(tmp_path))
    assert found["/etc/a"]["type"] == "directory" and found["/etc/link"] == {"type": "link", "to": "a/file"}
    assert "sha256" in found["/etc/a/file"] and "mtime" in found["/usr/big"]


def test_the_collector_needs_nothing_but_an_interpreter() -> None:
    """It is piped into a node's python3, which has no package of ours."""
    text = snapshot.COLLECTOR.read_text()
    program = "import ast,sys; ast.parse(sys.stdin.read()); print('ok')"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout == "ok\n" and "from ." not in text and "import yaml" not in text


def test_diff_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text(json.dumps({"path": {}}))
    new.write_text(json.dumps({"path": {"/etc/x": file()}}))
    assert snapshot.main(["diff", str(old), str(new)]) == 1
    assert "path /etc/x added" in capsys.readouterr().out
    assert snapshot.main(["diff", str(old), str(old)]) == 0
