"""The text of a file as blocks, each under the headings above it; finds those of Markdown and of plain text."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rag_posfix.text import clean_text

if TYPE_CHECKING:
    from markdown_it.token import Token

BlockKind: TypeAlias = Literal["text", "list", "table", "code", "heading"]
"""``heading`` is a heading without any text below it; others are no blocks, but the ``headings`` of blocks."""

HEADING_SEPARATOR = " > "
BOLD_LEVEL = 10
"""The level of a heading that is no more than a paragraph in bold letters."""
_MAX_HEADING_WORDS = 30
_MAX_HEADING_CHARACTERS = 400
_NO_TITLES = frozenset({"default", "document", "index", "readme", "untitled"})

_KINDS: dict[str, BlockKind] = {
    "bullet_list_open": "list", "ordered_list_open": "list", "table_open": "table", "fence": "code",
    "code_block": "code",
}  # fmt: skip
_BELOW_BOLD = frozenset({"paragraph_open", "inline", *_KINDS})
_LINE_END = re.compile(r"\r\n|\r|\n")
_FRONT_MATTER = re.compile(r"(---|\+\+\+)[^\S\n]*\r?\n(.*?)^(?:\1|\.\.\.)[^\S\n]*$", re.DOTALL | re.MULTILINE)
_FRONT_FIELD = re.compile(r"^([A-Za-z][\w-]*)[^\S\n]*:[^\S\n]*(\S[^\r\n]*?)[^\S\n]*\r?$", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)

_DATED_NAME = re.compile(
    r"(?:19|20)\d\d(?:[-_. ]?(?:\d\d|W\d\d|Q\d)(?:[-_. ]?\d\d)?(?:[-_. T]?\d{4}(?:\d\d)?)?)?|"
    r"\d{1,2}[-_.]\d{1,2}[-_.](?:19|20)\d\d"
)
_SHELL_COMMENT = re.compile(r"^# .*\n(?=# |[a-z$./~-]|[A-Z_]+=)", re.MULTILINE)
"""A comment above a command or another comment, and no heading; below a heading is an empty line or a sentence."""

# Marks that plain text shares with Markdown: headings, underlined headings, and fences.
_MARKED = re.compile(r"^(?:#{1,6}[^\S\n]+\S|={3,}[^\S\n]*$|```|~~~)", re.MULTILINE)
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_ITEM = re.compile(r"\s*(?:[-*+•\u2013]|\d{1,3}[.)]|[a-z][.)])\s+\S")
_ITEM_BELOW = re.compile(r"\n(?=[^\S\n]*(?:[-*+•\u2013]|\d{1,3}[.)]|[a-z][.)])\s+\S)")
_NO_HEADING_END = re.compile(r"[.!?,;:…。！？：，；]$")  # noqa: RUF001 - CJK marks
_BOLD_LINE = re.compile(r"(\*\*|__)(?=\S)((?:(?!\1).)+)\1\s*")
_HEADING_ID = re.compile(r"\s*\{#[^{}]*\}$")
_STEP = re.compile(r"[^\S\n]*\d{1,2}[.)][^\S\n]+(?=\S)")
_NUMBERED = re.compile(r"\D{0,12}\d{1,2}\b")
"""The beginning of a heading that is one of several: ``1 Scope``, ``Article 2``."""
_MAX_TITLE_WORDS, _MAX_TITLE_CHARACTERS = 10, 80
_MIN_TEXT_WORDS = 5
_UNIT = re.compile(r"(?<=\d)\s?[^\W\d_]{1,4}$")
_SAMPLED_ROWS = 20
_RAISED = str.maketrans(
    "0123456789+-\u2212", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207b"
)
_RAISED_NUMBER = re.compile(r"[+\u2212-]?\d+")
_MAX_LINES = 15_000
"""Lines of a text whose structure is read: a block costs time and memory, however short it is."""
_MAX_READ_HEADINGS = 50_000
"""Characters of headings whose marks are read; later ones are taken as written: brackets are slow to read."""


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
        text: Plain text and Markdown without images in it; the extracted text of other files.
        title: The title that the file itself states, else empty.
        pages: The offset in ``text`` at which each page of a PDF file, or each slide, begins.
        blocks: The blocks of the text, in order.
        metadata: What the file states about itself: the front matter of Markdown.
        encoding_note: What is said about the encoding of the file, if that is a guess or wrong.
        losses: What of the file is not in ``text``, each on one line.
    """

    text: str
    title: str = ""
    pages: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    encoding_note: str | None = None
    losses: tuple[str, ...] = ()

    def page_at(self, offset: int) -> int | None:
        """Return the page number, from 1, of the character at ``offset``; None without pages."""
        return bisect_right(self.pages, offset) or None

    def pages_of(self, start: int, end: int, length: int) -> dict[str, Any]:
        """Return the metadata of the passage of ``length`` characters that ends with those from ``start`` to ``end``.

        ``page`` is the number of the page on which it begins. If it goes on, ``pages`` are those on which there is
        some of it, and ``page_starts`` where each begins in the passage.
        """
        page = self.page_at(start)
        if page is None:
            return {}
        first = length - (end - start)
        starts = {self.page_at(at): first + at - start for at in self.pages[page:] if at < end}
        more = {"pages": [page, *starts], "page_starts": [0, *starts.values()]} if starts else {}
        return {"page": page, **more}


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading in a text: its words, its level from 1, and its characters. Without words it only ends a section."""

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
            titles = tuple(item.title for item in path if item.title)
            result.append(Block(block.kind, block.start, block.end, titles, block.header_end, index))
            position += 1
        if heading is None:
            break
        while path and path[-1].level >= heading.level:
            path.pop()
        following = headings[index + 1] if index + 1 < len(headings) else None
        has_text = position < len(blocks) and (following is None or blocks[position].start < following.start)
        if heading.title and not has_text and (following is None or following.level <= heading.level):
            titles = tuple(item.title for item in path if item.title)
            result.append(Block("heading", heading.start, heading.end, titles, section=index))
        path.append(heading)
    return tuple(result)


def stated_title(headings: Sequence[Heading], blocks: Sequence[Block]) -> str:
    """Return the heading that is the title of a text: the only one of its level, above everything; else empty."""
    if not headings or (blocks and blocks[0].start < headings[0].start):
        return ""
    first = headings[0]
    return "" if any(heading.level <= first.level for heading in headings[1:]) else first.title


def raised_number(text: str) -> str:
    """Return raised text with its digits raised, where it is a number: ``x`` and ``2`` are x² and not x2."""
    return text.translate(_RAISED) if _RAISED_NUMBER.fullmatch(text.strip()) else text


def title_from_path(path: str | Path) -> str:
    """Return the name of a file as a title; empty if the name says nothing."""
    if _DATED_NAME.fullmatch(Path(path).stem):  # a daily note
        return Path(path).stem
    name = " ".join(re.sub(r"[_\-.]+", " ", Path(path).stem).split())
    return "" if name.lower() in _NO_TITLES or re.search(r"[^\W\d_]{3}", name) is None else name


def passage_title(title: str, headings: Sequence[str]) -> str:
    """Return the title of a passage: that of its file or document, and the headings above the passage."""
    path = list(headings)
    if path and title and path[0].casefold() == title.casefold():
        path = path[1:]
    return HEADING_SEPARATOR.join([title, *path] if title else path)


class Item(NamedTuple):
    """A part of a file as a library types it.

    Attributes:
        kind: Also ``more``, which goes on with the text of the item before it, and ``bold``, a paragraph in bold
            letters: a heading below all others, if it can be one and text follows.
        level: Of a heading, from 1; one without text only ends the section before it.
        page: The page or slide on which it begins, from 1; 0 if its file has none.
    """

    kind: BlockKind | Literal["more", "bold"]
    text: str
    level: int = 1
    page: int = 0


def items_text(items: Iterable[Item], title: str = "", losses: Iterable[str] = ()) -> FileText:
    """Return the text of items, which are separated by an empty line, or in a list by a line break."""
    segments: list[str] = []
    headings: list[Heading] = []
    blocks: list[Block] = []
    pages: list[int] = []
    length = 0
    for kind, raw, level, page in _with_bold_headings(items):
        text = clean_text(raw).rstrip().strip("\n")
        name = " ".join(text.split())
        if not name and kind != "heading":
            continue
        joined = bool(blocks) and blocks[-1].end == length and kind in ("list", "more") and blocks[-1].kind != "code"
        joined = joined and (kind == "more" or blocks[-1].kind == "list")
        gap = "" if not (segments and name) else "\n\n" if not joined else " " if kind == "more" else "\n"
        start, length = length + len(gap), length + len(gap) + len(text)
        segments += [gap, text]
        pages += [start] * (page - len(pages))
        if kind == "heading" and (not name or is_heading_text(name)):
            headings.append(Heading(name, level, start, length))
        elif joined:
            blocks[-1] = replace(blocks[-1], end=length)
        else:
            header = text.find("\n", text.find("\n") + 1) + 1 if kind == "table" else 0
            blocks.append(
                Block("text" if kind == "more" or kind == "bold" else kind, start, length, header_end=start + header)
            )
    return FileText(
        "".join(segments),
        title or stated_title(headings, blocks),
        tuple(pages),
        blocks_under(headings, blocks),
        losses=tuple(losses),
    )


def _with_bold_headings(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items, with a paragraph in bold letters as a heading where text follows, and as text elsewhere."""
    before = ""
    for item, after in pairwise(chain(items, [Item("heading", "")])):
        is_above = after.text.strip() and after.kind in ("text", "list", "table", "code")
        if item.kind != "bold":
            yield item
        elif is_above and is_label(item.text) and not before.endswith(":"):
            yield item._replace(kind="heading", level=BOLD_LEVEL)
        else:
            yield item._replace(kind="text")
        before = item.text.rstrip() or before


