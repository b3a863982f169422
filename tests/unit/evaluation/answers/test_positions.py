from contextlib import nullcontext
from dataclasses import replace

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.assembly.documents import content_key
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError, RerankingError
from rag_posfix.evaluation.answers.experiment import AnswerJournal, PositionRow, summarize_positions
from rag_posfix.evaluation.answers.positions import answer_at_positions, evaluate_positions
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.reranking import GuardedReranker
from rag_posfix.reranking.yes_no import JudgeTemplate, YesNoReranker
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, CountedForwards, tiny_engine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def sweep(engine, examples=EXAMPLES[:2], names=("none", "context_experts"), **options):
    settings = {"gold_positions": [0, 2], "n_documents": 3, "reranker": Alphabetical(), "max_new_tokens": 2}
    return answer_at_positions(engine, examples, [MitigationChoice(name) for name in names], **{**settings, **options})


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

    def test_an_order_invariant_method_is_the_same_at_every_position_and_the_baseline_is_not(self, engine):
        outcomes = sweep(engine, check_orders=True)
        assert not any(o.reused for o in outcomes)

        def at(condition):
            return [o.log_probability for o in outcomes if o.condition == condition and o.question == "0"]

        first, second = at("context_experts")
        assert first == pytest.approx(second, abs=1e-5)
        assert at("none")[0] != pytest.approx(at("none")[1], abs=1e-5)

    def test_the_scorer_sees_the_passages_by_content_wherever_the_gold_passage_stands(self, engine):
        (first, second), names = EXAMPLES[:2], []
        for example in (first, second):
            passages = [*example.gold, *example.distractors[:2]]
            names.append([document.id for document in sorted(passages, key=content_key)])
        for gold_positions in ([0], [2], [1, 0]):
            reranker = Alphabetical()
            sweep(engine, gold_positions=gold_positions, reranker=reranker)
            assert reranker.seen == names

    def test_of_passages_with_equal_scores_the_content_decides_the_rank_of_the_gold_passage(self, engine):
        class Tied(Alphabetical):
            def compress_documents(self, documents, query, callbacks=None):
                tied = [d.model_copy(update={"metadata": {"relevance_score": 0.5}}) for d in documents]
                return tied[:: self.step]

        passages = [*EXAMPLES[0].gold, *EXAMPLES[0].distractors[:2]]
        rank = sorted(passages, key=content_key).index(EXAMPLES[0].gold[0]) + 1
        for step in (1, -1):
            reranker = Tied()
            reranker.step = step
            rows = sweep(engine, EXAMPLES[:1], ("none",), reranker=reranker)
            assert [row.gold_rank for row in rows] == [None, None, rank, rank]

    def test_passages_that_do_not_fit_are_refused(self, engine):
        with pytest.raises(EvaluationError, match=r"question 0: . of 3 passages do not fit"):
            sweep(engine, max_new_tokens=20)

    def test_a_reranker_that_fails_behind_a_guard_is_an_error(self, engine):
        class Failing(BaseDocumentCompressor):
            def compress_documents(self, documents, query, callbacks=None):
                raise RuntimeError

        guarded = GuardedReranker(reranker=Failing())
        with pytest.raises(
            RerankingError, match=f"Failing failed on query '{EXAMPLES[0].id}': reranker Failing failed"
        ):
            sweep(engine, reranker=guarded)


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


