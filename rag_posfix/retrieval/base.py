"""The base class of all retrievers: it checks questions and implements langchain's methods.

A retriever implements two interfaces: the pipeline's ``Retriever`` (``retrieve``) and langchain's (``invoke``,
``ainvoke``).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from rag_posfix.errors import ConfigError
from rag_posfix.text import checked_question


class QuestionRetriever(BaseRetriever):
    """Base of retrievers. A subclass implements ``_search``, and ``_asearch`` if it can search asynchronously.

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
        return self._search(checked_question(question), _checked_count(k))

    async def aretrieve(self, question: str, k: int) -> list[Document]:
        """Do what ``retrieve`` does without blocking the event loop."""
        return await self._asearch(checked_question(question), _checked_count(k))

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


NOTHING_RELEVANT = 0.3
"""A best cosine below this means for the packaged embedding model that nothing relevant was found.

Measured in docs/retrieval.md.
"""


def cosine_relevance(cosine: float) -> float:
    """Return a cosine in [-1, 1] as relevance in [0, 1]: negative values become 0, others are kept.

    Not ``(cosine + 1) / 2``: later stages take the logarithm of the relevance. With that map an unrelated passage
    (cosine 0) would have relevance 0.5, and the logarithms of all passages would be almost equal.
    """
    return min(max(float(cosine), 0.0), 1.0)


def _checked_count(k: int) -> int:
    if not isinstance(k, int) or k < 1:
        raise ConfigError(f"k={k!r} must be an integer >= 1")
    return k
