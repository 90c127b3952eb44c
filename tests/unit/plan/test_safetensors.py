"""The header reader: every documented fault by name, and nothing but its own errors for any bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import safetensors as st
from hypothesis import given, settings
from hypothesis import strategies as some


def pack(header: object, data: bytes = b"") -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + data


def tensor(dtype: str, shape: list[object], begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": tensor("F16", [2, 3], 0, 12), "b": tensor("I32", [], 12, 16), "z": tensor("F32", [0, 4], 16, 16)}

FAULTS = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "lfs-pointer"),
    "absurd length": (struct.pack("<Q", 1 << 60) + b"{}", "header-length"),
    "no room": (struct.pack("<Q", 1) + b"{", "header-length"),
    "cut in header": (pack(GOOD)[:40], "truncated"),
    "one byte short": (pack(GOOD, b"\0" * 15), "truncated"),
    "trailing": (pack(GOOD, b"\0" * 17), "trailing-bytes"),
    "not json": (pack(b'{"a": '), "not-json"),
    "list": (pack(b"[1, 2]"), "not-json"),
    "leading blank": (pack(b" {}"), "not-json"),
    "not utf8": (pack(b'{"\xff": 1}'), "not-utf8"),
    "nan": (pack(b'{"a": NaN}'), "not-json"),
    "deep": (pack(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "not-json"),
    "duplicate": (pack(b'{"a": {}, "a": {}}'), "duplicate-key"),
    "duplicate inside": (pack(b'{"a": {"dtype": "F16", "dtype": "F16"}}'), "duplicate-key"),
    "no entry": (pack({"a": 5}), "bad-entry"),
    "no shape": (pack({"a": {"dtype": "F16", "data_offsets": [0, 2]}}), "bad-entry"),
    "dtype": (pack({"a": tensor("F12", [1], 0, 2)}, b"00"), "unknown-dtype"),
    "dtype list": (
        pack({"a": {"dtype": ["F16"], "shape": [1], "data_offsets": [0, 2]}}, b"00"),
        "unknown-dtype",
    ),
    "negative dim": (pack({"a": tensor("F16", [-1], 0, 2)}, b"00"), "bad-shape"),
    "float dim": (pack({"a": tensor("F16", [1.0], 0, 2)}, b"00"), "bad-shape"),
    "bool dim": (pack({"a": tensor("F16", [True], 0, 2)}, b"00"), "bad-shape"),
    "overflow": (pack({"a": tensor("F16", [1 << 40, 1 << 40], 0, 2)}, b"00"), "bad-shape"),
    "half byte": (pack({"a": tensor("F4", [3], 0, 2)}, b"00"), "bad-shape"),
    "negative offset": (pack({"a": tensor("F16", [1], -2, 0)}), "bad-offsets"),
    "float offset": (pack({"a": tensor("F16", [1], 0, 2.0)}, b"00"), "bad-offsets"),
    "one offset": (pack({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0]}}, b"00"), "bad-offsets"),
    "size": (pack({"a": tensor("F16", [2], 0, 2)}, b"00"), "size-mismatch"),
    "overlap": (pack({"a": tensor("F16", [2], 0, 4), "b": tensor("F16", [2], 2, 6)}, b"0" * 6), "overlap"),
    "gap": (pack({"a": tensor("F16", [1], 0, 2), "b": tensor("F16", [1], 4, 6)}, b"0" * 6), "gap"),
    "gap at start": (pack({"a": tensor("F16", [1], 2, 4)}, b"0" * 4), "gap"),
    "metadata": (pack({"__metadata__": {"a": 1}}), "bad-metadata"),
    "name": (pack({"a\nb": tensor("F16", [1], 0, 2)}, b"00"), "bad-name"),
    "surrogate": (
        pack(b'{"\\ud800": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}', b"00"),
        "bad-name",
    ),
}


def test_good_header_with_scalar_and_empty_tensor() -> None:
    raw = pack({"__metadata__": {"format": "pt"}, **GOOD}, b"\0" * 16)
    header = st.parse_header(raw, "x.safetensors", len(raw))
    assert header.tensors["a"] == st.TensorMeta("F16", (2, 3), 0, 12)
    assert header.tensors["b"].shape == ()
    assert header.data_bytes == 16
    assert header.metadata == {"format": "pt"}


def test_trailing_blanks_in_the_header_are_legal() -> None:
    raw = pack(json.dumps(GOOD).encode() + b"   ", b"\0" * 16)
    assert len(st.parse_header(raw, "x", len(raw)).tensors) == 3


@pytest.mark.parametrize(("raw", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_refused_by_name(raw: bytes, fault: str) -> None:
    with pytest.raises(st.HeaderError) as error:
        st.parse_header(raw, "model-00005-of-00039.safetensors", len(raw))
    assert error.value.fault == fault
    assert "model-00005-of-00039.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_engine_accepts_a_longer_file_but_we_name_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(pack(GOOD, b"\0" * 20))
    with pytest.raises(st.HeaderError, match=r"holds bytes after its last tensor; found \d+ bytes; wanted"):
        st.read_header(path)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F8_E8M0", [8], 8),
        ("F8_E4M3", [4], 4),
        ("F4", [4], 2),
        ("F6_E2M3", [4], 3),
        ("BF16", [4], 8),
        ("C64", [1], 8),
    ],
)
def test_sub_byte_and_eight_bit_types(dtype: str, shape: list[object], size: int) -> None:
    raw = pack({"t": tensor(dtype, shape, 0, size)}, b"\0" * size)
    assert st.parse_header(raw, "x", len(raw)).tensors["t"].end == size


@settings(max_examples=300, deadline=None)
@given(some.binary(max_size=200))
def test_any_bytes_raise_only_our_error(raw: bytes) -> None:
    for candidate in (raw, struct.pack("<Q", len(raw)) + raw, pack(b"{" + raw)):
        try:
            st.parse_header(candidate, "x", len(candidate))
        except st.HeaderError as error:
            assert "\n" not in str(error)


JSONISH = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
ENTRY = some.fixed_dictionaries(
    {},
    optional={
        "dtype": some.sampled_from([*st.DTYPE_BITS, "X"]) | JSONISH,
        "shape": some.lists(some.integers(-1, 1 << 40), max_size=5) | JSONISH,
        "data_offsets": some.lists(some.integers(-1, 64), max_size=3) | JSONISH,
    },
)


@settings(max_examples=400, deadline=None)
@given(some.dictionaries(some.text(max_size=6), ENTRY | JSONISH, max_size=4), some.integers(0, 80))
def test_any_header_raises_only_our_error(header: dict[str, object], data: int) -> None:
    raw = pack(header, b"\0" * data)
    try:
        found = st.parse_header(raw, "x", len(raw))
    except st.HeaderError:
        return
    assert sum(meta.end - meta.begin for meta in found.tensors.values()) == data


def folder(tmp_path: Path, names: list[str]) -> Path:
    for name in names:
        (tmp_path / name).write_bytes(pack(GOOD, b"\0" * 16))
    return tmp_path


def test_directory_reads_hidden_files_and_byte_order(tmp_path: Path) -> None:
    folder(tmp_path, ["b.safetensors", ".zz.safetensors", "Z.safetensors", "note.txt"])
    headers, _warnings = st.read_directory(tmp_path)
    assert [header.file for header in headers] == [".zz.safetensors", "Z.safetensors", "b.safetensors"]


def test_missing_shard_of_a_series_is_named(tmp_path: Path) -> None:
    folder(tmp_path, ["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"])
    with pytest.raises(st.HeaderError, match=r"m-00002-of-00003\.safetensors: 1 shards are missing"):
        st.read_directory(tmp_path)


def test_dangling_cache_link_folder_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(st.HeaderError) as error:
        st.read_directory(tmp_path)
    assert error.value.fault == "no-shards"
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(st.HeaderError) as error:
        st.read_directory(tmp_path)
    assert error.value.fault == "dangling-link"
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(st.HeaderError) as error:
        st.read_directory(tmp_path)
    assert error.value.fault == "not-a-file"
    with pytest.raises(st.HeaderError) as error:
        st.read_directory(tmp_path / "nowhere")
    assert error.value.fault == "missing-folder"


@pytest.mark.parametrize("value", ["../../etc/passwd", "/etc/passwd", "a/../b", "", 5, "a\\..\\b"])
def test_index_that_leaves_the_folder_is_refused(tmp_path: Path, value: object) -> None:
    folder(tmp_path, ["a.safetensors"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": value}}))
    with pytest.raises(st.HeaderError) as error:
        st.read_directory(tmp_path)
    assert error.value.fault == "path-traversal"


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ({"weight_map": {"a": "b.safetensors"}}, "missing-file"),
        ({"weight_map": {"q": "a.safetensors"}}, "missing-tensor"),
        ({"metadata": {}}, "bad-index"),
        ([], "bad-index"),
    ],
)
def test_index_that_cannot_be_served_is_refused(tmp_path: Path, index: object, fault: str) -> None:
    folder(tmp_path, ["a.safetensors"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(st.HeaderError) as error:
        st.read_directory(tmp_path)
    assert error.value.fault == fault


def test_overlay_and_unfinished_download_only_warn(tmp_path: Path) -> None:
    folder(tmp_path, ["a.safetensors"])
    (tmp_path / "a.safetensors.incomplete").touch()
    index = {"metadata": {"total_size": 5}, "weight_map": {"a": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _headers, warnings = st.read_directory(tmp_path)
    assert len(warnings) == 3


def test_real_headers_start_tensors_at_odd_offsets(exl3: dict[str, Path]) -> None:
    odd = 0
    for path in exl3.values():
        headers, warnings = st.read_directory(path)
        assert warnings == []
        odd += sum(header.length % 2 for header in headers)
        assert all(header.metadata == {} for header in headers)
    assert odd == 4


OBJECTS = some.recursive(
    some.none() | some.booleans() | some.integers(-9, 9) | some.text('\\":,{} a', max_size=4),
    lambda inner: some.lists(some.tuples(some.sampled_from(["a", "b", '":', "dtype"]), inner), max_size=4),
    max_leaves=12,
)


def written(value: Any, colon: str) -> tuple[str, bool]:
    """JSON of a value, in which lists of pairs are objects; and whether an object has a key twice."""
    if not isinstance(value, list):
        return json.dumps(value), False
    rows = [(json.dumps(key), *written(inner, colon)) for key, inner in value]
    twice = len({key for key, _text, _twice in rows}) < len(rows) or any(row[2] for row in rows)
    return "{" + ",".join(f"{key}{colon}{text}" for key, text, _twice in rows) + "}", twice


@given(OBJECTS, some.sampled_from([":", ": ", " :", "\n:"]))
def test_a_key_that_comes_twice_is_seen_on_the_quick_way_too(value: Any, colon: str) -> None:
    """Good headers are parsed without a call for each object; no writing of a doubled key may slip through."""
    text, twice = written(value, colon)
    if twice:
        with pytest.raises(st.HeaderError, match="twice"):
            st.loads_strict(text.encode(), "f", "the text")
    else:
        assert st.loads_strict(text.encode(), "f", "the text") == json.loads(text)
