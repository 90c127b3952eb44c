"""make_bias_vl.py ORIGINAL OUT: copy every *.ffn.gate.bias_vl of the original release into one safetensors file."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any


def tensor(path: Path, name: str) -> tuple[dict[str, Any], bytes]:
    """One tensor of a shard: its row of the header, and its bytes."""
    with path.open("rb") as shard:
        (length,) = struct.unpack("<Q", shard.read(8))
        row: dict[str, Any] = json.loads(shard.read(length))[name]
        begin, end = row["data_offsets"]
        shard.seek(8 + length + begin)
        return row, shard.read(end - begin)


def main() -> int:
    """Entry point."""
    original, out = (Path(word) for word in sys.argv[1:3])
    index = json.loads((original / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    header: dict[str, Any] = {"__metadata__": {"source": "the original release"}}
    data = b""
    for name in sorted(name for name in index if name.endswith(".ffn.gate.bias_vl")):
        row, raw = tensor(original / index[name], name)
        header[name] = {**row, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    out.write_bytes(struct.pack("<Q", len(text)) + text + data)
    print(f"{len(header) - 1} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
