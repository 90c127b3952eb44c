"""One small Engram table, for a machine that has Python and no more."""

from __future__ import annotations

ROWS = 20000


def script(folder: str) -> str:
    """A Python script that writes ``tables.safetensors`` with the table of layer 1: scales first, then weights."""
    return f"""
import json, os, struct
cut, end = {ROWS} * 8, {ROWS} * 264
header = json.dumps({{
    "layers.1.engram.embed.scale": {{"dtype": "F8_E8M0", "shape": [{ROWS}, 8], "data_offsets": [0, cut]}},
    "layers.1.engram.embed.weight": {{"dtype": "F8_E4M3", "shape": [{ROWS}, 256], "data_offsets": [cut, end]}},
}}).encode()
os.makedirs("{folder}", exist_ok=True)
with open("{folder}/tables.safetensors", "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header + os.urandom(end))
"""
