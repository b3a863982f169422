"""Requests without a passage: what every API format answers, and who may have the model's memory."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fastapi.testclient import TestClient
from langchain_core.documents import Document

from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.pipeline.pipeline import Defaults
from rag_posfix.text import NO_PASSAGE_TEXT
from tests.support.serving import BRIDGE, CHAT, CHAT_BODIES, QUESTION, ListRetriever, chat, client_for, make_pipeline

MEMORY = f"No passages for: {QUESTION}"


def answer(client: TestClient, **fields: Any) -> tuple[str, bool]:
    response = client.post(CHAT, json=chat(**fields))
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["message"]["content"], body["grounded"]


@pytest.mark.parametrize("path", CHAT_BODIES)
def test_an_index_without_a_passage_for_it_is_told_in_every_format(path: str):
    response = client_for(make_pipeline(retriever=ListRetriever())).post(path, json=CHAT_BODIES[path])
    assert response.status_code == 200
    assert NO_PASSAGE_TEXT in response.text
    extra = response.json() if path == CHAT else response.json()["posfix"]
    assert (extra["grounded"], extra["truncated"], extra["documents"]) == (False, [], [])


def test_it_streams_as_one_piece_and_is_a_field_of_the_last_chunk():
    client = client_for(make_pipeline(retriever=ListRetriever()))
    lines = client.post(CHAT, json=chat(stream=True)).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert (text, chunks[-1]["grounded"]) == (NO_PASSAGE_TEXT, False)


def test_a_conversation_with_a_model_that_has_no_index_goes_on():
    assert answer(client_for()) == (MEMORY, False)
    assert answer(client_for(), documents=None) == (MEMORY, False)
    assert answer(client_for(), posfix={"allow_ungrounded": False}) == (NO_PASSAGE_TEXT, False)
    assert answer(client_for(ungrounded="never")) == (NO_PASSAGE_TEXT, False)
    assert answer(client_for(), documents=[BRIDGE])[1] is True


def test_memory_is_for_those_whom_the_operator_allows_it():
    empty = {"documents": [], "posfix": {"allow_ungrounded": True}}
    refused = client_for().post(CHAT, json=chat(**empty))
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "posfix.allow_ungrounded")
    assert "RAG_POSFIX_SERVICE_UNGROUNDED=request" in refused.json()["error"]["message"]
    assert answer(client_for(ungrounded="request"), **empty) == (MEMORY, False)
    assert answer(client_for(ungrounded="request"), documents=[]) == (NO_PASSAGE_TEXT, False)
    always = client_for(make_pipeline(defaults=Defaults(allow_ungrounded=True)))
    assert answer(always, documents=[]) == answer(always, **empty) == (MEMORY, False)


def test_passages_cut_and_left_out_are_in_the_body_and_counted_in_the_log(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    documents = [
        {"id": "first", "text": "Bridge " * 9000, "score": 0.9},
        {"id": "second", "text": "Harbour " * 9000, "score": 0.1},
    ]
    body = client_for().post(CHAT, json=chat(documents=documents)).json()
    assert (body["truncated"], body["dropped"]) == (["first"], [{"id": "second", "reason": "budget"}])
    (line,) = [record for record in caplog.records if getattr(record, "fields", {}).get("truncated") is not None]
    assert (line.fields["truncated"], line.fields["left_out"], line.fields["grounded"]) == (1, 1, True)


class Far:
    """A retriever whose passage is hardly similar to any question."""

    def retrieve(self, question: str, k: int) -> list[Document]:
        return [Document(page_content="A bridge.", id="bridge", metadata={"relevance_score": 0.14})]

    def similarity_range(self) -> SimilarityRange:
        return SimilarityRange(low=0.2, clear=0.6)


def test_a_passage_below_the_minimum_relevance_is_not_read_unless_the_request_says_so():
    client = client_for(make_pipeline(retriever=Far()))
    response = client.post(CHAT, json=chat()).json()
    assert (response["grounded"], response["dropped"]) == (False, [{"id": "bridge", "reason": "min_relevance"}])
    (warning,) = response["warnings"]
    assert "'bridge', with similarity 0.14, at least 0.20 is needed" in warning
    assert "the field min_relevance" in warning
    assert answer(client, posfix={"min_relevance": "off"})[1] is True
    assert answer(client, posfix={"min_relevance": 0.1})[1] is True
    assert answer(client, posfix={"min_relevance": 0.15})[1] is False
    refused = client.post(CHAT, json=chat(posfix={"min_relevance": 2}))
    assert (refused.status_code, refused.json()["error"]["param"].startswith("posfix.min_relevance")) == (422, True)
