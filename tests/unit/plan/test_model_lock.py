"""Locks: one text for one checkpoint from any source, over HTTP ranges with the traps of real servers."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import model_lock as ml
from ansible_collections.sparkfleet.serving.plugins.module_utils.safetensors import PlanError
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.unit.plan.small import Small as Numbers
from tests.unit.plan.small import config as small_config
from tests.unit.plan.small import inventories, lock_of, small_lock
from tools.plan_fullsize import data_bytes, recorded_sizes, write_sparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_text_of_a_lock_reads_back(full_lock: ml.ModelLock) -> None:
    text = ml.dumps(full_lock)
    again = ml.from_document(json.loads(text))
    assert again.shards == full_lock.shards
    assert again.digest == full_lock.digest
    assert ml.dumps(again) == text
    assert text.count("\n") < 2000


def test_full_size_counts_and_header_residuals(full_lock: ml.ModelLock) -> None:
    assert len(full_lock.shards) == 39
    assert len(full_lock.tensors) == 192_452
    assert full_lock.matrices == 47_900
    assert full_lock.file_bytes == 210_600_939_078
    for number, (name, size) in enumerate(zip(full_lock.shards, recorded_sizes(), strict=True), 1):
        per_tensor = (size - 8 - data_bytes(full_lock.shards[name])) / len(full_lock.shards[name])
        assert number == 39 or 104.7 <= per_tensor <= 106, name


NAMES = some.lists(
    some.sampled_from(["layers", "0", "1", "2", "10", "00", "w{1}", "=x", "mtp", "a", "{}", "7-9"]),
    min_size=1,
    max_size=4,
).map(".".join)
SPECS = some.tuples(
    some.sampled_from(["F16", "BF16", "I32", "I16"]), some.lists(some.integers(0, 64), max_size=3).map(tuple)
)


@settings(max_examples=300, deadline=None)
@given(some.dictionaries(NAMES, SPECS, min_size=1, max_size=12), some.sets(some.integers(0, 40), max_size=8))
def test_any_inventory_survives_the_text(plain: dict[str, Any], experts: set[int]) -> None:
    inventory: ml.Inventory = dict(plain)
    for expert in experts:
        prefix = f"layers.{expert % 3}.experts.{expert}.w1"
        inventory[prefix + ".trellis"] = ("I16", (16, 8, 48))
        inventory[prefix + ".suh"] = ("F16", (256,))
        inventory[prefix + ".svh"] = ("F16", (128,))
        if expert % 2:
            inventory[prefix + ".mul1"] = ("I32", ())
    lock = lock_of({"a.safetensors": inventory}, {})
    assert ml.from_document(json.loads(ml.dumps(lock))).shards == {"a.safetensors": inventory}


@settings(max_examples=200, deadline=None)
@given(some.data())
def test_a_damaged_lock_raises_only_our_error(data: some.DataObject) -> None:
    text = ml.dumps(small_lock())
    begin = data.draw(some.integers(0, len(text)))
    damaged = text[:begin] + data.draw(some.text(max_size=5)) + text[begin + data.draw(some.integers(0, 9)) :]
    try:
        document = json.loads(damaged)
    except ValueError:
        return
    try:
        ml.from_document(document)
    except PlanError as error:
        assert "\n" not in str(error)


def test_lock_from_a_folder_equals_the_one_of_its_numbers(tmp_path: Path) -> None:
    raw = json.dumps(small_config(Numbers())).encode()
    write_sparse(tmp_path / "m", inventories(Numbers()), raw)
    lock = ml.from_directory(tmp_path / "m")
    assert lock.digest == small_lock().digest
    assert lock.content_digest == ""
    assert ml.verify_directory(lock, tmp_path / "m") == []


def test_snapshot_links_give_sha256(tmp_path: Path) -> None:
    raw = json.dumps(small_config(Numbers())).encode()
    write_sparse(tmp_path / "m", inventories(Numbers()), raw)
    for shard in sorted((tmp_path / "m").glob("*.safetensors")):
        digest = hashlib.sha256(shard.read_bytes()).hexdigest()
        shard.rename(tmp_path / digest)
        shard.symlink_to(tmp_path / digest)
    lock = ml.from_directory(tmp_path / "m")
    assert lock.content_digest
    assert ml.verify_directory(lock, tmp_path / "m", hashes=True) == []


def test_what_the_download_changed_is_named(tmp_path: Path) -> None:
    raw = json.dumps(small_config(Numbers())).encode()
    shards = inventories(Numbers())
    lock = small_lock()
    write_sparse(tmp_path / "m", shards, raw)
    name = "model-00002-of-00002.safetensors"
    changed = {**shards, name: {**shards[name], "norm.weight": ("F32", (256,))}}
    write_sparse(tmp_path / "m", changed, raw + b" ")
    (tmp_path / "m" / "zz.safetensors").write_bytes((tmp_path / "m" / name).read_bytes())
    problems = ml.verify_directory(lock, tmp_path / "m")
    assert [problem.fault for problem in problems] == [
        "foreign-file",
        "lock-mismatch",
        "lock-mismatch",
        "lock-mismatch",
    ]
    tensor = next(problem for problem in problems if problem.tensor)
    assert (tensor.file, tensor.tensor, tensor.found, tensor.wanted) == (
        name,
        "norm.weight",
        "F32 [256]",
        "BF16 [256]",
    )
    (tmp_path / "m" / name).unlink()
    assert any(problem.fault == "missing-file" for problem in ml.verify_directory(lock, tmp_path / "m"))
    assert ml.verify_directory(lock, tmp_path / "nowhere")[0].fault == "missing-folder"


def test_overlay_order_is_the_engines(tmp_path: Path) -> None:
    base: ml.Inventory = {"a": ("F16", (1,)), "b": ("F16", (1,))}
    lock = lock_of(
        {
            "-zz.safetensors": {"a": ("F16", (2,))},
            "m.safetensors": base,
            "zz.safetensors": {"b": ("F16", (3,))},
        },
        {},
    )
    assert lock.tensors["a"].file == "m.safetensors"
    assert lock.tensors["b"].file == "zz.safetensors"
    assert lock.shadowed == [("a", "-zz.safetensors"), ("b", "m.safetensors")]


# --- over HTTP


class Hub(http.server.ThreadingHTTPServer):
    """A small Hub: file list, ranges, redirects to a storage host, gates."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.mode = ""
        self.token = ""
        self.seen: list[tuple[str, str, str]] = []
        self.sent = 0
        self.storage: Hub | None = None
        self.fail_next = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)

    def do_GET(self) -> None:
        hub = self.server
        given = self.headers.get("Authorization", "")
        hub.seen.append((self.path, self.headers.get("Range", ""), given))
        if hub.fail_next:
            hub.fail_next -= 1
            return self.reply(503)
        if hub.token and given != f"Bearer {hub.token}":
            return self.reply(401 if not given else 403)
        path = self.path.partition("?")[0]
        files = sorted(p for p in hub.root.iterdir() if p.is_file())
        if path in ("/api/models/own/m/revision/main", f"/api/models/own/m/revision/{COMMIT}"):
            rows = [{"rfilename": p.name, "size": p.stat().st_size, "blobId": "0" * 40} for p in files]
            for row, p in zip(rows, files, strict=True):
                if p.suffix == ".safetensors":
                    row["lfs"] = {
                        "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
                        "size": p.stat().st_size,
                    }
            if hub.mode == "no sizes":
                rows = [{"rfilename": p.name} for p in files]
            return self.reply(200, json.dumps({"sha": COMMIT, "siblings": rows}).encode())
        if path == f"/api/models/own/m/tree/{COMMIT}":
            rows = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in files
            ]
            more = "cursor" not in self.path
            link = {"Link": f'<{self.server.address}{path}?cursor=1>; rel="next"'} if more else {}
            return self.reply(200, json.dumps(rows[:2] if more else rows[2:]).encode(), link)
        prefix = f"/own/m/resolve/{COMMIT}/"
        if not path.startswith(prefix) or not (hub.root / path[len(prefix) :]).is_file():
            return self.reply(404)
        if hub.storage is not None:
            return self.reply(302, b"", {"Location": hub.storage.address + path})
        raw = (hub.root / path[len(prefix) :]).read_bytes()
        wanted = self.headers.get("Range")
        if not wanted or hub.mode == "no ranges":
            return self.reply(200, raw)
        begin, _dash, end = wanted[len("bytes=") :].partition("-")
        part = raw[int(begin) : int(end) + 1]
        return self.reply(
            206, part, {"Content-Range": f"bytes {begin}-{int(begin) + len(part) - 1}/{len(raw)}"}
        )


