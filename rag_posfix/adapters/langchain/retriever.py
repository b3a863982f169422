"""A langchain retriever that wraps another: it compresses the documents, keeps the best and orders them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import RunnableConfig, RunnableLambda
from pydantic import ConfigDict, Field

from rag_posfix.adapters.document_ordering import FilterField, OrderName, checked_count, ordered_documents
from rag_posfix.checked import Checked
from rag_posfix.contracts.retrieval import combine_filters
from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.base import takes_filters, with_own_filter
from rag_posfix.retrieval.index.documents import MetadataFilter, both_filters, check_filter, filter_predicate
from rag_posfix.text import clean_text

__all__ = ["DocumentStep", "PosfixRetriever"]

DocumentStep: TypeAlias = BaseDocumentCompressor | BaseDocumentTransformer
"""A reranker, a filter, a text compressor (all get the question) or a transformer (does not get the question)."""


class PosfixRetriever(Checked, BaseRetriever):
    """Retrieves documents, passes them through a chain of compressors, keeps the best and orders them.

    Replaces ``ContextualCompressionRetriever`` and ``LongContextReorder``, whose packages are no longer maintained. In
    a trace the base retriever and every compressor are child runs.

    Example:
        .. code-block:: python

            retriever = PosfixRetriever(base_retriever=store.as_retriever(), order="ends_first", k=5)
            retriever.invoke("Who designed the lighthouse?")

    Attributes:
        base_retriever: Finds the candidates: any retriever, or any runnable from a question to documents. Arguments of
            ``invoke`` other than ``k`` and ``filter`` are passed to it.
        compressors: Rerankers, filters, text compressors and transformers, in the order in which they are applied. Not
            called without documents.
        order: The order of the result: a name (``rag-posfix methods``), or ``name:parameter=value``.
        k: Number of documents to return, the best by ``metadata["relevance_score"]``, or the first if none has a
            score; all if None. ``invoke(question, k=...)`` overrides it.
        seed: For the order ``random``.
        distinct: Whether to leave out documents without text, and all but the best of those with the same text.
        filter: A filter by metadata (docs/retrieval.md), joined with that of ``invoke(question, filter=...)``: the
            base retriever gets both if it takes such filters, and every document is checked. ``invoke`` passes a
            filter in another language to the base retriever, unless that takes no arguments: then it is an error.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    base_retriever: RetrieverLike
    compressors: list[DocumentStep] = Field(default_factory=list)
    order: OrderName = "relevance"
    k: int | None = Field(default=None, ge=1)
    seed: int = 0
    distinct: bool = True
    filter: FilterField = None

    @property
    def evaluates_filters(self) -> bool:
        """Whether ``invoke`` takes ``filter`` in this language: the base retriever does."""
        return takes_filters(self.base_retriever)

    def retrieve(self, question: str, k: int, filter: Mapping[str, Any] | None = None) -> list[Document]:
        """Return the ``k`` best documents, best first, whatever ``order`` is: the pipeline's interface of a retriever.

        Args:
            k: Maximum number of documents.
            filter: Joined with the filter of this retriever.
        """
        metadata_filter = combine_filters(self.filter, filter)
        hits = self.base_retriever.invoke(clean_text(question), **self._options({}, metadata_filter))
        hits = _compress(self.compressors, _matching(hits, metadata_filter), question)
        return ordered_documents(hits, "relevance", k=k, distinct=self.distinct)

    def _options(self, options: dict[str, Any], metadata_filter: MetadataFilter | None) -> dict[str, Any]:
        """Return arguments for the base retriever, with the filter if it takes filters."""
        if not metadata_filter or not self.evaluates_filters:
            return options
        return options | {"filter": with_own_filter(self.base_retriever, metadata_filter)}

    def _read_options(self, options: dict[str, Any]) -> tuple[dict[str, Any], MetadataFilter | None]:
        """Return arguments for the base retriever, and the filter of the call and of this retriever."""
        options = dict(options)
        call_filter = options.pop("filter", None)
        if call_filter is not None and self._is_of_base(call_filter):
            return options | {"filter": call_filter}, self.filter
        joined = both_filters(self.filter, call_filter)
        return self._options(options, joined), joined

    def _is_of_base(self, call_filter: object) -> bool:
        """Return whether a filter is in a language of the base retriever, which is then the one to evaluate it.

        langchain drops all arguments of a retriever whose search takes none.
        """
        base = self.base_retriever
        if self.evaluates_filters or (isinstance(base, BaseRetriever) and not base._expects_other_args):
            return False
        try:
            check_filter(call_filter)
        except ConfigError:
            return True
        return False

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        callbacks = run_manager.get_child()
        options, metadata_filter = self._read_options(kwargs)
        documents = self.base_retriever.invoke(query, RunnableConfig(callbacks=callbacks), **options)
        hits = _matching(documents, metadata_filter)
        return self._apply_order(_compress(self.compressors, hits, query, callbacks), k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        callbacks = run_manager.get_child()
        options, metadata_filter = self._read_options(kwargs)
        documents = await self.base_retriever.ainvoke(query, RunnableConfig(callbacks=callbacks), **options)
        hits = _matching(documents, metadata_filter)
        return self._apply_order(await _acompress(self.compressors, hits, query, callbacks), k)

    def _apply_order(self, documents: list[Document], k: int | None) -> list[Document]:
        checked_count("k", k)
        count = self.k if k is None else k
        return ordered_documents(documents, self.order, k=count, seed=self.seed, distinct=self.distinct)


def _matching(documents: Sequence[Document], metadata_filter: MetadataFilter | None) -> Sequence[Document]:
    if not metadata_filter:
        return documents
    is_match = filter_predicate(metadata_filter)
    return [document for document in documents if is_match(document.metadata)]


def _compress(
    steps: Sequence[DocumentStep], documents: Sequence[Document], query: str, callbacks: Any = None
) -> list[Document]:
    """Return the documents after all steps, each a child run of ``callbacks``."""
    remaining = list(documents)
    for step in steps:
        if remaining:
            remaining = _as_run(step, query).invoke(remaining, {"callbacks": callbacks})
    return remaining


async def _acompress(
    steps: Sequence[DocumentStep], documents: Sequence[Document], query: str, callbacks: Any = None
) -> list[Document]:
    """Do what ``_compress`` does with the steps' asynchronous methods."""
    remaining = list(documents)
    for step in steps:
        if remaining:
            remaining = await _as_run(step, query).ainvoke(remaining, {"callbacks": callbacks})
    return remaining


def _as_run(step: DocumentStep, query: str) -> RunnableLambda[list[Document], list[Document]]:
    def run(documents: list[Document], config: RunnableConfig) -> list[Document]:
        if isinstance(step, BaseDocumentCompressor):
            return list(step.compress_documents(documents, query, **_callbacks(step.compress_documents, config)))
        return list(step.transform_documents(documents))

    async def arun(documents: list[Document], config: RunnableConfig) -> list[Document]:
        if isinstance(step, BaseDocumentCompressor):
            callbacks = _callbacks(step.acompress_documents, config)
            return list(await step.acompress_documents(documents, query, **callbacks))
        return list(await step.atransform_documents(documents))

    return RunnableLambda(run, afunc=arun, name=type(step).__name__)


def _callbacks(method: Any, config: RunnableConfig) -> dict[str, Any]:
    """Return the callbacks as a keyword argument if ``method`` accepts it; older compressors do not."""
    return {"callbacks": config.get("callbacks")} if "callbacks" in inspect.signature(method).parameters else {}
