"""Over HTTP a follow-up is searched with the questions before it, in every API format and in collections."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.notes import add, notes_client
from tests.support.serving import BRIDGE, HARBOUR, ListRetriever, client_for, make_pipeline

TURNS = [
    {"role": "user", "content": "When was the bridge built?"},
    {"role": "assistant", "content": "In 1911."},
    {"role": "user", "content": "Of what is it made?"},
]
JOINED = "When was the bridge built?\nOf what is it made?"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": TURNS},
    "/v2/chat": {"model": "default", "messages": TURNS},
    "/v1/messages": {"model": "default", "messages": TURNS, "max_tokens": 20},
    "/api/chat": {"model": "default", "messages": TURNS, "stream": False},
}


@pytest.fixture(scope="module")
def client():
    return client_for(make_pipeline(retriever=ListRetriever(BRIDGE)))


def query_of(client, path, **posfix):
    response = client.post(path, json={**BODIES[path], "posfix": posfix})
    assert response.status_code == 200, response.text
    body = response.json()
    return (body.get("posfix") or body)["query"]


@pytest.mark.parametrize("path", BODIES)
def test_the_query_of_a_follow_up_is_chosen_by_the_request_and_in_the_answer(client, path):
    assert query_of(client, path) == JOINED
    assert query_of(client, path, query="last") == "Of what is it made?"


def test_a_collection_is_searched_for_the_follow_up_with_the_question_before_it(tmp_path):
    client = notes_client(tmp_path)
    add(client, {"id": "bridge", "text": BRIDGE}, {"id": "harbour", "text": HARBOUR})
    body = {"messages": TURNS, "posfix": {"collection": "notes"}}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["query"] == JOINED
    assert {document["id"] for document in response.json()["documents"]} == {"bridge", "harbour"}
