"""The shards of tests/run name tests that exist, and together every test that needs a lab."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def shards() -> dict[str, list[str]]:
    """Shard to its pytest arguments, as bash reads them."""
    text = (ROOT / "tests/run").read_text()
    head = text[text.index("ranks=") : text.index("\nDEFAULT=")]
    script = head + '\nfor name in "${!SHARDS[@]}"; do echo "$name" ${SHARDS[$name]}; done'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


def test_every_named_test_exists() -> None:
    for shard, words in shards().items():
        assert words, shard
        for word in words:
            path, _colons, name = word.partition("::")
            assert (ROOT / path).exists(), f"{shard}: {path}"
            if name:
                wanted = rf"^def {re.escape(name.partition('[')[0])}\("
                assert re.search(wanted, (ROOT / path).read_text(), re.M), f"{shard}: {word}"


def test_every_lab_test_is_in_a_shard() -> None:
    run = {word for words in shards().values() for word in words if "::" not in word}
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        if re.search(r"^pytestmark = .*\bmark\.lab\b", path.read_text(), re.M):
            assert any(name == word or name.startswith(f"{word}/") for word in run), name


def test_all_is_all() -> None:
    text = (ROOT / "tests/run").read_text()
    lists = {
        name: words.split() for name, words in re.findall(r"^(DEFAULT|ALL|ROTATION)=\((.*)\)$", text, re.M)
    }
    assert set(lists["ALL"]) | {"faults"} == set(shards()), "`faults` is a part of the shard `ranks`"
    assert set(lists["DEFAULT"]) <= set(shards())
    assert set(lists["ROTATION"]) <= set(lists["ALL"]) - set(lists["DEFAULT"]), (
        "`make test` runs those anyhow"
    )
