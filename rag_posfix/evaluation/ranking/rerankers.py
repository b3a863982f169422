"""Rerankers by name: checked, created and run on queries, with a count of the tokens that their model reads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.ranking.rankings import (
    QueryCandidates,
    RankedTopics,
    Ranking,
    RankJournal,
    checked_ranking,
    rerank_key,
)
from rag_posfix.evaluation.strict_reranking import rerank_or_raise
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    from langchain_core.documents import BaseDocumentCompressor

__all__ = [
    "OpenedReranker",
    "Ranker",
    "RerankerChoice",
    "check_distinct",
    "check_reranker_choice",
    "count_work",
    "local_ranker",
    "open_reranker",
    "rerank",
    "rerank_one",
]


RerankerChoice = MethodSpec
"""A reranker by name, with its parameters."""


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


def check_distinct(choices: Sequence[RerankerChoice]) -> None:
    """Raise if a reranker occurs twice with the same parameters.

    Raises:
        ConfigError: a reranker occurs twice.
    """
    labels = [choice.label for choice in choices]
    for label_ in labels:
        if labels.count(label_) > 1:
            raise ConfigError(f"reranker {label_!r} occurs twice with the same parameters; remove one of them")


def check_reranker_choice(choice: RerankerChoice) -> None:
    """Check name and parameters without making the reranker: errors are reported before a model is loaded.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or a value out of range.
    """
    RERANKERS.check(choice)


def open_reranker(choice: RerankerChoice, models: RerankerModels) -> OpenedReranker:
    """Return a reranker with its loaded model.

    Raises:
        ConfigError: the name, a parameter or the model is wrong.
    """
    reranker = build_reranker(choice, models)
    return OpenedReranker(choice.label, _identity(choice.name, reranker), reranker)


def rerank_one(opened: OpenedReranker, candidates: QueryCandidates) -> Ranking:
    """Rank the candidates of one query; without candidates the reranker is not called.

    Args:
        candidates: The query and its documents, which are not changed.

    Raises:
        EvaluationError: the reranker failed, or returned something else than scored candidates.
    """
    if not candidates.documents:
        return Ranking((), (), 0.0)
    reranker = opened.reranker
    given = [Document(id=d.id, page_content=d.page_content, metadata=dict(d.metadata)) for d in candidates.documents]
    before = _generations(reranker)
    with count_work(getattr(reranker, "generator", None)) as work:
        started = time.perf_counter()
        returned = rerank_or_raise(
            reranker, given, candidates.question, label=opened.label, query=candidates.query
        )  # fmt: skip
        seconds = time.perf_counter() - started
    ids, scores = checked_ranking(opened.label, candidates.query, candidates.documents, returned)
    after = _generations(reranker)
    return Ranking(
        ids, scores, seconds, forward_passes=work.forward_passes, tokens_read=work.tokens,
        calls=None if before is None or after is None else after - before,
    )  # fmt: skip


def local_ranker(opened: OpenedReranker) -> Ranker:
    """Return a ranker that runs a reranker in this process, one query after the other."""

    def rank_all(queries: Sequence[QueryCandidates]) -> Iterator[tuple[int, Ranking]]:
        for index, candidates in enumerate(queries):
            yield index, rerank_one(opened, candidates)

    return Ranker(opened.label, opened.identity, rank_all)


def rerank(
    ranker: Ranker, queries: Sequence[QueryCandidates], journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Rank the candidates of every query without a ranking in the journal.

    Each new ranking is added to the journal at once, so that an interrupted run can be continued.

    Args:
        journal: Stored rankings; new ones are added.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        EvaluationError: the reranker failed on a query.
    """
    keys = [rerank_key(ranker.identity, candidates) for candidates in queries]
    known = {index: found for index, key in enumerate(keys) if (found := journal.get(key)) is not None}
    reused = frozenset(queries[index].query for index in known)
    missing = [index for index in range(len(queries)) if index not in known]
    with progress(ranker.label) as report:
        report(len(known), len(queries))
        for position, ranking in ranker.rank_all([queries[index] for index in missing]):
            index = missing[position]
            journal.add(keys[index], ranking)
            known[index] = ranking
            report(len(known), len(queries))
    rankings = {candidates.query: known[index] for index, candidates in enumerate(queries)}
    return RankedTopics(ranker.label, rankings, reused)


@dataclass(slots=True)
class ModelWork:
    """The work of a generator, for all callers.

    Attributes:
        forward_passes: Calls of the model.
        tokens: Tokens in them, padding included.
    """

    forward_passes: int = 0
    tokens: int = 0


@contextmanager
def count_work(generator: object | None) -> Iterator[ModelWork]:
    """Count the forward passes and tokens of ``generator`` during the block; zero without a model in this process.

    Args:
        generator: An engine, another generator, or None.
    """
    work = ModelWork()
    model = getattr(getattr(generator, "loaded", None), "model", None)
    if model is None:
        yield work
        return

    def count(_module: Any, _arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        read = named.get("input_ids")
        work.forward_passes += 1
        work.tokens += 0 if read is None else int(read.numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield work
    finally:
        handle.remove()


def _generations(reranker: Reranker) -> int | None:
    """Return the number of generations of a reranker so far, None if it does not count them."""
    counted_so_far = getattr(reranker, "generations", None)
    return counted_so_far if isinstance(counted_so_far, int) else None


def _identity(name: str, reranker: BaseDocumentCompressor) -> str:
    kind = type(reranker)
    values = reranker.model_dump(mode="json", include=set(RERANKERS.parameters(name)))
    made_from = {
        part: _identity_of(getattr(reranker, part)) for part in RerankerModels.__slots__ if part in kind.model_fields
    }
    return content_hash(json.dumps([name, values, made_from], sort_keys=True))


def _identity_of(part: Any) -> str:
    fingerprint = getattr(part, "fingerprint", None)
    device = getattr(getattr(part, "loaded", None), "device", "")
    return f"{fingerprint} {device}" if isinstance(fingerprint, str) else embedding_identity(part)
