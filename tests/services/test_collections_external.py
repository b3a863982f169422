"""Collections in a vector store that the operator runs: Qdrant (local mode), Milvus Lite, pgvector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

from rag_posfix import FaissVectorStore
from rag_posfix.contracts.retrieval import matches, parse_filter
from rag_posfix.errors import ConfigError
from rag_posfix.retrieval import external_stores
from rag_posfix_api.collections.collection import open_external_store
from rag_posfix_api.http.errors import RequestError
from tests.services.notes import NOTES, add
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.postgres import pgvector_collection, postgres_server
from tests.support.random_filters import FILTERS, documents_with_metadata
from tests.support.serving import ANSWER, BRIDGE, CHAT, HARBOUR, chat
from tests.support.tenants import Tenants

SIZE = 26


def qdrant(folder: Path) -> str:
    """Return the setting of a new collection of Qdrant's local mode."""
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(folder / "qdrant"))
    client.create_collection("copies", models.VectorParams(size=SIZE, distance=models.Distance.COSINE))
    client.close()
    return f"qdrant:path={folder / 'qdrant'},collection=copies"


def milvus(folder: Path) -> str:
    """Return the setting of a new collection of Milvus Lite, as langchain's package makes it."""
    from langchain_milvus import Milvus

    address = str(folder / "milvus.db")
    index = {"metric_type": "COSINE", "index_type": "FLAT"}
    Milvus(
        LetterEmbeddings(), collection_name="copies", connection_args={"uri": address}, index_params=index,
        metadata_field="metadata",
    ).add_texts(["a text"], [{"made": True}], ids=["made"])  # fmt: skip
    return f"milvus:url={address},collection=copies,metadata=metadata"


