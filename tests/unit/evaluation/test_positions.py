import itertools

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.datasets import PositionExample
from rag_posfix.evaluation.positions import Outcome, answer_and_score, label, summarize, sweep_positions
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.request import MitigationChoice
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder


def outcome(question, condition, position, accuracy, log_probability, answer="same"):
    return Outcome(
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
    # none: place 0 has accuracy 1 and log-probability -1, place 9 has 0 and -3.
    outcome("a", "none", 9, 0.0, -4.0, "wrong"),
    outcome("b", "none", 9, 0.0, -2.0, "fixed"),
    outcome("a", "none", 0, 1.0, -1.0, "right"),
    outcome("b", "none", 0, 1.0, -1.0, "fixed"),
    # method: 0.5 and -1.5 at place 0, 0.5 and -0.5 at place 9.
    outcome("a", "method", 0, 1.0, -1.0),
    outcome("b", "method", 0, 0.0, -2.0),
    outcome("a", "method", 9, 1.0, -0.5),
    outcome("b", "method", 9, 0.0, -0.5),
]


class TestSummary:
    def test_each_place_has_its_means_in_the_order_of_the_places(self):
        positions = summarize(OUTCOMES)["mitigations"]["none"]["positions"]
        assert list(positions) == ["0", "9"]
        assert positions["0"] == {
            "accuracy": 1.0, "accuracy_full_text": 1.0, "log_probability": -1.0, "seconds": 2.0
        }  # fmt: skip
        assert (positions["9"]["accuracy"], positions["9"]["log_probability"]) == (0.0, -3.0)

    def test_worst_mean_and_spread_are_those_of_the_places(self):
        none = summarize(OUTCOMES)["mitigations"]["none"]
        assert (none["worst"], none["mean"], none["spread"]) == (0.0, 0.5, 1.0)
        assert none["worst_log_probability"] == -3.0
        assert none["mean_log_probability"] == -2.0
        assert none["spread_log_probability"] == 2.0
        method = summarize(OUTCOMES)["mitigations"]["method"]
        assert (method["worst"], method["mean"], method["spread"]) == (0.5, 0.5, 0.0)
        assert method["spread_log_probability"] == 1.0

    def test_answers_that_change_are_counted_by_question(self):
        found = summarize(OUTCOMES)["mitigations"]
        assert (found["none"]["answers_that_change"], found["method"]["answers_that_change"]) == (0.5, 0.0)

    def test_the_interval_is_that_of_the_mean_over_places(self):
        found = summarize(OUTCOMES)["mitigations"]
        # none: every question has mean accuracy 0.5; method: one has 1 and the other 0.
        assert found["none"]["ci95"] == [0.5, 0.5]
        assert found["method"]["ci95"] == [0.0, 1.0]

    def test_a_methods_worst_place_is_compared_with_the_best_of_the_baseline(self):
        found = summarize(OUTCOMES)["mitigations"]
        # method's worst is -1.5 (place 0), the best of none -1 (place 0).
        versus = found["method"]["versus_none"]
        assert versus["worst_minus_best_log_probability"] == -0.5
        # Question a alone: -1 - (-1) = 0; question b alone: -2 - (-1) = -1; both: -0.5.
        assert versus["ci95"] == [-1.0, 0.0]
        assert "versus_none" not in found["none"]

    def test_floor_ceiling_and_count_are_reported(self):
        summary = summarize(OUTCOMES)
        assert (summary["closed_book"]["accuracy"], summary["closed_book"]["log_probability"]) == (0.5, -3.0)
        assert (summary["gold_only"]["accuracy"], summary["gold_only"]["log_probability"]) == (1.0, -0.375)
        assert summary["n"] == 2

    def test_without_the_baseline_nothing_is_compared(self):
        summary = summarize([o for o in OUTCOMES if o.condition != "none"])
        assert list(summary["mitigations"]) == ["method"]
        assert "versus_none" not in summary["mitigations"]["method"]

    def test_the_order_of_the_outcomes_does_not_matter_to_the_means(self):
        for some in itertools.islice(itertools.permutations(OUTCOMES[4:8]), 6):
            none = summarize([*OUTCOMES[:4], *some])["mitigations"]["none"]
            assert (none["worst"], none["mean"], none["mean_log_probability"]) == (0.0, 0.5, -2.0)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (MitigationChoice("none"), "none"),
        (MitigationChoice("x", {"b": 1, "a": "two"}), "x:a=two:b=1"),
    ],
)
def test_a_label_is_what_the_command_line_reads(choice, expected):
    assert label(choice) == expected


class Alphabetical:
    """Scores by the passage, never by which is gold; answers best first."""

    def __init__(self):
        self.seen = []

    def compress_documents(self, documents, query, callbacks=None):
        self.seen.append([d.id for d in documents])
        return [
            Document(page_content=d.page_content, id=d.id, metadata={**d.metadata, "relevance_score": 1 / (2 + i)})
            for i, d in enumerate(sorted(documents, key=lambda d: d.page_content))
        ]


EXAMPLES = [
    PositionExample(
        id=str(n),
        question="Why?",
        answers=("so",),
        gold=Document(page_content=f"gold {n}", id=f"g{n}"),
        distractors=tuple(Document(page_content=f"other {n}{i}", id=f"d{n}{i}") for i in range(3)),
    )
    for n in range(2)
]


@pytest.fixture(scope="module")
def engine():
    loaded = loaded_model(vocab_size=ToyEncoder.vocab_size, max_position_embeddings=180)
    return Engine(loaded, ToyEncoder(), "tiny", "print")


def sweep(engine, **options):
    settings = {"gold_positions": [0, 2], "n_documents": 3, "reranker": Alphabetical(), "max_new_tokens": 2}
    choices = [MitigationChoice("none"), MitigationChoice("context_experts")]
    return sweep_positions(engine, EXAMPLES, choices, **{**settings, **options})


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
        outcomes = sweep(engine)

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


def test_answering_and_scoring_share_one_reading(engine):
    from rag_posfix.assembly.assembler import Assembler

    layout = Assembler(engine.encoder, 180).assemble("Why?", [EXAMPLES[0].gold], max_new_tokens=2).layout
    seen = []
    handle = engine.loaded.model.register_forward_pre_hook(
        lambda module, arguments, keywords: seen.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    generation, score = answer_and_score(engine, layout, MitigationChoice("none"), "so", 2)
    handle.remove()
    # The prompt, one token to score two, one token to generate two.
    assert seen == [len(layout.token_ids), 1, 1]
    assert len(generation.token_ids) == 2
    assert score == pytest.approx(engine.score(layout, [ord("s"), ord("o")]), abs=1e-5)
