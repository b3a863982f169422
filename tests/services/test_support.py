"""Over HTTP: whether passages support an answer, and what a question that no passage answers gets."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rag_posfix.pipeline.support import SupportTest
from rag_posfix.reranking.yes_no import YesNoReranker
from rag_posfix.text import NO_PASSAGE_TEXT
from tests.support.reader import ScriptedReader
from tests.support.serving import BRIDGE, CHAT, CHAT_BODIES, HARBOUR, chat, client_for, make_pipeline

TEXTS = {"b": BRIDGE, "h": HARBOUR}


def judged_client(bridge: float, harbour: float) -> TestClient:
    """A service whose judge gives the passages these log-odds: log-probabilities of Y and N as the first letter."""
    odds = {BRIDGE: bridge, HARBOUR: harbour, "": 0.0}
    reader = ScriptedReader({text: {89: value, 121: -99.0, 78: 0.0, 110: -99.0} for text, value in odds.items()})
    judge = YesNoReranker(generator=reader)
    return client_for(make_pipeline(support=SupportTest(lambda: judge, is_trusted=True)))


def sent(**fields: Any) -> dict[str, Any]:
    return {"documents": [{"id": name, "text": text} for name, text in TEXTS.items()], **fields}


@pytest.mark.parametrize("path", [CHAT, "/v2/chat"])
def test_the_answer_says_which_passages_support_it(path: str):
    documents = [{"id": name, "data": {"text": text}} for name, text in TEXTS.items()] if path == "/v2/chat" else None
    fields = sent() if documents is None else {"documents": documents}
    response = judged_client(3.0, -3.0).post(path, json={**CHAT_BODIES[path], **fields}).json()
    extra = response if path == CHAT else response["posfix"]
    assert (extra["support"], extra["supported_by"], extra["disagreements"]) == ("yes", ["b"], [])
    assert extra["grounded"] is True


def test_a_chat_completion_and_its_stream_have_citations_where_the_other_formats_have_them():
    client = client_for(make_pipeline())
    whole = client.post(CHAT, json=chat(**sent())).json()
    assert whole["posfix"]["citations"] == whole["citations"] != []
    assert set(whole["posfix"]) < set(whole)
    lines = client.post(CHAT, json=chat(**sent(stream=True))).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (last,) = [chunk for chunk in chunks if "posfix" in chunk]
    assert last["posfix"]["citations"] == last["citations"] == whole["citations"]


def test_sent_documents_that_do_not_answer_get_the_fixed_text():
    body = judged_client(-3.0, -2.0).post(CHAT, json=chat(**sent())).json()
    assert body["choices"][0]["message"]["content"] == NO_PASSAGE_TEXT
    assert (body["grounded"], body["support"], body["documents"]) == (False, "no", [])
    assert {entry["reason"] for entry in body["dropped"]} == {"unsupported"}
    assert "the best is 'h', with log-odds of -2.00" in body["warnings"][0]


def test_a_client_may_have_an_answer_all_the_same():
    posfix = {"allow_unsupported": True}
    body = judged_client(-3.0, -2.0).post(CHAT, json=chat(**sent(posfix=posfix))).json()
    assert "1911" in body["choices"][0]["message"]["content"]
    assert (body["grounded"], body["support"]) == (True, "no")
    assert "do not support" in body["warnings"][0]


def test_answers_without_support_are_counted_and_logged(caplog: pytest.LogCaptureFixture):
    client = judged_client(-3.0, -2.0)
    with caplog.at_level(logging.INFO):
        client.post(CHAT, json=chat(**sent()))
        client.post(CHAT, json=chat(**sent(posfix={"allow_unsupported": True})))
        client.post(CHAT, json=chat())  # a conversation without passages is not counted
    counts = client.get("/metrics").text
    assert 'rag_posfix_unsupported_total{action="refused"} 1.0' in counts
    assert 'rag_posfix_unsupported_total{action="answered"} 1.0' in counts
    lines = [record.fields for record in caplog.records if "grounded" in getattr(record, "fields", {})]
    assert [(line["grounded"], line["support"]) for line in lines] == [(False, "no"), (True, "no"), (False, "no")]
