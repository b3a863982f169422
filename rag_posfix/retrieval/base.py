"""What all retrievers share: the checks of a question, langchain's methods. Knows neither passages nor models.

One class plays both roles: the pipeline's ``Retriever`` (``retrieve``) and langchain's (``invoke``, ``ainvoke``).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text

__all__ = ["QuestionRetriever", "checked_question"]


class QuestionRetriever(BaseRetriever):
    """Base of retrievers; one says what it finds, by ``retrieve``, and by ``aretrieve`` where it can wait by itself.

    Attributes:
        k: How many passages ``invoke`` returns where the call names no ``k``.
    """

    k: int = Field(default=10, ge=1)

    @abstractmethod
    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first.

        Args:
            question: Must hold a visible character.
            k: How many at most.

        Raises:
            ConfigError: the question is empty, or ``k`` is below 1.
            RetrievalError: the passages cannot be searched.
        """

    async def aretrieve(self, question: str, k: int) -> list[Document]:
        """Do what ``retrieve`` does without blocking the event loop.

        Args:
            question: Must hold a visible character.
            k: How many at most.
        """
        return await asyncio.to_thread(self.retrieve, question, k)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return self.retrieve(query, self.k if k is None else k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return await self.aretrieve(query, self.k if k is None else k)


def checked_question(question: str, k: int) -> str:
    """Return ``question`` with clean text.

    Args:
        question: What is asked.
        k: How many passages are wanted.

    Raises:
        ConfigError: the question has no visible character, or ``k`` is below 1.
    """
    if not question.strip():
        raise ConfigError(f"the question is empty ({question!r}); pass a question with at least one visible character")
    if not isinstance(k, int) or k < 1:
        raise ConfigError(f"k={k!r} must be an integer >= 1")
    return clean_text(question)
