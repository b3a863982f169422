import multiprocessing
import os
import sqlite3
import time
from contextlib import closing, contextmanager

import pytest

from rag_posfix.caching.answers.disk import DiskCache
from rag_posfix.caching.answers.tier import ByteCache
from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.sqlite_file import SqliteFile
from rag_posfix.errors import CacheError
from tests.support.clock import Clock
from tests.support.subprocesses import run_python
from tests.support.threads import in_threads

MIB = 1024**2


@pytest.fixture
def cache(tmp_path):
    with closing(DiskCache(tmp_path, busy_seconds=5)) as cache:
        yield cache


@contextmanager
def raw(folder):
    with closing(sqlite3.connect(folder / "answers-v1.sqlite3", isolation_level=None)) as connection:
        yield connection


def test_the_tier_follows_the_protocol(cache):
    assert isinstance(cache, ByteCache)


def test_nothing_is_written_before_the_first_use(tmp_path):
    with closing(DiskCache(tmp_path / "folder")):
        assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("value", [b"", b"answer", bytes(range(256)) * 1000])
def test_a_value_comes_back(cache, value):
    assert cache.get("key") is None
    cache.set("key", value, 60)
    assert cache.get("key") == value
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.errors) == (1, 1, 1, 0)


def test_a_value_survives_the_process(tmp_path):
    for expected in (None, b"answer"):
        with closing(DiskCache(tmp_path)) as cache:
            assert cache.get("key") == expected
            cache.set("key", b"answer", 60)


def test_a_value_is_replaced_with_its_tags(cache):
    cache.set("key", b"old", 60, ["a"])
    cache.set("key", b"new", 60, ["b"])
    assert cache.delete_tags(["a"]) == 0
    assert cache.get("key") == b"new"
    assert cache.delete_tags(["b"]) == 1


def test_an_entry_expires_and_is_removed(tmp_path):
    clock = Clock()
    with closing(DiskCache(tmp_path, clock=clock)) as cache:
        cache.set("key", b"answer", 60)
        cache.set("other", b"answer", 60)
        clock.advance(59)
        assert cache.get("key") == b"answer"
        clock.advance(1)
        assert cache.get("key") is None
        cache.set("third", b"answer", 60)
        assert cache.stats().entries == 1


def test_the_file_is_bounded_and_the_least_recently_used_entries_go_first(tmp_path):
    clock = Clock()
    with closing(DiskCache(tmp_path, max_bytes=MIB, clock=clock)) as cache:
        cache.set("favourite", b"x" * 1000, 10_000)
        for number in range(1500):
            clock.advance(2)
            cache.set(f"key{number}", os.urandom(2000), 10_000, [f"tag{number}"])
            if number % 20 == 0:
                assert cache.get("favourite") is not None
        stats = cache.stats()
        assert stats.bytes <= MIB
        assert stats.evictions > 500
        assert cache.get("key0") is None
        assert cache.get("key1499") is not None
    assert (tmp_path / "answers-v1.sqlite3").stat().st_size <= MIB + 64 * 1024


