import dataclasses
import errno
import multiprocessing
import os
import threading
from contextlib import closing

import pytest
import torch

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.kv.disk import DiskPassages
from rag_posfix.caching.kv.entry import serialize
from rag_posfix.caching.kv.entry_folder import EntryFolder
from rag_posfix.caching.kv.tier import PassageTier
from rag_posfix.errors import CacheError
from tests.support.clock import Clock
from tests.support.passages import SHAPE, entry, same
from tests.support.subprocesses import run_python

MIB = 1024**2
ONE = len(serialize("key0", entry()))
LARGE = dataclasses.replace(SHAPE, n_tokens=128)  # 4 KiB


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "passages"


@pytest.fixture
def tier(folder):
    with closing(DiskPassages(folder, max_bytes=MIB)) as tier:
        yield tier


def get(tier, key, shape=SHAPE):
    return tier.get_many({key: shape}).get(key)


def files(folder):
    return sorted(folder.rglob("*.kv"))


def test_the_tier_follows_the_protocol(tier):
    assert isinstance(tier, PassageTier)


def test_nothing_is_written_before_the_first_entry(tier, folder):
    assert get(tier, "key") is None
    assert tier.stats().entries == tier.clear() == tier.delete_tags(["tag"]) == 0
    assert not folder.exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_entry_comes_back_bit_by_bit_with_its_tags(tier, dtype):
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    tier.put_many({"key": entry(1, shape, tags=("a", "b"))})
    assert same(get(tier, "key", shape), entry(1, shape, tags=("a", "b")))


def test_many_entries_at_once(tier):
    entries = {f"key{number}": entry(number) for number in range(30)}
    tier.put_many(entries)
    found = tier.get_many(dict.fromkeys([*entries, "unknown"], SHAPE))
    assert list(found) == list(entries)
    assert all(same(found[key], entries[key]) for key in entries)
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.errors, stats.corrupt) == (30, 1, 30, 0, 0)
    assert 30 * ONE <= stats.bytes <= 31 * ONE


def test_entries_survive_the_process(folder):
    for expected in (False, True):
        with closing(DiskPassages(folder, max_bytes=MIB)) as tier:
            assert (get(tier, "key") is not None) is expected
            tier.put_many({"key": entry()})


def test_keys_are_any_text_and_stay_in_the_folder(tier, folder, tmp_path):
    keys = ["../../escape", "/etc/passwd", "a" * 1000, "é\n", "", "con"]
    tier.put_many({key: entry(number) for number, key in enumerate(keys)})
    assert all(same(get(tier, key), entry(number)) for number, key in enumerate(keys))
    assert [path.name for path in tmp_path.iterdir()] == ["passages"]
    assert all(len(path.relative_to(folder).parts) == 3 for path in files(folder))


def test_others_on_the_machine_cannot_read_it(tier, folder):
    tier.put_many({"key": entry()})
    assert {path.stat().st_mode & 0o077 for path in files(folder)} == {0}
    assert folder.stat().st_mode & 0o077 == 0


def test_entries_are_dropped_by_tag(tier, folder):
    long = tuple(f"a rather long tag {number}" for number in range(2000))
    tier.put_many({"one": entry(1, tags=("a", "b")), "two": entry(2, tags=long), "three": entry(3)})
    assert tier.delete_tags(["unknown"]) == 0
    assert tier.delete_tags(["b", long[1999]]) == 2
    assert set(tier.get_many(dict.fromkeys(("one", "two", "three"), SHAPE))) == {"three"}
    assert len(files(folder)) == 1


def test_a_file_without_a_readable_head_is_removed_with_any_tag(tier, folder):
    tier.put_many({"one": entry(1), "two": entry(2)})
    files(folder)[0].write_bytes(b"nonsense")
    assert tier.delete_tags(["tag"]) == 1
    assert tier.stats().corrupt == 1
    assert len(files(folder)) == 1


