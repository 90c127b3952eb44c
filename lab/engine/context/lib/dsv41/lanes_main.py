"""`tf-dsv41-lanes MODEL CACHE_DIR RANK WORLD MASTER_IP PORT KIT [--option VALUE]...`: a following rank."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import sys
import time
from pathlib import Path

from . import fabric, faults, lane, memory, modelconfig, tables
from .errors import EngineError, Panic, panic, report, say
from .link import Switches, serve_peer

USAGE = (
    "usage: tf-dsv41-lanes MODEL_DIR CACHE_DIR RANK WORLD MASTER_IP PORT KIT_DIR [--engram DIR] "
    "[--token-map FILE] [--pool P] [--drafts 0|1] [--rdma DEVICES] [--rdma-kernels FATBIN] [--graphs 0|1] "
    "[--side 0|1] [--prefetch 0|1] [--aio 0|1] [--round-rows N] [--streams N] [--context N] [--arena-gib G]"
)
SWITCH = ("0", "1")
OPTIONS: dict[str, tuple[str, ...] | None] = {
    "--engram": None,
    "--token-map": None,
    "--pool": None,
    "--drafts": SWITCH,
    "--rdma": None,
    "--rdma-kernels": None,
    "--graphs": SWITCH,
    "--side": SWITCH,
    "--prefetch": SWITCH,
    "--aio": SWITCH,
    "--round-rows": None,
    "--streams": None,
    "--context": None,
    "--arena-gib": None,
}
NUMBERS = ("--pool", "--context", "--round-rows", "--streams", "--arena-gib")


def bad(text: str) -> EngineError:
    return EngineError("BadArgument", text)


def whole(name: str, text: str, low: int, high: int) -> int:
    """A whole number of an option or variable, within its limits."""
    if not text.isdigit() or not low <= int(text) <= high:
        raise bad(f"{name} {text}: a whole number from {low} to {high}")
    return int(text)


def options(args: list[str]) -> dict[str, str]:
    """Key and value pairs; an unknown key, a missing value or a wrong switch is BadArgument."""
    found: dict[str, str] = {}
    for at in range(0, len(args), 2):
        name = args[at]
        if name not in OPTIONS:
            raise bad(f"unknown option {name}")
        if at + 1 == len(args):
            raise bad(f"{name} has no value")
        value = args[at + 1]
        allowed = OPTIONS[name]
        if allowed is not None and value not in allowed:
            raise bad(f"{name} {value}: {' or '.join(allowed)}")
        if name in NUMBERS and not value.isdigit():
            raise bad(f"{name} {value}: not a whole number")
        found[name] = value
    return found


def environment_switches() -> dict[str, str]:
    """The switches that every rank takes from its environment."""
    return {
        "replay_floor": os.environ.get("TF_DS_REPLAY_FLOOR", "0"),
        "index_split": os.environ.get("TF_DS_IDX_SPLIT", "0"),
        "image_cache": os.environ.get("TF_DS_IMAGE_CACHE", "1"),
        "engram_lanes": os.environ.get("TF_DS_ENGRAM_LANES", "1"),
        "interleave_ms": os.environ.get("PREFILL_INTERLEAVE_MS", "0"),
    }


def run(args: list[str]) -> int:
    if len(args) < 7:
        say(USAGE)
        return 2
    model_dir, cache_dir, rank_text, world_text, master, port_text, kit_dir = args[:7]
    try:
        world = whole("WORLD", world_text, 2, 4)
        rank = whole("RANK", rank_text, 1, world - 1)
        port = whole("PORT", port_text, 1, 65535)
        if world == 3:
            raise bad("WORLD 3: 2 or 4")
        try:
            ipaddress.IPv4Address(master)
        except ValueError as error:
            raise bad(f"MASTER_IP {master}: a numeric IPv4 address") from error
        given = options(args[7:])
    except EngineError as error:
        report(error)
        return 2
    if not Path(model_dir).is_dir():
        say(f"{model_dir} is neither a directory nor a model name in the cache")
        return 1
    started = time.monotonic()
    config = modelconfig.read(model_dir)
    pool = int(given.get("--pool") or given.get("--context") or 0) or config.max_positions
    drafts = given.get("--drafts", "1") == "1"
    faults.loading(rank)
    weights = lane.load(cache_dir, config, rank, world, drafts)
    engram = tables.Engram(given.get("--engram"), config)
    compressed = tables.token_map(given.get("--token-map"), config)
    kit = tables.Kit(kit_dir, None, config, rank)
    round_rows = int(given.get("--round-rows", "16"))
    kit.open_rope(pool + round_rows + 1)
    fabric.nccl_check()
    rails = fabric.rdma_rails(given.get("--rdma"))
    claimed = memory.claim("tf-dsv41-lanes", weights.nbytes, pool)
    switches = Switches(
        context=pool,
        drafts=drafts,
        graphs=given.get("--graphs", "0"),
        side=given.get("--side", "0"),
        prefetch=given.get("--prefetch", "0"),
        aio=given.get("--aio", "0"),
        round_rows=round_rows,
        streams=int(given.get("--streams", "4")),
        **environment_switches(),
    )
    peer = fabric.follow(master, port, rank, world, rails)
    ready = {
        "rank": rank,
        "loaded_s": round(time.monotonic() - started, 3),
        "pool": pool,
        "drafts": drafts,
        "arena_used": claimed,
    }
    print(json.dumps(ready), flush=True)
    own = lane.Lane(
        config=config, weights=weights, engram=engram, kit=kit, compressed=compressed, rank=rank, world=world
    )
    serve_peer(own, peer, switches)
    return 0


def main() -> int:
    """Follow rank 0; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(sys.argv[1:])
    except EngineError as error:
        return report(error)
    except Panic as error:
        panic(str(error))
