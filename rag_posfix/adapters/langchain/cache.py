"""The answer cache as a langchain ``BaseCache``, and a tier as a ``ByteStore``.

Nothing is unpickled, and no class is imported by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from langchain_core.caches import BaseCache
from langchain_core.messages import message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, Generation, GenerationChunk
from langchain_core.stores import BaseStore

from rag_posfix.caching.answers.tiered import SCHEMA_VERSION, Blob, TieredAnswerCache
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.checked import check_type
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text, content_hash

__all__ = ["RagPosfixCache", "RagPosfixStore"]

_PLAIN: dict[str, type[Generation]] = {cls.__name__: cls for cls in (Generation, GenerationChunk)}
_CHAT: dict[str, type[ChatGeneration]] = {cls.__name__: cls for cls in (ChatGeneration, ChatGenerationChunk)}


class RagPosfixCache(BaseCache):
    """Caches the generations of langchain models.

    Only a generation that can be restored exactly is cached; not one with values that are not JSON, or of a class that
    langchain-core does not define. A damaged entry is a miss.

    Args:
        cache: Stores the generations; None keeps up to 1024 of them in the memory of this process. ``clear`` deletes
            all its entries, so do not share it with other answers that must be kept.

    Example:
        .. code-block:: python

            set_llm_cache(RagPosfixCache())
    """

    def __init__(self, cache: TieredAnswerCache | None = None) -> None:
        self._cache = TieredAnswerCache([MemoryTier(64 * 1024**2, max_entries=1024)]) if cache is None else cache

    def lookup(self, prompt: str, llm_string: str) -> list[Generation] | None:
        """Return the generations of the model ``llm_string`` for ``prompt``, or None."""
        value = self._cache.get(_key(prompt, llm_string))
        return None if value is None else _from_json(value.get("generations"))

    def update(self, prompt: str, llm_string: str, return_val: Sequence[Generation]) -> None:
        """Cache the generations of the model ``llm_string`` for ``prompt``."""
        try:
            generations = [_to_json(generation) for generation in return_val]
        except (KeyError, ValueError, TypeError):
            return
        key = _key(prompt, llm_string)
        if _from_json(generations) == list(return_val):
            self._cache.put(key, {"generations": generations})

    def clear(self, **kwargs: Any) -> None:
        """Delete all entries of all tiers."""
        self._cache.clear()

    async def alookup(self, prompt: str, llm_string: str) -> list[Generation] | None:
        """``lookup`` without blocking the event loop."""
        return await asyncio.to_thread(self.lookup, prompt, llm_string)

    async def aupdate(self, prompt: str, llm_string: str, return_val: Sequence[Generation]) -> None:
        """``update`` without blocking the event loop."""
        await asyncio.to_thread(self.update, prompt, llm_string, return_val)

    async def aclear(self, **kwargs: Any) -> None:
        """``clear`` without blocking the event loop."""
        await asyncio.to_thread(self.clear)


def _key(prompt: str, llm_string: str) -> str:
    return content_hash(f"langchain-v{SCHEMA_VERSION}", prompt, llm_string)


def _to_json(generation: Generation) -> dict[str, Any]:
    """Return ``generation`` as JSON types; raise for an unknown class or a value that is not JSON."""
    name = type(generation).__name__
    data: dict[str, Any] = {"type": name, "generation_info": generation.generation_info}
    if type(generation) is _CHAT.get(name):
        data["message"] = message_to_dict(generation.message)
    elif type(generation) is _PLAIN.get(name):
        data["text"] = generation.text
    else:
        raise TypeError(name)
    plain: dict[str, Any] = orjson.loads(orjson.dumps(data))
    return plain


def _from_json(generations: object) -> list[Generation] | None:
    """Return the generations, or None if one is damaged."""
    if not isinstance(generations, list):
        return None
    try:
        return [_generation(data) for data in generations]
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _generation(data: dict[str, Any]) -> Generation:
    name, info = data["type"], data["generation_info"]
    if name in _PLAIN:
        return _PLAIN[name](text=data["text"], generation_info=info)
    # langchain-core chooses the message class from a fixed table; the data cannot name a class to import.
    (message,) = messages_from_dict([data["message"]])
    return _CHAT[name](message=message, generation_info=info)


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
