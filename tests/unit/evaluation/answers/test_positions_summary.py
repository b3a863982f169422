import itertools
from dataclasses import replace

from rag_posfix.evaluation.answers.positions_summary import Outcome, summarize


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

    def test_accuracy_is_compared_with_the_worst_and_the_best_place_of_the_baseline(self):
        versus = summarize(OUTCOMES)["mitigations"]["method"]["versus_none"]
        # method has 0.5 at both places, none 1 at place 0 and 0 at place 9.
        assert versus["worst_minus_worst_accuracy"] == 0.5
        assert versus["worst_minus_best_accuracy"] == -0.5
        # Question a alone: 1 - 0 and 1 - 1; question b alone: 0 - 0 and 0 - 1; both: 0.5 and -0.5.
        assert versus["worst_minus_worst_accuracy_ci95"] == [0.0, 1.0]
        assert versus["worst_minus_best_accuracy_ci95"] == [-1.0, 0.0]

    def test_rows_that_were_known_are_counted(self):
        assert summarize(OUTCOMES)["reused"] == 0
        assert summarize([*OUTCOMES[:-1], replace(OUTCOMES[-1], reused=True)])["reused"] == 1

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
