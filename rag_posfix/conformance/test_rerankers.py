"""What a reranker promises: scores from 0 to 1, best first, on copies of the documents, ties in their order."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.conformance.models import plugins
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.build import RerankerModels, build_reranker

QUESTION = "Which river does Rome lie on?"
TEXTS = ("Rome lies on the Tiber.", "Paris lies on the Seine.", "Bread is baked.", "Ovens are hot.")
of_each_reranker = pytest.mark.parametrize(("name", "cls"), plugins("reranker"))


def made(name: str, cls: Any) -> BaseDocumentCompressor:
    """Return the reranker with its example parameters, or its defaults; a served model is not there."""

    def no_model(*_: Any) -> Any:
        pytest.skip("it needs a served model")

    embeddings = DeterministicFakeEmbedding(size=8)
    models = RerankerModels(lambda: embeddings, no_model, no_model, no_model)
    return build_reranker(MethodSpec(name, getattr(cls, "example", {})), models)


def documents(texts: tuple[str, ...] = TEXTS) -> list[Document]:
    return [Document(page_content=text, id=str(n), metadata={"tags": ["t"]}) for n, text in enumerate(texts)]


@of_each_reranker
def test_scores_are_from_0_to_1_best_first_on_copies(name: str, cls: Any) -> None:
    given = documents()
    before = copy.deepcopy(given)
    result = list(made(name, cls).compress_documents(given, QUESTION))
    assert given == before, "the documents of the caller were changed"
    assert all(one is not other for one in result for other in given), "return copies"
    scores = [one.metadata["relevance_score"] for one in result]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert {one.page_content for one in result} <= set(TEXTS)
    assert all(one.metadata["tags"] == ["t"] for one in result)


@of_each_reranker
def test_asynchronous_calls_give_the_same(name: str, cls: Any) -> None:
    reranker = made(name, cls)
    result = list(reranker.compress_documents(documents(), QUESTION))
    assert list(asyncio.run(reranker.acompress_documents(documents(), QUESTION))) == result


@of_each_reranker
def test_equal_documents_have_equal_scores_and_keep_their_order(name: str, cls: Any) -> None:
    result = made(name, cls).compress_documents(documents(TEXTS[:1] * 3), QUESTION)
    assert len({one.metadata["relevance_score"] for one in result}) == 1
    assert [one.id for one in result] == ["0", "1", "2"]


@of_each_reranker
def test_nothing_to_score_is_nothing_scored_and_an_empty_question_is_refused(name: str, cls: Any) -> None:
    reranker = made(name, cls)
    assert list(reranker.compress_documents([], QUESTION)) == []
    with pytest.raises(ConfigError):
        reranker.compress_documents(documents(), " ")


@of_each_reranker
def test_each_parameter_is_described(name: str, cls: Any) -> None:
    supplied = {"embeddings", "generator", "connect", "load_model"}
    for field in cls.model_fields.keys() - supplied:
        assert f"    {field}: " in (cls.__doc__ or ""), f"describe {field} under Attributes of the docstring"
