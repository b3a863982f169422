"""Rankings on a Ray cluster: actors with a reranker each rank batches of queries. Results equal those of one process.

Rows contain the texts of their candidates, so actors need neither the collection nor an index. Rankings return in any
order and are identified by their index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import orjson
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.ranking.rankings import QueryCandidates, Ranking
from rag_posfix.evaluation.ranking.rerankers import OpenedReranker, Ranker, RerankerChoice, open_reranker, rerank_one
from rag_posfix.evaluation.ray_cluster import connected, found_there
from rag_posfix.settings import Settings

__all__ = ["ray_rankers"]

Opener = Callable[[RerankerChoice, Settings], OpenedReranker]

_QUERIES_PER_BATCH = 4
_MAX_BLOCKS = 1000


@contextmanager
def ray_rankers(
    settings: Settings, actors: int, opener: Opener | None = None
) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Connect to Ray and yield what makes rankers there; ``ray_cluster.connected`` says to which cluster.

    Args:
        settings: Models; every actor loads its own.
        actors: Processes that hold a reranker, each with one CPU.
        opener: Makes a reranker in an actor; by name from the registry if None.

    Raises:
        ConfigError: Ray is not installed.
        EvaluationError: the cluster cannot be reached or started.
    """
    opener = opener or _opened
    with connected() as ray:
        yield lambda choice: _ranker(ray, choice, settings, actors, opener)


def _ranker(ray: Any, choice: RerankerChoice, settings: Settings, actors: int, opener: Opener) -> Ranker:
    # Asked of a worker: this process need not be able to load the model.
    identity = found_there(lambda: ray.get(ray.remote(_identity).remote(opener, choice, settings)))

    def rank_all(queries: Sequence[QueryCandidates]) -> Iterable[tuple[int, Ranking]]:
        if not queries:
            return
        rows = [{"index": index, "query": _packed(candidates)} for index, candidates in enumerate(queries)]
        blocks = min(-(-len(rows) // _QUERIES_PER_BATCH), _MAX_BLOCKS)
        ranked = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            _RankQueries, fn_constructor_args=(opener, choice, settings), batch_size=_QUERIES_PER_BATCH,
            compute=ray.data.ActorPoolStrategy(size=min(actors, blocks)), num_cpus=1,
        )  # fmt: skip
        rows_back = iter(ranked.iter_rows())
        while (row := found_there(lambda: next(rows_back, None))) is not None:
            yield int(row["index"]), _unpacked(row["ranking"])

    return Ranker(choice.label, identity, rank_all)


class _RankQueries:
    """What an actor does: makes the reranker once, then ranks batch after batch."""

    def __init__(self, opener: Opener, choice: RerankerChoice, settings: Settings) -> None:
        self._opened = opener(choice, settings)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"index": batch["index"], "ranking": [self._ranked(packed) for packed in batch["query"]]}

    def _ranked(self, packed: str) -> str:
        # A failure is a result: Ray would try again, and wrap the message in its own.
        try:
            return orjson.dumps(asdict(rerank_one(self._opened, _candidates(packed)))).decode()
        except EvaluationError as error:
            return orjson.dumps({"error": str(error)}).decode()


def _opened(choice: RerankerChoice, settings: Settings) -> OpenedReranker:
    from rag_posfix.pipeline.build import build_reranker_models

    return open_reranker(choice, build_reranker_models(settings))


def _identity(opener: Opener, choice: RerankerChoice, settings: Settings) -> str:
    return opener(choice, settings).identity


def _packed(candidates: QueryCandidates) -> str:
    documents = [{"id": d.id, "text": d.page_content, "metadata": d.metadata} for d in candidates.documents]
    row = {"query": candidates.query, "question": candidates.question, "documents": documents}
    return orjson.dumps(row).decode()


def _candidates(packed: str) -> QueryCandidates:
    row = orjson.loads(packed)
    documents = (Document(id=d["id"], page_content=d["text"], metadata=d["metadata"]) for d in row["documents"])
    return QueryCandidates(row["query"], row["question"], tuple(documents))


def _unpacked(packed: str) -> Ranking:
    row = orjson.loads(packed)
    if "error" in row:
        raise EvaluationError(row["error"])
    return Ranking(**{**row, "ids": tuple(row["ids"]), "scores": tuple(row["scores"])})
