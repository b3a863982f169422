"""What a sweep over places found, and what it says in sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.evaluation.statistics import bootstrap_interval, mean

__all__ = ["CLOSED_BOOK", "GOLD_ONLY", "Outcome", "summarize"]

CLOSED_BOOK = "closed_book"
GOLD_ONLY = "gold_only"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer to one question under one condition.

    Attributes:
        question: The question's id.
        condition: Label of the mitigation, ``closed_book`` or ``gold_only``.
        gold_position: Place of the gold passage, None without distractors.
        answer: What the model wrote.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer.
        seconds: Time to read the prompt, and a share of the time that its batch took to write.
        reused: Not computed for this row: an earlier run answered the same, or this run did for another order of the
            same passages, under a method that does not depend on the order.
    """

    question: str
    condition: str
    gold_position: int | None
    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float
    seconds: float
    reused: bool = False


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return accuracy and log-probability per place, worst, mean, spread (max - min) and intervals.

    ``ci95`` is the interval of the mean accuracy over places. ``versus_none`` compares each method's worst place with
    the baseline's best and worst, questions paired: ``worst_minus_best_log_probability`` with its interval ``ci95``,
    and the same of accuracy, each with an interval of its own. ``reused`` counts the rows that were not computed anew.
    """
    conditions = list(dict.fromkeys(o.condition for o in outcomes if o.gold_position is not None))
    tables = {name: _by_position(outcomes, name) for name in conditions}
    result: dict[str, Any] = {name: _summary(table) for name, table in tables.items()}
    if "none" in tables:
        for name, table in tables.items():
            if name != "none":
                result[name]["versus_none"] = _versus(table, tables["none"])
    return {
        "mitigations": result,
        CLOSED_BOOK: _floor(outcomes, CLOSED_BOOK),
        GOLD_ONLY: _floor(outcomes, GOLD_ONLY),
        "n": len({o.question for o in outcomes}),
        "reused": sum(o.reused for o in outcomes),
    }


def _by_position(outcomes: Sequence[Outcome], condition: str) -> dict[int, list[Outcome]]:
    table: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.condition == condition and outcome.gold_position is not None:
            table.setdefault(outcome.gold_position, []).append(outcome)
    return dict(sorted(table.items()))


def _summary(table: Mapping[int, Sequence[Outcome]]) -> dict[str, Any]:
    positions = {str(place): _scores(found) for place, found in table.items()}
    accuracy = [scores["accuracy"] for scores in positions.values()]
    log_probability = [scores["log_probability"] for scores in positions.values()]
    rows = list(zip(*([o.accuracy for o in found] for found in table.values()), strict=True))
    changed = zip(*([o.answer for o in found] for found in table.values()), strict=True)
    return {
        "positions": positions,
        "worst": min(accuracy),
        "mean": mean(accuracy),
        "spread": max(accuracy) - min(accuracy),
        "ci95": list(bootstrap_interval(rows, mean)),
        "worst_log_probability": min(log_probability),
        "mean_log_probability": mean(log_probability),
        "spread_log_probability": max(log_probability) - min(log_probability),
        "answers_that_change": mean([float(len(set(answers)) > 1) for answers in changed]),
    }


def _scores(found: Sequence[Outcome]) -> dict[str, float]:
    return {
        "accuracy": mean([o.accuracy for o in found]),
        "accuracy_full_text": mean([o.accuracy_full_text for o in found]),
        "log_probability": mean([o.log_probability for o in found]),
        "seconds": mean([o.seconds for o in found]),
    }


def _floor(outcomes: Sequence[Outcome], condition: str) -> dict[str, float]:
    return _scores([o for o in outcomes if o.condition == condition])


def _versus(
    table: Mapping[int, Sequence[Outcome]], baseline: Mapping[int, Sequence[Outcome]]
) -> dict[str, float | list[float]]:
    def log_probability(outcome: Outcome) -> float:
        return outcome.log_probability

    def accuracy(outcome: Outcome) -> float:
        return outcome.accuracy

    logs = _difference(table, baseline, log_probability, max)
    to_worst = _difference(table, baseline, accuracy, min)
    to_best = _difference(table, baseline, accuracy, max)
    return {
        "worst_minus_best_log_probability": logs[0],
        "ci95": logs[1],
        "worst_minus_worst_accuracy": to_worst[0],
        "worst_minus_worst_accuracy_ci95": to_worst[1],
        "worst_minus_best_accuracy": to_best[0],
        "worst_minus_best_accuracy_ci95": to_best[1],
    }


def _difference(
    table: Mapping[int, Sequence[Outcome]],
    baseline: Mapping[int, Sequence[Outcome]],
    measure: Callable[[Outcome], float],
    place: Callable[[Sequence[float]], float],
) -> tuple[float, list[float]]:
    """Return a method's worst place minus the baseline's ``place`` (``min`` or ``max``), and the interval."""
    ours = [[measure(o) for o in found] for found in table.values()]
    theirs = [[measure(o) for o in found] for found in baseline.values()]

    def difference(means: Sequence[float]) -> float:
        return min(means[: len(ours)]) - place(means[len(ours) :])

    rows = list(zip(*ours, *theirs, strict=True))
    value = difference([mean(column) for column in (*ours, *theirs)])
    return value, list(bootstrap_interval(rows, difference))
