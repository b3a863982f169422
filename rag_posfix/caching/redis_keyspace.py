"""The entries of one cache in Redis and their tags, both under a prefix of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_COMMANDS_PER_ROUND_TRIP = 500
_CLOCK_SKEW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RedisKeyspace:
    """Names of entries and tags, and the commands that keep both consistent.

    An entry is one string. A tag is one sorted set of the keys that have it, scored by the time at which they expire;
    adding to a tag removes what has expired from it. Every command names one key, as a cluster demands.

    Attributes:
        entry_prefix: What the names of entries begin with; the key follows.
        tag_prefix: What the names of tags begin with; the tag follows.
    """

    entry_prefix: str
    tag_prefix: str

    def entry(self, key: str) -> str:
        """Return the name of the entry of ``key``."""
        return self.entry_prefix + key

    def add_tags(self, client: Any, key: str, tags: Sequence[str], now: float, ttl_seconds: float) -> None:
        """Record that ``key`` has ``tags``. Do so before the entry is written: without its tags none could delete it.

        Args:
            now: Seconds since 1970.
            ttl_seconds: How long the entry lives.
        """
        if not tags:
            return
        pipeline = client.pipeline(transaction=False)
        for tag in tags:
            name = self.tag_prefix + tag
            pipeline.zremrangebyscore(name, "-inf", now - _CLOCK_SKEW_SECONDS)
            pipeline.zadd(name, {key: now + ttl_seconds})
            pipeline.ttl(name)
        remaining = pipeline.execute()[2::3]
        # A tag must outlive each of its entries: EXPIRE may only set a later time. Its GT option needs Redis 7.
        lifetime = int(ttl_seconds + _CLOCK_SKEW_SECONDS) + 1
        for tag, seconds in zip(tags, remaining, strict=True):
            if seconds < lifetime - 1:
                pipeline.expire(self.tag_prefix + tag, lifetime)
        pipeline.execute()

    def delete_tags(self, client: Any, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        count = 0
        for tag in tags:
            name = self.tag_prefix + tag
            keys = client.zrange(name, 0, -1)
            count += self.delete(client, keys)
            # ZREM of these keys and not DEL of the tag: an entry that was added meanwhile keeps its tag.
            for start in range(0, len(keys), _COMMANDS_PER_ROUND_TRIP):
                client.zrem(name, *keys[start : start + _COMMANDS_PER_ROUND_TRIP])
        return count

    def delete(self, client: Any, keys: Iterable[bytes]) -> int:
        """Delete the entries of ``keys``; return how many there were."""
        return _delete(client, (self.entry_prefix.encode() + key for key in keys))

    def clear(self, client: Any) -> int:
        """Delete every entry and every tag, and nothing else; return how many entries there were."""
        count = _delete(client, _names(client, self.entry_prefix))
        _delete(client, _names(client, self.tag_prefix))
        return count


def _names(client: Any, prefix: str) -> Iterator[bytes]:
    """Return the names of all keys that begin with ``prefix``."""
    names: Iterator[bytes] = client.scan_iter(match=prefix + "*", count=_COMMANDS_PER_ROUND_TRIP)
    return names


def _delete(client: Any, names: Iterable[bytes]) -> int:
    count, pipeline = 0, client.pipeline(transaction=False)
    for name in names:
        pipeline.delete(name)
        if len(pipeline) >= _COMMANDS_PER_ROUND_TRIP:
            count += int(sum(pipeline.execute()))
    return count + int(sum(pipeline.execute()))
