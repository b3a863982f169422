"""Position experiment: every method at every position of the gold passage, on the same engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.documents import content_key
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.evaluation.answers.answer_form import summarize_form
from rag_posfix.evaluation.answers.answering import (
    QUESTIONS_TOGETHER,
    AnswerJournal,
    Trial,
    answer_all,
    answer_key,
    score_passages,
)
from rag_posfix.evaluation.answers.arrangement import OWN_SCORER, Arrangement
from rag_posfix.evaluation.answers.experiment import (
    answers_head,
    arrangement_rerankers,
    checked_arrangements,
    load_models,
)
from rag_posfix.evaluation.data.datasets import take_examples
from rag_posfix.evaluation.data.position_example import GoldPosition, PositionExample, position_label
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.evaluation.speed.runs import with_store
from rag_posfix.evaluation.statistics import bootstrap_interval, mcnemar_p, mean
from rag_posfix.generation.engine import Engine
from rag_posfix.settings import Settings

__all__ = [
    "CLOSED_BOOK",
    "GOLD_ONLY",
    "JOURNAL",
    "PositionRow",
    "answer_at_positions",
    "evaluate_positions",
    "summarize_positions",
]

CLOSED_BOOK = "closed_book"
GOLD_ONLY = "gold_only"
JOURNAL = "positions-journal.jsonl"
REUSE_BYTES = 4 * 1024**3
"""Bound of the keys and values that ``reuse`` keeps of passages."""


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
        log_probability: Mean log-probability per token of the first accepted answer.
        seconds: Time of the prefill, plus a share of the time to generate its batch.
        reused: Whether the answer was not computed for this row. It is from the journal, or from another order of the
            same passages under an order-free arrangement.
        gold_rank: Rank of the gold passage among the scored ones, from 1; of several the lowest. None if the reranker
            left one out, and without distractors.
    """

    question: str
    condition: str
    gold_position: GoldPosition | None
    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float
    seconds: float
    reused: bool = False
    gold_rank: int | None = None


