"""Splits text into passages: at headings first, then between paragraphs, items and rows, then between sentences.

A passage is ``text[start:end]``, after a lead where a list or table continues: the sentence above the list, or the
header of the table. Headings are in the titles of passages and not in their text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

from langchain_core.documents import Document

from rag_posfix.checked import check_type
from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.ingest.structure import Block, FileText, passage_title, read_plain

if TYPE_CHECKING:
    from langchain_core.documents import BaseDocumentTransformer

_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_CHARACTERS_PER_TOKEN = 20
"""A generous bound: it limits passages by tokens whose words are long."""
_LONG_SPAN = 100_000
"""Characters of a span in which very short paragraphs, sentences, lines and words are not separated."""


@dataclass(frozen=True, slots=True)
class CharSpan:
    """Characters ``start`` to ``end`` (exclusive) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PassageSize:
    """Upper limits of a passage's length.

    Args:
        words: Maximum number of words; a Chinese or Japanese character counts as one. About 150 fit into the 256
            tokens that small embedding models read.
        characters: Maximum number of characters, for text whose words are long or not separated by spaces.
        tokens: Maximum number of tokens, in place of words and characters.
        overlap: Number of words, or of tokens, that a passage repeats at most from the passage before it in the same
            section.
        count_tokens: Counts the tokens of a text; without it a token is taken for four characters or one ideograph.

    Raises:
        ConfigError: a limit is below 1, or the overlap is negative or not less than the limit.
    """

    words: int = 150
    characters: int = 1000
    tokens: int | None = None
    overlap: int = 0
    count_tokens: Callable[[str], int] | None = None

    def __post_init__(self) -> None:
        for name, value in (("words", self.words), ("characters", self.characters), ("tokens", self.tokens)):
            check_type(f"passage size: {name}", value, int | None if name == "tokens" else int, "a whole number")
            if value is not None and value < 1:
                raise ConfigError(f"passage size: {name}={value} must be >= 1")
        check_type("passage size: overlap", self.overlap, int, "a whole number")
        if not 0 <= self.overlap < self.limit:
            raise ConfigError(
                f"passage size: overlap={self.overlap} must be from 0 to {self.limit - 1}, below the {self.unit} of a "
                "passage"
            )

    @property
    def limit(self) -> int:
        """The maximum length in words or tokens."""
        return self.words if self.tokens is None else self.tokens

    @property
    def unit(self) -> str:
        """What ``limit`` counts."""
        return "words" if self.tokens is None else "tokens"

    @property
    def max_characters(self) -> int:
        """The maximum number of characters."""
        return self.characters if self.tokens is None else _CHARACTERS_PER_TOKEN * self.tokens

    def length(self, text: str) -> int:
        """Return the length of a text in words or tokens."""
        if self.tokens is None:
            return len(text.split()) + _ideographs(text)
        return _estimated_tokens(text) if self.count_tokens is None else self.count_tokens(text)

    def fits(self, text: str) -> bool:
        """Return whether a text is short enough for one passage."""
        return len(text) <= self.max_characters and self.length(text) <= self.limit

    def without_overlap(self) -> PassageSize:
        """Return the size of what a passage has beside its overlap."""
        return self._reduced(self.overlap, 0)

    def less(self, lead: str) -> PassageSize:
        """Return the size that a lead leaves, without overlap."""
        return self._reduced(self.length(lead), len(lead) + 1)

    def _reduced(self, length: int, characters: int) -> PassageSize:
        return replace(
            self,
            words=max(1, self.words - length),
            characters=max(1, self.characters - characters),
            tokens=None if self.tokens is None else max(1, self.tokens - length),
            overlap=0,
        )

    def describe_cut(self, count: int) -> str:
        """Return what is said about a number of passages that begin inside of a sentence, row or line."""
        return (
            f"{count} times a sentence, row or line was cut: it is longer than a passage of {self.limit} {self.unit}"
        )


def _ideographs(text: str) -> int:
    return 0 if text.isascii() else len(text) - len(_IDEOGRAPH.sub("", text))


