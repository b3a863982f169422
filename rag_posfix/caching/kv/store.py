"""The passage KV store: keys and values of passages in tiers, fastest first. A failing tier never fails a question.

A background thread writes entries to slow tiers, from a queue that is bounded by bytes.

Keys and values of consecutive tokens, or a model's whole cache after them, as entries of the passage KV store.

What they are stored under, and their serialised form on disk and in Redis.

Serialised, an entry is a seal (magic number, SHA-256 over key and content) and a safetensors file. The hash is SHA-256
and not BLAKE2b as in the answer cache: an entry has megabytes, and on processors with SHA instructions SHA-256 takes
half the time. The safetensors file is written and parsed here because the safetensors package copies the tensor twice,
and allocating that much memory takes longer than hashing it. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from rag_posfix.caching.deletions import EVERYTHING
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import Counters, MemoryTier, Tier, TieredCache, plugin_tier
from rag_posfix.errors import CacheError
from rag_posfix.files import PASSAGES_FOLDER

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_MAGIC = b"RPKV0001"
_SEAL_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_MAX_HEADER_BYTES = 1024**2
_TENSOR = "kv"
_MAX_SNAPSHOT_BYTES = 2**31
_TAGS = "tags"
_COMPRESSED_MAGIC = b"RPKZ"
_COMPRESSION_LEVEL = 1
_DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.uint8": "U8",
}


@dataclass(frozen=True, slots=True)
class EntryShape:
    """Shape and dtype that an entry must have to be used.

    L decoder layers, Hkv key/value heads, D channels of a head, T tokens.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    n_tokens: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(2, L, Hkv, T, D)."""
        return (2, self.layers, self.heads, self.n_tokens, self.head_dim)

    @property
    def n_bytes(self) -> int:
        """Bytes of the keys and values."""
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def max_serialized_bytes(self) -> int:
        """Most bytes that such an entry has when serialised."""
        return _SEAL_BYTES + _LENGTH_BYTES + _MAX_HEADER_BYTES + self.n_bytes

    def of_bytes(self, n_bytes: int) -> EntryShape | None:
        """Return the shape of an entry of ``n_bytes`` that is as expected here, None if there is none."""
        return self if n_bytes == self.n_bytes else None

    def entry(self, kv: Tensor, tags: tuple[str, ...]) -> PassageKV:
        return PassageKV(kv, tags)


@dataclass(frozen=True, slots=True)
class SnapshotShape:
    """Shape and dtype of a ``CacheSnapshot``, which must have some bytes to be used; 0 allows any number."""

    n_bytes: int = 0

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.uint8

    @property
    def sizes(self) -> tuple[int]:
        return (self.n_bytes,)

    @property
    def max_serialized_bytes(self) -> int:
        return self.n_bytes or _MAX_SNAPSHOT_BYTES

    def of_bytes(self, n_bytes: int) -> SnapshotShape | None:
        return SnapshotShape(n_bytes)

    def entry(self, kv: Tensor, tags: tuple[str, ...]) -> PassageKV:
        return CacheSnapshot(kv, tags)


ExpectedShape: TypeAlias = EntryShape | SnapshotShape


@dataclass(frozen=True, slots=True, eq=False)
class PassageKV:
    """Keys and values of consecutive tokens in every layer. The tensor must never be written to.

    Attributes:
        kv: (2, L, Hkv, T, D), keys first, contiguous, on any device.
        tags: Content keys of the documents that it was made from; it can be deleted by each.

    Raises:
        CacheError: ``kv`` has another number of dimensions or is not contiguous.
    """

    kv: Tensor
    tags: tuple[str, ...] = ()
    expires_at: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ``CacheError`` if the tensor has not the form of an entry."""
        kv = self.kv
        if kv.ndim != 5 or kv.shape[0] != 2 or not kv.is_contiguous():
            raise CacheError(
                f"passage KV store: kv of shape {tuple(kv.shape)}, contiguous={kv.is_contiguous()}, must be "
                "contiguous and of shape (2, layers, heads, tokens, head_dim); stack keys and values of the layers"
            )

    @property
    def n_tokens(self) -> int:
        """Tokens, T."""
        return self.kv.shape[3]

    @property
    def n_bytes(self) -> int:
        """Bytes of the keys and values."""
        return self.kv.nbytes

    @property
    def shape(self) -> ExpectedShape:
        """Shape and dtype of the entry."""
        _, layers, heads, n_tokens, head_dim = self.kv.shape
        return EntryShape(layers, heads, head_dim, self.kv.dtype, n_tokens)

    def fits(self, expected: ExpectedShape) -> bool:
        return self.shape == expected

    def on(self, device: torch.device | str) -> PassageKV:
        """Return the entry on ``device``, in memory of its own: a view would keep the whole batch in memory."""
        kv = (self.kv.detach() if self.kv.requires_grad else self.kv).to(device)
        if kv.untyped_storage().nbytes() > kv.nbytes:
            kv = kv.clone()
        return self if kv is self.kv else replace(self, kv=kv)

    def tagged(self, tags: Sequence[str]) -> PassageKV:
        """Return the entry with ``tags`` added to its own."""
        merged = tuple(sorted({*self.tags, *tags}))
        return self if merged == self.tags else replace(self, tags=merged)


