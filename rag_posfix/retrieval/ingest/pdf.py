"""Reads PDF files: xberg finds paragraphs and headings, pypdf the outline and why a page has no text.

Lines that repeat on most pages, and page numbers, are left out.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import missing_extra
from rag_posfix.retrieval.ingest.extract import extract, node_items
from rag_posfix.retrieval.ingest.structure import FileText, Item, is_heading_text, items_text
from rag_posfix.text import clean_text

if TYPE_CHECKING:
    import pypdf

_BEFORE_TITLE = r"(?:(?:chapter|section|part|appendix)[^\S\n]+)?(?:(?-i:\d+|[IVXLC]+|[A-Z])(?:\.\d+)*[.:)]?[^\S\n]+)?"
"""What may stand before a heading in the text and not in the outline, as LaTeX makes it: ``3.1``, ``Appendix A``."""

_EDGE_LINES = 3
"""Lines at the top and the bottom of a page that may be those of each page."""
_MIN_PAGES, _MIN_SHARE = 3, 40
"""Pages with such a line, at least, and their share in percent: odd and even pages may have their own."""
_STAMP = re.compile(r"\d{1,4}[/.-]\d{1,2}[/.-]\d{1,4}.{0,4}\d{1,2}:\d\d")
_PAGE = r"(?:page|seite|p\.|s\.|p\u00e1gina|pagina|strona)"
_ALONE = rf"{_PAGE}?\W*(\d{{1,4}})(?:\s*(?:/|of|von|de|sur|di)\s*\d{{1,4}})?\W*"
_STATED_NUMBER = re.compile(rf"{_PAGE}\s+\d{{1,4}}\b.{{0,12}}", re.IGNORECASE)
_PAGE_NUMBER = re.compile(
    rf"^{_ALONE}$|^(\d{{1,4}})(?:\W+\w+){{2}}|"
    r"^(?:\S+\s+){1,20}?(?:page|seite|\S+)?\W*\b(\d{1,4})(?:\s*(?:/|of|von|de|sur|di)\s*\d{1,4})\W*$|"
    r"(?:\S+\s+){2}(\d{1,4})\W*$",
    re.IGNORECASE,
)
"""Alone, or at the end of a line with other words; \"Step 3\" is none."""
_ROMAN = re.compile(r"\W*([ivxl]+)\W*", re.IGNORECASE)
_NUMBER_ALONE = re.compile(rf"{_ALONE}|{_ROMAN.pattern}", re.IGNORECASE)
_ROMAN_DIGITS = {"i": 1, "v": 5, "x": 10, "l": 50}
_ADDRESS = re.compile(r"(?:https?|file)://\S+")
_WORD = re.compile(r"\w+")
_APART = re.compile(r"\b(\w*f)\s+(\w+)")
_BROKEN = re.compile(r"(?<=\w)-[ \n](?=[A-Z\u00c0-\u00de\d])")
_PART_NUMBER = re.compile(r"(\w+)-\n((?=[A-Z\u00c0-\u00de\d])\w+)")
_CUT = re.compile(r"(?<=[a-z\u00df-\u00ff])-\n(?=[a-z\u00df-\u00ff])")
"""A hyphen at the end of a line, in a paragraph whose lines xberg leaves as they are."""
_UNFINISHED = re.compile(r"[\w,;\u2013-]$")
_MIN_WRAPPED = 25
"""Characters of a heading that goes on in the next line, at least."""
_MIN_UNFINISHED = 40
"""Characters of a paragraph that goes on on the next page, at least; shorter ones are labels."""


def read_pdf(data: bytes) -> FileText:
    """Return the text of a PDF file under the entries of its outline, or under its lines in larger letters.

    The title in the file's properties is often a template's, so it is not used. Pages without text are losses.

    Raises:
        ConfigError: xberg or pypdf is not installed.
        RuntimeError: the file is damaged or encrypted.
    """
    try:
        import pypdf
    except ImportError as error:
        raise missing_extra("pypdf (needed for PDF files)", "pdf") from error
    found = extract(data, ".pdf")
    texts = {page.page_number: page.content for page in found.pages or ()}
    items = _on_pages(node_items(found), texts)
    pages = {
        page: _repaired([item for item in items if item.page == page], texts.get(page, ""))
        for page in sorted({item.page for item in items})
    }
    for page, lines in _repeated(texts).items():
        pages[page] = _without(pages.get(page, []), lines)
    reader = None
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        outline = list(_outline_entries(reader, reader.outline))
    except Exception:  # of many types: the text is there without an outline
        outline = []
    if outline:
        pages = {page: [_plain(item) for item in found] for page, found in pages.items()}
        for page in sorted({entry[2] for entry in outline if entry[2] in texts}):
            pages[page] = _under_entries(pages.get(page, []), texts[page], [e for e in outline if e[2] == page])
    joined = _joined([item for page in sorted(pages) for item in pages[page]])
    return items_text(joined, losses=_losses(reader, texts))


