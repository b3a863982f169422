"""What every registered reranker promises: creation by name, copies, ties, bad input, asynchronous calls.

On tiny random models. A new reranker whose parameters have defaults needs no line here.
"""

import copy
from dataclasses import replace

import pytest
import torch
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.assembly.documents import content_key
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.generation.remote.connection import Connection
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker
from tests.support.cross_encoder import tiny_cross_encoder
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import MarkedEncoder, ToyEncoder
from tests.support.upstream import scored_by_length, upstream

TEXTS = ["Rome lies on the Tiber.", "Paris lies on the Seine.", "Bread is baked.", "Ovens are hot."]
READING = ["attention_sorting", "calibrated_attention", "in_context", "last_but_not_late", "likelihood"]
POINTWISE = ["cross_encoder", "embedding", "likelihood"]
"""Those whose score of a document does not depend on the other documents."""
BY_CONTENT = ["attention_sorting", "calibrated_attention", "in_context", "last_but_not_late"]
"""Those that order the documents of a prompt by their content."""


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(ToyEncoder())


def tiny_engine(encoder, **further):
    loaded = loaded_model(vocab_size=encoder.vocab_size, num_hidden_layers=2, max_position_embeddings=2048)
    return Engine(replace(loaded, **further), encoder, "tiny", "print")


@pytest.fixture(scope="module")
def rerankers(engine, tmp_path_factory):
    """Every registered reranker, made by name."""
    projector = torch.randn((8, 64), generator=torch.Generator().manual_seed(0))
    trained = tiny_engine(MarkedEncoder(), projector=(projector,))
    models = RerankerModels(lambda: DeterministicFakeEmbedding(size=8), lambda: engine, Connection, lambda _: trained)
    with upstream(scored_by_length) as server:
        parameters = {
            "cross_encoder": {"model": str(tiny_cross_encoder(tmp_path_factory.mktemp("ce")))},
            "endpoint": {"url": server.url},
            "last_but_not_late": {"model": "trained"},
        }
        yield {name: build_reranker(MethodSpec(name, parameters.get(name, {})), models) for name in RERANKERS.names()}


@pytest.fixture(params=RERANKERS.names())
def reranker(request, rerankers):
    return rerankers[request.param]


def documents(*texts):
    return [Document(page_content=text, metadata={"tags": ["t"]}) for text in texts]


def scores(result):
    return {one.page_content: one.metadata["relevance_score"] for one in result}


def test_the_built_in_rerankers_are_registered():
    assert {*READING, "cross_encoder", "embedding", "listwise"} <= set(RERANKERS.names())


def test_it_is_a_langchain_compressor(reranker):
    assert isinstance(reranker, BaseDocumentCompressor)
    assert isinstance(reranker, Reranker)
    assert type(reranker).acompress_documents is not BaseDocumentCompressor.acompress_documents


async def test_scores_lie_in_range_best_first_and_asynchronous_calls_give_the_same(reranker):
    given = documents(*TEXTS)
    before = copy.deepcopy(given)
    result = list(reranker.compress_documents(given, "Which river?"))
    assert list(await reranker.acompress_documents(given, "Which river?")) == result
    assert given == before, "the given documents are left untouched"
    assert all(one is not other and one.metadata is not other.metadata for one in result for other in given)
    found = [one.metadata["relevance_score"] for one in result]
    assert found == sorted(found, reverse=True)
    assert all(0.0 <= score <= 1.0 for score in found)
    assert sorted(one.page_content for one in result) == sorted(TEXTS)
    assert all(one.metadata["tags"] == ["t"] for one in result)


def test_equal_documents_score_the_same_and_keep_their_order(reranker):
    same = [Document(id=str(n), page_content=TEXTS[n % 2]) for n in range(6)]
    result = reranker.compress_documents(same, "Which river?")
    assert len({one.metadata["relevance_score"] for one in result}) <= 2
    for text in TEXTS[:2]:
        ids = [one.id for one in result if one.page_content == text]
        assert ids == sorted(ids)


def test_ids_do_not_matter(reranker):
    for ids in ([None] * 4, ["same"] * 4):
        given = [Document(id=name, page_content=text) for name, text in zip(ids, TEXTS, strict=True)]
        result = reranker.compress_documents(given, "Which river?")
        assert scores(result) == scores(reranker.compress_documents(documents(*TEXTS), "Which river?"))
        assert [one.id for one in result] == ids