def test_clear_removes_every_file(tier, folder):
    tier.put_many({f"key{number}": entry(number) for number in range(5)})
    assert tier.clear() == 5
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert get(tier, "key0") is None


DAMAGES = {
    "a flipped byte": lambda data: data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
    "a flipped byte in the head": lambda data: data[:50] + bytes([data[50] ^ 4]) + data[51:],
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: os.urandom(len(data)),
    "longer": lambda data: data + b"\0",
    "huge": lambda data: data + bytes(2 * MIB),
    "of another key": lambda data: serialize("other", entry()),
    "of another model": lambda data: serialize("key", entry(0, dataclasses.replace(SHAPE, layers=3))),
    "of another type": lambda data: serialize("key", entry(0, dataclasses.replace(SHAPE, dtype=torch.float16))),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_or_foreign_file_is_a_miss_counted_and_removed(tier, folder, damage):
    tier.put_many({"key": entry(), "other": entry(2)})
    path = EntryFolder(folder).path("key")
    path.write_bytes(damage(path.read_bytes()))
    assert get(tier, "key") is None
    stats = tier.stats()
    assert (stats.corrupt, stats.misses, stats.errors, stats.entries) == (1, 1, 0, 1)
    assert same(get(tier, "other"), entry(2))
    tier.put_many({"key": entry(3)})
    assert same(get(tier, "key"), entry(3))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tier, folder):
    path = EntryFolder(folder).path("key")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert get(tier, "key") is None
    tier.put_many({"key": entry()})
    assert same(get(tier, "key"), entry())


def test_a_folder_in_the_place_of_a_file_is_a_miss(tier, folder):
    EntryFolder(folder).path("key").mkdir(parents=True)
    tier.put_many({"key": entry()})
    assert get(tier, "key") is None
    assert tier.stats().errors == 2


def test_files_of_others_are_left_alone(tier, folder):
    tier.put_many({"key": entry()})
    (folder / "notes.txt").write_text("mine")
    (files(folder)[0].parent / "notes.txt").write_text("mine")
    (folder / "other").mkdir()
    assert tier.stats().entries == 1
    assert tier.clear() == 1
    assert len(list(folder.rglob("notes.txt"))) == 2


def test_bytes_are_bounded_and_the_least_recently_used_entries_go_first(folder):
    clock = Clock()
    with closing(DiskPassages(folder, max_bytes=64 * 1024, clock=clock)) as tier:
        tier.put_many({"favourite": entry(99)})
        for number in range(100):
            clock.advance(61)
            tier.put_many({f"key{number}": entry(number, LARGE)})
            assert sum(path.stat().st_size for path in files(folder)) <= 64 * 1024
            assert get(tier, "favourite") is not None
        stats = tier.stats()
        assert stats.evictions > 80
        assert stats.entries > 10
        newest = [number for number in range(100) if get(tier, f"key{number}", LARGE) is not None]
        assert newest == list(range(newest[0], 100))


def test_a_hit_is_noted_at_most_once_a_minute(folder):
    clock = Clock()
    with closing(DiskPassages(folder, max_bytes=MIB, clock=clock)) as tier:
        tier.put_many({"key": entry()})
        times = []
        for seconds in (30, 29, 2, 30):
            clock.advance(seconds)
            get(tier, "key")
            times.append(files(folder)[0].stat().st_mtime - clock.now)
        assert times == [-30, -59, 0, -30]


def test_a_folder_that_holds_too_much_is_brought_within_its_bound(folder):
    with closing(DiskPassages(folder, max_bytes=MIB)) as tier:
        tier.put_many({f"key{number}": entry(number, LARGE) for number in range(100)})
    with closing(DiskPassages(folder, max_bytes=64 * 1024)) as tier:
        tier.put_many({"key": entry()})
        assert tier.stats().bytes <= 64 * 1024
        assert get(tier, "key") is not None


