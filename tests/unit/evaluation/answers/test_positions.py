from dataclasses import replace

import pytest

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.answer_journal import Journal
from rag_posfix.evaluation.answers.positions import sweep_positions
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, CountedForwards, tiny_engine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def sweep(engine, examples=EXAMPLES[:2], names=("none", "context_experts"), **options):
    settings = {"gold_positions": [0, 2], "n_documents": 3, "reranker": Alphabetical(), "max_new_tokens": 2}
    return sweep_positions(engine, examples, [MitigationChoice(name) for name in names], **{**settings, **options})


class TestSweep:
    def test_every_question_is_answered_under_every_condition(self, engine):
        reported = []
        outcomes = sweep(engine, progress=lambda done, total: reported.append((done, total)))
        assert [(o.condition, o.gold_position) for o in outcomes[:6]] == [
            ("closed_book", None),
            ("gold_only", None),
            ("none", 0),
            ("context_experts", 0),
            ("none", 2),
            ("context_experts", 2),
        ]
        assert [o.question for o in outcomes] == ["0"] * 6 + ["1"] * 6
        assert reported == [(done, 12) for done in range(1, 13)]
        assert all(o.log_probability < 0 and o.seconds > 0 for o in outcomes)

    def test_an_order_invariant_method_is_the_same_at_every_place_and_the_baseline_is_not(self, engine):
        outcomes = sweep(engine, check_orders=True)
        assert not any(o.reused for o in outcomes)

        def at(condition):
            return [o.log_probability for o in outcomes if o.condition == condition and o.question == "0"]

        first, second = at("context_experts")
        assert first == pytest.approx(second, abs=1e-5)
        assert at("none")[0] != pytest.approx(at("none")[1], abs=1e-5)

    def test_passages_are_scored_once_per_question_in_one_order(self, engine):
        reranker = Alphabetical()
        sweep(engine, reranker=reranker)
        assert reranker.seen == [["g0", "d00", "d01"], ["g1", "d10", "d11"]]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"n_documents": 5}, "documents=5 must be between 1 and 4"),
            ({"gold_positions": [3]}, "gold position 3 must be between 0 and 2"),
            ({"max_new_tokens": 20}, "question 0: . of 3 passages do not fit or repeat"),
        ],
    )
    def test_what_cannot_be_asked_is_refused(self, engine, options, message):
        with pytest.raises(EvaluationError, match=message):
            sweep(engine, **options)


class TestReuse:
    def test_a_method_that_ignores_the_order_answers_a_question_once(self, engine):
        outcomes = sweep(engine, names=("none", "context_experts", "parallel_windows"))
        reused = [(o.condition, o.gold_position) for o in outcomes if o.reused]
        assert reused == [("context_experts", 2), ("parallel_windows", 2)] * 2
        experts = [o for o in outcomes if o.condition == "context_experts" and o.question == "1"]
        assert [(o.answer, o.log_probability, o.seconds) for o in experts[:1]] == [
            (o.answer, o.log_probability, o.seconds) for o in experts[1:]
        ]
        assert [o.gold_position for o in experts] == [0, 2]

    def test_what_is_reused_is_what_would_have_been_computed(self, engine):
        for ours, theirs in zip(sweep(engine), sweep(engine, check_orders=True), strict=True):
            assert ours.log_probability == pytest.approx(theirs.log_probability, abs=1e-5)
            assert ours.answer == theirs.answer

    def test_questions_beyond_the_first_eight_are_answered_too(self, engine):
        many = [replace(EXAMPLES[n % 3], id=str(n), question=f"Wh{n:02}") for n in range(11)]
        outcomes = sweep(engine, many, gold_positions=[1])
        assert [o.question for o in outcomes] == [str(n) for n in range(11) for _ in range(4)]
        alone = sweep(engine, many[9:10], gold_positions=[1])
        for ours, theirs in zip(outcomes[36:40], alone, strict=True):
            assert ours.answer == theirs.answer
            assert ours.log_probability == pytest.approx(theirs.log_probability, abs=1e-5)


class TestJournal:
    def test_a_second_run_computes_nothing_and_finds_the_same(self, engine, tmp_path):
        path = tmp_path / "out" / "journal.jsonl"
        first = sweep(engine, journal=Journal(path))
        reported = []
        with CountedForwards(engine) as forwards:
            second = sweep(engine, journal=Journal(path), progress=lambda *at: reported.append(at))
        assert forwards.shapes == []
        assert second == [replace(outcome, reused=True) for outcome in first]
        assert reported == [(done, 12) for done in range(1, 13)]

    def test_more_questions_places_and_methods_compute_only_those(self, engine, tmp_path):
        path = tmp_path / "journal.jsonl"
        sweep(engine, EXAMPLES[:1], names=("none",), gold_positions=[0], journal=Journal(path))
        wider = sweep(engine, journal=Journal(path))
        assert [(o.condition, o.gold_position) for o in wider[:6] if o.reused] == [
            ("closed_book", None), ("gold_only", None), ("none", 0), ("context_experts", 2),
        ]  # fmt: skip
        assert [(o.condition, o.gold_position) for o in wider[6:] if o.reused] == [("context_experts", 2)]

    def test_an_interrupted_run_goes_on_where_it_was(self, engine, tmp_path):
        path = tmp_path / "journal.jsonl"

        def interrupt(done, total):
            if done == 7:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sweep(engine, check_orders=True, journal=Journal(path), progress=interrupt)
        resumed = sweep(engine, check_orders=True, journal=Journal(path))
        assert sum(o.reused for o in resumed) == 7
        whole = sweep(engine, check_orders=True)
        assert [(o.question, o.condition, o.gold_position, o.answer) for o in resumed] == [
            (o.question, o.condition, o.gold_position, o.answer) for o in whole
        ]

    def test_checking_orders_does_not_take_an_answer_for_another_order(self, engine, tmp_path):
        path = tmp_path / "journal.jsonl"
        sweep(engine, journal=Journal(path))
        checked = sweep(engine, check_orders=True, journal=Journal(path))
        assert {o.condition for o in checked if not o.reused} == {"context_experts"}
        assert sum(not o.reused for o in checked) == 4
