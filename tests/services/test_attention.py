from __future__ import annotations

from typing import Any

import pytest

from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import Settings
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import BRIDGE, HARBOUR, QUESTION, client_for, make_pipeline

URL = "/v1/posfix/attention"


def biased() -> Pipeline:
    return make_pipeline(OrderBiasedGenerator())


def post(pipeline: Pipeline, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    client = client_for(pipeline, **settings or {})
    return client.post(URL, json={"query": QUESTION, "documents": [BRIDGE, HARBOUR], **fields})


def test_shares_are_those_of_the_prompt_in_the_given_order():
    body = post(biased(), documents=[{"id": "h", "text": HARBOUR, "score": 0.1}, {"id": "b", "text": BRIDGE}]).json()
    # Attention 1 to the first place and 1/2 to the second: 2/3 and 1/3, however long the passages are.
    assert [(d["id"], d["position"]) for d in body["documents"]] == [("h", 0), ("b", 1)]
    assert [d["attention"] for d in body["documents"]] == pytest.approx([2 / 3, 1 / 3])
    assert (body["object"], body["model"], body["dropped"]) == ("posfix.attention", "fake", [])
    assert body["prompt_tokens"] > len(BRIDGE) + len(HARBOUR)


def test_an_order_can_be_named_and_duplicates_are_dropped():
    scored = [{"id": "b", "text": BRIDGE, "score": 0.9}, {"id": "h", "text": HARBOUR, "score": 0.1}]
    body = post(biased(), documents=[*scored, {"id": "again", "text": BRIDGE}], order="reverse").json()
    assert [d["id"] for d in body["documents"]] == ["h", "b"]
    assert body["dropped"] == [{"id": "again", "reason": "duplicate"}]


def test_no_passages_get_no_attention():
    assert post(biased(), documents=[]).json()["documents"] == []


def test_a_generator_without_attention_is_refused():
    response = post(make_pipeline())
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unsupported"
    assert "'fake' gives no attention" in error["message"]


@pytest.mark.weights
@pytest.mark.slow
def test_shares_are_those_of_an_unmodified_answer(engine):
    from rag_posfix.pipeline.build import build_pipeline

    pipeline = build_pipeline(Settings(), generator=engine)
    documents = [{"id": "b", "text": BRIDGE, "score": 1}, {"id": "h", "text": HARBOUR, "score": 0}]
    with client_for(pipeline, max_concurrent=1) as client:
        measured = client.post(URL, json={"query": QUESTION, "documents": documents}).json()["documents"]
        asked = {
            "messages": [{"role": "user", "content": QUESTION}], "documents": documents, "max_tokens": 1,
            "posfix": {"mitigation": "none", "order": "original"}, "cache": False,
        }  # fmt: skip
        answered = client.post("/v1/chat/completions", json=asked).json()["documents"]
    shares = [{document["id"]: document["attention"] for document in one} for one in (measured, answered)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)
    assert sum(shares[0].values()) == pytest.approx(1)
