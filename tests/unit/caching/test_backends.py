from types import SimpleNamespace

import pytest

import rag_posfix.caching.answers.build  # registers the backends
import rag_posfix.caching.kv.build  # noqa: F401
from rag_posfix.caching.answers.tier import ANSWER_BACKENDS
from rag_posfix.caching.backends import Backends, Locality
from rag_posfix.caching.kv.tier import KV_BACKENDS
from rag_posfix.errors import ConfigError
from rag_posfix.settings import CacheSettings, PassageStoreSettings

ON, OFF = SimpleNamespace(enabled=True), SimpleNamespace(enabled=False)


@pytest.fixture
def backends():
    return Backends("test cache")


def test_tiers_are_opened_nearest_first_and_by_name_whatever_the_order_of_registration(backends, tmp_path):
    for name, locality in (
        ("server", Locality.NETWORK),
        ("b", Locality.MACHINE),
        ("a", Locality.MACHINE),
        ("here", Locality.PROCESS),
    ):
        backends.register(name, locality)(lambda settings, folder, name=name: (name, settings, folder))
    assert backends.open_tiers(ON, tmp_path) == [(name, ON, tmp_path) for name in ("here", "a", "b", "server")]


def test_a_backend_that_the_settings_turn_off_is_left_out(backends, tmp_path):
    backends.register("one", Locality.PROCESS)(lambda *_: None)
    backends.register("two", Locality.PROCESS)(lambda *_: "two")
    assert backends.open_tiers(ON, tmp_path) == ["two"]


def test_no_backend_is_asked_where_the_whole_cache_is_turned_off(backends, tmp_path):
    backends.register("one", Locality.PROCESS)(lambda *_: pytest.fail("asked"))
    assert backends.open_tiers(OFF, tmp_path) == []


def test_a_taken_name_is_refused(backends):
    backends.register("one", Locality.PROCESS)(lambda *_: None)
    with pytest.raises(ConfigError, match="test cache backend 'one' is registered already"):
        backends.register("one", Locality.NETWORK)(lambda *_: None)


@pytest.mark.parametrize("backends", [ANSWER_BACKENDS, KV_BACKENDS])
def test_memory_is_asked_before_the_disk_and_the_disk_before_redis(backends):
    assert backends.names() == ("memory", "disk", "redis")


def test_tiers_have_the_names_of_their_backends(tmp_path):
    url = "redis://127.0.0.1:1"
    opened = {
        ANSWER_BACKENDS: ANSWER_BACKENDS.open_tiers(CacheSettings(redis_url=url), tmp_path),
        KV_BACKENDS: KV_BACKENDS.open_tiers(PassageStoreSettings(disk_bytes=10**6, redis_url=url), tmp_path),
    }
    for backends, tiers in opened.items():
        assert tuple(tier.name for tier in tiers) == backends.names()
        for tier in tiers:
            tier.close()
