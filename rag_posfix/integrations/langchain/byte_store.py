"""A tier of the caches as langchain's ``ByteStore``: for embeddings and other bytes that can be made again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from langchain_core.stores import BaseStore

from rag_posfix.caching.answers.tier import ListedCache
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text, content_hash

__all__ = ["RagPosfixStore"]


class RagPosfixStore(BaseStore[str, bytes]):
    """Keeps bytes under keys, in memory or on disk. Asynchronous methods do the same in another thread.

    It is a cache: when it is full, what was used longest ago goes, a value that is too large is not kept, and a
    failing disk holds nothing. So it fits what can be made again (embeddings, summaries) and is no home for originals.

    Example:
        .. code-block:: python

            store = RagPosfixStore(DiskCache(Path("embeddings"), busy_seconds=1))

    Args:
        cache: ``MemoryCache`` or ``DiskCache``, of its own: a folder that answers are kept in holds other keys too.
        ttl_seconds: How long a value is kept, > 0.

    Raises:
        ConfigError: ``ttl_seconds`` is not above 0.
    """

    def __init__(self, cache: ListedCache, *, ttl_seconds: float = 365 * 24 * 3600.0) -> None:
        if not ttl_seconds > 0:
            raise ConfigError(f"byte store: ttl_seconds={ttl_seconds} must be above 0")
        self._cache = cache
        self._ttl = ttl_seconds

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the value of each key, None where there is none.

        Args:
            keys: The keys, in any number and order.
        """
        return [self._cache.get(key) for key in keys]

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Keep values under keys, in place of what was there.

        Args:
            key_value_pairs: The keys and their values.

        Raises:
            ConfigError: a key is no text that can be encoded, or a value is not bytes; nothing is kept then.
        """
        for key, value in key_value_pairs:
            _check(key, value)
        for key, value in key_value_pairs:
            self._cache.set(key, value, self._ttl, [_tag(key)])

    def mdelete(self, keys: Sequence[str]) -> None:
        """Drop keys; those that are not there are no error.

        Args:
            keys: The keys.
        """
        self._cache.delete_tags([_tag(key) for key in keys])

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """Yield the keys that begin with ``prefix``, sorted.

        Args:
            prefix: All keys if None.
        """
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