@dataclass(frozen=True, slots=True, eq=False)
class CacheSnapshot(PassageKV):
    """A model's whole cache after consecutive tokens, as bytes that describe themselves (``patching.snapshots``).

    ``kv`` is (n,) uint8.
    """

    def check(self) -> None:
        kv = self.kv
        if kv.ndim != 1 or str(kv.dtype) != "torch.uint8" or not kv.is_contiguous():
            raise CacheError(
                f"passage KV store: a snapshot of shape {tuple(kv.shape)} and type {kv.dtype} must be contiguous bytes"
            )

    @property
    def shape(self) -> ExpectedShape:
        return SnapshotShape(self.kv.nbytes)

    def fits(self, expected: ExpectedShape) -> bool:
        return isinstance(expected, SnapshotShape)


class KVCodec:
    """Stores keys and values. Compressed entries (zlib, for slow networks) and others can be mixed in one store."""

    cache = "passage KV store"
    file_name = "passages-v1.sqlite3"
    redis_prefix = "rag_posfix:passage:"
    redis_tag_prefix = "rag_posfix:passage-tag:"
    redis_index: str | None = "rag_posfix:passage-index"
    redis_deleted_tags = "rag_posfix:passage-deleted"

    def __init__(self, compress: bool = False) -> None:
        self._compress = compress

    def encode(self, key: str, entry: PassageKV) -> tuple[bytes | memoryview, ...]:
        """Return the serialised entry; compressed if requested and smaller."""
        if not self._compress:
            return serialize_parts(key, entry)
        data = serialize(key, entry)
        compressed = _COMPRESSED_MAGIC + zlib.compress(data, _COMPRESSION_LEVEL)
        return (min(data, compressed, key=len),)

    def decode(self, key: str, data: object, expected: ExpectedShape) -> PassageKV | None:
        """Return the entry in ``data``. At most the bytes of an entry of the ``expected`` shape are decompressed."""
        if isinstance(data, bytes) and data.startswith(_COMPRESSED_MAGIC):
            stream = zlib.decompressobj()
            try:
                content = stream.decompress(memoryview(data)[len(_COMPRESSED_MAGIC) :], expected.max_serialized_bytes)
            except zlib.error:
                return None
            data = content if stream.eof and not stream.unused_data else None
        return deserialize(key, data, expected)

    def allocate(self, n_bytes: int) -> memoryview:
        """Return uninitialised memory: the tensor is not copied from it."""
        return allocate(n_bytes)


def allocate(n_bytes: int) -> memoryview:
    """Return uninitialised memory to read a serialised entry into."""
    import torch

    return _memory_of(torch.empty(n_bytes, dtype=torch.uint8))


def serialize_parts(key: str, entry: PassageKV) -> tuple[bytes, memoryview]:
    """Return the serialised entry in two parts: seal with header, and keys with values, which are not copied."""
    import torch

    content = _memory_of(entry.kv.detach().cpu().reshape(-1).view(torch.uint8))
    header = _serialized_header(entry)
    return b"".join((_MAGIC, _checksum(key, header, content), header)), content


def serialize(key: str, entry: PassageKV) -> bytes:
    """Return the serialised entry. It can be deserialised under ``key`` alone."""
    return b"".join(serialize_parts(key, entry))