@pytest.fixture(params=["qdrant", "milvus", "pgvector"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The setting of a store; it may have a document of somebody else."""
    if request.param != "pgvector":
        yield {"qdrant": qdrant, "milvus": milvus}[request.param](tmp_path)
        return
    with postgres_server() as url:
        pgvector_collection(url, [Document(page_content="a text")], ["made"])
        yield f"pgvector:url={url},collection=docs"


def opened(folder: Path, address: str) -> Tenants:
    return Tenants(folder / "data", collection_store=address)


def client_of(tenants: Tenants, tenant: str = "acme", **fields: Any) -> TestClient:
    client = tenants.client(tenant, **fields)
    client.post("/v1/collections", json={"name": "notes"})
    return client


def copies(tenants: Tenants) -> list[str]:
    """Return the texts in the store itself."""
    store = tenants.app.state.service.collections.external.retriever
    hits = store.retrieve("a text", 1000, {"posfix_collection": {"$exists": True}})
    return sorted(hit.page_content for hit in hits)


def found(client: TestClient, **fields: Any) -> list[str]:
    response = client.post(f"{NOTES}/search", json={"query": "bridge", "k": 100, **fields})
    assert response.status_code == 200, response.text
    return sorted(document["id"] for document in response.json()["data"])


def test_documents_are_added_searched_replaced_and_deleted(address: str, tmp_path: Path):
    tenants = opened(tmp_path, address)
    client = client_of(tenants)
    first = add(client, {"id": "x", "text": "aab", "metadata": {"n": 1, "tags": ["p"]}}, {"id": "y", "text": "c"})
    assert (first["added"], first["documents"]) == (2, 2)
    assert add(client, {"id": "y", "text": "c"})["unchanged"] == 1
    # Vectors count letters: of 'aab' and 'ab' the cosine is 3 / sqrt(10).
    (best, other) = client.post(f"{NOTES}/search", json={"query": "ab"}).json()["data"]
    assert (best["id"], best["metadata"]) == ("x", {"n": 1, "tags": ["p"]})
    assert (best["score"], other["score"]) == (pytest.approx(0.948683, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert add(client, {"id": "x", "title": "T", "text": "ab"})["replaced"] == 1
    assert copies(tenants) == ["T\nab", "c"]
    assert client.delete(f"{NOTES}/documents/x").json() == {"id": "x", "deleted": True}
    assert (found(client), copies(tenants)) == (["y"], ["c"])
    assert client.get(NOTES).json()["documents"] == 1
    assert client.delete(NOTES).status_code == 200
    assert copies(tenants) == []


def test_long_document_is_several_copies_that_go_together(tmp_path: Path):
    tenants = opened(tmp_path, qdrant(tmp_path))
    client = client_of(tenants)
    added = add(client, {"id": "long", "text": "A sentence about bridges. " * 100})
    assert added["passages"] == added["split"]["long"] == len(copies(tenants)) > 1
    add(client, {"id": "long", "text": "short"})
    assert copies(tenants) == ["short"]


def test_question_is_answered_from_a_collection_in_the_store(tmp_path: Path):
    client = client_of(opened(tmp_path, qdrant(tmp_path)))
    add(client, {"id": "bridge", "text": BRIDGE}, {"id": "harbour", "text": HARBOUR, "metadata": {"year": 1963}})
    answer = client.post(CHAT, json=chat(posfix={"collection": "notes", "k": 1})).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    posfix = {"collection": "notes", "filter": {"year": {"$gt": 1950}}, "min_relevance": "off"}
    filtered = client.post(CHAT, json=chat(posfix=posfix)).json()
    assert [document["id"] for document in filtered.get("posfix", filtered)["documents"]] == ["harbour"]


def test_tenants_of_one_store_find_their_own_passages_alone(address: str, tmp_path: Path):
    tenants = opened(tmp_path, address)
    acme, other = client_of(tenants), client_of(tenants, "other")
    add(acme, {"id": "secret", "text": BRIDGE})
    for widened in (
        {"posfix_collection": {"$exists": True}},
        {"$or": [{"posfix_collection": "acme"}, {"$not": {"a": 1}}]},
    ):
        assert found(other, filter=widened) == []
    assert found(acme) == ["secret"]
    other.delete(NOTES)
    assert found(acme) == ["secret"]


def test_documents_cannot_name_a_collection_in_their_metadata(tmp_path: Path):
    client = client_of(opened(tmp_path, qdrant(tmp_path)))
    body = {"documents": [{"text": "x", "metadata": {"posfix_collection": "acme/notes"}}]}
    refused = client.post(f"{NOTES}/documents", json=body)
    assert (refused.status_code, "reserved" in refused.text) == (400, True)


@pytest.mark.slow
def test_random_filters_of_requests_and_keys_find_exactly_what_matches(tmp_path: Path):
    tenants = opened(tmp_path, qdrant(tmp_path))
    documents = documents_with_metadata(24)
    rows = [
        {"id": f"d{number}", "text": document.page_content, "metadata": document.metadata}
        for number, document in enumerate(documents)
    ]
    add(client_of(tenants), *rows)

    @settings(max_examples=15, derandomize=True)
    @given(FILTERS, st.lists(FILTERS, min_size=1, max_size=10))
    def check(of_key: dict[str, Any], of_requests: list[dict[str, Any]]):
        client = tenants.client("acme", filter=of_key, scopes=("read",))
        for of_request in of_requests:
            filters = [parse_filter(of_key), parse_filter(of_request)]
            expected = sorted(row["id"] for row in rows if all(matches(each, row["metadata"]) for each in filters))
            assert found(client, filter=of_request) == expected

    check()


def test_filters_are_pushed_down_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tenants = opened(tmp_path, qdrant(tmp_path))
    client = client_of(tenants)
    add(client, *({"id": f"d{n}", "text": BRIDGE, "metadata": {"n": n}} for n in range(20)))
    vectors: Any = tenants.app.state.service.collections.external.retriever.store.vectors
    searches: list[Any] = []
    search = vectors.similarity_search_with_score
    monkeypatch.setattr(
        type(vectors),
        "similarity_search_with_score",
        lambda self, q, k, filter: searches.append((k, filter)) or search(q, k, filter=filter),
    )
    response = client.post(f"{NOTES}/search", json={"query": "bridge", "k": 2, "filter": {"n": {"$gte": 18}}})
    assert [document["id"] for document in response.json()["data"]] == ["d18", "d19"]
    ((k, pushed),) = searches
    assert k == 2
    assert "metadata.posfix_collection" in str(pushed)
    assert "gte=18" in str(pushed)


def fail(*_: Any, **__: Any) -> None:
    raise ConnectionError("http://secret")


@pytest.mark.slow
def test_change_that_the_store_does_not_take_is_not_made_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tenants = opened(tmp_path, qdrant(tmp_path))
    client = client_of(tenants)
    add(client, {"id": "a", "text": "old"})
    vectors: Any = type(tenants.app.state.service.collections.external.retriever.store.vectors)
    with monkeypatch.context() as patched:
        patched.setattr(vectors, "add_documents", fail)
        response = client.post(f"{NOTES}/documents", json={"documents": [{"id": "a", "text": "new"}]})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "not_stored")
        assert "secret" not in response.text
    assert (found(client), copies(tenants)) == (["a"], ["old"])
    with monkeypatch.context() as patched:
        patched.setattr(vectors, "delete", fail)
        assert client.delete(f"{NOTES}/documents/a").status_code == 500
        assert found(client) == []  # the file no longer has it, and the store still does
        assert copies(tenants) == ["old"]
    assert client.delete(f"{NOTES}/documents/a").status_code == 404
    assert copies(tenants) == []
    assert add(client, {"id": "a", "text": "new"})["added"] == 1
    assert copies(tenants) == ["new"]


def test_too_many_passages_leave_no_copies(tmp_path: Path):
    tenants = Tenants(tmp_path / "data", collection_store=qdrant(tmp_path), max_collection_documents=2)
    client = client_of(tenants)
    add(client, {"id": "a", "text": "one"})
    rows = [{"id": str(number), "text": f"text {number}"} for number in range(3)]
    assert client.post(f"{NOTES}/documents", json={"documents": rows}).status_code == 413
    assert copies(tenants) == ["one"]


def test_copies_of_killed_processes_are_not_found_and_go_with_the_collection(tmp_path: Path):
    tenants = opened(tmp_path, qdrant(tmp_path))
    client = client_of(tenants)
    add(client, {"id": "a", "text": "bridge"})
    external = tenants.app.state.service.collections.external
    (path,) = (tmp_path / "data" / "collections" / "acme" / "notes").glob("*.sqlite")
    scope = f"acme/notes/{path.stem}"
    left = [f"00000000-0000-4000-8000-{number:012}" for number in range(9)]
    external.add(scope, {name: Document(page_content="bridge") for name in left})
    response = client.post(f"{NOTES}/search", json={"query": "bridge", "k": 1})
    assert [document["id"] for document in response.json()["data"]] == ["a"]
    client.delete(NOTES)
    assert copies(tenants) == []


@pytest.mark.slow
def test_collections_stay_in_their_store(tmp_path: Path):
    address = qdrant(tmp_path)
    tenants = opened(tmp_path, address)
    add(client_of(tenants), {"id": "a", "text": "bridge"})
    tenants.app.state.service.collections.external.retriever.store.vectors.client.close()
    embedded = Tenants(tmp_path / "data").client("acme")
    assert embedded.post(f"{NOTES}/search", json={"query": "bridge"}).status_code == 500
    assert embedded.delete(NOTES).status_code == 500
    assert embedded.get(NOTES).json()["documents"] == 1
    again = opened(tmp_path, address)
    assert found(again.client("acme")) == ["a"]


def test_readyz_asks_the_store(tmp_path: Path):
    tenants = opened(tmp_path, qdrant(tmp_path))
    client = tenants.client("acme")
    assert client.get("/readyz").status_code == 200
    tenants.app.state.service.collections.external.retriever.store.vectors.client.delete_collection("copies")
    response = client.get("/readyz")
    assert (response.status_code, "the vector store qdrant failed" in response.text) == (503, True)


class Plugin:
    """An entry point that opens what it is made with."""

    name = "shelf"

    def __init__(self, store: Any) -> None:
        self.store = store

    def load(self) -> Any:
        return lambda embeddings, **options: self.store(embeddings)


def test_store_that_cannot_do_what_collections_need_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Kept(FaissVectorStore):
        def delete(self, ids: Any = None, **_: Any) -> bool:
            return False

    class ReadOnly(FaissVectorStore):
        def add_documents(self, *_: Any, **__: Any) -> Any:
            raise PermissionError("a key that only reads")

    def use(store: Any) -> None:
        monkeypatch.setattr(external_stores, "entry_points", lambda group: [Plugin(store)])

    use(FaissVectorStore)
    open_external_store("shelf:", LetterEmbeddings())
    for store, error, problem in (
        (Kept, ConfigError, "cannot hold collections.*refused the deletion"),
        (ReadOnly, RequestError, "cannot add to the vector store shelf:: PermissionError"),
        (InMemoryVectorStore, ConfigError, "evaluates_filters=True"),
        (
            lambda embeddings: FaissVectorStore(embeddings).as_retriever(),
            ConfigError,
            "must return a langchain VectorStore",
        ),
    ):
        use(store)
        with pytest.raises(error, match=problem):
            open_external_store("shelf:", LetterEmbeddings())
    with pytest.raises(ConfigError, match="evaluates_filters"):
        Tenants(tmp_path, collection_store="shelf:")


def test_collection_that_is_created_again_while_documents_are_sent_has_copies_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tenants = opened(tmp_path, qdrant(tmp_path))
    client, again = client_of(tenants), tenants.client("acme")
    external = tenants.app.state.service.collections.external
    scopes: list[str] = []
    send = external.add

    def replace_after_sending(scope: str, documents: Any) -> None:
        send(scope, documents)
        scopes.append(scope)
        if len(scopes) == 1:
            assert again.delete(NOTES).status_code == 200
            assert again.post("/v1/collections", json={"name": "notes"}).status_code == 201

    monkeypatch.setattr(external, "add", replace_after_sending)
    assert add(client, {"id": "a", "text": "bridge"})["added"] == 1
    assert (found(client), copies(tenants)) == (["a"], ["bridge"])
    assert len(set(scopes)) == 2
