"""`tensorfold serve MODEL_DIR [options]`: rank 0, with the HTTP server."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from . import fabric, faults, lane, memory, modelconfig, rankfile, tables
from .api import Keys, Server
from .errors import EngineError, Panic, panic, report, say
from .generate import Generator
from .lanes_main import environment_switches, whole
from .link import Leader, Switches
from .tokens import Tokenizer

VERSION = "tensorfold 1.0.2 (lab stand-in)"
USAGE = "usage: tensorfold serve MODEL [--host H] [--port P] [--name NAME] [--context N] [--parallel N] ..."
VALUES: dict[str, tuple[float, float] | None] = {
    "--host": None,
    "--port": (1, 65535),
    "--name": None,
    "--api-key": None,
    "--api-key-file": None,
    "--context": (0, 1 << 31),
    "--parallel": (1, 64),
    "--max-tokens": (1, 1 << 31),
    "--temperature": (0, 2),
    "--top-p": (0, 1),
    "--top-k": (0, 1 << 31),
    "--min-p": (0, 1),
    "--prompt-cache-gib": (0, 1024),
    "--backend": None,
}
REALS = ("--temperature", "--top-p", "--min-p", "--prompt-cache-gib")
FLAGS = ("--thinking", "--no-thinking", "--no-drafts", "--no-update-check", "--metrics-open")


def bad(text: str) -> EngineError:
    return EngineError("BadArgument", text)


def parse(args: list[str]) -> tuple[str, dict[str, str], set[str]]:
    """(model, options with values, flags); BadArgument for what the engine does not know."""
    if len(args) < 2 or args[0] != "serve" or args[1].startswith("--"):
        raise bad(USAGE)
    values: dict[str, str] = {}
    flags: set[str] = set()
    rest = iter(args[2:])
    for name in rest:
        if name in FLAGS:
            flags.add(name)
            continue
        if name not in VALUES:
            raise bad(f"unknown argument {name}")
        value = next(rest, None)
        if value is None:
            raise bad(f"{name} has no value")
        limits = VALUES[name]
        if limits is not None:
            try:
                number: float = float(value) if name in REALS else int(value)
            except ValueError as error:
                raise bad(f"{name} {value}: not a number") from error
            if not limits[0] <= number <= limits[1]:
                raise bad(f"{name} {value}: from {limits[0]:g} to {limits[1]:g}")
        values[name] = value
    if values.get("--backend", "cuda") != "cuda":
        raise bad(f"--backend {values['--backend']}: this build has cuda only")
    return args[1], values, flags


def environment() -> tuple[int, str, int]:
    """(world, master, port) of TF_TP_*."""
    world = whole("TF_TP_WORLD", os.environ.get("TF_TP_WORLD") or "2", 2, 4)
    if world == 3:
        raise bad("TF_TP_WORLD 3: 2 or 4")
    master = os.environ.get("TF_TP_MASTER", "")
    try:
        ipaddress.IPv4Address(master)
    except ValueError as error:
        raise bad(f"TF_TP_MASTER {master}: a numeric IPv4 address") from error
    return world, master, whole("TF_TP_PORT", os.environ.get("TF_TP_PORT") or "29620", 1, 65535)


def switch(name: str) -> str:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise bad(f"{name}={value}: 0 or 1")
    return value


def stop_on_signal(leader: Leader) -> None:
    """SIGTERM and SIGINT: tell the other ranks that it is done, then leave."""

    def leave(*_: object) -> None:
        if leader.lock.acquire(timeout=3):  # a stalled round keeps it: then nobody is left to tell
            sender = threading.Thread(target=leader.done, daemon=True)
            sender.start()
            sender.join(3)
        say("[tensorfold] stopped")
        sys.stdout.flush()
        memory.release()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


def run(args: list[str]) -> int:
    if args[:1] == ["--version"]:
        print(VERSION)
        return 0
    try:
        model, values, flags = parse(args)
    except EngineError as error:
        report(error)
        return 2
    if not Path(model).is_dir():
        say(f"{model} is neither a directory nor a model name in the cache")
        return 1
    started = time.monotonic()
    world, master, rendezvous = environment()
    config = modelconfig.read(model)
    name = values.get("--name") or Path(model).name
    print(
        f"[tensorfold] loading {name}: DeepSeek-V4.1-Flash (deepseek_v41) on CUDA, rank 0 of {world}",
        flush=True,
    )
    keys = Keys(values.get("--api-key") or os.environ.get("TENSORFOLD_API_KEY"), values.get("--api-key-file"))
    context = int(values.get("--context", "0")) or config.max_positions
    if context > config.max_positions:
        raise bad(f"--context {context}: the model's window is {config.max_positions}")
    parallel = int(values.get("--parallel", "4"))
    streams = whole("TF_DS_STREAMS", os.environ.get("TF_DS_STREAMS") or "4", 1, 16)
    round_rows = whole("TF_DS_ROUND_ROWS", os.environ.get("TF_DS_ROUND_ROWS") or "16", 16, 48)
    drafts = "--no-drafts" not in flags
    switches = Switches(
        context=context,
        drafts=drafts,
        graphs=switch("TF_DS_GRAPHS"),
        side=switch("TF_DS_HC_SIDE"),
        prefetch=switch("TF_DS_L2_PREFETCH"),
        aio=switch("TF_DS_ENGRAM_AIO"),
        round_rows=round_rows,
        streams=streams,
        **environment_switches(),
    )
    tokenizer = Tokenizer(model)
    compressed = tables.token_map(os.environ.get("TF_DS_TOKEN_MAP"), config)
    engram = tables.Engram(os.environ.get("TF_DS_ENGRAM"), config)
    kit = tables.Kit(os.environ.get("TF_DS_KIT"), os.environ.get("TENSORFOLD_CUDA_KERNELS"), config, 0)
    kit.open_rope(context + round_rows + 1)
    vision = tables.vision_shard(model) if config.vision else 0
    cache = os.environ.get("TF_DS_RANK_CACHE")
    if not cache:
        raise EngineError("NoRankCache", "TF_DS_RANK_CACHE is not set")
    memory.admit(Path(cache, rankfile.find(cache, 0, world)).stat().st_size)
    faults.loading(0)
    weights = lane.load(cache, config, 0, world, drafts)
    fabric.nccl_check()
    rails = fabric.rdma_rails(os.environ.get("TF_RDMA_DEVICES"))
    memory.claim("tensorfold", weights.nbytes + vision, context)
    print(
        f"CUDA sm_121 device 0 (NVIDIA GB10, memory shared with the host): model "
        f"{(weights.nbytes + vision) / memory.GIB:.2f} GiB; {streams} streams; context {context}",
        flush=True,
    )
    own = lane.Lane(
        config=config, weights=weights, engram=engram, kit=kit, compressed=compressed, rank=0, world=world
    )
    peers = fabric.lead(master, rendezvous, world, rails)
    leader = Leader(own, peers, switches)
    stop_on_signal(leader)
    leader.warm_up()
    generator = Generator(
        config=config,
        tokenizer=tokenizer,
        leader=leader,
        context=context,
        parallel=parallel,
        streams=streams,
    )
    defaults: dict[str, Any] = {
        "max_tokens": int(values.get("--max-tokens", "32768")),
        "temperature": float(values.get("--temperature", "1.0")),
        "thinking": "--thinking" in flags,
        "metrics_open": "--metrics-open" in flags,
    }
    if config.vision:
        print("[tensorfold] images: on (PNG)", flush=True)
    host, port = values.get("--host", "127.0.0.1"), int(values.get("--port", "8080"))
    if not keys.required() and host not in ("localhost", "::1") and not host.startswith("127."):
        say(f"[tensorfold] warning: serving on {host} without an API key")
    try:
        server = Server(
            address=(host, port),
            generator=generator,
            name=name,
            keys=keys,
            defaults=defaults,
            vision=config.vision,
        )
    except OSError as error:
        raise EngineError("AddressInUse", f"{host}:{port}") from error
    print(
        f"[tensorfold] serving {name} at http://{host}:{port}/v1 on CUDA, rank 0 of {world} "
        f"(drafts: {'on' if drafts else 'off'}; context: {context}; "
        f"loaded in {time.monotonic() - started:.1f}s)",
        flush=True,
    )
    server.serve_forever()
    return 0


def main() -> int:
    """Serve; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(sys.argv[1:])
    except EngineError as error:
        return report(error)
    except Panic as error:
        panic(str(error))
