"""Documents as rerankers see them: checked, each content once. Knows no model and no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.documents import Document

from rag_posfix.assembly.documents import Candidate, read_document
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text

__all__ = ["Candidates", "checked_question", "read_candidates"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is to be scored.

    Attributes:
        keys: The content key of each document given; equal title and text, equal key.
        distinct: One of each content with visible text, in the order given.
    """

    keys: tuple[str, ...]
    distinct: tuple[Candidate, ...]


def checked_question(query: str) -> str:
    """Return the question, cleaned.

    Raises:
        ConfigError: it is no string, or has no visible character.
    """
    if not isinstance(query, str) or not clean_text(query).strip():
        raise ConfigError(f"the question is empty ({query!r}); pass a question with at least one visible character")
    return clean_text(query)


def read_candidates(documents: Sequence[Document]) -> Candidates:
    """Read documents; they are not changed. Ids do not matter: missing or equal ones are as good as any.

    A document that was built without validation and holds None for its text or its metadata has no text. A score that
    a document brings is not read.

    Raises:
        ConfigError: one is no Document, or its content is no string.
    """
    read = [read_document(_whole(document), index, with_relevance=False) for index, document in enumerate(documents)]
    distinct: dict[str, Candidate] = {}
    for candidate in read:
        if candidate.text.strip():
            distinct.setdefault(candidate.key, candidate)
    return Candidates(tuple(candidate.key for candidate in read), tuple(distinct.values()))


def _whole(document: Document) -> Document:
    if not isinstance(document, Document) or (document.page_content is not None and document.metadata is not None):
        return document
    changes = {"page_content": document.page_content or "", "metadata": document.metadata or {}}
    return document.model_copy(update=changes)
