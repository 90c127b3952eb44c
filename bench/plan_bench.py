# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Measure the planner at full size, and set it beside kvfit and sparkfit on what those accept.

    python bench/plan_bench.py [--no-peers] [--peers VENV/bin] [--runs 3] [--out FILE]

Full size: 39 sparse shards of 210.6 GB with real headers, read after their pages were dropped from the cache
(posix_fadvise), then over HTTP ranges from a local server, then from a kept lock. Aims: a plan from cold
headers under 5 s and 500 MB, ``sparkplan --help`` under 0.3 s. Figures are best of the runs; seconds hang on
what else the machine does, processor seconds less so, ratios within one run least: ours are set against Python's
json alone reading the same headers and index, the peers' against ours. Without --peers the two peers are
installed, pinned, into .cache/peers.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]
SPARKPLAN = [sys.executable, "-S", str(ROOT / "tools" / "sparkplan")]
LLAMA = ROOT / "tests" / "fixtures" / "plan" / "exl3" / "tiny-llama-exl3-3.0bpw"
FLASH = ROOT / "tests" / "fixtures" / "plan" / "deepseek-v41-flash.config.json"
RANK_0 = "rank0of2-274304f92f5400805bf9.bin"
COMMIT = "64ba41b6c916a587db06eae2e19b7845f7be6e6b"


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one folder as a Hub repository, by ranges; reads no more than it sends."""

    root = Path()
    sent = 0

    def log_message(self, *args: object) -> None:
        pass

    def _reply(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        Hub.sent += len(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            rows = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(self.root.iterdir())]
            return self._reply(200, json.dumps({"sha": COMMIT, "siblings": rows, "id": "own/m"}).encode())
        file = self.root / path.rpartition("/")[2]
        if not file.is_file():
            return self._reply(404, b"")
        begin, _dash, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        with file.open("rb") as stream:
            stream.seek(int(begin))
            body = stream.read(int(end) - int(begin) + 1 if end else -1)
        return self._reply(206 if end else 200, body)


def serve(root: Path) -> str:
    """Start a server for a folder; its address."""
    Hub.root, Hub.sent = root, 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


#: Published on PyPI; both need nothing but Python.
PEERS = ("kvfit==0.3.0", "sparkfit==0.5.0")
#: The yardstick: the same headers and the index through json, and nothing done with them.
JSON_ALONE = """
import gc, json, pathlib, struct, sys
gc.disable()
kept = []
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with path.open("rb") as stream:
        if path.suffix == ".safetensors":
            kept.append(json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0])))
        else:
            kept.append(json.loads(stream.read()))
print(len(kept))
"""


def install_peers() -> Path:
    """The bin folder of an environment with the peers; made once, kept in .cache."""
    folder = ROOT / ".cache" / "peers"
    if not (folder / "bin" / "sparkfit").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, *PEERS], check=True)
    return folder / "bin"


#: A small process in between, so that the peak is the command's own and not this program's before the exec.
LAUNCH = """
import json, resource, subprocess, sys, time
begin = time.monotonic()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
use = resource.getrusage(resource.RUSAGE_CHILDREN)
wall = time.monotonic() - begin
json.dump([wall, use.ru_utime + use.ru_stime, use.ru_maxrss / 1024, done.stdout], sys.stdout)
"""


class Cost(NamedTuple):
    """Best wall and processor seconds of the runs, highest peak of memory, and the last output."""

    wall: float
    processor: float
    peak: float
    text: str

    @property
    def cells(self) -> str:
        """The three figures as cells of a table."""
        return f"{self.wall:.2f} | {self.processor:.2f} | {self.peak:.0f}"


def measure(command: list[str], runs: int, before: Callable[[], None] | None = None) -> Cost:
    """Run a command several times."""
    found = []
    for _run in range(runs):
        if before:
            before()
        launch = [sys.executable, "-S", "-c", LAUNCH, *command]
        done = subprocess.run(launch, capture_output=True, text=True, check=True)
        found.append(Cost(*json.loads(done.stdout)))
    return Cost(
        min(cost.wall for cost in found),
        min(cost.processor for cost in found),
        max(cost.peak for cost in found),
        found[-1].text,
    )


def drop(folder: Path) -> None:
    """Drop the pages of a folder's files from the cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def ours(folder: Path, runs: int) -> list[str]:
    """Rows of the planner, each with its processor seconds as a multiple of the yardstick's."""
    from tools.plan_fullsize import write_full_size

    size = write_full_size(folder / "full")
    full = [*SPARKPLAN, str(folder / "full"), "--context", "524288"]
    lock = folder / "lock.json"
    rows: list[str] = []
    base = measure(
        [sys.executable, "-S", "-c", JSON_ALONE, str(folder / "full")], runs, lambda: drop(folder / "full")
    )

    def add(what: str, cost: Cost, aim: str = "") -> None:
        rows.append(f"| {what} | {cost.cells} | {cost.processor / base.processor:.2f} | {aim} |")

    add("json alone: the same headers and index, parsed", base)
    cost = measure([*full, "--write-lock", str(lock)], runs, lambda: drop(folder / "full"))
    assert RANK_0 in cost.text, cost.text
    add(f"plan of {size / 1e9:.1f} GB from cold headers", cost, "under 5 s, 500 MB")
    address = serve(folder / "full")
    remote = [*SPARKPLAN, f"own/m@{COMMIT}", "--endpoint", address, "--context", "524288"]
    cost = measure(remote, runs)
    assert RANK_0 in cost.text, cost.text
    add(f"the same over HTTP ranges, {Hub.sent / runs / 1e6:.1f} MB received", cost, "about 20 MB")
    cost = measure([*SPARKPLAN, str(lock), "--context", "524288"], runs)
    add(f"the same from a kept lock of {lock.stat().st_size / 1e3:.0f} kB", cost)
    add("`sparkplan --help`", measure([*SPARKPLAN, "--help"], max(runs, 5)), "under 0.3 s")
    return rows


