"""Any retriever as the pipeline's: a langchain retriever, a runnable, a function, or an object with ``retrieve``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda

from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import QuestionRetriever


@dataclass(frozen=True, slots=True)
class RunnableRetriever:
    """A runnable from a question to documents, with the pipeline's interface of a retriever.

    The documents keep their order, their scores and their metadata. A runnable that takes an argument ``k`` gets it;
    of any other the first ``k`` documents are used.

    Attributes:
        runnable: The runnable.
    """

    runnable: Runnable[str, Sequence[Document]]

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, in the order of the runnable.

        Raises:
            RetrievalError: the runnable returned something other than langchain documents.
        """
        options: dict[str, Any] = {"k": k} if _takes_k(self.runnable) else {}
        found: Any = self.runnable.invoke(question, **options)
        if not isinstance(found, list | tuple) or not all(isinstance(one, Document) for one in found):
            raise RetrievalError(
                f"the retriever {type(self.runnable).__name__} returned {_kind(found)}; it must return a list of "
                "langchain_core Documents for a question"
            )
        return list(found[:k])


def as_retriever(given: object) -> Retriever:
    """Return ``given`` with the pipeline's interface of a retriever.

    Args:
        given: A langchain retriever, any runnable or function from a question to documents, or an object with
            ``retrieve(question, k)``.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(given, Runnable) and not isinstance(given, QuestionRetriever):
        return RunnableRetriever(given)
    if isinstance(given, Retriever) and not isinstance(given, type):
        return given
    if callable(given) and not isinstance(given, type):
        return RunnableRetriever(RunnableLambda(given))
    raise ConfigError(
        f"retriever={given!r} is no retriever; give a langchain retriever (store.as_retriever()), a runnable or "
        "function from a question to documents, or an object with retrieve(question, k)"
    )


def _takes_k(runnable: Runnable[str, Sequence[Document]]) -> bool:
    """Return whether a langchain retriever names ``k`` among the arguments of its search."""
    if not isinstance(runnable, BaseRetriever):
        return False
    return "k" in inspect.signature(runnable._get_relevant_documents).parameters


def _kind(found: object) -> str:
    if isinstance(found, list | tuple):
        return f"a list with {type(next(one for one in found if not isinstance(one, Document))).__name__} in it"
    return type(found).__name__
