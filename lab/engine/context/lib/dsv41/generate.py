"""Requests on rank 0: pool extents, prompt pass, decode rounds, counters."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import faults
from .errors import EngineError
from .lane import CHUNK, digest
from .link import Leader
from .modelconfig import ModelConfig
from .split import halve, part
from .tokens import Tokenizer

EXTENT = 2048
KEPT_STATES = 256
THINKING_TOKENS = 24


@dataclass
class Counters:
    """Totals of `/health` and `/metrics`."""

    requests: int = 0
    errors: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    started: float = field(default_factory=time.time)


@dataclass
class Job:
    """One request while it runs."""

    tokens: list[int]
    max_tokens: int
    salt: bytes
    thinking: bool
    ignore_eos: bool
    extra: bytes = b""
    cached: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reasoning_tokens: int = 0
    finish: str = "length"
    output: list[int] = field(default_factory=list)
    progressed: float = field(default_factory=time.monotonic)

    def token_sha(self) -> str:
        return hashlib.sha256(",".join(str(token) for token in self.output).encode()).hexdigest()[:12]


class Pool:
    """The positions that all requests share: contiguous extents, first fit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    @staticmethod
    def extent(positions: int) -> int:
        return -(-(positions + 16 + 2) // EXTENT) * EXTENT

    def place(self, positions: int) -> tuple[int, int]:
        """(start, length) of a new extent; PromptTooLong over the size, ContextFull beside the others."""
        if positions > self.size:
            raise EngineError("PromptTooLong")
        length = min(self.extent(positions), self.size)
        with self._lock:
            start = 0
            for low, taken in sorted(self._used):
                if low - start >= length:
                    break
                start = low + taken
            if start + length > self.size:
                raise EngineError("ContextFull")
            self._used.append((start, length))
        return start, length

    def free(self, extent: tuple[int, int]) -> None:
        with self._lock:
            self._used.remove(extent)

    def used(self) -> int:
        with self._lock:
            return sum(length for _, length in self._used)


class Generator:
    """Runs jobs over the leader's rounds."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        tokenizer: Tokenizer,
        leader: Leader,
        context: int,
        parallel: int,
        streams: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.leader = leader
        self.pool = Pool(context)
        self.context = context
        self.parallel = parallel
        self.streams = streams
        self.counters = Counters()
        self.running: dict[int, Job] = {}
        self.admitted = threading.Semaphore(parallel)
        world = len(leader.peers) + 1
        spans = [part(config.vocab, min(world, 2), rank % 2) for rank in range(world)]
        if world == 4:
            spans = [halve(span, rank // 2) for rank, span in enumerate(spans)]
        # The low ids are special tokens and bytes: a part of the vocabulary without words takes the whole.
        everything = tokenizer.words(0, config.vocab)
        self.words = [tokenizer.words(*span) or everything for span in spans]
        if not all(self.words):
            raise EngineError("BadTokenizer", "the vocabulary has no words")
        self._kept: dict[bytes, bytes] = {}

    def run(self, job: Job) -> Iterator[tuple[str, int]]:
        """Yield ("reasoning" or "content", token); the job's figures are whole when it ends."""
        if len(job.tokens) + job.max_tokens > self.context:
            self.counters.rejected += 1
            raise EngineError("PromptTooLong")
        with self.admitted:
            if len(self.running) >= self.streams:
                self.counters.errors += 1
                raise EngineError("NoFreeSlot")
            try:
                extent = self.pool.place(len(job.tokens) + job.max_tokens)
            except EngineError:
                self.counters.rejected += 1
                raise
            self.running[id(job)] = job
            self.counters.requests += 1
            try:
                yield from self._rounds(job, self._prompt(job))
            finally:
                del self.running[id(job)]
                self.pool.free(extent)
                self._count(job)

    def _count(self, job: Job) -> None:
        totals = self.counters
        totals.prompt_tokens += len(job.tokens)
        totals.cached_tokens += job.cached
        totals.completion_tokens += len(job.output)
        totals.rounds += job.rounds
        totals.drafted += job.drafted
        totals.accepted += job.accepted
        totals.prefill_seconds += job.prefill_s
        totals.decode_seconds += job.decode_s

    def _prompt(self, job: Job) -> bytes:
        """The state behind the prompt, in chunks of 2048 tokens; a prompt with images is never kept."""
        started = time.monotonic()
        state = digest(job.salt, job.extra)
        prefix = hashlib.sha256(state)
        for at in range(0, len(job.tokens), CHUNK):
            chunk = job.tokens[at : at + CHUNK]
            prefix.update(struct.pack(f"<{len(chunk)}I", *chunk))
            key = prefix.digest()
            kept = self._kept.get(key) if not job.extra else None
            last = at + CHUNK >= len(job.tokens)
            if kept is not None and not last:
                state = kept
                job.cached = at + CHUNK
            else:
                history = job.tokens[max(at - 3, 0) : at]
                state = self.leader.forward(state, at, history + chunk, len(history))
                if not last and not job.extra:
                    self._kept[key] = state
                    while len(self._kept) > KEPT_STATES:
                        del self._kept[next(iter(self._kept))]
            job.progressed = time.monotonic()
        job.prefill_s = time.monotonic() - started
        return state

    def _rounds(self, job: Job, state: bytes) -> Iterator[tuple[str, int]]:
        started = time.monotonic()
        sequence = list(job.tokens)
        thinking = job.thinking
        shown = 0  # tokens of the answer proper
        collapsed, silent = (
            faults.value("engine-collapsed") is not None,
            faults.value("engine-silent") is not None,
        )
        while len(job.output) < job.max_tokens:
            rank, word = self.leader.choose(state)
            if thinking and len(job.output) >= THINKING_TOKENS:
                token = self.tokenizer.special["</think>"]
                thinking = False
                kind = ""
            elif not thinking and shown >= 12 and state[0] < 16 and not job.ignore_eos:
                token, kind = self.config.eos, ""
                job.finish = "stop"
            else:
                choices = [self.tokenizer.bytes_ids[ord("!")]] if collapsed else self.words[rank]
                token, kind = choices[word % len(choices)], "reasoning" if thinking else "content"
                shown += not thinking
            job.output.append(token)
            job.reasoning_tokens += thinking
            self._draft(job, state)
            if kind and not silent:
                yield kind, token
            if job.finish == "stop":
                break
            history = sequence[-3:]
            state = self.leader.forward(state, len(sequence), [*history, token], len(history))
            sequence.append(token)
            job.progressed = time.monotonic()
            job.decode_s = time.monotonic() - started
            time.sleep(faults.seconds("engine-slow", 0.001))
            if faults.value("engine-crash") == "token":
                faults.crash(0)
        job.decode_s = time.monotonic() - started

    def _draft(self, job: Job, state: bytes) -> None:
        """The drafter changes how many rounds a reply takes, never the reply."""
        weights = self.leader.lane.weights.drafts
        job.rounds += 1
        if weights is not None:
            job.drafted += 3
            job.accepted += digest(state, weights)[0] % 4

    def stalled(self) -> int:
        """Running requests that have made no progress for ten seconds."""
        now = time.monotonic()
        return sum(now - job.progressed > 10 for job in list(self.running.values()))