def serve(root: Path) -> Hub:
    hub = Hub(root)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    return hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    raw = json.dumps(small_config(Numbers())).encode()
    write_sparse(tmp_path / "m", inventories(Numbers()), raw)
    (tmp_path / "m" / "README.md").write_text("x")
    server = serve(tmp_path / "m")
    yield server
    server.shutdown()
    server.server_close()


def test_lock_over_ranges_equals_the_local_one(hub: Hub) -> None:
    lock = ml.from_hub(hub.address, "own/m", "main")
    assert lock.digest == ml.from_directory(hub.root).digest
    assert lock.source["revision"] == COMMIT
    assert lock.content_digest
    assert all(entry[1] for entry in hub.seen if "resolve" in entry[0])


def test_only_headers_travel(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ml, "FIRST_RANGE", 64)
    lock = ml.from_hub(hub.address, "own/m", COMMIT)
    listing = 4096
    assert hub.sent < sum(lock.header_bytes.values()) + lock.sizes["config.json"] + listing
    assert lock.digest == ml.from_directory(hub.root).digest


@pytest.mark.parametrize("mode", ["no sizes", "no ranges"])
def test_servers_without_sizes_or_ranges(hub: Hub, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ml, "FIRST_RANGE", 64)
    hub.mode = mode
    assert ml.from_hub(hub.address, "own/m", "main").digest == ml.from_directory(hub.root).digest