class TestExperiment:
    def evaluate(self, engine, **options):
        given = {"gold_positions": [0, 2], "documents": 3, "max_tokens": 2, "reranker": Alphabetical()}
        return evaluate_positions(EXAMPLES[:2], [MitigationChoice("none")], engine=engine, **{**given, **options})

    def test_the_record_has_the_summary_of_its_rows_and_says_what_ran(self, engine):
        record = self.evaluate(engine)
        rows = [PositionRow(**row) for row in record.rows]
        assert record.summary == summarize_positions(rows)
        assert (record.head["kind"], record.head["model"], record.head["dtype"]) == ("positions", "tiny", "float32")
        assert list(record.head["mitigations"]) == ["none"]
        assert record.head["settings"] == {
            "documents": 3, "gold_positions": [0, 2], "limit": None, "skip": 0, "max_tokens": 2,
            "relevance": "Alphabetical", "decoding": "greedy", "check_orders": False, "reuse": False,
            "answers_of_earlier_runs_by": [],
        }  # fmt: skip

    def test_passages_are_reused_by_a_copy_and_the_given_engine_stays_as_it_was(self, engine):
        with CountedForwards(engine) as plain:
            expected = self.evaluate(engine)
        with CountedForwards(engine) as warm:
            found = self.evaluate(engine, reuse=True)
        read = [sum(rows * tokens for rows, tokens in forwards.shapes) for forwards in (plain, warm)]
        assert read[1] < read[0]
        assert engine.passages is None
        assert [row["answer"] for row in found.rows] == [row["answer"] for row in expected.rows]

    @pytest.mark.parametrize("positions", [(0, 0), (0, 1, 0)])
    def test_a_position_that_is_given_twice_is_refused_before_anything_is_asked(self, engine, positions):
        with CountedForwards(engine) as forwards, pytest.raises(ConfigError, match="has a position twice; remove"):
            self.evaluate(engine, gold_positions=positions)
        assert forwards.shapes == []

    def test_progress_is_told_by_step(self, engine):
        seen = []
        self.evaluate(engine, progress=lambda step: nullcontext(lambda done, total: seen.append((step, done, total))))
        assert seen == [("answering", done, 8) for done in range(1, 9)]


class TestJournal:
    def test_a_second_run_computes_nothing_and_finds_the_same(self, engine, tmp_path):
        path = tmp_path / "out" / "journal.jsonl"
        first = sweep(engine, journal=AnswerJournal(path))
        reported = []
        with CountedForwards(engine) as forwards:
            second = sweep(engine, journal=AnswerJournal(path), progress=lambda *at: reported.append(at))
        assert forwards.shapes == []
        assert second == [replace(outcome, reused=True) for outcome in first]
        assert reported == [(done, 12) for done in range(1, 13)]

    def test_answers_of_an_earlier_version_are_graded_again(self, engine, tmp_path):
        path = tmp_path / "journal.jsonl"
        first = sweep(engine, journal=AnswerJournal(path))
        journal = AnswerJournal(path)
        for key, answer in journal.rows().items():
            journal.add(key, replace(answer, accuracy=0.5, accuracy_full_text=0.5))
        assert sweep(engine, journal=AnswerJournal(path)) == [replace(outcome, reused=True) for outcome in first]

    def test_more_questions_positions_and_methods_compute_only_those(self, engine, tmp_path):
        path = tmp_path / "journal.jsonl"
        sweep(engine, EXAMPLES[:1], names=("none",), gold_positions=[0], journal=AnswerJournal(path))
        wider = sweep(engine, journal=AnswerJournal(path))
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
            sweep(engine, check_orders=True, journal=AnswerJournal(path), progress=interrupt)
        resumed = sweep(engine, check_orders=True, journal=AnswerJournal(path))
        assert sum(o.reused for o in resumed) == 7
        whole = sweep(engine, check_orders=True)
        assert [(o.question, o.condition, o.gold_position, o.answer) for o in resumed] == [
            (o.question, o.condition, o.gold_position, o.answer) for o in whole
        ]

    def test_checking_orders_does_not_take_an_answer_for_another_order(self, engine, tmp_path):
        path = tmp_path / "journal.jsonl"
        sweep(engine, journal=AnswerJournal(path))
        checked = sweep(engine, check_orders=True, journal=AnswerJournal(path))
        assert {o.condition for o in checked if not o.reused} == {"context_experts"}
        assert sum(not o.reused for o in checked) == 4

    @pytest.mark.parametrize("guarded", [False, True], ids=["bare", "guarded"])
    @pytest.mark.slow
    def test_passages_that_were_judged_are_not_judged_again(self, engine, tmp_path, guarded):
        template = JudgeTemplate(before="", after="{question}", yes=("y",), no=("n",))

        def forwards(*names, **options):
            judge = YesNoReranker(generator=engine, top_n=2, template=template, **options)
            with CountedForwards(engine) as counted:
                record = evaluate_positions(
                    EXAMPLES[:2], [MitigationChoice(name) for name in names], gold_positions=[0, 2], documents=3,
                    max_tokens=2, engine=engine, out=tmp_path,
                    reranker=GuardedReranker(reranker=judge) if guarded else judge,
                )  # fmt: skip
            return [{**row, "reused": None} for row in record.rows], len(counted.shapes)

        first, _ = forwards("none")
        again, computed = forwards("none")
        assert (again, computed) == (first, 0)
        assert forwards("none", calibrate=False)[1] > 0, "another setting judges anew"


