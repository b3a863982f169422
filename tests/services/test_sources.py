"""Over HTTP a served index gives title, source, page and text of its passages, in the form of each API format."""

import json

import pytest
from langchain_core.documents import Document

from tests.support.serving import ANSWER, BRIDGE, CHAT_BODIES, HARBOUR, QUESTION, client_for, make_pipeline

MESSAGES = [{"role": "user", "content": QUESTION}]
FIELDS = {"title": "Bridges", "source": "policies/bridges.pdf", "page": 3}


class Shelf:
    def retrieve(self, question, k):
        bridge = Document(page_content=BRIDGE, id="5f2a", metadata={**FIELDS, "relevance_score": 0.9})
        return [bridge, Document(page_content=HARBOUR, id="77c1", metadata={"relevance_score": 0.5})]


@pytest.fixture(scope="module")
def client():
    return client_for(make_pipeline(retriever=Shelf()))


def ask(client, path, **posfix):
    response = client.post(path, json={**CHAT_BODIES[path], "posfix": posfix})
    assert response.status_code == 200, response.text
    return response.json()


def documents_of(body):
    return {document["id"]: document for document in (body.get("posfix") or body)["documents"]}


@pytest.mark.parametrize("path", CHAT_BODIES)
def test_retrieved_passages_have_title_source_page_and_text(client, path):
    documents = documents_of(ask(client, path))
    assert {name: documents["5f2a"][name] for name in (*FIELDS, "text")} == {**FIELDS, "text": BRIDGE}
    assert documents["77c1"].get("title") is documents["77c1"].get("page") is None
    hidden = documents_of(ask(client, path, source_text=False))["5f2a"]
    assert (hidden.get("text"), hidden["source"], hidden["page"]) == (None, "policies/bridges.pdf", 3)


@pytest.mark.parametrize("path", CHAT_BODIES)
def test_the_operator_may_keep_the_text_of_the_index(path):
    service = client_for(make_pipeline(retriever=Shelf()), source_text=False)
    body = ask(service, path, source_text=True)
    assert BRIDGE not in json.dumps(body).replace(ANSWER, "")
    assert documents_of(body)["5f2a"]["title"] == "Bridges"


def test_documents_of_the_request_come_back_with_their_text_only_if_asked(client):
    body = {"messages": MESSAGES, "documents": [{"id": "b", "text": BRIDGE, "title": "Bridges"}]}
    first = client.post("/v1/chat/completions", json=body).json()
    assert (first["documents"][0]["title"], first["documents"][0]["text"]) == ("Bridges", None)
    second = client.post("/v1/chat/completions", json={**body, "posfix": {"source_text": True}}).json()
    assert second["documents"][0]["text"] == BRIDGE


def test_responses_cite_files(client):
    (message,) = ask(client, "/v1/responses")["output"]
    citation = {"type": "file_citation", "index": len(ANSWER), "file_id": "5f2a", "filename": "policies/bridges.pdf"}
    assert message["content"][0]["annotations"].count(citation) == 1
    events = client.post("/v1/responses", json={"input": QUESTION, "stream": True}).text
    assert "response.output_text.annotation.added" in events


def test_anthropic_cites_search_results(client):
    cited = [block for block in ask(client, "/v1/messages")["content"] if block["citations"]]
    (location,) = cited[0]["citations"]
    assert location == {
        "type": "search_result_location",
        "cited_text": BRIDGE,
        "search_result_index": 0,
        "source": "policies/bridges.pdf",
        "title": "Bridges",
        "start_block_index": 0,
        "end_block_index": 1,
        "answer_start_index": 0,
        "answer_end_index": len(ANSWER),
    }


def test_a_stream_ends_with_the_same_sources_and_without_text_where_that_is_off(client):
    for source_text, expected in ((True, BRIDGE), (False, None)):
        body = {"messages": MESSAGES, "stream": True, "posfix": {"source_text": source_text}}
        lines = client.post("/v1/chat/completions", json=body).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        (documents,) = [chunk["documents"] for chunk in chunks if "documents" in chunk]
        assert {document["id"]: document for document in documents}["5f2a"]["text"] == expected