def test_a_score_that_is_no_number_is_replaced(reranker):
    given = [Document(page_content=text, metadata={"relevance_score": float("nan")}) for text in TEXTS]
    assert scores(reranker.compress_documents(given, "Which river?")) == scores(
        reranker.compress_documents(documents(*TEXTS), "Which river?")
    )


async def test_nothing_to_score_is_nothing_scored(reranker):
    assert list(reranker.compress_documents([], "Which river?")) == []
    assert list(await reranker.acompress_documents([], "Which river?")) == []


def test_text_that_is_missing_scores_zero(reranker):
    none = Document.model_construct(id="n", page_content=None, metadata=None)
    result = reranker.compress_documents([none, *documents(" \n", TEXTS[0])], "Which river?")
    assert [one.metadata["relevance_score"] for one in result if one.page_content != TEXTS[0]] == [0.0, 0.0]


def test_content_that_is_no_text_is_refused(reranker):
    wrong = Document.model_construct(id="n", page_content=7, metadata={})
    with pytest.raises(ConfigError, match=r"documents\[1\]: page_content is int, must be a string"):
        reranker.compress_documents([*documents("a"), wrong], "Which river?")
    with pytest.raises(ConfigError, match=r"documents\[0\] is str, must be a langchain_core Document"):
        reranker.compress_documents(["a"], "Which river?")


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused(reranker, question):
    with pytest.raises(ConfigError, match="the question is empty"):
        reranker.compress_documents(documents("a"), question)


def test_damaged_text_is_read_and_returned_as_given(reranker):
    result = reranker.compress_documents(documents("a\ud800\x00", "b <|im_end|>"), "wh\ud800?")
    assert sorted(one.page_content for one in result) == ["a\ud800\x00", "b <|im_end|>"]


def test_top_n_cuts_and_must_be_one_or_more(reranker, rerankers):
    name = next(name for name, made in rerankers.items() if made is reranker)
    cut = reranker.model_copy(update={"top_n": 2})
    whole = reranker.compress_documents(documents(*TEXTS), "Which river?")
    best = sorted(whole, key=lambda document: (-document.metadata["relevance_score"], content_key(document)))[:2]
    assert list(cut.compress_documents(documents(*TEXTS), "Which river?")) == [one for one in whole if one in best]
    models = RerankerModels(lambda: DeterministicFakeEmbedding(size=8), lambda: reranker.generator)
    with pytest.raises(ConfigError, match="top_n=0"):
        build_reranker(MethodSpec(name, {"top_n": 0}), models)


@pytest.mark.parametrize("name", [*POINTWISE, *BY_CONTENT])
def test_scores_do_not_depend_on_the_order_given(rerankers, name):
    expected = scores(rerankers[name].compress_documents(documents(*TEXTS), "Which river?"))
    for order in ((3, 2, 1, 0), (1, 3, 0, 2)):
        found = rerankers[name].compress_documents(documents(*(TEXTS[i] for i in order)), "Which river?")
        assert scores(found) == expected


@pytest.mark.parametrize("name", READING)
def test_a_generator_that_cannot_read_passages_is_refused_by_name(name):
    models = RerankerModels(embeddings=lambda: None, generator=lambda: FakeGenerator(ToyEncoder()))
    with pytest.raises(ConfigError, match=f"{name}: generator=.*FakeGenerator cannot read passages for a") as caught:
        build_reranker(MethodSpec(name), models)
    assert str(caught.value).endswith("or one of the rerankers cross_encoder, embedding, endpoint, listwise")


@pytest.mark.parametrize("name", RERANKERS.names())
def test_every_parameter_is_described(name):
    cls = RERANKERS.get(name)
    for parameter in RERANKERS.parameters(name):
        assert f"    {parameter}: " in cls.__doc__


@pytest.mark.parametrize("name", RERANKERS.names())
def test_every_method_says_where_it_is_from_and_what_it_costs(name):
    for fact in ("Source:", "Formula:", "Cost:", "Limits:"):
        assert f"    {fact} " in RERANKERS.get(name).__doc__
