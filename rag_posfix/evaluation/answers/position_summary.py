"""Rows of the position experiment, and their summary: per position, worst, mean, spread, and against ``none``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.evaluation.answers.answer_form import summarize_form
from rag_posfix.evaluation.answers.verdict import not_measured, position_verdicts
from rag_posfix.evaluation.data.position_example import GoldPosition, position_label
from rag_posfix.evaluation.statistics import bootstrap_interval, mcnemar_p, mean, mean_if_known

CLOSED_BOOK = "closed_book"
GOLD_ONLY = "gold_only"


@dataclass(frozen=True, slots=True)
class PositionRow:
    """One answer to one question under one condition.

    Attributes:
        question: The question's id.
        condition: Label of the arrangement, ``closed_book`` or ``gold_only``.
        gold_position: Position of the gold passage, positions of several; None without distractors.
        answer: The generated answer.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer; None from a generator that does
            not score given answers.
        seconds: Time of the prefill, plus a share of the time to generate its batch.
        reused: Whether the answer was not computed for this row. It is from the journal, or from another order of the
            same passages under an order-free arrangement.
        gold_rank: Rank of the gold passage among the scored ones, from 1; of several the lowest. None if the reranker
            left one out, and without distractors.
        asked: The text of the question.
        accepted: The accepted answers.
        passages: Ids of the passages as they were given.
    """

    question: str
    condition: str
    gold_position: GoldPosition | None
    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float | None
    seconds: float
    reused: bool = False
    gold_rank: int | None = None
    asked: str = ""
    accepted: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()


def summarize_positions(rows: Sequence[PositionRow]) -> dict[str, Any]:
    """Return accuracy and log-probability per gold position, worst, mean, spread (max - min) and intervals.

    ``ci95`` is the interval of the mean accuracy over positions. ``versus_none`` compares each method's worst position
    with the baseline's best and worst, questions paired: ``worst_minus_best_log_probability`` with its interval
    ``ci95``, and the same of accuracy, each with an interval of its own; ``mcnemar_p`` is the chance of such a
    difference in accuracy between these two positions if there were none. ``sound`` and ``repeats`` are shares of
    answers (``answer_form``), ``recall_at_k`` is that of the scorer. ``by_scorer`` splits the questions by whether the
    scorer ranks the gold passage first (of several: before all others), with the accuracy at the worst position and
    that of the gold passage alone. ``reused`` counts the rows that were not computed anew. What the generator does not
    tell is None, and ``not_measured`` says why.
    """
    conditions = list(dict.fromkeys(row.condition for row in rows if row.gold_position is not None))
    tables = {name: _by_position(rows, name) for name in conditions}
    result: dict[str, Any] = {name: _summary(table) for name, table in tables.items()}
    alone = {row.question: row.accuracy for row in rows if row.condition == GOLD_ONLY}
    for name, table in tables.items():
        result[name]["by_scorer"] = _by_scorer(table, alone)
    if "none" in tables:
        for name, table in tables.items():
            if name != "none":
                result[name]["versus_none"] = _versus(table, tables["none"])
    return {
        "mitigations": result,
        "verdict": position_verdicts(result),
        CLOSED_BOOK: _scores([row for row in rows if row.condition == CLOSED_BOOK]),
        GOLD_ONLY: _scores([row for row in rows if row.condition == GOLD_ONLY]),
        "n": len({row.question for row in rows}),
        "reused": sum(row.reused for row in rows),
        **not_measured([row.log_probability for row in rows]),
    }


def _by_position(rows: Sequence[PositionRow], condition: str) -> dict[GoldPosition, list[PositionRow]]:
    table: dict[GoldPosition, list[PositionRow]] = {}
    for row in rows:
        if row.condition == condition and row.gold_position is not None:
            table.setdefault(row.gold_position, []).append(row)
    return dict(sorted(table.items(), key=lambda item: item[0] if isinstance(item[0], tuple) else (item[0],)))


def _summary(table: Mapping[GoldPosition, Sequence[PositionRow]]) -> dict[str, Any]:
    positions = {position_label(position): _scores(found) for position, found in table.items()}
    accuracy = [mean([row.accuracy for row in found]) for found in table.values()]
    log_probability = [one for scores in positions.values() if (one := scores["log_probability"]) is not None]
    scored = len(log_probability) == len(positions)
    by_question = list(zip(*([row.accuracy for row in found] for found in table.values()), strict=True))
    changed = zip(*([row.answer for row in found] for found in table.values()), strict=True)
    return {
        "positions": positions,
        "worst": min(accuracy),
        "mean": mean(accuracy),
        "spread": max(accuracy) - min(accuracy),
        "ci95": list(bootstrap_interval(by_question, mean)),
        "worst_log_probability": min(log_probability) if scored else None,
        "mean_log_probability": mean(log_probability) if scored else None,
        "spread_log_probability": max(log_probability) - min(log_probability) if scored else None,
        "answers_that_change": mean([float(len(set(answers)) > 1) for answers in changed]),
        **summarize_form([row.answer for found in table.values() for row in found]),
        **_recall([row.gold_rank for row in next(iter(table.values()))]),
    }


def _recall(ranks: Sequence[int | None]) -> dict[str, float]:
    """Return how often the gold passage is among the first k of the scored ones."""
    return {f"recall_at_{k}": mean([float(rank is not None and rank <= k) for rank in ranks]) for k in (1, 2, 3)}


def _by_scorer(
    table: Mapping[GoldPosition, Sequence[PositionRow]], alone: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return share and accuracy of the questions whose gold passages the scorer ranks first, and of the others."""
    positions = list(table.items())
    n_gold = len(positions[0][0]) if isinstance(positions[0][0], tuple) else 1
    worst = min((found for _, found in positions), key=lambda found: mean([row.accuracy for row in found]))
    found = {}
    for key, right in (("gold_first", True), ("gold_later", False)):
        some = [row for row in worst if (row.gold_rank is not None and row.gold_rank <= n_gold) is right]
        found[key] = {
            "share": len(some) / len(worst),
            "accuracy": mean([row.accuracy for row in some]),
            "gold_only_accuracy": mean([alone[row.question] for row in some if row.question in alone]),
        }
    return found


