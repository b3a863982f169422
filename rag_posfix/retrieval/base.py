"""Retrievers: their base class, and any langchain retriever, vector store, runnable, function or object as one."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import Field

from rag_posfix.checked import Checked
from rag_posfix.contracts.retrieval import Retriever, SimilarityRange, first_matching, matches, parse_filter
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.index.documents import DocumentTable, MetadataFilter, both_filters, deep_copy, stored_id
from rag_posfix.text import checked_question

PACKAGED_SIMILARITY = SimilarityRange(low=0.2, clear=0.6)
"""For the packaged embedding model: 0.2 % of the answerable questions of XQuAD have a best cosine below ``low``."""

UNDECIDED = SimilarityRange(low=0.0, clear=1.0)
"""For scores without a scale, such as those of BM25 and of fused rankings: the judge decides about all passages."""


def packaged_similarity(embeddings: Embeddings) -> SimilarityRange | None:
    """Return the range of the packaged embedding model, and None for others: those are calibrated."""
    return PACKAGED_SIMILARITY if getattr(embeddings, "model", None) == "minilm" else None


class QuestionRetriever(Checked, BaseRetriever):
    """Base of retrievers: the pipeline's ``Retriever`` (``retrieve``) and langchain's (``invoke``, ``ainvoke``).

    A subclass implements ``_search``, and ``_asearch`` if it can search asynchronously. All methods take a ``filter``
    by metadata, in the language of ``contracts.filters``: only matching documents are returned.

    Attributes:
        k: Number of passages that ``invoke`` returns if the call gives no ``k``.
        similarity: Between which scores the judge decides whether a passage is relevant; None leaves all passages.
    """

    evaluates_filters: ClassVar[bool] = True
    weighs_texts: ClassVar[bool] = True  # a query of several texts is searched for by each of them
    k: int = Field(default=10, ge=1)
    similarity: SimilarityRange | None = None

    def similarity_range(self) -> SimilarityRange | None:
        """Return between which scores the judge decides about relevance; None if the scores are not known."""
        return self.similarity

    def retrieve(self, question: str, k: int, filter: Mapping[str, Any] | None = None) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first.

        Raises:
            ConfigError: the question is empty, ``k`` is below 1, or ``filter`` is no filter.
            RetrievalError: the passages cannot be searched.
        """
        return self._search(checked_question(question), check_count("k", k), _checked(filter))

    async def aretrieve(self, question: str, k: int, filter: Mapping[str, Any] | None = None) -> list[Document]:
        """Do what ``retrieve`` does without blocking the event loop."""
        return await self._asearch(checked_question(question), check_count("k", k), _checked(filter))

    @abstractmethod
    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        """Return at most ``k`` documents, best first, for arguments that were checked."""

    async def _asearch(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        return await asyncio.to_thread(self._search, question, k, metadata_filter)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> list[Document]:
        return self.retrieve(query, self.k if k is None else k, filter)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        filter: Mapping[str, Any] | None = None,
    ) -> list[Document]:
        return await self.aretrieve(query, self.k if k is None else k, filter)


def _checked(metadata_filter: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if metadata_filter is not None:
        parse_filter(metadata_filter)
    return metadata_filter


def cosine_relevance(cosine: float) -> float:
    """Return a cosine in [-1, 1] as relevance in [0, 1]: negative values become 0, others are kept.

    Not ``(cosine + 1) / 2``: later stages take the logarithm of the relevance. With that map an unrelated passage
    (cosine 0) would have relevance 0.5, and the logarithms of all passages would be almost equal.
    """
    return min(max(float(cosine), 0.0), 1.0)


def scored_documents(hits: Iterable[tuple[Document, float]]) -> list[Document]:
    """Return copies of hits with their cosines as ``relevance_score``, best first, ties by id."""
    documents = [
        Document(
            id=stored_id(document),
            page_content=document.page_content,
            metadata={**document.metadata, "relevance_score": cosine_relevance(cosine)},
        )
        for document, cosine in hits
    ]
    return sorted(documents, key=lambda document: (-document.metadata["relevance_score"], str(document.id)))


def check_count(name: str, count: int) -> int:
    """Return a number of documents, or raise ConfigError if it is no integer >= 1."""
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}={count!r} must be an integer >= 1")
    return count


def passage_by_id(retriever: object, passage_id: str) -> Document | None:
    """Return a copy of the passage of a retriever with an id; None if it has none or cannot look it up.

    Retrievers have their passages in a ``store`` or a ``table``, or are several ``retrievers``.
    """
    store, table = getattr(retriever, "store", None), getattr(retriever, "table", None)
    if table is not None:
        entry = table.entry_of(passage_id)
        return None if entry is None else deep_copy(entry.document)
    if isinstance(store, VectorStore):
        try:
            return next(iter(store.get_by_ids([passage_id])), None)
        except NotImplementedError:
            return None
    inner = (passage_by_id(one, passage_id) for one in getattr(retriever, "retrievers", ()))
    return next((passage for passage in inner if passage is not None), None)


