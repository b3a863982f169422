import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.contracts.retrieval import SearchQuery, retrieve_query
from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.base import as_retriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.hybrid import HybridRetriever, min_max, reciprocal_ranks, weighted_scores


class Fixed:
    """Finds the same passages whatever is asked, and remembers how many were wanted."""

    def __init__(self, scores, **metadata):
        self.scores, self.metadata, self.asked = scores, metadata, []

    def retrieve(self, question, k):
        self.asked.append((question, k))
        return [
            Document(id=name, page_content=f"text {name}", metadata={**self.metadata, "relevance_score": score})
            for name, score in list(self.scores.items())[:k]
        ]


A = {"x": 0.9, "y": 0.5, "z": 0.1}
B = {"y": 0.8, "w": 0.4}


def scores(found):
    return {document.id: document.metadata["relevance_score"] for document in found}


def test_reciprocal_ranks_worked_by_hand():
    found = HybridRetriever(retrievers=[Fixed(A), Fixed(B)]).retrieve("q", 9)
    # The largest value is 2 / 61. y: 1/62 + 1/61; x: 1/61; w: 1/62; z: 1/63
    expected = {"y": (1 / 62 + 1 / 61) * 61 / 2, "x": 0.5, "w": 61 / 124, "z": 61 / 126}
    assert list(scores(found)) == ["y", "x", "w", "z"]
    assert scores(found) == pytest.approx(expected)


def test_reciprocal_ranks_with_weights_and_another_constant_worked_by_hand():
    hybrid = HybridRetriever(retrievers=[Fixed(A), Fixed(B)], weights=[3, 1], rank_constant=1)
    # Largest (3 + 1) / 2 = 2. x: 3/2; y: 3/3 + 1/2; z: 3/4; w: 1/3
    assert scores(hybrid.retrieve("q", 9)) == pytest.approx({"x": 0.75, "y": 0.75, "z": 0.375, "w": 1 / 6})


def test_three_of_ten_passages_are_the_best_of_the_other_retriever_with_the_scores_of_the_first():
    first = Fixed({f"a{rank}": 0.9 - rank / 100 for rank in range(100)})  # .90 to -.09
    words = Fixed({"a0": 0.9, "a50": 0.8, "b": 0.7, "c": 0.6, "d": 0.5})
    found = scores(HybridRetriever(retrievers=[first, words], fusion="fill").retrieve("q", 10))
    # a0 is among the seven; a50 has .9 - .5, and b and c, which the first does not find, its last score.
    assert list(found) == [*(f"a{rank}" for rank in range(7)), "a50", "b", "c"]
    assert [found[name] for name in ("a0", "a6", "a50", "b", "c")] == pytest.approx([0.9, 0.84, 0.4, -0.09, -0.09])


def test_passages_that_the_other_retriever_lacks_stay_those_of_the_first():
    first, words = Fixed({f"a{rank}": 0.9 - rank / 100 for rank in range(20)}), Fixed({"a1": 0.9, "b": 0.5})
    fill = HybridRetriever(retrievers=[first, words], fusion="fill")
    assert set(scores(fill.retrieve("q", 10))) == {*(f"a{rank}" for rank in range(9)), "b"}
    assert list(scores(fill.retrieve("q", 3))) == ["a0", "a1", "a2"], "of three none is left to the other"
    without = HybridRetriever(retrievers=[Fixed({}), words], fusion="fill")
    assert list(scores(without.retrieve("q", 10))) == ["a1", "b"]


def test_weighted_scores_worked_by_hand():
    hybrid = HybridRetriever(retrievers=[Fixed(A), Fixed(B)], fusion="score", weights=[1, 3])
    # Stretched: A x 1, y 1/2, z 0; B y 1, w 0. y: (1/2 + 3) / 4; x: 1/4; w and z: 0
    found = hybrid.retrieve("q", 9)
    assert list(scores(found)) == ["y", "x", "w", "z"]
    assert scores(found) == pytest.approx({"y": 0.875, "x": 0.25, "w": 0.0, "z": 0.0})


def test_a_retriever_whose_scores_are_all_equal_gives_each_its_whole_weight():
    assert min_max({"a": 0.3, "b": 0.3}) == {"a": 1.0, "b": 1.0}
    assert min_max({}) == {}
    hybrid = HybridRetriever(retrievers=[Fixed({"a": 0.3}), Fixed({})], fusion="score")
    assert scores(hybrid.retrieve("q", 1)) == {"a": 0.5}


rankings = st.lists(st.lists(st.sampled_from("abcdef"), unique=True), min_size=2, max_size=4)


