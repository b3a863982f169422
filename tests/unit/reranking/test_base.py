import copy
import itertools
import math

import pytest
from langchain_core.documents import Document
from pydantic import Field

from rag_posfix.assembly.documents import content_key
from rag_posfix.errors import ConfigError, RerankingError
from rag_posfix.reranking.base import DocumentScore, ScoringReranker, distinct_documents, ranked_copies


class ByTable(ScoringReranker):
    """Scores texts from a table, and keeps what it was asked to score."""

    name = "by_table"
    scores: dict[str, DocumentScore]
    calls: list[list[str]] = Field(default_factory=list)

    def _score(self, question, documents):
        self.calls.append([document.text for document in documents])
        return [self.scores[document.text] for document in documents]


def documents(*texts):
    return [Document(id=str(n), page_content=text, metadata={"n": n}) for n, text in enumerate(texts)]


def test_each_content_is_scored_once_and_blank_ones_not_at_all():
    reranker = ByTable(scores={"a": DocumentScore(0.5, 5.0, {"chunks": 2}), "b": DocumentScore(0.75, 7.5)})
    ranked = reranker.compress_documents(documents("a", " ", "b", "a"), "why?")
    assert reranker.calls == [["a", "b"]]
    assert [(one.id, one.metadata["relevance_score"]) for one in ranked] == [
        ("2", 0.75), ("0", 0.5), ("3", 0.5), ("1", 0.0),
    ]  # fmt: skip
    assert ranked[1].metadata["reranking"] == {"reranker": "by_table", "raw_score": 5.0, "chunks": 2}
    assert ranked[3].metadata["reranking"] == {"reranker": "by_table", "raw_score": None, "read": False}


def test_nothing_but_blank_documents_is_not_scored():
    reranker = ByTable(scores={})
    assert [one.metadata["relevance_score"] for one in reranker.compress_documents(documents("", "\n"), "why?")] == [
        0,
        0,
    ]
    assert reranker.calls == []


@pytest.mark.parametrize("raw", [math.nan, math.inf])
def test_a_raw_score_that_is_not_finite_is_an_error(raw):
    reranker = ByTable(scores={"a": DocumentScore(0.5, raw)})
    with pytest.raises(RerankingError, match=f"by_table: the model returned a score of {raw}"):
        reranker.compress_documents(documents("a"), "why?")


def test_the_title_is_part_of_the_content():
    titled = Document(page_content="a", metadata={"title": "T"})
    found = distinct_documents([*documents("a", "a"), titled])
    assert found.keys[0] == found.keys[1] != found.keys[2]
    assert [(one.title, one.text) for one in found.documents] == [("", "a"), ("T", "a")]


def test_none_in_a_document_counts_as_empty_and_other_types_are_refused():
    none = Document.model_construct(id="n", page_content=None, metadata=None)
    found = distinct_documents([none])
    assert (len(found.keys), found.documents, none.page_content) == (1, (), None)
    with pytest.raises(ConfigError, match=r"documents\[0\] is str"):
        distinct_documents(["a"])


def test_copies_are_ranked_cut_and_described():
    given = documents("a", "b", "c")
    before = copy.deepcopy(given)
    ranked = ranked_copies(given, [0.5, 0.9, 0.5], chosen=[1, 0], details=[{"x": 1}, {"x": 2}, {"x": 3}])
    assert [(one.id, one.metadata) for one in ranked] == [
        ("1", {"n": 1, "relevance_score": 0.9, "reranking": {"x": 2}}),
        ("0", {"n": 0, "relevance_score": 0.5, "reranking": {"x": 1}}),
    ]
    assert given == before


@pytest.mark.parametrize("order", list(itertools.permutations(["best", "tied", "also tied", "worst"])))
def test_equal_scores_at_the_limit_are_chosen_by_content(order):
    scores = {"best": 0.9, "tied": 0.5, "also tied": 0.5, "worst": 0.5}
    reranker = ByTable(scores={text: DocumentScore(score) for text, score in scores.items()}, top_n=2)
    expected = min(("tied", "also tied", "worst"), key=lambda text: content_key(Document(page_content=text)))
    ranked = reranker.compress_documents(documents(*order), "why?")
    assert [one.page_content for one in ranked] == ["best", expected]


def test_copies_of_a_passage_take_no_place_of_another():
    scores = {"best": DocumentScore(0.9), "second": DocumentScore(0.7), "third": DocumentScore(0.5)}
    reranker = ByTable(scores=scores, top_n=3)
    ranked = reranker.compress_documents(documents("best", "best", "third", "best", "second"), "why?")
    assert [one.page_content for one in ranked] == ["best", "second", "third"]
    few = reranker.model_copy(update={"top_n": 4}).compress_documents(documents("best", "best", "second"), "why?")
    assert [one.page_content for one in few] == ["best", "best", "second"]


@pytest.mark.parametrize("scores", [[], [float("nan")], [-0.1], [1.1]])
def test_scores_out_of_range_or_missing_are_an_error(scores):
    with pytest.raises(RerankingError, match="score"):
        ranked_copies(documents("x"), scores)
