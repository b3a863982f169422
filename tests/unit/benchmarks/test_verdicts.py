"""The verdict without labels against the verdict with labels, on answers that are counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.verdicts import LARGE_DEFAULTS, answered_alone, compare, main, rank_correlation, unseen
from rag_posfix.evaluation.answers.experiment import PositionRow
from rag_posfix.evaluation.record import read_head

EXPERTS = "context_experts:contrast=0.3:relevance=both"
GOLD = (0, 4, 9)
CORRECT = {"a": "seven", "b": "nine"}
ANSWERS = {
    "none": {"a": ("six", "six", "Seven."), "b": ("ten", "nine", "the nine")},
    "plain": {"a": ("six",) * 3, "b": ("nine",) * 3},
    EXPERTS: {"a": ("seven",) * 3, "b": ("nine",) * 3},
    "committee": {"a": ("two",) * 3, "b": ("two",) * 3},
}
"""Answers by arrangement, kind of question and position."""


def row(question, condition, position, answer):
    accuracy = float(CORRECT[question[0]] in answer.lower())
    place = {"question": question, "condition": condition, "gold_position": position}
    return PositionRow(answer, accuracy, accuracy, -1.0, 2.0, **place)


def rows(names=tuple(ANSWERS), questions=("a1", "a2", "a3", "b1", "b2", "b3")):
    answers = [
        row(question, name, position, answer)
        for name in names
        for question in questions
        for position, answer in zip(GOLD, ANSWERS[name][question[0]], strict=True)
    ]
    return answers + [row(question, "gold_only", None, "seven") for question in questions]


def test_both_verdicts_have_the_values_that_are_counted_by_hand():
    arrangements = compare(rows())["arrangements"]
    # none is right at 0: never, at 4: b, at 9: both; its usual answers are six and nine, two of three of its own.
    assert arrangements["none"] == pytest.approx({"worst": 0, "mean": 0.5, "stable": 0, "agreement": 2 / 3})
    assert arrangements["plain"] == {"worst": 0.5, "mean": 0.5, "stable": 1, "agreement": 1}
    assert arrangements[EXPERTS] == {"worst": 1, "mean": 1, "stable": 1, "agreement": 0.5}
    assert arrangements["committee"] == {"worst": 0, "mean": 0, "stable": 1, "agreement": 0}


def test_rank_correlations_are_of_the_pairs_and_the_stable_ones_are_ranked_by_agreement():
    result = compare(rows())
    # Ranks of none, plain, experts, committee: 2 3 4 1 with labels, 1 4 3 2 without: 1 - 6 * 4 / (4 * 15).
    # Five of the 24 permutations are as high, twice that in both directions.
    assert result["correlation"] == pytest.approx({"spearman": 0.6, "p": 10 / 24, "n": 4})
    # Of plain, experts, committee: 2 3 1 and 3 2 1: 1 - 6 * 2 / (3 * 8).
    assert result["correlation_of_stable"]["spearman"] == pytest.approx(0.5)
    assert (result["stable"], result["stable_worst"]) == (3, 0.5)


def test_choices_without_labels_are_scored_with_labels():
    result = compare(rows())
    assert (result["best_with_labels"], result["chosen_without_labels"]) == (EXPERTS, EXPERTS)
    # plain is right on b alone: half below experts; none is right on none of them at its worst position.
    assert result["nearest_to_none"] == "plain"
    assert result["nearest_minus_none"]["accuracy"] == 0.5
    assert result["chosen_minus_none"]["accuracy"] == 1
    other = compare(rows(("none", "plain", "committee")))  # without the default the cheapest, here the first of equals
    assert (other["chosen_without_labels"], other["chosen_minus_best"]["accuracy"]) == ("plain", 0)


def test_the_filter_keeps_questions_that_are_right_from_the_gold_passage_alone():
    kept = answered_alone(rows())
    assert {row.question for row in kept} == {"a1", "a2", "a3"}
    assert compare(kept)["arrangements"]["plain"]["worst"] == 0
    assert answered_alone([row for row in rows() if row.condition != "gold_only"]) == []


def test_two_arrangements_and_equal_ranks_have_no_rank_correlation():
    assert compare(rows(("none", "plain")))["correlation"] is None
    ranks = {"none": (0.0, 0.5), "plain": (0.5, 0.5), EXPERTS: (1.0, 1.0)}
    assert rank_correlation(ranks, dict.fromkeys(ranks, (1.0, 0.2)), list(ranks)) is None


def questions(a, b):
    return [f"a{number}" for number in range(a)] + [f"b{number}" for number in range(b)]


def test_auto_on_unseen_questions_has_the_accuracies_that_are_counted_by_hand():
    result = unseen(rows(questions=questions(6, 6)))
    # All answers of none change, and experts is right where none is wrong, so every five sixths choose it.
    assert (result["questions"], result["chosen"], result["better"]) == (12, {EXPERTS: 6}, 6)
    accuracy = {name: result["accuracy"][f"none_{name}"] for name in ("worst", "mean", "best")}
    assert accuracy == pytest.approx({"worst": 0, "mean": 0.5, "best": 1})  # at 0, over 0 0 1 and 0 1 1, at 9
    assert {result["accuracy"][f"auto_{name}"] for name in accuracy} == {1}
    minus = {name: difference["accuracy"] for name, difference in result["auto_minus"].items()}
    assert minus == pytest.approx(
        {
            "none_worst": 1,
            "none_mean": 0.5,
            "none_best": 0,
            "only_better_worst": 0,
            "default_worst": 0,
            "oracle_worst": 0,
        }
    )


def test_an_arrangement_is_not_chosen_by_the_questions_that_it_answers():
    result = unseen(rows(("none", "plain"), questions(0, 6)))
    # none is wrong at 0 on all six; five of them have p = 2 / 2^5 = .06: nothing is better.
    assert (result["chosen"], result["better"], result["oracle"]) == ({"none": 6}, 0, "plain")
    assert result["auto_minus"]["oracle_worst"]["accuracy"] == -1


@pytest.mark.parametrize("record", ["positions-qwen15-litm-10", "positions-qwen15-litm-20"], ids=["name", "file"])
@pytest.mark.slow
def test_a_large_reader_has_its_own_default_however_its_weights_were_named(record, tmp_path):
    main(["--out", str(tmp_path / "verdicts.json"), f"kept={record}"])
    kept = read_head(tmp_path / "verdicts.json")["summary"]["kept"]
    assert kept["all"]["chosen_without_labels"] == LARGE_DEFAULTS["Qwen2.5-Coder-1.5B-Instruct"]
