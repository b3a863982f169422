"""Collections on disk: what is acknowledged is kept after a crash, and beside other processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from langchain_core.documents import Document

import rag_posfix_api.collections.collection as collection_file
from rag_posfix.errors import OverloadedError, RetrievalError
from rag_posfix.process import environment_with
from rag_posfix.retrieval.index.documents import DocumentFile
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.http.errors import RequestError
from tests.services.durable_stores import full_disk
from tests.services.opened_collection import opened, texts
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NOTES = "/v1/collections/notes"


def test_a_reader_follows_a_writer(tmp_path: Path):
    writer, reader = opened(tmp_path), opened(tmp_path)
    expected = {}
    for number in range(30):
        expected[f"d{number % 20}"] = f"text {number}"
        writer.put([Document(id=f"d{number % 20}", page_content=f"text {number}")])
        if number % 7 == 0:
            writer.delete([f"d{number % 20}"])
            del expected[f"d{number % 20}"]
        if number % 3 == 0:
            assert texts(reader) == expected
    assert texts(opened(tmp_path)) == texts(reader) == expected
    assert len(list(writer.folder.iterdir())) == 2
    assert all(file.stat().st_mode & 0o077 == 0 for file in writer.folder.iterdir()), "documents are private"


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.services.collection_process", *arguments]
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
                if httpx2.post(f"{url}{NOTES}/documents", json=body, timeout=60).status_code == 200:
                    acknowledged.extend(names)
        except httpx2.TransportError:
            done.set()  # the server is gone

    with process("serve", str(tmp_path)) as server:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        wait_until(lambda: _answers(url))
        assert httpx2.post(f"{url}/v1/collections", json={"name": "notes"}, timeout=60).status_code == 201
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ingest, url)
            wait_until(lambda: len(acknowledged) >= 40)
            server.send_signal(signal.SIGKILL)
            assert done.wait(60)
    kept = Collections(tmp_path / "collections", 10, 100_000).get("", "notes", LetterEmbeddings(), lambda gone: None)
    stored = texts(kept)
    assert set(acknowledged) <= set(stored)
    assert len(stored) - len(acknowledged) in (0, 5)  # the request in flight: all of it or nothing
    assert all(stored[name] == f"text of {name}" for name in acknowledged)
    kept.put([Document(id="after", page_content="the lock of the dead is free")])


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=60).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
def test_two_processes_that_write_at_once_both_write(tmp_path: Path):
    mine = opened(tmp_path, name="shared")
    with process("write", str(tmp_path), "a", "25") as other:
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        for number in range(25):
            mine.put([Document(id=f"b{number}", page_content=f"b {number}")])
            mine.put([Document(id="both", page_content=f"b {number}")])
        assert other.wait(60) == 0
    stored = texts(mine)
    assert set(stored) == {"both", *(f"{prefix}{number}" for prefix in "ab" for number in range(25))}
    assert texts(opened(tmp_path, name="shared")) == stored  # who wrote last is who wrote last for all


def test_a_reader_sees_what_others_change_delete_and_make_anew(tmp_path: Path):
    reader, writer = opened(tmp_path), opened(tmp_path)
    writer.put([Document(id="a", page_content="one")])
    assert texts(reader) == {"a": "one"}
    others = Collections(tmp_path, 10, 1000)
    others.delete("acme", "notes", writer)
    with pytest.raises(RequestError, match="there is no collection"):
        reader.documents()
    others.create("acme", "notes", LetterEmbeddings())
    opened(tmp_path).put([Document(id="b", page_content="two")])
    assert texts(reader) == texts(writer) == {"b": "two"}
    assert texts(opened(tmp_path)) == {"b": "two"}


def test_a_damaged_collection_can_be_deleted(tmp_path: Path):
    collection = opened(tmp_path)
    (file,) = collection.folder.glob("*.sqlite")
    file.write_bytes(b"no database" * 500)
    with pytest.raises(RetrievalError, match="is damaged: file is not a database"):
        collection.documents()
    collections = Collections(tmp_path, 10, 1000)
    assert collections.of("acme") == []
    assert collections.delete("acme", "notes", collection) == []
    assert list((tmp_path / "acme").iterdir()) == []


def test_a_writer_that_finds_the_collection_locked_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = opened(tmp_path)
    writer.put([Document(id="a", page_content="one")])
    monkeypatch.setattr(collection_file, "WAIT_SECONDS", 0.05)
    (path,) = writer.folder.glob("*.sqlite")
    other = DocumentFile(path)
    with other.transaction():
        with pytest.raises(OverloadedError, match="being changed by another request"):
            writer.put([Document(id="b", page_content="two")])
        assert texts(writer) == texts(opened(tmp_path)) == {"a": "one"}  # reading waits for nobody
    assert writer.put([Document(id="b", page_content="two")]).documents == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no program mount")
@pytest.mark.slow
def test_documents_of_any_size_are_deleted_on_a_full_disk(small_disk: Path):
    collection = opened(small_disk, max_documents=10_000)
    expected = {f"d{number}": f"text {number} " * 30 for number in range(100)} | {"big": " ".join(["long"] * 100_000)}
    collection.put([Document(id=name, page_content=text) for name, text in expected.items()])
    fill(small_disk / "other")
    with pytest.raises(RequestError, match="cannot write"):
        collection.put([Document(id="more", page_content="more " * 200_000)])
    for name in [*(f"d{number}" for number in range(0, 100, 3)), "big"]:
        assert collection.delete([name]) == 1
        del expected[name]
        assert texts(collection) == expected
    assert texts(opened(small_disk)) == expected
    (small_disk / "other").unlink()
    assert collection.put([Document(id="more", page_content="more")]).documents == len(expected) + 1


def test_failures_are_counted_logged_once_in_a_row_and_described_without_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    collections = Collections(tmp_path, 10, 1000)
    letters = LetterEmbeddings()
    for name in ("one", "two"):
        collections.create("acme", name, letters)
    one, two = (collections.get("acme", name, letters, lambda gone: None) for name in ("one", "two"))
    document = Document(id="a", page_content="b" * 200_000)
    assert collections.failures.describe() is None
    for _ in range(3):
        with full_disk(0), pytest.raises(RequestError, match="cannot write"):
            one.put([document])
    two.put([document])  # another collection that can be written changes nothing
    assert collections.failures.counts == {"write": 3, "read": 0}
    assert re.fullmatch(
        r"write of 1 collections fails since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \(not_stored\)",
        collections.failures.describe(),
    )
    assert caplog.text.count("write failed") == 1
    one.put([document])
    assert collections.failures.describe() is None
    (path,) = two.folder.glob("*.sqlite")
    path.write_bytes(b"no database" * 500)
    for _ in range(2):
        assert [info.name for info in collections.of("acme")] == ["one"]
    assert "read of 1 collections fails since" in collections.failures.describe()
    assert collections.failures.counts == {"write": 3, "read": 2}
    assert caplog.text.count("read failed") == 1
    collections.delete("acme", "two", two)
    assert collections.failures.describe() is None
