"""The registry of rerankers, their base class, and maps from raw scores to scores in [0, 1]."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict

from rag_posfix.assembly.documents import CheckedDocument, checked_document
from rag_posfix.cancellation import run_until_cancelled
from rag_posfix.checked import Checked
from rag_posfix.contracts.generator import GeneratorCapability
from rag_posfix.contracts.method_spec import named_method
from rag_posfix.contracts.retrieval import DETAILS
from rag_posfix.errors import RerankingError
from rag_posfix.parameters import Integer
from rag_posfix.registry import Registry
from rag_posfix.text import checked_question

ROUNDING = 1e-6
"""Scores whose standard deviation is below this share of the largest are equal."""


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)), without overflow. NaN stays NaN.

    In this form it never decreases, not even in the last digit; exp(value) / (1 + exp(value)) does.
    """
    return 0.0 if value < -700 else 1.0 / (1.0 + math.exp(-value))


def log_sum(values: Sequence[float]) -> float:
    """Return log sum_k exp(value_k), without overflow; of at least one value."""
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))


def sigmoid_of_z_scores(raw: Sequence[float]) -> list[float]:
    """Return the sigmoid of each score's z-score in the list: 0.5 for the mean; equal scores stay equal.

    For scores without a fixed scale, which may be negative.

    Formula: sigmoid((s_k - mean(s)) / std(s)) with the population standard deviation; 0.5 for each if all are equal.
    """
    return [sigmoid(value) for value in z_scores(raw)]


def z_scores(raw: Sequence[float]) -> list[float]:
    """Return (s_k - mean(s)) / std(s) of each score, with the population standard deviation.

    All are 0 if the scores are equal up to the rounding of float32: otherwise rounding would count as a difference.
    """
    if not raw:
        return []
    mean = math.fsum(raw) / len(raw)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in raw) / len(raw))
    if deviation <= ROUNDING * max(map(abs, raw)):
        return [0.0] * len(raw)
    return [(value - mean) / deviation for value in raw]


def sum_normalized(raw: Sequence[float]) -> list[float]:
    """Return each score divided by the sum of the list; equal shares if all are 0. For scores of 0 and above.

    Formula: s_k / sum(s).
    """
    total = math.fsum(raw)
    if not raw:
        return []
    return [min(value / total, 1.0) for value in raw] if total > 0 else [1 / len(raw)] * len(raw)


RERANKERS: Registry[type[BaseDocumentCompressor]] = Registry(
    "reranker", parts=("embeddings", "generator", "connect", "load_model"), parse=named_method
)


@dataclass(frozen=True, slots=True)
class DocumentScore:
    """The score of one document.

    Attributes:
        score: In [0, 1].
        raw: The method's own score, any finite number; None if the document was not read.
        details: More metadata under ``DETAILS``.
    """

    score: float
    raw: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DistinctDocuments:
    """The distinct contents of a list of documents.

    Attributes:
        keys: The content key of each given document; equal for equal title and text.
        documents: One document for each content with visible text, in the given order.
    """

    keys: tuple[str, ...]
    documents: tuple[CheckedDocument, ...]


