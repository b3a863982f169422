"""Collections: what is acknowledged is kept, by whichever process, and found again."""

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
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

import rag_posfix_api.collections.collection as collection_file
from rag_posfix.errors import OverloadedError, RetrievalError
from rag_posfix.retrieval.index.storage import read_manifest
from rag_posfix.settings import environment_with
from rag_posfix_api.collections.collection import Collection, collection_lock
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.collections.write_ahead_log import WriteAheadLog
from rag_posfix_api.http.errors import NotFoundError, StorageError
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import ANSWER, BRIDGE, CHAT, HARBOUR, chat, make_pipeline
from tests.support.tenants import Tenants
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NOTES = "/v1/collections/notes"


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """A client of a tenant with the collection ``notes``."""
    made = Tenants(tmp_path).client("acme")
    assert made.post("/v1/collections", json={"name": "notes"}).status_code == 201
    return made


def add(client: TestClient, *documents: Any) -> dict[str, Any]:
    response = client.post(f"{NOTES}/documents", json={"documents": list(documents)})
    assert response.status_code == 200, response.text
    return dict(response.json())


def counts(added: dict[str, Any]) -> tuple[int, ...]:
    return tuple(added[name] for name in ("added", "replaced", "unchanged", "documents"))


def found(client: TestClient, query: str, k: int = 10) -> list[str]:
    response = client.post(f"{NOTES}/search", json={"query": query, "k": k})
    assert response.status_code == 200, response.text
    return [one["id"] for one in response.json()["data"]]


def opened(folder: Path, removed: Any = None, name: str = "notes", **options: Any) -> Collection:
    """Return a collection as another process sees it, which is made if it is not there."""
    collections = Collections(folder, options.pop("max_collections", 10), options.pop("max_documents", 1000))
    embeddings = options.pop("embeddings", None) or LetterEmbeddings()
    if name not in [info.name for info in collections.of("acme")]:
        collections.create("acme", name, embeddings)
    return collections.get("acme", name, embeddings, removed or (lambda documents: None))


def texts(collection: Collection) -> dict[str, str]:
    return {str(document.id): document.page_content for document in collection.documents()}


