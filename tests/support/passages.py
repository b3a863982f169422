"""Small entries of the passage KV store, and the caches on a Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch

from rag_posfix.caching.answers.tiered import Blob
from rag_posfix.caching.kv.store import EntryShape, KVCodec, PassageKV
from rag_posfix.caching.redis import RedisTier

SHAPE = EntryShape(layers=2, heads=1, head_dim=4, dtype=torch.bfloat16, n_tokens=3)
"""What ``entry`` makes unless told otherwise: 96 bytes."""


def entry(seed: int = 0, shape: EntryShape = SHAPE, tags: tuple[str, ...] = ()) -> PassageKV:
    """Return an entry of random bits: every value, NaN and infinity too, is as likely as it can be."""
    bits = torch.randint(0, 256, (shape.n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return PassageKV(bits.view(shape.dtype).reshape(shape.sizes), tags)


def same(one: PassageKV | None, two: PassageKV | None) -> bool:
    """Return whether both are entries of the same shape, type, bits and tags."""
    if one is None or two is None:
        return False
    return (
        one.shape == two.shape
        and one.tags == two.tags
        and torch.equal(one.kv.view(torch.uint8), two.kv.view(torch.uint8))
    )


def open_tier(server: Any, **options: Any) -> closing[RedisTier[PassageKV]]:
    # Generous: what these tests look at is not time, and the machine may be busy.
    codec = KVCodec(options.pop("compress", False))
    return closing(RedisTier(server.url, codec, **{"timeout_seconds": 60, **options}))


def get(tier: RedisTier[PassageKV], key: str, shape: Any = SHAPE) -> PassageKV | None:
    return tier.get_many({key: shape}).get(key)


def get_blob(tier: RedisTier[Blob], key: str) -> bytes | None:
    blob = tier.get_many({key: None}).get(key)
    return None if blob is None else blob.data


def set_blob(tier: RedisTier[Blob], key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
    tier.put_many({key: Blob(value, tuple(tags), time.time() + ttl_seconds)})
