"""A disk tier in a folder, and what it wrote there."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import closing, contextmanager

from rag_posfix.caching.answers.tiered import Blob, BlobCodec
from rag_posfix.caching.disk import DiskTier
from tests.support.passages import SHAPE

MIB = 1024**2
LARGE = dataclasses.replace(SHAPE, n_tokens=128)  # 4 KiB


def open_tier(folder, codec=None, **options):
    return closing(DiskTier(folder, codec or BlobCodec(), **{"busy_seconds": 60, **options}))


def put(tier, key, value=b"answer", tags=(), expires_at=float("inf")):
    tier.put_many({key: Blob(value, tuple(tags), expires_at)})


def get(tier, key):
    hit = tier.get_many({key: None}).get(key)
    return None if hit is None else hit.data


def values(folder):
    return sorted((folder / "values").glob("*"))


@contextmanager
def raw(folder):
    path = folder / "answers-v1.sqlite3"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        yield connection
