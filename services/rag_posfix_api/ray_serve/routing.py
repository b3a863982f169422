"""Scores of replicas for a question: the overlap of its passages with the passages of a replica, against its queue.

A replica sends routers a sketch of its passages: a short list of marks. A mark is a 64-bit hash of a passage's
content and of the tenant's salt. It reveals neither the passage's position in the prompt, nor the surrounding prompt,
nor its text. Two passages with one mark cost a detour, never a wrong answer: the replica looks its keys and values up
by their full keys. The order of the passages is never looked at, so it cannot change the choice. No Ray is imported
here.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.contracts.cache_salt import own_tags
from rag_posfix.contracts.request import GenerationRequest
from rag_posfix.errors import ConfigError

MAX_MARKS = 4096
"""Marks of a sketch, unless set otherwise: 8 bytes each, sent from every replica to every router."""
QUEUE_WEIGHT = 0.25
"""Share of a question's passages that outweighs one request in the queue: with all of them, four requests."""

_MAX_RECENT_MARKS = 16384
_FIELDS = {"marks", "made_at"}
_FIRST_CHARACTER = 0x10000
"""The characters from here on are whole code points, none of them half of a pair."""


def tags_of(request: GenerationRequest) -> tuple[str, ...]:
    """Return the tag of each passage of this tenant's entries in the passage KV store."""
    keys = request.layout.keys
    return own_tags(request.salt, keys) if request.salt else keys


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


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a replica held at one moment.

    Attributes:
        marks: The marks of its passages.
        made_at: When it was made, in seconds since 1970.
    """

    marks: frozenset[int] = frozenset()
    made_at: float = 0.0

    def as_stats(self) -> dict[str, Any]:
        """Return the sketch as plain data, for Ray's ``routing_stats``."""
        return {"marks": sorted(self.marks), "made_at": self.made_at}

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any] | None, current_time: float, max_age_seconds: float) -> Sketch:
        """Return the sketch in a replica's ``routing_stats``; an empty one if it is unknown, malformed or stale.

        Args:
            stats: The result of ``as_stats``, also of another version of this program.
            current_time: Seconds since 1970.
            max_age_seconds: An older sketch is stale.
        """
        if not stats or not set(stats) >= _FIELDS:
            return cls()
        marks, made_at = stats["marks"], stats["made_at"]
        if not isinstance(made_at, float | int) or current_time - made_at > max_age_seconds:
            return cls()
        if not isinstance(marks, Collection) or not all(isinstance(mark, int) for mark in marks):
            return cls()
        return cls(frozenset(marks), float(made_at))


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
        return Sketch(frozenset(map(mark_of, tags)), current_time)


class RecentRoutes:
    """The marks that were sent to each replica, forgotten after some seconds. Safe to use from any thread.

    Args:
        seconds: How long a mark is remembered: a few periods of the sketches.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sent: defaultdict[str, dict[int, float]] = defaultdict(dict)  # by replica: when each was sent last
        self._lock = threading.Lock()

    def add(self, replica: str, marks: Iterable[int], current_time: float) -> None:
        """Note that a question with ``marks`` was sent to ``replica`` at ``current_time``."""
        with self._lock:
            sent = self._sent[replica]
            for mark in marks:
                sent.pop(mark, None)
                sent[mark] = current_time
            while len(sent) > _MAX_RECENT_MARKS:
                del sent[next(iter(sent))]

    def marks(self, replica: str, current_time: float) -> frozenset[int]:
        """Return the marks that were sent to ``replica`` within the last seconds before ``current_time``."""
        with self._lock:
            sent = self._sent.get(replica, {})
            for mark in [mark for mark, time in sent.items() if current_time - time > self._seconds]:
                del sent[mark]
            return frozenset(sent)

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forget the marks of replicas that are gone."""
        alive = set(replicas)
        with self._lock:
            for replica in set(self._sent) - alive:
                del self._sent[replica]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that a question could be sent to.

    Attributes:
        queue: Requests that it works on or that wait there.
        held: The marks of the passages that it holds.
    """

    name: str
    queue: int = 0
    held: Collection[int] = frozenset()


def overlap(passages: Mapping[int, int], held: Collection[int]) -> float:
    """Return the share of the tokens of a question's passages that a replica holds, in [0, 1]; 0 without passages."""
    total = sum(passages.values())
    return sum(tokens for mark, tokens in passages.items() if mark in held) / total if total else 0.0


def score(passages: Mapping[int, int], candidate: Candidate, queue_weight: float = QUEUE_WEIGHT) -> float:
    """Return how well a replica suits a question: overlap - queue_weight * queue. Rounded, so that equals tie."""
    return round(overlap(passages, candidate.held) - queue_weight * candidate.queue, 9)


def ranked(
    passages: Mapping[int, int], candidates: Sequence[Candidate], queue_weight: float = QUEUE_WEIGHT
) -> list[Candidate]:
    """Return the replicas, the best first: by score, then by the shorter queue.

    Where both are equal, a hash of the replica's name and of the passages decides (rendezvous hashing): questions
    about other passages are spread over the replicas, and independent routers choose the same one.
    """
    marks = ",".join(map(str, sorted(passages)))

    def key(candidate: Candidate) -> tuple[float, int, bytes]:
        drawn = hashlib.blake2b(f"{candidate.name}:{marks}".encode(), digest_size=8).digest()
        return -score(passages, candidate, queue_weight), candidate.queue, drawn

    return sorted(candidates, key=key)
