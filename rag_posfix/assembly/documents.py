"""Documents as assembly sees them: checked, identified, ranked and without duplicates.

A langchain ``Document`` is only read here, never changed. Nothing here knows of tokens or prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

from langchain_core.documents import Document

from rag_posfix.assembly.orders import best_first
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text, content_hash

__all__ = ["Candidate", "DropReason", "Dropped", "content_key", "document_id", "rank", "read_document", "unique"]

DropReason = Literal["duplicate", "empty", "budget"]


class Dropped(NamedTuple):
    """A document that is not in the prompt, and why."""

    id: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Candidate:
    """A document that was read.

    Attributes:
        id: ``Document.id``, else ``metadata["id"]``, else a hash of the content.
        title: ``metadata["title"]`` on one line; empty where it is missing or no string.
        text: The cleaned text.
        key: A content hash of title and text.
        folded: A content hash of the text with each run of whitespace as one space: equal for duplicates.
        relevance: ``metadata["relevance_score"]``, or None.
        document: Where all this was read from.
    """

    id: str
    title: str
    text: str
    key: str
    folded: str
    relevance: float | None
    document: Document


def content_key(document: Document) -> str:
    """Return the key that the document's passage has in a layout: a content hash of its title and its text.

    Args:
        document: A document that can be read.

    Raises:
        ConfigError: it is no Document, or its content is no string.
    """
    return read_document(document, with_relevance=False).key


def document_id(document: Document) -> str:
    """Return ``document.id``, else ``metadata["id"]``, else a hash of the content.

    Args:
        document: The document to name.
    """
    for given in (document.id, document.metadata.get("id")):
        if given is not None and str(given):
            return clean_text(str(given))
    return content_hash(document.page_content)


def read_document(document: Document, index: int = 0, *, with_relevance: bool = True) -> Candidate:
    """Read and check one document.

    Args:
        document: The document; it is not changed.
        index: Where it stands among its neighbours, for messages.
        with_relevance: Whether its score matters. That of a document that was not found for a question does not.

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
    text = clean_text(document.page_content)
    title = document.metadata.get("title")
    title = " ".join(clean_text(title).split()) if isinstance(title, str) else ""
    return Candidate(
        id=name,
        title=title,
        text=text,
        key=content_hash(title, text),
        folded=content_hash(" ".join(text.split())),
        relevance=_relevance(document.metadata.get("relevance_score"), name) if with_relevance else None,
        document=document,
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


def rank(candidates: Sequence[Candidate]) -> tuple[int, ...]:
    """Return the indices from the most relevant document to the least.

    Equal scores are ordered by content, so that what a budget keeps does not depend on the order the documents came
    in. Documents without a score rank last; where none has one, the given order is the relevance.

    Args:
        candidates: The documents to rank.
    """
    scores = [candidate.relevance for candidate in candidates]
    if all(score is None for score in scores):
        return tuple(range(len(scores)))
    by_content = sorted(range(len(scores)), key=lambda i: candidates[i].key)
    return tuple(by_content[i] for i in best_first([scores[i] for i in by_content]))


def unique(candidates: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], tuple[Dropped, ...]]:
    """Return the documents with text, one of each kind, in the given order, and what was left out.

    Of documents whose text differs in whitespace alone, the highest ranked stays; of equals, the earliest.

    Args:
        candidates: The documents, in any order.
    """
    best: dict[str, int] = {}
    for index in rank(candidates):
        best.setdefault(candidates[index].folded, index)
    kept: list[Candidate] = []
    dropped: list[Dropped] = []
    for index, candidate in enumerate(candidates):
        if not candidate.text.strip():
            dropped.append(Dropped(candidate.id, "empty"))
        elif best[candidate.folded] != index:
            dropped.append(Dropped(candidate.id, "duplicate"))
        else:
            kept.append(candidate)
    return tuple(kept), tuple(dropped)
