from contextlib import closing
from types import SimpleNamespace

import pytest
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests.base_store import BaseStoreAsyncTests, BaseStoreSyncTests

from rag_posfix import RagPosfixStore
from rag_posfix.caching.answers.tiered import BlobCodec
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import ConfigError
from tests.support.clock import Clock

VALUES = (b"\x00\xff", b"", "\u00e9".encode())


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    tier = MemoryTier() if request.param == "memory" else DiskTier(tmp_path, BlobCodec(), busy_seconds=60)
    with closing(tier):
        yield RagPosfixStore(tier)


class TestSync(BaseStoreSyncTests[bytes]):
    @pytest.fixture
    def kv_store(self, store):
        return store

    @pytest.fixture
    def three_values(self):
        return VALUES


class TestAsync(BaseStoreAsyncTests[bytes]):
    @pytest.fixture
    async def kv_store(self, store):
        return store

    @pytest.fixture
    def three_values(self):
        return VALUES


def test_keys_are_found_by_their_beginning_taken_literally(store):
    store.mset([(key, b"x") for key in ("a%b", "a_b", "aab", "b", "\u00e9\u00e9", "A%B")])
    assert list(store.yield_keys(prefix="a%")) == ["a%b"]
    assert list(store.yield_keys(prefix="a")) == ["a%b", "a_b", "aab"]
    assert list(store.yield_keys(prefix="\u00e9")) == ["\u00e9\u00e9"]
    assert len(list(store.yield_keys())) == 6


def test_values_expire_and_are_listed_no_more(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("rag_posfix.adapters.langchain.cache.time", SimpleNamespace(time=clock))
    for tier in (MemoryTier(clock=clock), DiskTier(tmp_path, BlobCodec(), clock=clock)):
        store = RagPosfixStore(tier, ttl_seconds=10)
        store.mset([("key", b"value")])
        clock.advance(11)
        assert (store.mget(["key"]), list(store.yield_keys())) == ([None], [])


def test_a_value_that_is_too_large_leaves_its_key_without_one(tmp_path):
    for tier in (MemoryTier(max_bytes=65536), DiskTier(tmp_path, BlobCodec(), max_bytes=65536)):
        store = RagPosfixStore(tier)
        store.mset([("key", b"version 1"), ("other", b"x")])
        store.mset([("key", bytes(100_000))])
        assert store.mget(["key", "other"]) == [None, b"x"]


def test_only_tiers_that_can_be_listed_fit():
    assert not hasattr(RedisTier("redis://127.0.0.1:1", BlobCodec()), "keys")


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("key", "text"), "value of 'key' is str, must be bytes"),
        (("a\x00b", b"x"), "must be text without NUL"),
        (("\ud800", b"x"), "must be text without NUL and lone surrogates"),
        ((5, b"x"), "the key 5 must be text"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_nothing_else_is_kept(store, pair, message):
    with pytest.raises(ConfigError, match=message):
        store.mset([("sound", b"x"), pair])
    assert list(store.yield_keys()) == []


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_a_time_that_is_over_at_once_is_refused(ttl):
    with pytest.raises(ConfigError, match="must be above 0"):
        RagPosfixStore(MemoryTier(), ttl_seconds=ttl)


def test_embeddings_are_made_once(store):
    """The store in its use: as ``CacheBackedEmbeddings`` of langchain-classic does, written out."""

    class Counting(Embeddings):
        asked = 0

        def embed_documents(self, texts):
            self.asked += len(texts)
            return [[float(len(text))] for text in texts]

        def embed_query(self, text):
            raise NotImplementedError

    model = Counting()

    def embed(texts):
        found = store.mget(texts)
        missing = [text for text, value in zip(texts, found, strict=True) if value is None]
        store.mset([(t, repr(v).encode()) for t, v in zip(missing, model.embed_documents(missing), strict=True)])
        return store.mget(texts)

    assert embed(["a", "bb"]) == embed(["a", "bb"]) == [b"[1.0]", b"[2.0]"]
    assert model.asked == 2
