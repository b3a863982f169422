"""Sketches: which passages a replica holds, as a short list of hashes that a router can compare with a question's.

A mark is a 64-bit hash of a passage's content and of the tenant's salt. It says nothing of the passage's place in the
prompt, of the prompt around it, or of its text. Two passages with one mark cost a detour, never a wrong answer: the
replica looks its keys and values up by their full keys. No Ray is imported here.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rag_posfix.contracts.cache_salt import own_tags
from rag_posfix.contracts.request import GenerationRequest
from rag_posfix.errors import ConfigError

MOST_MARKS = 4096
"""Marks of a sketch, unless said otherwise: 8 bytes each, sent from every replica to every router."""

_FIELDS = {"marks", "made_at"}


def tags_of(request: GenerationRequest) -> tuple[str, ...]:
    """Return the tag of each passage by which the passage KV store knows this tenant's entries of it."""
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
    def from_stats(cls, stats: Mapping[str, Any] | None, now: float, max_age_seconds: float) -> Sketch:
        """Return the sketch in a replica's ``routing_stats``; an empty one if it is unknown, malformed or stale.

        Args:
            stats: What ``as_stats`` made, or what another version of this program made.
            now: Seconds since 1970.
            max_age_seconds: An older sketch is stale.
        """
        if not stats or not set(stats) >= _FIELDS:
            return cls()
        marks, made_at = stats["marks"], stats["made_at"]
        if not isinstance(made_at, float | int) or now - made_at > max_age_seconds:
            return cls()
        if not isinstance(marks, Collection) or not all(isinstance(mark, int) for mark in marks):
            return cls()
        return cls(frozenset(marks), float(made_at))


class ReadPassages:
    """The passages that a replica has read, most recent last, up to a bound. Safe to use from any thread.

    Args:
        most: Number of passages, >= 1; the least recently asked are forgotten first.

    Raises:
        ConfigError: ``most`` is below 1.
    """

    def __init__(self, most: int = MOST_MARKS) -> None:
        if most < 1:
            raise ConfigError(f"sketch: most={most} must be >= 1; without a sketch use the router power_of_two")
        self._most = most
        self._tags: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, tags: Iterable[str]) -> None:
        """Note that passages are read now."""
        with self._lock:
            for tag in tags:
                self._tags[tag] = None
                self._tags.move_to_end(tag)
            while len(self._tags) > self._most:
                self._tags.popitem(last=False)

    def sketch(self, held: Collection[str] | None, now: float) -> Sketch:
        """Return the sketch of what was read and is still held.

        Args:
            held: The tags of the passages whose keys and values are in memory; None where that is not known, and
                every passage that was read counts.
            now: Seconds since 1970.
        """
        with self._lock:
            tags = [tag for tag in self._tags if held is None or tag in held]
        return Sketch(frozenset(map(mark_of, tags)), now)
