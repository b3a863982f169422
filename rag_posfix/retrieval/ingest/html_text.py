"""Extracts the visible text of HTML. Pure functions; knows nothing of files or documents."""

from __future__ import annotations

import codecs
import re
from html.parser import HTMLParser

_INVISIBLE = frozenset(
    {"script", "style", "noscript", "template", "svg", "math", "head", "iframe", "object", "select"}
)
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"}
)
_PARAGRAPHS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "details", "div", "dl", "fieldset", "figcaption", "figure",
     "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre", "section",
     "table", "ul"}
)  # fmt: skip
_LINES = frozenset({"br", "caption", "dd", "dt", "legend", "li", "option", "summary", "tr"})
_CELLS = frozenset({"td", "th"})
_OF_HEAD = frozenset({"base", "link", "meta", "noscript", "script", "style", "template", "title"})

# Conditional comments (<![if ...]>) and CDATA sections: the standard library's parser stops at unknown ones.
_MARKED = re.compile(r"<!\[[^>]*>?")
_OPAQUE = re.compile(r"<!--|<script\b|<style\b", re.IGNORECASE)
_CLOSES = {
    "<!--": re.compile("-->"),
    "<script": re.compile(r"</script\s*>", re.IGNORECASE),
    "<style": re.compile(r"</style\s*>", re.IGNORECASE),
}
_TAG = re.compile(r"<[a-zA-Z/!?]")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)
_SPACES = re.compile(r"[^\S\xa0]+|\xa0+")


def decode_html(data: bytes) -> tuple[str, str | None]:
    """Return the decoded text of an HTML file, and a description of the decoding problem, or None.

    The encoding is that of a byte order mark, else the ``charset`` declared in the first 1024 bytes, else UTF-8.
    Undecodable bytes are replaced.
    """
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if data.startswith(mark):
            return _decode(data.removeprefix(codecs.BOM_UTF8), encoding)
    declared = _CHARSET.search(data[:1024])
    name = declared.group(1).decode("ascii", "replace").lower() if declared else "utf-8"
    if name in ("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"):
        name = "windows-1252"  # browsers decode these labels as windows-1252
    elif name.startswith(("utf-16", "utf-32")):
        name = "utf-8"  # the declaration itself is readable as ASCII, so the file is not UTF-16 or UTF-32
    try:
        b"a".decode(name)
    except (LookupError, ValueError):
        text, _ = _decode(data, "utf-8")
        return text, f"unknown charset {name!r}"
    return _decode(data, name)


def html_text(source: str) -> tuple[str, str]:
    """Return the title of an HTML page, empty where it has none, and its text.

    Scripts, styles, drawings and other invisible elements are left out. Menus and footers are kept. Block elements are
    separated by an empty line, list items and table rows by a line break; runs of spaces are collapsed except in
    ``pre``.
    """
    page = _Page()
    page.feed(_parsable(source))
    page.close()
    return page.title, page.text


def _parsable(source: str) -> str:
    """Return ``source`` without comments, scripts, styles, and an unterminated tag at its end.

    The standard library's parser stops at some of them and takes quadratic time for others.
    """
    parts = []
    at = 0
    while opened := _OPAQUE.search(source, at):
        parts.append(source[at : opened.start()])
        closed = _CLOSES[opened.group().lower()].search(source, opened.end())
        at = len(source) if closed is None else closed.end()
    text = _MARKED.sub("", "".join([*parts, source[at:]]))
    unclosed = _TAG.search(text, text.rfind(">") + 1)
    return text if unclosed is None else text[: unclosed.start()]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._title: list[str] = []
        self._invisible: list[str] = []  # open invisible elements
        self._in_title = self._takes_title = False
        self._pre = 0
        self._gap = ""  # white space to write before the next text

    @property
    def title(self) -> str:
        return " ".join("".join(self._title).split())

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and set(self._invisible) <= {"head"}:
            self._in_title = True
            self._takes_title = not self._title  # only the first title counts
        elif self._invisible == ["head"] and tag not in _OF_HEAD:
            self._invisible.clear()  # this element ends the head, even without an end tag
        if tag in _INVISIBLE:
            self._invisible.append(tag)
        self._pre += tag == "pre"
        self._separate(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _INVISIBLE and tag != "title":
            self.handle_starttag(tag, attrs)
            if tag not in _VOID:
                self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if tag in self._invisible:
            del self._invisible[self._invisible.index(tag) :]
        if tag == "pre" and self._pre:
            self._pre -= 1
        if tag not in _VOID:
            self._separate(tag)

    def handle_data(self, data: str) -> None:
        if self._in_title:
            if self._takes_title:
                self._title.append(data)
        elif not self._invisible:
            self._add(data)

    def _add(self, data: str) -> None:
        if not self._pre:
            data = _SPACES.sub(" ", data)
            if data[:1] == " " and not self._gap:
                self._gap = " "
            ends_with_space = data[-1:] == " "
            data = data.strip()
        else:
            ends_with_space = False
        if not data:
            return
        if self._parts:
            self._parts.append(self._gap)
        self._parts.append(data)
        self._gap = " " if ends_with_space else ""

    def _separate(self, tag: str) -> None:
        if self._invisible:
            return
        if tag in _PARAGRAPHS:
            self._gap = "\n\n"
        elif tag in _LINES and self._gap != "\n\n":
            self._gap = "\n"
        elif tag in _CELLS and not self._gap.startswith("\n"):
            self._gap = " "


def _decode(data: bytes, encoding: str) -> tuple[str, str | None]:
    try:
        return data.decode(encoding), None
    except UnicodeError as error:
        return data.decode(encoding, "replace"), f"not {encoding} ({str(error).splitlines()[0]})"
