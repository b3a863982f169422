"""Checks documents, ranks them by relevance and removes duplicates. Knows no tokens and no prompts.

A langchain ``Document`` is never changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

from langchain_core.documents import Document

from rag_posfix.assembly.orders import best_first
from rag_posfix.assembly.source_claims import without_source_claims
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text, content_hash, single_spaced

_log = logging.getLogger(__name__)

MOST_TITLE_CHARACTERS = 10_000
"""Characters of a title: it is read with each part of its passage that the context window holds."""

DropReason = Literal["duplicate", "empty", "budget"]


class Dropped(NamedTuple):
    """A document that was left out of the prompt, and the reason."""

    id: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class CheckedDocument:
    """A document whose fields were checked and cleaned.

    Attributes:
        id: ``Document.id``, else ``metadata["id"]``, else a hash of the content.
        title: The first ``MOST_TITLE_CHARACTERS`` of ``metadata["title"]`` on one line; empty if it is missing or no
            string.
        text: The cleaned text, without sentences about other documents (``source_claims``).
        key: A content hash of title and text.
        relevance: ``metadata["relevance_score"]``, or None.
        document: The document itself.
        tells_of_sources: Whether sentences about other documents were left out.
    """

    id: str
    title: str
    text: str
    key: str
    relevance: float | None
    document: Document
    tells_of_sources: bool = False

    @property
    def duplicate_key(self) -> str:
        """A content hash of title and text with each run of white space as one space: equal for duplicates."""
        return content_hash(single_spaced(self.title), single_spaced(self.text))


def content_key(document: Document) -> str:
    """Return the key of the document's passage in a layout: a content hash of its title and its text.

    Raises:
        ConfigError: it is no Document, or its content is no string.
    """
    return checked_document(document, with_relevance=False).key


def document_id(document: Document) -> str:
    """Return the id of a document in prompts and answers: its own, ``metadata["id"]``, or a hash of its text."""
    for value in (document.id, document.metadata.get("id")):
        if value is not None and str(value):
            return clean_text(str(value))
    return content_hash(document.page_content)


def checked_document(document: Document, index: int = 0, *, with_relevance: bool = True) -> CheckedDocument:
    """Check a document and clean its text.

    Raises:
        ConfigError: it is no Document, its content is no string, or its score is no finite number.
    """
    if not isinstance(document, Document):
        raise ConfigError(
            f"documents[{index}] is {type(document).__name__}, must be a langchain_core Document; "
            "wrap text in Document(page_content=...)"
        )
    if not isinstance(document.page_content, str):
        kind = type(document.page_content).__name__
        raise ConfigError(f"documents[{index}]: page_content is {kind}, must be a string; convert it first")
    name = document_id(document)
    complete = clean_text(document.page_content)
    text = without_source_claims(complete)
    title = document.metadata.get("title")
    title = title if isinstance(title, str) else ""
    if len(title) > MOST_TITLE_CHARACTERS:
        _log.warning("a title of %d characters is cut to its first %d", len(title), MOST_TITLE_CHARACTERS)
    title = single_spaced(clean_text(title[:MOST_TITLE_CHARACTERS]))
    return CheckedDocument(
        id=name,
        title=title,
        text=text,
        key=content_hash(title, text),
        relevance=_relevance(document.metadata.get("relevance_score"), name) if with_relevance else None,
        document=document,
        tells_of_sources=text is not complete,
    )


def _relevance(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        score = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise ConfigError(
            f"document {name!r}: metadata['relevance_score']={value!r} must be a finite number; "
            "give a score, usually between 0 and 1, or leave it out"
        )
    return score


def ranked_indices(documents: Sequence[CheckedDocument]) -> tuple[int, ...]:
    """Return the indices from the most relevant document to the least.

    Equal scores are ordered by content key, so that the documents that a budget keeps do not depend on the given
    order. Documents without a score rank last. If no document has a score, the given order counts as best first.
    """
    return best_first([document.relevance for document in documents], [document.key for document in documents])


def distinct_indices(documents: Sequence[CheckedDocument]) -> tuple[tuple[int, ...], tuple[Dropped, ...]]:
    """Return the indices of the documents with text, without duplicates, ascending; and the documents left out.

    Of documents whose titles and texts differ in white space only, the highest ranked is kept; of equal rank, the
    first.
    """
    best: dict[str, int] = {}
    duplicate_keys = [document.duplicate_key for document in documents] if len(documents) > 1 else [""]
    for index in ranked_indices(documents):
        best.setdefault(duplicate_keys[index], index)
    distinct: list[int] = []
    dropped: list[Dropped] = []
    for index, document in enumerate(documents):
        if not document.text.strip():
            dropped.append(Dropped(document.id, "empty"))
        elif best[duplicate_keys[index]] != index:
            dropped.append(Dropped(document.id, "duplicate"))
        else:
            distinct.append(index)
    return tuple(distinct), tuple(dropped)
