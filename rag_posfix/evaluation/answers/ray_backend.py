"""Answers on a Ray cluster: actors with a model each answer blocks of questions. Results equal those of one process.

A block is what one process answers together, so an answer has the same neighbours there as here. The journal stays in
the process that asks: actors are handed what it holds, and return what they added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.answers.answering import QUESTIONS_TOGETHER, AnswerJournal, GradedAnswer
from rag_posfix.evaluation.answers.arrangement import Arrangement
from rag_posfix.evaluation.answers.experiment import (
    EngineFacts,
    arrangement_rerankers,
    engine_facts,
    load_models,
    with_passages_kept,
)
from rag_posfix.evaluation.answers.position_summary import PositionRow
from rag_posfix.evaluation.data.position_example import PositionExample
from rag_posfix.evaluation.progress import silent
from rag_posfix.evaluation.ray_cluster import connected
from rag_posfix.evaluation.ray_workers import RayWorkers, ray_workers
from rag_posfix.generation.remote.address import is_remote
from rag_posfix.settings import Settings


class AnswerRows(Protocol):
    """Answers questions under every condition: ``positions.answer_at_positions`` with its settings filled in."""

    def __call__(
        self,
        engine: Generator,
        examples: Sequence[PositionExample],
        *,
        reranker: Reranker,
        rerankers: Mapping[str, Reranker],
        journal: AnswerJournal,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[PositionRow]:
        """Return the rows of ``examples``."""
        ...


Opener = Callable[[Sequence[Arrangement], Settings], tuple[Generator, Reranker, str]]


class CarriedJournal(AnswerJournal):
    """A journal in memory that begins with known answers, and knows which were asked for and which are new."""

    def __init__(self, known: Mapping[str, GradedAnswer]) -> None:
        super().__init__()
        self._known = known
        self.used: set[str] = set()
        self.added: dict[str, GradedAnswer] = {}

    def get(self, key: str) -> GradedAnswer | None:
        """Return the answer with this key, or None."""
        if key in self._known:
            self.used.add(key)
            return self._known[key]
        return self.added.get(key)

    def add(self, key: str, row: GradedAnswer) -> None:
        """Add an answer."""
        self.added[key] = row


@dataclass(frozen=True, slots=True)
class _Block:
    """The answers to a block of questions."""

    rows: list[PositionRow]
    used: set[str]
    added: dict[str, GradedAnswer]


@dataclass(frozen=True, slots=True)
class _Models:
    engine: Generator
    reranker: Reranker
    rerankers: Mapping[str, Reranker]
    relevance: str


class _Answerer:
    """What an actor does: loads the models once, then answers block after block."""

    def __init__(
        self, opener: Opener, arrangements: Sequence[Arrangement], settings: Settings, kept_bytes: int
    ) -> None:
        self._arrangements = arrangements

        def load() -> _Models:
            engine, reranker, relevance = opener(arrangements, settings)
            rerankers = arrangement_rerankers(arrangements, engine, settings)
            kept = with_passages_kept(engine, kept_bytes) if kept_bytes else engine
            return _Models(kept, reranker, rerankers, relevance)

        # At the first call: of an actor that cannot be made, Ray tells the reason only within a longer text.
        self._models = functools.cache(load)

    def facts(self) -> tuple[EngineFacts, str]:
        models = self._models()
        return engine_facts(models.engine, self._arrangements), models.relevance

    def block(
        self, examples: Sequence[PositionExample], answer: AnswerRows, known: Mapping[str, GradedAnswer]
    ) -> _Block:
        models, journal = self._models(), CarriedJournal(known)
        rows = answer(models.engine, examples, reranker=models.reranker, rerankers=models.rerankers, journal=journal)
        return _Block(rows, journal.used, journal.added)


class RayAnswers:
    """Processes that answer.

    Args:
        workers: The processes, each with an ``_Answerer``.
    """

    def __init__(self, workers: RayWorkers) -> None:
        self._workers = workers

    def facts(self) -> tuple[EngineFacts, str]:
        """Return what the head of a record says of the model, and the name of the reranker that scores passages."""
        found: tuple[EngineFacts, str] = self._workers.one("facts")
        return found

    def rows(
        self,
        examples: Sequence[PositionExample],
        answer: AnswerRows,
        journal: AnswerJournal,
        progress: Callable[[int, int], None],
    ) -> list[PositionRow]:
        """Return the rows of ``examples`` in order; new answers go into ``journal`` as blocks arrive.

        Raises:
            EvaluationError: a process failed.
        """
        known = self._workers.put(journal.known())
        blocks = [examples[at : at + QUESTIONS_TOGETHER] for at in range(0, len(examples), QUESTIONS_TOGETHER)]
        rows: dict[int, list[PositionRow]] = {}
        for index, found in self._workers.each("block", [(block, answer, known) for block in blocks]):
            rows[index] = found.rows
            for key in found.used:
                journal.get(key)
            for key, one in found.added.items():
                journal.add(key, one)
            progress(len(rows), len(blocks))
        return [row for index in range(len(blocks)) for row in rows[index]]


@contextmanager
def ray_answers(
    settings: Settings,
    arrangements: Sequence[Arrangement],
    actors: int,
    kept_bytes: int = 0,
    opener: Opener | None = None,
) -> Iterator[RayAnswers]:
    """Connect to Ray and yield actors that answer; ``ray_cluster.connected`` says to which cluster.

    Args:
        settings: Models; every actor loads its own.
        actors: Processes that hold a model, each with one CPU. One that dies is started again with its block.
        kept_bytes: Bound of the keys and values that each keeps of passages; 0 keeps none.
        opener: Loads the models in an actor; by ``settings`` if None.

    Raises:
        ConfigError: Ray is not installed, or the model is on a server.
        EvaluationError: the cluster cannot be reached or started, or an actor cannot load its models.
    """
    if is_remote(settings.model):
        raise ConfigError(f"model={settings.model!r} is on a server, which answers many at once; leave --ray out")
    given = (opener or _opened, arrangements, settings, kept_bytes)
    with connected() as ray, ray_workers(ray, _Answerer, given, actors) as workers:
        yield RayAnswers(workers)


def _opened(arrangements: Sequence[Arrangement], settings: Settings) -> tuple[Generator, Reranker, str]:
    return load_models(arrangements, None, None, settings, silent)
