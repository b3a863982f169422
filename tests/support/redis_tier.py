"""Opens the passage store on a Redis, and reads from it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from rag_posfix.caching.kv.entry import PassageKV
from rag_posfix.caching.kv.redis import RedisPassages
from tests.support.passages import SHAPE


def open_tier(server: Any, **options: Any) -> closing[RedisPassages]:
    # Generous: what these tests look at is not time, and the machine may be busy.
    return closing(RedisPassages(server.url, **{"timeout_seconds": 5, **options}))


def get(tier: RedisPassages, key: str, shape: Any = SHAPE) -> PassageKV | None:
    return tier.get_many({key: shape}).get(key)
