"""Rankings of a first stage or a reranker, their journal, and rerankers by name with a count of their model's work."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.trec import decreasing
from rag_posfix.evaluation.journal import LineJournal
from rag_posfix.evaluation.record import Progress, file_digest, silent
from rag_posfix.evaluation.strict_reranking import rerank_or_raise
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.text import content_hash

__all__ = ["RerankerChoice"]

KEY_VERSION = 2
"""2: prompts have the tokens of the stock model."""

RerankerChoice = MethodSpec
"""A reranker by name, with its parameters."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents for one query, best first.

    Attributes:
        ids: Their ids.
        scores: Their scores, not increasing.
        seconds: Time to rank them.
        calls: Answers that the model was asked to write, where the reranker counts them (``generations``).
        forward_passes: Forward passes of the generator, 0 where there is none.
        tokens_read: Tokens in these, padding included.
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    seconds: float
    calls: int | None = None
    forward_passes: int = 0
    tokens_read: int = 0

    def cost(self) -> dict[str, Any]:
        """Return what the ranking cost: all but documents and scores."""
        names = ("seconds", "calls", "forward_passes", "tokens_read")
        return {name: getattr(self, name) for name in names}


_NAMES = {field.name for field in fields(Ranking)}


@dataclass(frozen=True, slots=True)
class QueryCandidates:
    """A query and the documents that are reranked for it.

    Attributes:
        query: The query's id.
        question: Its text.
        documents: As the first stage ordered them, with ``metadata["relevance_score"]`` in [0, 1] where it scores.
    """

    query: str
    question: str
    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankedTopics:
    """The rankings of one system.

    Attributes:
        label: Names it.
        rankings: By query id, in the order of the topics; a ranking may be empty.
        reused: Queries with a ranking from an earlier run.
    """

    label: str
    rankings: Mapping[str, Ranking]
    reused: frozenset[str]

    def run(self) -> dict[str, dict[str, float]]:
        """Return scores as written and measured: strictly decreasing within each query, without empty queries."""
        return {
            query: dict(zip(ranking.ids, decreasing(ranking.scores), strict=True))
            for query, ranking in self.rankings.items()
            if ranking.ids
        }


class RankJournal(LineJournal[Ranking]):
    """Rankings by key, in memory and, with a path, in a file that only grows (see ``LineJournal``).

    Args:
        fresh: Start without the rankings of earlier runs. They stay in the file.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("ranking", _read_ranking, path, fresh=fresh)


def _read_ranking(row: Any) -> Ranking | None:
    ids, scores, seconds = row["ids"], row["scores"], row["seconds"]
    counts = [row["forward_passes"], row["tokens_read"], *([] if row["calls"] is None else [row["calls"]])]
    complete = (
        set(row) == _NAMES
        and len(ids) == len(scores)
        and all(isinstance(name, str) for name in ids)
        and all(isinstance(score, float) for score in (*scores, seconds))
        and all(isinstance(count, int) for count in counts)
    )
    return Ranking(**{**row, "ids": tuple(ids), "scores": tuple(scores)}) if complete else None


def retrieval_key(identity: str, question: str, depth: int) -> str:
    """Return a digest of everything that a ranking of the first stage with this ``identity`` depends on."""
    return content_hash(json.dumps([KEY_VERSION, "retrieve", identity, question, depth]))


def rerank_key(identity: str, candidates: QueryCandidates) -> str:
    """Return a digest of everything that a ranking of the reranker with this ``identity`` depends on."""
    documents = [
        [d.id, d.metadata.get("title", ""), d.page_content, d.metadata.get("relevance_score")]
        for d in candidates.documents
    ]
    return content_hash(json.dumps([KEY_VERSION, "rerank", identity, candidates.question, documents]))


def checked_ranking(
    label: str, query: str, candidates: Sequence[Document], returned: Sequence[Document]
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return ids and scores of the returned documents, highest score first, equal scores as they were returned."""
    candidate_ids = {document.id for document in candidates}
    scores: dict[str, float] = {}
    for document in returned:
        name = str(document.id)
        if document.id not in candidate_ids or name in scores:
            problem = "twice" if name in scores else "that it was not given"
            raise EvaluationError(f"{label} returned document {document.id!r} of query {query!r} {problem}")
        score = (document.metadata or {}).get("relevance_score")
        if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
            raise EvaluationError(
                f"{label} scored document {name!r} of query {query!r} {score!r}; metadata['relevance_score'] must be "
                "a finite number"
            )
        scores[name] = float(score)
    ranked = sorted(scores.items(), key=lambda pair: -pair[1])
    return tuple(name for name, _ in ranked), tuple(score for _, score in ranked)


def relevance(scores: Sequence[float]) -> list[float]:
    """Return scores of one query, from best to worst, as relevance in [0, 1], the input of rerankers.

    Scores in [0, 1] stay. Others that are not negative are divided by the highest; with a negative one among them only
    the order is kept: 1, (n - 1) / n, ..., 1 / n.
    """
    if all(0.0 <= score <= 1.0 for score in scores):
        return list(scores)
    if min(scores) >= 0.0:
        return [score / max(scores) for score in scores]
    return [1.0 - index / len(scores) for index in range(len(scores))]


def rank_missing(
    label: str,
    queries: Sequence[str],
    keys: Sequence[str],
    rank: Callable[[Sequence[int]], Iterable[tuple[int, Ranking]]],
    journal: RankJournal,
    report: Callable[[int, int], None],
) -> RankedTopics:
    """Rank every query without a ranking in the journal; each new ranking is added to it at once.

    Args:
        rank: Yields (index, ranking) of the queries with these numbers, in any order.
    """
    rankings = {number: ranking for number, key in enumerate(keys) if (ranking := journal.get(key)) is not None}
    reused = frozenset(queries[number] for number in rankings)
    missing = [number for number in range(len(keys)) if number not in rankings]
    report(len(rankings), len(keys))
    for index, ranking in rank(missing):
        number = missing[index]
        journal.add(keys[number], ranking)
        rankings[number] = ranking
        report(len(rankings), len(keys))
    return RankedTopics(label, {query: rankings[number] for number, query in enumerate(queries)}, reused)


