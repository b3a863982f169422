import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from pydantic import ValidationError

from rag_posfix.errors import ConfigError
from rag_posfix.files import default_cache_dir
from rag_posfix.process import allowed_threads, keep_freed_buffers, limit_openmp_spinning
from rag_posfix.settings import (
    CacheSettings,
    PassageStoreSettings,
    ServiceSettings,
    Settings,
    TelemetrySettings,
)


def test_defaults_need_no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings()
    assert settings.model == "smollm2"
    assert settings.mitigation == "default"
    assert settings.index is None
    assert settings.cache_dir == tmp_path / ".cache" / "rag_posfix" == default_cache_dir()
    assert settings.cache == CacheSettings()


def test_making_settings_creates_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    Settings()
    assert list(tmp_path.iterdir()) == []


def test_variables_with_the_prefix_are_read_when_settings_are_made(monkeypatch):
    before = Settings()
    monkeypatch.setenv("RAG_POSFIX_MODEL", "/models/llama")
    monkeypatch.setenv("RAG_POSFIX_K", "3")
    monkeypatch.setenv("RAG_POSFIX_INDEX", "/data/index")
    monkeypatch.setenv("MODEL", "not ours")
    after = Settings()
    assert (after.model, after.k, after.index) == ("/models/llama", 3, Path("/data/index"))
    assert before.model == "smollm2"


