"""What the lab engine refuses before it serves, by the engine's own names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.lab_engine.harness import MEMINFO, Inputs, Pair, set_gid, tool

PairFactory = Callable[..., Pair]


def one_rank(pair: Pair, rank: int, code: int = 1) -> list[str]:
    """Start one rank that must end by itself; the lines of its output."""
    pair.start(rank)
    assert pair.exit_code(rank) == code, pair.log(rank)
    return pair.log(rank).splitlines()


@pytest.mark.parametrize("name", ["tensorfold", "tf-dsv41-lanes"])
def test_arguments_are_checked_before_the_model(name: str) -> None:
    good: dict[str, list[str]] = {
        "tensorfold": ["serve", "/nonexistent", "--host", "0.0.0.0", "--port", "8888", "--context", "8192"],
        "tf-dsv41-lanes": ["/nonexistent", "/c", "1", "2", "10.77.0.1", "29620", "/kit", "--pool", "8192"],
    }
    accepted = tool(name, *good[name])
    assert accepted.returncode == 1
    assert "/nonexistent is neither a directory" in accepted.stderr
    for extra in (["--bogus", "1"], [good[name][-2]], ["--drafts", "2"], ["--pool", "many"]):
        refused = tool(name, *good[name], *extra)
        assert refused.returncode == 2, extra
        assert refused.stderr.endswith("error: BadArgument\n")


@pytest.mark.parametrize(
    "args",
    [["/m", "/c", "1", "2", "spark-1", "29620", "/kit"], ["/m", "/c", "2", "2", "10.77.0.1", "1", "/kit"]],
)
def test_master_is_a_numeric_address_and_rank_lies_in_the_world(args: list[str]) -> None:
    assert tool("tf-dsv41-lanes", *args).returncode == 2


def test_values_out_of_range() -> None:
    for flag, value in (("--port", "0"), ("--temperature", "3"), ("--parallel", "0"), ("--backend", "metal")):
        assert tool("tensorfold", "serve", "/m", flag, value).returncode == 2


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _two_rank_files(inputs: Inputs, rank: int) -> None:
    folder = inputs.rank_files[rank]
    found = next(folder.iterdir())
    shutil.copy(found, folder / f"{found.name[:9]}0123456789abcdef0123.bin")


def _linked_rank_file(inputs: Inputs, rank: int) -> None:
    found = next(inputs.rank_files[rank].iterdir())
    kept = found.rename(inputs.model / "kept")
    found.symlink_to(kept)


def _cut_rank_file(inputs: Inputs, rank: int) -> None:
    found = next(inputs.rank_files[rank].iterdir())
    found.write_bytes(found.read_bytes()[:-1])


def _without_drafts(inputs: Inputs, rank: int) -> None:
    _empty(inputs.rank_files[rank])
    assert (
        tool("tf-dsv41-rank-cache", inputs.model, inputs.rank_files[rank], rank, 2, "--no-dspark").returncode
        == 0
    )


def _no_scale(inputs: Inputs, rank: int) -> None:
    shard = inputs.engram / "model-00048-of-00048.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"engram.embed.scale", b"engram.embed.scalo"))


def _other_rows(inputs: Inputs, rank: int) -> None:
    config = json.loads((inputs.model / "config.json").read_text())
    config["text_config"]["engram_num_embeddings"][1] += 1
    (inputs.model / "config.json").write_text(json.dumps(config))


def _short_rope(inputs: Inputs, rank: int) -> None:
    with (inputs.kit / "rope-compressed-sin.f32").open("r+b") as file:
        file.truncate((8192 + 16) * 128)


DAMAGE: dict[str, Callable[[Inputs, int], object]] = {
    "NoRankCache": lambda inputs, rank: _empty(inputs.rank_files[rank]),
    "NoRankCache (link)": _linked_rank_file,
    "SeveralRankCaches": _two_rank_files,
    "BadRankCache": _cut_rank_file,
    "NoDrafter": _without_drafts,
    "NoEngramTables": lambda inputs, _: _empty(inputs.engram),
    "MissingEngramTable": lambda inputs, _: (inputs.engram / "model-00047-of-00048.safetensors").unlink(),
    "MissingEngramTable (scale)": _no_scale,
    "BadEngramTable": _other_rows,
    "NoTokenMap": lambda inputs, _: inputs.token_map.unlink(),
    "ShortRopeTable": _short_rope,
    "NoVisionKit": lambda inputs, _: (inputs.kit / "vision/gate_bias_vl.safetensors").unlink(),
    "NoKernelImages": lambda inputs, _: (inputs.kit / "aot/aot.json").unlink(),
    "MissingTritonVariant": lambda inputs, _: (inputs.kit / "aot/cubins/hc_mix.cubin").unlink(),
    "FileNotFound": lambda inputs, _: (inputs.kit / "rope-plain-cos.f32").unlink(),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", DAMAGE)
def test_refuses_damaged_inputs_by_name(make_pair: PairFactory, copied: Inputs, name: str, rank: int) -> None:
    DAMAGE[name](copied, rank)
    if name == "BadEngramTable":
        assert one_rank(make_pair(inputs=copied), rank)[-1] == "error: BadEngramTable"
    else:
        assert one_rank(make_pair(inputs=copied), rank)[-1] == f"error: {name.split(maxsplit=1)[0]}"


def test_only_the_head_needs_the_attention_kernel_and_the_tower(
    make_pair: PairFactory, copied: Inputs
) -> None:
    (copied.kit / "vision/torch_fmha_sm120.cubin").unlink()
    for shard in copied.model.glob("*.safetensors"):
        shard.unlink()
    pair = make_pair(inputs=copied)
    assert one_rank(pair, 0)[-1] == "error: NoVisionKit"
    pair.start(1)
    with pytest.raises(Exception, match="timed out"):
        pair.exit_code(1, seconds=1)


def test_context_needs_one_row_more_than_a_round(make_pair: PairFactory) -> None:
    # The tables reach 8192 + 49 rows: the widest round of 48 rows just fits at 8192 positions.
    assert one_rank(make_pair(context=8225), 1)[-1] == "error: ShortRopeTable"
    pair = make_pair(head_env={"TF_DS_ROUND_ROWS": "48"}, worker_args=["--round-rows", "48"]).up()
    assert pair.alive(0)


@pytest.mark.parametrize(
    ("available", "env", "fits"),
    [
        (119_000_000, {}, True),
        # The default reserve is a tenth of MemTotal, 12,753,508 kB.
        (12_753_508 + 10_000, {}, False),
        (12_753_508 + 12_000, {}, True),
        (12_753_508 + 10_000, {"TENSORFOLD_MEMORY_RESERVE_GIB": "10"}, True),
        (119_000_000, {"TENSORFOLD_CUDA_MEMORY_LIMIT_GB": "0.001"}, False),
        (119_000_000, {"TENSORFOLD_MEMORY_RESERVE_GIB": "1"}, False),
    ],
)
def test_admission(make_pair: PairFactory, available: int, env: dict[str, str], fits: bool) -> None:
    pair = make_pair(head_env=env)
    (pair.roots[0] / "proc/meminfo").write_text(MEMINFO.format(available=available))
    if fits:
        pair.up()
    else:
        one_rank(pair, 0)
        assert "do not fit the memory budget" in pair.log(0) or "RESERVE_GIB=1" in pair.log(0)


def test_malformed_meminfo_is_refused(make_pair: PairFactory) -> None:
    pair = make_pair()
    (pair.roots[0] / "proc/meminfo").write_text("MemTotal: many\n")
    assert one_rank(pair, 0)[-1] == "error: BadMeminfo"


ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(ZERO, ""), ("same", "IB/RoCE v1"), ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")],
)
def test_ring_refuses_what_is_no_ipv4_v2_entry(
    make_pair: PairFactory, rank: int, value: str, kind: str
) -> None:
    pair = make_pair()
    port = pair.roots[rank] / "sys/class/infiniband/roceP2p1s0f0/ports/1"
    kept = (port / "gids/3").read_text().strip()
    set_gid(pair.roots[rank], "roceP2p1s0f0", 3, kept if value == "same" else value, kind)
    assert one_rank(pair, rank)[-1] == "error: VerbsFailed"


def test_ring_uses_gid_5_unless_told(make_pair: PairFactory) -> None:
    pair = make_pair(worker_env={"TF_RDMA_GID_INDEX": ""})
    assert one_rank(pair, 1) == [
        "error: RDMA rocep1s0f0: gid_index=5 is :: (empty)",
        "error: VerbsFailed",
    ]


@pytest.mark.parametrize(
    ("index", "ends"),
    [
        ("3", False),
        (None, False),  # unset: NCCL finds the entry itself
        ("4", True),  # a hole
        ("9", True),
        ("2", True),  # RoCE v1
        ("", True),  # empty is read as 0, a link-local v1 entry
    ],
)
def test_nccl_gid_index(make_pair: PairFactory, index: str | None, ends: bool) -> None:
    env = {
        "NCCL_IB_HCA": "rocep1s0f0,roceP2p1s0f0",
        "NCCL_SOCKET_IFNAME": "enp1s0f0np0",
        "NCCL_DEBUG": "INFO",
    }
    if index is not None:
        env["NCCL_IB_GID_INDEX"] = index
    pair = make_pair(worker_env=env)
    if ends:
        lines = one_rank(pair, 1)
        assert lines[-2:] == ["error: NCCL error: unhandled system error", "error: NcclFailed"]
        hole = "Call to ibv_modify_qp failed with 61 No data available, on dev rocep1s0f0:1" in pair.log(1)
        assert hole == (index in ("4", "9"))
    else:
        pair.up()
        assert "NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1s0f0:1/RoCE" in pair.log(1)


def test_nccl_without_a_device_falls_back_to_tcp(make_pair: PairFactory) -> None:
    env = {"NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "INFO"}
    pair = make_pair(worker_env=env).up()
    assert "NET/Socket" in pair.log(1) and "NET/IB" not in pair.log(1)
    env = {"NCCL_SOCKET_IFNAME": "eth9"}
    assert one_rank(make_pair(worker_env=env), 1)[-1] == "error: NcclFailed"


def test_rendezvous_address_must_be_this_node_s(make_pair: PairFactory) -> None:
    pair = make_pair(head_env={"TF_TP_MASTER": "192.0.2.1"})
    assert one_rank(pair, 0)[-1] == "error: AddressUnavailable"


def test_memory_claims_last_as_long_as_the_rank(make_pair: PairFactory, tmp_path: Path) -> None:
    account = tmp_path / "memory"
    account.mkdir()
    env = {"LAB_MEMORY_DIR": str(account)}
    pair = make_pair(head_env=env, worker_env=env).up()
    claims: dict[str, Any] = {}
    for path in account.iterdir():
        amount, name = path.read_text().split()
        claims[name] = int(amount)
    assert set(claims) == {"tensorfold", "tf-dsv41-lanes"}
    assert all(3 << 20 < amount < 4 << 20 for amount in claims.values())
    pair.processes[0].terminate()
    pair.exit_code(0)
    pair.exit_code(1)
    assert not list(account.iterdir())