def _on_pages(items: Iterable[Item], texts: dict[int, str]) -> list[Item]:
    """Return items by page; the value of a field of a form, which has none, is on the page that shows it."""
    page = 1
    placed: list[Item] = []
    for item in items:
        if not item.page:
            value = item.text.rpartition(": ")[2]
            page = next((number for number, text in texts.items() if value in text), page)
        placed.append(item if item.page else item._replace(page=page))
    return sorted(placed, key=lambda item: item.page)


def _losses(reader: pypdf.PdfReader | None, texts: dict[int, str]) -> Iterator[str]:
    """Yield what is said about pages that cannot be read, and about pages without text."""
    empty = [page for page, text in texts.items() if not text.strip()]
    unreadable = [page for page in empty if not _is_readable(reader, page)]
    empty = [page for page in empty if page not in unreadable]
    if unreadable:
        yield f"{_pages(unreadable)} unreadable: damaged"
    if empty:
        yield f"{len(empty)} of {len(texts)} pages have no text: {_pages(empty)}; scanned?"


def _pages(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
    return f"page{'s' if len(numbers) > 1 else ''} {shown}"


def _is_readable(reader: pypdf.PdfReader | None, page: int) -> bool:
    try:
        contents = None if reader is None else reader.pages[page - 1].get_contents()
        return contents is None or contents.get_data().strip() != b""
    except Exception:  # of many types, as the file is damaged
        return False


def _repaired(items: list[Item], text: str) -> list[Item]:
    """Return the items of a page with the words of its text, which xberg joins at ``of its`` as at a ligature.

    A part of a word before a capital or digit, at the end of a line, keeps its hyphen: ``Franco-British``, ``AX-900``.
    """
    words = set(_WORD.findall(text))
    apart = {first + last: f"{first} {last}" for first, last in _APART.findall(text) if first + last not in words}
    apart |= {
        first + last: f"{first}-{last}" for first, last in _PART_NUMBER.findall(text) if first + last not in words
    }
    joined = re.compile(rf"\b(?:{'|'.join(map(re.escape, apart)) or '(?!)'})\b")
    repaired: list[Item] = []
    for item in items:
        text = _BROKEN.sub("-", joined.sub(lambda match: apart[match.group()], item.text))
        repaired.append(item._replace(text=text if item.kind == "code" else _CUT.sub("", text)))
    return repaired


def _repeated(texts: dict[int, str]) -> dict[int, list[str]]:
    """Return the lines at the edges of each page that are on many pages, or end with the number of the page.

    The first of lines that are the same on each page stays, unless it is a date. Where a browser printed the pages,
    time, address and page numbers go whatever the number of pages.
    """
    edges: dict[int, list[str]] = {}
    for page, text in texts.items():
        lines = [" ".join(line.split()) for line in text.split("\n") if line.strip()]
        stated = [line for line in lines if _STATED_NUMBER.fullmatch(line)]  # wherever a page with columns has it
        edges[page] = list(dict.fromkeys([*lines[:_EDGE_LINES], *stated, *lines[-_EDGE_LINES:]]))
    least = max(min(_MIN_PAGES, max(2, len(texts))), -(-_MIN_SHARE * len(texts) // 100))
    counts = Counter(key for lines in edges.values() for key in {_key(line) for line in lines})
    offsets = Counter(offset for page, lines in edges.items() for offset in {_offset(line, page) for line in lines})
    result: dict[int, list[str]] = {}
    kept: set[str] = set()
    for page, lines in edges.items():
        number = f"{page}/{len(texts)}"
        is_printed = number in lines and any(_STAMP.search(line) for line in lines)
        numbered = [
            line
            for line in lines
            if (offset := _offset(line, page)) is not None and offsets[offset] >= max(least, _MIN_PAGES)
        ]
        alone = [line for line in numbered if _NUMBER_ALONE.fullmatch(line)]
        for line in lines:
            if is_printed and (line == number or _STAMP.search(line) or _ADDRESS.fullmatch(line)):
                result.setdefault(page, []).append(line)
            elif counts[_key(line)] >= least and line not in kept and not _STAMP.search(line):
                kept.add(line)
            elif counts[_key(line)] >= least or line in (alone or numbered):
                result.setdefault(page, []).append(line)
    return result


def _key(line: str) -> str:
    """Return what is equal for equal lines: of one with a time, the minutes do not count."""
    return re.sub(r"\d", "0", line) if _STAMP.search(line) else line


def _offset(line: str, page: int) -> int | None:
    """Return how far what may be a printed page number in a line is from the number of the page."""
    if (roman := _ROMAN.fullmatch(line)) is not None:
        digits = [_ROMAN_DIGITS[letter] for letter in roman.group(1).lower()]
        following = [*digits[1:], 0]
        return sum(-digit if digit < after else digit for digit, after in zip(digits, following, strict=True)) - page
    match = _PAGE_NUMBER.search(line)
    return None if match is None else int(next(filter(None, match.groups()))) - page


def _without(items: list[Item], lines: Sequence[str]) -> list[Item]:
    """Return the items of a page without lines, each of which is an item or at the end of one."""
    rest = list(lines)
    for line in (*lines, *reversed(lines)):  # below one that is left out, another may be
        for index, item in enumerate(items):
            text = " ".join(item.text.split())
            if line in rest and (text == line or text.startswith(f"{line} ") or text.endswith(f" {line}")):
                left = text.removeprefix(line) if text.startswith(line) else text.removesuffix(line)
                items[index] = item._replace(text=left.strip())
                rest.remove(line)
    return [item for item in items if item.text]


def _plain(item: Item) -> Item:
    return item._replace(kind="text") if item.kind in ("heading", "bold") else item


def _outline_entries(
    reader: pypdf.PdfReader, entries: Sequence[Any], level: int = 1
) -> Iterator[tuple[str, int, int]]:
    """Yield title, level and page of the entries of a PDF outline; nested lists are a level deeper."""
    for entry in entries:
        if isinstance(entry, list):
            yield from _outline_entries(reader, entry, level + 1)
            continue
        title, page = " ".join(clean_text(str(entry.title or "")).split()), reader.get_destination_page_number(entry)
        if page is not None and is_heading_text(title):
            yield title, level, page + 1


def _under_entries(items: list[Item], text: str, entries: Sequence[tuple[str, int, int]]) -> list[Item]:
    """Return the items of a page with a heading for each entry, where its title is a line or ends one.

    Other words within a line may be those of a sentence, which has to keep them.
    """
    result: list[Item] = []
    position = 0
    for title, level, page in entries:
        words = r"\s+".join(map(re.escape, title.split()))
        line = re.compile(rf"^[^\S\n]*{_BEFORE_TITLE}{words}[^\S\n]*$", re.IGNORECASE | re.MULTILINE)
        after = re.compile(rf"(?<=[.!?])[^\S\n]+{words}[^\S\n]*$", re.MULTILINE)
        match = line.search(text, position) or after.search(text, position)
        begin = match or re.compile(rf"^[^\S\n]*{words}\b", re.IGNORECASE | re.MULTILINE).search(text, position)
        if begin is not None:
            shown = r"\s+".join(map(re.escape, begin.group().split()))
            place = re.compile(rf"(?<!\w){shown}(?!\w)")
            index = next((n for n, item in enumerate(items) if place.search(item.text)), None)
            if index is not None and (cut := place.search(items[index].text)) is not None:
                item, position = items[index], begin.end()
                result += [*items[:index], item._replace(text=item.text[: cut.start()].rstrip())]
                rest = item.text[(cut.end() if match else cut.start()) :].lstrip()
                items = [item._replace(text=rest), *items[index + 1 :]]
        result.append(Item("heading", title, level, page))
    return [item for item in (*result, *items) if item.text]


def _joined(items: Sequence[Item]) -> Iterator[Item]:
    """Yield items; a paragraph that ends inside of a sentence goes on in the first one of the next page."""
    before: Item | None = None
    for item in _with_whole_headings(items):
        goes_on = (
            before is not None
            and before.page + 1 == item.page
            and before.kind in ("text", "more", "list")
            and item.kind == "text"
            and item.text[:1].islower()
            and len(before.text) >= _MIN_UNFINISHED
            and _UNFINISHED.search(before.text)
        )
        before = item._replace(kind="more") if goes_on else item
        yield before


def _with_whole_headings(items: Sequence[Item]) -> Iterator[Item]:
    """Yield items; a line below a heading that begins with a small letter and ends no sentence belongs to it."""
    before: Item | None = None
    for item in items:
        if (
            before is not None
            and (before.kind, before.page) == ("heading", item.page)
            and item.kind in ("text", "bold")
            and len(before.text) >= _MIN_WRAPPED
            and len(item.text) <= 2 * len(before.text)
            and item.text[:1].islower()
            and not item.text.endswith((".", ":", "!", "?"))
            and is_heading_text(f"{before.text} {item.text}")
        ):
            item = before._replace(text=f"{before.text} {item.text}")
        elif before is not None:
            yield before
        before = item
    if before is not None:
        yield before