def test_arguments_win_over_variables(monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_K", "3")
    assert Settings(k=7).k == 7


def test_the_cache_has_variables_of_its_own(monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_CACHE_ENABLED", "false")
    monkeypatch.setenv("RAG_POSFIX_CACHE_REDIS_URL", "redis://127.0.0.1:6379/0")
    monkeypatch.setenv("RAG_POSFIX_CACHE_TTL_SECONDS", "60")
    cache = Settings().cache
    assert cache.enabled is False
    assert cache.redis_url.get_secret_value() == "redis://127.0.0.1:6379/0"
    assert cache.ttl_seconds == 60


def test_the_folder_of_the_cache_is_no_setting_of_the_answer_cache(monkeypatch):
    """RAG_POSFIX_CACHE_DIR starts with both prefixes."""
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", "/var/cache/x")
    settings = Settings()
    assert settings.cache_dir == Path("/var/cache/x")
    assert settings.cache == CacheSettings()


def test_the_passage_store_has_variables_of_its_own(monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_PASSAGES_MEMORY_BYTES", "5000")
    monkeypatch.setenv("RAG_POSFIX_PASSAGES_REDIS_URL", "redis://127.0.0.1:6379/0")
    monkeypatch.setenv("RAG_POSFIX_PASSAGES_COMPRESS", "true")
    settings = Settings()
    assert settings.passages.memory_bytes == 5000
    assert settings.passages.redis_url.get_secret_value() == "redis://127.0.0.1:6379/0"
    assert settings.passages.compress is True
    assert settings.cache == CacheSettings()


def test_passages_are_kept_in_memory_alone_unless_asked_for(tmp_path):
    passages = Settings().passages
    assert (passages.enabled, passages.memory_bytes, passages.disk_bytes) == (True, 1024**3, None)
    assert not passages.is_persistent(tmp_path)
    assert PassageStoreSettings(disk_bytes=1).is_persistent(tmp_path)
    assert PassageStoreSettings(redis_url="redis://127.0.0.1").is_persistent(tmp_path)
    assert not PassageStoreSettings(disk_bytes=1, enabled=False).is_persistent(tmp_path)


def test_a_password_in_the_redis_url_is_not_shown():
    url = "redis://:hunter2@127.0.0.1/0"
    settings = Settings(cache=CacheSettings(redis_url=url), passages=PassageStoreSettings(redis_url=url))
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


def test_a_password_of_a_vector_store_is_not_shown():
    store = "pgvector:url=postgresql+psycopg://rag:hunter2@db/docs,collection=docs"
    settings, service = Settings(retriever=store), ServiceSettings(collection_store=store)
    assert settings.retriever == service.collection_store == store
    assert "hunter2" not in f"{settings!r} {settings} {service!r} {service}"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RETRIEVER", " pgvector:url=postgresql://rag:hunter2@db", "retriever=' pgvector'... must be auto, dense"),
        ("RETRIEVER", "qdrant=api_key=hunter2", "retriever='qdrant'... must be auto, dense"),
        ("RETRIEVER", "nope", "retriever='nope' must be auto, dense"),
        ("SERVICE_COLLECTION_STORE", "Qdrant:api_key=hunter2", "RAG_POSFIX_SERVICE_COLLECTION_STORE: String should"),
        ("REMOTE", '{"api_key": "hunter2",}', "RAG_POSFIX_REMOTE must be JSON"),
        ("REMOTE", '["hunter2"]', "RAG_POSFIX_REMOTE must be a valid dictionary"),
        ("CACHE", '{"redis_url": ["hunter2"]}', "RAG_POSFIX_CACHE.redis_url must be a valid string"),
        ("CACHE", '{"redis": "hunter2"}', "RAG_POSFIX_CACHE.redis: Extra inputs"),
        ("CACHE", '{"redis_url": "hunter2", "memory_entries": -1}', "RAG_POSFIX_CACHE.memory_entries=-1 must be"),
    ],
)
def test_an_error_about_a_setting_shows_no_password(monkeypatch, variable, value, message):
    monkeypatch.setenv(f"RAG_POSFIX_{variable}", value)
    with pytest.raises(ConfigError) as caught:
        (ServiceSettings if "SERVICE" in variable else Settings)()
    assert str(caught.value).startswith(message)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("cls", [Settings, CacheSettings, PassageStoreSettings, TelemetrySettings])
def test_settings_are_frozen_and_refuse_unknown_names(cls):
    with pytest.raises(ValidationError, match="frozen"):
        setattr(cls(), next(iter(cls.model_fields)), "other")
    with pytest.raises(ConfigError, match=f"{cls.__name__} has no parameter 'modell'"):
        cls(modell="a")


WRONG = {
    Settings: "k=0 max_tokens=0 reranker= reranker_deadline_seconds=0 candidates=0 dtype=int3",
    CacheSettings: "memory_entries=-1 disk_bytes=-1 redis_timeout_seconds=0 redis_timeout_seconds=6 ttl_seconds=0 "
    "max_entry_bytes=0",
    PassageStoreSettings: "memory_bytes=-1 disk_bytes=-1 redis_bytes=1000 redis_timeout_seconds=0 "
    "redis_timeout_seconds=31 redis_ttl_seconds=0",
}


@pytest.mark.parametrize(("cls", "wrong"), [(cls, one) for cls, some in WRONG.items() for one in some.split(" ")])
def test_values_out_of_range_are_refused_by_name(cls, wrong):
    name, value = wrong.split("=")
    with pytest.raises(ConfigError, match=name):
        cls(**{name: value})


@pytest.mark.parametrize(
    ("keep", "answers", "passages"), [(None, None, None), (True, 256 * 1024**2, 4 * 1024**3), (False, 0, 0)]
)
def test_one_setting_keeps_answers_and_passages_on_disk(keep, answers, passages):
    settings = Settings(keep_on_disk=keep)
    assert (settings.cache.disk_bytes, settings.passages.disk_bytes) == (answers, passages)
    sized = Settings(keep_on_disk=keep, cache=CacheSettings(disk_bytes=200_000))
    assert sized.cache.disk_bytes == 200_000


def test_the_variable_keep_on_disk_is_read(monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_KEEP_ON_DISK", "true")
    assert Settings().cache.disk_bytes == 256 * 1024**2


def test_zero_turns_a_tier_off():
    cache = CacheSettings(memory_entries=0, disk_bytes=0)
    assert (cache.memory_entries, cache.disk_bytes) == (0, 0)


@pytest.mark.parametrize("cls", [Settings, CacheSettings, PassageStoreSettings, TelemetrySettings])
def test_every_setting_is_described(cls):
    for name in cls.model_fields:
        assert f"    {name}: " in cls.__doc__


def test_the_disk_tier_is_on_where_passages_were_precomputed(tmp_path):
    passages = PassageStoreSettings()
    assert passages.disk_bytes_in(tmp_path) == 0
    (tmp_path / "passages").mkdir()
    assert passages.disk_bytes_in(tmp_path) == 4 * 1024**3
    assert PassageStoreSettings(disk_bytes=0).disk_bytes_in(tmp_path) == 0


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_wait_shortly_unless_the_environment_says_how(monkeypatch, given, spins):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limit_openmp_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize("variable", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_environment_decides_what_the_allocator_keeps(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert not keep_freed_buffers()


MAPPED_BUFFERS = """
import ctypes
import rag_posfix
{use}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd".split()]
    _fields_ += [("rest", ctypes.c_size_t * 5)]
libc.mallinfo2.restype = Info
before = libc.mallinfo2().hblks
libc.malloc(48 * 2**20)
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="thresholds of glibc")
@pytest.mark.parametrize(("use", "mapped"), [("", 1), ("rag_posfix.Settings", 0)])
def test_using_the_library_keeps_buffers_of_48_megabytes_in_the_heap(use, mapped):
    ours = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", MAPPED_BUFFERS.format(use=use)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert int(result.stdout) == mapped


@pytest.mark.parametrize(
    ("text", "threads"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("", None)]
)
def test_a_container_gets_as_many_threads_as_it_may_keep_busy(tmp_path, monkeypatch, text, threads):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    quota = tmp_path / "cpu.max"
    assert allowed_threads(quota) is None
    quota.write_text(text)
    assert allowed_threads(quota) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert allowed_threads(quota) is None
