"""Documents of Anthropic messages, and citations of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from pydantic import BaseModel, Field

from rag_posfix.contracts.answer import Answer, Citation
from rag_posfix.pipeline.citations import PassageSentences

SEPARATOR = "\n"  # between the blocks of a document of type ``content``


class CitedSpan(BaseModel):
    """A passage that a text block is from, and the characters of the whole answer that it supports."""

    cited_text: str
    answer_start_index: int = Field(description="First character in the answer: all text blocks joined.")
    answer_end_index: int = Field(description="Character after the last in the answer.")


class Location(CitedSpan):
    """A passage of a document block."""

    document_index: int = Field(description="Counts the document blocks of the request, from 0.")
    document_title: str | None
    file_id: None = None


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


class SearchResultLocation(CitedSpan):
    """Blocks of a search result."""

    type: Literal["search_result_location"] = "search_result_location"
    search_result_index: int = Field(description="Counts the search results of the request, from 0.")
    source: str
    title: str | None
    start_block_index: int
    end_block_index: int


AnyLocation = CharLocation | BlockLocation | SearchResultLocation


class TextBlock(BaseModel):
    """A part of the answer."""

    type: Literal["text"] = "text"
    text: str
    citations: list[AnyLocation] | None = None


@dataclass(frozen=True, slots=True)
class CitableDocument:
    """A document block of a request.

    Attributes:
        text: Its text, without the context.
        blocks: The blocks that ``text`` joins, of a document that is cited by blocks; else None.
        enabled: Whether it may be cited.
        address: The address of a search result; None for a document.
    """

    id: str
    title: str | None
    text: str
    blocks: tuple[str, ...] | None
    enabled: bool
    address: str | None = None


def cited_blocks(answer: Answer, documents: Sequence[CitableDocument]) -> list[TextBlock]:
    """Return the answer in blocks: each quote of a document is one, with its citations, and so is text between."""
    blocks = []
    written = 0
    for quote, cited in find_citations(answer, documents):
        if quote.start > written:
            blocks.append(TextBlock(text=answer.text[written : quote.start]))
        blocks.append(TextBlock(text=quote.text, citations=cited))
        written = quote.end
    if written < len(answer.text) or not blocks:
        blocks.append(TextBlock(text=answer.text[written:]))
    return blocks


def find_citations(answer: Answer, documents: Sequence[CitableDocument]) -> list[tuple[Citation, list[AnyLocation]]]:
    """Return the quotes that have a citation. Sentences known by attention or weight have no span in a document.

    Without ``documents`` of the request the retrieved passages are cited, each as a search result of one block.
    """
    documents = documents or [
        CitableDocument(
            passage.id, passage.title, passage.text, (passage.text,), bool(passage.text), passage.source or passage.id
        )
        for passage in answer.documents
    ]
    indices = {document.id: index for index, document in enumerate(documents) if document.enabled}
    sentences: dict[int, PassageSentences] = {}
    quotes = []
    for citation in answer.citations:
        if citation.origin != "quote":
            continue
        cited = []
        for index in sorted(indices[name] for name in citation.document_ids if name in indices):
            if index not in sentences:
                sentences[index] = PassageSentences(documents[index].text)
            span = sentences[index].find(citation.text)
            if span is not None:  # else the quote is of the context
                cited.append(_location(documents, index, span, citation))
        if cited:
            quotes.append((citation, cited))
    return quotes


def _location(
    documents: Sequence[CitableDocument], index: int, span: tuple[int, int], citation: Citation
) -> AnyLocation:
    (start, end), document = span, documents[index]
    is_result = document.address is not None
    number = sum((other.address is not None) == is_result for other in documents[:index])
    shared: dict[str, Any] = {"answer_start_index": citation.start, "answer_end_index": citation.end}
    if document.blocks is None:
        text = document.text[start:end]
        place = {"document_index": number, "document_title": document.title}
        return CharLocation(**shared, **place, cited_text=text, start_char_index=start, end_char_index=end)
    starts = list(accumulate((len(block) + len(SEPARATOR) for block in document.blocks), initial=0))
    first = sum(begin <= start for begin in starts) - 1
    last = sum(begin < end for begin in starts)
    text = "".join(document.blocks[first:last])
    shared |= {"cited_text": text, "start_block_index": first, "end_block_index": last}
    if document.address is not None:
        return SearchResultLocation(
            **shared, search_result_index=number, source=document.address, title=document.title
        )
    return BlockLocation(**shared, document_index=number, document_title=document.title)