@dataclass(frozen=True, slots=True, eq=False)
class OpenedReranker:
    """A reranker with its loaded model.

    Attributes:
        label: Name and parameters.
        identity: Digest of the reranker, its parameters and its weights.
        reranker: The reranker.
    """

    label: str
    identity: str
    reranker: Reranker


@dataclass(frozen=True, slots=True, eq=False)
class Ranker:
    """A reranker and where it runs.

    Attributes:
        label: Names it in results.
        identity: All that its rankings depend on besides the candidates.
        rank_all: Yields (index, ranking) of queries, in any order.
    """

    label: str
    identity: str
    rank_all: Callable[[Sequence[QueryCandidates]], Iterable[tuple[int, Ranking]]]


def check_rerankers(choices: Sequence[RerankerChoice]) -> None:
    """Check names and parameters without making a reranker: errors are reported before a model is loaded."""
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"reranker {label!r} occurs twice with the same parameters; remove one of them")
    for choice in choices:
        RERANKERS.check(choice)


def open_reranker(choice: RerankerChoice, models: RerankerModels) -> OpenedReranker:
    """Return a reranker with its loaded model."""
    reranker = build_reranker(choice, models)
    return OpenedReranker(choice.label, reranker_identity(choice.name, reranker), reranker)


def reranker_identity(name: str, reranker: BaseDocumentCompressor) -> str:
    """Return a digest of a reranker, its parameters and its weights."""
    values = reranker.model_dump(mode="json", include=set(RERANKERS.parameters(name)))
    models = {}
    for field in RerankerModels.__slots__:
        if field in type(reranker).model_fields:
            model: Any = getattr(reranker, field)
            fingerprint = getattr(model, "fingerprint", None)
            device = getattr(getattr(model, "loaded", None), "device", "")
            models[field] = f"{fingerprint} {device}" if isinstance(fingerprint, str) else embedding_identity(model)
    named = [parse_method(text, "reranker", "top_n=5") for text in values.get("scorers") or ()]
    folders = _folder_digests(named if "generator" in models else [MethodSpec(name, values)])
    identity = [name, values, models, *([folders] if folders else [])]
    return content_hash(json.dumps(identity, sort_keys=True))


def _folder_digests(specs: Sequence[MethodSpec]) -> dict[str, str]:
    """Return digests of the folders that rerankers name as their models, whose weights may change in training."""
    digests: dict[str, str] = {}
    for spec in specs:
        model = spec.parameters.get("model")
        if isinstance(model, str) and Path(model).is_dir():
            files = sorted(path for path in Path(model).rglob("*") if path.is_file())
            digests[model] = content_hash(*(f"{path.relative_to(model)} {file_digest(path)}" for path in files))
    return digests


def rerank_one(opened_reranker: OpenedReranker, candidates: QueryCandidates) -> Ranking:
    """Rank copies of the candidates of one query; without candidates the reranker is not called."""
    if not candidates.documents:
        return Ranking((), (), 0.0)
    reranker = opened_reranker.reranker
    copies = [Document(id=d.id, page_content=d.page_content, metadata=dict(d.metadata)) for d in candidates.documents]
    before = getattr(reranker, "generations", None)
    with count_work(getattr(reranker, "generator", None)) as work:
        started = time.perf_counter()
        returned = rerank_or_raise(
            reranker, copies, candidates.question, label=opened_reranker.label, query=candidates.query
        )
        seconds = time.perf_counter() - started
    ids, scores = checked_ranking(opened_reranker.label, candidates.query, candidates.documents, returned)
    after = getattr(reranker, "generations", None)
    calls = after - before if isinstance(before, int) and isinstance(after, int) else None
    return Ranking(ids, scores, seconds, calls, work.forward_passes, work.tokens)


def local_ranker(opened_reranker: OpenedReranker) -> Ranker:
    """Return a ranker that runs a reranker in this process, one query after the other."""

    def rank_all(queries: Sequence[QueryCandidates]) -> Iterator[tuple[int, Ranking]]:
        for index, candidates in enumerate(queries):
            yield index, rerank_one(opened_reranker, candidates)

    return Ranker(opened_reranker.label, opened_reranker.identity, rank_all)


def rerank(
    ranker: Ranker, queries: Sequence[QueryCandidates], journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Rank the candidates of every query without a ranking in the journal."""

    def rank(missing: Sequence[int]) -> Iterable[tuple[int, Ranking]]:
        return ranker.rank_all([queries[number] for number in missing])

    ids = [candidates.query for candidates in queries]
    keys = [rerank_key(ranker.identity, candidates) for candidates in queries]
    with progress(ranker.label) as report:
        return rank_missing(ranker.label, ids, keys, rank, journal, report)


@dataclass(slots=True)
class ModelWork:
    """The forward passes of a generator for all callers, and the tokens in them, padding included."""

    forward_passes: int = 0
    tokens: int = 0


@contextmanager
def count_work(generator: object | None) -> Iterator[ModelWork]:
    """Count the work of ``generator`` during the block; zero without a model in this process."""
    work = ModelWork()
    model = getattr(getattr(generator, "loaded", None), "model", None)
    if model is None:
        yield work
        return

    def count(_module: Any, _arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        token_ids = named.get("input_ids")
        work.forward_passes += 1
        work.tokens += 0 if token_ids is None else int(token_ids.numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield work
    finally:
        handle.remove()