def test_token_is_sent_and_never_to_another_host(hub: Hub) -> None:
    storage = serve(hub.root)
    hub.token, hub.storage = "hf_secret", storage
    lock = ml.from_hub(hub.address, "own/m", "main", "hf_secret")
    assert lock.digest == ml.from_directory(hub.root).digest
    assert {entry[2] for entry in hub.seen} == {"Bearer hf_secret"}
    assert {entry[2] for entry in storage.seen} == {""}
    assert "hf_secret" not in ml.dumps(lock)
    storage.shutdown()
    storage.server_close()


@pytest.mark.field("B66")
@pytest.mark.parametrize(
    ("token", "revision", "fault"),
    [("", "main", "no-token"), ("wrong", "main", "forbidden"), ("good", "nowhere", "not-found")],
)
def test_refusals_of_a_server_name_the_remedy(hub: Hub, token: str, revision: str, fault: str) -> None:
    hub.token = "good"
    with pytest.raises(ml.LockError) as error:
        ml.from_hub(hub.address, "own/m", revision, token)
    assert error.value.fault == fault
    assert error.value.remedy
    assert "good" not in str(error.value)


def test_a_busy_server_is_asked_again_and_a_dead_one_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    hub.fail_next = 2
    assert ml.from_hub(hub.address, "own/m", "main", workers=1).matrices
    with pytest.raises(ml.LockError) as error:
        ml.from_hub("http://127.0.0.1:9", "own/m", "main")
    assert error.value.fault == "unreachable"
    with pytest.raises(ml.LockError):
        ml.from_hub("ftp://127.0.0.1", "own/m", "main")


def test_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert ml.read_token() == ""
    monkeypatch.setenv("HF_TOKEN", " a ")
    assert ml.read_token() == "a"
    (tmp_path / "token").write_text("b\n")
    assert ml.read_token(str(tmp_path / "token")) == "b"
    with pytest.raises(ml.LockError):
        ml.read_token(str(tmp_path / "none"))


# --- Engram tables


def engram(
    rows: int, *, scale_rows: int | None = None, halves: tuple[str, ...] = ("scale", "weight")
) -> ml.Inventory:
    specs: ml.Inventory = {
        "layers.1.engram.embed.scale": ("F8_E8M0", (rows if scale_rows is None else scale_rows, 8)),
        "layers.1.engram.embed.weight": ("F8_E4M3", (rows, 256)),
    }
    return {name: spec for name, spec in specs.items() if name.rpartition(".")[2] in halves}


def test_engram_tables_are_found_among_other_shards(tmp_path: Path) -> None:
    write_sparse(
        tmp_path / "m", {"a.safetensors": {"x": ("F16", (1,))}, "b.safetensors": engram(384_006_168)}, b"{}"
    )
    tables = ml.engram_from_directory(tmp_path / "m")
    assert [item.name for item in tables.files] == ["b.safetensors"]
    assert tables.tables == {1: (384_006_168, 264)}
    server = serve(tmp_path / "small")
    (tmp_path / "small").mkdir()
    write_sparse(
        tmp_path / "small", {"a.safetensors": {"x": ("F16", (1,))}, "b.safetensors": engram(10)}, b"{}"
    )
    for _again in range(2):
        remote = ml.engram_from_hub(server.address, "own/m", "main")
        assert remote.tables == {1: (10, 264)}
        assert remote.files[0].sha256
        (tmp_path / "small" / "model.safetensors.index.json").unlink(missing_ok=True)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("inventory", "fault"),
    [
        (engram(4, halves=("weight",)), "missing-engram"),
        (engram(4, scale_rows=5), "bad-engram"),
        ({"x": ("F16", (1,))}, "missing-engram"),
    ],
)
def test_half_a_table_is_refused(tmp_path: Path, inventory: ml.Inventory, fault: str) -> None:
    write_sparse(tmp_path / "m", {"b.safetensors": inventory}, b"{}")
    with pytest.raises(ml.LockError) as error:
        ml.engram_from_directory(tmp_path / "m")
    assert error.value.fault == fault
