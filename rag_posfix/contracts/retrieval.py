"""Retrievers and rerankers: their protocols, reranking with the index of each document, and failures of rerankers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.errors import RerankingError

_INDEX = "_rag_posfix_index"
"""Metadata of each document during reranking: ids may be missing or equal, and do not identify a document."""

FAILING_AFTER = 3
"""Failures in a row after which a reranker counts as failing."""


@runtime_checkable
class Retriever(Protocol):
    """Finds candidates: Documents with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first."""

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """Scores documents for a question (a langchain ``BaseDocumentCompressor`` has this method)."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Return copies, best first, with ``metadata["relevance_score"]`` in [0, 1]; ties keep their order."""
        ...


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