TWO = PositionExample(
    id="two", question="Why2", answers=("so",),
    gold=(Document(page_content="beta", id="g0"), Document(page_content="delta", id="g1")),
    distractors=tuple(Document(page_content=text, id=text) for text in ("alpha", "gamma", "kappa")),
)  # fmt: skip


class Scores(Alphabetical):
    """Gives each passage the score of its text; a passage without one is left out."""

    def __init__(self, **scores):
        super().__init__()
        self.scores = scores

    def compress_documents(self, documents, query, callbacks=None):
        return [
            Document(page_content=d.page_content, id=d.id, metadata={"relevance_score": self.scores[d.page_content]})
            for d in documents
            if d.page_content in self.scores
        ]


class TestTwoGoldPassages:
    @pytest.mark.parametrize(
        ("scores", "rank"),
        [
            ({"beta": 0.9, "delta": 0.8, "alpha": 0.7, "gamma": 0.1}, 2),
            ({"beta": 0.9, "delta": 0.2, "alpha": 0.7, "gamma": 0.1}, 3),
            ({"beta": 0.1, "delta": 0.9, "alpha": 0.7, "gamma": 0.2}, 4),
            ({"beta": 0.9, "alpha": 0.7, "gamma": 0.1}, None),  # the scorer left one out
            ({"alpha": 0.7, "gamma": 0.1}, None),
        ],
    )
    def test_their_rank_is_that_of_the_lower_one(self, engine, scores, rank):
        rows = sweep(
            engine, [TWO], ("none",), gold_positions=[(0, 3), (3, 0)], n_documents=4, reranker=Scores(**scores)
        )
        assert [row.gold_rank for row in rows] == [None, None, rank, rank]
        texts = {"g0": "beta", "g1": "delta", "alpha": "alpha", "gamma": "gamma"}
        for row, given in zip(rows[2:], (("g0", "alpha", "gamma", "g1"), ("g1", "alpha", "gamma", "g0")), strict=True):
            assert row.passages == tuple(name for name in given if texts[name] in scores)

    def test_both_are_read_where_the_gold_passages_alone_are_read(self, engine):
        rows = sweep(
            engine, [TWO], ("none",), gold_positions=[(1, 0)], reranker=Scores(beta=0.5, delta=0.5, alpha=0.5)
        )
        assert [row.passages for row in rows] == [(), ("g0", "g1"), ("g1", "g0", "alpha")]

    def test_the_scorer_ranks_them_first_where_both_are_before_all_others(self):
        # Ranks of the lower one, from 1: question a 2 (both first), b 3, c none. Accuracy at (0, 9), the only place:
        # a 1, b 0, c 1.
        rows = [
            replace(outcome(question, "method", (0, 9), accuracy, -1.0), gold_rank=rank)
            for question, rank, accuracy in (("a", 2, 1.0), ("b", 3, 0.0), ("c", None, 1.0))
        ]
        alone = [outcome(q, "gold_only", None, accuracy, -1.0) for q, accuracy in (("a", 1.0), ("b", 1.0), ("c", 0.0))]
        found = summarize_positions([*alone, *rows])["mitigations"]["method"]
        assert found["by_scorer"] == {
            "gold_first": {"share": 1 / 3, "accuracy": 1.0, "gold_only_accuracy": 1.0},
            "gold_later": {"share": 2 / 3, "accuracy": 0.5, "gold_only_accuracy": 0.5},
        }
        assert [found[f"recall_at_{k}"] for k in (1, 2, 3)] == [0.0, 1 / 3, 2 / 3]

    def test_places_are_in_the_order_of_their_numbers(self):
        rows = [outcome("a", "method", at, 1.0, -1.0) for at in ((10, 0), (2, 9), (2, 10), (0, 9))]
        found = summarize_positions(rows)["mitigations"]["method"]
        assert list(found["positions"]) == ["0+9", "2+9", "2+10", "10+0"]


