"""Reads web pages and e-books: the words outside of navigation, as the standard library's parser finds them.

Libraries that look for the main content of a page leave out captions, forms, lists of links and half of what is in no
paragraph, so that words are left out by what a page says of its parts alone.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree
from zipfile import ZipFile

from rag_posfix.retrieval.ingest.decoding import decode_html
from rag_posfix.retrieval.ingest.structure import FileText, Item, items_text, raised_number, table_items
from rag_posfix.text import clean_text, split_words

_INVISIBLE = frozenset(
    {"script", "style", "noscript", "template", "annotation", "annotation-xml", "desc", "head", "iframe", "metadata",
     "object", "nav"}
)  # fmt: skip
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
)
_PARAGRAPHS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "caption", "details", "div", "dl", "fieldset", "figcaption",
     "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "legend", "li", "main", "nav",
     "ol", "p", "pre", "section", "summary", "table", "td", "th", "tr", "ul"}
)  # fmt: skip
_LINES = frozenset({"br", "dd", "dt", "optgroup", "option"})
_SPACED = frozenset({"button", "img", "input", "select", "text", "textarea", "tspan"})
_PARTS = frozenset({"a", "label", "span"})
"""Elements that pages set apart by style alone: a word ends where such an element ends and another begins."""
_SECTIONS = frozenset({"article", "aside", "blockquote", "main", "section"})
"""A footer within one of these is that of a part of the page, and text."""
_HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_BOLD = frozenset({"b", "strong", "summary"})
_PERMALINK = frozenset("\xb6#\xa7\U0001f517\u200b")
"""Marks of links to the heading in which they stand."""
_OF_HEAD = frozenset({"base", "link", "meta", "noscript", "script", "style", "template", "title"})
_NAVIGATION = re.compile(
    r"(?:^|\s)(?:nav(?:bar|igation)?|(?:main|site|top|sub|nav)-?(?:nav(?:bar|igation)?|menu)|breadcrumbs?|"
    r"cookie-?(?:banner|bar|consent|notice)|skip-?(?:link|to-?content)|mw-editsection|site-?footer)(?:_\w+)?(?:\s|$)",
    re.IGNORECASE,
)
"""Classes and ids of what is navigation, though its element does not say so."""
_ROLES = frozenset({"navigation", "menu", "menubar", "contentinfo"})
_VALUES = frozenset({"", "text", "button", "submit", "email", "number", "date", "tel", "url"})
"""Types of inputs whose values a reader sees."""

# Conditional comments (<![if ...]>) and CDATA sections: the standard library's parser stops at unknown ones.
_MARKED = re.compile(r"<!\[[^>]*>?")
_OPAQUE = re.compile(r"<!--|<script\b|<style\b", re.IGNORECASE)
_CLOSES = {
    "<!--": re.compile("-->"),
    "<script": re.compile(r"</script\s*>", re.IGNORECASE),
    "<style": re.compile(r"</style\s*>", re.IGNORECASE),
}
_TAG = re.compile(r"<[a-zA-Z/!?]")
_FRAGMENT = re.compile(
    r"\s*<(?:article|blockquote|div|dl|figure|h[1-6]|ol|p|section|table|ul)(?:\s[^<>]*)?>", re.IGNORECASE
)
_MAX_ATTRIBUTES = 1000
_ENDLESS_TAG = re.compile(
    r"""<[a-zA-Z](?>[^\s<>"']*)(?>\s+[^\s<>"'=]+(?>\s*=\s*(?:"[^"]*"|'[^']*'|[^\s<>"']+))?)"""
    rf"{{{_MAX_ATTRIBUTES}}}"
)
"""Parsers compare each attribute of a tag with all others."""
_SPACES = re.compile(r"[^\S\xa0]+|\xa0+")
_MAX_SPAN, _MAX_CELLS = 1000, 100_000


def read_html(data: bytes, source: str = "the page") -> FileText:
    """Return the words of an HTML page outside of its navigation, and its title.

    Left out are scripts, ``nav``, the footer of the page, and elements whose role, class or id is that of navigation;
    how many words are in the latter is a loss.

    Raises:
        ValueError: a tag has more than 1,000 attributes.
    """
    text, note = decode_html(data, source)
    page = _read_page(text)
    left_out = len(split_words(" ".join(page.left_out)))
    losses = [f"left out {left_out} words of its footer, or of what its role or class says is navigation"]
    title = " ".join(clean_text("".join(page.title)).split())
    return replace(items_text(page.all_items(), title, losses if left_out else ()), encoding_note=note)


def read_epub(data: bytes) -> FileText:
    """Return the chapters of an e-book in their order, with its title; a chapter that is missing is a loss.

    Raises:
        ValueError: a part of the archive is missing or no XML.
    """
    items: list[Item] = []
    losses: list[str] = []
    with ZipFile(io.BytesIO(data)) as archive:
        names = {name.casefold(): name for name in archive.namelist()}
        root = ElementTree.fromstring(archive.read("META-INF/container.xml")).find(".//{*}rootfile")
        name = "" if root is None else root.get("full-path", "")
        package = ElementTree.fromstring(archive.read(name))
        files = {item.get("id"): item.get("href", "") for item in package.iterfind(".//{*}item")}
        labels = _contents(archive, package, name)
        for reference in package.iterfind(".//{*}itemref"):
            path = _path(name, files.get(reference.get("idref"), ""))
            try:
                source, _ = decode_html(archive.read(names.get(path.casefold(), path)), path)
            except KeyError:
                losses.append(f"the chapter {path!r} is missing")
                continue
            chapter = html_items(source)
            if path in labels and not any(item.kind == "heading" for item in chapter):
                items.append(Item("heading", labels[path]))
            items += chapter
    title = next((element.text for element in package.iterfind(".//{*}title") if element.text), "")
    return items_text(items, " ".join(clean_text(title).split()), losses)


def _path(base: str, href: str) -> str:
    """Return the name in the archive of what a part of an e-book refers to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(href.partition("#")[0])))


def _contents(archive: ZipFile, package: ElementTree.Element, name: str) -> dict[str, str]:
    """Return the first name of each part of an e-book in its table of contents."""
    labels: dict[str, str] = {}
    for item in package.iterfind(".//{*}item"):
        is_contents = item.get("properties") == "nav" or item.get("media-type") == "application/x-dtbncx+xml"
        path = _path(name, item.get("href", ""))
        with suppress(KeyError, ElementTree.ParseError):
            root = ElementTree.fromstring(archive.read(path)) if is_contents else ElementTree.Element("none")
            for link in (*root.iterfind(".//{*}navPoint"), *root.iterfind(".//{*}a[@href]")):
                content, text = link.find("{*}content"), link.find("{*}navLabel")
                href = link.get("href", "") if content is None else content.get("src", "")
                label = " ".join("".join((link if text is None else text).itertext()).split())
                labels.setdefault(_path(path, href), clean_text(label))
    return labels


def _read_page(source: str) -> _Page:
    if _ENDLESS_TAG.search(source):
        raise ValueError(f"a tag has more than {_MAX_ATTRIBUTES:,} attributes")
    page = _Page()
    page.feed(_parsable(source))
    page.close()
    page.end_block()
    return page


def _parsable(source: str) -> str:
    """Return ``source`` without comments, scripts, styles, and an unterminated tag at its end.

    The standard library's parser stops at some of them and takes quadratic time for others.
    """
    segments = []
    position = 0
    while start := _OPAQUE.search(source, position):
        segments.append(source[position : start.start()])
        end = _CLOSES[start.group().lower()].search(source, start.end())
        position = len(source) if end is None else end.end()
    text = _MARKED.sub("", "".join([*segments, source[position:]]))
    unclosed = _TAG.search(text, text.rfind(">") + 1)
    return text if unclosed is None else text[: unclosed.start()]


def fragment_text(source: str) -> str:
    """Return the text of a fragment of HTML, as exports of help centers hold it; other text as it is."""
    if _FRAGMENT.match(source) is None or not source.rstrip().endswith(">"):
        return source
    with suppress(ValueError):
        return items_text(html_items(source)).text
    return source


def html_items(source: str) -> list[Item]:
    """Return the items of a page or fragment that is decoded; ValueError as ``read_html``."""
    return _read_page(source).all_items()


@dataclass(slots=True)
class _Table:
    """An open table: what is in none of its cells, and of each row the cells with their columns and rows."""

    items: list[Item] = field(default_factory=list)
    rows: list[list[tuple[list[Item], int, int]]] = field(default_factory=list)
    in_cell: bool = False

    def close(self) -> list[Item]:
        """Return the table; where it only lays a page out, which shows by headings and tables in it, their items."""
        inner = [item for row in self.rows for cell, _, _ in row for item in cell]
        is_layout = any(
            item.kind in ("heading", "table") or (item.kind == "code" and "\n" in item.text) for item in inner
        )
        if is_layout or max(map(len, self.rows), default=0) < 2:
            return [*self.items, *inner]
        is_bounded = sum(width * height for row in self.rows for _, width, height in row) <= _MAX_CELLS
        rows: list[list[str]] = []
        filled: dict[int, tuple[str, int]] = {}  # by column: a cell over more rows, and how many these are
        for cells in self.rows:
            row: list[str] = []
            waiting = deque(cells)
            while waiting or len(row) in filled:
                text, height = filled.pop(len(row), ("", 0))
                if not height:
                    items, width, height = waiting.popleft()
                    text = " ".join(item.text for item in items)
                    for column in range(len(row) + 1, len(row) + width) if is_bounded else ():
                        filled[column] = (text, height)
                if height > 1 and is_bounded:
                    filled[len(row)] = (text, height - 1)
                row.append(text)
            rows.append(row)
        return [*self.items, *table_items(rows, rule="|---")]


class _Page(HTMLParser):
    """Collects the items of a page: what is between two tags that separate paragraphs is one."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.left_out: list[str] = []
        self._items: list[Item] = []
        self._tables: list[_Table] = []
        self._segments: list[str] = []  # of the open block
        self._invisible: list[str] = []  # open invisible elements
        self._is_navigation = False
        self._in_title = self._takes_title = self._is_raised = self._is_permalink = False
        self._sections = self._pre = self._heading = self._drawings = self._bold = 0
        self._is_bold = True  # all text of the open block
        self._lists: list[int | None] = []  # the number of the next item, None for bullets
        self._marker: str | None = None  # of the open list item; empty after its first block
        self._gap = ""  # white space to write before the next text
        self._edge = 0  # 1 after the end of a part of a line, 2 where another begins at once

    def all_items(self) -> list[Item]:
        """Return the items, also those of tables that are not closed."""
        while self._tables:
            self._close_table()
        return self._items

    def end_block(self) -> None:
        """Make the text since the last block an item."""
        text, is_bold = "".join(self._segments), self._is_bold
        self._segments, self._gap, self._is_bold = [], "", True
        if not text.strip():
            return
        sink = self._items
        if self._tables:
            table = self._tables[-1]
            sink = table.rows[-1][-1][0] if table.in_cell else table.items
        if self._heading:
            sink.append(Item("heading", text, self._heading))
        elif self._pre:
            sink.append(Item("code", text))
        elif self._marker is not None:
            sink.append(Item("list", f"{self._marker}{text}"))
            self._marker = ""
        else:
            sink.append(Item("bold" if is_bold and not self._tables else "text", text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._drawings += tag == "svg"
        if tag == "title" and set(self._invisible) <= {"head"} and not self._drawings:
            self._in_title = True
            self._takes_title = not self.title  # only the first title counts
        elif self._invisible == ["head"] and tag not in _OF_HEAD:
            self._invisible.clear()  # this element ends the head, even without an end tag
        if self._invisible:
            if tag in _INVISIBLE or tag == self._invisible[0]:
                self._invisible.append(tag)
            return
        self._edge = 2 if self._edge and tag in _PARTS else 0
        values = {name: value or "" for name, value in attrs}
        is_named = values.get("role", "").lower() in _ROLES or any(
            _NAVIGATION.search(values.get(name, "")) for name in ("class", "id")
        )
        self._separate(tag)
        if tag in _INVISIBLE or tag == "title":  # that of a drawing names its icon
            self._invisible.append(tag)
        elif (tag == "footer" and not self._sections) or (
            is_named and tag not in _VOID and tag not in ("html", "body", "main", "article")
        ):
            self._invisible.append(tag)
            self._is_navigation = True
        else:
            self._begin(tag, values)

    def _begin(self, tag: str, values: dict[str, str]) -> None:
        self._sections += tag in _SECTIONS
        self._pre += tag == "pre"
        self._bold += tag in _BOLD
        self._is_raised = tag == "sup" or "noteref" in values.get("role", values.get("epub:type", ""))
        self._is_permalink = tag == "a" and values.get("href", "").startswith("#")
        if tag == "dt":  # below a term is its text
            self.end_block()
        if tag in _HEADINGS:
            self._heading = int(tag[1])
        elif tag in ("ul", "ol", "menu"):
            self._lists.append(_whole(values.get("start"), 1) if tag == "ol" else None)
        elif tag == "li":
            number = self._lists[-1] if self._lists else None
            self._marker = "- " if number is None else f"{number}. "
            if number is not None:
                self._lists[-1] = number + 1
        elif tag == "table":
            self._tables.append(_Table())
            self._marker = None
        elif self._tables and tag == "tr":
            self._tables[-1].rows.append([])
            self._tables[-1].in_cell = False
        elif self._tables and tag in ("td", "th"):
            table = self._tables[-1]
            if not table.rows:
                table.rows.append([])
            table.rows[-1].append(([], _whole(values.get("colspan"), 1), _whole(values.get("rowspan"), 1)))
            table.in_cell, self._marker = True, None
        elif tag == "input" and values.get("type", "").lower() in _VALUES:
            self._add(values.get("value", ""))
            self._gap = self._gap or " "
        elif tag == "img" and len(split_words(values.get("alt", ""))) > 1:  # a single word names an icon
            self._add(values["alt"])
            self._gap = self._gap or " "

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _INVISIBLE and tag != "title":
            self.handle_starttag(tag, attrs)
            if tag not in _VOID:
                self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        self._drawings -= tag == "svg" and self._drawings > 0
        if tag == "title":
            self._in_title = False
        if self._invisible:
            while tag in self._invisible and self._invisible.pop() != tag:
                pass  # elements within it that are not closed
            self._is_navigation &= bool(self._invisible)
            return
        if tag not in _VOID:
            self._separate(tag)
        self._bold -= tag in _BOLD and self._bold > 0
        if tag == "pre" and self._pre:
            self._pre -= 1
        elif tag in _HEADINGS:
            self._heading = 0
        elif tag in _SECTIONS and self._sections:
            self._sections -= 1
        elif tag in ("ul", "ol", "menu") and self._lists:
            self._lists.pop()
            self._marker = "" if self._lists else None
        elif tag == "li":
            self._marker = None
        elif tag == "table" and self._tables:
            self._close_table()
        elif tag in ("td", "th") and self._tables:
            self._tables[-1].in_cell = False
        self._is_raised = self._is_permalink = False
        self._edge = 1 if tag in _PARTS else self._edge

    def _close_table(self) -> None:
        found = self._tables.pop().close()
        sink = self._items
        if self._tables:
            table = self._tables[-1]
            sink = table.rows[-1][-1][0] if table.in_cell else table.items
        sink += found

    def handle_data(self, data: str) -> None:
        if self._in_title:
            if self._takes_title:
                self.title.append(data)
        elif not self._invisible:
            self._add(raised_number(data) if self._is_raised else data)
        elif self._is_navigation:
            self.left_out.append(data)

    def _add(self, data: str) -> None:
        if not self._pre:
            data = _SPACES.sub(" ", data)
            if data[:1] == " " and not self._gap:
                self._gap = " "
            ends_with_space = data[-1:] == " "
            data = data.strip()
        else:
            ends_with_space = False
        if not data or (self._is_permalink and _PERMALINK.issuperset(data)):
            return
        self._is_bold &= self._bold > 0
        if self._segments:
            before = self._segments[-1]
            is_edge = self._edge == 2 and not self._pre and len(before + data) > 2  # and no letters of one word
            ends_word = is_edge and before[-1].isalnum() and data[0].isalnum()
            self._segments.append(self._gap or " " * ends_word)
        self._edge = 0
        self._segments.append(data)
        self._gap = " " if ends_with_space else ""

    def _separate(self, tag: str) -> None:
        if tag in _PARAGRAPHS or (tag == "br" and self._gap == "\n" and not self._pre):
            self.end_block()
        elif tag in _LINES:
            self._gap = "\n"
        elif tag in _SPACED:
            self._gap = self._gap or " "


def _whole(value: str | None, default: int) -> int:
    with suppress(ValueError):
        return max(1, min(int(value or ""), _MAX_SPAN))
    return default
