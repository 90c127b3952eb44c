"""Tokenizer of the lab model: byte-level BPE without merges, read from tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import EngineError


def byte_characters() -> dict[int, str]:
    """The character that byte-level BPE writes for each byte (printable ones stand for themselves)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}


class Tokenizer:
    """Encodes text one token a byte; decodes any token."""

    def __init__(self, model_dir: str) -> None:
        path = Path(model_dir, "tokenizer.json")
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            self.ids: dict[str, int] = dict(document["model"]["vocab"])
            added = document.get("added_tokens", [])
        except OSError as error:
            raise EngineError("FileNotFound", f"{path}: not readable") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError("BadTokenizer", f"{path}: no BPE tokenizer") from error
        self.special = {str(entry["content"]): int(entry["id"]) for entry in added}
        self.ids.update(self.special)
        characters = byte_characters()
        self.bytes_ids = [self.ids[characters[byte]] for byte in range(256)]
        self._bytes = {character: byte for byte, character in characters.items()}
        self.texts = {identity: text for text, identity in self.ids.items()}

    def encode(self, text: str) -> list[int]:
        return [self.bytes_ids[byte] for byte in text.encode("utf-8")]

    def decode(self, ids: list[int]) -> str:
        raw = bytearray()
        for identity in ids:
            text = self.texts[identity]
            if text not in self.special:
                raw += bytes(self._bytes[character] for character in text)
        return raw.decode("utf-8", "replace")

    def words(self, low: int, high: int) -> list[int]:
        """The ids in a vocabulary range that are lower-case words with a blank before them."""
        return [
            identity
            for identity in range(low, high)
            if self.texts.get(identity, "")[:1] == "Ġ" and self.texts[identity][1:].islower()
        ]