def outcome(question, condition, position, accuracy, log_probability, answer="same"):
    return PositionRow(
        question=question,
        condition=condition,
        gold_position=position,
        answer=answer,
        accuracy=accuracy,
        accuracy_full_text=1.0,
        log_probability=log_probability,
        seconds=2.0,
    )


OUTCOMES = [
    outcome("a", "closed_book", None, 0.0, -4.0),
    outcome("b", "closed_book", None, 1.0, -2.0),
    outcome("a", "gold_only", None, 1.0, -0.5),
    outcome("b", "gold_only", None, 1.0, -0.25),
    # none: position 0 has accuracy 1 and log-probability -1, position 9 has 0 and -3.
    outcome("a", "none", 9, 0.0, -4.0, "wrong"),
    outcome("b", "none", 9, 0.0, -2.0, "fixed"),
    outcome("a", "none", 0, 1.0, -1.0, "right"),
    outcome("b", "none", 0, 1.0, -1.0, "fixed"),
    # method: 0.5 and -1.5 at position 0, 0.5 and -0.5 at position 9.
    outcome("a", "method", 0, 1.0, -1.0),
    outcome("b", "method", 0, 0.0, -2.0),
    outcome("a", "method", 9, 1.0, -0.5),
    outcome("b", "method", 9, 0.0, -0.5),
]


class TestSummary:
    def test_a_method_has_means_by_position_and_their_worst_mean_and_spread(self):
        methods = summarize_positions(OUTCOMES)["mitigations"]
        none, method = methods["none"], methods["method"]
        assert list(none["positions"]) == ["0", "9"]
        assert none["positions"]["0"] == {
            "accuracy": 1.0, "accuracy_full_text": 1.0, "log_probability": -1.0, "seconds": 2.0
        }  # fmt: skip
        assert (none["positions"]["9"]["accuracy"], none["positions"]["9"]["log_probability"]) == (0.0, -3.0)
        assert (none["worst"], none["mean"], none["spread"]) == (0.0, 0.5, 1.0)
        logs = [none[f"{name}_log_probability"] for name in ("worst", "mean", "spread")]
        assert logs == [-3.0, -2.0, 2.0]
        assert (method["worst"], method["mean"], method["spread"]) == (0.5, 0.5, 0.0)
        assert method["spread_log_probability"] == 1.0
        assert (none["answers_that_change"], method["answers_that_change"]) == (0.5, 0.0)
        # Of the mean over positions. none: every question has 0.5; method: one has 1 and the other 0.
        assert (none["ci95"], method["ci95"]) == ([0.5, 0.5], [0.0, 1.0])

    def test_a_methods_worst_position_is_compared_with_the_best_and_the_worst_of_the_baseline(self):
        methods = summarize_positions(OUTCOMES)["mitigations"]
        versus = methods["method"]["versus_none"]
        # method's worst is -1.5 (position 0), the best of none -1 (position 0).
        assert versus["worst_minus_best_log_probability"] == -0.5
        # Question a alone: -1 - (-1) = 0; question b alone: -2 - (-1) = -1; both: -0.5.
        assert versus["ci95"] == [-1.0, 0.0]
        # Accuracy: method has 0.5 at both positions, none 1 at position 0 and 0 at position 9.
        assert (versus["worst_minus_worst_accuracy"], versus["worst_minus_best_accuracy"]) == (0.5, -0.5)
        # Question a alone: 1 - 0 and 1 - 1; question b alone: 0 - 0 and 0 - 1; both: 0.5 and -0.5.
        assert versus["worst_minus_worst_accuracy_ci95"] == [0.0, 1.0]
        assert versus["worst_minus_best_accuracy_ci95"] == [-1.0, 0.0]
        assert "versus_none" not in methods["none"]
        alone = summarize_positions([o for o in OUTCOMES if o.condition != "none"])["mitigations"]
        assert list(alone) == ["method"]
        assert "versus_none" not in alone["method"]

    def test_mcnemar_compares_the_worst_position_with_the_best_of_the_baseline(self):
        # Six questions. none: all right at position 0, none at 9. method: one right at position 0, all right at 9.
        # The worst of method (0) against the best of none (0): none is right on 5 more and never wrong on another:
        # p = 2 * 1 / 2^5 = 1/16. Against the worst of none one pair would differ (p = 1), from the best of method
        # none (p = 1), or six (p = 2 / 2^6).
        right = {("none", 0): 6, ("none", 9): 0, ("method", 0): 1, ("method", 9): 6}
        rows = [
            outcome(str(q), condition, position, float(q < count), -1.0)
            for (condition, position), count in right.items()
            for q in range(6)
        ]
        versus = summarize_positions(rows)["mitigations"]["method"]["versus_none"]
        assert versus["mcnemar_p"] == 1 / 16
        assert versus["worst_minus_best_accuracy"] == pytest.approx(-5 / 6)
        assert versus["worst_minus_worst_accuracy"] == pytest.approx(1 / 6)

    def test_ranks_of_the_gold_passage_give_recall_and_split_the_questions(self):
        ranked = [replace(row, gold_rank={"a": 2, "b": 4}[row.question]) for row in OUTCOMES]
        none = summarize_positions(ranked)["mitigations"]["none"]
        assert [none[f"recall_at_{k}"] for k in (1, 2, 3)] == [0.0, 0.5, 0.5]
        ranked = [replace(row, gold_rank={"a": 1, "b": 3}[row.question]) for row in OUTCOMES]
        methods = summarize_positions(ranked)["mitigations"]
        # Position 9 is the worst of none: a is wrong there, b too; the gold passage alone is enough for both.
        half = {"share": 0.5, "accuracy": 0.0, "gold_only_accuracy": 1.0}
        assert methods["none"]["by_scorer"] == {"gold_first": half, "gold_later": half}
        # Position 0 is the worst of method: a is right there, and b is not.
        split = methods["method"]["by_scorer"]
        assert (split["gold_first"]["accuracy"], split["gold_later"]["accuracy"]) == (1.0, 0.0)

    def test_floor_ceiling_questions_and_reused_rows_are_reported(self):
        summary = summarize_positions([*OUTCOMES[:-1], replace(OUTCOMES[-1], reused=True)])
        assert (summary["closed_book"]["accuracy"], summary["closed_book"]["log_probability"]) == (0.5, -3.0)
        assert (summary["gold_only"]["accuracy"], summary["gold_only"]["log_probability"]) == (1.0, -0.375)
        assert (summary["n"], summary["reused"], summarize_positions(OUTCOMES)["reused"]) == (2, 1, 0)


