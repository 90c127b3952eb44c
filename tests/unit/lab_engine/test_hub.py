"""The Hub stand-in, through the real `huggingface_hub` client and over plain HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lab.checkpoint import repos
from tests.unit.lab_engine.conftest import newest

SERVER = Path(__file__).resolve().parents[3] / "lab/hub/server.py"
SHARD = "model-00002-of-00006.safetensors"


@dataclass
class Hub:
    """One running server."""

    url: str
    control: Path
    log: Path
    root: Path

    def set(self, **control: Any) -> None:
        self.control.write_text(json.dumps(control))

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                return reply.status, dict(reply.headers), reply.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def stats(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.get("/_lab/stats")[2])
        return document

    def fetch(self, repo: str, folder: Path, **options: Any) -> Path:
        options.setdefault("revision", newest(self.root, repo).name)
        return Path(snapshot_download(repo, endpoint=self.url, cache_dir=folder, **options))


@pytest.fixture
def hub(hub_root: Path, tmp_path: Path) -> Iterator[Hub]:
    control, log = tmp_path / "control.json", tmp_path / "access.log"
    command = [sys.executable, str(SERVER), "--root", str(hub_root), "--port", "0", "--bind", "127.0.0.1"]
    command += ["--control", str(control), "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Hub(f"http://127.0.0.1:{port}", control, log, hub_root)
        process.terminate()


def same(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    found = sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    return names == found and all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("repo", [repos.CHECKPOINT, repos.ORIGINAL, repos.KIT])
def test_snapshot_download(hub: Hub, tmp_path: Path, repo: str) -> None:
    source = newest(hub.root, repo)
    snapshot = hub.fetch(repo, tmp_path / "cache")
    assert snapshot.name == source.name
    assert same(source, snapshot)
    whole = hub.stats()["bytes"]
    hub.fetch(repo, tmp_path / "cache")
    assert hub.stats()["bytes"] == whole
    assert hub.stats()["paths"][f"/api/models/{repo}/tree/{source.name}"]["requests"] == 1


def test_info_and_branch(hub: Hub) -> None:
    api = HfApi(endpoint=hub.url)
    info = api.model_info(repos.CHECKPOINT, files_metadata=True)
    source = newest(hub.root, repos.CHECKPOINT)
    assert info.sha == source.name
    by_name = {sibling.rfilename: sibling for sibling in info.siblings or []}
    assert by_name[SHARD].lfs is not None
    assert by_name[SHARD].lfs.sha256 == repos.sha256(source / SHARD)
    assert by_name["config.json"].lfs is None
    entries = {entry.path: entry for entry in api.list_repo_tree(repos.KIT, recursive=True)}
    assert {"kit", "kit/aot", "kit/MANIFEST"} <= set(entries)
    assert {entry.path for entry in api.list_repo_tree(repos.KIT)} == {"kit"}


def test_ranges(hub: Hub) -> None:
    source = newest(hub.root, repos.CHECKPOINT)
    path = f"/{repos.CHECKPOINT}/resolve/{source.name}/{SHARD}"
    raw = (source / SHARD).read_bytes()
    status, head, body = hub.get(path, Range="bytes=8-99")
    assert (status, body) == (206, raw[8:100])
    assert head["Content-Range"] == f"bytes 8-99/{len(raw)}"
    assert head["X-Repo-Commit"] == source.name
    assert head["ETag"] == head["X-Linked-ETag"] == f'"{repos.sha256(source / SHARD)}"'
    assert hub.get(path, Range="bytes=-5")[2] == raw[-5:]
    assert hub.get(path, Range=f"bytes={len(raw) - 3}-")[2] == raw[-3:]
    assert hub.get(path, Range=f"bytes={len(raw)}-")[0] == 416
    assert hub.get(f"/{repos.CHECKPOINT}/resolve/{source.name}/../../../refs/main")[0] == 404


def test_refusals(hub: Hub, tmp_path: Path) -> None:
    api = HfApi(endpoint=hub.url)
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repos.KIT, revision="0" * 40)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("lab/absent")
    hub.set(tokens={"hf_terms": [repos.KIT], "hf_other": []}, gated=[repos.KIT])
    path = f"/{repos.KIT}/resolve/{newest(hub.root, repos.KIT).name}/kit/MANIFEST"
    assert hub.get(path)[0] == 401
    assert hub.get(path, Authorization="Bearer hf_wrong")[0] == 401
    status, head, _ = hub.get(path, Authorization="Bearer hf_other")
    assert (status, head["X-Error-Code"]) == (403, "GatedRepo")
    with pytest.raises(GatedRepoError):
        hub.fetch(repos.KIT, tmp_path / "refused", token="hf_other")
    assert same(newest(hub.root, repos.KIT), hub.fetch(repos.KIT, tmp_path / "cache", token="hf_terms"))
    text = hub.log.read_text()
    assert '"token": "known"' in text and '"token": "unknown"' in text and "hf_" not in text


def test_a_short_body_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    source = newest(hub.root, repos.CHECKPOINT)
    raw = (source / SHARD).read_bytes()
    hub.set(faults={f"{repos.CHECKPOINT}/{SHARD}": {"short": 1_000_000, "times": 1}})
    snapshot = hub.fetch(repos.CHECKPOINT, tmp_path / "cache", allow_patterns=[SHARD])
    assert (snapshot / SHARD).read_bytes() == raw
    # The client writes in blocks of 10 MB, so what it had of a small file is lost and it starts again.
    sent = hub.stats()["paths"][f"/{repos.CHECKPOINT}/resolve/{source.name}/{SHARD}"]
    assert sent == {"requests": 3, "bytes": 1_000_000 + len(raw)}


def test_a_corrupt_body_and_a_failing_one(hub: Hub, tmp_path: Path) -> None:
    source = newest(hub.root, repos.CHECKPOINT)
    path = f"/{repos.CHECKPOINT}/resolve/{source.name}/{SHARD}"
    hub.set(faults={f"{repos.CHECKPOINT}/{SHARD}": {"corrupt": True}})
    body = hub.get(path)[2]
    raw = (source / SHARD).read_bytes()
    assert len(body) == len(raw) and sum(a != b for a, b in zip(body, raw, strict=True)) == 1
    hub.set(faults={f"{repos.CHECKPOINT}/{SHARD}": {"status": 403}})
    with pytest.raises((HfHubHTTPError, LocalEntryNotFoundError)):
        hub.fetch(repos.CHECKPOINT, tmp_path / "cache", allow_patterns=[SHARD])
    hub.set(faults={f"{repos.CHECKPOINT}/config.json": {"status": 503, "times": 2}})
    config = f"/{repos.CHECKPOINT}/resolve/{source.name}/config.json"
    assert [hub.get(config)[0] for _ in range(3)] == [503, 503, 200]
    hub.set(offline=True)
    with pytest.raises(OSError, match=r"closed|reset"):
        hub.get(path)


def test_counts_can_be_reset(hub: Hub) -> None:
    path = f"/api/models/{repos.KIT}"
    body = hub.get(path)[2]
    assert hub.stats() == {
        "requests": 1,
        "bytes": len(body),
        "paths": {path: {"requests": 1, "bytes": len(body)}},
    }
    urllib.request.urlopen(urllib.request.Request(f"{hub.url}/_lab/reset", method="POST"), timeout=5).close()
    assert hub.stats()["requests"] == 0
