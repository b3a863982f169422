"""The text of a file as blocks: paragraphs, lists, tables and code, each under the headings above it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

BlockKind: TypeAlias = Literal["text", "list", "table", "code", "heading"]
"""``heading`` is a heading without any text below it; others are no blocks, but the ``headings`` of blocks."""

HEADING_SEPARATOR = " > "
_MAX_HEADING_WORDS = 30
_MAX_HEADING_CHARACTERS = 400
_NO_TITLES = frozenset({"default", "document", "index", "readme", "untitled"})


@dataclass(frozen=True, slots=True)
class Block:
    """Characters ``start`` to ``end`` (exclusive) of a text.

    Attributes:
        headings: The headings above the block, from the outermost.
        header_end: The end of a table's header rows; ``start`` without any.
        section: The number of headings before the block; blocks of two sections are never in one passage.
    """

    kind: BlockKind
    start: int
    end: int
    headings: tuple[str, ...] = ()
    header_end: int = 0
    section: int = 0


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file; ``start`` and ``end`` in a passage's metadata are character offsets in it.

    Attributes:
        text: Plain text and Markdown unchanged; the extracted text of other files.
        title: The title that the file itself states, else empty.
        pages: The offset in ``text`` at which each page of a PDF file begins.
        blocks: The blocks of the text, in order.
        metadata: What the file states about itself: the front matter of Markdown.
        encoding_note: What is said about the encoding of the file, if that is a guess or wrong.
    """

    text: str
    title: str = ""
    pages: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    encoding_note: str | None = None

    def page_at(self, offset: int) -> int | None:
        """Return the page number, from 1, of the character at ``offset``; None without pages."""
        return bisect_right(self.pages, offset) or None


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading in a text: its words, its level from 1, and its characters."""

    title: str
    level: int
    start: int
    end: int


def is_heading_text(title: str) -> bool:
    """Return whether a line marked as a heading can be one: it has words, and no more than a title has.

    Headings are in the title of every passage below them, so a long one would be stored thousands of times.
    """
    return len(title) <= _MAX_HEADING_CHARACTERS and 0 < len(title.split()) <= _MAX_HEADING_WORDS


def blocks_under(headings: Sequence[Heading], blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return blocks with the path of the headings above each, all by offset; a heading without text is a block."""
    result: list[Block] = []
    path: list[Heading] = []
    position = 0
    for index, heading in enumerate([*headings, None]):
        limit = None if heading is None else heading.start
        while position < len(blocks) and (limit is None or blocks[position].start < limit):
            block = blocks[position]
            titles = tuple(item.title for item in path)
            result.append(Block(block.kind, block.start, block.end, titles, block.header_end, index))
            position += 1
        if heading is None:
            break
        while path and path[-1].level >= heading.level:
            path.pop()
        following = headings[index + 1] if index + 1 < len(headings) else None
        has_text = position < len(blocks) and (following is None or blocks[position].start < following.start)
        if not has_text and (following is None or following.level <= heading.level):
            titles = tuple(item.title for item in path)
            result.append(Block("heading", heading.start, heading.end, titles, section=index))
        path.append(heading)
    return tuple(result)


def stated_title(headings: Sequence[Heading], blocks: Sequence[Block]) -> str:
    """Return the heading that is the title of a text: the only one of its level, above everything; else empty."""
    if not headings or (blocks and blocks[0].start < headings[0].start):
        return ""
    first = headings[0]
    return "" if any(heading.level <= first.level for heading in headings[1:]) else first.title


def title_from_path(path: str | Path) -> str:
    """Return the name of a file as a title; empty if the name says nothing."""
    name = " ".join(re.sub(r"[_\-.]+", " ", Path(path).stem).split())
    return "" if name.lower() in _NO_TITLES or re.search(r"[^\W\d_]{3}", name) is None else name


def passage_title(title: str, headings: Sequence[str]) -> str:
    """Return the title of a passage: that of its file or document, and the headings above the passage."""
    path = list(headings)
    if path and title and path[0].casefold() == title.casefold():
        path = path[1:]
    return HEADING_SEPARATOR.join([title, *path] if title else path)
