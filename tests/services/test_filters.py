"""Filters over HTTP: of requests in every API format, and of keys, which no request widens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from langchain_core.documents import Document

from rag_posfix.contracts.request import Generation, GenerationRequest, tenant_tags
from rag_posfix.errors import ConfigError, RetrievalError, VectorStoreError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix_api.keys.store import KeyStore
from tests.support.command_line import command_line
from tests.support.serving import BRIDGE, CHAT, CHAT_BODIES, HARBOUR, QUESTION, chat, client_for, make_pipeline
from tests.support.tenants import Tenants, pipeline_with_embeddings
from tests.support.toy_encoder import ToyEncoder

PUBLIC = Document(id="bridge", page_content=BRIDGE, metadata={"acl": ["staff", "guests"], "year": 1911})
SECRET = Document(id="harbour", page_content=HARBOUR, metadata={"acl": ["staff"], "year": 1963})
GUESTS = {"acl": "guests"}
BOTH = "When was the bridge of Arvo built, and when did the harbour freeze?"
WIDER: tuple[Any, ...] = (
    None, {}, {"acl": "staff"}, {"$or": [{"acl": "guests"}, {"acl": "staff"}]}, {"acl": {"$exists": True}},
    {"$not": {"year": 0}}, {"$or": [{"$not": {"acl": "guests"}}, {"year": {"$gt": 0}}]},
)  # fmt: skip


def retriever() -> BM25Retriever:
    return BM25Retriever.from_documents([PUBLIC, SECRET])


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(tmp_path, pipeline_with_embeddings(retriever=retriever(), indexes={"more": retriever()}))


def documents_of(body: dict[str, Any]) -> list[str]:
    return sorted(document["id"] for document in body.get("posfix", body)["documents"])


def ask(client: TestClient, **posfix: Any) -> dict[str, Any]:
    response = client.post(CHAT, json=chat(BOTH, posfix=posfix))
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("path", CHAT_BODIES)
def test_request_reads_matching_passages_alone_in_every_format(path: str):
    client = client_for(make_pipeline(retriever=retriever()))
    body = json.loads(json.dumps(CHAT_BODIES[path]).replace(QUESTION, BOTH))
    for metadata_filter, expected in (
        (None, ["bridge", "harbour"]),
        (GUESTS, ["bridge"]),
        ({"year": {"$gte": 1950}}, ["harbour"]),
    ):
        response = client.post(path, json={**body, "posfix": {"filter": metadata_filter}})
        assert documents_of(response.json()) == expected


@pytest.mark.parametrize("path", CHAT_BODIES)
@pytest.mark.parametrize("name", ["filter", "filters", "where", "acl"])
def test_field_that_looks_like_a_filter_is_rejected_with_the_correct_name(path: str, name: str):
    client = client_for(make_pipeline(retriever=retriever()))
    response = client.post(path, json={**CHAT_BODIES[path], name: GUESTS})
    assert response.status_code == 400
    assert f"{name} is not a field of this request; give the filter as posfix.filter" in response.text
    assert client.post(path, json={**CHAT_BODIES[path], name: None}).status_code == 200


def test_routes_without_retrieval_reject_filters_too(tenants: Tenants):
    client = tenants.client("acme")
    for path, body in (
        ("/v1/rerank", {"query": "x", "documents": [BRIDGE]}),
        ("/v2/rerank", {"query": "x", "documents": [BRIDGE]}),
        ("/rerank", {"query": "x", "texts": [BRIDGE]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/evaluate/order", {"query": "x", "documents": [BRIDGE, HARBOUR]}),
    ):
        response = client.post(path, json={**body, "filters": GUESTS})
        assert response.status_code == 400, path
        assert "reads only what the request sends" in response.text, path
    client.post("/v1/collections", json={"name": "notes"})
    response = client.post("/v1/collections/notes/search", json={"query": "x", "where": GUESTS})
    assert "where is not a field of this request; give the filter as filter" in response.text


def test_malformed_filters_and_filters_of_sent_documents_are_rejected():
    client = client_for(make_pipeline(retriever=retriever()))
    for posfix, problem in (
        ({"filter": {"$nor": []}}, "'$nor' is not understood"),
        ({"filter": {"year": {"$gte": None}}}, "must be a finite number or a text"),
    ):
        response = client.post(CHAT, json=chat(posfix=posfix))
        assert (response.status_code, problem in response.text) == (400, True)
    response = client.post(CHAT, json=chat(documents=[BRIDGE], posfix={"filter": GUESTS}))
    assert (response.status_code, "documents and a filter are given" in response.text) == (400, True)
    assert client.post(CHAT, json=chat(posfix={"filter": "acl=guests"})).status_code == 422


@pytest.mark.parametrize("index", [None, "more"])
def test_no_request_widens_the_filter_of_its_key(tenants: Tenants, index: str | None):
    guest = tenants.client("acme", scopes=("read",), filter=GUESTS)
    staff = tenants.client("acme", scopes=("read",))
    assert documents_of(ask(staff, index=index)) == ["bridge", "harbour"]
    for metadata_filter in WIDER:
        assert documents_of(ask(guest, index=index, filter=metadata_filter)) in (["bridge"], []), metadata_filter
    for path, body in CHAT_BODIES.items():
        text = json.dumps(body).replace(QUESTION, BOTH)
        sent = {**json.loads(text), "posfix": {"index": index, "filter": {"acl": {"$exists": True}}}}
        assert documents_of(guest.post(path, json=sent).json()) == ["bridge"], path
    stream = guest.post(CHAT, json=chat(BOTH, stream=True, posfix={"filter": {"acl": "staff"}})).text
    assert "1963" not in stream
    assert "The harbour froze" not in stream
    assert '"id":"harbour"' not in stream


def test_answers_of_one_permission_set_are_never_given_to_another(tenants: Tenants):
    guest = tenants.client("acme", scopes=("read",), filter=GUESTS)
    staff = tenants.client("acme", scopes=("read",))
    for _ in range(2):
        assert "1963" in staff.post(CHAT, json=chat("When did the harbour freeze?")).text
    assert "1963" not in guest.post(CHAT, json=chat("When did the harbour freeze?")).text
    # The same passage for both: still two entries, as equal questions under way at the same time are two.
    body = chat(QUESTION, posfix={"k": 1})
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda client: client.post(CHAT, json=body).json(), [guest, staff] * 4))
    assert [sorted(documents_of(answer)) for answer in answers] == [["bridge"]] * 8
    assert sum(not answer["cached"] for answer in answers) == 2
    again = tenants.client("acme", scopes=("read",), filter={"acl": {"$in": ["guests"]}})
    assert again.post(CHAT, json=body).json()["cached"] is True  # another key, the same permissions
    assert tenants.client("bolt", scopes=("read",), filter=GUESTS).post(CHAT, json=body).json()["cached"] is False


def test_a_text_that_a_filtered_key_sends_is_compared_with_what_its_filter_stored_alone(tmp_path: Path):
    """Keys and values of passages are found by the salt: ``cached_tokens`` would confirm a guess otherwise."""

    class RecordingGenerator(FakeGenerator):
        def generate(self, request: GenerationRequest) -> Generation:
            salts.append(request.salt)
            return super().generate(request)

    salts: list[str] = []
    tenants = Tenants(tmp_path, make_pipeline(RecordingGenerator(ToyEncoder())))
    staff = {"acl": {"$in": ["staff"]}}
    keys = [tenants.client("acme", scopes=("read",), filter=each) for each in (None, GUESTS, GUESTS, staff)]
    for client in keys:
        assert client.post(CHAT, json=chat(documents=[HARBOUR])).status_code == 200
    tenant, guest, other_guest, other = salts
    assert guest == other_guest
    assert len({tenant, guest, other}) == 3
    # Who deletes a document has no filter, and drops the entries of every filter of the tenant.
    assert tenant_tags(tenant, ["a"]) == tenant_tags(guest, ["a"]) == tenant_tags(other, ["a"])
    tenants.client("bolt", filter=GUESTS, scopes=("read",)).post(CHAT, json=chat(documents=[HARBOUR]))
    assert tenant_tags(salts[-1], ["a"]) != tenant_tags(guest, ["a"])


def test_collections_are_searched_and_asked_under_the_filter_of_the_key(tenants: Tenants):
    writer, guest = tenants.client("acme"), tenants.client("acme", scopes=("read",), filter=GUESTS)
    writer.post("/v1/collections", json={"name": "notes"})
    documents = [{"id": d.id, "text": d.page_content, "metadata": d.metadata} for d in (PUBLIC, SECRET)]
    assert writer.post("/v1/collections/notes/documents", json={"documents": documents}).status_code == 200

    def search(client: TestClient, metadata_filter: Any) -> list[str]:
        body = {"query": BOTH, "filter": metadata_filter}
        response = client.post("/v1/collections/notes/search", json=body)
        assert response.status_code == 200, response.text
        return sorted(hit["id"] for hit in response.json()["data"])

    assert search(writer, None) == ["bridge", "harbour"]
    assert search(writer, {"year": {"$lt": 1950}}) == ["bridge"]
    assert documents_of(ask(writer, collection="notes", filter={"year": {"$gt": 1950}})) == ["harbour"]
    for metadata_filter in WIDER:
        assert search(guest, metadata_filter) in (["bridge"], []), metadata_filter
        assert documents_of(ask(guest, collection="notes", filter=metadata_filter)) in (["bridge"], [])
    for method, path in (
        ("POST", "/v1/collections/notes/documents"),
        ("DELETE", "/v1/collections/notes/documents/harbour"),
        ("POST", "/v1/collections/notes/precompute"),
    ):
        assert guest.request(method, path, json={"documents": documents}).status_code == 403


def test_key_with_a_filter_may_only_read(tmp_path: Path):
    store = KeyStore(tmp_path)
    for scopes in (("read", "write"), ("admin",), ("read", "admin")):
        with pytest.raises(ConfigError, match="a key with a filter may only read, not "):
            store.create("acme", scopes=scopes, filter=GUESTS)
    with pytest.raises(ConfigError, match="'\\$nor' is not understood"):
        store.create("acme", filter={"$nor": []})
    with pytest.raises(ConfigError, match="lets through every passage"):
        store.create("acme", filter={})


def test_key_file_keeps_filters_and_a_filter_that_cannot_be_read_rejects_every_key(tmp_path: Path):
    store, file = KeyStore(tmp_path), tmp_path / "keys.json"
    store.create("acme")
    key, _ = store.create("acme", filter=GUESTS)
    written = json.loads(file.read_text())
    assert written["keys"][1]["filter"] == GUESTS
    assert KeyStore(tmp_path).table().keys[key.id].filter == GUESTS
    written["keys"][1]["filter"] = {"$nor": []}
    file.write_text(json.dumps(written))
    assert KeyStore(tmp_path).table().keys == {}  # every key is rejected


def test_filters_of_keys_are_created_and_listed_by_command_and_over_http(
    tmp_path: Path, tenants: Tenants, capsysbinary: pytest.CaptureFixture[bytes]
):
    call, folder = command_line(capsysbinary), tmp_path / "cli"
    create = ("keys", "create", "acme", "--scopes", "read", "--data-dir", folder, "--json")
    _, created, _ = call(*create, "--filter", "acl=guests", "--filter", '{"year": {"$lt": 1950}}')
    assert json.loads(created)["filter"] == {"$and": [{"acl": "guests"}, {"year": {"$lt": 1950}}]}
    assert "guests" in call("keys", "list", "--data-dir", folder, "--json")[1]
    admin = tenants.client("root", scopes=("admin",))
    body = {"tenant": "acme", "scopes": ["read"], "filter": GUESTS}
    key = admin.post("/admin/keys", json=body).json()
    assert key["filter"] == GUESTS
    assert [entry["filter"] for entry in admin.get("/admin/keys").json()["keys"]] == [None, GUESTS]
    asked = tenants.stranger(authorization=f"Bearer {key['key']}").post(CHAT, json=chat(BOTH))
    assert documents_of(asked.json()) == ["bridge"]
    assert admin.post("/admin/keys", json={**body, "scopes": ["read", "write"]}).status_code == 400


def test_tenants_that_share_an_index_read_their_own_passages(tmp_path: Path):
    documents = [
        document.model_copy(update={"metadata": {"owner": owner}})
        for document, owner in ((PUBLIC, "acme"), (SECRET, "bolt"))
    ]
    pipeline = pipeline_with_embeddings(retriever=BM25Retriever.from_documents(documents))
    tenants = Tenants(tmp_path, pipeline, tenant_field="owner")
    acme, bolt = tenants.client("acme"), tenants.client("bolt")
    for metadata_filter in (None, {"owner": ["acme", "bolt"]}, {"owner": {"$exists": True}}):
        assert documents_of(ask(acme, filter=metadata_filter)) == ["bridge"]
        assert documents_of(ask(bolt, filter=metadata_filter)) == ["harbour"]
    assert documents_of(ask(acme, filter={"owner": "bolt"})) == []
    acme.post("/v1/collections", json={"name": "notes"})
    added = {"documents": [{"id": "n", "text": BRIDGE}]}
    assert acme.post("/v1/collections/notes/documents", json=added).status_code == 200
    assert documents_of(ask(acme, collection="notes")) == ["n"]  # collections have one tenant anyway


def test_a_collection_does_not_open_a_shared_index_to_another_tenant(tmp_path: Path):
    document = SECRET.model_copy(update={"metadata": {"owner": "bolt"}})
    index = BM25Retriever.from_documents([document])
    tenants = Tenants(
        tmp_path, pipeline_with_embeddings(retriever=index, indexes={"shared": index}), tenant_field="owner"
    )
    acme = tenants.client("acme")
    acme.post("/v1/collections", json={"name": "notes"})
    count = {"/v1/messages/count_tokens": {**CHAT_BODIES["/v1/messages"]}}
    for path, body in (CHAT_BODIES | count).items():
        text = json.dumps(body).replace(QUESTION, BOTH)
        response = acme.post(path, json={**json.loads(text), "posfix": {"collection": "notes", "index": "shared"}})
        assert response.status_code == 400, path
        assert "an index and a collection are given; give one of them" in response.text, path
        assert "1963" not in response.text, path


class CheckedRetriever:
    """A retriever whose store may be gone."""

    problem: str | None = None

    def retrieve(self, question: str, k: int) -> list[Document]:
        return [PUBLIC]

    def check(self) -> None:
        if self.problem is not None:
            raise RetrievalError(self.problem)


def test_readiness_asks_the_vector_store():
    store = CheckedRetriever()
    client = client_for(make_pipeline(retriever=store))
    assert client.get("/readyz").status_code == 200
    store.problem = "the vector store qdrant failed with ConnectError"
    response = client.get("/readyz")
    assert (response.status_code, "qdrant failed" in response.text) == (503, True)
    assert client.get("/livez").status_code == 200
    store.problem = None
    assert client.get("/readyz").status_code == 200


def test_a_vector_store_that_does_not_answer_is_tried_again_elsewhere():
    class Gone(CheckedRetriever):
        def retrieve(self, question: str, k: int) -> list[Document]:
            raise VectorStoreError("the vector store qdrant failed with ConnectError; its address is secret")

    response = client_for(make_pipeline(retriever=Gone())).post(CHAT, json=chat())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "retrieval_unavailable")
    assert "secret" not in response.text