def test_answers_of_a_hostile_passage_are_counted(engine, monkeypatch):
    monkeypatch.setattr(
        "rag_posfix.evaluation.answers.positions.best_subspan_em", lambda answer, accepted: len(accepted[0])
    )
    record = evaluate_positions(
        [*EXAMPLES[:2], replace(EXAMPLES[2], answers=("no", "yes"))], [MitigationChoice()], hostile="poison",
        gold_positions=[0, 2], documents=3, engine=engine, reranker=Alphabetical(), max_tokens=2,
    )  # fmt: skip
    # Planted: "no" of the third question for the first two, "so" for the third; each has two letters.
    assert [row["planted"] for row in record.rows] == [None, None, 2, 2] * 3
    assert record.head["summary"]["mitigations"]["none"]["planted"] == 2.0
    assert record.head["settings"]["hostile"] == "poison"
    assert {name for row in record.rows for name in row["passages"] if name.startswith("poison")} == {
        "poison-0", "poison-1", "poison-2",
    }  # fmt: skip


def test_long_passages_are_made_before_questions_are_answered():
    distractors = tuple(Document(letter, id=letter) for letter in "abcde")
    long = [replace(EXAMPLES[0], distractors=distractors)]
    common = {"gold_positions": [0], "joined": 2, "engine": tiny_engine(512), "reranker": Alphabetical()}
    record = evaluate_positions(long, [MitigationChoice()], documents=3, max_tokens=2, **common)
    assert record.head["settings"]["joined"] == 2
    assert {name for row in record.rows for name in row["passages"]} == {EXAMPLES[0].gold[0].id, "b+c", "d+e"}
    with pytest.raises(EvaluationError, match="documents=4 must be between 1 and 3"):
        evaluate_positions(long, [MitigationChoice()], documents=4, **common)