def test_a_collection_is_made_listed_described_and_deleted(client: TestClient):
    again = client.post("/v1/collections", json={"name": "notes"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_exists")
    client.post("/v1/collections", json={"name": "alpha"})
    add(client, {"id": "a", "text": BRIDGE})
    listed = client.get("/v1/collections").json()["data"]
    assert [(one["name"], one["documents"]) for one in listed] == [("alpha", 0), ("notes", 1)]
    assert client.get(NOTES).json() == listed[1]
    assert client.delete(NOTES).json() == {"id": "notes", "deleted": True}
    for response in (client.get(NOTES), client.delete(NOTES), client.post(f"{NOTES}/search", json={"query": "x"})):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert client.post("/v1/collections", json={"name": "notes"}).json()["documents"] == 0
    assert found(client, "bridge") == []


def test_adding_is_idempotent_by_id_and_by_content(client: TestClient):
    bridge, harbour = {"id": "a", "text": BRIDGE}, {"text": HARBOUR, "title": "Harbour", "metadata": {"year": 1963}}
    first = add(client, bridge, harbour)
    assert counts(first) == (2, 0, 0, 2)
    assert first["ids"][0] == "a"
    again = add(client, bridge, harbour)
    assert counts(again) == (0, 0, 2, 2)
    assert again["ids"] == first["ids"]
    assert counts(add(client, {"id": "a", "text": "changed"}, {"id": "b", "text": BRIDGE})) == (1, 1, 0, 3)
    assert counts(add(client, {"id": "c", "text": "one"}, {"id": "c", "text": "two"})) == (1, 0, 0, 4)
    (last,) = client.post(f"{NOTES}/search", json={"query": "two", "k": 1}).json()["data"]
    assert (last["id"], last["text"], last["score"]) == ("c", "two", 1.0)


def test_a_search_returns_what_was_added_with_its_score(client: TestClient):
    """Vectors count letters: of 'aab' and 'ab' the cosine is (2 + 1) / sqrt(5 * 2) = 3 / sqrt(10)."""
    add(client, {"id": "x", "text": "aab", "metadata": {"n": 1, "tags": ["p"]}}, {"id": "y", "text": "c"})
    results = client.post(f"{NOTES}/search", json={"query": "ab"}).json()["data"]
    assert results == [
        {"id": "x", "text": "aab", "title": None, "metadata": {"n": 1, "tags": ["p"]}, "score": 0.948683},
        {"id": "y", "text": "c", "title": None, "metadata": {}, "score": 0.0},
    ]


def test_documents_are_deleted_by_any_id(client: TestClient):
    for name in ("a", "x/y", "search", "ä b", "../../z"):
        add(client, {"id": name, "text": "text"})
    for name in ("a", "x/y", "search", "%C3%A4%20b", "..%2F..%2Fz"):
        assert client.delete(f"{NOTES}/documents/{name}").status_code == 200, name
    gone = client.delete(f"{NOTES}/documents/a")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    assert client.get(NOTES).json()["documents"] == 0


NO_NAMES = ("", ".", "..", "../b", "a/b", "a\\b", "A", "-a", "_", "a" * 65, "a\n", "a\x00", ".lock", "ä", "%2e%2e")


def test_a_name_that_is_no_name_is_refused(client: TestClient, tmp_path: Path):
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for name in NO_NAMES:
        assert client.post("/v1/collections", json={"name": name}).status_code == 422, name
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


REFUSED = [
    ("documents", {"documents": []}, 422),
    ("documents", {"documents": [{"id": "a"}]}, 422),
    ("documents", {"documents": [{"id": "", "text": "t"}]}, 422),
    ("documents", {"documents": [{"id": "a" * 257, "text": "t"}]}, 422),
    ("documents", {"documents": [{"id": "a", "text": " "}]}, 400),
    ("documents", {"documents": [{"id": "a", "text": "t", "tenant": "bolt"}]}, 422),
    ("documents", {"documents": [{"text": str(n)} for n in range(1001)]}, 413),
    ("search", {"query": " "}, 400),
    ("search", {"query": "a", "k": 0}, 422),
    ("precompute", {}, 400),
]


def test_bodies_that_are_refused_change_nothing(client: TestClient):
    for path, body, status in REFUSED:
        assert client.post(f"{NOTES}/{path}", json=body).status_code == status, body
    assert client.get(NOTES).json()["documents"] == 0


def test_a_collection_survives_its_process(client: TestClient, tmp_path: Path):
    add(client, {"id": "a", "text": BRIDGE}, {"id": "b", "text": HARBOUR})
    client.delete(f"{NOTES}/documents/b")
    again = opened(tmp_path / "collections")
    assert texts(again) == {"a": BRIDGE}


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


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_full_disk_is_told_and_leaves_everything_as_it_was(
    call: str, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    add(client, {"id": "a", "text": BRIDGE})

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"rag_posfix_api.collections.write_ahead_log.os.{call}", full)
    response = client.post(f"{NOTES}/documents", json={"documents": [{"id": "b", "text": HARBOUR}]})
    monkeypatch.undo()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "not_stored")
    assert str(tmp_path) not in response.text
    assert found(client, "harbour") == ["a"]
    assert counts(add(client, {"id": "b", "text": HARBOUR})) == (1, 0, 0, 2)
    assert set(texts(opened(tmp_path / "collections"))) == {"a", "b"}


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


def test_only_new_texts_are_embedded(tmp_path: Path):
    embeddings = LetterEmbeddings()
    collection = opened(tmp_path, embeddings=embeddings)
    collection.put([Document(id="a", page_content="one"), Document(id="b", page_content="one")])
    collection.put([Document(id="a", page_content="one", metadata={"new": 1})])
    collection.put([Document(id="a", page_content="one", metadata={"new": 1}), Document(id="c", page_content="two")])
    assert embeddings.texts == ["one", "two"]
    assert collection.documents()[-1].page_content == "two"


def test_numbers_of_documents_and_collections_are_limited(tmp_path: Path):
    client = Tenants(tmp_path, max_collections=2, max_collection_documents=3).client("acme")
    assert [client.post("/v1/collections", json={"name": n}).status_code for n in ("a", "notes", "c")] == [
        201,
        201,
        413,
    ]
    add(client, {"id": "a", "text": "1"}, {"id": "b", "text": "2"})
    body = {"documents": [{"id": "c", "text": "3"}, {"id": "d", "text": "4"}]}
    refused = client.post(f"{NOTES}/documents", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "documents")
    assert counts(add(client, {"id": "a", "text": "new"}, {"id": "c", "text": "3"})) == (1, 1, 0, 3)


def test_another_embedding_model_is_refused(tmp_path: Path):
    opened(tmp_path).put([Document(id="a", page_content="one")])
    with pytest.raises(RetrievalError, match="made with embedding model 'letters:26'"):
        opened(tmp_path, embeddings=LetterEmbeddings("others")).documents()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "acme").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        Collections(tmp_path, 10, 10).create("acme", "notes", LetterEmbeddings())


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_is_answered_from_the_collection_that_it_names(stream: bool, client: TestClient):
    add(client, {"id": "b", "text": BRIDGE}, {"id": "h", "text": HARBOUR})
    response = client.post(CHAT, json=chat(posfix={"collection": "notes", "k": 1}, stream=stream))
    if stream:
        pieces = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        answer = "".join(p["choices"][0]["delta"].get("content", "") for p in pieces if p["choices"])
        documents = next(p["documents"] for p in pieces if "documents" in p)
    else:
        answer, documents = response.json()["choices"][0]["message"]["content"], response.json()["documents"]
    assert answer == ANSWER
    assert [document["id"] for document in documents] == ["b"]