def deserialize(key: str, data: object, expected: ExpectedShape) -> PassageKV | None:
    """Return the entry in ``data``, on the CPU, or None if it is damaged, of another key or not as ``expected``.

    The tensor shares the memory of a ``memoryview``; ``bytes`` are copied, as they must never change.
    """
    if not isinstance(data, bytes | memoryview):
        return None
    view = memoryview(data)
    start = _header_end(view)
    shape = None if start is None else expected.of_bytes(len(view) - start)
    if start is None or shape is None:
        return None
    if view[len(_MAGIC) : _SEAL_BYTES] != _checksum(key, view[_SEAL_BYTES:]):
        return None
    header = _header(view, start)
    tags = _tags(header)
    if tags is None or header.get(_TENSOR) != _description(shape):
        return None
    content = view[start:]
    if content.readonly:
        copy = allocate(len(content))
        copy[:] = content
        content = copy
    return expected.entry(_tensor(content, shape), tags)


def _header_end(start: memoryview) -> int | None:
    """Return where the header of a serialised entry ends, or None if this is no entry."""
    if start[: len(_MAGIC)] != _MAGIC or len(start) < _SEAL_BYTES + _LENGTH_BYTES:
        return None
    length = int.from_bytes(start[_SEAL_BYTES : _SEAL_BYTES + _LENGTH_BYTES], "little")
    return _SEAL_BYTES + _LENGTH_BYTES + length if length <= _MAX_HEADER_BYTES else None


