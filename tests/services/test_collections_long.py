"""Long documents of collections: stored as passages, and found, replaced and deleted by the id of the document."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from langchain_core.documents import Document

from rag_posfix.retrieval.ingest.passages import PassageSize
from rag_posfix.settings import ServiceSettings
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.http.errors import RequestError
from tests.services.notes import NOTES, add, notes_client
from tests.services.opened_collection import opened
from tests.support.letter_embeddings import LetterEmbeddings

SENTENCES = [f"In room {number} there is a desk and a lamp." for number in range(299)]
LONG = " ".join([*SENTENCES, "zzzz zzzz zzzz zzzz zzzz zzzz zzzz zzzz zzzz zzzz zzzz zzzz."])


class WideEmbeddings(LetterEmbeddings):
    """Vectors of the size of MiniLM's."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text) % 7 + 1)] * 384 for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return notes_client(tmp_path)


def search(client: TestClient, query: str) -> list[dict[str, Any]]:
    return list(client.post(f"{NOTES}/search", json={"query": query, "k": 3}).json()["data"])


def test_the_answer_at_the_end_of_a_long_document_is_found_first_by_its_passage(client: TestClient):
    added = add(client, {"id": "rooms", "title": "Rooms", "text": LONG}, {"id": "other", "text": "nothing of it"})
    assert added["ids"] == ["rooms", "other"]
    assert (added["added"], added["documents"]) == (2, 2)
    assert added["split"] == {"rooms": added["passages"] - 1}
    first = search(client, "zzzz")[0]
    assert first["id"] == f"rooms#{added['split']['rooms']}"
    assert first["text"].endswith("zzzz.")
    assert len(first["text"].split()) <= 150
    assert (first["title"], first["metadata"]["document_id"]) == ("Rooms", "rooms")
    assert LONG[first["metadata"]["start"] : first["metadata"]["end"]] == first["text"]


def test_passages_are_replaced_and_deleted_with_their_document(client: TestClient):
    add(client, {"id": "rooms", "text": LONG}, {"id": "other", "text": "nothing"})
    again = add(client, {"id": "rooms", "text": LONG})
    assert (again["added"], again["replaced"], again["unchanged"], again["documents"]) == (0, 0, 1, 2)
    shorter = add(client, {"id": "rooms", "text": "short"})
    assert (shorter["replaced"], shorter["documents"], shorter["passages"], shorter["split"]) == (1, 2, 2, {})
    assert {one["id"] for one in search(client, "room")} == {"rooms", "other"}
    assert add(client, {"id": "rooms", "text": LONG})["replaced"] == 1
    assert client.get(NOTES).json()["documents"] == 2
    assert client.delete(f"{NOTES}/documents/rooms%231").status_code == 404, "a passage is no document"
    assert client.delete(f"{NOTES}/documents/rooms").status_code == 200
    assert {one["id"] for one in search(client, "room")} == {"other"}
    assert client.get(NOTES).json()["documents"] == 1


def test_an_id_of_a_passage_is_no_id_of_another_document(client: TestClient):
    add(client, {"id": "rooms", "text": LONG})
    body = {"documents": [{"id": "rooms#2", "text": "mine"}]}
    assert client.post(f"{NOTES}/documents", json=body).status_code == 409
    add(client, {"id": "a#1", "text": "mine"})
    assert client.post(f"{NOTES}/documents", json={"documents": [{"id": "a", "text": LONG}]}).status_code == 409
    both = {"documents": [{"id": "b", "text": LONG}, {"id": "b#1", "text": "mine"}]}
    assert client.post(f"{NOTES}/documents", json=both).status_code == 409
    assert client.get(NOTES).json()["documents"] == 2


def test_another_process_sees_passages_as_one_document(tmp_path: Path):
    removed: list[Document] = []
    writer, reader = opened(tmp_path), opened(tmp_path, removed=removed.extend)
    put = writer.put([Document(LONG, id="rooms")])
    assert len(reader.documents()) == put.passages > 1
    assert reader.delete(["rooms"]) == 1
    assert (writer.documents(), len(removed)) == ([], put.passages)


def test_the_size_of_a_passage_is_that_of_the_settings(tmp_path: Path):
    collections = Collections(tmp_path, 10, 1000, PassageSize(tokens=24))
    collections.create("acme", "notes", LetterEmbeddings())
    notes = collections.get("acme", "notes", LetterEmbeddings(), lambda documents: None)
    assert notes.put([Document(id="rooms", page_content=LONG)]).passages == 151
    assert ServiceSettings(collection_passage_tokens=24).collection_passage_tokens == 24


def test_metadata_and_headings_are_not_multiplied_by_the_passages(client: TestClient) -> None:
    too_long = {"documents": [{"id": "a", "text": "short", "metadata": {"x": "y" * 60_000}}]}
    refused = client.post(f"{NOTES}/documents", json=too_long)
    assert (refused.status_code, "documents[0].metadata" in refused.text) == (422, True), refused.text
    many = {"documents": [{"id": "a", "text": " ".join(LONG.split() * 30), "metadata": {"x": "y" * 49_000}}]}
    refused = client.post(f"{NOTES}/documents", json=many)
    assert (refused.status_code, "metadata" in refused.text) == (413, True), refused.text
    add(client, {"id": "a", "text": "short", "metadata": {"x": "y" * 49_000}})
    added = add(client, {"id": "b", "text": f"# {'h' * 20_000}\n\n{LONG}"})
    assert added["split"]["b"] < 60
    assert all(len(document["title"] or "") < 1000 for document in search(client, "zzzz"))


def test_a_document_of_more_than_a_million_characters_is_refused(client: TestClient):
    body = {"documents": [{"id": "book", "text": "a" * 1_000_001}]}
    response = client.post(f"{NOTES}/documents", json=body)
    assert response.status_code == 422
    assert "at most 1000000 characters" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "documents[0].text"


def test_more_passages_than_a_collection_may_have_are_refused_before_one_is_embedded(tmp_path: Path):
    embeddings = LetterEmbeddings()
    collection = opened(tmp_path, embeddings=embeddings, max_documents=20)
    with pytest.raises(RequestError, match="more than 20 passages"):
        collection.put([Document(" ".join(SENTENCES), id=f"rooms{number}") for number in range(3)])
    assert embeddings.texts == []


def test_others_embed_between_two_documents_that_are_split(tmp_path: Path):
    ways: list[None] = []
    documents = [Document(f"{number} {LONG}", id=str(number)) for number in range(3)]
    opened(tmp_path).put(documents, lambda: ways.append(None))
    assert len(ways) == 3 + 1  # before each document, and before the one step of embedding


@pytest.mark.slow
def test_2_mb_of_documents_are_split_embedded_and_written_in_28_mb(tmp_path: Path):
    text = " ".join(f"Bridge {number} was built." for number in range(40_000))
    documents = [Document(text.replace("built", f"built {number}"), id=str(number)) for number in range(2)]
    collection = opened(tmp_path, embeddings=WideEmbeddings(), max_documents=100_000)
    tracemalloc.start()
    try:
        passages = collection.put(documents).passages
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert passages > 2000
    # Vectors are 4 MB: for SQLite, in the store with its reserve, and a batch while the store reads them.
    assert peak < 28e6