def first_passages(retriever: object, metadata_filter: Mapping[str, Any] | None, count: int) -> list[Document]:
    """Return copies of those of a retriever's first ``count`` passages that match a filter, in the order of the index.

    None of a retriever whose passages cannot be listed, such as a vector store on a server.
    """
    table = getattr(retriever, "table", None) or getattr(getattr(retriever, "store", None), "table", None)
    if not isinstance(table, DocumentTable):
        lists = (first_passages(one, metadata_filter, count) for one in getattr(retriever, "retrievers", ()))
        return next(filter(None, lists), [])
    filters = [each for each in (getattr(retriever, "filter", None), metadata_filter) if each is not None]
    tests = [each if callable(each) else partial(matches, parse_filter(each)) for each in filters]
    documents = table.first(count)
    return [deep_copy(document) for document in documents if all(test(document.metadata) for test in tests)]


def takes_filters(runnable: object) -> bool:
    """Return whether ``invoke`` of a retriever takes ``filter`` in the language of ``contracts.filters``.

    It or its vector store says so by an attribute ``evaluates_filters``.
    """
    holder = runnable.vectorstore if isinstance(runnable, VectorStoreRetriever) else runnable
    return bool(getattr(holder, "evaluates_filters", False))


def with_own_filter(runnable: object, metadata_filter: MetadataFilter) -> MetadataFilter | None:
    """Return a filter joined with the one in ``search_kwargs`` of a retriever, which ``invoke`` would replace."""
    own = runnable.search_kwargs.get("filter") if isinstance(runnable, VectorStoreRetriever) else None
    return both_filters(own, metadata_filter)


@dataclass(frozen=True, slots=True)
class RunnableRetriever:
    """A runnable from a question to documents, with the pipeline's interface of a retriever.

    The documents keep their order, their scores and their metadata. A langchain retriever whose search takes an
    argument ``k`` gets it; of any other runnable the first ``k`` documents are used.
    """

    runnable: Runnable[str, Sequence[Document]]

    def retrieve(self, question: str, k: int, filter: Mapping[str, Any] | None = None) -> list[Document]:
        """Return at most ``k`` documents for ``question``, in the order of the runnable.

        Args:
            filter: Given to a runnable that ``takes_filters``; any other is asked for more documents.

        Raises:
            RetrievalError: the runnable returned something other than langchain documents.
        """
        if not filter:
            return self._invoke(question, k)
        if takes_filters(self.runnable):
            return self._invoke(question, k, filter=with_own_filter(self.runnable, filter))
        options = {"widens": isinstance(self.runnable, VectorStoreRetriever)}
        return first_matching(lambda width: self._invoke(question, width, **options), k, parse_filter(filter))

    def _invoke(self, question: str, k: int, *, widens: bool = False, **options: Any) -> list[Document]:
        runnable = self.runnable
        search = runnable._get_relevant_documents if isinstance(runnable, BaseRetriever) else None
        if widens or (search is not None and "k" in inspect.signature(search).parameters):
            options["k"] = k
        result: Any = runnable.invoke(question, **options)
        kind = type(result).__name__
        if isinstance(result, list | tuple):
            invalid_items = [item for item in result if not isinstance(item, Document)]
            if not invalid_items:
                return list(result[:k])
            kind = f"a list with {type(invalid_items[0]).__name__} in it"
        raise RetrievalError(
            f"the retriever {type(runnable).__name__} returned {kind}; it must return a list of langchain_core "
            "Documents for a question"
        )


def as_retriever(retriever: object) -> Retriever:
    """Return a langchain retriever, runnable, function or object with ``retrieve(question, k)`` as the pipeline's.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(retriever, Runnable) and not isinstance(retriever, QuestionRetriever):
        return RunnableRetriever(retriever)
    if isinstance(retriever, Retriever) and not isinstance(retriever, type):
        return retriever
    if callable(retriever) and not isinstance(retriever, type):
        return RunnableRetriever(RunnableLambda(retriever))
    raise ConfigError(
        f"retriever={retriever!r} must be a langchain retriever (store.as_retriever()), a runnable or function from a "
        "question to documents, or an object with retrieve(question, k)"
    )


__all__ = ["PassageRetriever"]


class PassageRetriever(QuestionRetriever):
    """Returns passages with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first, ties by id.

    With ``FaissVectorStore`` the score is the cosine, or 0 for a negative cosine (see ``base.cosine_relevance``).

    Attributes:
        store: The passages.
        k: Number of passages that ``invoke`` returns if the call gives no ``k``.
        filter: Passed to the store with every search unless None, so in the form that the store takes; for
            ``FaissVectorStore`` see ``index.documents.MetadataFilter``. A store without an attribute
            ``evaluates_filters`` searches without the filter of a question, and its hits are checked one by one.
    """

    store: VectorStore
    filter: Any = None

    def similarity_range(self) -> SimilarityRange | None:
        """Return that of the store, if it has one, in place of none of its own."""
        return self.similarity or getattr(self.store, "similarity", None)

    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        store = self.store
        if metadata_filter is None or getattr(store, "evaluates_filters", False):
            options = _options(both_filters(self.filter, metadata_filter))
            return scored_documents(store.similarity_search_with_relevance_scores(question, k, **options))
        options = _options(self.filter)
        return first_matching(
            lambda width: scored_documents(store.similarity_search_with_relevance_scores(question, width, **options)),
            k,
            parse_filter(metadata_filter),
        )

    async def _asearch(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        if metadata_filter is not None:
            return await super()._asearch(question, k, metadata_filter)
        options = _options(self.filter)
        return scored_documents(await self.store.asimilarity_search_with_relevance_scores(question, k, **options))


def _options(metadata_filter: Any) -> dict[str, Any]:
    return {} if metadata_filter is None else {"filter": metadata_filter}
