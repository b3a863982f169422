"""Retrievers: their base class, and any langchain retriever, runnable, function or object as one."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import Field

from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.text import checked_question

NOTHING_RELEVANT = 0.3
"""A best cosine below this means for the packaged embedding model that nothing relevant was found.

Measured in docs/retrieval.md.
"""


class QuestionRetriever(BaseRetriever):
    """Base of retrievers: the pipeline's ``Retriever`` (``retrieve``) and langchain's (``invoke``, ``ainvoke``).

    A subclass implements ``_search``, and ``_asearch`` if it can search asynchronously.

    Attributes:
        k: Number of passages that ``invoke`` returns if the call gives no ``k``.
    """

    k: int = Field(default=10, ge=1)

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first.

        Raises:
            ConfigError: the question is empty, or ``k`` is below 1.
            RetrievalError: the passages cannot be searched.
        """
        return self._search(checked_question(question), check_count("k", k))

    async def aretrieve(self, question: str, k: int) -> list[Document]:
        """Do what ``retrieve`` does without blocking the event loop."""
        return await self._asearch(checked_question(question), check_count("k", k))

    @abstractmethod
    def _search(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents, best first, for a question and a ``k`` that were checked."""

    async def _asearch(self, question: str, k: int) -> list[Document]:
        return await asyncio.to_thread(self._search, question, k)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return self.retrieve(query, self.k if k is None else k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return await self.aretrieve(query, self.k if k is None else k)


def cosine_relevance(cosine: float) -> float:
    """Return a cosine in [-1, 1] as relevance in [0, 1]: negative values become 0, others are kept.

    Not ``(cosine + 1) / 2``: later stages take the logarithm of the relevance. With that map an unrelated passage
    (cosine 0) would have relevance 0.5, and the logarithms of all passages would be almost equal.
    """
    return min(max(float(cosine), 0.0), 1.0)


def check_count(name: str, count: int) -> int:
    """Return a number of documents, or raise ConfigError if it is no integer >= 1."""
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}={count!r} must be an integer >= 1")
    return count


@dataclass(frozen=True, slots=True)
class RunnableRetriever:
    """A runnable from a question to documents, with the pipeline's interface of a retriever.

    The documents keep their order, their scores and their metadata. A langchain retriever whose search takes an
    argument ``k`` gets it; of any other runnable the first ``k`` documents are used.
    """

    runnable: Runnable[str, Sequence[Document]]

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, in the order of the runnable.

        Raises:
            RetrievalError: the runnable returned something other than langchain documents.
        """
        runnable = self.runnable
        search = runnable._get_relevant_documents if isinstance(runnable, BaseRetriever) else None
        takes_k = search is not None and "k" in inspect.signature(search).parameters
        result: Any = runnable.invoke(question, k=k) if takes_k else runnable.invoke(question)
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
