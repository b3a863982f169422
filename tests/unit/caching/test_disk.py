"""The disk tier: what it keeps, drops, limits and shares."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time

import pytest

from rag_posfix.caching.answers.tiered import BlobCodec
from rag_posfix.caching.disk import DiskTier, SqliteFile
from rag_posfix.caching.kv.store import KVCodec
from rag_posfix.errors import CacheError
from tests.support.clock import Clock
from tests.support.passages import entry, same
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