@given(lists=rankings, constant=st.floats(0, 100), data=st.data())
def test_fused_scores_lie_between_zero_and_one_and_only_first_everywhere_is_one(lists, constant, data):
    weights = data.draw(st.lists(st.floats(0.01, 5), min_size=len(lists), max_size=len(lists)))
    for name, score in reciprocal_ranks(lists, weights, constant).items():
        assert 0 < score <= 1
        assert (score > 1 - 1e-9) == all(ranking[:1] == [name] for ranking in lists)
    scored = [{name: data.draw(st.floats(0, 1)) for name in ranking} for ranking in lists]
    assert all(0 <= score <= 1 for score in weighted_scores(scored, weights).values())


class ByText(Fixed):
    """Finds passages by the text that is searched for."""

    weighs_texts = True

    def retrieve(self, question, k):
        return Fixed(self.scores[question]).retrieve(question, k)


def test_each_retriever_weighs_the_messages_of_a_query_before_the_rankings_are_fused():
    retriever = ByText({"now": {"x": 0.9, "y": 0.8}, "before": {"y": 0.6, "z": 0.5}})
    query = SearchQuery("before\nnow", (("now", 1.0), ("before", 0.5)))
    ranking = retrieve_query(HybridRetriever(retrievers=[retriever, retriever]), query, 9, None)
    # y: (0.8 + 0.3) / 1.5, x: 0.9 / 1.5, z: 0.25 / 1.5; fused ranks of the messages would be close together
    assert [document.id for document in ranking] == ["y", "x", "z"]
    assert scores(ranking) == pytest.approx({"y": 1.0, "x": 61 / 62, "z": 61 / 63})


def test_ties_go_by_id_and_no_more_than_k_are_returned():
    hybrid = HybridRetriever(retrievers=[Fixed({"b": 1.0}), Fixed({"a": 1.0}), Fixed({"c": 1.0})])
    assert list(scores(hybrid.retrieve("q", 2))) == ["a", "b"]


def test_metadata_of_the_first_is_kept_and_that_of_the_others_added():
    hybrid = HybridRetriever(retrievers=[Fixed(A, source="first"), Fixed(B, source="second", bm25_score=7.0)])
    best = hybrid.retrieve("q", 1)[0]
    assert (best.id, best.metadata["source"], best.metadata["bm25_score"]) == ("y", "first", 7.0)


def bare(*scores):
    """A retriever of passages without ids, with these scores or None."""
    metadata = [{} if score is None else {"relevance_score": score} for score in scores]
    passages = [Document(page_content=f"text {number}", metadata=each) for number, each in enumerate(metadata)]
    return as_retriever(lambda question: passages)


def test_ranks_need_no_scores():
    ranking = HybridRetriever(retrievers=[bare(None, None), bare(None)]).retrieve("q", 2)
    assert [document.page_content for document in ranking] == ["text 0", "text 1"]
    assert [document.metadata["relevance_score"] for document in ranking] == pytest.approx([1.0, 61 / 124])


def test_passages_without_ids_are_the_same_whatever_their_scores():
    ranking = HybridRetriever(retrievers=[bare(0.4), bare(np.float32(0.9)), bare(None)]).retrieve("q", 2)
    assert [(document.page_content, document.metadata) for document in ranking] == [
        ("text 0", {"relevance_score": 1.0})
    ]
    words = BM25Retriever.from_documents([Document(page_content="text 0")])
    assert len(HybridRetriever(retrievers=[words, bare(0.4)]).retrieve("text", 2)) == 1


@pytest.mark.parametrize("score", [None, "high", float("nan")])
def test_scores_that_cannot_be_fused_are_refused(score):
    hybrid = HybridRetriever(retrievers=[bare(np.float32(0.5)), bare(score)], fusion="score")
    with pytest.raises(RetrievalError, match=f"relevance_score={score!r}; fusion='score' needs a finite number"):
        hybrid.retrieve("q", 2)


def test_each_retriever_is_asked_for_the_candidates_or_for_k_if_that_is_more():
    parts = [Fixed(A), Fixed(B)]
    hybrid = HybridRetriever(retrievers=parts, candidates=5)
    hybrid.retrieve("\ud800q", 2)
    hybrid.retrieve("q", 8)
    assert [part.asked for part in parts] == [[("\ufffdq", 5), ("q", 8)]] * 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"retrievers": [Fixed(A)]}, "needs two or more retrievers, got 1"),
        ({"retrievers": [Fixed(A), "bm25"]}, "a str cannot be part of hybrid retrieval"),
        *(({"weights": weights}, "weights=") for weights in ([1], [1, -1], [0, 0], [1, float("nan")])),
        ({"fusion": "sum"}, "fusion"),
        ({"rank_constant": -1}, "rank_constant"),
        ({"candidates": 0}, "candidates"),
    ],
)
def test_what_cannot_be_fused_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        HybridRetriever(**{"retrievers": [Fixed(A), Fixed(B)], **options})
