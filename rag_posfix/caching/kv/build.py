"""Puts the passage store together from the settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rag_posfix.caching.kv.base import PassageTier
from rag_posfix.caching.kv.disk import DiskPassages
from rag_posfix.caching.kv.memory import MemoryPassages
from rag_posfix.caching.kv.redis import RedisPassages
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.settings import PASSAGES_FOLDER, PassageStoreSettings

if TYPE_CHECKING:
    import torch

__all__ = ["build_passage_store"]


def build_passage_store(
    settings: PassageStoreSettings, cache_dir: Path, device: torch.device | str = "cpu"
) -> PassageStore | None:
    """Return the passage store that ``settings`` ask for, or None if they turn every tier off.

    No file is opened and nothing is connected to before the first use.

    Args:
        settings: Which tiers there are, and their bounds.
        cache_dir: Folder of this process's caches; the disk tier takes ``passages`` in it.
        device: Where entries are kept in memory and returned: that of the model.

    Raises:
        CacheError: A setting is invalid, such as a bound that holds no entry or a URL that Redis cannot have.
        ConfigError: A Redis is asked for and redis-py is not installed.
    """
    if not settings.enabled:
        return None
    tiers: list[PassageTier] = []
    if settings.memory_bytes:
        tiers.append(MemoryPassages(settings.memory_bytes))
    if disk_bytes := settings.disk_bytes_in(cache_dir):
        tiers.append(DiskPassages(cache_dir / PASSAGES_FOLDER, max_bytes=disk_bytes))
    if settings.redis_url is not None:
        tiers.append(
            RedisPassages(
                settings.redis_url.get_secret_value(),
                timeout_seconds=settings.redis_timeout_seconds,
                max_bytes=settings.redis_bytes,
                ttl_seconds=settings.redis_ttl_seconds,
                compress=settings.compress,
            )
        )
    return PassageStore(tiers, device=device) if tiers else None
