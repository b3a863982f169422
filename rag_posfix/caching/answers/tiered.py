"""The answer cache: JSON answers over tiers of bytes, fastest first. A failing tier never fails a request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import orjson

from rag_posfix.caching.answers.single_flight import SingleFlight
from rag_posfix.caching.guard import Guard
from rag_posfix.caching.tier import ByteCache, Counters
from rag_posfix.errors import CacheError
from rag_posfix.text import content_hash

__all__ = ["TieredAnswerCache"]

_ENVELOPE_VERSION = 1


class TieredAnswerCache:
    """Keeps answers in every tier and returns them from the first that has them.

    An entry carries its key, its end of life and the hashes of its documents, so that a copy into a faster tier dies
    with the original and can be dropped like it. ``drop_documents`` reaches the tiers of this process: the memory of
    other processes keeps its copies until they expire.

    Args:
        tiers: The stores, fastest first, at least one.
        ttl_seconds: How long an answer is kept, > 0.
        max_entry_bytes: Larger answers (as JSON) are not kept.
        max_wait_seconds: Longest wait in ``single_flight``.
        clock: Seconds since 1970, the same for every process that shares a tier.
    """

    def __init__(
        self,
        tiers: Sequence[ByteCache],
        *,
        ttl_seconds: float = 24 * 3600.0,
        max_entry_bytes: int = 1024**2,
        max_wait_seconds: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not tiers:
            raise CacheError("answer cache: needs at least one tier; use no cache at all instead")
        if not (ttl_seconds > 0 and math.isfinite(ttl_seconds)):
            raise CacheError(f"answer cache: ttl_seconds={ttl_seconds} must be above 0 and finite")
        self._tiers = tuple(Guard(tier) for tier in tiers)
        self._ttl = ttl_seconds
        self._max_entry_bytes = max_entry_bytes
        self._clock = clock
        self._flight = SingleFlight(max_wait_seconds)
        self._counters = Counters()

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the stored answer, or None."""
        for index, tier in enumerate(self._tiers):
            data = tier.call(lambda cache: cache.get(key), None)
            envelope = None if data is None else _opened(key, data)
            if data is None or envelope is None:
                self._counters.add("damaged", int(data is not None))
                continue
            remaining = envelope["expires_at"] - self._clock()
            if remaining <= 0:
                continue
            self._store(self._tiers[:index], key, data, remaining, envelope["tags"])
            self._counters.add("hits")
            value: dict[str, Any] = envelope["value"]
            return value
        self._counters.add("misses")
        return None

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Store an answer made from ``document_ids``; one that is too large or not JSON is not kept."""
        try:
            answer = orjson.dumps(dict(value))
        except (TypeError, ValueError):
            answer = None
        if answer is None or len(answer) > self._max_entry_bytes:
            self._counters.add("rejected")
            return
        tags = _tags(document_ids)
        envelope = {
            "version": _ENVELOPE_VERSION,
            "key": key,
            "expires_at": self._clock() + self._ttl,
            "tags": tags,
            "value": orjson.Fragment(answer),
        }
        self._store(self._tiers, key, orjson.dumps(envelope), self._ttl, tags)

    def single_flight(self, key: str) -> AbstractContextManager[None]:
        """Hold while computing ``key``: equal keys wait, then find the answer in the cache."""
        return self._flight.hold(key)

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        """Drop every answer made from one of ``document_ids``; return the most that one tier held."""
        tags = _tags(document_ids)
        # Slowest first: otherwise a concurrent hit could copy a dropped entry back into a tier already done.
        return max(tier.call(lambda cache: cache.delete_tags(tags), 0) for tier in reversed(self._tiers))

    def clear(self) -> int:
        """Drop every answer; return the most that one tier held."""
        return max(tier.call(lambda cache: cache.clear(), 0) for tier in reversed(self._tiers))

    def stats(self) -> dict[str, Any]:
        """Return the counts of the cache and, under ``tiers``, those of each tier."""
        counts = {name: self._counters[name] for name in ("hits", "misses", "rejected", "damaged")}
        tiers = [tier.call(lambda cache: asdict(cache.stats()), {"name": tier.name}) for tier in self._tiers]
        return {**counts, "tiers": tiers}

    def close(self) -> None:
        """Close every tier; later calls are misses."""
        for tier in self._tiers:
            tier.call(lambda cache: cache.close(), None)

    @staticmethod
    def _store(
        tiers: Sequence[Guard[ByteCache]], key: str, data: bytes, ttl_seconds: float, tags: Sequence[str]
    ) -> None:
        for tier in tiers:
            tier.call(lambda cache: cache.set(key, data, ttl_seconds, tags), None)


def _tags(document_ids: Sequence[str]) -> list[str]:
    # Hashed: ids may be file paths or long, and end up in the names of Redis keys.
    return sorted({content_hash("document", document_id) for document_id in document_ids})


def _opened(key: str, data: bytes) -> dict[str, Any] | None:
    """Return the envelope in ``data``, or None unless it is complete and belongs to ``key``."""
    try:
        envelope = orjson.loads(data)
    except ValueError:
        return None
    if not isinstance(envelope, dict) or envelope.get("version") != _ENVELOPE_VERSION or envelope.get("key") != key:
        return None
    tags = envelope.get("tags")
    sound = (
        isinstance(envelope.get("value"), dict)
        and isinstance(envelope.get("expires_at"), float)
        and isinstance(tags, list)
        and all(isinstance(tag, str) for tag in tags)
    )
    return envelope if sound else None
