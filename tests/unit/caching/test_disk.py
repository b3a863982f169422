"""The disk tier: what it keeps, drops, limits and shares."""

from __future__ import annotations

import dataclasses
import errno
import logging
import multiprocessing
import os
import sqlite3
import threading
import time

import pytest
import torch

from rag_posfix.caching.answers.tiered import BlobCodec, seal
from rag_posfix.caching.disk import DiskTier, SqliteFile
from rag_posfix.caching.kv.store import KVCodec, serialize
from rag_posfix.caching.tier import CircuitBreaker
from rag_posfix.errors import CacheError
from tests.support.clock import Clock
from tests.support.passages import SHAPE, entry, same
from tests.support.subprocesses import run_python
from tests.support.threads import in_threads
from tests.support.waiting import wait_until
from tests.unit.caching.disk_tier import LARGE, MIB, get, open_tier, put, raw, values


def test_nothing_is_written_before_the_first_use(tmp_path):
    with open_tier(tmp_path / "folder"):
        assert not (tmp_path / "folder").exists()


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("value", [b"", b"answer", bytes(range(256)) * 1000])
def test_a_value_comes_back(tier, value):
    assert get(tier, "key") is None
    put(tier, "key", value)
    assert get(tier, "key") == value
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.errors) == (1, 1, 1, 0)


def test_a_large_value_has_a_file_and_is_counted(tier, tmp_path):
    put(tier, "key", b"x" * MIB)
    assert [file.stat().st_size for file in values(tmp_path)] == [MIB + 20]
    assert tier.stats().bytes > MIB
    put(tier, "key", b"small")
    assert values(tmp_path) == []


@pytest.mark.usefixtures("anywhere")
def test_a_value_survives_the_process(tmp_path):
    for expected in (None, b"answer"):
        with open_tier(tmp_path) as tier:
            assert get(tier, "key") == expected
            put(tier, "key")


@pytest.mark.usefixtures("anywhere")
def test_keys_are_any_text_and_are_listed(tier, tmp_path):
    keys = ["../../escape", "/etc/passwd", "a" * 1000, "é\n", "", "con"]
    for number, key in enumerate(keys):
        put(tier, key, str(number).encode())
    assert [get(tier, key) for key in keys] == [str(number).encode() for number in range(6)]
    assert tier.keys() == sorted(keys)
    assert tier.keys("c") == ["con"]
    assert tmp_path.parent.joinpath("escape").exists() is False


@pytest.mark.usefixtures("anywhere")
def test_a_value_is_replaced_with_its_tags(tier, tmp_path):
    put(tier, "key", b"old", ["a"])
    put(tier, "key", b"new", ["b"])
    assert len(values(tmp_path)) <= 1
    assert tier.delete_tags(["a"]) == 0
    assert get(tier, "key") == b"new"
    assert tier.delete_tags(["b"]) == 1
    assert values(tmp_path) == []


@pytest.mark.usefixtures("anywhere")
def test_an_entry_expires_and_is_removed(tmp_path):
    clock = Clock()
    with open_tier(tmp_path, clock=clock) as tier:
        put(tier, "key", expires_at=clock.now + 60)
        put(tier, "other", expires_at=clock.now + 60)
        clock.advance(59)
        assert get(tier, "key") == b"answer"
        clock.advance(1)
        assert get(tier, "key") is None
        put(tier, "third", expires_at=clock.now + 60)
        assert tier.stats().entries == 1
        assert len(values(tmp_path)) <= 1


@pytest.mark.usefixtures("anywhere")
def test_the_size_is_limited_and_the_least_recently_used_entries_go_first(tmp_path):
    clock = Clock()
    with open_tier(tmp_path, max_bytes=MIB, clock=clock) as tier:
        put(tier, "favourite", b"x" * 1000)
        for number in range(700):
            clock.advance(2)
            put(tier, f"key{number}", os.urandom(3000), [f"tag{number}"])
            if number % 40 == 0:
                assert get(tier, "favourite") is not None
        stats = tier.stats()
        assert stats.bytes <= MIB
        assert stats.evictions > 200
        held = [number for number in range(700) if get(tier, f"key{number}") is not None]
        assert held == list(range(held[0], 700))
        assert len(held) > 100
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert size <= MIB + 64 * 1024