class ScoringReranker(Checked, BaseDocumentCompressor):
    """Base of rerankers. A subclass sets ``name`` and implements ``_score``.

    Documents with equal title and text are scored once. Documents without visible text are not scored and have score
    0. Each copy has in ``metadata["reranking"]``: ``reranker``; ``raw_score``, or None and ``"read": False`` if the
    document was not read; and further details of the method.

    Attributes:
        top_n: Number of passages to return, all if None.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    name: ClassVar[str]
    reads: ClassVar[Set[GeneratorCapability]] = frozenset()
    """Capabilities of which the generator must have one; any generator, or none, if empty."""
    selection: ClassVar[tuple[str, ...]] = ("top_n",)
    """Parameters of ``kept``: they decide how many passages are returned and change no score."""

    top_n: Annotated[int | None, Integer(1)] = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return scored copies of ``documents``, best first; equal scores keep the given order.

        Where fewer are returned, equal scores at the limit are chosen by content, and copies of a passage come after
        all others: the order of ``documents`` does not decide what is read.

        Raises:
            ConfigError: the question is empty, or a document is malformed.
            PromptTooLongError: question and template leave no room for documents.
            RerankingError: the model cannot be used, or returned numbers that are not finite.
        """
        if not documents:
            return []
        question, distinct = checked_question(query), distinct_documents(documents)
        scores = self.score(question, distinct.documents) if distinct.documents else ()
        return self._ranked(documents, distinct, scores)

    def score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        """Return the score of each document, in the given order."""
        with self._exclusive():
            return self._score(question, documents)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does in a worker thread. If cancelled, it stops at its next step."""
        return await run_until_cancelled(functools.partial(self.compress_documents, documents, query, callbacks))

    def kept(self, scores: Sequence[float]) -> int:
        """Return how many of the best passages this reranker returns, of passages with these scores, best first."""
        return len(scores[: self.top_n])

    @abstractmethod
    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        """Return the score of each document: at least one, each with visible text, all with different content."""

    def _exclusive(self) -> AbstractContextManager[None]:
        """Return the lock that is held while documents are scored; none by default."""
        return nullcontext()

    def _ranked(
        self, documents: Sequence[Document], distinct: DistinctDocuments, scores: Sequence[DocumentScore]
    ) -> list[Document]:
        for score in scores:
            if score.raw is not None and not math.isfinite(score.raw):
                raise RerankingError(
                    f"{self.name}: the model returned a score of {score.raw}; check its weights and dtype"
                )
        by_key = {document.key: score for document, score in zip(distinct.documents, scores, strict=True)}
        all_scores = [by_key.get(key, DocumentScore(0.0)) for key in distinct.keys]
        details = [_describe_score(self.name, score) for score in all_scores]
        values = [score.score for score in all_scores]
        first = {key: index for index, key in reversed(list(enumerate(distinct.keys)))}
        is_copy = [first[key] != index for index, key in enumerate(distinct.keys)]
        best = sorted(range(len(documents)), key=lambda i: (is_copy[i], -values[i], distinct.keys[i]))
        kept = self.kept([0.0 if is_copy[index] else values[index] for index in best])
        return ranked_copies(documents, values, best[:kept], details)


def distinct_documents(documents: Sequence[Document]) -> DistinctDocuments:
    """Return the distinct contents of documents. Ids are not used: they may be missing or equal.

    In a document that was built without validation, None as text or metadata counts as empty. A score that a document
    has already is not read.

    Raises:
        ConfigError: a document is no Document, or its content is no string.
    """
    checked = [
        checked_document(_replace_none(document), index, with_relevance=False)
        for index, document in enumerate(documents)
    ]
    distinct: dict[str, CheckedDocument] = {}
    for document in checked:
        if document.text.strip():
            distinct.setdefault(document.key, document)
    return DistinctDocuments(tuple(document.key for document in checked), tuple(distinct.values()))


def ranked_copies(
    documents: Sequence[Document],
    scores: Sequence[float],
    chosen: Sequence[int] | None = None,
    details: Sequence[Mapping[str, Any]] | None = None,
) -> list[Document]:
    """Return copies with ``metadata["relevance_score"]``, best first; equal scores keep the given order.

    Args:
        chosen: Indexes of the documents to return; all if None.

    Raises:
        RerankingError: scores are missing, or a score is not a number in [0, 1].
    """
    if len(scores) != len(documents):
        raise RerankingError(f"{len(scores)} scores for {len(documents)} documents; need one score per document")
    for document, score in zip(documents, scores, strict=True):
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise RerankingError(f"document {document.id!r} was scored {score}; a score must lie in [0, 1]")
    returned = range(len(documents)) if chosen is None else chosen
    return [
        _scored_copy(documents[index], scores[index], None if details is None else details[index])
        for index in sorted(returned, key=lambda index: (-scores[index], index))
    ]


def _scored_copy(document: Document, score: float, details: Mapping[str, Any] | None) -> Document:
    metadata = {**(document.metadata or {}), "relevance_score": score}
    if details is not None:
        metadata[DETAILS] = dict(details)
    return document.model_copy(update={"metadata": metadata})


def _describe_score(name: str, score: DocumentScore) -> dict[str, Any]:
    unread = {"read": False} if score.raw is None else {}
    return {"reranker": name, "raw_score": score.raw, **unread, **score.details}


def _replace_none(document: Document) -> Document:
    if not isinstance(document, Document) or (document.page_content is not None and document.metadata is not None):
        return document
    changes = {"page_content": document.page_content or "", "metadata": document.metadata or {}}
    return document.model_copy(update=changes)
