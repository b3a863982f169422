"""The reranker that asks a rerank route of another server."""

from __future__ import annotations

import itertools

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, RerankingError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.generation.remote.connection import Connection
from rag_posfix.pipeline.retrievers_and_servers import connect_with
from rag_posfix.reranking import EndpointReranker
from rag_posfix.reranking.build import RerankerModels, build_reranker, check_loads_no_model, parse_reranker
from rag_posfix.settings import RemoteSettings, Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.reader import order, raw, scores
from tests.support.toy_encoder import ToyEncoder
from tests.support.upstream import as_json, error, scored_by_length, upstream

DOCUMENTS = [Document("bb"), Document("a", metadata={"title": "T"}), Document("cccc")]


def ranked(reply, **parameters):
    with upstream(reply) as server:
        reranker = EndpointReranker(connect=Connection, url=server.url, **parameters)
        return list(reranker.compress_documents(DOCUMENTS, "why?")), server


def test_scores_between_0_and_1_are_kept_and_titles_are_sent():
    result, server = ranked(scored_by_length, model="m")
    assert scores(result) == {"cccc": 0.8, "a": 0.75, "bb": pytest.approx(2 / 3)}
    (body,) = server.bodies
    assert server.paths == ["/v1/rerank"]
    assert (body["query"], body["model"], sorted(body["documents"])) == ("why?", "m", ["T\na", "bb", "cccc"])


def test_logits_become_scores_by_the_sigmoid():
    result, _ = ranked(
        as_json({"results": [{"index": i, "relevance_score": value} for i, value in enumerate((0.0, -3, 5))]})
    )
    assert sorted(raw(result).values()) == [-3.0, 0.0, 5.0]
    assert scores(result)[order(result)[1]] == 0.5


def test_a_bare_list_of_text_embeddings_inference_is_read():
    result, server = ranked(as_json([{"index": i, "score": i / 10} for i in range(3)]), api="tei")
    assert sorted(scores(result).values()) == [0.0, 0.1, 0.2]
    assert "texts" in server.bodies[0]
    assert "documents" not in server.bodies[0]


def test_the_server_reads_the_same_request_in_every_order():
    with upstream(scored_by_length) as server:
        reranker = EndpointReranker(connect=Connection, url=server.url + "/rerank")
        for documents in itertools.permutations(DOCUMENTS):
            reranker.compress_documents(documents, "why?")
        assert len({str(body) for body in server.bodies}) == 1
        assert set(server.paths) == {"/v1/rerank"}


@pytest.mark.parametrize(
    "results", [[], [{"index": 0, "relevance_score": 1}] * 3, [{"index": 7, "relevance_score": 1}]]
)
def test_missing_scores_are_an_error(results):
    with pytest.raises(RerankingError, match="of 3 passages; check url and api"):
        ranked(as_json({"results": results}))


@pytest.mark.parametrize("url", ["ftp://host", "http://me:secret@host", "host"])
def test_other_addresses_are_refused(url: str):
    with pytest.raises(ConfigError, match="url"):
        parse_reranker(f'endpoint:url="{url}"')


def test_a_client_of_the_service_cannot_name_it():
    with pytest.raises(ConfigError, match="RAG_POSFIX_RERANKER"):
        check_loads_no_model(parse_reranker('endpoint:url="http://10.0.0.1"'))


def test_the_key_goes_to_the_server_of_the_model_alone():
    with upstream(scored_by_length) as own, upstream(scored_by_length) as other:
        settings = Settings(model=own.model, remote=RemoteSettings(api_key="sk-1"))
        for server in (own, other):
            EndpointReranker(connect=connect_with(settings), url=server.url).compress_documents(DOCUMENTS, "why?")
        assert own.headers[0]["authorization"] == "Bearer sk-1"
        assert "authorization" not in other.headers[0]


def test_a_failing_server_is_an_error_with_its_status():
    with pytest.raises(Exception, match="status 500"):
        ranked(error(500, "broken"))


def test_without_a_connection_it_says_so():
    with pytest.raises(ConfigError, match=r"nothing connects to http://127\.0\.0\.1:8000 here"):
        EndpointReranker().compress_documents(DOCUMENTS, "why?")


def test_it_can_be_fused_with_another_scorer():
    with upstream(scored_by_length) as server:
        text = f'fused:scorers=["endpoint:url=\\"{server.url}\\"","embedding"]'
        models = RerankerModels(LetterEmbeddings, lambda: FakeGenerator(ToyEncoder()), Connection)
        result = build_reranker(parse_reranker(text), models).compress_documents(DOCUMENTS, "why?")
    assert len(result) == 3
