"""The lab model's tokenizer: byte-level BPE without merges, so that any reader gives one token a byte."""

from __future__ import annotations

import json
from pathlib import Path

from lab.checkpoint.config import Config

SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜image｜>",
)
NOISE = "<｜noise｜>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<｜Assistant｜></think>{{ message['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>"
    "{% if enable_thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
_ONSETS = ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v")
_VOWELS = ("a", "e", "i", "o")
_CODAS = ("", "n", "l", "rk")


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars: list[str] = []
    extra = 0
    for byte in range(256):
        if byte in printable:
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + extra))
            extra += 1
    return chars


def stems() -> list[str]:
    """Pronounceable made-up words, each of which appears in four forms (bare, after a blank, capitalised)."""
    return [onset + vowel + coda for onset in _ONSETS for vowel in _VOWELS for coda in _CODAS]


def vocabulary(size: int) -> list[str]:
    """Token strings by id: special tokens, the bytes, then words; the last id is the draft noise token."""
    tokens = [*SPECIAL, *byte_alphabet()]
    known = set(tokens)
    for stem in stems():
        for form in (stem, "Ġ" + stem, stem.capitalize(), "Ġ" + stem.capitalize()):
            if form not in known and len(tokens) < size - 1:
                tokens.append(form)
                known.add(form)
    while len(tokens) < size - 1:
        tokens.append(f"<｜reserved {len(tokens)}｜>")
    return [*tokens, NOISE]


def write(folder: Path, vocab: list[str], config: Config) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    special = [index for index, token in enumerate(vocab) if token.startswith(("<｜", "<think>", "</think>"))]
    added = [
        {
            "id": index,
            "content": vocab[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index in special
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, object] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(vocab)},
        "merges": [],
    }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    settings = {
        "add_bos_token": False,
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": config["text_config"]["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    _dump(folder / "tokenizer.json", document)
    _dump(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _dump(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def compressed_size(vocab: list[str]) -> int:
    """How many distinct words the Engram hashes see: case and the leading blank do not count."""
    special = [token for token in vocab if token.startswith(("<｜", "<think>", "</think>"))]
    plain = {token.lstrip("Ġ").lower() for token in vocab if token not in special}
    return len(special) + len(plain)
