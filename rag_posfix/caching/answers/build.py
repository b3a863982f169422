"""Puts the answer cache together from the settings."""

from __future__ import annotations

from pathlib import Path

from rag_posfix.caching.answers.disk import DiskCache
from rag_posfix.caching.answers.memory import MemoryCache
from rag_posfix.caching.answers.redis import RedisCache
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import ByteCache
from rag_posfix.settings import CacheSettings

__all__ = ["build_answer_cache"]

_ENVELOPE_BYTES = 64 * 1024  # what surrounds an answer: its key and the tags of some thousand documents


def build_answer_cache(settings: CacheSettings, cache_dir: Path) -> TieredAnswerCache | None:
    """Return the answer cache that ``settings`` ask for, or None if they turn every tier off.

    No file is opened and nothing is connected to before the first use.

    Args:
        settings: Which tiers there are, and their bounds.
        cache_dir: Folder of this process's caches; the disk tier takes ``answers`` in it.

    Raises:
        CacheError: A setting is invalid, such as a URL that Redis cannot have.
        ConfigError: A Redis is asked for and redis-py is not installed.
    """
    if not settings.enabled:
        return None
    tiers: list[ByteCache] = []
    if settings.memory_entries:
        tiers.append(MemoryCache(max_entries=settings.memory_entries))
    if settings.disk_bytes:
        tiers.append(DiskCache(cache_dir / "answers", max_bytes=settings.disk_bytes))
    if settings.redis_url is not None:
        tiers.append(
            RedisCache(
                settings.redis_url.get_secret_value(),
                timeout_seconds=settings.redis_timeout_seconds,
                max_entry_bytes=settings.max_entry_bytes + _ENVELOPE_BYTES,
            )
        )
    if not tiers:
        return None
    return TieredAnswerCache(tiers, ttl_seconds=settings.ttl_seconds, max_entry_bytes=settings.max_entry_bytes)
