"""Finds the blocks and headings of Markdown and of plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rag_posfix.retrieval.ingest.blocks import (
    Block,
    BlockKind,
    FileText,
    Heading,
    blocks_under,
    is_heading_text,
    stated_title,
)

if TYPE_CHECKING:
    from markdown_it.token import Token

_KINDS: dict[str, BlockKind] = {
    "bullet_list_open": "list", "ordered_list_open": "list", "table_open": "table", "fence": "code",
    "code_block": "code",
}  # fmt: skip
_LINE_END = re.compile(r"\r\n|\r|\n")
_FRONT_MATTER = re.compile(r"---[^\S\n]*\r?\n(.*?)^(?:---|\.\.\.)[^\S\n]*$", re.DOTALL | re.MULTILINE)
_FRONT_FIELD = re.compile(r"^([A-Za-z][\w-]*)[^\S\n]*:[^\S\n]*(\S[^\r\n]*?)[^\S\n]*\r?$", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)

# Marks that plain text shares with Markdown: headings, underlined headings, and fences.
_MARKED = re.compile(r"^(?:#{1,6}[^\S\n]+\S|={3,}[^\S\n]*$|```|~~~)", re.MULTILINE)
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_ITEM = re.compile(r"\s*(?:[-*+•\u2013]|\d{1,3}[.)]|[a-z][.)])\s+\S")
_ITEM_BELOW = re.compile(r"\n(?=[^\S\n]*(?:[-*+•\u2013]|\d{1,3}[.)]|[a-z][.)])\s+\S)")
_NO_HEADING_END = re.compile(r"[.!?,;:…。！？：，；]$")  # noqa: RUF001 - CJK marks
_MAX_TITLE_WORDS, _MAX_TITLE_CHARACTERS = 10, 80
_MIN_TEXT_WORDS = 5
_MAX_LINES = 15_000
"""Lines of a text whose structure is read: a block takes up to 1 kB and 0.1 ms, however short it is."""
_MAX_READ_HEADINGS = 50_000
"""Characters of headings whose marks are read; later ones are taken as written. A bracket costs 30 µs."""


def read_markdown(text: str) -> FileText:
    """Return Markdown with its blocks; front matter gives title and metadata, and is no block."""
    fields: dict[str, str] = {}
    start = 0
    if front := _FRONT_MATTER.match(text):
        fields = {name.lower(): value.strip("\"'") for name, value in _FRONT_FIELD.findall(front.group(1))}
        start = front.end()
    headings, blocks = _parse_markdown(text, start)
    title = fields.pop("title", "") or stated_title(headings, blocks)
    return FileText(text, title, blocks=blocks_under(headings, blocks), metadata=fields)


def read_plain(text: str) -> FileText:
    """Return plain text with its blocks.

    Text with Markdown's marks for headings or code is read as Markdown. Otherwise a heading is a short line between
    empty lines without a mark at its end and with text below it, or a line in capitals. A text of very many lines is
    one block.
    """
    if text.count("\n") > _MAX_LINES:
        return FileText(text, blocks=(Block("text", 0, len(text)),))
    if _MARKED.search(text):
        return read_markdown(text)
    headings, blocks = _parse_plain(text)
    return FileText(text, stated_title(headings, blocks), blocks=blocks_under(headings, blocks))


def paragraph_blocks(text: str, headings: Sequence[Heading]) -> list[Block]:
    """Return the paragraphs of a text between its headings."""
    ends = [0, *(heading.end for heading in headings)]
    starts = [*(heading.start for heading in headings), len(text)]
    return [
        Block("text", start + first, start + last, header_end=start + first)
        for start, end in zip(ends, starts, strict=True)
        for first, last in _paragraphs(text[start:end])
    ]


def _parse_markdown(text: str, start: int) -> tuple[list[Heading], list[Block]]:
    from markdown_it import MarkdownIt

    source = text[start:]
    lines = [start, *(start + match.end() for match in _LINE_END.finditer(source)), len(text)]
    headings: list[Heading] = []
    blocks: list[Block] = []
    parser = MarkdownIt("commonmark").enable("table")
    references: dict[str, Any] = {}
    tokens = parser.disable("inline").parse(source, references)  # only headings are read without their marks
    parser.enable("inline")
    characters = 0
    for index, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0:
            continue
        first, last = lines[token.map[0]], lines[min(token.map[1], len(lines) - 1)]
        if token.type == "heading_open":
            title = tokens[index + 1].content
            characters += len(title)
            if characters <= _MAX_READ_HEADINGS:
                title = _inline_text(parser.parseInline(title, references)[0])
            if is_heading_text(title):
                headings.append(Heading(title, int(token.tag[1:]), first, last))
                continue
        if token.type == "hr" or (token.type == "html_block" and not _COMMENT.sub("", token.content).strip()):
            continue
        kind = _KINDS.get(token.type, "text")
        header_end = lines[token.map[0] + 2] if kind == "table" else first
        blocks.append(Block(kind, first, last, header_end=header_end))
    return headings, blocks


def _inline_text(token: Token) -> str:
    """Return the words of a heading, without marks of Markdown."""
    return " ".join("".join(child.content or " " for child in token.children or ()).split())


def _parse_plain(text: str) -> tuple[list[Heading], list[Block]]:
    paragraphs = list(_paragraphs(text))
    headings: list[Heading] = []
    blocks: list[Block] = []
    for index, (start, end) in enumerate(paragraphs):
        line_end = text.find("\n", start, end)
        if line_end < 0:
            following = paragraphs[index + 1] if index + 1 < len(paragraphs) else None
            if (
                following
                and _is_title(text[start:end])
                and ((index == 0 and len(paragraphs) > 2) or _is_prose(text[slice(*following)]))
            ):
                headings.append(Heading(" ".join(text[start:end].split()), min(index + 1, 2), start, end))
                continue
        elif _is_capital_line(text[start:line_end]) and not _is_capital_line(text[line_end:end]):
            headings.append(Heading(" ".join(text[start:line_end].split()), 2, start, line_end))
            start = line_end + 1
        is_list = _ITEM.match(text, start) and _ITEM_BELOW.search(text, start, end)
        blocks.append(Block("list" if is_list else "text", start, end, header_end=start))
    return headings, blocks


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    """Yield the characters of each paragraph; a list that follows its lead line directly is one of its own."""
    ends = [(match.start(), match.end()) for match in _PARAGRAPH_END.finditer(text)]
    for (_, start), (end, _) in pairwise([(0, len(text) - len(text.lstrip())), *ends, (len(text), len(text))]):
        if not text[start:end].strip():
            continue
        item = _ITEM_BELOW.search(text, start, end)
        if item is not None and not _ITEM.match(text, start) and text[start : item.end()].rstrip().endswith(":"):
            yield start, item.end()
            start = item.end()
        yield start, end


def _is_title(line: str) -> bool:
    words = line.split()
    return (
        0 < len(words) <= _MAX_TITLE_WORDS
        and len(line.strip()) <= _MAX_TITLE_CHARACTERS
        and (line.strip()[0].isdigit() or not line.strip()[0].islower())
        and any(character.isalpha() for character in line)
        and "\t" not in line
        and not _NO_HEADING_END.search(line.strip())
        and not _ITEM.match(line)
    )


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph can be the text below a heading: no title itself, and a sentence long or a list."""
    has_words = len(paragraph.split()) >= _MIN_TEXT_WORDS or len(paragraph) >= _MAX_TITLE_CHARACTERS
    return not _is_title(paragraph) and (has_words or _ITEM.match(paragraph) is not None)


def _is_capital_line(line: str) -> bool:
    words = line.split()
    return 0 < len(words) <= _MAX_TITLE_WORDS and line.isupper() and sum(map(str.isalpha, line)) > 3
