"""One rank's share of the model: digests of its weights, Engram rows, RoPE rows; partial results of a step.

The arithmetic is a stand-in, the data flow is not: every step reads rows of both Engram tables (this rank's
hash columns) and of the RoPE tables, takes in every byte of the rank's weights through digests made at load,
and is finished only by the sum over all ranks. So a wrong byte on any rank changes the text, and without the
other rank there is none. The drafter's weights change how many rounds a reply takes, as with the real engine.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import rankfile
from .errors import EngineError
from .modelconfig import ModelConfig
from .split import Range, part
from .tables import Engram, Kit

WORDS = struct.Struct("<8I")
STATE_BYTES = 32
CHUNK = 2048
LAYER = re.compile(r"(layers|mtp)\.(\d+)\.")


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=STATE_BYTES).digest()


@dataclass(frozen=True)
class Weights:
    """The rank file as loaded: one digest a layer, one for what is outside, one for the drafter."""

    path: Path
    nbytes: int
    layers: tuple[bytes, ...]
    outside: bytes
    head: bytes
    drafts: bytes | None
    head_range: Range


def load(folder: str | None, config: ModelConfig, rank: int, world: int, drafts: bool) -> Weights:
    """Read the one rank file of `folder` whole."""
    if not folder:
        raise EngineError("NoRankCache", "TF_DS_RANK_CACHE is not set")
    path = Path(folder, rankfile.find(folder, rank, world))
    rows, index_at = rankfile.open_index(path)
    hashes: dict[str, hashlib.blake2b] = {}
    head: Range | None = None
    with path.open("rb") as source:
        for row in rows:
            match = LAYER.match(row.key)
            group = "outside"
            if match:
                group = match.group(2) if match.group(1) == "layers" else "drafts"
            elif row.key.startswith("head|"):
                group = "head"
                found = re.match(r"head\|\((\d+), (\d+)\)", row.key)
                head = (int(found.group(1)), int(found.group(2))) if found else None
            data = source.read(row.nbytes)
            if len(data) != row.nbytes:
                raise EngineError("EndOfFile")
            hashes.setdefault(group, hashlib.blake2b(digest_size=STATE_BYTES)).update(row.key.encode() + data)
    wanted = {"outside", "head", *(str(layer) for layer in range(config.layers))}
    if head is None or not wanted <= set(hashes):
        raise EngineError("BadRankCache")
    if drafts and "drafts" not in hashes:
        raise EngineError("NoDrafter")
    return Weights(
        path=path,
        nbytes=index_at,
        layers=tuple(hashes[str(layer)].digest() for layer in range(config.layers)),
        outside=hashes["outside"].digest(),
        head=hashes["head"].digest(),
        drafts=hashes["drafts"].digest() if drafts else None,
        head_range=head,
    )


class Lane:
    """Computes this rank's partial results."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        weights: Weights,
        engram: Engram,
        kit: Kit,
        compressed: list[int],
        rank: int,
        world: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.engram = engram
        self.kit = kit
        self.compressed = compressed
        # Four nodes are two pairs that hold the same hash columns.
        self.columns = part(config.hash_columns, min(world, 2), rank % 2)

    def _engram(self, layer: int, history: list[int]) -> bytes:
        """The rows of this rank's hash columns for the token at the end of `history` (up to four tokens)."""
        multipliers, primes = self.kit.multipliers[layer], self.kit.primes[layer]
        ids = [self.compressed[token] for token in history]
        rows: list[bytes] = []
        for column in range(*self.columns):
            order, head = column // self.config.engram_heads + 2, column % self.config.engram_heads
            mixed = head + 1
            for distance, identity in enumerate(reversed(ids[-order:])):
                mixed ^= (identity + 1) * multipliers[distance] * (2 * head + 1)
            base = sum(primes[:column])
            rows.append(self.engram.row(layer, base + mixed % primes[column]))
        return b"".join(rows)

    def forward(self, state: bytes, position: int, tokens: list[int], carried: int) -> bytes:
        """The partial result of `tokens[carried:]` at `position`...: eight u32.

        `tokens` starts with up to three tokens of history, `carried` of them, for the n-grams.
        """
        plain = compressed = self.weights.outside
        gathered = dict.fromkeys(self.config.engram_layers, state)
        for at in range(carried, len(tokens)):
            where = position + at - carried
            plain = digest(plain, self.kit.rope_row("plain", where), struct.pack("<I", tokens[at]))
            compressed = digest(compressed, self.kit.rope_row("compressed", where))
            history = tokens[max(at - 3, 0) : at + 1]
            for layer in gathered:
                gathered[layer] = digest(gathered[layer], self._engram(layer, history))
        value = digest(state, plain)
        for layer, weights in enumerate(self.weights.layers):
            rope = compressed if self.config.ratios[layer] else plain
            value = digest(value, weights, rope, gathered.get(layer, b""))
        return value

    def choose(self, state: bytes) -> bytes:
        """The best of this rank's half of the vocabulary: (score, number of the word) as two u32."""
        return digest(state, self.weights.head)[:8]


def total(partials: Iterable[bytes]) -> bytes:
    """The sum of the partial results, in rank order, as the next state."""
    sums = [0] * 8
    for partial in partials:
        sums = [(a + b) & 0xFFFFFFFF for a, b in zip(sums, WORDS.unpack(partial), strict=True)]
    return digest(WORDS.pack(*sums))
