"""Retrievers and rerankers: protocols, filtered and weighted searches, indexed reranking, failures of rerankers."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.contracts.filters import Condition, matches, parse_filter
from rag_posfix.errors import ConfigError, RerankingError

_INDEX = "_rag_posfix_index"
"""Metadata of each document during reranking: ids may be missing or equal, and do not identify a document."""

WIDEST_SEARCH = 4096
"""Most documents that are fetched to find matching ones in a retriever that takes no filter."""

_WEIGHTED_CANDIDATES = 100
"""Passages that are searched for each message, at least; a passage that is not found has the score of the last one."""

DETAILS = "reranking"
"""Metadata key under which a reranker describes how it scored a document."""

QUESTION_TOO_LONG = "question_too_long"
"""Entry of ``DETAILS`` of documents that were not scored because the question leaves no room for them."""

FAILING_AFTER = 3
"""Failures in a row after which a reranker counts as failing."""


@dataclass(frozen=True, slots=True)
class SimilarityRange:
    """Similarities of an embedding model between which another judge decides.

    Attributes:
        low: A passage below it is not about the question.
        clear: With a passage from here on, the passages are about the question.
    """

    low: float
    clear: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.clear <= 1:
            raise ConfigError(f"similarities low={self.low}, clear={self.clear} must be 0 <= low <= clear <= 1")


@runtime_checkable
class Retriever(Protocol):
    """Finds candidates: Documents with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first."""

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first."""
        ...


