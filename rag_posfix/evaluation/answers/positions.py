"""Position experiment: every method at every position of the gold passage, on the same engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from langchain_core.documents import Document

from rag_posfix.assembly.documents import content_key
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
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
    engine_facts,
    load_models,
    with_passages_kept,
)
from rag_posfix.evaluation.answers.pictures import draw_positions
from rag_posfix.evaluation.answers.position_summary import CLOSED_BOOK, GOLD_ONLY, PositionRow, summarize_positions
from rag_posfix.evaluation.answers.ray_backend import AnswerRows, ray_answers
from rag_posfix.evaluation.data.datasets import take_examples
from rag_posfix.evaluation.data.position_example import GoldPosition, PositionExample
from rag_posfix.evaluation.figures import with_picture
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.generation.engine import Engine
from rag_posfix.settings import Settings

__all__ = [
    "JOURNAL",
    "answer_at_positions",
    "evaluate_positions",
]

JOURNAL = "positions-journal.jsonl"
REUSE_BYTES = 4 * 1024**3
"""Bound of the keys and values that ``reuse`` keeps of passages."""


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
    ray: bool = False,
    ray_actors: int = 2,
    engine: Generator | None = None,
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
        ray: Answer on a Ray cluster: eight questions are a task, as they are answered together without Ray.
        ray_actors: Processes there that hold the model.
        engine: The model; loaded by ``settings`` if None. With ``ray``, processes load theirs by ``settings``.
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
    journal_file = None if out is None else out / JOURNAL
    answer: AnswerRows = partial(
        answer_at_positions, choices=arrangements, gold_positions=gold_positions, n_documents=documents,
        max_new_tokens=max_tokens, check_orders=check_orders,
    )  # fmt: skip
    if ray:
        if engine is not None or reranker is not None:
            raise ConfigError("ray=True loads models in other processes; give settings instead of engine and reranker")
        journal = AnswerJournal(journal_file, fresh=fresh)
        kept = REUSE_BYTES if reuse else 0
        with ray_answers(settings or Settings(), arrangements, ray_actors, kept) as there:
            facts, relevance = there.facts()
            with progress("answering") as report:
                rows = there.rows(examples, answer, journal, report)
    else:
        engine, reranker, relevance = load_models(arrangements, engine, reranker, settings, progress)
        if reuse:
            engine = with_passages_kept(engine, REUSE_BYTES)
        journal = AnswerJournal(journal_file, fresh=fresh, scored=isinstance(engine, Engine))
        with progress("answering") as report:
            rows = answer(
                engine, examples, reranker=reranker, journal=journal, progress=report,
                rerankers=arrangement_rerankers(arrangements, engine, settings),
            )  # fmt: skip
        facts = engine_facts(engine, arrangements)
    used = {
        "documents": documents, "gold_positions": list(gold_positions), "limit": limit, "skip": skip,
        "max_tokens": max_tokens, "relevance": relevance, "decoding": "greedy", "check_orders": check_orders,
        "reuse": reuse, "answers_of_earlier_runs_by": journal.sources,
    }  # fmt: skip
    head = answers_head("positions", facts, data, used, summarize_positions(rows))
    return with_picture(ExperimentRecord(head, [asdict(row) for row in rows]).write(out), draw_positions)


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedRow:
    """A row before its answer: its trial, and the key of the answer."""

    trial: Trial
    condition: str
    gold_position: GoldPosition | None
    key: str
    gold_rank: int | None = None


def answer_at_positions(
    engine: Generator,
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
        gold_positions: Positions of the gold passage, from 0; (0, 9) places two.
        n_documents: Number of passages per prompt.
        reranker: Scores the passages for arrangements without a reranker.
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
    engine: Generator,
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
            asked=row.trial.example.question,
            accepted=row.trial.example.answers,
            passages=tuple(str(document.id) for document in row.trial.documents),
            **asdict(known[row.key]),
        )
        for row in planned
    ]