def test_an_entry_of_more_than_a_quarter_of_the_tier_is_not_kept(folder):
    with closing(DiskPassages(folder, max_bytes=64 * 1024)) as tier:
        tier.put_many({"key": entry(0, dataclasses.replace(SHAPE, n_tokens=600))})
        assert tier.stats().entries == 0
        assert tier.stats().errors == 0


def test_what_a_process_did_not_finish_writing_is_removed_once_it_is_old(folder):
    clock = Clock()
    incoming = folder / "incoming"
    with closing(DiskPassages(folder, max_bytes=MIB, clock=clock)) as tier:
        tier.put_many({"key": entry()})
        assert list(incoming.iterdir()) == []
        for name, age in (("old", 1000), ("fresh", 10)):
            (incoming / name).write_bytes(b"half")
            os.utime(incoming / name, (clock.now - age,) * 2)
    with closing(DiskPassages(folder, max_bytes=MIB, clock=clock)) as tier:
        tier.put_many({"other": entry()})
        assert [path.name for path in incoming.iterdir()] == ["fresh"]
        clock.advance(1000)
        tier.clear()
        assert list(incoming.iterdir()) == []


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_refuses_writes_serves_reads_and_leaves_nothing_behind(tier, folder, monkeypatch, caplog):
    tier.put_many({"key": entry(1)})
    monkeypatch.setattr("rag_posfix.caching.kv.entry_folder.os.replace", full)
    for number in range(3):
        tier.put_many({f"new{number}": entry(2)})
    assert get(tier, "new0") is None
    assert same(get(tier, "key"), entry(1))
    stats = tier.stats()
    assert (stats.errors, stats.corrupt, stats.available) == (1, 0, False), "it must be given a rest"
    assert list((folder / "incoming").iterdir()) == []
    assert [record.message for record in caplog.records] == [
        f"passage store: writing {folder} is failing (OSError); answering without it"
    ]


def test_it_writes_again_once_there_is_room(folder, monkeypatch, caplog):
    clock = Clock()
    breaker = CircuitBreaker(clock=clock)
    with closing(DiskPassages(folder, max_bytes=MIB, breaker=breaker)) as tier:
        with monkeypatch.context() as patch:
            patch.setattr("rag_posfix.caching.kv.entry_folder.os.replace", full)
            tier.put_many({"key": entry()})
        tier.put_many({"key": entry()})
        assert get(tier, "key") is None
        clock.advance(5)
        tier.put_many({"key": entry()})
        assert get(tier, "key") is not None
        assert tier.stats().available
    assert "works again" in caplog.text


