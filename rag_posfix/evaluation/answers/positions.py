"""How an answer depends on where the gold passage stands: a sweep over places, the same engine for every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from rag_posfix.contracts.generator import Reranker
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation.answers.answer_journal import Journal, answer_key
from rag_posfix.evaluation.answers.answering import QUESTIONS_TOGETHER, Asked, answer_all, scored
from rag_posfix.evaluation.answers.positions_summary import CLOSED_BOOK, GOLD_ONLY, Outcome
from rag_posfix.evaluation.data.datasets import PositionExample
from rag_posfix.evaluation.labels import label
from rag_posfix.generation.engine import Engine

__all__ = ["sweep_positions"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """One row of the result: what is asked, and the key under which its answer is known."""

    asked: Asked
    condition: str
    place: int | None
    key: str


def sweep_positions(
    engine: Engine,
    examples: Sequence[PositionExample],
    choices: Sequence[MitigationChoice],
    *,
    gold_positions: Sequence[int],
    n_documents: int,
    reranker: Reranker,
    max_new_tokens: int = 24,
    progress: Progress | None = None,
    journal: Journal | None = None,
    check_orders: bool = False,
) -> list[Outcome]:
    """Answer every question under every condition: closed book, gold only, and each method at each place.

    Relevance comes from ``reranker`` and never from which passage is gold. Each method has the same settings at every
    place. Eight questions are taken at a time, and those of one condition and place are answered together.

    Args:
        engine: The model; the same for all conditions.
        examples: The questions.
        choices: The mitigations.
        gold_positions: Places of the gold passage, from 0.
        n_documents: Passages per prompt.
        reranker: Scores the passages of a question.
        max_new_tokens: Tokens per answer.
        progress: Called with (done, total) after each answer.
        journal: Answers of earlier runs, which are not computed again, and where new ones go.
        check_orders: Compute the answer for every place even if the method says that it does not depend on the order.
            Otherwise such a method answers a question once, and the row is repeated for the other places.

    Raises:
        EvaluationError: too few distractors, or passages do not fit the context window.
    """
    journal = journal or Journal()
    total = len(examples) * (2 + len(choices) * len(gold_positions))
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, total)

    def jobs_of(example: PositionExample) -> Iterable[_Job]:
        def job(condition: str, asked: Asked, place: int | None = None) -> _Job:
            any_order = not check_orders and engine.describe(asked.choice).order_invariant
            return _Job(asked, condition, place, answer_key(engine, asked, max_new_tokens, any_order=any_order))

        baseline = MitigationChoice("none")
        yield job(CLOSED_BOOK, Asked(example, (), baseline))
        yield job(GOLD_ONLY, Asked(example, (example.gold,), baseline))
        passages = scored(reranker, example, n_documents)
        for place in gold_positions:
            documents = tuple(passages[str(d.id)] for d in example.documents(n_documents, place))
            for choice in choices:
                yield job(label(choice), Asked(example, documents, choice), place)

    outcomes: list[Outcome] = []
    for start in range(0, len(examples), QUESTIONS_TOGETHER):
        jobs = [job for example in examples[start : start + QUESTIONS_TOGETHER] for job in jobs_of(example)]
        outcomes += _answered(engine, jobs, journal, max_new_tokens, tick)
    return outcomes


def _answered(
    engine: Engine, jobs: Sequence[_Job], journal: Journal, max_new_tokens: int, tick: Callable[[], None]
) -> list[Outcome]:
    """Return the outcome of each job, in order; what the journal lacks is computed, each key once."""
    known = {job.key: answer for job in jobs if (answer := journal.get(job.key)) is not None}
    missing: dict[str, _Job] = {}
    repeats: dict[str, int] = {}
    for job in jobs:
        if job.key in known:
            tick()
        else:
            missing.setdefault(job.key, job)
            repeats[job.key] = repeats.get(job.key, 0) + 1
    together: dict[tuple[str, int | None], list[_Job]] = {}
    for job in missing.values():
        together.setdefault((job.condition, job.place), []).append(job)
    for group in together.values():
        answers = answer_all(engine, [job.asked for job in group], max_new_tokens)
        for job, (answer, _) in zip(group, answers, strict=True):
            journal.add(job.key, answer)
            known[job.key] = answer
            for _ in range(repeats[job.key]):
                tick()
    return [
        Outcome(
            question=job.asked.example.id,
            condition=job.condition,
            gold_position=job.place,
            reused=missing.get(job.key) is not job,
            **asdict(known[job.key]),
        )
        for job in jobs
    ]