def is_label(text: str) -> bool:
    """Return whether a paragraph in bold letters can be a heading: a few words or a question, and no amount."""
    line = text.strip()
    if not line or len(line) > _MAX_TITLE_CHARACTERS or "\n" in line or line[0].islower():
        return False
    has_words = sum(map(str.isalpha, line)) >= max(1, 3 * sum(map(str.isdecimal, line)))
    return has_words and (line[-1] in "?\uff1f" or not _NO_HEADING_END.search(line))


def table_items(rows: Sequence[Sequence[str]], page: int = 0, rule: str = "| --- ") -> list[Item]:
    """Return a table as it is written in Markdown, without its empty rows and columns.

    Rows above it with one text, as a title in merged cells, are texts. A single row or column is text too. ``rule`` is
    a cell of the line below its header.
    """
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    used = [n for n in range(max(map(len, cells), default=0)) if any(n < len(row) and row[n] for row in cells)]
    cells = [[row[n] if n < len(row) else "" for n in used] for row in cells if any(row)]
    first = 0
    while len(used) > 1 and first < len(cells) - 2 and len({*cells[first]} - {""}) == 1:
        first += 1
    items = [Item("text", next(filter(None, row)), page=page) for row in cells[:first]]
    cells = cells[first:]
    if len(cells) < 2 or len(used) < 2:
        return [*items, Item("text", "\n".join("\t".join(row) for row in cells), page=page)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [*items, Item("table", "\n".join([lines[0], rule * len(used) + "|", *lines[1:]]), page=page)]


def divided_tables(rows: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each table of a sheet: another begins after an empty row with names of columns.

    These have numbers below them, or stand below a title and where the table above has numbers.
    """
    blocks = [list(block) for filled, block in groupby(range(len(rows)), lambda number: any(rows[number])) if filled]
    table: list[int] = []
    wide, numeric = 0, dict[int, bool]()  # rows of several cells; whether a column has numbers below its name
    for block in blocks:
        header = next((place for place, number in enumerate(block) if sum(map(bool, rows[number])) > 1), len(block))
        names, *below = [rows[number] for number in block[header:]] or [[]]
        columns = [column for column, name in enumerate(names) if name]
        if wide and below and not any(map(_is_number, names)):
            has_numbers = any(_is_number(row[column]) for row in below for column in columns if column < len(row))
            if has_numbers or (header and any(numeric.get(column) for column in columns)):
                yield table
                table, wide, numeric = [], 0, {}
        table += block
        for row in (rows[number] for number in block if len(blocks) > 1 and wide < _SAMPLED_ROWS):
            filled = [column for column, cell in enumerate(row) if cell]
            wide += len(filled) > 1
            if wide > 1:
                numeric |= {column: numeric.get(column, True) and _is_number(row[column]) for column in filled}
    yield table


def _is_number(cell: str) -> bool:
    return any(map(str.isdecimal, cell)) and not any(map(str.isalpha, _UNIT.sub("", cell)))


def read_markdown(text: str) -> FileText:
    """Return Markdown with its blocks; front matter gives title and metadata, and is no block."""
    front = _FRONT_MATTER.match(text)
    fields = None if front is None else _front_fields(front.group(2), is_toml=front.group(1) == "+++")
    start = 0 if front is None or fields is None else front.end()
    headings, blocks = _parse_markdown(text, start)
    metadata = fields or {}
    title = str(metadata.pop("title", "")) or stated_title(headings, blocks)
    return FileText(text, title, blocks=blocks_under(headings, blocks), metadata=metadata)


def _front_fields(front: str, *, is_toml: bool) -> dict[str, Any] | None:
    """Return the fields of front matter that are texts or lists of texts; None for text between two rules."""
    import yaml

    fields: dict[str, Any] | None
    try:
        if is_toml:
            fields = {name: _toml_text(value) for name, value in tomllib.loads(front.replace("\r\n", "\n")).items()}
        else:
            fields = yaml.load(front, Loader=yaml.BaseLoader)  # makes texts, lists and dicts alone
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError):  # "title: Rome: a guide" is no YAML, and common
        fields = {name: value.strip("\"'") for name, value in _FRONT_FIELD.findall(front)} or None
    if not front.strip():
        return {}
    if not isinstance(fields, dict):
        return None
    texts = {
        name: [item for item in value if isinstance(item, str)] if isinstance(value, list) else value
        for name, value in fields.items()
    }
    return {str(name).lower(): value for name, value in texts.items() if value and isinstance(value, str | list)}


def _toml_text(value: Any) -> Any:
    return value if isinstance(value, str | list | dict) else str(value)


def read_plain(text: str) -> FileText:
    """Return plain text with its blocks.

    Text with Markdown's marks for headings or code is read as Markdown. Otherwise a heading is a short line between
    empty lines without a mark at its end and with text below it, or a line in capitals. A text of very many lines is
    one block.
    """
    if text.count("\n") > _MAX_LINES:
        return FileText(text, blocks=(Block("text", 0, len(text)),))
    if _MARKUP_HEADINGS[".wiki"].search(text):
        return read_markup(text, ".wiki")
    if _MARKED.search(_SHELL_COMMENT.sub("", text)):
        return read_markdown(text)
    headings, blocks = _parse_plain(text)
    return FileText(text, stated_title(headings, blocks), blocks=blocks_under(headings, blocks))


_MARKUP_HEADINGS = {
    ".adoc": re.compile(r"^(?P<mark>={1,6})[^\S\n]+(?P<title>\S.*)$", re.MULTILINE),
    ".org": re.compile(r"^(?P<mark>\*{1,6})[^\S\n]+(?:(?:TODO|DONE)[^\S\n]+)?(?P<title>\S.*)$", re.MULTILINE),
    ".rst": re.compile(
        r"^(?:(?P<over>[=\-`:.'\"~^_*+#])(?P=over){2,}\n)?[^\S\n]?(?P<title>\S.*)\n(?P<mark>[=\-`:.'\"~^_*+#])(?P=mark){2,}$",
        re.MULTILINE,
    ),
    ".wiki": re.compile(
        r"^(?P<mark>={2,6})[^\S\n]*(?P<title>[^\s=](?:.*\S)?)[^\S\n]*(?P=mark)[^\S\n]*$", re.MULTILINE
    ),
}
MARKUP_SUFFIXES = tuple(_MARKUP_HEADINGS)
_MARKUP_FENCE = {  # what opens and closes code
    ".adoc": re.compile(r"^(-{4,}|\.{4,})$", re.MULTILINE),
    ".org": re.compile(r"^#\+(?:begin|end)_(\w+).*$", re.MULTILINE | re.IGNORECASE),
    ".wiki": re.compile(r"^[^\S\n]*</?(pre|nowiki|syntaxhighlight)\b", re.MULTILINE | re.IGNORECASE),
}
_RST_CODE = re.compile(r"(?:(?<=::)|(?<=::\n))\n(?:(?:[^\S\n].*)?\n)+")
_ORG_TAGS = re.compile(r":[\w@:]+:")
_ORG_TITLE = re.compile(r"^#\+title:[^\S\n]*(\S.*)$", re.MULTILINE | re.IGNORECASE)


def read_markup(text: str, suffix: str) -> FileText:
    """Return AsciiDoc, Org, wiki text or reStructuredText with its blocks; what is within code is no heading.

    In reStructuredText the level of a heading is that of the marks below it, in the order in which they first occur. A
    text of very many lines is one block.
    """
    if text.count("\n") > _MAX_LINES:
        return FileText(text, blocks=(Block("text", 0, len(text)),))
    code = list(_markup_code(text, suffix))
    starts = [start for start, _ in code]

    def is_code(offset: int) -> bool:
        before = bisect_right(starts, offset)
        return before > 0 and offset < code[before - 1][1]

    found = [
        match
        for match in _MARKUP_HEADINGS[suffix].finditer(text)
        if not is_code(match.start()) and is_heading_text(match["title"])
    ]
    marks = list(dict.fromkeys((match["mark"], match.groupdict().get("over")) for match in found))
    headings = [
        Heading(
            _without_tags(match["title"].strip()),
            marks.index((match["mark"], match["over"])) + 1 if suffix == ".rst" else len(match["mark"]),
            *match.span(),
        )
        for match in found
    ]
    title = _ORG_TITLE.search(text, 0, headings[0].start if headings else len(text)) if suffix == ".org" else None
    if title:
        headings.insert(0, Heading(title[1].strip(), 0, *title.span()))
    blocks = paragraph_blocks(text, headings)
    return FileText(text, stated_title(headings, blocks), blocks=blocks_under(headings, blocks))


def _without_tags(title: str) -> str:
    """Return a heading without the tags of Org at its end: ``Fees :now:``."""
    words, _, last = title.rpartition(" ")
    return words.rstrip() if words and _ORG_TAGS.fullmatch(last) else title


def _markup_code(text: str, suffix: str) -> Iterator[tuple[int, int]]:
    """Yield the characters of code, by offset; what is opened and never closed goes on to the end."""
    if suffix == ".rst":
        yield from (match.span() for match in _RST_CODE.finditer(text))
        return
    opened: re.Match[str] | None = None
    for fence in _MARKUP_FENCE[suffix].finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].lower() == opened[1].lower():
            yield opened.start(), fence.end()
            opened = None
    if opened is not None:
        yield opened.start(), len(text)


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
    top = [token for token in tokens if not token.level and token.nesting >= 0]
    follows = {id(token): after.type in _BELOW_BOLD for token, after in pairwise(top)}
    characters = 0
    for index, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0:
            continue
        first, last = lines[token.map[0]], lines[min(token.map[1], len(lines) - 1)]
        if token.type == "heading_open":
            title = tokens[index + 1].content
            if token.markup in ("=", "-") and ("\n" in title or title.endswith((".", ",", ";"))):
                last = lines[token.map[1] - 1]  # text above a divider
                blocks.append(Block("text", first, last, header_end=first))
                continue
            characters += len(title)
            if characters <= _MAX_READ_HEADINGS:
                title = _inline_text(parser.parseInline(title, references)[0])
            if is_heading_text(title):
                headings.append(Heading(title, int(token.tag[1:]), first, last))
                continue
        bold = _BOLD_LINE.fullmatch(text, first, last) if token.type == "paragraph_open" else None
        if (
            bold is not None
            and follows.get(id(token))
            and is_label(bold[2])
            and not text[:first].rstrip().endswith(":")
        ):
            headings.append(Heading(bold[2].strip(), BOLD_LEVEL, first, last))
            continue
        if token.type == "hr" or (token.type == "html_block" and not _COMMENT.sub("", token.content).strip()):
            continue
        kind = _KINDS.get(token.type, "text")
        header_end = lines[token.map[0] + 2] if kind == "table" else first
        blocks.append(Block(kind, first, last, header_end=header_end))
    return headings, blocks


def _inline_text(token: Token) -> str:
    """Return the words of a heading, without marks of Markdown."""
    words = " ".join("".join(child.content or " " for child in token.children or ()).split())
    return _HEADING_ID.sub("", words)


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
                and _is_title(_STEP.sub("", text[start:end]))
                and _is_above(text[start:end], text[slice(*following)], is_first=index == 0 and len(paragraphs) > 2)
            ):
                headings.append(Heading(" ".join(text[start:end].split()), min(index + 1, 2), start, end))
                continue
        elif (
            text[line_end:end].strip()
            and _is_capital_line(text[start:line_end])
            and not _is_capital_line(text[line_end:end])
        ):
            headings.append(Heading(" ".join(text[start:line_end].split()), 2, start, line_end))
            start = line_end + 1
        is_list = _ITEM.match(text, start) and _ITEM_BELOW.search(text, start, end)
        blocks.append(Block("list" if is_list else "text", start, end, header_end=start))
    if len(headings) > 1 and blocks:
        first, *others = (_kind_of_heading(heading.title) for heading in headings)
        if (
            first
            and first in others
            and (first != "capitals" or headings[0].end <= blocks[0].start < headings[1].start)
        ):
            headings[0] = replace(headings[0], level=2)
    return headings, blocks


def _kind_of_heading(title: str) -> str | None:
    """Return what is equal for headings of one kind: their words before a number, or that they are in capitals."""
    if number := _NUMBERED.match(title):
        return re.sub(r"\d+", "0", number[0])
    return "capitals" if title.isupper() else None


def _is_above(line: str, following: str, *, is_first: bool) -> bool:
    """Return whether a line that can be a title stands above text; a numbered one, above no item of a list."""
    if _STEP.match(line):
        return _ITEM.match(following) is None and len(following.split()) >= _MIN_TEXT_WORDS
    is_capital = _is_capital_line(line) and not _is_title(following)
    return is_first or is_capital or _is_prose(following)


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
        and not line.startswith("# ")
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
