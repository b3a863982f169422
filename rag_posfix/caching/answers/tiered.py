"""The answer cache: answers as JSON in tiers of bytes, fastest first. A failing tier never fails a request.

Bytes are stored behind a checksum over key and value.

The key of an answer in the cache: a hash of everything that can change the answer, and of nothing else.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from rag_posfix.caching.deletions import EVERYTHING
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import Counters, MemoryTier, Tier, TieredCache, plugin_tier
from rag_posfix.cancellation import check_cancelled
from rag_posfix.errors import CacheError
from rag_posfix.files import ANSWERS_FOLDER
from rag_posfix.settings import CacheSettings
from rag_posfix.text import content_hash

_MAGIC = b"RPX1"
_DIGEST_BYTES = 16
SEAL_BYTES = len(_MAGIC) + _DIGEST_BYTES
"""What a seal adds to a value."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that can be deleted by each of ``tags`` and expire at ``expires_at`` (seconds since 1970).

    A tier may return the bytes alone, without tags and expiry.
    """

    data: bytes
    tags: tuple[str, ...] = ()
    expires_at: float = math.inf

    @property
    def n_bytes(self) -> int:
        return len(self.data)

    def fits(self, expected: Any) -> bool:
        return True


class BlobCodec:
    """Stores answers and other bytes."""

    cache = "answer cache"
    file_name = "answers-v1.sqlite3"
    redis_prefix = "rag_posfix:answer:"
    redis_tag_prefix = "rag_posfix:tag:"
    redis_index: str | None = None
    redis_deleted_tags = "rag_posfix:answer-deleted"

    def encode(self, key: str, entry: Blob) -> list[bytes | memoryview]:
        return [seal(key, entry.data)]

    def decode(self, key: str, data: object, expected: Any) -> Blob | None:
        value = unseal(key, bytes(data) if isinstance(data, memoryview) else data)
        return None if value is None else Blob(value)

    def allocate(self, n_bytes: int) -> memoryview:
        return memoryview(bytearray(n_bytes))


def seal(key: str, value: bytes) -> bytes:
    """Return ``value`` with a checksum over it and its key.

    The key is part of the checksum, so that the value of another key, as a store that mixes up its replies would
    return it, does not open.
    """
    return _MAGIC + _checksum(key, value) + value


def unseal(key: str, sealed: object) -> bytes | None:
    """Return the value that was sealed, or None if ``sealed`` is damaged or belongs to another key."""
    if not isinstance(sealed, bytes) or len(sealed) < SEAL_BYTES or not sealed.startswith(_MAGIC):
        return None
    value = sealed[SEAL_BYTES:]
    return value if sealed[len(_MAGIC) : SEAL_BYTES] == _checksum(key, value) else None


def _checksum(key: str, value: bytes) -> bytes:
    name = key.encode()
    digest = hashlib.blake2b(len(name).to_bytes(8, "big") + name, digest_size=_DIGEST_BYTES)
    digest.update(value)
    return digest.digest()


_MEMORY_BYTES = 64 * 1024**2
_ENVELOPE_VERSION = 1
_CHECK_SECONDS: Final = 0.05
_CLOCK_SKEW_SECONDS: Final = 60.0
"""How often a waiting thread checks whether its request was cancelled."""
_REMEMBERED_KEYS: Final = 1024
_RECENT_SECONDS: Final = 10.0


def build_answer_cache(settings: CacheSettings, cache_dir: Path) -> TieredAnswerCache | None:
    """Return the answer cache that ``settings`` describe, or None if they turn off every tier.

    No file is opened and nothing is connected before the first use.

    Args:
        cache_dir: Folder of this process's caches; the disk tier uses ``answers`` in it.

    Raises:
        CacheError: A setting is invalid, such as a URL that is no Redis URL.
        ConfigError: Redis is configured and redis-py is not installed.
    """
    if not settings.enabled:
        return None
    tiers: list[Tier[Blob]] = []
    if settings.memory_entries:
        tiers.append(MemoryTier(_MEMORY_BYTES, settings.memory_entries))
    if settings.disk_bytes:
        tiers.append(DiskTier(cache_dir / ANSWERS_FOLDER, BlobCodec(), max_bytes=settings.disk_bytes))
    if settings.redis_url is not None:
        url, timeout = settings.redis_url.get_secret_value(), settings.redis_timeout_seconds
        tiers.append(RedisTier(url, BlobCodec(), timeout_seconds=timeout, ttl_seconds=settings.ttl_seconds))
    if settings.backend is not None:
        tiers.append(plugin_tier(settings.backend, BlobCodec()))
    if not tiers:
        return None
    return TieredAnswerCache(
        tiers,
        ttl_seconds=settings.ttl_seconds,
        max_entry_bytes=settings.max_entry_bytes,
    )


class TieredAnswerCache(TieredCache[Blob]):
    """Keeps answers in every tier and returns them from the first that has them.

    An entry contains its key, when it expires, and the hashes of its documents. So a copy in a faster tier expires
    with the original and is erased with it, in every process that shares a tier (``rag_posfix.caching.deletions``).

    Args:
        tiers: The tiers, fastest first, at least one.
        ttl_seconds: How long an answer is kept, > 0.
        max_entry_bytes: Larger answers (as JSON) are not kept.
        max_wait_seconds: Longest wait in ``single_flight``.
        clock: Seconds since 1970, the same for every process that shares a tier.

    Raises:
        CacheError: There is no tier, or ``ttl_seconds`` is out of bounds.
    """

    def __init__(
        self,
        tiers: Sequence[Tier[Blob]],
        *,
        ttl_seconds: float = 24 * 3600.0,
        max_entry_bytes: int = 1024**2,
        max_wait_seconds: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not (ttl_seconds > 0 and math.isfinite(ttl_seconds)):
            raise CacheError(f"answer cache: ttl_seconds={ttl_seconds} must be above 0 and finite")
        super().__init__(tiers, BlobCodec.cache, lifetime_seconds=ttl_seconds, clock=clock)
        self._ttl = ttl_seconds
        self._max_entry_bytes = max_entry_bytes
        self._clock = clock
        self._flight = SingleFlight(max_wait_seconds)
        self._counters = Counters()

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the stored answer, or None."""
        answer: dict[str, Any] | None = None

        def accept(blobs: dict[str, Blob]) -> dict[str, Blob]:
            """Return the blob with the tags and the expiry that are in it, unless it is damaged or expired."""
            nonlocal answer
            envelope = _parse(key, blobs[key].data) if blobs else None
            if envelope is None:
                self._counters.add("damaged", len(blobs))
                return {}
            # One that lives longer than an entry can was stored by a clock that was ahead.
            if not 0 < envelope["expires_at"] - self._clock() <= self._ttl + _CLOCK_SKEW_SECONDS:
                return {}
            answer = envelope["value"]
            return {key: Blob(blobs[key].data, tuple(envelope["tags"]), envelope["expires_at"])}

        if not self._search({key: None}, accept):
            answer = None
        self._counters.add("misses" if answer is None else "hits")
        return answer

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Keep an answer made from ``document_ids``, unless it is too large or not JSON.

        Nor if one of them was deleted while a computation is open (``begin``): it may be what this one found.
        """
        try:
            answer = orjson.dumps(dict(value))
        except (TypeError, ValueError):
            answer = None
        if answer is None or len(answer) > self._max_entry_bytes:
            self._counters.add("rejected")
            return
        tags, expires_at = _tags(document_ids), self._clock() + self._ttl
        envelope = {
            "version": _ENVELOPE_VERSION,
            "key": key,
            "expires_at": expires_at,
            "tags": tags,
            "value": orjson.Fragment(answer),
        }
        self._put({key: Blob(orjson.dumps(envelope), tuple(tags), expires_at)}, len(self._tiers))

    def single_flight(self, key: str) -> AbstractContextManager[bool]:
        """Hold while computing ``key``; requests for the same key wait. True if one may have stored the answer now."""
        return self._flight.hold(key)

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        """Drop every answer made from one of ``document_ids``; return the most that one tier held."""
        return self._delete_tags(_tags(document_ids))

    def clear(self) -> int:
        """Drop every answer; return the most that one tier held."""
        return self._delete_tags([EVERYTHING])

    def stats(self) -> dict[str, Any]:
        """Return the counts of the cache and, under ``tiers``, those of each tier."""
        counts = {name: self._counters[name] for name in ("hits", "misses", "rejected", "damaged")}
        return {**counts, "pending_deletions": self.pending_deletions, "tiers": self.tier_stats()}


class _KeyLock:
    """The lock of one key, and how many threads hold it or wait for it."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class SingleFlight:
    """Lets one thread at a time work on a key: an answer that several request at once is computed once.

    Its length is the number of keys that are held.

    Args:
        max_wait_seconds: Longest wait for another thread, >= 0. Afterwards the work is done twice: a computation that
            hangs must not block equal requests for ever.
    """

    def __init__(self, max_wait_seconds: float = 60.0) -> None:
        if max_wait_seconds < 0:
            raise CacheError(f"single flight: max_wait_seconds={max_wait_seconds} must be >= 0")
        self._max_wait = max_wait_seconds
        self._locks: dict[str, _KeyLock] = {}
        self._released: OrderedDict[str, float] = OrderedDict()  # when work on a key ended, the latest last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._locks)

    @contextmanager
    def hold(self, key: str) -> Iterator[bool]:
        """Hold ``key`` while working on it; wait first if another thread holds it.

        The value is whether another thread may have done the work a moment ago: its result is worth looking up.
        A wait ends early with the error of ``rag_posfix.cancellation.check_cancelled``.
        """
        with self._lock:
            key_lock = self._locks.setdefault(key, _KeyLock())
            key_lock.users += 1
        acquired = False
        try:
            acquired = key_lock.lock.acquire(blocking=False) or self._wait(key_lock.lock)
            with self._lock:
                was_released = time.monotonic() - self._released.get(key, -_RECENT_SECONDS) < _RECENT_SECONDS
            yield was_released
        finally:
            with self._lock:
                if acquired:
                    key_lock.lock.release()
                    self._released[key] = time.monotonic()
                    self._released.move_to_end(key)
                    if len(self._released) > _REMEMBERED_KEYS:
                        self._released.popitem(last=False)
                key_lock.users -= 1
                if not key_lock.users:
                    del self._locks[key]

    def _wait(self, lock: threading.Lock) -> bool:
        """Return whether the lock was acquired within the longest wait."""
        end = time.monotonic() + self._max_wait
        while (left := end - time.monotonic()) > 0:
            check_cancelled()
            if lock.acquire(timeout=min(left, _CHECK_SECONDS)):
                return True
        return False


