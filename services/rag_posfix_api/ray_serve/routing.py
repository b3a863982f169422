"""Scores of replicas for a question: the overlap of its passages with the passages of a replica, against its queue.

A replica sends routers a sketch of its passages: a Bloom filter of marks. A mark is a 64-bit hash of a passage's
content and of the tenant's salt. It reveals neither the passage's position in the prompt, nor the surrounding prompt,
nor its text. A passage that a sketch has by chance, one in a hundred, costs a detour, never a wrong answer: the
replica looks its keys and values up by their full keys. The order of the passages is never looked at, so it cannot
change the choice. No Ray is imported here.

Replicas of the model, on both sides: the actor of a replica, and the service's generator that calls replicas.

An answer is a pure function of its request: greedy, or sampled from a seed. A request without a seed gets one here, so
that a second replica gives the same answer as the first. What was sent already is compared with the second answer and
left out of it; where the two differ, which the last digits of bfloat16 can cause, the answer ends with an error.
No Ray is imported here.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generated
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rag_posfix.contracts.generator import DelegatingGenerator, Generator, PassageKVStore
from rag_posfix.contracts.request import Chunk, GenerationRequest, ScoredToken, tenant_tags
from rag_posfix.errors import ConfigError, GenerationError, UpstreamError

MAX_MARKS = 4096
"""Marks of a sketch, unless set otherwise."""
BITS_OF_MARK = 10
"""Bits of a sketch for each mark that it may have: 5 kB for ``MAX_MARKS``, sent from every replica to every router."""
PLACES_OF_MARK = 7
"""Bits that a mark sets: ``BITS_OF_MARK`` x ln 2, which makes a full sketch have 1 % of the marks it was not given."""
QUEUE_WEIGHT = 0.25
"""Share of a question's passages that outweighs one request in the queue: with all of them, four requests."""

_MAX_RECENT_MARKS = 16384
_FIRST_CHARACTER = 0x10000
"""The characters from here on are whole code points, none of them half of a pair."""


def tags_of(request: GenerationRequest) -> tuple[str, ...]:
    """Return the tag of each passage of this tenant's entries in the passage KV store."""
    keys = request.layout.keys
    return tenant_tags(request.salt, keys) if request.salt else keys


def mark_of(tag: str) -> int:
    """Return the mark of a tag: 64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=8).digest(), "big")


def marked_passages(request: GenerationRequest) -> dict[int, int]:
    """Return the number of tokens of each passage of a question, by mark. Equal passages count once."""
    tokens = (len(span) for span in request.layout.passages)
    return dict(zip(map(mark_of, tags_of(request)), tokens, strict=True))


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request and its routing information.

    Attributes:
        request: What the replica answers.
        passages: Number of tokens of each passage, by mark.
    """

    request: GenerationRequest
    passages: Mapping[int, int]

    @classmethod
    def of(cls, request: GenerationRequest) -> RoutedRequest:
        """Return ``request`` with its passages marked."""
        return cls(request, marked_passages(request))

    @property
    def prompt(self) -> str:
        """The prompt with one character for each token: what Ray's ``PrefixCacheAffinityRouter`` compares."""
        return "".join(chr(_FIRST_CHARACTER + token) for token in self.request.layout.token_ids)


def _places(mark: int, n_bytes: int) -> list[int]:
    """Return the bits of a mark in a sketch. Kirsch and Mitzenmacher (2006), Less hashing, same performance."""
    first, step = mark & 0xFFFFFFFF, mark >> 32 | 1
    return [(first + number * step) % (8 * n_bytes) for number in range(PLACES_OF_MARK)]


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a replica held at one moment: a Bloom filter, which has all of its marks and some others.

    Source: Bloom (1970), Space/time trade-offs in hash coding with allowable errors.

    Attributes:
        bits: The filter; a mark is held if all of its bits are set. Empty: none is.
        made_at: When it was made, in seconds since 1970.
    """

    bits: bytes = b""
    made_at: float = 0.0

    @classmethod
    def of(cls, marks: Iterable[int], made_at: float, max_marks: int = MAX_MARKS) -> Sketch:
        """Return the sketch of ``marks``, in the size for ``max_marks``."""
        bits = bytearray(-(-BITS_OF_MARK * max_marks // 8))
        for mark in marks:
            for place in _places(mark, len(bits)):
                bits[place >> 3] |= 1 << (place & 7)
        return cls(bytes(bits), made_at)

    def as_stats(self) -> dict[str, Any]:
        """Return the sketch as plain data, for Ray's ``routing_stats``."""
        return {"bits": self.bits, "made_at": self.made_at}

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any] | None) -> Sketch:
        """Return the sketch in a replica's ``routing_stats``; an empty one if it is unknown or malformed.

        Args:
            stats: The result of ``as_stats``, also of another version of this program.
        """
        bits, made_at = (stats.get("bits"), stats.get("made_at")) if stats else (None, None)
        return cls(bits, made_at) if isinstance(bits, bytes) and isinstance(made_at, float) else cls()


