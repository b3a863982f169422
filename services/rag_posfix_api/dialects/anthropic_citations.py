"""Citations of Anthropic: from the quotes of an answer to characters or blocks of the documents of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from pydantic import BaseModel, Field

from rag_posfix.contracts.answer import Answer, Citation
from rag_posfix.pipeline.citations import PassageWords

SEPARATOR = "\n"
"""Between the blocks of a document of type ``content``."""


class Location(BaseModel):
    """A passage that a text block is from, and the characters of the whole answer that it supports."""

    cited_text: str
    document_index: int = Field(description="Counts the document blocks of the request, from 0.")
    document_title: str | None
    file_id: None = None
    answer_start_index: int = Field(description="First character in the answer: all text blocks joined.")
    answer_end_index: int = Field(description="Character after the last in the answer.")


class CharLocation(Location):
    """Characters of a plain text document, counted in code points."""

    type: Literal["char_location"] = "char_location"
    start_char_index: int
    end_char_index: int


class BlockLocation(Location):
    """Blocks of a document of type ``content``."""

    type: Literal["content_block_location"] = "content_block_location"
    start_block_index: int
    end_block_index: int


class TextBlock(BaseModel):
    """A part of the answer."""

    type: Literal["text"] = "text"
    text: str
    citations: list[CharLocation | BlockLocation] | None = None


@dataclass(frozen=True, slots=True)
class CitableDocument:
    """A document block of a request.

    Attributes:
        id: Its id in answers.
        title: Its title, or None.
        text: Its text, without the context.
        blocks: The blocks that ``text`` joins, of a document that is cited by blocks; else None.
        enabled: Whether it may be cited.
    """

    id: str
    title: str | None
    text: str
    blocks: tuple[str, ...] | None
    enabled: bool


def cited_blocks(answer: Answer, documents: Sequence[CitableDocument]) -> list[TextBlock]:
    """Return the answer in blocks: each quote of a document is one, with its citations, and so is text between."""
    blocks = []
    written = 0
    for quote, cited in _quotes(answer, documents):
        if quote.start > written:
            blocks.append(TextBlock(text=answer.text[written : quote.start]))
        blocks.append(TextBlock(text=quote.text, citations=cited))
        written = quote.end
    if written < len(answer.text) or not blocks:
        blocks.append(TextBlock(text=answer.text[written:]))
    return blocks


def locations(answer: Answer, documents: Sequence[CitableDocument]) -> list[CharLocation | BlockLocation]:
    """Return all citations of the answer, in its order."""
    return [location for _, cited in _quotes(answer, documents) for location in cited]


def _quotes(
    answer: Answer, documents: Sequence[CitableDocument]
) -> list[tuple[Citation, list[CharLocation | BlockLocation]]]:
    """Return the quotes of the answer that have a citation. Sentences known by attention have no place in a text."""
    indices = {document.id: index for index, document in enumerate(documents) if document.enabled}
    words: dict[int, PassageWords] = {}
    found = []
    for citation in answer.citations:
        if citation.origin != "quote":
            continue
        cited = []
        for index in sorted(indices[one] for one in citation.document_ids if one in indices):
            if index not in words:
                words[index] = PassageWords(documents[index].text)
            span = words[index].find(citation.text)
            if span is not None:  # else the quote is of the context
                cited.append(_location(documents[index], index, span, citation))
        if cited:
            found.append((citation, cited))
    return found


def _location(
    document: CitableDocument, index: int, span: tuple[int, int], citation: Citation
) -> CharLocation | BlockLocation:
    start, end = span
    shared = {
        "document_index": index,
        "document_title": document.title,
        "answer_start_index": citation.start,
        "answer_end_index": citation.end,
    }
    if document.blocks is None:
        text = document.text[start:end]
        return CharLocation(**shared, cited_text=text, start_char_index=start, end_char_index=end)
    starts = list(accumulate((len(block) + len(SEPARATOR) for block in document.blocks), initial=0))
    first = sum(begin <= start for begin in starts) - 1
    last = sum(begin < end for begin in starts)
    text = "".join(document.blocks[first:last])
    return BlockLocation(**shared, cited_text=text, start_block_index=first, end_block_index=last)
