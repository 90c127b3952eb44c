#!/usr/bin/env python3
"""make_token_map.py MODEL_DIR OUT: Engram's compressed token map, a JSON list with one id a token.

Tokens that differ only by case or by the blank before them share an id. The real script asks the `tokenizers`
package; this one reads tokenizer.json itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def token_map(document: dict) -> list[int]:  # type: ignore[type-arg]
    """Ids in the order of first appearance."""
    vocabulary = dict(document["model"]["vocab"])
    special = {entry["content"]: entry["id"] for entry in document.get("added_tokens", [])}
    vocabulary.update(special)
    known: dict[tuple[bool, str], int] = {}
    result = []
    for text in sorted(vocabulary, key=lambda token: int(vocabulary[token])):
        key = (True, text) if text in special else (False, text.lstrip("\u0120").lower())
        result.append(known.setdefault(key, len(known)))
    return result


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: make_token_map.py MODEL_DIR OUT", file=sys.stderr)
        return 2
    tokenizer = Path(sys.argv[1], "tokenizer.json")
    if not tokenizer.is_file():
        print(f"{tokenizer}: no such file", file=sys.stderr)
        return 1
    out = Path(sys.argv[2])
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(json.dumps(token_map(json.loads(tokenizer.read_text(encoding="utf-8")))))
    partial.replace(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