def _serialized_header(entry: PassageKV) -> bytes:
    header = {"__metadata__": {_TAGS: json.dumps(entry.tags)}, _TENSOR: _description(entry.shape)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # aligns the tensor
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _description(shape: ExpectedShape) -> dict[str, object]:
    dtype = _DTYPES.get(str(shape.dtype), str(shape.dtype))
    return {"dtype": dtype, "shape": list(shape.sizes), "data_offsets": [0, shape.n_bytes]}


def _header(data: memoryview, end: int) -> dict[str, Any]:
    """Return the header of the safetensors file, empty if it cannot be read."""
    try:
        header = json.loads(bytes(data[_SEAL_BYTES + _LENGTH_BYTES : end]))
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _tags(header: dict[str, Any]) -> tuple[str, ...] | None:
    try:
        tags = json.loads(header["__metadata__"][_TAGS])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        return None
    return tuple(tags)


def _tensor(content: memoryview, shape: ExpectedShape) -> Tensor:
    import torch

    if not len(content):  # frombuffer rejects an empty buffer
        return torch.empty(shape.sizes, dtype=shape.dtype)
    return torch.frombuffer(content, dtype=shape.dtype).reshape(shape.sizes)


def _memory_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()  # numpy's types declare the buffer protocol only from Python 3.12 on
    return memoryview(array)


def _checksum(key: str, *chunks: bytes | memoryview) -> bytes:
    # The key is part of the checksum: a store that mixes up its replies returns an entry that fails the check.
    name = key.encode()
    digest = hashlib.sha256(len(name).to_bytes(8, "big") + name)
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


SCHEMA_VERSION = 1
"""Part of every key. Increase it when stored entries or their meaning change: older entries are then misses."""

EncodingKey: TypeAlias = str | int | float | bool | tuple["EncodingKey", ...] | None
"""What a plan changes in the encoding of a passage, as plain data."""


def passage_key(
    model_fingerprint: str,
    dtype: torch.dtype,
    encoding: EncodingKey,
    prefix_tokens: Sequence[int],
    tokens: Sequence[int],
    salt: str,
) -> str:
    """Return the key of a passage as 64 hexadecimal digits. Two keys are equal only if all arguments are.

    The hash has 256 bits, so that two passages with the same key cannot be constructed: questions about one passage
    would be answered from the other.

    Args:
        dtype: Type of the keys and values.
        encoding: What the plan changes in the encoding: first position, base of the rotation, scale per layer, ... 1
            and 1.0 are different.
        prefix_tokens: Tokens before the passage that it attends to.
        salt: Separates the entries of tenants.

    Raises:
        CacheError: ``encoding`` contains something other than plain data, or a token is no 64-bit integer.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(_encoded(("passage", SCHEMA_VERSION, model_fingerprint, str(dtype), encoding, salt)))
    digest.update(_tokens(prefix_tokens))
    digest.update(_tokens(tokens))
    return digest.hexdigest()


def _encoded(encoding: EncodingKey) -> bytes:
    """Return an unambiguous encoding of a key: a letter for the type, the length, the content."""
    match encoding:
        case None:
            letter, content = b"n", b""
        case bool():
            letter, content = b"b", str(encoding).encode()
        case str():
            letter, content = b"s", encoding.encode("utf-8", "surrogatepass")
        case int():
            letter, content = b"i", str(encoding).encode()
        case float():
            letter, content = b"f", struct.pack(">d", encoding + 0.0)  # -0.0 is 0.0
        case tuple():
            letter, content = b"t", b"".join(map(_encoded, encoding))
        case _:
            raise CacheError(
                f"passage key: a part of type {type(encoding).__name__} is not understood; allowed: str, int, float, "
                "bool, None and tuples of them"
            )
    return letter + len(content).to_bytes(8, "big") + content


def _tokens(tokens: Sequence[int]) -> bytes:
    try:
        numbers = array("q", tokens)
    except (OverflowError, TypeError) as error:
        raise CacheError(f"passage key: tokens must be 64-bit integers ({error})") from error
    if sys.byteorder == "big":  # machines that share a store must compute the same keys
        numbers.byteswap()
    return len(numbers).to_bytes(8, "big") + numbers.tobytes()


_BATCH_BYTES = 32 * 1024**2
_MAX_REDIS_SNAPSHOT_BYTES = 32 * 1024**2
"""Larger snapshots are not sent to Redis: at a gigabit per second a look-up would take longer than its time limit."""

_MAX_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Write:
    key: str
    entry: PassageKV
    n_tiers: int
    computation: object


class WriteBehind:
    """Calls ``write`` with entries, in their order, in a daemon thread that starts with the first of them.

    Args:
        write: Takes entries and a number n, and writes them to the tiers among the first n that are not
            synchronous. It must not raise.
        max_bytes: Most bytes of entries in the queue. An entry that would exceed it is not written, unless the queue
            is empty.
    """

    def __init__(self, write: Callable[[Mapping[str, PassageKV], int], None], max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._waiting: deque[_Write] = deque()
        self._waiting_bytes = 0
        self._writing = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def max_bytes(self) -> int:
        """Most bytes of entries in the queue."""
        return self._max_bytes

    @property
    def pending(self) -> int:
        """Entries in the queue or being written."""
        with self._changed:
            return len(self._waiting) + self._writing

    def add(self, entries: Mapping[str, PassageKV], n_tiers: int, computation: object = None) -> int:
        """Queue ``entries`` and return at once.

        Args:
            n_tiers: Passed on to ``write``.
            computation: Referred to, and so open, until they are written.

        Returns:
            How many did not fit into the queue and will not be written.
        """
        rejected = 0
        with self._changed:
            for key, entry in entries.items():
                full = bool(self._waiting) and self._waiting_bytes + entry.n_bytes > self._max_bytes
                if full or self._closed:
                    rejected += 1
                    continue
                self._waiting.append(_Write(key, entry, n_tiers, computation))
                self._waiting_bytes += entry.n_bytes
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rag-posfix-passages", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return rejected

    def cancel(self, tags: Collection[str] | None = None) -> None:
        """Remove entries with one of ``tags`` from the queue, all if None, and wait for the write that is running."""
        with self._changed:
            unwanted = None if tags is None else set(tags)
            remaining = [
                write for write in self._waiting if unwanted is not None and unwanted.isdisjoint(write.entry.tags)
            ]
            self._waiting = deque(remaining)
            self._waiting_bytes = sum(write.entry.n_bytes for write in remaining)
            self._changed.notify_all()
            # The wait is bounded: if the disk hangs, the caller must not.
            self._changed.wait_for(lambda: not self._writing, _MAX_WAIT_SECONDS)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything is written; return whether that took at most ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write the queue, for ``timeout_seconds`` at most, and end the thread."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._closed = True
        self.flush(timeout_seconds)
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            entries, n_tiers, computations = batch
            try:
                self._write(entries, n_tiers)
            finally:
                del batch, entries, computations  # tensors must not stay in memory until the next write
                with self._changed:
                    self._writing = 0
                    self._changed.notify_all()

    def _next(self) -> tuple[dict[str, PassageKV], int, list[object]] | None:
        """Wait for entries and return the first of them that go to the same tiers, or None once it is closed."""
        computations: list[object] = []
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            n_tiers, taken, entries = self._waiting[0].n_tiers, 0, dict[str, PassageKV]()
            while self._waiting and self._waiting[0].n_tiers == n_tiers and taken < _BATCH_BYTES:
                write = self._waiting.popleft()
                entries[write.key] = write.entry
                computations.append(write.computation)
                taken += write.entry.n_bytes
            self._waiting_bytes -= taken
            self._writing = len(entries)
            return entries, n_tiers, computations


_CLOSE_SECONDS = 10.0
_BUSY_SECONDS = 0.25


def build_passage_store(settings: Any, cache_dir: Path, device: torch.device | str = "cpu") -> PassageStore | None:
    """Return the passage KV store that ``settings`` describe, or None if they turn off every tier.

    No file is opened and nothing is connected before the first use.

    Args:
        settings: ``rag_posfix.settings.PassageStoreSettings``, which the packages that compute do not import.
        cache_dir: Folder of this process's caches; the disk tier uses ``passages`` in it.
        device: Where entries are kept in memory and returned: the device of the model.

    Raises:
        CacheError: A setting is invalid, such as a limit that holds no entry or a URL that is no Redis URL.
        ConfigError: Redis is configured and redis-py is not installed.
    """
    if not settings.enabled:
        return None
    tiers: list[Tier[PassageKV]] = []
    if settings.memory_bytes:
        tiers.append(MemoryTier(settings.memory_bytes))
    if disk_bytes := settings.disk_bytes_in(cache_dir):
        folder = cache_dir / PASSAGES_FOLDER
        tiers.append(DiskTier(folder, KVCodec(), max_bytes=disk_bytes, busy_seconds=_BUSY_SECONDS))
    if settings.redis_url is not None:
        tiers.append(
            RedisTier(
                settings.redis_url.get_secret_value(),
                KVCodec(settings.compress),
                timeout_seconds=settings.redis_timeout_seconds,
                max_bytes=settings.redis_bytes,
                ttl_seconds=settings.redis_ttl_seconds,
            )
        )
    if settings.backend is not None:
        tiers.append(plugin_tier(settings.backend, KVCodec()))
    return PassageStore(tiers, device=device) if tiers else None


class PassageStore(TieredCache[PassageKV]):
    """Keeps entries in every tier and returns them from the first that has them.

    Tiers that are not synchronous are written in the background, after the answer. A hit is copied to the tiers before
    it, with its tags, so that a copy can be dropped with the original. A tier is searched only for entries that
    earlier tiers lack, so an entry that memory serves is not marked as used on disk. ``drop`` and ``clear`` reach the
    tiers of this process, and within a second those of processes that share a Redis.

    Args:
        tiers: The tiers, fastest first, at least one.
        device: Where entries are kept in memory and returned.
        queue_bytes: Most bytes of entries that wait to be written; they stay in memory meanwhile.

    Raises:
        CacheError: There is no tier.
    """

    def __init__(
        self,
        tiers: Sequence[Tier[PassageKV]],
        *,
        device: torch.device | str = "cpu",
        queue_bytes: int = 256 * 1024**2,
    ) -> None:
        super().__init__(tiers, KVCodec.cache)
        self._device = device
        self._behind = WriteBehind(
            lambda entries, n_tiers: self._write(entries, n_tiers, is_synchronous=False), queue_bytes
        )
        self._counters = Counters()

    @property
    def queue_bytes(self) -> int:
        """Most bytes of entries that wait to be written."""
        return self._behind.max_bytes

    def get_many(self, keys: Mapping[str, ExpectedShape], *, memory_only: bool = False) -> dict[str, PassageKV]:
        """Return the stored entries of ``keys`` on the store's device, without damaged ones."""
        hits = self._search(keys, self._on_device, is_synchronous=memory_only)
        self._counters.add("hits", len(hits))
        self._counters.add("misses", len(keys) - len(hits))
        self._counters.add("hit_bytes", sum(entry.n_bytes for entry in hits.values()))
        return hits

    def put_many(
        self,
        entries: Mapping[str, PassageKV],
        tags: Mapping[str, Sequence[str]] | None = None,
        *,
        memory_only: bool = False,
    ) -> None:
        """Keep ``entries``: in memory at once, in slower tiers in the background.

        Not those of documents that were deleted while a computation is open (``begin``): it may have read them before.

        Args:
            entries: The entries by key. Their tensors must not be written to from now on.
            tags: For each key the content keys of the documents it was made from. A key that is put again loses
                its earlier tags; a hit keeps them.
            memory_only: Whether slower tiers do not get them.
        """
        tags_of = tags or {}
        tagged = {key: entry.tagged(tags_of.get(key, ())) for key, entry in entries.items()}
        if memory_only:
            self._write(self._on_device(tagged), len(self._tiers), is_synchronous=True)
        else:
            self._put(self._on_device(tagged), len(self._tiers))

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait for pending writes; return False on timeout."""
        return self._behind.flush(timeout_seconds)

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry that has one of ``tags``; return the most that one tier held."""
        return self._delete_tags(tags)

    def clear(self) -> int:
        """Drop every entry; return the most that one tier held."""
        return self._delete_tags([EVERYTHING])

    def stats(self) -> dict[str, Any]:
        """Return the counts of the store and, under ``tiers``, those of each tier.

        ``hits`` and ``misses`` count requested entries, ``hit_bytes`` the bytes of the hits, ``bytes`` the size of the
        tiers, ``dropped_writes`` entries that did not fit into the queue, ``pending_writes`` entries in the queue.
        """
        tiers = self.tier_stats()
        counts = {name: self._counters[name] for name in ("hits", "misses", "hit_bytes", "errors", "dropped_writes")}
        n_bytes = sum(int(tier.get("bytes") or 0) for tier in tiers)
        pending = {"pending_writes": self._behind.pending, "pending_deletions": self.pending_deletions}
        return {**counts, "bytes": n_bytes, **pending, "tiers": tiers}

    def memory_tags(self) -> frozenset[str]:
        """Return the tags of the entries in memory; reads neither disk nor Redis."""
        tags: frozenset[str] = frozenset()
        in_memory = [tier for tier in self._tiers if tier.is_synchronous and isinstance(tier, MemoryTier)]
        return tags.union(*(tier.tags() for tier in in_memory))

    def persistent_stats(self) -> list[dict[str, Any]]:
        """Return the counts of the tiers that are written in the background; of all tiers if there are none such."""
        stats = self.tier_stats()
        behind = [tier for tier, written in zip(stats, self._tiers, strict=True) if not written.is_synchronous]
        return behind or stats

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Write the queue, for ``timeout_seconds`` at most, and close every tier; later calls are misses."""
        self._behind.close(timeout_seconds)
        super().close()

    def _on_device(self, entries: Mapping[str, PassageKV]) -> dict[str, PassageKV]:
        """Return ``entries`` on the store's device, without those for which it has no memory."""
        use = "copying entries"
        copies: dict[str, PassageKV] = {}
        for key, entry in entries.items():
            try:
                copies[key] = entry.on(self._device)
            except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
                self._counters.add("errors")
                self._guard.failed(use, error)
        if copies:
            self._guard.worked(use)
        return copies

    def _erase(self, tags: Sequence[str], from_shared: bool = True) -> int:
        self._behind.cancel(None if EVERYTHING in tags else tags)
        return super()._erase(tags, from_shared)

    def _put(self, entries: dict[str, PassageKV], n_tiers: int) -> None:
        self._write(entries, n_tiers, is_synchronous=True)
        if not all(tier.is_synchronous for tier in self._tiers[:n_tiers]):
            queued = self.begin()  # the computation of the entries may have ended when they are written
            rejected = self._behind.add(self._deletions.surviving(entries), n_tiers, queued)
            self._counters.add("dropped_writes", rejected)

    def _write(self, entries: Mapping[str, PassageKV], n_tiers: int, *, is_synchronous: bool) -> None:
        """Write ``entries`` to the synchronous, or the other, of the first ``n_tiers`` tiers."""
        tiers = [tier for tier in self._tiers[:n_tiers] if tier.is_synchronous == is_synchronous]
        self._write_tiers(dict(entries), tiers)

    def _accepted(self, tier: str, entries: dict[str, PassageKV]) -> dict[str, PassageKV]:
        if tier != "redis":
            return entries
        return {
            key: entry
            for key, entry in entries.items()
            if not isinstance(entry, CacheSnapshot) or entry.n_bytes <= _MAX_REDIS_SNAPSHOT_BYTES
        }