def test_a_disk_that_fails_to_read_is_a_miss_and_counted(tier, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    tier.put_many({"key": entry(1)})
    with monkeypatch.context() as patch:
        patch.setattr(EntryFolder, "read", fail)
        assert get(tier, "key") is None
        assert get(tier, "key") is None
    assert (tier.stats().errors, tier.stats().misses) == (2, 2)
    assert same(get(tier, "key"), entry(1))
    assert len(caplog.records) == 2  # failing, and working again


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_a_miss(tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    with closing(DiskPassages(tmp_path / where, max_bytes=MIB)) as tier:
        tier.put_many({"key": entry()})
        assert get(tier, "key") is None
        assert tier.delete_tags(["tag"]) == tier.clear() == 0
        assert tier.stats().errors >= 2
        assert tier.stats().entries is None


def test_a_file_that_the_system_does_not_let_grow_is_a_miss(folder):
    script = """
        import resource, signal, sys
        from pathlib import Path
        from rag_posfix.caching.kv.disk import DiskPassages
        from tests.support.passages import SHAPE, entry
        import dataclasses
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        large = dataclasses.replace(SHAPE, n_tokens=2000)
        tier = DiskPassages(Path(sys.argv[1]), max_bytes=1024**2)
        tier.put_many({"key": entry()})
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        tier.put_many({"large": entry(1, large)})
        found = tier.get_many({"key": SHAPE, "large": large})
        print(list(found), tier.stats().errors, tier.stats().corrupt)
        tier.close()
    """
    assert run_python(script, folder) == "['key'] 1 0"
    assert list((folder / "incoming").iterdir()) == []


def test_a_read_only_folder_serves_what_it_holds(tmp_path_factory):
    script = """
        import os, sys
        from pathlib import Path
        import torch
        from rag_posfix.caching.kv.disk import DiskPassages
        from tests.support.passages import SHAPE, entry
        import safetensors.torch
        folder = Path(sys.argv[1])
        tier = DiskPassages(folder, max_bytes=1024**2)
        tier.put_many({"key": entry()})
        tier.get_many({"key": SHAPE})
        for path in [*folder.rglob("*"), folder]:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        for parent in list(folder.parents)[:4]:  # one more where tests run side by side
            if parent.stat().st_uid == os.getuid() and os.getuid() == 0 and parent != Path("/"):
                os.chmod(parent, parent.stat().st_mode | 0o555)
        if os.getuid() == 0:
            os.setgroups([])
            os.setuid(65534)
        tier.put_many({"new": entry()})
        found = tier.get_many({"key": SHAPE, "new": SHAPE})
        print(list(found), tier.clear(), tier.stats().errors >= 1)
        tier.close()
    """
    folder = tmp_path_factory.mktemp("readonly") / "passages"
    assert run_python(script, folder) == "['key'] 0 True"
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


def write_many(folder, number):
    with closing(DiskPassages(folder, max_bytes=MIB)) as tier:
        for index in range(40):
            tier.put_many({f"key{number}-{index}": entry(index, tags=(f"tag{number}",))})
            tier.get_many({f"key{1 - number}-{index}": SHAPE})
        return tier.stats().errors, tier.stats().corrupt


def test_two_processes_share_it(folder):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(write_many, [(folder, 0), (folder, 1)]) == [(0, 0), (0, 0)]
    with closing(DiskPassages(folder, max_bytes=MIB)) as tier:
        assert tier.stats().entries == 80
        assert same(get(tier, "key1-39"), entry(39, tags=("tag1",)))
        assert tier.delete_tags(["tag0"]) == 40


def test_threads_put_get_corrupt_and_evict_and_every_hit_is_what_was_put(folder):
    tier = DiskPassages(folder, max_bytes=64 * 1024)
    entries = {f"key{number}": entry(number, LARGE, tags=(f"tag{number % 3}",)) for number in range(24)}
    wrong, over = [], threading.Event()

    def work(seed):
        for number in range(40):
            some = [f"key{(number * seed + step) % 24}" for step in range(4)]
            tier.put_many({key: entries[key] for key in some[:2]})
            found = tier.get_many(dict.fromkeys(some, LARGE))
            wrong.extend(key for key, kept in found.items() if not same(kept, entries[key]))
            if number % 15 == 0:
                tier.delete_tags([f"tag{number % 3}"])

    def corrupt():
        number = 0
        while not over.wait(0.002):
            number += 1
            path = EntryFolder(folder).path(f"key{number % 24}")
            try:
                with path.open("r+b") as file:
                    file.seek(number % 5000)
                    file.write(b"damage")
            except FileNotFoundError:
                continue

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 7, 11)]
    vandal = threading.Thread(target=corrupt)
    for thread in [*threads, vandal]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    vandal.join()
    assert not wrong
    stats = tier.stats()
    assert stats.hits > 0
    assert stats.evictions > 0
    assert stats.corrupt > 0
    assert stats.errors == 0
    tier.close()


def test_a_closed_tier_only_misses(tier):
    tier.put_many({"key": entry()})
    tier.close()
    tier.put_many({"other": entry()})
    assert get(tier, "key") is None
    tier.close()


def test_a_bound_that_holds_nothing_is_refused(folder):
    with pytest.raises(CacheError, match=r"max_bytes=1000 must be >= 65536, or 0 in the settings"):
        DiskPassages(folder, max_bytes=1000)