def test_a_value_of_a_quarter_of_the_tier_is_not_kept(tmp_path):
    with closing(DiskCache(tmp_path, max_bytes=MIB)) as cache:
        cache.set("key", b"x" * (MIB // 2), 60)
        assert cache.stats().entries == 0


def test_entries_are_dropped_by_tag(cache):
    cache.set("one", b"1", 60, ["a", "b"])
    cache.set("two", b"2", 60, ["b"])
    cache.set("three", b"3", 60, ["c"])
    assert cache.delete_tags(["a", "b", "unknown"]) == 2
    assert [cache.get(key) for key in ("one", "two", "three")] == [None, None, b"3"]


def test_clear_leaves_no_trace_of_the_answers(cache, tmp_path):
    for number in range(200):
        cache.set(f"key{number}", b"private answer" * 50, 60, ["tag"])
    assert cache.clear() == 200
    assert cache.get("key0") is None
    assert not any(b"private answer" in file.read_bytes() for file in tmp_path.iterdir())


def test_others_on_the_machine_cannot_read_it(cache, tmp_path):
    cache.set("key", b"answer", 60)
    assert {file.stat().st_mode & 0o077 for file in tmp_path.iterdir()} == {0}


@pytest.mark.parametrize(
    "change",
    [
        "value = x'00'",
        "value = zeroblob(64)",
        "value = 'text'",
        "value = 5",
        "value = substr(value, 1, 10)",
        "value = value || x'00'",
        "expires_at = 'soon'",
        "used_at = x'ff'",
    ],
)
def test_a_damaged_entry_is_a_miss_counted_and_removed(cache, tmp_path, change):
    cache.set("key", b"answer", 60)
    cache.set("other", b"answer", 60)
    with raw(tmp_path) as connection:
        connection.execute(f"UPDATE entries SET {change} WHERE key = 'key'")
    assert cache.get("key") is None
    assert cache.stats().corrupt == 1
    assert cache.stats().entries == 1
    assert cache.get("other") == b"answer"


def test_the_value_of_another_key_is_a_miss(cache, tmp_path):
    cache.set("key", b"answer", 60)
    with raw(tmp_path) as connection:
        connection.execute("UPDATE entries SET key = 'other'")
    assert cache.get("other") is None


DAMAGES = {
    "garbage": lambda data: b"no database at all" * 1000,
    "header": lambda data: b"x" * 100 + data[100:],
    "middle": lambda data: data[:4096] + b"\xff" * (len(data) - 4096),
    "truncated": lambda data: data[: len(data) // 2],
    "a stump": lambda data: data[:50],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_rebuilt(tmp_path, damage):
    file = tmp_path / "answers-v1.sqlite3"
    with closing(DiskCache(tmp_path)) as cache:
        for number in range(100):
            cache.set(f"key{number}", os.urandom(1000), 60, ["tag"])
    file.write_bytes(damage(file.read_bytes()))
    with closing(DiskCache(tmp_path)) as cache:
        assert cache.get("key99") is None
        for number in range(100):
            cache.set(f"key{number}", b"answer", 60, ["tag"])
        assert cache.get("key99") == b"answer"
        assert cache.stats().entries == 100
        assert cache.stats().available


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_file_that_is_damaged_while_open_is_never_an_error(cache, tmp_path, damage):
    file = tmp_path / "answers-v1.sqlite3"
    for number in range(100):
        cache.set(f"key{number}", os.urandom(1000), 60, ["tag"])
    with raw(tmp_path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.write_bytes(damage(file.read_bytes()))
    for number in range(100):
        cache.get(f"key{number}")
        cache.set(f"new{number}", b"answer", 60, ["tag"])
    cache.delete_tags(["tag"])
    cache.clear()
    cache.set("key", b"answer", 60)
    assert cache.get("key") == b"answer"


def test_lost_tables_are_made_again(cache, tmp_path):
    cache.set("key", b"answer", 60)
    with raw(tmp_path) as connection:
        connection.execute("DROP TABLE entries")
    assert cache.get("key") is None
    cache.set("key", b"answer", 60)
    assert cache.get("key") == b"answer"


def test_a_folder_that_is_removed_under_it_is_made_again(cache, tmp_path):
    cache.set("key", b"answer", 60)
    for file in tmp_path.iterdir():
        file.unlink()
    assert cache.get("key") is None
    cache.set("key", b"answer", 60)
    assert cache.get("key") == b"answer"
    assert (tmp_path / "answers-v1.sqlite3").exists()


@pytest.mark.parametrize("where", ["file", "file/below", "proc"])
def test_a_folder_that_cannot_be_made_is_a_miss_and_one_line_in_the_log(tmp_path, caplog, where):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / where if where != "proc" else type(tmp_path)("/proc/rag_posfix")
    clock = Clock()
    with closing(DiskCache(folder, breaker=CircuitBreaker(clock=clock))) as cache:
        for _ in range(3):
            cache.set("key", b"answer", 60)
            clock.advance(31)
            assert cache.get("key") is None
            assert cache.delete_tags(["tag"]) == 0
            assert cache.clear() == 0
        assert cache.stats().entries is None
        assert not cache.stats().available
    assert sum("is failing" in record.message for record in caplog.records) <= 2


def test_it_recovers_when_the_folder_can_be_made(tmp_path):
    clock = Clock()
    (tmp_path / "folder").write_text("in the way")
    with closing(DiskCache(tmp_path / "folder", breaker=CircuitBreaker(clock=clock))) as cache:
        cache.set("key", b"answer", 60)
        (tmp_path / "folder").unlink()
        clock.advance(5)
        cache.set("key", b"answer", 60)
        assert cache.get("key") == b"answer"


def test_a_full_disk_refuses_writes_and_serves_reads(cache, caplog, monkeypatch):
    connect = sqlite3.connect

    def connect_to_a_small_disk(*arguments, **options):
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 20")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_a_small_disk)
    cache.set("key", b"answer", 60)
    for number in range(20):
        cache.set(f"big{number}", b"x" * 50_000, 60)
    assert cache.get("key") == b"answer"
    assert cache.stats().errors >= 15
    assert cache.stats().available
    assert sum("is failing" in record.message for record in caplog.records) == 1


def test_a_file_that_the_system_does_not_let_grow_is_a_miss(tmp_path):
    script = """
        import resource, signal, sys
        from pathlib import Path
        from rag_posfix.caching.answers.disk import DiskCache
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        cache = DiskCache(Path(sys.argv[1]))
        cache.set("key", b"answer", 60)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        for number in range(50):
            cache.set(f"big{number}", b"x" * 40_000, 60)
        print(cache.stats().errors > 0)
        cache.close()
    """
    assert run_python(script, tmp_path) == "True"
    with closing(DiskCache(tmp_path, busy_seconds=5)) as cache:
        assert cache.get("key") == b"answer"


def test_a_read_only_folder_is_never_an_error(tmp_path_factory):
    script = """
        import os, sys
        from pathlib import Path
        from rag_posfix.caching.answers.disk import DiskCache
        folder = Path(sys.argv[1])
        cache = DiskCache(folder)
        cache.set("key", b"answer", 60)
        cache.close()
        os.chmod(folder / "answers-v1.sqlite3", 0o444)
        os.chmod(folder, 0o555)
        for parent in list(folder.parents)[:3]:
            if parent.stat().st_uid == os.getuid() and os.getuid() == 0 and parent != Path("/"):
                os.chmod(parent, parent.stat().st_mode | 0o555)
        if os.getuid() == 0:
            os.setgroups([])
            os.setuid(65534)
        cache = DiskCache(folder)
        cache.set("new", b"answer", 60)
        print(cache.get("new"), cache.get("key") in (None, b"answer"), cache.stats().errors > 0)
        cache.close()
    """
    folder = tmp_path_factory.mktemp("readonly") / "cache"
    assert run_python(script, folder) == "None True True"
    folder.chmod(0o755)


def test_a_busy_file_is_a_miss_in_bounded_time(tmp_path):
    with closing(DiskCache(tmp_path)) as cache, raw(tmp_path) as other:
        cache.set("key", b"answer", 60)
        other.execute("BEGIN EXCLUSIVE")
        start = time.perf_counter()
        cache.set("new", b"answer", 60)
        assert time.perf_counter() - start < 1
        other.execute("ROLLBACK")
        assert cache.stats().errors == 1


def write_many(folder, number):
    with closing(DiskCache(folder, busy_seconds=10)) as cache:
        for index in range(60):
            cache.set(f"key{number}-{index}", f"answer{number}-{index}".encode(), 60, [f"tag{number}"])
            cache.get(f"key{1 - number}-{index}")
        return cache.stats().errors


def test_two_processes_share_it(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(write_many, [(tmp_path, 0), (tmp_path, 1)]) == [0, 0]
    with closing(DiskCache(tmp_path)) as cache:
        assert cache.stats().entries == 120
        assert cache.get("key1-59") == b"answer1-59"
        assert cache.delete_tags(["tag0"]) == 60


def test_one_process_sees_what_another_dropped_or_rebuilt(tmp_path):
    with closing(DiskCache(tmp_path)) as one, closing(DiskCache(tmp_path)) as two:
        one.set("key", b"answer", 60, ["tag"])
        assert two.get("key") == b"answer"
        assert two.delete_tags(["tag"]) == 1
        assert one.get("key") is None
        SqliteFile(tmp_path / "answers-v1.sqlite3", 5).rebuild()
        with closing(DiskCache(tmp_path)) as three:
            three.set("key", b"fresh", 60)
        assert one.get("key") == two.get("key") == b"fresh"


def test_threads_share_it(cache):
    def work(number):
        for index in range(30):
            cache.set(f"key{number}-{index}", b"x", 60, ["tag"])
            cache.get(f"key{(number + 1) % 8}-{index}")

    in_threads(work, range(8))
    assert cache.stats().entries == 240
    assert cache.stats().errors == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_opens_the_file_for_itself(cache):
    cache.set("key", b"answer", 60)
    child = os.fork()
    if not child:
        good = cache.get("key") == b"answer"
        cache.set("child", b"answer", 60)
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get("child") == b"answer"


def test_a_closed_cache_only_misses(tmp_path):
    cache = DiskCache(tmp_path)
    cache.set("key", b"answer", 60)
    cache.close()
    assert cache.get("key") is None
    cache.close()


def test_a_bound_that_holds_nothing_is_refused(tmp_path):
    with pytest.raises(CacheError, match=r"max_bytes=1000 must be >= 131072, or 0"):
        DiskCache(tmp_path, max_bytes=1000)
