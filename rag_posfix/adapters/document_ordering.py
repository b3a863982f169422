"""Reranks documents, keeps the best and orders them, for the adapters. Knows no framework.

Adapters convert their documents to ``FrameworkDocument``; the result refers to them by index, so that an adapter
returns its framework's documents; only their scores are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias

from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import AfterValidator

from rag_posfix.assembly.documents import checked_document, distinct_indices, ranked_indices
from rag_posfix.assembly.orders import OrderInputs, apply_order, create_order
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import RankedDocument, arerank_indexed, parse_filter, rerank_indexed
from rag_posfix.errors import ConfigError, missing_extra


class FrameworkDocument(NamedTuple):
    """The fields of a document of a framework."""

    id: str
    text: str
    title: object = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class OrderedDocument:
    """A document of the result: its index in the given list, and the score of the reranker or its former score."""

    index: int
    score: float | None


@dataclass(frozen=True, slots=True)
class DocumentOrderer:
    """Reranks documents, keeps the best and orders them.

    Attributes:
        order: A name in ``ORDERS``, or ``name:parameter=value``.
        reranker: Scores the documents for the question; None keeps their scores.
        k: Number of documents to keep, all if None.
        seed: For random orders.
        distinct: Whether to leave out documents without text, and all but the best of those with the same text.
    """

    order: str = "relevance"
    reranker: BaseDocumentCompressor | None = None
    k: int | None = None
    seed: int = 0
    distinct: bool = True

    def run(self, documents: Sequence[FrameworkDocument], query: str | None = None) -> list[OrderedDocument]:
        """Return the documents in order; the question ``query`` is required with a reranker."""
        langchain_documents = self._convert(documents, query)
        if self.reranker is None:
            return self._apply_order(
                [RankedDocument(index, document) for index, document in enumerate(langchain_documents)]
            )
        return self._apply_order(rerank_indexed(self.reranker, query or "", langchain_documents))

    async def arun(self, documents: Sequence[FrameworkDocument], query: str | None = None) -> list[OrderedDocument]:
        """Do what ``run`` does with the reranker's asynchronous method."""
        if self.reranker is None:
            return self.run(documents, query)
        return self._apply_order(await arerank_indexed(self.reranker, query or "", self._convert(documents, query)))

    def _convert(self, documents: Sequence[FrameworkDocument], query: str | None) -> list[Document]:
        if self.reranker is not None and documents and not (query and query.strip()):
            raise ConfigError("a reranker needs the question; pass it as the query, or leave the reranker out")
        return [_convert_document(document) for document in documents]

    def _apply_order(self, ranked: Sequence[RankedDocument]) -> list[OrderedDocument]:
        entries = sorted(ranked, key=lambda entry: entry.index)  # ties and missing scores keep the given order
        documents = [entry.document for entry in entries]
        indices = _ordered_indices(documents, self.order, self.k, self.seed, self.distinct)
        return [OrderedDocument(entries[i].index, documents[i].metadata.get("relevance_score")) for i in indices]


def ordered_documents(
    documents: Sequence[Document], order: str, *, k: int | None = None, seed: int = 0, distinct: bool = True
) -> list[Document]:
    """Return the ``k`` best documents, not copied, in the order called ``order``.

    The best are those with the highest ``metadata["relevance_score"]``; the first ones if none has a score. The
    parameters are the fields of ``DocumentOrderer``.

    Raises:
        ConfigError: the order is unknown, or a document is malformed (no Document, no text, a score that is no finite
            number).
    """
    return [documents[index] for index in _ordered_indices(documents, order, k, seed, distinct)]


def checked_count(name: str, count: object) -> None:
    """Raise unless a number of documents is an integer >= 1, or None."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ConfigError(f"{name}={count!r} must be an integer >= 1, or None for all")


def checked_order(order: str) -> str:
    """Return ``order`` if it is ``name`` or ``name:parameter=value`` of an order with valid parameters, or raise."""
    create_order(order)
    return order


OrderName: TypeAlias = Annotated[str, AfterValidator(checked_order)]
"""A field of a model: an order, checked where it is given."""


def _checked_filter(metadata_filter: dict[str, Any] | None) -> dict[str, Any] | None:
    parse_filter(metadata_filter or {})
    return metadata_filter


FilterField: TypeAlias = Annotated[dict[str, Any] | None, AfterValidator(_checked_filter)]
"""A field of a model: a filter by metadata, checked where it is given."""


def checked_method(spec: MethodSpec) -> MethodSpec:
    """Return ``spec`` if it names a mitigation with valid parameters, or raise, before a model is loaded."""
    try:
        from rag_posfix.mitigations import MITIGATIONS  # torch
    except ImportError as error:
        raise missing_extra(error.name or "torch", "local") from error
    MITIGATIONS.check(spec)
    return spec


def create_reranker(
    reranker: str | BaseDocumentCompressor | None, embedding_model: str, model: str
) -> BaseDocumentCompressor | None:
    """Return a reranker that is given as an object, as ``name`` or as ``name:parameter=value``; loads its models."""
    if not isinstance(reranker, str):
        return reranker
    from rag_posfix.pipeline.build import build_reranker_models
    from rag_posfix.reranking.build import build_reranker, parse_reranker
    from rag_posfix.settings import Settings

    spec = parse_reranker(reranker)
    return build_reranker(spec, build_reranker_models(Settings(embedding_model=embedding_model, model=model)))


def _ordered_indices(documents: Sequence[Document], order: str, k: int | None, seed: int, distinct: bool) -> list[int]:
    """Return the indices of the ``k`` best documents, in the order called ``order``."""
    created = create_order(order)
    checked = [checked_document(document, index) for index, document in enumerate(documents)]
    candidates = distinct_indices(checked)[0] if distinct else tuple(range(len(checked)))
    ranking = ranked_indices([checked[index] for index in candidates])
    best = sorted(candidates[i] for i in ranking[:k])
    facts = OrderInputs(
        relevance=tuple(checked[index].relevance for index in best),
        seed=seed,
        keys=tuple(checked[index].key for index in best),
    )
    return [best[i] for i in apply_order(created, facts)]


def _convert_document(document: FrameworkDocument) -> Document:
    if not isinstance(document.text, str):
        kind = "no text" if document.text is None else f"{type(document.text).__name__}, must be text"
        raise ConfigError(f"document {document.id!r} has {kind}; convert it or leave it out")
    metadata = {"title": document.title, "relevance_score": document.score}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    return Document(page_content=document.text, metadata=metadata, id=document.id or None)
