"""What a request chooses in ``posfix``: an index by name, and an arrangement in one text."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from rag_posfix.contracts.method_spec import MethodSpec
from tests.support.serving import (
    BRIDGE,
    CHAT_BODIES,
    HARBOUR,
    MESSAGES,
    ListRetriever,
    WordReranker,
    client_for,
    make_pipeline,
)

DOCUMENTS = [{"id": "h", "text": HARBOUR, "score": 0.9}, {"id": "b", "text": BRIDGE, "score": 0.1}]


@pytest.fixture
def chosen() -> list[MethodSpec]:
    """The rerankers that requests have named."""
    return []


@pytest.fixture
def client(chosen: list[MethodSpec]) -> TestClient:
    def choose(spec: MethodSpec) -> WordReranker:
        chosen.append(spec)
        return WordReranker()

    return client_for(
        make_pipeline(
            retriever=ListRetriever(HARBOUR), indexes={"bridges": ListRetriever(BRIDGE)}, choose_reranker=choose
        )
    )


def provenance(body: dict[str, Any]) -> dict[str, Any]:
    return dict(body.get("posfix", body))


@pytest.mark.parametrize("path", CHAT_BODIES)
def test_an_index_is_chosen_by_its_name_in_every_dialect(client: TestClient, path: str):
    answers = [
        client.post(path, json={**CHAT_BODIES[path], "posfix": posfix}).json()
        for posfix in ({}, {"index": None}, {"index": "bridges", "mitigation": "none"})
    ]
    attended = [provenance(answer)["documents"][0] for answer in answers]
    assert [document["id"] for document in attended] == ["r0"] * 3
    texts = [str(answer) for answer in answers]
    assert ["harbour froze" in text for text in texts] == [True, True, False]
    assert "built in 1911" in texts[2]


def ask(client: TestClient, **posfix: Any) -> dict[str, Any]:
    response = client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "documents": DOCUMENTS, "posfix": posfix}
    )
    return dict(response.json()) | {"status": response.status_code}


def test_an_arrangement_is_reranker_order_and_method(client: TestClient, chosen: list[MethodSpec]):
    answer = ask(client, arrangement="likelihood+embedding:top_n=5/reverse/parallel_windows")
    assert chosen == [MethodSpec("fused", {"scorers": ["likelihood", "embedding"], "top_n": 5})]
    assert (answer["order"], answer["mitigation"]) == ("reverse", "parallel_windows")
    # The scores of the request are replaced: the bridge is the better one now, and stands last.
    assert [document["id"] for document in answer["documents"]] == ["h", "b"]
    assert answer["documents"][1]["score"] > answer["documents"][0]["score"]


def test_an_arrangement_without_reranker_keeps_scores_and_without_order_the_given_one(
    client: TestClient, chosen: list[MethodSpec]
):
    assert [d["score"] for d in ask(client, arrangement="/reverse/none")["documents"]] == [0.1, 0.9]
    answer = ask(client, arrangement="none")
    assert (answer["order"], [d["id"] for d in answer["documents"]]) == ("original", ["h", "b"])
    assert chosen == []


@pytest.mark.parametrize(
    ("posfix", "said"),
    [
        ({"arrangement": "none", "order": "reverse"}, "leave out order"),
        ({"arrangement": "none", "order": "reverse", "mitigation": "none"}, "leave out mitigation and order"),
        ({"arrangement": "a/b"}, "must be reranker/order/method"),
    ],
)
def test_a_wrong_arrangement_is_refused(client: TestClient, posfix: dict[str, Any], said: str):
    answer = ask(client, **posfix)
    assert answer["status"] == 400
    assert said in answer["error"]["message"]


def test_a_method_beside_the_messages_contradicts_an_arrangement_too(client: TestClient):
    body = {"messages": MESSAGES, "documents": DOCUMENTS, "order": "reverse", "posfix": {"arrangement": "none"}}
    assert client.post("/v1/chat/completions", json=body).status_code == 400


def test_a_pipeline_without_a_choice_of_rerankers_says_so():
    answer = ask(client_for(make_pipeline()), arrangement="likelihood/relevance/none")
    assert (answer["status"], "cannot be chosen here" in answer["error"]["message"]) == (400, True)