def _scores(rows: Sequence[PositionRow]) -> dict[str, float | None]:
    return {
        "accuracy": mean([row.accuracy for row in rows]),
        "accuracy_full_text": mean([row.accuracy_full_text for row in rows]),
        "log_probability": mean_if_known([row.log_probability for row in rows]),
        "seconds": mean([row.seconds for row in rows]),
    }


def _versus(
    table: Mapping[GoldPosition, Sequence[PositionRow]], baseline: Mapping[GoldPosition, Sequence[PositionRow]]
) -> dict[str, float | list[float] | None]:
    def log_probability(row: PositionRow) -> float:
        return math.nan if row.log_probability is None else row.log_probability

    def accuracy(row: PositionRow) -> float:
        return row.accuracy

    scored = all(
        row.log_probability is not None for one in (table, baseline) for found in one.values() for row in found
    )
    logs = _difference(table, baseline, log_probability, max) if scored else (None, None)
    to_worst = _difference(table, baseline, accuracy, min)
    to_best = _difference(table, baseline, accuracy, max)
    return {
        "worst_minus_best_log_probability": logs[0],
        "ci95": logs[1],
        "worst_minus_worst_accuracy": to_worst[0],
        "worst_minus_worst_accuracy_ci95": to_worst[1],
        "worst_minus_best_accuracy": to_best[0],
        "worst_minus_best_accuracy_ci95": to_best[1],
        "mcnemar_p": mcnemar_p(min(_accuracies(table), key=sum), max(_accuracies(baseline), key=sum)),
    }


def _accuracies(table: Mapping[GoldPosition, Sequence[PositionRow]]) -> list[list[float]]:
    """Return the accuracy of each question at each position."""
    return [[row.accuracy for row in found] for found in table.values()]


def _difference(
    table: Mapping[GoldPosition, Sequence[PositionRow]],
    baseline: Mapping[GoldPosition, Sequence[PositionRow]],
    score: Callable[[PositionRow], float],
    pick: Callable[[Sequence[float]], float],
) -> tuple[float, list[float]]:
    """Return a method's worst position minus the baseline's worst (``min``) or best (``max``), and the interval."""
    ours = [[score(row) for row in found] for found in table.values()]
    theirs = [[score(row) for row in found] for found in baseline.values()]

    def difference(means: Sequence[float]) -> float:
        return min(means[: len(ours)]) - pick(means[len(ours) :])

    by_question = list(zip(*ours, *theirs, strict=True))
    value = difference([mean(column) for column in (*ours, *theirs)])
    return value, list(bootstrap_interval(by_question, difference))
