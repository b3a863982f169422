"""Reads web pages: trafilatura finds what a page is about; small pages are read whole, without their navigation."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import accumulate

from rag_posfix.errors import missing_extra
from rag_posfix.retrieval.ingest.structure import (
    FileText,
    Heading,
    blocks_under,
    is_heading_text,
    paragraph_blocks,
    read_markdown,
    stated_title,
)
from rag_posfix.text import clean_text, split_words

_MIN_CONTENT_SHARE = 0.5
"""What trafilatura finds counts if it has this share of the words outside of navigation, at least."""

_INVISIBLE = frozenset(
    {"script", "style", "noscript", "template", "svg", "math", "head", "iframe", "object", "select", "nav", "footer"}
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
_HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
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
# trafilatura drops these elements, and writes others as tags or takes them for what they are not.
_DROPPED_INLINE = re.compile(r"</?(?:time|label|output|data|sub)\b[^<>]*>", re.IGNORECASE)
_DROPPED_BLOCK = re.compile(r"<(/?)(?:figcaption|legend|button|summary)\b[^<>]*>", re.IGNORECASE)
_DROPPED_HOLDER = re.compile(r"<(/?)(?:aside|fieldset|form|figure|details)\b[^<>]*>", re.IGNORECASE)
_SECTION_OR_FOOTER = re.compile(r"<(/?)(article|section|main|footer)\b[^<>]*>", re.IGNORECASE)
"""A footer within one of the others is that of a part of the page, and text."""
_CAPTION = re.compile(r"(<table\b[^<>]*>)\s*<caption\b[^<>]*>(.{0,500}?)</caption\s*>", re.IGNORECASE | re.DOTALL)
_RAISED = re.compile(r"<sup\b[^<>]*>(\d*)|</sup\s*>", re.IGNORECASE)
_RAISED_DIGITS = str.maketrans("0123456789", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
_MAX_ATTRIBUTES = 1000
_ENDLESS_TAG = re.compile(
    r"""<[a-zA-Z](?>[^\s<>"']*)(?>\s+[^\s<>"'=]+(?>\s*=\s*(?:"[^"]*"|'[^']*'|[^\s<>"']+))?)"""
    rf"{{{_MAX_ATTRIBUTES}}}"
)
"""Parsers compare each attribute of a tag with all others."""
_ESCAPED = re.compile(r"(^```.*?^```)|\\([_*<>\[\]`~#$])", re.DOTALL | re.MULTILINE)
_SPACES = re.compile(r"[^\S\xa0]+|\xa0+")


def read_html(source: str) -> FileText:
    """Return the content of an HTML page as Markdown, without navigation, and its title.

    trafilatura finds the content; a note says how many words outside of ``nav`` and ``footer`` it leaves out. If it
    finds little, as on a page of a few words, everything else is taken.

    Raises:
        ConfigError: trafilatura is not installed.
        ValueError: a tag has more than 1,000 attributes.
    """
    try:
        from trafilatura import extract
    except ImportError as error:
        raise missing_extra("trafilatura (needed for HTML files)", "html") from error
    if _ENDLESS_TAG.search(source):
        raise ValueError(f"a tag has more than {_MAX_ATTRIBUTES:,} attributes")
    source = _simplified(source)
    page = _read_page(source)
    content = extract(source, output_format="markdown", include_formatting=True, favor_recall=True) or ""
    if len(content.split()) < _MIN_CONTENT_SHARE * len(page.text.split()):
        return page
    read = read_markdown(unescaped(clean_text(content)))
    words, kept = Counter(split_words(page.text)), Counter(split_words(read.text))
    left_out = (words - kept).total()
    losses = (f"left out {left_out} of {words.total()} words outside navigation",) if left_out else ()
    return FileText(read.text, page.title or read.title, blocks=read.blocks, losses=losses)


def unescaped(markdown: str) -> str:
    """Return Markdown without the backslashes that keep marks in text from being read as Markdown, but in code."""
    return _ESCAPED.sub(lambda match: match.group(1) or match.group(2), markdown)


def _simplified(source: str) -> str:
    """Return a page with elements that trafilatura keeps in place of those that it drops."""
    text = _CAPTION.sub(r"<p>\2</p>\1", _DROPPED_INLINE.sub("", source))
    depth = 0

    def of_section(match: re.Match[str]) -> str:
        nonlocal depth
        if match.group(2).lower() == "footer":
            return f"<{match.group(1)}div>" if depth else match.group()
        depth = max(0, depth + (-1 if match.group(1) else 1))
        return match.group()

    text = _SECTION_OR_FOOTER.sub(of_section, text)
    text = _DROPPED_HOLDER.sub(r"<\1div>", _DROPPED_BLOCK.sub(r"<\1p>", text))
    return _RAISED.sub(lambda match: (match.group(1) or "").translate(_RAISED_DIGITS), text)


def _read_page(source: str) -> FileText:
    page = parse_page(source)
    text = clean_text(page.text())  # again: character references can encode NUL
    headings = page.headings()
    blocks = paragraph_blocks(text, headings)
    title = clean_text(page.title()) or stated_title(headings, blocks)
    return FileText(text, title, blocks=blocks_under(headings, blocks))


def parse_page(source: str) -> _Page:
    """Return the visible text, title and headings of a page.

    Scripts, styles, drawings, navigation, footers and other invisible elements are left out. Block elements are
    separated by an empty line, list items and table rows by a line break; runs of spaces are collapsed except in
    ``pre``.
    """
    page = _Page()
    page.feed(_parsable(source))
    page.close()
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


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._segments: list[str] = []
        self._title: list[str] = []
        self._invisible: list[str] = []  # open invisible elements
        self._in_title = self._takes_title = False
        self._pre = 0
        self._gap = ""  # white space to write before the next text
        self._heading_at: int | None = None  # index of the first segment of the open heading
        self._headings: list[tuple[int, int, int]] = []  # level, and indices of segments

    def title(self) -> str:
        """Return the text of the title element."""
        return " ".join("".join(self._title).split())

    def text(self) -> str:
        """Return the visible text."""
        return "".join(self._segments)

    def headings(self) -> list[Heading]:
        """Return the headings with their characters in the text."""
        offsets = [0, *accumulate(map(len, self._segments))]
        result = []
        for level, first, last in self._headings:
            title = " ".join("".join(self._segments[first:last]).split())
            if is_heading_text(title):
                result.append(Heading(title, level, offsets[first], offsets[last]))
        return result

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and set(self._invisible) <= {"head"}:
            self._in_title = True
            self._takes_title = not self._title  # only the first title counts
        elif self._invisible == ["head"] and tag not in _OF_HEAD:
            self._invisible.clear()  # this element ends the head, even without an end tag
        if tag in _INVISIBLE:
            self._invisible.append(tag)
        self._pre += tag == "pre"
        if tag in _HEADINGS:
            self._heading_at = len(self._segments)
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
        if tag in _HEADINGS and self._heading_at is not None:
            self._headings.append((int(tag[1]), self._heading_at, len(self._segments)))
            self._heading_at = None
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
        if self._segments:
            self._segments.append(self._gap)
        self._segments.append(data)
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
