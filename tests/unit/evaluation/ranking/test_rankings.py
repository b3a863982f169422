import json
import math

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.ranking.rankings import (
    QueryCandidates,
    RankedTopics,
    Ranking,
    RankJournal,
    checked_ranking,
    relevance,
    rerank_key,
)


def documents(*texts, score=0.5):
    return tuple(
        Document(id=f"d{index}", page_content=text, metadata={"relevance_score": score})
        for index, text in enumerate(texts)
    )


class TestChecks:
    given = documents("a", "b")

    def scored(self, *pairs):
        return [Document(id=name, page_content="x", metadata={"relevance_score": score}) for name, score in pairs]

    def test_the_score_orders_and_equal_scores_stay_as_returned(self):
        returned = self.scored(("d1", 0.5), ("d0", 0.5))
        assert checked_ranking("toy", "q", self.given, returned) == (("d1", "d0"), (0.5, 0.5))
        returned = self.scored(("d1", 0), ("d0", 1))
        assert checked_ranking("toy", "q", self.given, returned) == (("d0", "d1"), (1.0, 0.0))

    def test_documents_may_be_left_out(self):
        assert checked_ranking("toy", "q", self.given, self.scored(("d1", 1.0))) == (("d1",), (1.0,))
        assert checked_ranking("toy", "q", self.given, []) == ((), ())

    @pytest.mark.parametrize("score", [math.nan, math.inf, None, "1", True])
    def test_a_score_that_is_no_finite_number_is_refused(self, score):
        with pytest.raises(EvaluationError, match=r"toy scored document 'd0' of query 'q' .*; .* must be a finite"):
            checked_ranking("toy", "q", self.given, self.scored(("d0", score)))

    def test_a_document_that_was_not_given_or_comes_twice_is_refused(self):
        with pytest.raises(EvaluationError, match="toy returned document 'x' of query 'q' that it was not given"):
            checked_ranking("toy", "q", self.given, self.scored(("x", 1.0)))
        with pytest.raises(EvaluationError, match="toy returned document 'd0' of query 'q' twice"):
            checked_ranking("toy", "q", self.given, self.scored(("d0", 1.0), ("d0", 1.0)))

    def test_scores_become_relevance_between_0_and_1_in_the_same_order(self):
        assert relevance([0.75, 0.0]) == [0.75, 0.0]
        assert relevance([20.0, 5.0, 0.0]) == [1.0, 0.25, 0.0]
        assert relevance([-1.0, -2.0]) == [1.0, 0.5]
        assert relevance([]) == []


class TestJournal:
    ranking = Ranking(("a", "b"), (0.1 + 0.2, 1e-17), 0.25, 3, 4, 5)

    def test_a_ranking_is_the_same_after_it_was_written_and_read(self, tmp_path):
        path = tmp_path / "new" / "journal.jsonl"
        RankJournal(path).add("k", self.ranking)
        RankJournal(path).add("l", Ranking((), (), 0.0))
        again = RankJournal(path)
        assert again.get("k") == self.ranking
        assert again.get("l") == Ranking((), (), 0.0)

    @pytest.mark.parametrize(
        "changes",
        [{"ids": ["a"]}, {"ids": [1, 2]}, {"scores": [1, None]}, {"seconds": None}, {"calls": "1"}, {"more": 1}],
    )
    def test_a_row_that_says_something_else_counts_as_absent(self, tmp_path, changes):
        path = tmp_path / "journal.jsonl"
        RankJournal(path).add("k", self.ranking)
        line = json.loads(path.read_text())
        line["ranking"].update(changes)
        path.write_text(json.dumps(line) + "\n")
        assert RankJournal(path).get("k") is None

    def test_all_that_a_ranking_depends_on_changes_the_key(self):
        base = QueryCandidates("q", "why", documents("a", "b"))
        renamed = (base.documents[0].model_copy(update={"id": "x"}), base.documents[1])
        titled = (base.documents[0].model_copy(update={"metadata": {"title": "t", "relevance_score": 0.5}}),)
        keys = [
            rerank_key("toy", base),
            rerank_key("toy 2", base),
            rerank_key("toy", QueryCandidates("q", "how", base.documents)),
            rerank_key("toy", QueryCandidates("q", "why", base.documents[::-1])),
            rerank_key("toy", QueryCandidates("q", "why", base.documents[:1])),
            rerank_key("toy", QueryCandidates("q", "why", documents("a", "c"))),
            rerank_key("toy", QueryCandidates("q", "why", documents("a", "b", score=0.25))),
            rerank_key("toy", QueryCandidates("q", "why", renamed)),
            rerank_key("toy", QueryCandidates("q", "why", titled)),
        ]
        assert len(set(keys)) == len(keys)
        assert rerank_key("toy", QueryCandidates("another name", "why", base.documents)) == keys[0]


def test_a_run_that_is_written_falls_within_each_query_and_leaves_empty_queries_out():
    rankings = {"1": Ranking(("b", "a"), (0.5, 0.5), 0.0), "2": Ranking((), (), 0.0)}
    assert RankedTopics("toy", rankings, frozenset()).run() == {"1": {"b": 0.5, "a": 0.499999}}
