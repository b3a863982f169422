"""A Haystack component that reranks documents, keeps the best and orders them. Needs the extra ``haystack``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.adapters.document_ordering import (
    DocumentOrderer,
    FrameworkDocument,
    OrderedDocument,
    checked_count,
    checked_order,
    create_reranker,
)
from rag_posfix.contracts.retrieval import matches, parse_filter
from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.parameters import shown

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.errors import FilterError
    from haystack.utils.filters import document_matches_filter
except ImportError as error:
    raise missing_extra("haystack", "haystack") from error


@component
class PosfixRanker:
    """Orders documents for the generator, after reranking them if a reranker is given.

    With ``order="ends_first"`` and no reranker it does what ``LostInTheMiddleRanker`` does. The scores of the
    documents are their relevance; if none has a score, the given order counts as best first. Documents without text
    are left out, and all but the best of those with the same text.

    Example:
        .. code-block:: python

            ranker = PosfixRanker(order="ends_first", reranker="embedding", top_k=5)
            ranker.run(documents=found, query="Who designed the lighthouse?")["documents"]

    Args:
        order: A name (``rag-posfix methods``), or ``name:parameter=value``.
        reranker: A reranker by name, or ``name:parameter=value``; or any langchain compressor that scores, which
            cannot be serialised. None keeps the scores.
        top_k: Number of documents to keep, the best; all if None.
        seed: For the order ``random``.
        filters: Leave out documents that do not match: Haystack's form (``{"field": "meta.year", "operator": ">=",
            "value": 1999}``), which Haystack evaluates, or that of ``rag_posfix`` for ``meta`` (``{"year": {"$gte":
            1999}}``).

    Raises:
        ConfigError: an unknown order, a number out of range, or filters that are none.
    """

    def __init__(
        self,
        order: str = "ends_first",
        reranker: str | BaseDocumentCompressor | None = None,
        top_k: int | None = None,
        seed: int = 0,
        embedding_model: str = "minilm",
        model: str = "smollm2",
        filters: dict[str, Any] | None = None,
    ) -> None:
        checked_count("top_k", top_k)
        self.filters = filters
        self._is_match = _predicate(filters)
        self.order = checked_order(order)
        self.reranker = reranker
        self.top_k = top_k
        self.seed = seed
        self.embedding_model = embedding_model
        self.model = model
        self._loaded: BaseDocumentCompressor | None = None

    def warm_up(self) -> None:
        """Load the models of the reranker. ``run`` does it if it was not done."""
        if self._loaded is None:
            self._loaded = create_reranker(self.reranker, self.embedding_model, self.model)

    @component.output_types(documents=list[Document])
    def run(
        self,
        documents: list[Document],
        query: str | None = None,
        top_k: int | None = None,
        filters: dict[str, Any] | None = None,
    ) -> dict[str, list[Document]]:
        """Return copies of the documents in order, with their new scores.

        Args:
            query: The question; required with a reranker.
            top_k: Number of documents to keep, in place of the component's.
            filters: Further filters, besides the component's.

        Raises:
            ConfigError: a document without text, a score that is no finite number, a missing question, or filters
                that are none or compare values of different types.
        """
        orderer, documents = self._orderer(top_k), self._matching(documents, filters)
        return _output(documents, orderer.run([_fields(document) for document in documents], query))

    @component.output_types(documents=list[Document])
    async def run_async(
        self,
        documents: list[Document],
        query: str | None = None,
        top_k: int | None = None,
        filters: dict[str, Any] | None = None,
    ) -> dict[str, list[Document]]:
        """Do what ``run`` does with the reranker's asynchronous method; arguments and errors as for ``run``."""
        orderer, documents = self._orderer(top_k), self._matching(documents, filters)
        return _output(documents, await orderer.arun([_fields(document) for document in documents], query))

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a dictionary.

        Raises:
            ConfigError: the reranker was given as an object.
        """
        if not (self.reranker is None or isinstance(self.reranker, str)):
            kind = type(self.reranker).__name__
            raise ConfigError(f"PosfixRanker: a {kind} object cannot be serialised; give the reranker by name")
        data: dict[str, Any] = default_to_dict(
            self,
            order=self.order,
            reranker=self.reranker,
            top_k=self.top_k,
            seed=self.seed,
            embedding_model=self.embedding_model,
            model=self.model,
            **({} if self.filters is None else {"filters": self.filters}),
        )
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PosfixRanker:
        """Return the component that ``to_dict`` returned as a dictionary."""
        component: PosfixRanker = default_from_dict(cls, data)
        return component

    def _matching(self, documents: list[Document], filters: dict[str, Any] | None) -> list[Document]:
        is_match = _predicate(filters)
        return [document for document in documents if self._is_match(document) and is_match(document)]

    def _orderer(self, top_k: int | None) -> DocumentOrderer:
        checked_count("top_k", top_k)
        self.warm_up()
        return DocumentOrderer(self.order, self._loaded, self.top_k if top_k is None else top_k, self.seed)


_HAYSTACK_FORMS = ({"field", "operator", "value"}, {"operator", "conditions"})


def _predicate(filters: Mapping[str, Any] | None) -> Callable[[Document], bool]:
    """Return filters in either form as a function of a document; their form is checked."""
    if not isinstance(filters, Mapping) or set(filters) not in _HAYSTACK_FORMS:
        condition = parse_filter({} if filters is None else filters)
        return lambda document: matches(condition, document.meta)
    _check_conditions(filters)
    return partial(_matches_haystack, filters)


def _check_conditions(filters: Any) -> None:
    """Evaluate every condition by itself: Haystack stops at the first one that decides."""
    _matches_haystack(filters, Document())
    if "conditions" in filters:
        for member in filters["conditions"]:
            _check_conditions(member)


def _matches_haystack(filters: Any, document: Document) -> bool:
    try:
        return bool(document_matches_filter(filters, document))
    except (FilterError, TypeError, RecursionError) as error:
        raise ConfigError(f"filters={shown(filters)} cannot be evaluated by Haystack: {error}") from error


def _fields(document: Document) -> FrameworkDocument:
    return FrameworkDocument(document.id, document.content, document.meta.get("title"), document.score)


def _output(documents: list[Document], ordered: list[OrderedDocument]) -> dict[str, list[Document]]:
    return {"documents": [replace(documents[entry.index], score=entry.score) for entry in ordered]}
