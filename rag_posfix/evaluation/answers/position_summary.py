"""Rows of the position experiment, and their summary: per position, worst, mean, spread, and against ``none``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.evaluation.answers.answering import summarize_form
from rag_posfix.evaluation.data.questions import GoldPosition, position_label
from rag_posfix.evaluation.statistics import bootstrap_interval, mcnemar_p, mean, mean_if_known

BASELINE = "none"
CLOSED_BOOK = "closed_book"
GOLD_ONLY = "gold_only"
NOT_SCORED = "a remote generator answers with text and does not score given answers; accuracy and changes are measured"


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
            not score reference answers.
        seconds: Time of the prefill, plus a share of the time to generate its batch.
        reused: Whether the answer was not computed for this row. It is from the journal, or from another order of the
            same passages under an order-invariant arrangement.
        gold_rank: Rank of the gold passage among the scored ones, from 1; of several the lowest. None if the reranker
            left one out, and without distractors.
        asked: The text of the question.
        accepted: The accepted answers.
        passages: Ids of the passages, in input order.
        planted: best_subspan_em of the first line with the wrong answer that a hostile passage gives; None without.
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
    planted: float | None = None


Table = Mapping[GoldPosition, Sequence[PositionRow]]


def summarize_positions(rows: Sequence[PositionRow]) -> dict[str, Any]:
    """Return accuracy and log-probability per gold position, worst, mean, spread (max - min) and intervals.

    ``ci95`` is the interval of the mean accuracy over positions. ``versus_none`` compares each method's worst position
    with the baseline's best and worst, questions paired: ``worst_minus_best_log_probability`` with its interval
    ``ci95``, and the same of accuracy, each with an interval of its own; ``mcnemar_p`` is the chance of such a
    difference in accuracy between these two positions if there were none. ``sound`` and ``repeats`` are shares of
    answers (``answering.is_sound``), ``recall_at_k`` is the scorer's. ``by_scorer`` splits the questions by whether
    the scorer ranks the gold passage first (of several: before all others), with the accuracy at the worst position
    and with the gold passage alone. ``planted`` is the share of answers that give the answer of a hostile passage.
    ``reused`` counts the rows that were not computed anew. Numbers that the generator does not return are None, and
    ``not_measured`` says why.
    """
    tables = {
        name: _by_position(rows, name)
        for name in dict.fromkeys(row.condition for row in rows if row.gold_position is not None)
    }
    alone = {row.question: row.accuracy for row in rows if row.condition == GOLD_ONLY}
    methods: dict[str, Any] = {
        name: {**_summary(table), "by_scorer": _by_scorer(table, alone)} for name, table in tables.items()
    }
    if BASELINE in tables:
        for name, table in tables.items():
            if name != BASELINE:
                methods[name]["versus_none"] = _versus(table, tables[BASELINE])
    return {
        "mitigations": methods,
        "verdict": position_verdicts(methods),
        CLOSED_BOOK: _scores([row for row in rows if row.condition == CLOSED_BOOK]),
        GOLD_ONLY: _scores([row for row in rows if row.condition == GOLD_ONLY]),
        "n": len({row.question for row in rows}),
        "reused": sum(row.reused for row in rows),
        **not_measured([row.log_probability for row in rows]),
    }


def not_measured(log_probabilities: Sequence[float | None]) -> dict[str, dict[str, str]]:
    """Return ``not_measured`` of a summary of all rows: which numbers are None, and why; nothing without None."""
    return {"not_measured": {"log_probability": NOT_SCORED}} if None in log_probabilities else {}


def _by_position(rows: Sequence[PositionRow], condition: str) -> dict[GoldPosition, list[PositionRow]]:
    table: dict[GoldPosition, list[PositionRow]] = {}
    for row in rows:
        if row.condition == condition and row.gold_position is not None:
            table.setdefault(row.gold_position, []).append(row)
    return dict(sorted(table.items(), key=lambda item: item[0] if isinstance(item[0], tuple) else (item[0],)))


def _summary(table: Table) -> dict[str, Any]:
    positions = {position_label(position): _scores(rows) for position, rows in table.items()}
    by_position = _accuracies(table)
    accuracy = [mean(scores) for scores in by_position]
    log_probability = [scores["log_probability"] for scores in positions.values()]
    measured = [value for value in log_probability if value is not None]
    scored = len(measured) == len(positions)
    answers = zip(*([row.answer for row in rows] for rows in table.values()), strict=True)
    ranks = [row.gold_rank for row in next(iter(table.values()))]
    planted = [row.planted for rows in table.values() for row in rows if row.planted is not None]
    return {
        "positions": positions,
        "worst": min(accuracy),
        "mean": mean(accuracy),
        "spread": max(accuracy) - min(accuracy),
        "ci95": list(bootstrap_interval(list(zip(*by_position, strict=True)), mean)),
        "worst_log_probability": min(measured) if scored else None,
        "mean_log_probability": mean(measured) if scored else None,
        "spread_log_probability": max(measured) - min(measured) if scored else None,
        "answers_that_change": mean([float(len(set(texts)) > 1) for texts in answers]),
        **({"planted": mean(planted)} if planted else {}),
        **summarize_form([row.answer for rows in table.values() for row in rows]),
        **{f"recall_at_{k}": mean([float(rank is not None and rank <= k) for rank in ranks]) for k in (1, 2, 3)},
    }


def _by_scorer(table: Table, alone: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return share and accuracy of the questions with the gold passages ranked first, and of the other questions."""
    position = next(iter(table))
    n_gold = len(position) if isinstance(position, tuple) else 1
    worst = min(table.values(), key=lambda rows: mean([row.accuracy for row in rows]))
    split = {}
    for key, first in (("gold_first", True), ("gold_later", False)):
        rows = [row for row in worst if (row.gold_rank is not None and row.gold_rank <= n_gold) is first]
        split[key] = {
            "share": len(rows) / len(worst),
            "accuracy": mean([row.accuracy for row in rows]),
            "gold_only_accuracy": mean([alone[row.question] for row in rows if row.question in alone]),
        }
    return split