def evaluate_positions(
    data: Path | Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    gold_positions: Sequence[GoldPosition] = (0, 4, 9),
    documents: int = 10,
    limit: int | None = None,
    skip: int = 0,
    max_tokens: int = 24,
    check_orders: bool = False,
    fresh: bool = False,
    reuse: bool = False,
    engine: Engine | None = None,
    reranker: Reranker | None = None,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Put the gold passage at each position and compare arrangements: accuracy, log-probability, worst, spread.

    The record has one row per question and condition (``PositionRow``); ``summarize_positions`` describes its summary.
    With ``out``, every answer goes to ``positions-journal.jsonl`` there as soon as it is known: the same call, or one
    with more questions, positions or methods, computes only what is missing.

    Args:
        data: A file of Lost-in-the-Middle or HotpotQA rows or in SQuAD's format, or questions.
        choices: Arrangements; a method alone has the order of the experiment and relevance from ``reranker``.
        gold_positions: Positions of the gold passage in the prompt, from 0; (0, 9) places two gold passages.
        documents: Number of passages per prompt.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start.
        max_tokens: Maximum number of tokens of an answer.
        check_orders: Compute the answer at every position, also of order-free arrangements.
        fresh: Recompute what is in the journal.
        reuse: Keep keys and values of passages in memory (4 GiB) for the next condition: faster; ``seconds`` are then
            those of a warm store.
        engine: The model; loaded by ``settings`` if None.
        reranker: Scores the passages; if None, the embeddings of ``settings``.
        settings: Read from the environment if None.
        out: Folder for the record and the journal; None writes nothing.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        ConfigError: a method, the model or a setting is wrong.
        EvaluationError: the file cannot be used, too few passages, or they do not fit the context window.
    """
    examples = take_examples(data, limit, skip)
    arrangements = checked_arrangements(choices)
    for example in examples:  # before the model: too few distractors are told at once
        for gold_position in gold_positions:
            example.documents(documents, gold_position)
    engine, reranker, relevance = load_models(arrangements, engine, reranker, settings, progress)
    if reuse:
        from rag_posfix.caching.kv.memory import MemoryPassages
        from rag_posfix.caching.kv.store import PassageStore

        engine = with_store(engine, PassageStore([MemoryPassages(REUSE_BYTES)]))
    journal = AnswerJournal(None if out is None else out / JOURNAL, fresh=fresh)
    with progress("answering") as report:
        rows = answer_at_positions(
            engine, examples, arrangements, gold_positions=gold_positions, n_documents=documents, reranker=reranker,
            max_new_tokens=max_tokens, progress=report, journal=journal, check_orders=check_orders,
            rerankers=arrangement_rerankers(arrangements, engine, settings),
        )  # fmt: skip
    used = {
        "documents": documents, "gold_positions": list(gold_positions), "limit": limit, "skip": skip,
        "max_tokens": max_tokens, "relevance": relevance, "decoding": "greedy", "check_orders": check_orders,
        "reuse": reuse, "answers_of_earlier_runs_by": journal.sources,
    }  # fmt: skip
    head = answers_head("positions", engine, arrangements, data, used, summarize_positions(rows))
    return ExperimentRecord(head, [asdict(row) for row in rows]).write(out)


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedRow:
    """A row before its answer: its trial, and the key of the answer."""

    trial: Trial
    condition: str
    gold_position: GoldPosition | None
    key: str
    gold_rank: int | None = None


def answer_at_positions(
    engine: Engine,
    examples: Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    gold_positions: Sequence[GoldPosition],
    n_documents: int,
    reranker: Reranker,
    rerankers: Mapping[str, Reranker] = MappingProxyType({}),
    max_new_tokens: int = 24,
    progress: Callable[[int, int], None] | None = None,
    journal: AnswerJournal | None = None,
    check_orders: bool = False,
) -> list[PositionRow]:
    """Answer every question under every condition: closed book, gold only, and each method at each gold position.

    Relevance comes from ``reranker`` and never from which passage is gold. Each method has the same settings at every
    position. Eight questions are taken at a time, and those of one condition and position are answered together.

    Args:
        engine: The model; the same for all conditions.
        examples: The questions.
        choices: What is compared.
        gold_positions: Positions of the gold passage, from 0; (0, 9) places two.
        n_documents: Number of passages per prompt.
        reranker: Scores the passages for arrangements without a reranker.
        rerankers: The rerankers of arrangements, by label.
        max_new_tokens: Maximum number of tokens of an answer.
        progress: Called with (done, total) after each answer.
        journal: Answers of earlier runs, which are not computed again, and where new ones go.
        check_orders: Compute the answer at every position, also of arrangements that do not depend on the order.
            Otherwise such an arrangement answers a question once, and the row is repeated for the other positions.

    Raises:
        EvaluationError: too few distractors, or passages do not fit the context window.
    """
    journal = journal or AnswerJournal()
    arrangements = checked_arrangements(choices)
    scorers = {OWN_SCORER: reranker, **rerankers}
    used = dict.fromkeys(one.scorer for one in arrangements)
    total = len(examples) * (2 + len(choices) * len(gold_positions))
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, total)

    def planned_rows(example: PositionExample) -> Iterable[_PlannedRow]:
        baseline = MitigationChoice("none")
        for condition, read in ((CLOSED_BOOK, False), (GOLD_ONLY, True)):
            trial = Trial(example, example.gold if read else (), baseline)
            yield _PlannedRow(trial, condition, None, answer_key(engine, trial, max_new_tokens, any_order=False))
        scored = {label: score_passages(scorers[label], example, n_documents) for label in used}
        gold_rank = {label: _gold_rank(example, passages) for label, passages in scored.items()}
        for gold_position in gold_positions:
            for one in arrangements:
                given = (str(d.id) for d in example.documents(n_documents, gold_position))
                documents = tuple(scored[one.scorer][name] for name in given if name in scored[one.scorer])
                trial = Trial(example, documents, one.mitigation, one.order)
                key = answer_key(engine, trial, max_new_tokens, any_order=one.order_free and not check_orders)
                yield _PlannedRow(trial, one.label, gold_position, key, gold_rank[one.scorer])

    rows: list[PositionRow] = []
    for start in range(0, len(examples), QUESTIONS_TOGETHER):
        planned = [row for example in examples[start : start + QUESTIONS_TOGETHER] for row in planned_rows(example)]
        rows += _answered(engine, planned, journal, max_new_tokens, tick)
    return rows


def _gold_rank(example: PositionExample, passages: Mapping[str, Document]) -> int | None:
    """Return the rank of the gold passage by relevance, from 1; equal scores by content; of several the lowest."""
    ranked = sorted(passages.values(), key=lambda d: (-float(d.metadata["relevance_score"]), content_key(d)))
    names = [str(one.id) for one in ranked]
    gold = [str(one.id) for one in example.gold]
    return max(map(names.index, gold)) + 1 if set(gold) <= set(names) else None


def _answered(
    engine: Engine,
    planned: Sequence[_PlannedRow],
    journal: AnswerJournal,
    max_new_tokens: int,
    tick: Callable[[], None],
) -> list[PositionRow]:
    """Return the rows with their answers, in order; what the journal lacks is computed, each key once."""
    known = {row.key: answer for row in planned if (answer := journal.get(row.key)) is not None}
    missing: dict[str, _PlannedRow] = {}
    repeats: dict[str, int] = {}
    for row in planned:
        if row.key in known:
            tick()
        else:
            missing.setdefault(row.key, row)
            repeats[row.key] = repeats.get(row.key, 0) + 1
    together: dict[tuple[str, GoldPosition | None], list[_PlannedRow]] = {}
    for row in missing.values():
        together.setdefault((row.condition, row.gold_position), []).append(row)
    for group in together.values():
        answers = answer_all(engine, [row.trial for row in group], max_new_tokens)
        for row, (answer, _) in zip(group, answers, strict=True):
            journal.add(row.key, answer)
            known[row.key] = answer
            for _ in range(repeats[row.key]):
                tick()
    return [
        PositionRow(
            question=row.trial.example.id,
            condition=row.condition,
            gold_position=row.gold_position,
            gold_rank=row.gold_rank,
            reused=missing.get(row.key) is not row,
            **asdict(known[row.key]),
        )
        for row in planned
    ]


def summarize_positions(rows: Sequence[PositionRow]) -> dict[str, Any]:
    """Return accuracy and log-probability per gold position, worst, mean, spread (max - min) and intervals.

    ``ci95`` is the interval of the mean accuracy over positions. ``versus_none`` compares each method's worst position
    with the baseline's best and worst, questions paired: ``worst_minus_best_log_probability`` with its interval
    ``ci95``, and the same of accuracy, each with an interval of its own; ``mcnemar_p`` is the chance of such a
    difference in accuracy between these two positions if there were none. ``sound`` and ``repeats`` are shares of
    answers (``answer_form``), ``recall_at_k`` is that of the scorer. ``reused`` counts the rows that were not computed
    anew.
    """
    conditions = list(dict.fromkeys(row.condition for row in rows if row.gold_position is not None))
    tables = {name: _by_position(rows, name) for name in conditions}
    result: dict[str, Any] = {name: _summary(table) for name, table in tables.items()}
    if "none" in tables:
        for name, table in tables.items():
            if name != "none":
                result[name]["versus_none"] = _versus(table, tables["none"])
    return {
        "mitigations": result,
        CLOSED_BOOK: _scores([row for row in rows if row.condition == CLOSED_BOOK]),
        GOLD_ONLY: _scores([row for row in rows if row.condition == GOLD_ONLY]),
        "n": len({row.question for row in rows}),
        "reused": sum(row.reused for row in rows),
    }


def _by_position(rows: Sequence[PositionRow], condition: str) -> dict[GoldPosition, list[PositionRow]]:
    table: dict[GoldPosition, list[PositionRow]] = {}
    for row in rows:
        if row.condition == condition and row.gold_position is not None:
            table.setdefault(row.gold_position, []).append(row)
    return dict(sorted(table.items(), key=lambda item: item[0] if isinstance(item[0], tuple) else (item[0],)))


def _summary(table: Mapping[GoldPosition, Sequence[PositionRow]]) -> dict[str, Any]:
    positions = {position_label(position): _scores(found) for position, found in table.items()}
    accuracy = [scores["accuracy"] for scores in positions.values()]
    log_probability = [scores["log_probability"] for scores in positions.values()]
    by_question = list(zip(*([row.accuracy for row in found] for found in table.values()), strict=True))
    changed = zip(*([row.answer for row in found] for found in table.values()), strict=True)
    return {
        "positions": positions,
        "worst": min(accuracy),
        "mean": mean(accuracy),
        "spread": max(accuracy) - min(accuracy),
        "ci95": list(bootstrap_interval(by_question, mean)),
        "worst_log_probability": min(log_probability),
        "mean_log_probability": mean(log_probability),
        "spread_log_probability": max(log_probability) - min(log_probability),
        "answers_that_change": mean([float(len(set(answers)) > 1) for answers in changed]),
        **summarize_form([row.answer for found in table.values() for row in found]),
        **_recall([row.gold_rank for row in next(iter(table.values()))]),
    }


def _recall(ranks: Sequence[int | None]) -> dict[str, float]:
    """Return how often the gold passage is among the first k of the scored ones."""
    return {f"recall_at_{k}": mean([float(rank is not None and rank <= k) for rank in ranks]) for k in (1, 2, 3)}


def _scores(rows: Sequence[PositionRow]) -> dict[str, float]:
    return {
        "accuracy": mean([row.accuracy for row in rows]),
        "accuracy_full_text": mean([row.accuracy_full_text for row in rows]),
        "log_probability": mean([row.log_probability for row in rows]),
        "seconds": mean([row.seconds for row in rows]),
    }


def _versus(
    table: Mapping[GoldPosition, Sequence[PositionRow]], baseline: Mapping[GoldPosition, Sequence[PositionRow]]
) -> dict[str, float | list[float]]:
    def log_probability(row: PositionRow) -> float:
        return row.log_probability

    def accuracy(row: PositionRow) -> float:
        return row.accuracy

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
