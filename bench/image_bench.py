"""Three ways of an image from one lab node to the other: registry, laid-down layers, ``docker save`` over ssh.

    LAB_NAME=lab python -m bench.image_bench [--megabytes 120] [--rate 500mbit] [--runs 3] [--source spark-2]

Ratios only: the nodes share the machine's cores. Each way moves one image to a node that has none of it, then the
same image with its topmost layer changed, then a third one whose move is cut when half of it came and done again. The
bytes are those that the rail's netdev counted. The lab must be up; what the bench makes is removed again. Prints one
JSON object a row.

The registry is Debian's ``docker-registry``, started for the move on the source and reached on the loopback address of
the receiver, because a Docker engine trusts a plain registry there alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.transfer import RAIL, shell
from lab.config import NODES, REPOSITORY
from lab.testing import Node, nodes

BENCH = "/var/lib/sparkfleet/bench"
PORT, SHARE = 29981, 29982
LAYERS = 6
#: Half of it random, half a repeated text: what gzip makes of binaries and libraries.
FILL = """
import os, sys
path, size = sys.argv[1], int(sys.argv[2])
with open(path, "wb") as out:
    for _ in range(size):
        out.write(os.urandom(1 << 19) + os.urandom(64) * (1 << 13))
"""
#: The collection's own source and receiver, as the module calls them, without Ansible around them.
OURS = """
import json, sys
from pathlib import Path
sys.path.insert(0, "/var/lib/sparkfleet/bench/lib")
from pkg import docker_api, fabric_copy, image_archive, image_move, tree
what, reference, work = sys.argv[1], sys.argv[2], Path("/var/lib/sparkfleet/bench/transfer")
api, progress = docker_api.DockerApi(), tree.Progress(None, what, 0)
if what == "holding":
    print(json.dumps(image_move.holding(api).as_dict()))
elif what == "export":
    image = api.image_inspect(reference)
    needed = image_archive.parse_holding(json.load(sys.stdin)).lacks(image["RootFS"]["Layers"])
    laid = image_move.export(api, reference, work, size=image["Size"], needed=needed, progress=progress)
    print(json.dumps(laid.as_dict()))
else:
    image_move.bring(api, reference, work, laid=image_archive.parse_laid(json.load(sys.stdin)),
                     mine=image_move.holding(api), source=fabric_copy.Source(sys.argv[3], int(sys.argv[4])),
                     data_dir="/var/lib/sparkfleet/bench", reserve_bytes=0, parallel=4, progress=progress)
"""


@dataclass
class Pair:
    """Source and receiver, and the source's address on the rail."""

    source: Node
    target: Node
    address: str


def received(node: Node) -> int:
    return int(node.read(f"/sys/class/net/{RAIL}/statistics/rx_bytes"))


def prepare(pair: Pair, megabytes: int) -> None:
    for number, node in enumerate(nodes(), 1):
        shell(node, f"ip link set {RAIL} up mtu 9000; ip address replace 10.77.0.{number}/30 dev {RAIL}")
        shell(node, f"mkdir -p {BENCH}/lib/pkg {BENCH}/context")
        node.write(f"{BENCH}/lib/pkg/__init__.py", "")
        for path in sorted((REPOSITORY / "plugins/module_utils").glob("*.py")):
            if path.name != "__init__.py":
                node.write(f"{BENCH}/lib/pkg/{path.name}", path.read_text(encoding="utf-8"))
        node.write(f"{BENCH}/ours.py", OURS)
        node.write(f"{BENCH}/fill.py", FILL)
    each = megabytes // LAYERS
    for number in range(LAYERS - 1):
        shell(pair.source, f"python3 {BENCH}/fill.py {BENCH}/context/{number} {each}")
    copies = "".join(f"COPY {number} /{number}\n" for number in range(LAYERS))
    pair.source.write(f"{BENCH}/context/Dockerfile", f'FROM scratch\n{copies}CMD ["/0"]\n')
    for version in ("one", "two"):
        shell(pair.source, f"python3 {BENCH}/fill.py {BENCH}/context/{LAYERS - 1} {each}")
        shell(pair.source, f"DOCKER_BUILDKIT=0 docker build -q -t bench/image:{version} {BENCH}/context")
    pair.source.write(
        f"{BENCH}/registry.yml",
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {BENCH}/registry}}}}\n"
        f"http: {{addr: ':{PORT}'}}\n",
    )
    pair.source.write(
        f"{BENCH}/rsyncd.conf",
        f"address = {pair.address}\nport = {SHARE}\nuse chroot = no\n"
        f"[tree]\npath = {BENCH}/transfer\nread only = yes\n",
    )
    shell(pair.source, f"mkdir -p {BENCH}/transfer")
    shell(
        pair.source,
        f"systemd-run -q --unit=bench-share rsync --daemon --no-detach --config={BENCH}/rsyncd.conf",
    )
    shell(
        pair.target,
        f"systemd-run -q --unit=bench-loop --socket-property=ListenStream=127.0.0.1:{PORT} "
        f"/usr/lib/systemd/systemd-socket-proxyd {pair.address}:{PORT}",
    )
    shell(
        pair.target,
        "test -e /root/.ssh/bench || (mkdir -p /root/.ssh && ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/bench)",
    )
    public = pair.target.read("/root/.ssh/bench.pub")
    shell(
        pair.source, f"mkdir -p /home/spark/.ssh && echo '{public} bench' >> /home/spark/.ssh/authorized_keys"
    )


