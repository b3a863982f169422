"""langchain's own cache tests on a real Redis."""

from contextlib import closing

import pytest
from langchain_tests.integration_tests.cache import AsyncCacheTestSuite, SyncCacheTestSuite

from rag_posfix.adapters.langchain.cache import RagPosfixCache
from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.redis import RedisTier


@pytest.fixture
def cache(redis_server):
    tier = RedisTier(redis_server.url, BlobCodec(), timeout_seconds=60)
    with closing(TieredAnswerCache([tier])) as tiers:
        yield RagPosfixCache(tiers)


class TestRedisSync(SyncCacheTestSuite):
    @pytest.fixture
    def cache(self, cache):
        return cache


class TestRedisAsync(AsyncCacheTestSuite):
    @pytest.fixture
    async def cache(self, cache):
        return cache
