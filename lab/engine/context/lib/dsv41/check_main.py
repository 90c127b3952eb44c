"""`tf-dsv41-check MODEL_DIR CACHE_DIR RANK WORLD [--no-dspark] [--parity] [--bytes N]`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from . import modelconfig, rankfile, shards, split
from .errors import EngineError, EntryError, Panic, panic, report, say
from .rank_cache_main import number

USAGE = "usage: tf-dsv41-check MODEL_DIR CACHE_DIR RANK WORLD [--no-dspark] [--parity] [--bytes N]"
DETAILS = 10


def detail(counter: int, line: str) -> int:
    """Print the first lines of a kind of difference and count all of them."""
    if counter < DETAILS:
        print(line)
    return counter + 1


def run(args: list[str]) -> int:
    if len(args) < 4:
        say(USAGE)
        return 2
    model, cache, rank, world = args[0], args[1], number(args[2]), number(args[3])
    options = args[4:]
    every = number(options[options.index("--bytes") + 1]) if "--bytes" in options[:-1] else 0
    config = modelconfig.read(model)
    planned = split.entries(config, rank, world, "--parity" in options, "--no-dspark" not in options)
    rows = list(rankfile.layout(planned, shards.scan(model)))
    path = Path(cache, rankfile.find(cache, rank, world))
    stored, index_at = rankfile.open_index(path)
    mismatches = layouts = compared = compared_bytes = bytes_wrong = 0
    reader = shards.Reader()
    with path.open("rb") as file:
        for number_of_row, (want, found) in enumerate(zip(rows, stored, strict=False)):
            if want.key != found.key:
                mismatches = detail(
                    mismatches, f"entry {number_of_row}: {found.key} where {want.key} is planned"
                )
                continue
            if (want.dtype, want.shape, want.offset) != (found.dtype, found.shape, found.offset):
                layouts = detail(layouts, f"{want.key}: {found.dtype} {list(found.shape)} at {found.offset}")
                continue
            expert = re.search(r"\.ffn\.experts\.(\d+)\.", want.key)
            if not every or (expert and int(expert.group(1)) % every):
                continue
            file.seek(found.offset)
            compared += 1
            compared_bytes += found.nbytes
            if file.read(found.nbytes) != rankfile.contents(want, reader):
                bytes_wrong = detail(bytes_wrong, f"{want.key}: bytes differ")
    ok = len(rows) == len(stored) and not (mismatches or layouts or bytes_wrong)
    result = {
        "file": str(path),
        "entries": len(stored),
        "planned": len(rows),
        "bytes": index_at,
        "index_at": index_at,
        "mismatches": mismatches,
        "layout_mismatches": layouts,
        "compared": compared,
        "compared_bytes": compared_bytes,
        "byte_mismatches": bytes_wrong,
        "ok": ok,
    }
    print(json.dumps(result))
    return 0 if ok else 1


def main() -> int:
    """Run the checker; the exit code."""
    try:
        return run(sys.argv[1:])
    except EngineError as error:
        return report(error)
    except EntryError as error:
        say(str(error))
        return 1
    except Panic as error:
        panic(str(error))
