"""Reads the text of plain text, HTML, PDF and Word files. Knows nothing of passages or indexes."""

from __future__ import annotations

import codecs
import logging
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import BinaryIO

from rag_posfix.errors import NotTextError, RetrievalError, missing_extra
from rag_posfix.text import clean_text

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".docx", ".htm", ".html", ".md", ".pdf", ".txt")
"""Suffixes of text files, in upper or lower case."""

_SAMPLE_BYTES = 8192
_UNDECODABLE_SHARE = 0.3
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file; ``start`` and ``end`` in a passage's metadata are character offsets in it.

    Attributes:
        text: Plain text and Markdown unchanged; the extracted text of HTML, PDF and Word files.
        title: The title of an HTML page, else empty. The title of a PDF file is often a template's, so it is not used.
        pages: The offset in ``text`` at which each page of a PDF file begins.
    """

    text: str
    title: str = ""
    pages: tuple[int, ...] = ()

    def page_at(self, offset: int) -> int | None:
        """Return the page number, from 1, of the character at ``offset``; None without pages."""
        return bisect_right(self.pages, offset) or None


def read_text(path: str | Path) -> FileText:
    """Return the text of a ``.txt``, ``.md``, ``.html``, ``.htm``, ``.pdf`` or ``.docx`` file.

    Text is UTF-8, or UTF-16 with a byte order mark. Undecodable bytes are replaced, with a warning in the log.

    Raises:
        RetrievalError: the file cannot be read, is not text, or is named ``.pdf`` or ``.docx`` and is none.
        ConfigError: it is a PDF or Word file, and the extra ``pdf`` or ``docx`` is not installed.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".pdf":
            return _read_pdf(path)
        if path.suffix.lower() == ".docx":
            return FileText(_read_docx(path))
        data = path.read_bytes()
    except OSError as error:
        raise RetrievalError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if path.suffix.lower() in (".htm", ".html"):
        _check_text(data, str(path), declared=True)
        source, problem = decode_html(data)
        if problem:
            logger.warning("%s: %s; replaced undecodable bytes", path, problem)
        title, text = html_text(clean_text(source))
        return FileText(clean_text(text), clean_text(title))  # again: character references can encode NUL
    return FileText(checked_text(data, str(path)))


def checked_text(data: bytes, source: str) -> str:
    """Return the text of a whole file: UTF-8, or UTF-16 with a byte order mark; the mark is left out.

    Raises:
        NotTextError: there is a NUL byte in the first 8 KiB, or too much of them is not UTF-8.
    """
    _check_text(data, source)
    if data.startswith(_UTF16_MARKS):
        return clean_text(data.decode("utf-16", "replace"))
    return decode_text(data.removeprefix(codecs.BOM_UTF8), source)


def _check_text(data: bytes, source: str, *, declared: bool = False) -> None:
    """Raise for bytes that are not text; a ``declared`` file may name its encoding itself, as HTML does."""
    sample = data[:_SAMPLE_BYTES]
    if sample.startswith(_UTF16_MARKS):
        return
    if b"\0" in sample:
        raise NotTextError(f"{source!r} is binary, not text; leave it out, or give the file its own suffix")
    decoded = sample.decode("utf-8", "replace")
    if not declared and decoded.count("\ufffd") > _UNDECODABLE_SHARE * len(decoded):
        raise NotTextError(f"{source!r} is not UTF-8 text; save it in UTF-8")


def decode_text(data: bytes, position: str) -> str:
    """Return bytes decoded as UTF-8; undecodable bytes are replaced, with a warning in the log."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        logger.warning("%s: not UTF-8 (%s); replaced undecodable bytes", position, error.reason)
        text = data.decode("utf-8", "replace")
    return clean_text(text)


@contextmanager
def _open_document(path: Path, kind: str, advice: str) -> Iterator[BinaryIO]:
    """Open a file for pypdf or python-docx, which raise many types of errors; the user gets one line with its name."""
    with path.open("rb") as handle:
        try:
            yield handle
        except OSError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RetrievalError(
                f"cannot read {str(path)!r} as {kind}: {reason}; leave the file out, or save it again {advice}"
            ) from error


def _read_pdf(path: Path) -> FileText:
    try:
        import pypdf
    except ImportError as error:
        raise missing_extra("pypdf (needed for PDF files)", "pdf") from error
    with _open_document(path, "PDF", "without encryption") as handle:
        texts = [clean_text(page.extract_text()) for page in pypdf.PdfReader(handle).pages]
    starts, length = [], 0
    for number, text in enumerate(texts):
        texts[number] = text.rstrip() + "\n\n"
        starts.append(length)
        length += len(texts[number])
    return FileText("".join(texts), pages=tuple(starts))


def _read_docx(path: Path) -> str:
    """Return the paragraphs and the rows of tables of a Word file, in their order."""
    try:
        import docx
        from docx.table import Table
    except ImportError as error:
        raise missing_extra("python-docx (needed for Word files)", "docx") from error
    blocks: list[str] = []
    with _open_document(path, "a Word file", "as .docx") as handle:
        for block in docx.Document(handle).iter_inner_content():
            if isinstance(block, Table):
                rows = ("\t".join(cell.text for cell in row.cells) for row in block.rows)
                blocks.append("\n".join(rows))
            else:
                blocks.append(block.text)
    return clean_text("\n\n".join(block for block in blocks if block.strip()))


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

    The encoding is given by a byte order mark, else by the ``charset`` declared in the first 1024 bytes, else UTF-8.
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
    return page.result()


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

    def result(self) -> tuple[str, str]:
        return " ".join("".join(self._title).split()), "".join(self._segments)

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


def _decode(data: bytes, encoding: str) -> tuple[str, str | None]:
    try:
        return data.decode(encoding), None
    except UnicodeError as error:
        return data.decode(encoding, "replace"), f"not {encoding} ({str(error).splitlines()[0]})"
