"""Answers on a Ray cluster: actors with a model each answer blocks of questions. Results equal those of one process.

A block is what one process answers together, so an answer has the same neighbours there as here. The journal stays in
the process that asks: actors are handed its rows, and return what they added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.answers.experiment import (
    QUESTIONS_TOGETHER,
    AnswerJournal,
    Arrangement,
    GradedAnswer,
    PositionRow,
    arrangement_rerankers,
    engine_facts,
    load_models,
    with_passages_kept,
)
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.ray_workers import RayWorkers, ray_workers
from rag_posfix.evaluation.record import silent
from rag_posfix.generation.remote.connection import is_remote
from rag_posfix.settings import Settings

AnswerRows = Callable[..., list[PositionRow]]
"""``positions.answer_at_positions`` with its settings filled in."""

Opener = Callable[[Sequence[Arrangement], Settings], tuple[Generator, Reranker, str]]


class CarriedJournal(AnswerJournal):
    """A journal in memory that begins with known answers, and records which were used and which are new."""

    def __init__(self, answers: Mapping[str, GradedAnswer]) -> None:
        super().__init__()
        self._answers = answers
        self.used: set[str] = set()
        self.added: dict[str, GradedAnswer] = {}

    def get(self, key: str) -> GradedAnswer | None:
        """Return the answer with this key, or None."""
        if key in self._answers:
            self.used.add(key)
            return self._answers[key]
        return self.added.get(key)

    def add(self, key: str, row: GradedAnswer) -> None:
        """Add an answer."""
        self.added[key] = row


class _Answerer:
    """What an actor does: loads the models once, then answers block after block."""

    def __init__(
        self, opener: Opener, arrangements: Sequence[Arrangement], settings: Settings, kept_bytes: int
    ) -> None:
        self._arrangements = arrangements

        def load() -> tuple[Generator, Reranker, Mapping[str, Reranker], str]:
            engine, reranker, relevance = opener(arrangements, settings)
            rerankers = arrangement_rerankers(arrangements, engine, settings)
            return with_passages_kept(engine, kept_bytes) if kept_bytes else engine, reranker, rerankers, relevance

        # At the first call: of an actor that cannot be made, Ray tells the reason only within a longer text.
        self._models = functools.cache(load)

    def facts(self) -> tuple[dict[str, Any], str]:
        engine, _, _, relevance = self._models()
        return engine_facts(engine, self._arrangements), relevance

    def block(
        self, examples: Sequence[PositionExample], answer: AnswerRows, answers: Mapping[str, GradedAnswer]
    ) -> tuple[list[PositionRow], set[str], dict[str, GradedAnswer]]:
        engine, reranker, rerankers, _ = self._models()
        journal = CarriedJournal(answers)
        rows = answer(engine, examples, reranker=reranker, rerankers=rerankers, journal=journal)
        return rows, journal.used, journal.added


class RayAnswers:
    """Processes that answer, each with an ``_Answerer``."""

    def __init__(self, workers: RayWorkers) -> None:
        self._workers = workers

    def facts(self) -> tuple[dict[str, Any], str]:
        """Return ``engine_facts``, and the name of the reranker that scores passages."""
        facts, relevance = self._workers.call("facts")
        return facts, relevance

    def rows(
        self,
        examples: Sequence[PositionExample],
        answer: AnswerRows,
        journal: AnswerJournal,
        progress: Callable[[int, int], None],
    ) -> list[PositionRow]:
        """Return the rows of ``examples`` in order; new answers go into ``journal`` as blocks arrive."""
        answers = self._workers.put(journal.rows())
        starts = range(0, len(examples), QUESTIONS_TOGETHER)
        calls = [(examples[start : start + QUESTIONS_TOGETHER], answer, answers) for start in starts]
        blocks: dict[int, list[PositionRow]] = {}
        for index, (rows, used, added) in self._workers.each("block", calls):
            blocks[index] = rows
            for key in used:
                journal.get(key)
            for key, graded in added.items():
                journal.add(key, graded)
            progress(len(blocks), len(calls))
        return [row for _, rows in sorted(blocks.items()) for row in rows]


@contextmanager
def ray_answers(
    settings: Settings,
    arrangements: Sequence[Arrangement],
    actors: int,
    kept_bytes: int = 0,
    opener: Opener | None = None,
) -> Iterator[RayAnswers]:
    """Connect to Ray and yield actors that answer; ``ray_workers.connect_ray`` chooses the cluster.

    Args:
        actors: Processes that hold a model, each with one CPU. One that dies is started again with its block.
        kept_bytes: Maximum size of the keys and values that each keeps of passages; 0 keeps none.
        opener: Loads the models in an actor; by ``settings`` if None.
    """
    if is_remote(settings.model):
        raise ConfigError(f"model={settings.model!r} is on a server, which answers many at once; leave --ray out")
    with ray_workers(_Answerer, (opener or _load_models, arrangements, settings, kept_bytes), actors) as workers:
        yield RayAnswers(workers)


def _load_models(arrangements: Sequence[Arrangement], settings: Settings) -> tuple[Generator, Reranker, str]:
    return load_models(arrangements, None, None, settings, silent)