def forget(pair: Pair, *, keep: bool = False) -> None:
    """The receiver without the image (and its layers), the source without what a move left."""
    if not keep:
        shell(
            pair.target,
            "docker images -q --no-trunc 'bench/*' | xargs -r docker rmi -f; "
            f"docker images -q --no-trunc '127.0.0.1:{PORT}/bench/*' | xargs -r docker rmi -f; "
            # What Docker does not list, because a pull found its snapshots and fetched no bytes; and the sweep itself.
            "ctr -n moby images ls -q | grep /bench/ | xargs -r ctr -n moby images rm --sync; "
            # A move that was cut leaves a lease of a day, under which containerd keeps what came.
            "ctr -n moby leases ls -q | xargs -r ctr -n moby leases rm --sync >/dev/null 2>&1; true",
        )
    shell(pair.target, f"rm -rf {BENCH}/transfer {BENCH}/.transfer.proof.json")
    # The registry is there for one move: its storage would be a second copy of every image on the source.
    shell(
        pair.source, f"systemctl stop bench-registry 2>/dev/null; rm -rf {BENCH}/registry {BENCH}/transfer/*"
    )


def clean(pair: Pair) -> None:
    forget(pair)
    for node in (pair.source, pair.target):
        node.run(
            "sh",
            "-c",
            f"tc qdisc del dev {RAIL} root; systemctl stop bench-share bench-registry bench-loop.socket bench-loop;"
            f" docker images -q --no-trunc '*/image' | xargs -r docker rmi -f; rm -rf {BENCH}",
        )
    pair.target.run("sh", "-c", "rm -f /root/.ssh/bench /root/.ssh/bench.pub")
    pair.source.run("sed", "-i", "/bench$/d", "/home/spark/.ssh/authorized_keys")


def by_registry(pair: Pair, version: str) -> None:
    here = f"127.0.0.1:{PORT}/bench/image:{version}"
    pair.source.run(
        "systemd-run", "-q", "--unit=bench-registry", "docker-registry", "serve", f"{BENCH}/registry.yml"
    )
    shell(
        pair.source,
        f"docker tag bench/image:{version} {here}; for n in 1 2 3 4 5 6 7 8; do docker push -q {here} && break; "
        f"sleep 0.2; done; docker rmi {here} >/dev/null",
    )
    shell(pair.target, f"docker pull -q {here}")


def by_layers(pair: Pair, version: str) -> None:
    reference = f"bench/image:{version}"
    ours = f"python3 {BENCH}/ours.py"
    shell(pair.target, f"mkdir -p {BENCH}")
    pair.source.write(f"{BENCH}/holding.json", shell(pair.target, f"{ours} holding {reference}"))
    laid = shell(pair.source, f"{ours} export {reference} < {BENCH}/holding.json")
    pair.target.write(f"{BENCH}/laid.json", laid)
    shell(pair.target, f"{ours} bring {reference} {pair.address} {SHARE} < {BENCH}/laid.json")


