"""Rankings on a Ray cluster: actors with a reranker each rank batches of queries. Results equal those of one process.

Rows contain the texts of their candidates, so actors need neither the collection nor an index. Rankings return in any
order and are identified by their index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import orjson
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError, RagPosfixError, missing_extra
from rag_posfix.evaluation.ranking.rankings import QueryCandidates, Ranking
from rag_posfix.evaluation.ranking.rerankers import OpenedReranker, Ranker, RerankerChoice, open_reranker, rerank_one
from rag_posfix.settings import Settings

__all__ = ["ray_rankers"]

Opener = Callable[[RerankerChoice, Settings], OpenedReranker]

_QUERIES_PER_BATCH = 4
_MAX_BLOCKS = 1000


@contextmanager
def ray_rankers(
    settings: Settings, actors: int, opener: Opener | None = None
) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Connect to Ray and yield what makes rankers there; a cluster that was started here ends with the block.

    A process that is connected already stays connected. Otherwise Ray itself decides what to connect to: the cluster
    that ``RAY_ADDRESS`` names, or a new one on this machine.

    Args:
        settings: Models; every actor loads its own.
        actors: Processes that hold a reranker, each with one CPU.
        opener: Makes a reranker in an actor; by name from the registry if None.

    Raises:
        ConfigError: Ray is not installed.
        EvaluationError: the cluster cannot be reached or started.
    """
    ray = _import()
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it reports each data set
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
        except Exception as error:  # whatever Ray objects to, the user needs one line
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise EvaluationError(f"no Ray cluster: {reason}; check RAY_ADDRESS, or leave --ray out") from error
    opener = opener or _opened
    try:
        yield lambda choice: _ranker(ray, choice, settings, actors, opener)
    finally:
        if started:
            ray.shutdown()


def _ranker(ray: Any, choice: RerankerChoice, settings: Settings, actors: int, opener: Opener) -> Ranker:
    # Asked of a worker: this process need not be able to load the model.
    identity = _found(lambda: ray.get(ray.remote(_identity).remote(opener, choice, settings)))

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
        while (row := _found(lambda: next(rows_back, None))) is not None:
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


def _found(ask: Callable[[], Any]) -> Any:
    """Return what a worker found; where it failed, its own error in one line."""
    try:
        return ask()
    except Exception as error:  # Ray raises errors of classes that it makes at run time
        cause = getattr(error, "cause", error)
        if isinstance(cause, RagPosfixError):
            raise EvaluationError(str(cause)) from error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise EvaluationError(f"a Ray worker failed ({type(cause).__name__}: {reason})") from error


def _import() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra(str(error.name), "ray") from error
    return ray
