"""The answer cache: answers as JSON in tiers of bytes, fastest first. A failing tier never fails a request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

import orjson

from rag_posfix.caching.answers.single_flight import SingleFlight
from rag_posfix.caching.answers.tier import ANSWER_CACHE, ByteCache
from rag_posfix.caching.tier import Counters
from rag_posfix.caching.tier_stack import FailSafeTier, TierStack
from rag_posfix.errors import CacheError
from rag_posfix.text import content_hash

_ENVELOPE_VERSION = 1


class TieredAnswerCache:
    """Keeps answers in every tier and returns them from the first that has them.

    An entry contains its key, when it expires, and the hashes of its documents. So a copy in a faster tier expires
    with the original and can be dropped with it. ``drop_documents`` reaches the tiers of this process; the memory of
    other processes keeps its copies until they expire.

    Args:
        tiers: The tiers, fastest first, at least one.
        ttl_seconds: How long an answer is kept, > 0.
        max_entry_bytes: Larger answers (as JSON) are not kept.
        max_wait_seconds: Longest wait in ``single_flight``.
        clock: Seconds since 1970, the same for every process that shares a tier.

    Raises:
        CacheError: There is no tier, or ``ttl_seconds`` is out of bounds.
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
        if not (ttl_seconds > 0 and math.isfinite(ttl_seconds)):
            raise CacheError(f"answer cache: ttl_seconds={ttl_seconds} must be above 0 and finite")
        self._tiers = TierStack(tiers, ANSWER_CACHE)
        self._ttl = ttl_seconds
        self._max_entry_bytes = max_entry_bytes
        self._clock = clock
        self._flight = SingleFlight(max_wait_seconds)
        self._counters = Counters()

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the stored answer, or None."""
        deletions = self._tiers.deletions
        for index, tier in enumerate(self._tiers):
            data = tier.call(lambda cache: cache.get(key), None)
            envelope = None if data is None else _parsed(key, data)
            if data is None or envelope is None:
                self._counters.add("damaged", int(data is not None))
                continue
            remaining = envelope["expires_at"] - self._clock()
            if remaining <= 0:
                continue
            if index:
                faster = islice(self._tiers, index)
                self._tiers.copy_hit(deletions, partial(_store, faster, key, data, remaining, envelope["tags"]))
            self._counters.add("hits")
            value: dict[str, Any] = envelope["value"]
            return value
        self._counters.add("misses")
        return None

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Keep an answer made from ``document_ids``, unless it is too large or not JSON."""
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
        _store(self._tiers, key, orjson.dumps(envelope), self._ttl, tags)

    def single_flight(self, key: str) -> AbstractContextManager[bool]:
        """Hold while computing ``key``; requests for the same key wait. True if one may have stored the answer now."""
        return self._flight.hold(key)

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        """Drop every answer made from one of ``document_ids``; return the most that one tier held."""
        tags = _tags(document_ids)
        return self._tiers.delete(lambda cache: cache.delete_tags(tags))

    def clear(self) -> int:
        """Drop every answer; return the most that one tier held."""
        return self._tiers.delete(lambda cache: cache.clear())

    def stats(self) -> dict[str, Any]:
        """Return the counts of the cache and, under ``tiers``, those of each tier."""
        counts = {name: self._counters[name] for name in ("hits", "misses", "rejected", "damaged")}
        return {**counts, "tiers": self._tiers.stats()}

    def close(self) -> None:
        """Close every tier; later calls are misses."""
        self._tiers.close()


def _store(
    tiers: Iterable[FailSafeTier[ByteCache]], key: str, data: bytes, ttl_seconds: float, tags: Sequence[str]
) -> None:
    for tier in tiers:
        tier.call(lambda cache: cache.set(key, data, ttl_seconds, tags), None)


def _tags(document_ids: Sequence[str]) -> list[str]:
    # Hashed, because ids can be long or file paths, and become part of the names of Redis keys.
    return sorted({content_hash("document", document_id) for document_id in document_ids})


def _parsed(key: str, data: bytes) -> dict[str, Any] | None:
    """Return the envelope in ``data``, or None if it is damaged or belongs to another key."""
    try:
        envelope = orjson.loads(data)
    except ValueError:
        return None
    if not isinstance(envelope, dict) or envelope.get("version") != _ENVELOPE_VERSION or envelope.get("key") != key:
        return None
    tags = envelope.get("tags")
    well_formed = (
        isinstance(envelope.get("value"), dict)
        and isinstance(envelope.get("expires_at"), float)
        and isinstance(tags, list)
        and all(isinstance(tag, str) for tag in tags)
    )
    return envelope if well_formed else None