@pytest.mark.usefixtures("anywhere")
def test_a_folder_that_holds_too_much_is_brought_within_its_limit(tmp_path):
    with open_tier(tmp_path) as tier:
        for number in range(100):
            put(tier, f"key{number}", os.urandom(8000))
    with open_tier(tmp_path, max_bytes=MIB // 2) as tier:
        put(tier, "key")
        assert tier.stats().bytes <= MIB // 2
        assert get(tier, "key") == b"answer"


def test_a_use_is_written_at_most_once_a_minute(tmp_path):
    clock = Clock()
    with open_tier(tmp_path, clock=clock) as tier, raw(tmp_path) as connection:
        put(tier, "key")
        ages = []
        for seconds in (30, 29, 2, 30):
            clock.advance(seconds)
            get(tier, "key")
            ages.append(clock.now - connection.execute("SELECT used_at FROM entries").fetchone()[0])
        assert ages == [30, 59, 0, 30]


def test_a_value_of_a_quarter_of_the_tier_is_not_kept(tmp_path):
    with open_tier(tmp_path, max_bytes=MIB) as tier:
        put(tier, "key", b"x" * (MIB // 2))
        assert (tier.stats().entries, tier.stats().errors) == (0, 0)


@pytest.mark.usefixtures("anywhere")
def test_entries_are_dropped_by_tag(tier, tmp_path):
    put(tier, "one", b"1", ["a", "b"])
    put(tier, "two", b"2", ["b", *(f"a rather long tag {number}" for number in range(2000))])
    put(tier, "three", b"3", ["c"])
    assert tier.delete_tags(["a", "a rather long tag 1999", "unknown"]) == 2
    assert [get(tier, key) for key in ("one", "two", "three")] == [None, None, b"3"]
    assert len(values(tmp_path)) <= 1


@pytest.mark.usefixtures("anywhere")
def test_clear_leaves_no_trace_of_the_values_and_the_files_of_others(tier, tmp_path):
    for number in range(200):
        put(tier, f"key{number}", b"private answer" * 50, ["tag"])
    (tmp_path / "notes.txt").write_text("mine")
    assert tier.clear() == 200
    assert get(tier, "key0") is None
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"private answer" in file.read_bytes() for file in files)
    assert tmp_path / "notes.txt" in files


@pytest.mark.usefixtures("anywhere")
def test_others_on_the_machine_cannot_read_it(tier, tmp_path):
    put(tier, "key")
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")} == {0}


def test_a_busy_index_is_a_miss_in_bounded_time(tmp_path):
    with open_tier(tmp_path, busy_seconds=0.05) as tier, raw(tmp_path) as other:
        put(tier, "key")
        other.execute("BEGIN EXCLUSIVE")
        put(tier, "new")  # returns although nobody unlocks the index
        assert tier.stats().errors == 1
        threading.Timer(0.2, other.execute, ["ROLLBACK"]).start()
        assert tier.clear() == 1, "deleting waits longer"


def test_a_thread_that_holds_the_index_does_not_hold_up_others_and_opens_no_breaker(tmp_path):
    slow, entered, over = None, threading.Event(), threading.Event()

    def clock():
        if threading.current_thread() is slow:
            entered.set()
            assert over.wait(60)
        return time.time()

    with open_tier(tmp_path, busy_seconds=0.01, clock=clock) as tier:
        slow = threading.Thread(target=tier.keys)
        put(tier, "key")
        slow.start()
        assert entered.wait(60)
        assert get(tier, "key") is None
        over.set()
        slow.join()
        assert get(tier, "key") == b"answer"
        assert (tier.stats().errors, tier.stats().available) == (1, True)


def write_many(folder, number):
    with open_tier(folder, busy_seconds=60) as tier:
        for index in range(40):
            value = f"answer{number}-{index}".encode().ljust(100_000 * (index % 2))
            put(tier, f"key{number}-{index}", value, [f"tag{number}"])
            get(tier, f"key{1 - number}-{index}")
        return tier.stats().errors, tier.stats().corrupt


@pytest.mark.slow
def test_two_processes_share_it(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(write_many, [(tmp_path, 0), (tmp_path, 1)]) == [(0, 0), (0, 0)]
    with open_tier(tmp_path) as tier:
        assert tier.stats().entries == 80
        assert get(tier, "key1-38") == b"answer1-38"
        assert get(tier, "key1-39").strip() == b"answer1-39"
        assert tier.delete_tags(["tag0"]) == 40
        assert len(values(tmp_path)) == 20


def test_one_process_sees_what_another_dropped_or_rebuilt(tmp_path):
    with open_tier(tmp_path) as one, open_tier(tmp_path) as two:
        put(one, "key", tags=["tag"])
        assert get(two, "key") == b"answer"
        assert two.delete_tags(["tag"]) == 1
        assert get(one, "key") is None
        SqliteFile(tmp_path / "answers-v1.sqlite3", 5).rebuild()
        with open_tier(tmp_path) as three:
            put(three, "key", b"fresh")
        assert get(one, "key") == get(two, "key") == b"fresh"


@pytest.mark.usefixtures("in_files")
def test_threads_put_get_corrupt_and_evict_and_every_hit_is_what_was_put(tmp_path):
    entries = {f"key{number}": entry(number, LARGE, tags=(f"tag{number % 3}",)) for number in range(24)}
    wrong, over = [], threading.Event()

    def corrupt():
        number = 0
        while not over.wait(0.002):
            number += 1
            for path in values(tmp_path)[number % 10 :: 10]:
                try:
                    with path.open("r+b") as file:
                        file.seek(number % 4000)
                        file.write(b"damage")
                except FileNotFoundError:
                    continue

    with open_tier(tmp_path, KVCodec(), max_bytes=96 * 1024) as tier:

        def work(seed):
            for number in range(40):
                some = [f"key{(number * seed + step) % 24}" for step in range(4)]
                tier.put_many({key: entries[key] for key in some[:2]})
                hits = tier.get_many(dict.fromkeys(some, LARGE))
                wrong.extend(key for key, hit in hits.items() if not same(hit, entries[key]))
                if number % 15 == 0:
                    tier.delete_tags([f"tag{number % 3}"])

        vandal = threading.Thread(target=corrupt)
        vandal.start()
        in_threads(work, (1, 5, 7, 11))
        wait_until(lambda: work(13) or tier.stats().corrupt > 0)
        over.set()
        vandal.join()
        assert not wrong
        stats = tier.stats()
        assert stats.hits > 0
        assert stats.evictions > 0
        assert stats.corrupt > 0
        assert stats.errors == 0
        assert len(values(tmp_path)) == stats.entries


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_opens_the_file_for_itself(tier):
    put(tier, "key")
    child = os.fork()
    if not child:
        good = get(tier, "key") == b"answer"
        put(tier, "child")
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert get(tier, "child") == b"answer"


def test_a_closed_tier_only_misses(tier, caplog):
    put(tier, "key")
    tier.close()
    put(tier, "other")
    assert get(tier, "key") is None
    assert (tier.clear(), tier.stats().entries) == (0, None)
    tier.close()
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_limit_that_holds_nothing_is_rejected(tmp_path):
    message = r"answer cache on disk: max_bytes=1000 must be >= 65536; set 0 in the settings"
    with pytest.raises(CacheError, match=message):
        DiskTier(tmp_path, BlobCodec(), max_bytes=1000)


# The disk tier under damage, full disks and folders that cannot be used.


@pytest.mark.parametrize(
    "change",
    [
        "value = x'00'",
        "value = 'text'",
        "value = substr(value, 1, 10)",
        "expires_at = 'soon'",
        "used_at = x'ff'",
    ],
)
def test_a_damaged_row_is_a_miss_counted_and_removed(tier, tmp_path, change):
    put(tier, "key")
    put(tier, "other")
    with raw(tmp_path) as connection:
        connection.execute(f"UPDATE entries SET {change} WHERE key = 'key'")
    assert get(tier, "key") is None
    assert (tier.stats().corrupt, tier.stats().entries) == (1, 1)
    assert get(tier, "other") == b"answer"


FILE_DAMAGES = {
    "a flipped byte": lambda data: data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
    "a flipped byte in the head": lambda data: data[:50] + bytes([data[50] ^ 4]) + data[51:],
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: os.urandom(len(data)),
    "longer": lambda data: data + b"\0",
    "of another key": lambda data: serialize("other", entry()),
    "of another type": lambda data: serialize("key", entry(0, dataclasses.replace(SHAPE, dtype=torch.float16))),
}


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("damage", FILE_DAMAGES.values(), ids=FILE_DAMAGES.keys())
def test_a_damaged_or_foreign_file_is_a_miss_counted_and_removed(tmp_path, damage):
    with open_tier(tmp_path, KVCodec()) as tier:
        tier.put_many({"key": entry()})
        (path,) = values(tmp_path)
        tier.put_many({"other": entry(2)})
        path.write_bytes(damage(path.read_bytes()))
        hits = tier.get_many({"key": SHAPE, "other": SHAPE})
        assert list(hits) == ["other"]
        stats = tier.stats()
        assert (stats.corrupt, stats.misses, stats.errors, stats.entries) == (1, 1, 0, 1)
        assert not path.exists()
        tier.put_many({"key": entry(3)})
        assert same(tier.get_many({"key": SHAPE})["key"], entry(3))


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("replace", [os.remove, lambda path: (os.remove(path), os.mkfifo(path))], ids=["none", "pipe"])
def test_a_file_that_is_gone_or_a_pipe_is_a_miss(tier, tmp_path, replace):
    put(tier, "key")
    replace(values(tmp_path)[0])
    assert get(tier, "key") is None
    assert tier.stats().entries == 0
    put(tier, "key")
    assert get(tier, "key") == b"answer"


@pytest.mark.usefixtures("in_files")
def test_a_table_that_names_a_file_of_others_does_not_reach_it(tier, tmp_path):
    (tmp_path / "notes.txt").write_bytes(seal("key", b"mine"))
    put(tier, "key", b"mine")
    with raw(tmp_path) as connection:
        connection.execute("UPDATE files SET name = '../notes.txt'")
    assert get(tier, "key") is None
    assert tier.clear() == 0
    assert (tmp_path / "notes.txt").exists()


def test_the_value_of_another_key_is_a_miss(tier, tmp_path):
    put(tier, "key")
    with raw(tmp_path) as connection:
        connection.execute("UPDATE entries SET key = 'other'")
    assert get(tier, "other") is None


DAMAGES = {
    "garbage": lambda data: b"no database at all" * 1000,
    "header": lambda data: b"x" * 100 + data[100:],
    "middle": lambda data: data[:4096] + b"\xff" * (len(data) - 4096),
    "truncated": lambda data: data[: len(data) // 2],
    "a stump": lambda data: data[:50],
    "empty": lambda data: b"",
}


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_index_is_rebuilt_and_leaves_no_files(tmp_path, damage):
    index = tmp_path / "answers-v1.sqlite3"
    with open_tier(tmp_path) as tier:
        for number in range(100):
            put(tier, f"key{number}", os.urandom(1000), ["tag"])
    index.write_bytes(damage(index.read_bytes()))
    with open_tier(tmp_path) as tier:
        assert get(tier, "key99") is None
        for number in range(100):
            put(tier, f"key{number}", tags=["tag"])
        assert get(tier, "key99") == b"answer"
        assert tier.stats().entries == 100
        assert tier.stats().available
        assert len(values(tmp_path)) in (0, 100)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_an_index_that_is_damaged_while_open_is_never_an_error(tier, tmp_path, damage):
    index = tmp_path / "answers-v1.sqlite3"
    for number in range(100):
        put(tier, f"key{number}", os.urandom(1000), ["tag"])
    with raw(tmp_path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    index.write_bytes(damage(index.read_bytes()))
    for number in range(100):
        get(tier, f"key{number}")
        put(tier, f"new{number}", tags=["tag"])
    tier.delete_tags(["tag"])
    tier.clear()
    put(tier, "key")
    assert get(tier, "key") == b"answer"


def drop_table(folder):
    with raw(folder) as connection:
        connection.execute("DROP TABLE entries")


def remove_files(folder):
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("lose", [drop_table, remove_files])
def test_lost_tables_and_files_are_made_again(tier, tmp_path, lose):
    put(tier, "key")
    lose(tmp_path)
    assert get(tier, "key") is None
    put(tier, "key")
    assert get(tier, "key") == b"answer"
    assert (tmp_path / "answers-v1.sqlite3").exists()


def test_files_of_keys_and_values_of_earlier_versions_are_removed_and_the_log_says_so(tmp_path, caplog):
    old = [tmp_path / "a" / "b" / ("ab" + "0" * 38 + ".kv"), tmp_path / "incoming" / ("0" * 32)]
    mine = [tmp_path / "a" / "b" / "notes.kv", tmp_path / "incoming" / "notes.txt"]
    for path in (*old, *mine):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    with open_tier(tmp_path, KVCodec()) as tier:
        tier.put_many({"key": entry()})
        assert same(tier.get_many({"key": SHAPE})["key"], entry())
    assert [path.exists() for path in (*old, *mine)] == [False, False, True, True]
    assert "passage KV store: the index in" in caplog.text
    assert "removed 2 files" in caplog.text


@pytest.mark.usefixtures("in_files")
def test_files_that_a_process_did_not_finish_are_removed_once_they_are_old(tmp_path):
    clock = Clock()
    with open_tier(tmp_path, clock=clock) as tier:
        put(tier, "key")
    for name, age in (("a" * 32, 1000), ("b" * 32, 10)):
        (tmp_path / "values" / name).write_bytes(b"half")
        os.utime(tmp_path / "values" / name, (clock.now - age,) * 2)
    with open_tier(tmp_path, clock=clock) as tier:
        put(tier, "other")
        names = {path.name for path in values(tmp_path)}
        assert "a" * 32 not in names
        assert "b" * 32 in names
        assert get(tier, "key") == get(tier, "other") == b"answer"


@pytest.mark.parametrize("where", ["file", "file/below", "proc"])
def test_a_folder_that_cannot_be_made_is_a_miss_and_one_line_in_the_log(tmp_path, caplog, where):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / where if where != "proc" else type(tmp_path)("/proc/rag_posfix")
    clock = Clock()
    with open_tier(folder, breaker=CircuitBreaker(clock=clock)) as tier:
        for _ in range(3):
            put(tier, "key")
            clock.advance(31)
            assert get(tier, "key") is None
            assert tier.delete_tags(["tag"]) == tier.clear() == 0
        assert tier.stats().entries is None
        assert not tier.stats().available
    assert sum("is failing" in record.message for record in caplog.records) <= 2
    assert "could not drop entries" in caplog.text


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("in_files")
def test_a_disk_too_full_for_a_file_rejects_writes_serves_reads_and_keeps_no_rest(tier, tmp_path, monkeypatch, caplog):
    put(tier, "key")
    with monkeypatch.context() as patch:
        patch.setattr("rag_posfix.caching.disk.secrets.token_hex", lambda _: "a/b")  # in a folder that does not exist
        patch.setattr("rag_posfix.caching.disk.os.open", full)
        for number in range(3):
            put(tier, f"new{number}")
    assert get(tier, "new0") is None
    assert get(tier, "key") == b"answer"
    assert (tier.stats().errors, tier.stats().corrupt, tier.stats().available) == (3, 0, True)
    assert len(values(tmp_path)) == 1
    assert [record.message for record in caplog.records] == [
        f"answer cache: writing {tmp_path} is failing (OSError); answering without it"
    ]
    put(tier, "new")
    assert get(tier, "new") == b"answer"
    assert "works again" in caplog.text


def test_an_index_that_cannot_grow_rejects_writes_and_serves_reads(tier, caplog, monkeypatch):
    connect = sqlite3.connect

    def connect_to_a_small_disk(*arguments, **options):
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 20")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_a_small_disk)
    put(tier, "key")
    for number in range(20):
        put(tier, f"big{number}", b"x" * 50_000)
    assert get(tier, "key") == b"answer"
    assert tier.stats().errors >= 15
    assert tier.stats().available
    assert sum("is failing" in record.message for record in caplog.records) == 1


@pytest.mark.usefixtures("in_files")
def test_a_file_that_cannot_be_read_is_a_miss_counted_and_the_others_are_served(tier, tmp_path, monkeypatch, caplog):
    put(tier, "key")
    put(tier, "other")
    open_file = os.open
    failing = values(tmp_path)[0]

    def fail(path, *arguments):
        if path == failing:
            raise OSError(errno.EIO, "Input/output error")
        return open_file(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("rag_posfix.caching.disk.os.open", fail)
        for _ in range(2):
            assert len(tier.get_many({"key": None, "other": None})) == 1
    assert (tier.stats().errors, tier.stats().misses, tier.stats().available) == (2, 2, True)
    assert len(tier.get_many({"key": None, "other": None})) == 2
    assert "reading files in" in caplog.text


@pytest.mark.parametrize("value_bytes", [40_000, 100_000])
def test_a_file_that_the_system_does_not_let_grow_is_a_miss(tmp_path, value_bytes):
    script = """
        import resource, signal, sys
        from pathlib import Path
        from rag_posfix.caching.answers.tiered import Blob, BlobCodec
        from rag_posfix.caching.disk import DiskTier
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tier = DiskTier(Path(sys.argv[1]), BlobCodec())
        tier.put_many({"key": Blob(b"answer")})
        resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000))
        for number in range(50):
            tier.put_many({f"big{number}": Blob(b"x" * int(sys.argv[2]))})
        print(tier.stats().errors > 0)
        tier.close()
    """
    assert run_python(script, tmp_path, str(value_bytes)) == "True"
    assert values(tmp_path) == []
    with open_tier(tmp_path) as tier:
        assert get(tier, "key") == b"answer"


def test_a_folder_that_becomes_read_only_serves_what_it_holds(tmp_path_factory):
    script = """
        import os, sys
        from pathlib import Path
        from rag_posfix.caching.answers.tiered import Blob, BlobCodec
        from rag_posfix.caching.disk import DiskTier
        folder = Path(sys.argv[1])
        tier = DiskTier(folder, BlobCodec())
        tier.put_many({"key": Blob(b"answer"), "large": Blob(b"x" * 100_000)})
        for path in [*folder.rglob("*"), folder]:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        for parent in list(folder.parents)[:4]:  # one more where tests run side by side
            if parent.stat().st_uid == os.getuid() and os.getuid() == 0 and parent != Path("/"):
                os.chmod(parent, parent.stat().st_mode | 0o555)
        if os.getuid() == 0:
            os.setgroups([])
            os.setuid(65534)
        tier.put_many({"new": Blob(b"x" * 100_000)})
        hits = tier.get_many(dict.fromkeys(("key", "large", "new")))
        other = DiskTier(folder, BlobCodec())
        other.put_many({"new": Blob(b"answer")})
        print(list(hits), tier.delete_tags(["tag"]), tier.stats().errors >= 1)
        print(other.get_many({"new": None}), other.stats().errors >= 1)
        tier.close()
    """
    folder = tmp_path_factory.mktemp("readonly") / "cache"
    assert run_python(script, folder).splitlines() == ["['key', 'large'] 0 True", "{} True"]
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
