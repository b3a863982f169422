"""A cache tier as a langchain ``ByteStore``: for embeddings and other bytes that can be computed again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from langchain_core.stores import BaseStore

from rag_posfix.caching.answers.blob import Blob
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.memory import MemoryTier
from rag_posfix.checked import check_type
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text, content_hash

__all__ = ["RagPosfixStore"]


class RagPosfixStore(BaseStore[str, bytes]):
    """Stores bytes under keys, in memory or on disk. Asynchronous methods do the same in another thread.

    It is a cache: when it is full, the least recently used values are dropped; a value that is too large is not
    stored; a failing disk is an empty store. Use it for values that can be computed again (embeddings, summaries), not
    for originals.

    Example:
        .. code-block:: python

            store = RagPosfixStore(DiskTier(Path("embeddings"), BlobCodec(), busy_seconds=1))

    Args:
        cache: A ``MemoryTier`` or ``DiskTier`` for this store alone: a folder of cached answers contains other keys.
        ttl_seconds: Time to live of a value, > 0.

    Raises:
        ConfigError: ``ttl_seconds`` is not above 0.
    """

    def __init__(self, cache: MemoryTier[Blob] | DiskTier[Blob], *, ttl_seconds: float = 365 * 24 * 3600.0) -> None:
        check_type("ttl_seconds", ttl_seconds, int | float, "a number of seconds above 0")
        if not ttl_seconds > 0:
            raise ConfigError(f"byte store: ttl_seconds={ttl_seconds} must be above 0")
        self._cache = cache
        self._ttl = ttl_seconds

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the value of each key, or None."""
        blobs = self._cache.get_many(dict.fromkeys(keys))
        return [blobs[key].data if key in blobs else None for key in keys]

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Store values under keys, replacing earlier values.

        Raises:
            ConfigError: a key is no encodable text, or a value is not bytes; then nothing is stored.
        """
        for key, value in key_value_pairs:
            _check(key, value)
        expires_at = time.time() + self._ttl
        self._cache.put_many({key: Blob(value, (_tag(key),), expires_at) for key, value in key_value_pairs})

    def mdelete(self, keys: Sequence[str]) -> None:
        """Delete keys; an unknown key is no error."""
        self._cache.delete_tags([_tag(key) for key in keys])

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """Yield the keys that start with ``prefix``, sorted; all keys if None."""
        yield from self._cache.keys(prefix or "")


def _tag(key: str) -> str:
    return content_hash("store", key)


def _check(key: object, value: object) -> None:
    if not isinstance(key, str) or clean_text(key) != key:
        raise ConfigError(f"byte store: the key {key!r} must be text without NUL and lone surrogates")
    if not isinstance(value, bytes):
        raise ConfigError(
            f"byte store: the value of {key!r} is {type(value).__name__}, must be bytes; encode it first"
        )
