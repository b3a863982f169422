"""The disk tier under damage, full disks and folders that cannot be used."""

from __future__ import annotations

import dataclasses
import errno
import os
import sqlite3

import pytest
import torch

from rag_posfix.caching.answers.tiered import seal
from rag_posfix.caching.kv.store import KVCodec, serialize
from rag_posfix.caching.tier import CircuitBreaker
from tests.support.clock import Clock
from tests.support.passages import SHAPE, entry, same
from tests.support.subprocesses import run_python
from tests.unit.caching.disk_tier import get, open_tier, put, raw, values


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
