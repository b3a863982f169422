import subprocess
import sys
from contextlib import closing

import pytest

from rag_posfix.caching.kv.build import build_passage_store
from rag_posfix.errors import CacheError, ConfigError
from rag_posfix.settings import PassageStoreSettings
from tests.support.passages import SHAPE, entry, same


def tiers(store):
    return [tier["name"] for tier in store.stats()["tiers"]]


def test_memory_alone_by_default(tmp_path):
    with closing(build_passage_store(PassageStoreSettings(), tmp_path, "cpu")) as store:
        store.put_many({"key": entry(1)})
        assert tiers(store) == ["memory"]
        assert same(store.get_many({"key": SHAPE})["key"], entry(1))
    assert not list(tmp_path.iterdir())


def test_disk_when_it_has_bytes(tmp_path):
    settings = PassageStoreSettings(disk_bytes=10**6)
    with closing(build_passage_store(settings, tmp_path)) as store:
        store.put_many({"key": entry(1)})
        assert tiers(store) == ["memory", "disk"]
    assert [path.name for path in tmp_path.iterdir()] == ["passages"]
    with closing(build_passage_store(settings, tmp_path)) as store:
        assert same(store.get_many({"key": SHAPE})["key"], entry(1))


def test_redis_when_it_has_a_url(tmp_path):
    settings = PassageStoreSettings(memory_bytes=5000, redis_url="redis://:hush@127.0.0.1:1")
    with closing(build_passage_store(settings, tmp_path)) as store:
        assert tiers(store) == ["memory", "redis"]
        store.put_many({"key": entry(1)})
        assert store.get_many({"key": SHAPE})
        assert "hush" not in repr(store)


@pytest.mark.parametrize("settings", [{"enabled": False}, {"memory_bytes": 0}])
def test_none_when_everything_is_off(tmp_path, settings):
    assert build_passage_store(PassageStoreSettings(**settings), tmp_path) is None


def test_nothing_is_opened_before_the_first_use(tmp_path):
    settings = PassageStoreSettings(disk_bytes=10**6, redis_url="redis://127.0.0.1:1")
    build_passage_store(settings, tmp_path).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_bytes": 10}, r"passages in memory: max_bytes=10 must be >= 4096, or 0"),
        ({"disk_bytes": 10}, r"passages on disk: max_bytes=10 must be >= 65536, or 0"),
        ({"redis_url": "hush"}, "the URL is not valid"),
    ],
)
def test_an_invalid_setting_is_a_cache_error(tmp_path, settings, message):
    with pytest.raises(CacheError, match=message):
        build_passage_store(PassageStoreSettings(**settings), tmp_path)


def test_without_redis_py_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'rag-posfix\[redis\]'"):
        build_passage_store(PassageStoreSettings(redis_url="redis://127.0.0.1"), tmp_path)


def test_looking_into_a_store_loads_no_torch(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from rag_posfix.caching.kv.build import build_passage_store\n"
        "from rag_posfix.settings import PassageStoreSettings\n"
        "store = build_passage_store(PassageStoreSettings(disk_bytes=10**6), pathlib.Path(sys.argv[1]))\n"
        "store.stats(); store.clear(); store.close()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
