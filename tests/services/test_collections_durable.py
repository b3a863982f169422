"""Collections on disk: what is acknowledged is kept after a crash, and beside other processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

import rag_posfix_api.collections.collection as collection_file
from rag_posfix.errors import OverloadedError, RetrievalError
from rag_posfix.retrieval.index.storage import read_manifest
from rag_posfix.settings import environment_with
from rag_posfix_api.collections.collection import collection_lock
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.collections.write_ahead_log import WriteAheadLog
from rag_posfix_api.http.errors import NotFoundError
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.opened_collection import opened, texts
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NOTES = "/v1/collections/notes"


def test_a_long_log_becomes_an_index_and_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collection_file, "LOG_BYTES", 1000)
    writer, reader = opened(tmp_path), opened(tmp_path)
    expected = {}
    for number in range(30):
        expected[f"d{number % 20}"] = f"text {number}"
        writer.put([Document(id=f"d{number % 20}", page_content=f"text {number}")])
        if number % 7 == 0:
            writer.delete([f"d{number % 20}"])
            del expected[f"d{number % 20}"]
        assert texts(reader) == expected
    header = json.loads((writer.folder / "collection.json").read_text())
    assert header["generation"] >= 2
    assert read_manifest(writer.folder / "index").count > 0
    logs = [path.name for path in writer.folder.glob("log-*")]
    assert logs == [f"log-{header['generation']}.jsonl"]
    assert texts(opened(tmp_path)) == expected


@pytest.mark.parametrize("at", ["save", "create", "write_header", "remove"])
def test_a_checkpoint_that_stops_anywhere_loses_nothing(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each step fails as if the process ended there; another process then reads the folder."""
    writer = opened(tmp_path)
    writer.put([Document(id="a", page_content="one"), Document(id="b", page_content="two")])
    monkeypatch.setattr(collection_file, "LOG_BYTES", 0)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "stopped")

    targets = {
        "save": (collection_file.FaissVectorStore, "save"),
        "create": (WriteAheadLog, "create"),
        "write_header": (collection_file, "write_header"),
        "remove": (WriteAheadLog, "remove"),
    }
    monkeypatch.setattr(*targets[at], stop)
    writer.put([Document(id="b", page_content="three")])
    writer.delete(["a"])
    monkeypatch.undo()
    assert texts(opened(tmp_path)) == {"b": "three"}
    writer.put([Document(id="c", page_content="four")])
    assert texts(opened(tmp_path)) == texts(writer) == {"b": "three", "c": "four"}


@pytest.mark.parametrize("torn", [b"0", b'0badc0de {"op": "put"', b"\x00" * 100, b"deadbeef {}\n"])
def test_what_a_killed_writer_left_is_not_read_and_is_cut_off(torn: bytes, tmp_path: Path):
    writer = opened(tmp_path)
    writer.put([Document(id="a", page_content="one")])
    log = writer.folder / "log-0.jsonl"
    with log.open("ab") as handle:
        handle.write(torn)
    again = opened(tmp_path)
    assert texts(again) == {"a": "one"}
    again.put([Document(id="b", page_content="two")])
    assert texts(opened(tmp_path)) == texts(writer) == {"a": "one", "b": "two"}
    assert torn not in log.read_bytes()


