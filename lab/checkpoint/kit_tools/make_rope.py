"""make_rope.py MODEL KIT: write the four RoPE tables into KIT and compare them with KIT/rope.json."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from pathlib import Path
from typing import Any


def tables(config: dict[str, Any], rows: int) -> dict[str, bytes]:
    """Four tables of float32 [rows, half]: cos and sin, of the window layers and of the compressed ones."""
    text = config["text_config"]
    half = int(text["qk_rope_head_dim"]) // 2
    result: dict[str, bytes] = {}
    for kind, theta in (("plain", text["rope_theta"]), ("compressed", text["compress_rope_theta"])):
        steps = [float(theta) ** (-pair / half) for pair in range(half)]
        for part, function in (("cos", math.cos), ("sin", math.sin)):
            values = array("f", (function(row * step) for row in range(rows) for step in steps))
            result[f"rope-{kind}-{part}.f32"] = values.tobytes()
    return result


def main() -> int:
    """Entry point: 1 where a table is not the kit's."""
    model, kit = (Path(word) for word in sys.argv[1:3])
    wanted = json.loads((kit / "rope.json").read_text(encoding="utf-8"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    differ = 0
    for name, data in tables(config, int(wanted["rows"])).items():
        (kit / name).write_bytes(data)
        same = hashlib.sha256(data).hexdigest() == wanted[name]
        differ += not same
        print(f"{name}: {len(data)} bytes, sha256 {'ok' if same else 'DIFFERS'}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
