"""Rankings, their journal, and rerankers that make them."""

import json
import math

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.errors import ConfigError, EvaluationError, RerankingError, UnknownNameError
from rag_posfix.evaluation.ranking.rankings import (
    OpenedReranker,
    QueryCandidates,
    RankedTopics,
    Ranking,
    RankJournal,
    RerankerChoice,
    check_rerankers,
    checked_ranking,
    count_work,
    local_ranker,
    open_reranker,
    relevance,
    rerank,
    rerank_key,
    rerank_one,
)
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.reranking import GuardedReranker
from rag_posfix.reranking.build import RerankerModels
from tests.support.attention_hook import count_hooks
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.rerank_data import ByLength
from tests.support.tiny_evaluation import tiny_engine
from tests.support.toy_encoder import ToyEncoder


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


def queries(count=4):
    return [QueryCandidates(f"q{n}", f"question {n}", documents("some words", "words", f"w{n}")) for n in range(count)]


def opened(reranker=None, identity="by length"):
    return OpenedReranker("toy", identity, reranker or ByLength())


class TestOneQuery:
    def test_documents_are_ranked_by_score_and_timed(self):
        found = rerank_one(opened(), queries()[0])
        assert found.ids == ("d2", "d1", "d0")
        assert found.scores == (1 / 2, 1 / 5, 1 / 10)
        assert found.seconds > 0
        assert (found.calls, found.forward_passes, found.tokens_read) == (None, 0, 0)

    def test_without_candidates_the_reranker_is_not_asked(self):
        reranker = ByLength()
        assert rerank_one(opened(reranker), QueryCandidates("q", "why", ())) == Ranking((), (), 0.0)
        assert reranker.asked == []

    def test_a_reranker_that_changes_what_it_is_given_changes_nothing_for_the_next(self):
        class Careless(ByLength):
            def compress_documents(self, documents, query, callbacks=None):
                for document in documents:
                    document.metadata["relevance_score"] = 1.0
                    document.page_content = "x"
                return list(documents)

        candidates = queries()[0]
        rerank_one(opened(Careless()), candidates)
        assert [d.page_content for d in candidates.documents] == ["some words", "words", "w0"]
        assert {d.metadata["relevance_score"] for d in candidates.documents} == {0.5}

    def test_a_guard_does_not_hide_a_failure_behind_the_scores_of_the_first_stage(self):
        class Failing(BaseDocumentCompressor):
            def compress_documents(self, documents, query, callbacks=None):
                raise RuntimeError("two devices")

        with pytest.raises(RerankingError, match=r"toy failed on query 'q0' \(RuntimeError: two devices\);"):
            rerank_one(opened(Failing()), queries()[0])
        guarded = opened(GuardedReranker(reranker=Failing()))
        with pytest.raises(RerankingError, match=r"toy failed on query 'q0': reranker Failing failed \(Runt"):
            rerank_one(guarded, queries()[0])

    def test_answers_that_a_reranker_asked_for_are_counted_per_query(self):
        class Asking(ByLength):
            generations: int = 5

            def compress_documents(self, documents, query, callbacks=None):
                self.generations += 3
                return super().compress_documents(documents, query)

        reranker = opened(Asking())
        assert [rerank_one(reranker, one).calls for one in queries()[:2]] == [3, 3]


class TestWork:
    def test_forward_passes_and_tokens_of_an_engine_are_counted_and_the_model_is_left_alone(self):
        import torch

        engine = tiny_engine()
        hooks = count_hooks(engine.loaded.model)
        with count_work(engine) as work, torch.no_grad():
            for width in (3, 5):
                engine.loaded.model(input_ids=torch.ones((2, width), dtype=torch.long))
        assert (work.forward_passes, work.tokens) == (2, 16)
        assert count_hooks(engine.loaded.model) == hooks


class TestNames:
    def test_a_name_a_parameter_and_a_value_are_checked_without_making_anything(self):
        check_rerankers([RerankerChoice("embedding", {"top_n": 3})])
        with pytest.raises(UnknownNameError, match="unknown reranker 'embeding'"):
            check_rerankers([RerankerChoice("embeding")])
        with pytest.raises(ConfigError, match=r"embedding has no parameter 'topn'\. Did you mean 'top_n'"):
            check_rerankers([RerankerChoice("embedding", {"topn": 3})])
        with pytest.raises(ConfigError, match="embedding: top_n=0 must be a whole number >= 1, or None"):
            check_rerankers([RerankerChoice("embedding", {"top_n": 0})])

    def test_one_reranker_twice_is_refused_and_with_other_parameters_it_is_another(self):
        check_rerankers([RerankerChoice("embedding"), RerankerChoice("embedding", {"top_n": 3})])
        with pytest.raises(ConfigError, match="reranker 'embedding:top_n=3' occurs twice"):
            check_rerankers([RerankerChoice("embedding", {"top_n": 3})] * 2)

    def test_the_identity_is_of_name_parameters_and_model(self):
        def identity(parameters=None, model="letters:26"):
            parts = RerankerModels(
                embeddings=lambda: LetterEmbeddings(model), generator=lambda: pytest.fail("not needed")
            )
            return open_reranker(RerankerChoice("embedding", parameters or {}), parts).identity

        assert identity() == identity() == identity({"top_n": None})
        assert len({identity(), identity({"top_n": 3}), identity(model="another")}) == 3

    @pytest.mark.parametrize("name", ["cross_encoder", "fused"])
    def test_the_identity_is_of_the_weights_in_a_folder_that_is_named(self, name, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"before")
        model = f"cross_encoder:model={tmp_path}"
        parameters = {"model": str(tmp_path)} if name == "cross_encoder" else {"scorers": [model, "embedding"]}

        def identity():
            parts = RerankerModels(embeddings=LetterEmbeddings, generator=lambda: FakeGenerator(ToyEncoder()))
            return open_reranker(RerankerChoice(name, parameters), parts).identity

        before = identity()
        assert identity() == before
        (tmp_path / "model.safetensors").write_bytes(b"after!")  # trained again
        assert identity() != before


class TestResuming:
    def test_an_interrupted_run_continues_and_asks_nothing_twice(self, tmp_path):
        path, asked = tmp_path / "journal.jsonl", []
        with pytest.raises(KeyboardInterrupt):
            rerank(local_ranker(opened(ByLength(asked=asked, fail_on="question 2"))), queries(), RankJournal(path))
        first = ByLength()
        found = rerank(local_ranker(opened(first)), queries(), RankJournal(path))
        assert first.asked == ["question 2", "question 3"]
        assert found.reused == {"q0", "q1"}
        whole = rerank(local_ranker(opened()), queries(), RankJournal())
        assert [(r.ids, r.scores) for r in found.rankings.values()] == [
            (r.ids, r.scores) for r in whole.rankings.values()
        ]
        assert list(found.rankings) == ["q0", "q1", "q2", "q3"]

    def test_another_setting_or_a_fresh_journal_takes_nothing_over(self, tmp_path):
        path = tmp_path / "journal.jsonl"
        rerank(local_ranker(opened()), queries(), RankJournal(path))
        for other, fresh in [(opened(identity="by length, reversed"), False), (opened(), True)]:
            found = rerank(local_ranker(other), queries(), RankJournal(path, fresh=fresh))
            assert found.reused == frozenset()
            assert other.reranker.asked == [f"question {n}" for n in range(4)]