def _tags(document_ids: Sequence[str]) -> list[str]:
    # Hashed, because ids can be long or file paths, and become part of the names of Redis keys.
    return sorted({content_hash("document", document_id) for document_id in document_ids})


def _parse(key: str, data: bytes) -> dict[str, Any] | None:
    """Return the envelope in ``data``, or None if it is damaged or belongs to another key."""
    try:
        envelope = orjson.loads(data)
    except ValueError:
        return None
    if not isinstance(envelope, dict) or envelope.get("version") != _ENVELOPE_VERSION or envelope.get("key") != key:
        return None
    tags = envelope.get("tags")
    well_formed = (
        isinstance(envelope.get("value"), dict)
        and isinstance(envelope.get("expires_at"), float)
        and isinstance(tags, list)
        and all(isinstance(tag, str) for tag in tags)
    )
    return envelope if well_formed else None


SCHEMA_VERSION = 4
"""Part of every key. Increase it when stored entries or their meaning change: older entries are then misses."""


def tenant_salt(*tenants: str) -> str:
    """Return the salt that separates the entries of tenants, "" if no tenant is named.

    Args:
        tenants: The tenants of the process's settings and of the question; "" for none.
    """
    return repr(tenants) if any(tenants) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerKey:
    """What an answer depends on.

    Attributes:
        model: Fingerprint of the weights and their dtype.
        template: Hash of the prompt template.
        assembly: Fingerprint of how passages are chosen, ordered and cut.
        mitigation: Fingerprint of the mitigation and its parameters.
        sampling: Fingerprint of how tokens are chosen.
        question: The question.
        history: The turns before the question, serialised; empty without any.
        documents: Content hashes of the passages, in the order of the prompt.
        order_invariant: Whether the mitigation gives the same answer for every order of the passages. The hashes are
            then sorted, so that shuffled passages give the same key.
        tenant: Salt that separates the answers of tenants.
        filter: ``filter_key`` of the filter that the passages were retrieved under: answers of one set of permissions
            are never given to another. Empty without a filter.
        attribution: Whether the stored answer has citations by attention.
    """

    model: str
    template: str
    assembly: str
    mitigation: str
    sampling: str
    question: str
    documents: tuple[str, ...]
    order_invariant: bool
    history: str = ""
    tenant: str = ""
    filter: str = ""
    attribution: bool = True

    def digest(self) -> str:
        """Return the key as 32 hexadecimal digits."""
        documents = sorted(self.documents) if self.order_invariant else self.documents
        return content_hash(
            f"answer-v{SCHEMA_VERSION}",
            self.model,
            self.template,
            self.assembly,
            self.mitigation,
            self.sampling,
            self.question,
            self.history,
            self.tenant,
            self.filter,
            str(self.attribution),
            str(self.order_invariant),
            *documents,
        )
