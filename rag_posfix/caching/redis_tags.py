"""Entries of a Redis by tag: one sorted set per tag of the keys that have it, scored by when they expire.

A tag cleans itself of what has expired. Every command names one key, as a cluster wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["add_tags", "delete_names", "drop_tag", "names_of"]

_BATCH = 500
_CLOCK_SKEW_SECONDS = 60.0


def add_tags(client: Any, prefix: str, key: str, tags: Sequence[str], now: float, ttl_seconds: float) -> None:
    """Note that ``key``, which lives for ``ttl_seconds``, has ``tags``.

    Args:
        client: A connected client.
        prefix: What the names of tags begin with.
        key: The key of the entry.
        tags: Its tags.
        now: Seconds since 1970.
        ttl_seconds: How long the entry lives.
    """
    if not tags:
        return
    pipeline = client.pipeline(transaction=False)
    for tag in tags:
        name = prefix + tag
        pipeline.zremrangebyscore(name, "-inf", now - _CLOCK_SKEW_SECONDS)
        pipeline.zadd(name, {key: now + ttl_seconds})
        pipeline.ttl(name)
    remaining = pipeline.execute()[2::3]
    # EXPIRE only ever later (its GT option is Redis 7): a tag must outlive each of its entries.
    lifetime = int(ttl_seconds + _CLOCK_SKEW_SECONDS) + 1
    for tag, seconds in zip(tags, remaining, strict=True):
        if seconds < lifetime - 1:
            pipeline.expire(prefix + tag, lifetime)
    pipeline.execute()


def drop_tag(client: Any, prefix: str, tag: str, entry_prefix: str) -> int:
    """Drop every entry that has ``tag``; return how many there were."""
    name = prefix + tag
    keys = client.zrange(name, 0, -1)
    count = delete_names(client, (entry_prefix.encode() + key for key in keys))
    # Not DEL: an entry that was added meanwhile keeps its tag.
    for start in range(0, len(keys), _BATCH):
        client.zrem(name, *keys[start : start + _BATCH])
    return count


def names_of(client: Any, prefix: str) -> Iterator[bytes]:
    """Return the names of all keys that begin with ``prefix``."""
    names: Iterator[bytes] = client.scan_iter(match=prefix + "*", count=_BATCH)
    return names


def delete_names(client: Any, names: Iterator[bytes]) -> int:
    """Delete keys by name; return how many there were."""
    count, pipeline = 0, client.pipeline(transaction=False)
    for name in names:
        pipeline.delete(name)
        if len(pipeline) >= _BATCH:
            count += int(sum(pipeline.execute()))
    return count + int(sum(pipeline.execute()))