@runtime_checkable
class QueryRetriever(Protocol):
    """Finds candidates for a query of several texts in its own way."""

    def retrieve_query(self, query: SearchQuery, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        """Return at most ``k`` documents for ``query`` that match a filter, best first."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """Scores documents for a question (a langchain ``BaseDocumentCompressor`` has this method)."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Return copies, best first, with ``metadata["relevance_score"]`` in [0, 1]; ties keep their order."""
        ...


def current_of(retriever: Retriever) -> Retriever:
    """Return the retriever that one question uses from its beginning to its end.

    A retriever whose passages are replaced as a whole meanwhile has it in an attribute ``current_retriever``.
    """
    current: Retriever = getattr(retriever, "current_retriever", retriever)
    return current


def retrieve_matching(
    retriever: Retriever, question: str, k: int, metadata_filter: Mapping[str, Any] | None
) -> list[Document]:
    """Return at most ``k`` documents of ``retriever`` that match a filter, best first; all match without a filter.

    A retriever whose ``retrieve`` takes ``filter`` gets it. Any other is asked for more documents until ``k`` of them
    match. Either way, every document is checked here: one without the metadata that the filter needs is left out.

    Raises:
        ConfigError: it is no filter.
    """
    if not metadata_filter:
        return retriever.retrieve(question, k)
    condition = parse_filter(metadata_filter)
    if "filter" in inspect.signature(retriever.retrieve).parameters:
        filtering: Any = retriever
        return [
            document
            for document in filtering.retrieve(question, k, filter=metadata_filter)
            if matches(condition, document.metadata)
        ]
    return first_matching(lambda width: retriever.retrieve(question, width), k, condition)


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """What is searched for.

    Attributes:
        text: For rerankers, and for retrievers that take one text.
        weighted: Texts with weights, the question first: the score of a passage is the weighted mean of its scores
            for the texts. Empty if ``text`` is searched for.
    """

    text: str
    weighted: tuple[tuple[str, float], ...] = ()


def retrieve_query(
    retriever: Retriever, query: SearchQuery, k: int, metadata_filter: Mapping[str, Any] | None
) -> list[Document]:
    """Return at most ``k`` documents for a query, best first.

    Retrievers with ``weighs_texts`` search for each text of ``query.weighted``. Formula: score(d) = sum_i w_i s_i(d) /
    sum_i w_i. Cosines are linear in the query's embedding and BM25 is a sum over words, so this is the score of the
    weighted sum of the embeddings, or of words with the weights of their messages. A retriever with a method
    ``retrieve_query`` is asked by it. Other retrievers get ``query.text``.
    """
    if isinstance(retriever, QueryRetriever):
        return retriever.retrieve_query(query, k, metadata_filter)
    if len(query.weighted) < 2 or not getattr(retriever, "weighs_texts", False):
        return retrieve_matching(retriever, query.text, k, metadata_filter)
    width = max(k, _WEIGHTED_CANDIDATES)
    documents: dict[str, Document] = {}
    searches: list[tuple[float, dict[str, float], float]] = []  # weight, scores, score of what is not among them
    for text, weight in query.weighted:
        hits = retrieve_matching(retriever, text, width, metadata_filter)
        scores = {str(hit.id): float(hit.metadata["relevance_score"]) for hit in hits}
        searches.append((weight, scores, min(scores.values()) if len(hits) == width else 0.0))
        documents = {str(hit.id): hit for hit in hits} | documents
    total = sum(weight for weight, _, _ in searches)
    relevance = {
        name: sum(weight * scores.get(name, other) for weight, scores, other in searches) / total for name in documents
    }
    best = sorted(documents, key=lambda name: (-relevance[name], name))[:k]
    return [
        documents[name].model_copy(
            update={"metadata": {**documents[name].metadata, "relevance_score": min(relevance[name], 1.0)}}
        )
        for name in best
    ]


def first_matching(retrieve: Callable[[int], list[Document]], k: int, condition: Condition) -> list[Document]:
    """Return the first ``k`` documents that meet a condition, of a search that takes a number of documents alone.

    The search is repeated for four times as many, until ``k`` match, there are no more, or ``WIDEST_SEARCH`` were
    searched: then fewer may be returned than there are.
    """
    width = k
    while True:
        documents = retrieve(width)
        hits = [document for document in documents if matches(condition, document.metadata)]
        if len(hits) >= k or len(documents) < width or width >= WIDEST_SEARCH:
            return hits[:k]
        width = min(4 * width, max(k, WIDEST_SEARCH))


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A reranked document.

    Attributes:
        index: Its index in the list that was reranked.
        document: The copy that the reranker returned, with its score.
    """

    index: int
    document: Document


def rerank_indexed(reranker: Reranker, question: str, documents: Sequence[Document]) -> list[RankedDocument]:
    """Return what a reranker returns, in its order, each document with its index in ``documents``.

    The reranker is not called without documents; they are left untouched.

    Raises:
        RerankingError: the reranker dropped the metadata of a document.
    """
    if not documents:
        return []
    return _restore_indices(reranker, reranker.compress_documents(_add_index(documents), question))


async def arerank_indexed(
    reranker: BaseDocumentCompressor, question: str, documents: Sequence[Document]
) -> list[RankedDocument]:
    """Do what ``rerank_indexed`` does with the reranker's asynchronous method."""
    if not documents:
        return []
    return _restore_indices(reranker, await reranker.acompress_documents(_add_index(documents), question))


def _add_index(documents: Sequence[Document]) -> list[Document]:
    return [
        document.model_copy(update={"metadata": {**(document.metadata or {}), _INDEX: index}})
        for index, document in enumerate(documents)
    ]


def _restore_indices(reranker: object, documents: Sequence[Document]) -> list[RankedDocument]:
    ranked = []
    for document in documents:
        metadata = dict(document.metadata or {})
        index = metadata.pop(_INDEX, None)
        if not isinstance(index, int):
            raise RerankingError(
                f"{type(reranker).__name__} returned a document without the metadata that it was given "
                f"({', '.join(sorted(metadata)) or 'none'} is left); a reranker must return copies with all metadata"
            )
        ranked.append(RankedDocument(index, document.model_copy(update={"metadata": metadata})))
    return ranked


@dataclass(frozen=True, slots=True)
class RerankerFailures:
    """The failures of one reranker: by reason (``error``, ``timeout``), and those since its last success.

    ``since`` is the Unix time of the first failure in a row (0 without one), ``last_error`` the name of a class.
    """

    counts: dict[str, int] = field(default_factory=lambda: {"error": 0, "timeout": 0})
    in_a_row: int = 0
    since: float = 0.0
    last_error: str = ""


class RerankerHealth:
    """The failures of rerankers by name. Safe to share between threads. ``clock`` returns the Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, RerankerFailures] = {}

    def failures(self) -> dict[str, RerankerFailures]:
        """Return the failures of each reranker that was called."""
        with self._lock:
            return dict(self._failures)

    def count_success(self, name: str) -> None:
        """End the row of failures of a reranker."""
        with self._lock:
            self._failures[name] = RerankerFailures(self._failures.get(name, RerankerFailures()).counts)

    def count_failure(self, name: str, error: Exception, reason: str) -> None:
        """Count a failure: ``reason`` is ``error`` or ``timeout``."""
        with self._lock:
            before = self._failures.get(name, RerankerFailures())
            self._failures[name] = replace(
                before,
                counts={**before.counts, reason: before.counts[reason] + 1},
                in_a_row=before.in_a_row + 1,
                since=before.since if before.in_a_row else self._clock(),
                last_error=type(error).__name__,
            )

    def describe_failing(self) -> str | None:
        """Return which rerankers failed ``FAILING_AFTER`` times in a row or more, and since when; None without one."""
        lines = [
            f"reranker {name} failed {failures.in_a_row} times in a row since "
            f"{datetime.fromtimestamp(failures.since, UTC):%Y-%m-%dT%H:%M:%SZ} ({failures.last_error})"
            for name, failures in sorted(self.failures().items())
            if failures.in_a_row >= FAILING_AFTER
        ]
        return "; ".join(lines) + "; documents keep their order" if lines else None
