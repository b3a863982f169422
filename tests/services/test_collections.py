"""Collections: what they are asked over HTTP, and what is refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from langchain_core.documents import Document
from prometheus_client import generate_latest

from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import RetrievalError
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.http.errors import RequestError
from tests.services.durable_stores import full_disk
from tests.services.notes import NOTES, add, notes_client
from tests.services.opened_collection import opened, texts
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.redis_server import RedisServer
from tests.support.serving import ANSWER, BRIDGE, CHAT, HARBOUR, chat, make_pipeline
from tests.support.tenants import Tenants
from tests.support.waiting import wait_until


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return notes_client(tmp_path)


def counts(added: dict[str, Any]) -> tuple[int, ...]:
    return tuple(added[name] for name in ("added", "replaced", "unchanged", "documents"))


def found(client: TestClient, query: str, k: int = 10) -> list[str]:
    response = client.post(f"{NOTES}/search", json={"query": query, "k": k})
    assert response.status_code == 200, response.text
    return [one["id"] for one in response.json()["data"]]


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


def test_a_deletion_that_redis_does_not_have_is_pending_until_redis_works(tmp_path: Path):
    with RedisServer() as server, closing(answer_cache_of(server)) as cache:
        client = Tenants(tmp_path, make_pipeline(embeddings=LetterEmbeddings(), cache=cache)).client("acme")
        client.post("/v1/collections", json={"name": "notes"})
        add(client, {"id": "a", "text": BRIDGE}, {"id": "b", "text": HARBOUR})
        server.stop()
        deleted = client.delete(f"{NOTES}/documents/a").json()
        assert deleted["deleted"] is True
        assert deleted["pending"] >= 1
        server.start()
        wait_until(lambda: cache.pending_deletions == 0)


def answer_cache_of(server: RedisServer) -> TieredAnswerCache:
    return TieredAnswerCache([MemoryTier(), RedisTier(server.url, BlobCodec(), timeout_seconds=60)])


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


def test_the_operator_may_keep_the_text_of_collections(tmp_path: Path):
    client = notes_client(tmp_path, source_text=False)
    add(client, {"id": "x", "text": "aab", "title": "Letters"})
    (result,) = client.post(f"{NOTES}/search", json={"query": "ab"}).json()["data"]
    assert (result["id"], result["text"], result["title"]) == ("x", None, "Letters")


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
    with pytest.raises(RequestError, match="cannot write"):
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


def test_a_full_disk_is_reported_and_leaves_everything_as_it_was(client: TestClient, tmp_path: Path):
    add(client, {"id": "a", "text": BRIDGE})
    with full_disk(5000):
        response = client.post(f"{NOTES}/documents", json={"documents": [{"id": "b", "text": HARBOUR * 100}]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "not_stored")
    assert str(tmp_path) not in response.text
    assert found(client, "harbour") == ["a"]
    assert counts(add(client, {"id": "b", "text": HARBOUR})) == (1, 0, 0, 2)
    assert set(texts(opened(tmp_path / "collections"))) == {"a", "b"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused_and_named(number: str, client: TestClient):
    """pandas writes NaN; in a file of JSON it would make every later commit fail."""
    add(client, {"id": "a", "text": BRIDGE})
    for metadata in ('{"x": NUMBER}', '{"list": [1, {"deep": [NUMBER]}]}'):
        sound = '{"id": "b", "text": "b", "metadata": {"x": 1e308}}'
        wrong = '{"id": "c", "text": "c", "metadata": METADATA}'.replace(
            "METADATA", metadata.replace("NUMBER", number)
        )
        body = f'{{"documents": [{sound}, {wrong}]}}'
        headers = {"content-type": "application/json"}
        response = client.post(f"{NOTES}/documents", content=body, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (422, "documents[1].metadata")
        assert "has the number" in error["message"]
        assert found(client, "a") == ["a"]
    add(client, {"id": "d", "text": "d", "metadata": {"none": None, "number": 1e308}})


@pytest.mark.parametrize("name", ["\n", "a\n", "\0", "a\0b", "\r\n", "\x1f", "\x7f", "\x85", ".", ".."])
def test_an_id_that_no_url_can_name_is_refused(name: str, client: TestClient):
    response = client.post(
        f"{NOTES}/documents", json={"documents": [{"id": "a", "text": "a"}, {"id": name, "text": "b"}]}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (422, "documents[1].id")
    assert "could not be deleted by its URL" in error["message"]
    assert found(client, "a") == []


def test_every_id_that_is_taken_can_be_deleted(client: TestClient):
    names = ["a", "...", "../a", "a/./b", "//", " ", "?", "#", "search", "\u2028", "\u00e9\U0001f600"]
    add(client, *({"id": name, "text": f"text {number}"} for number, name in enumerate(names)))
    for name in names:
        path = quote(name, safe="")
        assert client.delete(f"{NOTES}/documents/{path}%0A").status_code == 404
        assert client.delete(f"{NOTES}/documents/{path}").json() == {"id": name, "deleted": True}
    assert client.get(NOTES).json()["documents"] == 0


def test_a_commit_that_fails_is_counted_and_told_by_the_readiness_probe(client: TestClient):
    metric = 'rag_posfix_collection_failures_total{action="write"} '
    assert f"{metric}0.0" in generate_latest(client.app.state.service.metrics.registry).decode()
    assert client.get("/readyz").json() == {"status": "ready"}
    with full_disk(0):
        body = {"documents": [{"id": "a", "text": BRIDGE}]}
        assert client.post(f"{NOTES}/documents", json=body).json()["error"]["code"] == "not_stored"
    assert f"{metric}1.0" in generate_latest(client.app.state.service.metrics.registry).decode()
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["detail"].startswith("write of 1 collections fails since ")
    assert not any(name in ready.text for name in ("acme", "notes"))
    add(client, {"id": "a", "text": BRIDGE})
    assert client.get("/readyz").json() == {"status": "ready"}