def by_ssh(pair: Pair, version: str) -> None:
    shell(
        pair.target,
        "ssh -i /root/.ssh/bench -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q "
        f"spark@{pair.address} sudo docker save bench/image:{version} | docker load -q",
    )


#: What is killed on the receiver to cut a move.
CUTS = {
    "registry": "pkill -f 'docker pull -q 127'",
    "layers": "pkill -f ours.py; pkill rsync",
    "ssh": "pkill -f 'docker load'; pkill -f bench/image",
}


def cut_at_half(pair: Pair, way: str, run: Callable[[Pair, str], None], bytes_cold: int) -> int:
    """Cut a cold move when half of it came; the bytes that the second try moves."""
    before = received(pair.target)
    killer = (
        f"for n in $(seq 1200); do test $(cat /sys/class/net/{RAIL}/statistics/rx_bytes) -gt "
        f"{before + bytes_cold // 2} && break; sleep 0.05; done; {CUTS[way]}; true"
    )
    pair.target.write(f"{BENCH}/cut.sh", killer)
    shell(pair.target, f"systemd-run -q --collect sh {BENCH}/cut.sh")
    try:
        run(pair, "one")
    except AssertionError:
        time.sleep(2)
    else:
        raise AssertionError(f"{way}: the move ended before it was cut")
    between = received(pair.target)
    run(pair, "one")
    return received(pair.target) - between


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.image_bench", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=120)
    parser.add_argument("--rate", default="500mbit", help="limit of the rail (tbf); empty for none")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--source", choices=NODES, default=NODES[0])
    options = parser.parse_args()
    both = nodes()
    first = NODES.index(options.source)
    pair = Pair(both[first], both[1 - first], f"10.77.0.{first + 1}")
    ways: dict[str, Callable[[Pair, str], None]] = {
        "ssh": by_ssh,
        "registry": by_registry,
        "layers": by_layers,
    }
    try:
        prepare(pair, options.megabytes)
        if options.rate:
            shell(
                pair.source, f"tc qdisc add dev {RAIL} root tbf rate {options.rate} burst 4mb latency 100ms"
            )
        kinds = (("cold", "one"), ("one layer changed", "two"))
        taken: dict[tuple[str, str], list[float]] = {(way, what): [] for way in ways for what, _ in kinds}
        moved: dict[tuple[str, str], list[int]] = {one: [] for one in taken}
        # The ways take turns: what else the machine does then falls on each of them.
        for _ in range(options.runs):
            for way, run in ways.items():
                forget(pair)
                for what, version in kinds:
                    forget(pair, keep=True)
                    start, count = time.monotonic(), received(pair.target)
                    run(pair, version)
                    taken[way, what].append(time.monotonic() - start)
                    moved[way, what].append(received(pair.target) - count)
        for way, run in ways.items():
            forget(pair)
            again = cut_at_half(pair, way, run, int(statistics.median(moved[way, "cold"])))
            least = options.megabytes * 1e6 / (2.5 if way == "registry" else 1)
            assert min(moved[way, "cold"]) > least, f"{way}: the receiver had a part of the image already"
            for what, _version in kinds:
                seconds, count = statistics.median(taken[way, what]), int(statistics.median(moved[way, what]))
                plain = statistics.median(taken["ssh", what]), statistics.median(moved["ssh", what])
                row = {
                    "way": way,
                    "what": what,
                    "seconds": round(seconds, 2),
                    "spread": [round(value, 2) for value in sorted(taken[way, what])],
                    "MB": round(count / 1e6, 1),
                    "times_as_fast_as_ssh": round(plain[0] / seconds, 2),
                    "bytes_of_ssh": round(count / plain[1], 3),
                    "source": options.source,
                    "rail": options.rate or "no limit",
                }
                if what == "cold":
                    row["moved_again_after_a_cut_at_half"] = round(again / count, 2)
                print(json.dumps(row), flush=True)
    finally:
        clean(pair)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
