"""Rerank and score in the formats of Cohere, TEI and vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cohere
import httpx
import httpx2
import pytest
from cohere.core.api_error import ApiError
from fastapi.testclient import TestClient

from rag_posfix.reranking import CrossEncoderReranker, GuardedReranker
from tests.support.cross_encoder import tiny_cross_encoder
from tests.support.serving import BRIDGE, CHAT, HARBOUR, WordReranker, chat, client_for, make_pipeline, serving

QUERY = "the bridge of Arvo"
TEXTS = [HARBOUR, BRIDGE, "nothing"]


@pytest.fixture
def client() -> TestClient:
    return client_for(make_pipeline(reranker=WordReranker()), max_documents=3)


def post(client: TestClient, path: str, **body: Any) -> httpx2.Response:
    return client.post(path, json=body)  # type: ignore[return-value]


def test_coheres_client_ranks_with_both_versions_of_its_api():
    pipeline = make_pipeline(reranker=WordReranker())
    with serving(pipeline, api_key="key") as url, httpx.Client(timeout=60) as http:
        second = cohere.ClientV2(api_key="key", base_url=url, httpx_client=http)
        ranked = second.rerank(model="any", query=QUERY, documents=TEXTS, top_n=2)
        assert [one.index for one in ranked.results] == [1, 0]
        assert ranked.results[0].relevance_score == 1.0
        assert ranked.id
        assert ranked.meta is not None
        assert ranked.meta.api_version is not None
        assert ranked.meta.api_version.version == "2"
        first = cohere.Client(api_key="key", base_url=url, httpx_client=http)
        ranked_by_first = first.rerank(
            query=QUERY, documents=[{"text": text} for text in TEXTS], return_documents=True
        )
        assert [one.index for one in ranked_by_first.results] == [1, 0, 2]
        assert ranked_by_first.results[0].document is not None
        assert ranked_by_first.results[0].document.text == BRIDGE


def test_coheres_client_sees_errors_as_its_own():
    pipeline = make_pipeline(reranker=WordReranker())
    with serving(pipeline, api_key="key") as url, httpx.Client(timeout=60) as http:
        wrong = cohere.ClientV2(api_key="wrong", base_url=url, httpx_client=http)
        with pytest.raises(ApiError) as refused:
            wrong.rerank(model="any", query=QUERY, documents=TEXTS)
        assert refused.value.status_code == 401
        assert "API key is wrong" in refused.value.body["message"]


def test_teis_body_gets_a_bare_list_of_all_texts(client: TestClient):
    ranks = post(client, "/rerank", query=QUERY, texts=TEXTS, raw_scores=False, truncate=True).json()
    assert [rank["index"] for rank in ranks] == [1, 0, 2]
    assert set(ranks[0]) == {"index", "score"}
    with_text = post(client, "/rerank", query=QUERY, texts=TEXTS, return_text=True, truncation_direction="Right")
    assert with_text.json()[0] == {"index": 1, "score": 1.0, "text": BRIDGE}


def test_vllms_body_on_the_same_path_gets_an_object(client: TestClient):
    body = post(client, "/rerank", model="any", query=QUERY, documents=TEXTS, top_n=0).json()
    assert body["id"].startswith("rerank-")
    assert body["results"][0] == {"index": 1, "relevance_score": 1.0, "document": {"text": BRIDGE}}
    assert len(body["results"]) == 3
    tokens = len(QUERY) + sum(map(len, TEXTS))  # one for each character
    assert body["usage"] == {"total_tokens": tokens, "prompt_tokens": tokens}
    assert len(post(client, "/rerank", query=QUERY, documents=TEXTS, top_n=1).json()["results"]) == 1


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("left", "right"), [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_scores_come_in_the_order_of_the_request(client: TestClient, path: str, left: str, right: str):
    body = post(client, path, **{left: QUERY, right: TEXTS}).json()
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    assert (body["object"], body["data"][1]["object"], body["data"][1]["score"]) == ("list", "score", 1.0)
    assert len(post(client, path, **{left: QUERY, right: BRIDGE}).json()["data"]) == 1


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_ids_of_documents_come_back(client: TestClient, path: str):
    documents = [{"id": "h", "text": HARBOUR}, {"id": "b", "text": BRIDGE}]
    best = post(client, path, query=QUERY, documents=documents, top_n=None).json()["results"][0]
    assert best.get("id", best.get("document", {}).get("id")) == "b"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("top_n", [None, 99])
def test_more_than_there_are_and_null_mean_all(client: TestClient, path: str, top_n: int | None):
    assert len(post(client, path, query=QUERY, documents=TEXTS, top_n=top_n).json()["results"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/v2/rerank", {"query": " ", "documents": ["a"]}, 400, ("message", "query is empty")),
        ("/rerank", {"query": "q", "texts": ["a"] * 4}, 413, ("error", "texts has 4 entries")),
        ("/rerank", {"query": "q"}, 422, ("error", "texts")),
        ("/rerank", [], 422, ("error", "body")),
    ],
)
def test_errors_are_in_the_format_of_the_path(
    client: TestClient, path: str, body: Any, status: int, told: tuple[str, str]
):
    response = client.post(path, json=body)
    field, part = told
    assert response.status_code == status
    assert part in response.json()[field]
    if path == "/rerank":
        assert response.json()["error_type"] == "Validation"


def test_scores_that_are_all_equal_are_logged_and_counted(client: TestClient, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        post(client, "/rerank", query="my secret", texts=["a", "b"])
        post(client, "/rerank", query="my secret", texts=["a"])
        post(client, "/rerank", query=QUERY, texts=TEXTS)
    assert "rag_posfix_reranking_ties_total 1.0" in client.get("/metrics").text
    assert caplog.text.count("have the same score") == 1
    assert "secret" not in caplog.text


def test_a_query_that_the_reranker_cannot_read_is_a_400_and_no_failure_of_it(tmp_path: Path):
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(tiny_cross_encoder(tmp_path)), device="cpu")
    client = client_for(make_pipeline(reranker=GuardedReranker(reranker=CrossEncoderReranker(model=model))))
    for query in ("river " * 50, "river " * 50_000):
        response = client.post("/v1/rerank", json={"query": query, "documents": ["seine", "tiber"]})
        assert response.status_code == 400
        assert "query is longer than the reranker can read" in response.text
    for _ in range(3):
        documents = [{"text": "the seine"}, {"text": "the tiber"}]
        answer = client.post(CHAT, json=chat("river " * 50, documents=documents)).json()
        assert "no room for a passage beside this question" in answer["warnings"][0]
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.post("/v1/rerank", json={"query": "river", "documents": ["seine", "tiber"]}).status_code == 200