def peers(bin_dir: Path, folder: Path, runs: int) -> list[str]:
    """Rows of kvfit and sparkfit beside ours, on a plain model that all accept and on the real one."""
    from tests.unit.plan.small import lay_out_exl3

    llama = lay_out_exl3(LLAMA.name, folder)
    flash = folder / "flash"
    flash.mkdir()
    (flash / "config.json").write_bytes(FLASH.read_bytes())
    shard = flash / "model.safetensors"
    with shard.open("wb") as stream:
        stream.truncate(210_600_939_078)
    patch = "import sys, kvfit.hf, kvfit.dpa; kvfit.hf.HF_BASE = kvfit.dpa.HF_BASE = sys.argv.pop(1); "
    patch += "from kvfit.cli import main; sys.exit(main())"
    rows = []
    for name, root, context in (("tiny Llama", llama, 4096), ("DeepSeek-V4.1-Flash", flash, 524_288)):
        kvfit = [
            str(bin_dir / "python"), "-c", patch, serve(root), "own/m",
            "--system", "dgx-spark", "--nodes", "2", "--tp", "2", "--context", str(context), "--kv-dtype",
            "fp8", "--concurrent-users", "4",
        ]  # fmt: skip
        weights = sum(p.stat().st_size for p in root.glob("*.safetensors")) / 1e9
        sparkfit = [
            str(bin_dir / "sparkfit"), "cluster", str(root / "config.json"), "-N", "2", "--parallelism", "tp",
            "--weights-gb", str(weights), "-c", str(context),
            "-n", "4", "--kv-dtype", "fp8", "--json",
        ]  # fmt: skip
        lock = ROOT / "models" / "deepseek-v41-flash-exl3-2.9bpw.json"
        engine = "plain_tp" if root == llama else "tensorfold_native"
        own = [
            *SPARKPLAN,
            str(llama if root == llama else lock),
            "--engine",
            engine,
            "--context",
            str(context),
            "--json",
        ]
        mine = measure(own, runs)
        for tool, command in (("sparkplan", own), ("kvfit", kvfit), ("sparkfit", sparkfit)):
            cost = mine if tool == "sparkplan" else measure(command, runs)
            ratio = f"{cost.processor / mine.processor:.2f}"
            rows.append(f"| {tool} | {name} | {cost.cells} | {ratio} | {answer(tool, cost.text)} |")
    return rows


def answer(tool: str, text: str) -> str:
    """The verdict of a tool in a few words."""
    try:
        document = json.loads(text)
    except ValueError:
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        told = [line for line in lines if "unsupported" in line or "refus" in line or "fit" in line.lower()]
        return (told or lines or ["nothing"])[0][:150].replace("|", "/")
    if tool == "sparkfit":
        memory = document["memory_gb"]
        return f"{memory['per_node_used']} of {memory['per_node_total']} GB a node, fits: {document['fits']}"
    budget = document["budget"]
    node = budget["nodes"][0]
    verdict = budget["verdict"].replace("_", " ")
    return f"load {node['load_gib']:.2f} GiB, {node['worst_gib']:.2f} left at worst, {verdict}"


def main() -> int:
    """Run and print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="bin folder of an environment with kvfit and sparkfit")
    parser.add_argument("--no-peers", action="store_true", help="measure sparkplan alone")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = hashlib.sha256(
        b"".join(p.read_bytes() for p in sorted((ROOT / "plugins/module_utils").glob("*.py")))
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = [
            "# Bench of the planner",
            "",
            f"`python bench/plan_bench.py`; Python {platform.python_version()}, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}, sources {source.hexdigest()[:12]}. Best of {options.runs} runs.",
            "",
            "| what | seconds | processor seconds | peak MB | times json alone | aim |",
            "|---|---:|---:|---:|---:|---|",
            *ours(folder, options.runs),
        ]
        if not options.no_peers:
            out += [
                "",
                "Side by side, two Sparks, four users, FP8 cache where the tool takes it:",
                "",
                "| tool | model | seconds | processor seconds | peak MB | times sparkplan | answer |",
                "|---|---|---:|---:|---:|---:|---|",
                *peers(options.peers or install_peers(), folder, options.runs),
            ]
    text = "\n".join(out) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
