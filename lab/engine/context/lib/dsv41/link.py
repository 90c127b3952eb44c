"""The ranks' schedule: rank 0 says what comes next, all ranks compute, rank 0 sums."""

from __future__ import annotations

import hashlib
import struct
import threading
from dataclasses import dataclass

from .fabric import Peer
from .lane import STATE_BYTES, Lane, total

STEP, CHOOSE, WARM, DONE = b"S", b"C", b"W", b"D"
HEAD = struct.Struct("<III")  # position, tokens, of them carried


@dataclass(frozen=True)
class Switches:
    """What every rank must have been given alike. They never compare it: a difference shows as a hang."""

    context: int
    drafts: bool
    graphs: str
    side: str
    prefetch: str
    aio: str
    round_rows: int
    streams: int
    replay_floor: str
    index_split: str
    image_cache: str
    engram_lanes: str
    interleave_ms: str

    def warm_tag(self) -> bytes:
        """Of the rounds made before the server opens: the indexer's split has no part in them."""
        return self._tag(
            self.context, self.drafts, self.graphs, self.side, self.prefetch, self.aio, self.streams
        )

    def tag(self) -> bytes:
        """Of every round of a request."""
        return self._tag(*(getattr(self, name) for name in self.__dataclass_fields__))

    @staticmethod
    def _tag(*values: object) -> bytes:
        return hashlib.blake2b(repr(values).encode(), digest_size=8).digest()


class Leader:
    """Rank 0's end."""

    def __init__(self, lane: Lane, peers: list[Peer], switches: Switches) -> None:
        self.lane = lane
        self.peers = peers
        self.tag = switches.tag()
        self.warm = switches.warm_tag()
        self.lock = threading.Lock()
        self.rounds = 0

    def warm_up(self) -> None:
        """One empty round with every rank, before the server opens."""
        for peer in self.peers:
            peer.send(self.warm, WARM)
        for peer in self.peers:
            peer.receive(self.warm)

    def forward(self, state: bytes, position: int, tokens: list[int], carried: int) -> bytes:
        """The next state, from the partial results of all ranks."""
        command = (
            STEP
            + state
            + HEAD.pack(position, len(tokens), carried)
            + struct.pack(f"<{len(tokens)}I", *tokens)
        )
        with self.lock:
            for peer in self.peers:
                peer.send(self.tag, command)
            partials = [self.lane.forward(state, position, tokens, carried)]
            partials += [peer.receive(self.tag) for peer in self.peers]
            self.rounds += 1
            return total(partials)

    def choose(self, state: bytes) -> tuple[int, int]:
        """(rank whose word has the highest score, number of the word in its part of the vocabulary)."""
        with self.lock:
            for peer in self.peers:
                peer.send(self.tag, CHOOSE + state)
            answers = [self.lane.choose(state)] + [peer.receive(self.tag) for peer in self.peers]
        scored = [(struct.unpack("<II", answer), rank) for rank, answer in enumerate(answers)]
        (_, word), rank = max(scored)
        return rank, word

    def done(self) -> None:
        """Tell the other ranks to leave. Best effort: one that hangs hears nothing."""
        for peer in self.peers:
            for channel in peer.rails or [peer.control]:
                channel.settimeout(2)
            peer.send(self.tag, DONE)


def serve_peer(lane: Lane, peer: Peer, switches: Switches) -> None:
    """A follower's loop, until rank 0 says done."""
    warm, tag = switches.warm_tag(), switches.tag()
    peer.receive(warm)
    peer.send(warm, WARM)
    while True:
        message = peer.receive(tag)
        kind, body = message[:1], message[1:]
        if kind == DONE:
            return
        state, rest = body[:STATE_BYTES], body[STATE_BYTES:]
        if kind == CHOOSE:
            peer.send(tag, lane.choose(state))
            continue
        position, count, carried = HEAD.unpack(rest[: HEAD.size])
        tokens = list(struct.unpack(f"<{count}I", rest[HEAD.size :]))
        peer.send(tag, lane.forward(state, position, tokens, carried))
