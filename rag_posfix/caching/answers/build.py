"""Builds the answer cache from the settings. The import of the backends registers them."""

from __future__ import annotations

from pathlib import Path

from rag_posfix.caching.answers import disk, memory, redis  # noqa: F401
from rag_posfix.caching.answers.tier import ANSWER_BACKENDS
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.settings import CacheSettings


def build_answer_cache(settings: CacheSettings, cache_dir: Path) -> TieredAnswerCache | None:
    """Return the answer cache that ``settings`` describe, or None if they turn off every tier.

    No file is opened and nothing is connected before the first use.

    Args:
        cache_dir: Folder of this process's caches; the disk tier uses ``answers`` in it.

    Raises:
        CacheError: A setting is invalid, such as a URL that is no Redis URL.
        ConfigError: Redis is configured and redis-py is not installed.
    """
    tiers = ANSWER_BACKENDS.open_tiers(settings, cache_dir)
    if not tiers:
        return None
    return TieredAnswerCache(tiers, ttl_seconds=settings.ttl_seconds, max_entry_bytes=settings.max_entry_bytes)