class Sketches:
    """The sketches of all replicas side by side, kept while unchanged: a question looks its marks up in all at once.

    Args:
        max_age_seconds: An older sketch counts as empty.
    """

    def __init__(self, max_age_seconds: float) -> None:
        self._max_age_seconds = max_age_seconds
        self._stats: dict[str, Mapping[str, Any] | None] = {}
        self._bits = np.zeros((0, 0), dtype=np.uint8)
        self._made_at = np.zeros(0)

    def held(
        self, stats: Mapping[str, Mapping[str, Any] | None], marks: Collection[int], current_time: float
    ) -> NDArray[np.bool_]:
        """Return which replica holds which mark, (R, M).

        Args:
            stats: The ``routing_stats`` of each replica, by name.
            current_time: Seconds since 1970.
        """
        self._read(stats)
        size = self._bits.shape[1]
        if not size or not marks:
            return np.zeros((len(stats), len(marks)), dtype=np.bool_)
        places = np.array([_places(mark, size) for mark in marks])
        bits = (self._bits[:, places >> 3] >> (places & 7).astype(np.uint8)) & 1
        held = np.asarray(bits.all(axis=2))
        return held & (current_time - self._made_at <= self._max_age_seconds)[:, None]

    def _read(self, stats: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Read the sketches that have changed; sketches of another size than the largest count as empty."""
        same = list(stats) == list(self._stats)
        rows = [row for row, name in enumerate(stats) if not same or stats[name] is not self._stats[name]]
        each = list(stats.values())
        sketches = {row: Sketch.from_stats(each[row]) for row in rows}
        largest = max((len(sketch.bits) for sketch in sketches.values()), default=0)
        if not same or largest > self._bits.shape[1]:
            sketches = {row: Sketch.from_stats(one) for row, one in enumerate(each)}
            self._bits, self._made_at = np.zeros((len(each), largest), dtype=np.uint8), np.zeros(len(each))
        self._stats = dict(stats)
        for row, sketch in sketches.items():
            fits = len(sketch.bits) == self._bits.shape[1]
            self._bits[row] = np.frombuffer(sketch.bits, dtype=np.uint8) if fits else 0
            self._made_at[row] = sketch.made_at


class ReadPassages:
    """The passages that a replica has read, most recent last, up to a bound. Safe to use from any thread.

    Args:
        max_marks: Number of passages, >= 1; the least recently read are forgotten first.
    """

    def __init__(self, max_marks: int = MAX_MARKS) -> None:
        if max_marks < 1:
            raise ConfigError(
                f"sketch: max_marks={max_marks} must be >= 1; without a sketch use the router power_of_two"
            )
        self._max_marks = max_marks
        self._tags: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, tags: Iterable[str]) -> None:
        """Note that passages are read now."""
        with self._lock:
            for tag in tags:
                self._tags[tag] = None
                self._tags.move_to_end(tag)
            while len(self._tags) > self._max_marks:
                self._tags.popitem(last=False)

    def sketch(self, held: Collection[str] | None, current_time: float) -> Sketch:
        """Return the sketch of the passages that were read and are still held.

        Args:
            held: The tags of the passages whose keys and values are in memory; None if unknown, and
                every passage that was read counts.
            current_time: Seconds since 1970.
        """
        with self._lock:
            tags = [tag for tag in self._tags if held is None or tag in held]
        return Sketch.of(map(mark_of, tags), current_time, self._max_marks)


class RecentRoutes:
    """The replicas that each mark was sent to, forgotten after some seconds. Safe to use from any thread.

    Args:
        seconds: How long a mark is remembered: a few periods of the sketches.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sent: OrderedDict[int, dict[str, float]] = OrderedDict()  # by mark: when each replica got it last
        self._lock = threading.Lock()

    def add(self, replica: str, marks: Iterable[int], current_time: float) -> None:
        """Note that a question with ``marks`` was sent to ``replica`` at ``current_time``."""
        with self._lock:
            for mark in marks:
                self._sent.setdefault(mark, {})[replica] = current_time
                self._sent.move_to_end(mark)
            while len(self._sent) > _MAX_RECENT_MARKS:
                self._sent.popitem(last=False)

    def held(self, replicas: Iterable[str], marks: Sequence[int], current_time: float) -> NDArray[np.bool_]:
        """Return which replica was sent which mark within the last seconds before ``current_time``, (R, M)."""
        rows = {replica: row for row, replica in enumerate(replicas)}
        held = np.zeros((len(rows), len(marks)), dtype=np.bool_)
        oldest = current_time - self._seconds
        with self._lock:
            for column, mark in enumerate(marks):
                for replica, sent_at in self._sent.get(mark, {}).items():
                    if replica in rows and sent_at >= oldest:
                        held[rows[replica], column] = True
        return held


def ranked(
    passages: Mapping[int, int],
    replicas: Sequence[str],
    queues: Sequence[int],
    held: NDArray[np.bool_],
    queue_weight: float = QUEUE_WEIGHT,
) -> list[int]:
    """Return the rows of the replicas, the best first: by score, then by the shorter queue.

    Formula: score = share of the tokens of the question's passages that a replica holds - queue_weight x queue,
    rounded, so that equals tie.
    Where both are equal, a hash of the replica's name and of the passages decides (rendezvous hashing): questions
    about other passages are spread over the replicas, and independent routers choose the same one.

    Args:
        passages: Tokens of each passage of the question, by mark.
        replicas: Their names.
        queues: Requests that each works on or that wait there.
        held: Which replica holds which passage, (R, M).
    """
    tokens = np.fromiter(passages.values(), dtype=np.float64, count=len(passages))
    overlap = held @ tokens / max(tokens.sum(), 1.0)
    scores = np.round(overlap - queue_weight * np.asarray(queues), 9)
    question = mark_of(",".join(map(str, sorted(passages))))
    drawn = np.fromiter(map(_mark_of_name, replicas), dtype=np.uint64, count=len(replicas)) ^ np.uint64(question)
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # splitmix64: an XOR alone would keep neighbours
        drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(multiplier)
    return [int(row) for row in np.lexsort([drawn, np.asarray(queues), -scores])]


_mark_of_name = functools.lru_cache(4096)(mark_of)


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaModel:
    """A loaded model; ``passages`` keeps keys and values for it."""

    generator: Generator
    passages: PassageKVStore | None = None


class GeneratorReplica:
    """Answers requests with its own model. Ray Serve makes one per replica and calls its coroutines.

    Args:
        opener: Loads the model, in the process of the replica and by its settings.
        at_once: Answers that share the decode steps of the model.
        waiting: Further requests that may wait for it.
        max_marks: Bound of the sketch.
        report: Called with ``counts`` whenever the sketch is made.
    """

    def __init__(
        self,
        opener: Callable[[], ReplicaModel],
        at_once: int,
        waiting: int = 32,
        max_marks: int = MAX_MARKS,
        report: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        model = opener()
        self._passages = model.passages
        self._model = model.generator
        self._open = 0
        self._decode_steps = 0
        self._decoded_answers = 0
        self._generator = _add_batching(model.generator, at_once, self._note_step)
        self._report = report
        self._read = ReadPassages(max_marks)
        # A thread waits for each answer; the event loop stays free for the queue length, the sketch and the health.
        self._threads = ThreadPoolExecutor(at_once + waiting, thread_name_prefix="answer")

    async def stream(self, routed: RoutedRequest) -> AsyncIterator[Chunk]:
        """Yield the answer in pieces. When the caller goes away, the work stops at its next step.

        Raises:
            RagPosfixError: as ``Generator.stream``.
        """
        self._read.add(tags_of(routed.request))
        self._open += 1
        try:
            # Planning the prompt takes its time too.
            chunks = await asyncio.wrap_future(self._threads.submit(self._generator.stream, routed.request))
            step = self._threads.submit(next, chunks, None)
            try:
                while (chunk := await asyncio.wrap_future(step)) is not None:
                    yield chunk
                    step = self._threads.submit(next, chunks, None)
            finally:
                step.add_done_callback(lambda done: self._close_after_last_step(done, chunks))
        finally:
            self._open -= 1

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the sketch of the passages in memory; Ray Serve sends it to the routers."""
        if self._report is not None:
            self._report(await self.counts())
        held = None if self._passages is None else self._passages.memory_tags()
        return self._read.sketch(held, time.time()).as_stats()

    async def counts(self) -> dict[str, float]:
        """Return the counts of the queue, of the batches, and of the passage KV store if there is one."""
        stats = {} if self._passages is None else self._passages.stats()
        return {
            "in_flight_requests": self._open,
            "waiting_requests": getattr(self._generator, "waiting", 0),
            "decode_steps": self._decode_steps,
            "decoded_answers": self._decoded_answers,
            **{f"passages_{name}": value for name, value in stats.items() if isinstance(value, (int, float))},
        }

    def _note_step(self, answers: int) -> None:
        """Count a decode step of the batch, in the thread of the batch."""
        self._decode_steps += 1
        self._decoded_answers += answers

    async def check_health(self) -> None:
        """Raise if the model cannot answer any more; Ray Serve then replaces the replica.

        Raises:
            GenerationError: a process of a split model died.
        """
        if self._model.failure is not None:
            raise GenerationError(f"the model cannot answer any more: {self._model.failure}")

    def _close_after_last_step(self, step: Future[Chunk | None], chunks: Iterator[Chunk]) -> None:
        """Close an answer after its last step, in the thread of that step; the caller has the error of the step."""
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


def _add_batching(generator: Generator, at_once: int, on_step: Callable[[int], None]) -> Generator:
    """Return ``generator`` with batches of ``at_once`` answers, whatever the batches that it comes with."""
    from rag_posfix.generation.batching.scheduler import batched, unbatched  # torch

    model = unbatched(generator)
    return batched(model, at_once, on_step) if at_once > 1 else model


class ReplicaLost(UpstreamError):
    """The replica died, or cannot be reached, before its answer was complete."""


class Replicas(Protocol):
    """What answers requests, somewhere else. ``cluster.ServeReplicas`` implements it with Ray Serve."""

    def ask(self, request: RoutedRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces; closing the iterator stops the replica's work.

        Raises:
            ReplicaLost: the replica is gone; try another one.
            RagPosfixError: an error of the replica.
        """
        ...


class ReplicatedGenerator(DelegatingGenerator[Generator]):
    """Answers with replicas.

    Args:
        description: The model without weights: name, tokenizer, context window. It answers nothing.
        attempts: How often one request is sent, >= 1, each time to a replica that is alive.
        new_seed: Returns the seed of a request that samples without one.

    Raises:
        ConfigError: ``attempts`` is below 1.
    """

    def __init__(
        self,
        description: Generator,
        replicas: Replicas,
        attempts: int = 4,
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        if attempts < 1:
            raise ConfigError(f"attempts={attempts} must be >= 1")
        super().__init__(description)
        self._replicas = replicas
        self._attempts = attempts
        self._new_seed = new_seed

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces; the last chunk carries the whole.

        Raises:
            UpstreamError: every attempt lost its replica, or the second answer does not begin as the first did.
            RagPosfixError: an error of the replica.
        """
        routed = RoutedRequest.of(self._fix_seed(request))
        sent = _Sent()
        for attempt in range(1, self._attempts + 1):
            chunks = self._replicas.ask(routed)
            try:
                yield from sent.unsent(chunks)
                return
            except ReplicaLost as lost:
                if attempt == self._attempts:
                    raise UpstreamError(
                        f"{attempt} replicas were lost while they answered; ask again later, or raise attempts"
                    ) from lost
                _log.warning("a replica was lost after %d characters of an answer; asking another", len(sent.text))
            finally:
                if isinstance(chunks, Generated):  # other iterators have no ``close``
                    chunks.close()

    def _fix_seed(self, request: GenerationRequest) -> GenerationRequest:
        if request.sampling.deterministic:
            return request
        return replace(request, sampling=replace(request.sampling, seed=self._new_seed()))


@dataclass(slots=True)
class _Sent:
    """The text and tokens of an answer that the reader has."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)

    def unsent(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the text and tokens of ``chunks`` that were not sent yet, by an earlier answer or this one.

        Raises:
            UpstreamError: the text of ``chunks`` is not the text that was sent.
        """
        text, scored = "", 0
        for chunk in chunks:
            text, before = text + chunk.text, len(text)
            common = min(len(text), len(self.text))
            ends_early = chunk.generation is not None and len(text) < len(self.text)
            if ends_early or text[before:common] != self.text[before:common]:
                raise UpstreamError(
                    "the replica was lost after a part of the answer was sent, and another replica's answer differs "
                    "from that part; ask again"
                )
            new_tokens = self._unsent_tokens(chunk.log_probs, scored)
            scored += len(chunk.log_probs)
            new_text = text[len(self.text) :]
            self.text += new_text
            if new_text or new_tokens or chunk.generation is not None:
                yield Chunk(new_text, chunk.generation, new_tokens)

    def _unsent_tokens(self, tokens: Sequence[ScoredToken], offset: int) -> tuple[ScoredToken, ...]:
        new = tuple(tokens[max(0, len(self.scored) - offset) :])
        self.scored.extend(new)
        return new