def test_every_chat_format_takes_the_collection(client: TestClient):
    add(client, {"id": "b", "text": BRIDGE})
    question = {"role": "user", "content": "When was the bridge of Arvo built?"}
    shared = {"model": "fake", "posfix": {"collection": "notes"}}
    bodies = {
        "/v1/responses": {"input": question["content"]},
        "/v1/messages": {"messages": [question], "max_tokens": 20},
        "/v2/chat": {"messages": [question]},
        "/api/chat": {"messages": [question], "stream": False},
    }
    for path, body in bodies.items():
        response = client.post(path, json=shared | body)
        assert response.status_code == 200, response.text
        assert ANSWER in response.text
        missing = client.post(path, json=shared | body | {"posfix": {"collection": "none"}})
        assert missing.status_code == 404


def test_a_question_has_documents_or_a_collection(client: TestClient):
    both = client.post(CHAT, json=chat(documents=[BRIDGE], posfix={"collection": "notes"}))
    assert (both.status_code, both.json()["error"]["param"]) == (400, "posfix.collection")
    for name in ("none", "../acme", ""):
        response = client.post(CHAT, json=chat(posfix={"collection": name}))
        assert response.status_code in (400, 404)


def test_without_an_embedding_model_there_are_no_collections(tmp_path: Path):
    client = Tenants(tmp_path, make_pipeline()).client("acme")
    response = client.post("/v1/collections", json={"name": "notes"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported")


def test_answers_from_a_document_that_was_deleted_are_dropped(client: TestClient):
    add(client, {"id": "b", "text": BRIDGE})
    ask = chat(posfix={"collection": "notes"})
    assert [client.post(CHAT, json=ask).json()["cached"] for _ in range(2)] == [False, True]
    client.delete(f"{NOTES}/documents/b")
    add(client, {"id": "b", "text": BRIDGE})
    assert client.post(CHAT, json=ask).json()["cached"] is False