def _estimated_tokens(text: str) -> int:
    return _ideographs(text) + sum(-(-len(word) // 4) for word in _IDEOGRAPH.sub(" ", text).split())


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a text.

    Attributes:
        text: ``text[start:end]`` of the text, after a lead where a list or table continues.
        headings: The headings above it, from the outermost.
        cut: Whether it begins inside of a sentence, row or line that is longer than a passage.
    """

    text: str
    start: int
    end: int
    headings: tuple[str, ...]
    cut: bool


class _Piece(NamedTuple):
    """The smallest part of a text that is not divided between passages."""

    start: int
    end: int
    length: int
    lead: str = ""  # precedes the piece where a passage begins with it
    cut: bool = False
    overlaps: bool = False


# Tried in turn on a span that is too long.
_NOWHERE = re.compile(r"(?!)")
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"(?<=[.!?…])[\"')\]”’»]*\s+|(?<=[。！？])\s*")  # noqa: RUF001 - CJK and typographic marks
_LINE = re.compile(r"\n")
_WORD = re.compile(r"\s+")
_ITEM = re.compile(r"\n(?=[^\S\n]*(?:[-*+•\u2013]|\d{1,3}[.)]|[a-z][.)])\s)")
_BREAKS = {
    "text": (_PARAGRAPH, _SENTENCE, _LINE, _WORD),
    "list": (_ITEM, _PARAGRAPH, _SENTENCE, _LINE, _WORD),
    "table": (_LINE, _SENTENCE, _WORD),
    "code": (_PARAGRAPH, _LINE, _WORD),
    "heading": (_SENTENCE, _WORD),
}
_WHOLE = frozenset({"list", "table", "code"})
_OPEN_ENDS = ("?", ":", "\uff1f", "\uff1a")


def split_passages(text: str, size: PassageSize | None = None) -> list[CharSpan]:
    """Return the passages of a text without structure, in order, with exact character offsets.

    Consecutive paragraphs are joined while they fit; a paragraph that does not fit is split between sentences, then
    between words, then anywhere. Passages start and end with a visible character. Without overlap, only white space
    is left out.
    """
    blocks = [Block("text", 0, len(text))]
    return [CharSpan(passage.start, passage.end) for passage in split_blocks(text, blocks, size or PassageSize())]


def split_blocks(text: str, blocks: Sequence[Block], size: PassageSize) -> list[Passage]:
    """Return the passages of a text with blocks, in order; none contains blocks of two sections."""
    passages: list[Passage] = []
    for _, section in groupby(blocks, key=lambda block: (block.kind == "heading", block.section)):
        passages += _split_section(text, list(section), size)
    return passages


def split_text(
    text: FileText, title: str, size: PassageSize, splitter: BaseDocumentTransformer | None = None
) -> Iterator[tuple[Passage, str]]:
    """Yield the passages of a file or document, each with its title; ``splitter`` splits the sections if given."""
    passages = split_blocks(text.text, text.blocks, size) if splitter is None else _split_sections(text, splitter)
    for passage in passages:
        yield passage, passage_title(title, passage.headings)


def split_document(
    document: Document, size: PassageSize, splitter: BaseDocumentTransformer | None = None
) -> list[Document]:
    """Return a document that fits into a passage as it is, and otherwise its passages.

    A passage has the metadata of the document, ``start`` and ``end`` in its text, and the headings of the text in its
    title. The id of the passage number ``n``, from 1, is ``ID#n`` for a document with an id.
    """
    if splitter is None and size.fits(document.page_content):
        return [document]
    title = document.metadata.get("title")
    read = read_plain(document.page_content)
    passages = list(split_text(read, title if isinstance(title, str) else read.title, size, splitter))
    if not passages or (len(passages) == 1 and passages[0][0].text == document.page_content):
        return [document]
    return [
        Document(
            id=None if document.id is None else f"{document.id}#{number}",
            page_content=passage.text,
            metadata={"start": passage.start, "end": passage.end}
            | document.metadata
            | ({"title": full_title} if full_title else {}),
        )
        for number, (passage, full_title) in enumerate(passages, start=1)
    ]


def _split_sections(text: FileText, splitter: BaseDocumentTransformer) -> Iterator[Passage]:
    """Yield the passages that a langchain splitter makes of the text between two headings."""
    for _, section in groupby(text.blocks, key=lambda block: (block.kind == "heading", block.section)):
        blocks = list(section)
        start, end = blocks[0].start, blocks[-1].end
        for document in splitter.transform_documents([Document(text.text[start:end])]):
            chunk = document.page_content
            offset = text.text.find(chunk, start, end)
            if offset >= 0:
                start = offset + 1
            span = (blocks[0].start, end) if offset < 0 else (offset, offset + len(chunk))
            if chunk.strip():
                yield Passage(chunk, *span, blocks[0].headings, False)


def _split_section(text: str, blocks: Sequence[Block], size: PassageSize) -> Iterator[Passage]:
    """Yield the passages of the blocks of a section."""
    headings = blocks[0].headings
    budget = size.limit - size.overlap
    begin: _Piece | None = None
    last: _Piece | None = None
    end = length = before_last = 0
    for piece in _pieces(text, blocks, size):
        between = text[end : piece.start].strip() if begin is not None else ""  # rules and comments of Markdown
        joined = length + piece.length + (size.length(between) if between else 0)
        if begin is not None and joined <= budget:
            lead_characters = len(begin.lead) + 1 if begin.lead else 0
            if lead_characters + piece.end - begin.start <= size.max_characters:
                last, before_last = piece, end
                end, length = piece.end, joined
                continue
        if begin is not None and last is not None and _is_question(text, last, piece, size.without_overlap()):
            yield _passage(text, begin, before_last, headings)
            piece = last._replace(end=piece.end, length=last.length + piece.length)
        elif begin is not None:
            yield _passage(text, begin, end, headings)
            if piece.overlaps and size.overlap:
                piece = piece._replace(start=_overlap_start(text, begin.start, piece, size))
        begin, last = piece, None
        end, length = piece.end, piece.length + (size.length(piece.lead) if piece.lead else 0)
    if begin is not None:
        yield _passage(text, begin, end, headings)


def _is_question(text: str, before: _Piece, piece: _Piece, size: PassageSize) -> bool:
    """Return whether a piece ends with a question or colon, and fits into a passage with its answer."""
    is_short = before.length + piece.length <= size.limit and piece.end - before.start <= size.max_characters
    return is_short and text[before.start : before.end].endswith(_OPEN_ENDS) and 4 * before.length <= size.limit


def _passage(text: str, begin: _Piece, end: int, headings: tuple[str, ...]) -> Passage:
    body = text[begin.start : end]
    return Passage(f"{begin.lead}\n{body}" if begin.lead else body, begin.start, end, headings, begin.cut)


def _pieces(text: str, blocks: Sequence[Block], size: PassageSize) -> Iterator[_Piece]:
    """Yield the pieces of blocks, each of which fits into a passage."""
    size = size.without_overlap()
    lead_from: Block | None = None
    for block in blocks:
        span = _stripped(text, block.start, block.end)
        if span is None:
            continue
        lead = ""
        if block.kind == "list" and lead_from is not None:
            lead = _last_sentence(text, lead_from)
        elif block.kind == "table":
            lead = text[block.start : block.header_end].strip()
        if 2 * size.length(lead) > size.limit or 2 * len(lead) > size.max_characters:
            lead = ""
        inner = size.less(lead) if lead else size
        content = text[span.start : span.end]
        if block.kind in _WHOLE and (inner if block.kind == "list" else size).fits(content):
            yield _Piece(span.start, span.end, size.length(content), lead if block.kind == "list" else "")
        else:
            breaks = (_NOWHERE, *_BREAKS[block.kind])
            for start, end, length, cut in _split(text, span.start, span.end, inner, breaks):
                # The header of a table is the text of its first passage, and the lead of others.
                own = "" if block.kind == "table" and start < block.header_end else lead
                yield _Piece(start, end, length, own, cut, overlaps=block.kind == "text")
        lead_from = block if block.kind == "text" else None


def _last_sentence(text: str, block: Block) -> str:
    span = _stripped(text, block.start, block.end)
    if span is None:
        return ""
    start = max((match.end() for match in _SENTENCE.finditer(text, span.start, span.end)), default=span.start)
    return text[start : span.end]


def _overlap_start(text: str, previous: int, piece: _Piece, size: PassageSize) -> int:
    """Return where a passage that begins with ``piece`` starts with the end of the passage before it.

    That is at the first sentence, or else the first word, from which the overlap is not too long.
    """
    earliest = max(previous + 1, piece.end - size.max_characters)
    for pattern in (_SENTENCE, _WORD):
        for match in pattern.finditer(text, earliest, piece.start):
            if match.end() < piece.start and size.length(text[match.end() : piece.start]) <= size.overlap:
                return match.end()
    return piece.start


def _stripped(text: str, start: int, end: int) -> CharSpan | None:
    """Return a span without white space around it; None if nothing else is in it."""
    content = text[start:end].lstrip()
    visible = content.rstrip()
    return CharSpan(end - len(content), end - len(content) + len(visible)) if visible else None


def _split(
    text: str, start: int, end: int, size: PassageSize, breaks: Sequence[re.Pattern[str]], *, cut: bool = False
) -> Iterator[tuple[int, int, int, bool]]:
    """Yield consecutive spans that fit, as large as the breaks allow: start, end, length, and whether it is cut."""
    if not breaks:
        step = size.max_characters
        if size.length(text[start:end]) > size.limit:
            step = min(step, size.limit)  # a character is at most one word or token
        for offset in range(start, end, step):
            last = min(offset + step, end)
            yield offset, last, size.length(text[offset:last]), cut or offset > start
        return
    least = min(size.limit, size.max_characters) // 8 if end - start > _LONG_SPAN else 0
    first = start
    for part_end in chain((match.end() for match in breaks[0].finditer(text, start, end)), (end,)):
        if part_end - first < least and part_end < end:
            continue
        content = text[first:part_end].lstrip()
        offset = part_end - len(content)
        content = content.rstrip()
        if content:
            last = offset + len(content)
            is_cut = cut or (first > start and breaks[0] is _WORD)
            length = size.length(content) if len(content) <= size.max_characters else None
            if length is not None and length <= size.limit:
                yield offset, last, length, is_cut
            else:
                yield from _split(text, offset, last, size, breaks[1:], cut=is_cut)
        first = part_end
