import sys
from contextlib import closing

import pytest

from rag_posfix.caching.answers.build import build_answer_cache
from rag_posfix.errors import CacheError, ConfigError
from rag_posfix.settings import CacheSettings


def tiers(cache):
    return [tier["name"] for tier in cache.stats()["tiers"]]


def test_memory_and_disk_by_default(tmp_path):
    with closing(build_answer_cache(CacheSettings(), tmp_path)) as cache:
        cache.put("key", {"text": "Paris"})
        assert tiers(cache) == ["memory", "disk"]
    with closing(build_answer_cache(CacheSettings(), tmp_path)) as cache:
        assert cache.get("key") == {"text": "Paris"}


def test_redis_when_it_has_a_url(tmp_path):
    settings = CacheSettings(disk_bytes=0, redis_url="redis://:hush@127.0.0.1:1")
    with closing(build_answer_cache(settings, tmp_path)) as cache:
        assert tiers(cache) == ["memory", "redis"]
        cache.put("key", {"text": "Paris"})
        assert cache.get("key") == {"text": "Paris"}
        assert "hush" not in repr(cache)


@pytest.mark.parametrize("settings", [{"enabled": False}, {"memory_entries": 0, "disk_bytes": 0}])
def test_none_when_everything_is_off(tmp_path, settings):
    assert build_answer_cache(CacheSettings(**settings), tmp_path) is None


def test_nothing_is_opened_before_the_first_use(tmp_path):
    build_answer_cache(CacheSettings(redis_url="redis://127.0.0.1:1"), tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_an_invalid_url_is_a_cache_error(tmp_path):
    with pytest.raises(CacheError, match="redis cache: the URL is not valid"):
        build_answer_cache(CacheSettings(redis_url="hush"), tmp_path)


def test_without_redis_py_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'rag-posfix\[redis\]'"):
        build_answer_cache(CacheSettings(redis_url="redis://127.0.0.1"), tmp_path)


def test_the_largest_answer_fits_through_every_tier(tmp_path):
    settings = CacheSettings(memory_entries=0, max_entry_bytes=50_000)
    with closing(build_answer_cache(settings, tmp_path)) as cache:
        cache.put("key", {"text": "x" * 49_000}, [f"document {number}" for number in range(100)])
        assert cache.get("key") is not None
