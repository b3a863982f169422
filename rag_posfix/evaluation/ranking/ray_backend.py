"""Rankings on a Ray cluster: processes with a reranker each rank queries. Results equal those of one process.

Queries contain the texts of their candidates, so processes need neither the collection nor an index. Rankings return
in any order and are identified by their index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rag_posfix.evaluation.ranking.rankings import QueryCandidates, Ranking
from rag_posfix.evaluation.ranking.rerankers import OpenedReranker, Ranker, RerankerChoice, open_reranker, rerank_one
from rag_posfix.evaluation.ray_cluster import connected
from rag_posfix.evaluation.ray_workers import ray_workers
from rag_posfix.settings import Settings

Opener = Callable[[RerankerChoice, Settings], OpenedReranker]

QUERIES_PER_CALL = 4


@contextmanager
def ray_rankers(
    settings: Settings, workers: int, opener: Opener | None = None
) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Connect to Ray and yield what makes rankers there; ``ray_cluster.connected`` says to which cluster.

    A ranker is used up before the next one is made: its processes end then, and at the end of the block.

    Args:
        settings: Models; every process loads its own.
        workers: Processes that hold a reranker, each with one CPU. One that dies is started again with its call.
        opener: Makes a reranker in a process; by name from the registry if None.

    Raises:
        ConfigError: Ray is not installed.
        EvaluationError: the cluster cannot be reached or started, or a process failed.
    """
    with connected() as ray, ExitStack() as running:

        def ranker(choice: RerankerChoice) -> Ranker:
            running.close()
            there = running.enter_context(ray_workers(ray, _Ranking, (opener or _opened, choice, settings), workers))

            def rank_all(queries: Sequence[QueryCandidates]) -> Iterable[tuple[int, Ranking]]:
                starts = range(0, len(queries), QUERIES_PER_CALL)
                calls = [(queries[start : start + QUERIES_PER_CALL],) for start in starts]
                for number, rankings in there.each("rank", calls):
                    yield from enumerate(rankings, start=starts[number])

            # Asked of a process there: this one need not be able to load the model.
            return Ranker(choice.label, there.one("identity"), rank_all)

        yield ranker


class _Ranking:
    """What a process on the cluster does. The reranker is made at the first call."""

    def __init__(self, opener: Opener, choice: RerankerChoice, settings: Settings) -> None:
        self._reranker = functools.cache(lambda: opener(choice, settings))

    def identity(self) -> str:
        return self._reranker().identity

    def rank(self, queries: Sequence[QueryCandidates]) -> list[Ranking]:
        return [rerank_one(self._reranker(), one) for one in queries]


def _opened(choice: RerankerChoice, settings: Settings) -> OpenedReranker:
    from rag_posfix.pipeline.build import build_reranker_models

    return open_reranker(choice, build_reranker_models(settings))
