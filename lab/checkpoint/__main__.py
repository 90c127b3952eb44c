"""`python -m lab.checkpoint OUT_DIR [--seed N] [--context N]`; `--full-headers CONFIG`: sparse shards."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lab.checkpoint import repos
from lab.checkpoint.config import load_config
from lab.checkpoint.inventory import first_pack_bits


def main(argv: list[str] | None = None) -> int:
    """Generate, then print one JSON object: repository name to revision, path and bytes."""
    parser = argparse.ArgumentParser(prog="python -m lab.checkpoint", description=__doc__)
    parser.add_argument("out", type=Path, help="root folder of the Hub stand-in")
    parser.add_argument("--seed", type=int, default=1017, help="other weights (default %(default)s)")
    parser.add_argument(
        "--context", type=int, default=8192, help="context that the RoPE tables reach (%(default)s)"
    )
    parser.add_argument(
        "--full-headers", type=Path, metavar="CONFIG", help="write OUT as sparse full-size shards"
    )
    options = parser.parse_args(argv)
    if options.full_headers is not None:
        total = repos.full_headers(options.out, load_config(options.full_headers), first_pack_bits)
        print(json.dumps({"path": str(options.out), "bytes": total}))
        return 0
    stamp: Path = options.out / f".generated-{options.seed}-{options.context}.json"
    if stamp.exists():
        known = json.loads(stamp.read_text())
        if all(Path(options.out, name, entry["revision"]).is_dir() for name, entry in known.items()):
            for name, entry in known.items():
                Path(options.out, name, "refs/main").write_text(entry["revision"] + "\n")
            print(json.dumps(known, indent=1))
            return 0
    result = {
        repo.name: {"revision": repo.revision, "path": str(repo.path), "bytes": repo.nbytes}
        for repo in repos.generate(options.out, options.seed, options.context)
    }
    stamp.write_text(json.dumps(result))
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
