"""Builds the passage KV store from the settings. The import of the backends registers them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rag_posfix.caching.kv import disk, memory, redis  # noqa: F401
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.kv.tier import KV_BACKENDS, PassageStoreOptions

if TYPE_CHECKING:
    import torch


def build_passage_store(
    settings: PassageStoreOptions, cache_dir: Path, device: torch.device | str = "cpu"
) -> PassageStore | None:
    """Return the passage KV store that ``settings`` describe, or None if they turn off every tier.

    No file is opened and nothing is connected before the first use.

    Args:
        cache_dir: Folder of this process's caches; the disk tier uses ``passages`` in it.
        device: Where entries are kept in memory and returned: the device of the model.

    Raises:
        CacheError: A setting is invalid, such as a bound that holds no entry or a URL that is no Redis URL.
        ConfigError: Redis is configured and redis-py is not installed.
    """
    tiers = KV_BACKENDS.open_tiers(settings, cache_dir)
    return PassageStore(tiers, device=device) if tiers else None
