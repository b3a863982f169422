"""Retrieval from a vector store that other programs fill: ``qdrant:url=...,collection=...``, or a plugin's.

Filters are translated into the store's language; what cannot be translated is checked in the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from rag_posfix.contracts.filters import AllOf, Condition, conjuncts, parse_filter
from rag_posfix.contracts.retrieval import first_matching
from rag_posfix.errors import RagPosfixError, RetrievalError
from rag_posfix.retrieval.base import QuestionRetriever, cosine_relevance
from rag_posfix.retrieval.index.documents import stored_id


class UntranslatableError(ValueError):
    """A condition that a store's language cannot state exactly."""


@dataclass(frozen=True, slots=True)
class ExternalStore:
    """A vector store of langchain and what this package has to know of it.

    Attributes:
        search: Returns documents with ids and cosines for a question, a number, and a translated filter or None.
        translate: Returns a condition in the store's language, or raises ``UntranslatableError``.
        check: Raises an error if the store or its collection cannot be reached.
        vectors: The vector store, for those who write.
    """

    search: Callable[[str, int, Any], list[tuple[Document, float]]]
    translate: Callable[[Condition], Any]
    check: Callable[[], object]
    vectors: VectorStore


class ExternalRetriever(QuestionRetriever):
    """Returns passages of an external store with its ids and scores, best first, ties by id.

    ``relevance_score`` is the cosine that the store computed, or 0 for a negative cosine; nothing is embedded but the
    question.

    Attributes:
        name: The kind of the store, for errors.
        store: The store.
    """

    name: str
    store: Any

    def check(self) -> None:
        """Raise RetrievalError if the store cannot be reached."""
        self._call(self.store.check)

    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        if metadata_filter is None:
            return self._hits(question, k, None)
        condition = parse_filter(metadata_filter)
        pushed = []
        for conjunct in conjuncts(condition):
            try:
                self.store.translate(conjunct)
            except UntranslatableError:
                continue  # checked in each document below
            pushed.append(conjunct)
        argument = self.store.translate(AllOf(tuple(pushed))) if pushed else None
        return first_matching(lambda width: self._hits(question, width, argument), k, condition)

    def _hits(self, question: str, k: int, argument: Any) -> list[Document]:
        documents = [
            Document(
                id=stored_id(document),
                page_content=document.page_content,
                metadata={**document.metadata, "relevance_score": cosine_relevance(round(cosine, 6))},
            )
            for document, cosine in self._call(lambda: self.store.search(question, k, argument))
        ]
        return sorted(documents, key=lambda document: (-document.metadata["relevance_score"], str(document.id)))

    def _call(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RagPosfixError:
            raise
        except Exception as error:  # of each client library its own; their messages may have addresses and secrets
            raise RetrievalError(
                f"the vector store {self.name} failed with {type(error).__name__}; check that it runs, its address "
                "and its collection"
            ) from error