def _scores(rows: Sequence[PositionRow]) -> dict[str, float | None]:
    return {
        "accuracy": mean([row.accuracy for row in rows]),
        "accuracy_full_text": mean([row.accuracy_full_text for row in rows]),
        "log_probability": mean_if_known([row.log_probability for row in rows]),
        "seconds": mean([row.seconds for row in rows]),
    }


def _versus(table: Table, baseline: Table) -> dict[str, float | list[float] | None]:
    method_scores, baseline_scores = _accuracies(table), _accuracies(baseline)
    to_worst = _difference(method_scores, baseline_scores, min)
    to_best = _difference(method_scores, baseline_scores, max)
    method_logs, baseline_logs = _log_probabilities(table), _log_probabilities(baseline)
    logs: tuple[float | None, list[float] | None] = (None, None)
    if method_logs is not None and baseline_logs is not None:
        logs = _difference(method_logs, baseline_logs, max)
    return {
        "worst_minus_best_log_probability": logs[0],
        "ci95": logs[1],
        "worst_minus_worst_accuracy": to_worst[0],
        "worst_minus_worst_accuracy_ci95": to_worst[1],
        "worst_minus_best_accuracy": to_best[0],
        "worst_minus_best_accuracy_ci95": to_best[1],
        "mcnemar_p": mcnemar_p(min(method_scores, key=sum), max(baseline_scores, key=sum)),
    }


def _accuracies(table: Table) -> list[list[float]]:
    """Return the accuracy of each question, by position."""
    return [[row.accuracy for row in rows] for rows in table.values()]


def _log_probabilities(table: Table) -> list[list[float]] | None:
    """Return the log-probability of each question, by position; None if one was not measured."""
    scores = [[row.log_probability for row in rows] for rows in table.values()]
    measured = [[score for score in row if score is not None] for row in scores]
    return measured if list(map(len, measured)) == list(map(len, scores)) else None


def _difference(
    method_scores: Sequence[Sequence[float]],
    baseline_scores: Sequence[Sequence[float]],
    pick: Callable[[Sequence[float]], float],
) -> tuple[float, list[float]]:
    """Return a method's worst position minus the baseline's worst (``min``) or best (``max``), and the interval."""

    def difference(means: Sequence[float]) -> float:
        return min(means[: len(method_scores)]) - pick(means[len(method_scores) :])

    by_question = list(zip(*method_scores, *baseline_scores, strict=True))
    value = difference([mean(column) for column in (*method_scores, *baseline_scores)])
    return value, list(bootstrap_interval(by_question, difference))


def position_verdicts(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence per method of ``eval positions``, with a comparison if ``none`` is among them."""
    sentences = []
    for name, scores in methods.items():
        share = scores["answers_that_change"]
        of = " of the unmodified model" if name == BASELINE else ""
        if share == 0:
            sentence = "no answer changes with the position of the gold passage"
        else:
            sentence = f"{share:.0%} of the answers{of} change with the position of the gold passage"
            spread, measure = scores["spread_log_probability"], "mean log-probability"
            if spread is None:
                spread, measure = scores["spread"], "accuracy"
            sentence += f", by {spread:.2f} in {measure} between the best and the worst position"
        sentences.append(f"{name}: {sentence}{_comparison(scores.get('versus_none'))}.")
    return sentences


def _comparison(versus: Mapping[str, Any] | None) -> str:
    if versus is None:
        return ""
    accuracy = f"accuracy {versus['worst_minus_best_accuracy']:+.2f} (p = {versus['mcnemar_p']:.2f})"
    if versus["ci95"] is None:
        return f"; at its worst position against none at its best: {accuracy}"
    low, high = versus["ci95"]
    how = "higher than" if low > 0 else "lower than" if high < 0 else "not distinguishable from"
    return (
        f"; its log-probability at its worst position is {how} that of none at its best "
        f"({versus['worst_minus_best_log_probability']:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}), its {accuracy}"
    )