def test_a_log_that_is_damaged_before_its_end_is_an_error(tmp_path: Path):
    writer = opened(tmp_path)
    for name in "abc":
        writer.put([Document(id=name, page_content=name)])
    log = writer.folder / "log-0.jsonl"
    lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join([lines[0], lines[1].replace(b'"b"', b'"x"'), *lines[2:]]))
    with pytest.raises(RetrievalError, match="damaged at byte"):
        opened(tmp_path).documents()


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=6), st.data())
def test_a_log_gives_back_a_prefix_of_what_was_written_wherever_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, changes: list[dict[str, str]], data: st.DataObject
):
    file = tmp_path_factory.mktemp("log") / "log"
    log, ends = WriteAheadLog(file), [0]
    for change in changes:
        ends.append(log.append(change, ends[-1]))
    size = data.draw(st.integers(0, ends[-1]))
    if file.exists():
        os.truncate(file, size)
    whole = sum(end <= size for end in ends[1:])
    assert log.read(0) == (changes[:whole], ends[whole])


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.collection_process", *arguments]
    path = os.pathsep.join([str(ROOT), str(ROOT / "services")])
    environment = environment_with(PYTHONPATH=path, OMP_NUM_THREADS="1")
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.slow
def test_a_server_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path: Path):
    acknowledged: list[str] = []
    done = threading.Event()

    def ingest(url: str) -> None:
        try:
            for batch in range(1000):
                names = [f"d{batch}-{number}" for number in range(5)]
                body = {"documents": [{"id": name, "text": f"text of {name}"} for name in names]}
                if httpx2.post(f"{url}{NOTES}/documents", json=body, timeout=20).status_code == 200:
                    acknowledged.extend(names)
        except httpx2.TransportError:
            done.set()  # the server is gone

    with process("serve", str(tmp_path)) as server:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        wait_until(lambda: _answers(url))
        assert httpx2.post(f"{url}/v1/collections", json={"name": "notes"}, timeout=20).status_code == 201
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ingest, url)
            wait_until(lambda: len(acknowledged) >= 40)
            server.send_signal(signal.SIGKILL)
            assert done.wait(30)
    kept = Collections(tmp_path / "collections", 10, 100_000).get("", "notes", LetterEmbeddings(), lambda gone: None)
    stored = texts(kept)
    assert set(acknowledged) <= set(stored)
    assert len(stored) - len(acknowledged) in (0, 5)  # the request in flight: all of it or nothing
    assert all(stored[name] == f"text of {name}" for name in acknowledged)
    kept.put([Document(id="after", page_content="the lock of the dead is free")])


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
def test_two_processes_that_write_at_once_both_write(tmp_path: Path):
    mine = opened(tmp_path, name="shared")
    with process("write", str(tmp_path), "a", "25") as one, process("write", str(tmp_path), "b", "25") as other:
        for writer in (one, other):
            assert writer.stdout.readline() == "ready\n"
        for writer in (one, other):
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for number in range(10):
            mine.put([Document(id=f"c{number}", page_content=f"c {number}")])
        assert (one.wait(60), other.wait(60)) == (0, 0)
    names = {f"{prefix}{number}" for prefix, count in (("a", 25), ("b", 25), ("c", 10)) for number in range(count)}
    stored = texts(mine)
    assert set(stored) == names | {"both"}
    assert texts(opened(tmp_path, name="shared")) == stored  # who wrote last is who wrote last for all


def test_a_reader_sees_what_others_change_delete_and_make_anew(tmp_path: Path):
    reader, writer = opened(tmp_path), opened(tmp_path)
    writer.put([Document(id="a", page_content="one")])
    assert texts(reader) == {"a": "one"}
    others = Collections(tmp_path, 10, 1000)
    others.delete("acme", "notes", writer)
    with pytest.raises(NotFoundError):
        reader.documents()
    others.create("acme", "notes", LetterEmbeddings())
    assert texts(reader) == {}


def test_a_writer_that_finds_the_collection_locked_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = opened(tmp_path)
    writer.put([Document(id="a", page_content="one")])
    monkeypatch.setattr(collection_file, "WAIT_SECONDS", 0.05)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with collection_lock(writer.folder):
            held.set()
            assert free.wait(20)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(20)
        with pytest.raises(OverloadedError, match="being changed by another request"):
            writer.put([Document(id="b", page_content="two")])
        assert texts(writer) == {"a": "one"}  # reading waits for nobody
        free.set()
        holding.result()
    assert writer.put([Document(id="b", page_content="two")]).documents == 2
