"""Reads the text of a file by its suffix, with its blocks and headings. Knows nothing of passages or indexes.

Bytes are decoded by their mark, by what they state, as UTF-8, or in an encoding that is guessed and then reported.
"""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rag_posfix.errors import NotTextError, RetrievalError, missing_extra
from rag_posfix.registry import Registry
from rag_posfix.retrieval.ingest.html import read_html, unescaped
from rag_posfix.retrieval.ingest.structure import (
    Block,
    FileText,
    Heading,
    blocks_under,
    is_heading_text,
    paragraph_blocks,
    read_markdown,
    read_plain,
    stated_title,
)
from rag_posfix.text import clean_text

if TYPE_CHECKING:
    import pypdf
    from docx.table import Table, _Cell
    from docx.text.paragraph import Paragraph

_SAMPLE_BYTES = 8192
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF32_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)  # the first begins with that of UTF-16
_EMBEDDED = re.compile(r"data:[\w/+.-]*(?:;[\w=.-]+)*;base64,[A-Za-z0-9+/=%]+")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)

# Encodings of files of the last decades. Without this list short texts are taken for those of mainframes.
_GUESSED = (
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "koi8_r", "cp932", "euc_jp",
    "gb18030", "big5", "cp949",
)  # fmt: skip
_THAI = ("cp874",)  # takes much other text for Thai, so it is tried last

# Letters of Western European languages and typographic marks, as far as UTF-8 would not be ASCII.
_WESTERN = frozenset(
    "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿßœÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜŸŒ‘’‚“”„–—…‹›«»€£§°·¿¡²³½¼®©™\xa0"  # noqa: RUF001
)
_MARK_IN_WORD = re.compile(r"[^\W\d_][²³½¼¿¡£®©][^\W\d_]")
_MAX_WESTERN_SHARE = 0.3


_BROWSER_LABELS = {
    **dict.fromkeys(("iso-8859-1", "iso8859-1", "latin1", "latin-1", "l1", "us-ascii", "ascii"), "windows-1252"),
    **dict.fromkeys(("gb2312", "gbk", "x-gbk", "gb-2312-80", "chinese"), "gb18030"),
    **dict.fromkeys(("shift-jis", "sjis", "x-sjis", "ms-kanji", "windows-31j"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks-c-5601-1987", "ksc5601", "korean", "windows-949"), "cp949"),
    **dict.fromkeys(("big5", "big5-hkscs", "x-x-big5", "cn-big5"), "big5hkscs"),
    **dict.fromkeys(("iso-8859-9", "latin5", "l5", "x-cp1254"), "cp1254"),
    **dict.fromkeys(("tis-620", "iso-8859-11", "windows-874", "dos-874"), "cp874"),
}
"""The encodings as which browsers decode labels (WHATWG, Encoding Standard, section 4.2)."""


def decode_text(data: bytes, source: str) -> tuple[str, str | None]:
    """Return the text of a file without its byte order mark, and what is said about its encoding if that is a guess.

    Raises:
        NotTextError: there is a NUL byte in the first 8 KiB, or no encoding gives text.
    """
    if data.startswith(_UTF32_MARKS):
        return clean_text(data.decode("utf-32", "replace")), None
    if data.startswith(_UTF16_MARKS):
        return clean_text(data.decode("utf-16", "replace")), None
    if b"\0" in data[:_SAMPLE_BYTES]:
        raise NotTextError(f"{source!r} is binary, not text; leave it out, or give the file its own suffix")
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return clean_text(data.decode("utf-8")), None
    except UnicodeDecodeError:
        encoding = guess_encoding(data, source)
    note = f"not UTF-8, read as {encoding}: a guess; check its accents, or save it in UTF-8"
    if encoding == "utf-8":
        note = "damaged UTF-8; undecodable bytes were replaced"
    return clean_text(data.decode(encoding, "replace")), note


def guess_encoding(data: bytes, source: str) -> str:
    """Return the most likely encoding of bytes that are not UTF-8.

    UTF-8 with a few damaged characters counts as UTF-8. Text that windows-1252 (a superset of Latin-1) turns into
    letters of Western European languages counts as that; charset-normalizer decides about other text.

    Raises:
        NotTextError: no encoding gives text.
    """
    lenient = data.decode("utf-8", "replace")
    damaged = lenient.count("\ufffd")
    if sum(character > "\x7f" for character in lenient) > 3 * damaged:
        return "utf-8"
    if _is_western(data):
        return "cp1252"
    from charset_normalizer import from_bytes

    for encodings in (_GUESSED, _THAI):
        best = from_bytes(data, cp_isolation=list(encodings)).best()
        if best is not None:
            return best.encoding
    raise NotTextError(f"{source!r} is not text in a known encoding; save it in UTF-8")


def _is_western(data: bytes) -> bool:
    text = data.decode("cp1252", "replace")
    foreign = [character for character in text if character > "\x7f"]
    letters = sum(character.isalpha() for character in text)
    return (
        _WESTERN.issuperset(foreign)
        and sum(map(str.isalpha, foreign)) <= _MAX_WESTERN_SHARE * letters
        and not _MARK_IN_WORD.search(text)
        and not any(character < " " and character not in "\t\n\r\f\x0b\x1b" for character in text)
    )


def decode_html(data: bytes, source: str = "the page") -> tuple[str, str | None]:
    """Return the text of an HTML file, and what is said about its encoding if that is a guess or wrong.

    The encoding is given by a byte order mark, else by the ``charset`` declared in the first 1024 bytes; else it is
    UTF-8, or guessed. Undecodable bytes are replaced.
    """
    declared = (
        None if data.startswith((*_UTF32_MARKS, *_UTF16_MARKS, codecs.BOM_UTF8)) else _CHARSET.search(data[:1024])
    )
    if declared is None:
        return decode_text(data, source)
    name = declared.group(1).decode("ascii", "replace").lower()
    name = _BROWSER_LABELS.get(name.replace("_", "-"), name)
    if name.startswith(("utf-16", "utf-32")):
        name = "utf-8"  # the declaration itself is readable as ASCII, so the file is not UTF-16 or UTF-32
    try:
        b"a".decode(name)
    except (LookupError, ValueError):
        text, note = decode_text(data, source)
        return text, f"unknown charset {name!r}" + (f"; {note}" if note else "")
    try:
        return clean_text(data.decode(name)), None
    except UnicodeError as error:
        note = f"not {name} ({str(error).splitlines()[0]}); undecodable bytes were replaced"
        return clean_text(data.decode(name, "replace")), note


OFFICE_SUFFIXES = (".epub", ".ipynb", ".pptx", ".xlsx")
"""Suffixes of files that markitdown turns into Markdown."""

TEXT_SUFFIXES = (".docx", ".htm", ".html", ".md", ".pdf", ".txt", *OFFICE_SUFFIXES)
"""Suffixes of text files, in upper or lower case."""

READERS: Registry[Callable[[Path], str]] = Registry("file reader")
"""Functions of plug-ins from a file to its text in Markdown, by the suffix of the file without its dot."""

_MARKUP_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_DOCX_RUNS = ".//w:r[not(ancestor::w:del or ancestor::w:moveFrom or ancestor::w:txbxContent)]"
_HEADING_STYLE = re.compile(r"Heading (\d)")

_PDF_NUMBER = r"(?:(?:chapter|section|part|appendix)[^\S\n]+)?(?:(?-i:\d+|[IVXLC]+|[A-Z])(?:\.\d+)*[.:)]?[^\S\n]+)?"
"""What may stand before a heading in the text and not in the outline, as LaTeX makes it: ``3.1``, ``Appendix A``."""

_LARGER = 1.15
"""How many times larger than most of the text a heading is, at least: 11 to 13 points, 12 to 14."""

_MAX_TITLE_WORDS = 15
_MAX_TITLE_SHARE = 0.25
"""Larger letters in more than this share of the characters are no headings: slides, forms, posters."""

_MAX_TITLE_LEVELS = 4
_SENTENCE_ENDS = (".", ",", ";", ":")


def read_text(path: str | Path) -> FileText:
    """Return the text of a file with one of ``TEXT_SUFFIXES``, and its headings and blocks.

    Text is UTF-8, or UTF-16 or UTF-32 with a byte order mark; the encoding of other text is guessed. Images within the
    text (``data:image/png;base64,...``) are left out.

    Raises:
        RetrievalError: the file cannot be read, is not text, or is named ``.pdf`` or ``.docx`` and is none.
        ConfigError: the extra that its type needs (``html``, ``pdf``, ``docx``, ``office``) is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    try:
        if suffix not in TEXT_SUFFIXES and suffix.removeprefix(".") in READERS:
            return _read_with_plugin(path, READERS.get(suffix.removeprefix(".")))
        if suffix == ".pdf":
            return _read_pdf(path)
        if suffix == ".docx":
            return _read_docx(path)
        if suffix == ".xlsx":
            return _read_workbook(path)
        if suffix in OFFICE_SUFFIXES:
            return _read_office(path)
        data = path.read_bytes()
    except OSError as error:
        raise RetrievalError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if suffix in (".htm", ".html"):
        source, note = decode_html(data, str(path))
        read = read_html(source)
    else:
        text, note = decode_text(data, str(path))
        text = _EMBEDDED.sub("", text)
        read = read_markdown(text) if suffix == ".md" else read_plain(text)
    return replace(read, encoding_note=note or read.encoding_note)


def _read_with_plugin(path: Path, read: Callable[[Path], str]) -> FileText:
    with _open_document(path, f"{path.suffix.lower()} file", "with another program") as _:
        text = read(path)
    if not isinstance(text, str):
        raise RetrievalError(
            f"cannot read {str(path)!r}: its file reader returned {type(text).__name__}, must be text in Markdown"
        )
    return read_markdown(clean_text(text))


@contextmanager
def _open_document(path: Path, kind: str, advice: str) -> Iterator[BinaryIO]:
    """Open a file for a library, which raises many types of errors; the user gets one line with its name."""
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
    """Return the text of a PDF file under the entries of its outline; an entry begins where its title is on its page.

    Without an outline, lines in larger letters than most of the text are the entries (``_PdfLines``). The title in
    the file's properties is often a template's, so it is not used.
    """
    try:
        import pypdf
    except ImportError as error:
        raise missing_extra("pypdf (needed for PDF files)", "pdf") from error
    with _open_document(path, "PDF", "without encryption") as handle:
        reader = pypdf.PdfReader(handle)
        lines = _PdfLines()
        texts = [clean_text(page.extract_text(visitor_text=lines.visitor(n))) for n, page in enumerate(reader.pages)]
        outline = list(_outline_entries(reader, reader.outline)) or lines.headings()
    starts, length = [], 0
    for number, text in enumerate(texts):
        texts[number] = text.rstrip() + "\n\n"
        starts.append(length)
        length += len(texts[number])
    text = "".join(texts)
    headings: list[Heading] = []
    for title, level, page in outline:
        if page is None or not 0 <= page < len(starts) or not is_heading_text(title):
            continue
        earliest = max(starts[page], headings[-1].end if headings else 0)
        words = r"\s+".join(map(re.escape, title.split()))
        limit = starts[page] + len(texts[page])
        line = re.compile(rf"^[^\S\n]*{_PDF_NUMBER}{words}[^\S\n]*$", re.IGNORECASE | re.MULTILINE)
        # Other words within a line may be those of a sentence, which has to keep them.
        after = re.compile(rf"(?<=[.!?])[^\S\n]+{words}[^\S\n]*$", re.MULTILINE)
        match = line.search(text, earliest, limit) or after.search(text, earliest, limit)
        begin = match or re.compile(rf"^[^\S\n]*{words}\b", re.IGNORECASE | re.MULTILINE).search(text, earliest, limit)
        start = begin.start() if begin else earliest
        headings.append(Heading(title, level, start, match.end() if match else start))
    blocks = paragraph_blocks(text, headings)
    return FileText(text, stated_title(headings, blocks), pages=tuple(starts), blocks=blocks_under(headings, blocks))


class _PdfLines:
    """The lines of a PDF file with the height of their letters, collected while pypdf extracts its text."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, float, int]] = []  # text, height in points, page index

    def visitor(self, page: int) -> Callable[..., None]:
        """Return the ``visitor_text`` of a page."""

        def visit(text: str, cm: Sequence[float], tm: Sequence[float], _font: Any, size: float) -> None:
            height = round(abs(size) * math.hypot(tm[2], tm[3]) * math.hypot(cm[2], cm[3]), 1)
            for line in filter(None, (" ".join(part.split()) for part in text.split("\n"))):
                self._lines.append((line, height, page))

        return visit

    def headings(self) -> list[tuple[str, int, int | None]]:
        """Return title, level and page index of each heading; the largest letters are level 1.

        Formula: a heading is at least ``_LARGER`` times as high as the height with the most characters, has at most
        ``_MAX_TITLE_WORDS`` words and ends without a mark of a sentence. There are none if more than
        ``_MAX_TITLE_SHARE`` of the characters were in headings.
        """
        characters: Counter[float] = Counter()
        for line, height, _ in self._lines:
            characters[height] += len(line)
        body = max(characters, key=lambda height: (characters[height], -height), default=0.0)
        headings = [entry for entry in self._lines if body and entry[1] >= _LARGER * body and _is_title(entry[0])]
        if sum(len(line) for line, _, _ in headings) > _MAX_TITLE_SHARE * characters.total():
            return []
        heights = sorted({height for _, height, _ in headings}, reverse=True)
        return [(line, min(heights.index(height) + 1, _MAX_TITLE_LEVELS), page) for line, height, page in headings]


def _is_title(line: str) -> bool:
    words = line.split()
    return (
        is_heading_text(line)
        and len(words) <= _MAX_TITLE_WORDS
        and any(character.isalpha() for character in line)
        and not line.endswith(_SENTENCE_ENDS)
    )


def _outline_entries(
    reader: pypdf.PdfReader, entries: Sequence[Any], level: int = 1
) -> Iterator[tuple[str, int, int | None]]:
    """Yield title, level and page index of the entries of a PDF outline; nested lists are a level deeper."""
    for entry in entries:
        if isinstance(entry, list):
            yield from _outline_entries(reader, entry, level + 1)
        else:
            title = " ".join(clean_text(str(entry.title or "")).split())
            yield title, level, reader.get_destination_page_number(entry)


def _read_docx(path: Path) -> FileText:
    """Return the paragraphs and the rows of tables of a Word file, in their order, under its heading styles."""
    try:
        import docx
        from docx.table import Table
    except ImportError as error:
        raise missing_extra("python-docx (needed for Word files)", "docx") from error
    segments: list[str] = []
    headings: list[Heading] = []
    blocks: list[Block] = []
    title, length = "", 0
    with _open_document(path, "a Word file", "as .docx") as handle:
        for item in _docx_items(docx.Document(handle)):
            text = clean_text(_table_text(item) if isinstance(item, Table) else _docx_text(item))
            if not text.strip():
                continue
            style = "table" if isinstance(item, Table) else _docx_style(item)
            in_list = style == "list" and bool(blocks) and blocks[-1].kind == "list" and blocks[-1].end == length
            gap = "" if not segments else "\n" if in_list else "\n\n"
            start = length + len(gap)
            length = start + len(text)
            segments += [gap, text]
            name = " ".join(text.split())
            if style == "title" and not title:
                title = name
            elif style.isdigit() and is_heading_text(name):
                headings.append(Heading(name, int(style), start, length))
            elif in_list:
                blocks[-1] = Block("list", blocks[-1].start, length)
            elif style == "table":
                first_row = text.find("\n")
                blocks.append(Block("table", start, length, header_end=start + max(first_row, 0)))
            else:
                blocks.append(Block("list" if style == "list" else "text", start, length, header_end=start))
    title = title or stated_title(headings, blocks)
    return FileText("".join(segments), title, blocks=blocks_under(headings, blocks))


def _docx_items(document: Any) -> Iterator[Paragraph | Table]:
    """Yield the paragraphs and tables, also those in content controls; Word's table of contents is left out."""
    from docx.oxml.ns import qn
    from docx.table import Table
    from docx.text.paragraph import Paragraph

    holders = {qn(name) for name in ("w:sdt", "w:sdtContent", "w:ins", "w:customXml")}

    def items(parent: Any) -> Iterator[Paragraph | Table]:
        galleries = [part.get(qn("w:val")) for part in parent.iterfind(f"{qn('w:sdtPr')}//{qn('w:docPartGallery')}")]
        for child in () if "Table of Contents" in galleries else parent:
            if child.tag == qn("w:p"):
                yield Paragraph(child, document)
            elif child.tag == qn("w:tbl"):
                yield Table(child, document)
            elif child.tag in holders:
                yield from items(child)

    return items(document.element.body)


def _table_text(table: Table) -> str:
    from docx.text.paragraph import Paragraph

    def cell_text(cell: _Cell) -> str:  # also the paragraphs of tables in it
        paragraphs = (Paragraph(element, cell) for element in cell._tc.xpath(".//w:p"))
        return " ".join(word for paragraph in paragraphs for word in _docx_text(paragraph).split())

    return "\n".join("\t".join(map(cell_text, row.cells)) for row in table.rows)


def _docx_text(paragraph: Paragraph) -> str:
    """Return the text with tracked insertions and content controls, which ``Paragraph.text`` leaves out."""
    return "".join(run.text for run in paragraph._p.xpath(_DOCX_RUNS))


def _docx_style(paragraph: Paragraph) -> str:
    """Return ``title``, ``list``, the level of a heading as a digit, or an empty string."""
    properties = paragraph._p.pPr
    name = str((paragraph.style.name if paragraph.style is not None else "") or "")
    if heading := _HEADING_STYLE.fullmatch(name):
        return heading.group(1)
    if name == "Title":
        return "title"
    return "list" if name.startswith("List") or (properties is not None and properties.numPr is not None) else ""


def _read_workbook(path: Path) -> FileText:
    """Return the sheets as tables in Markdown, each cell as it is stored; their first row with text is the header."""
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise missing_extra("openpyxl (needed for .xlsx files)", "office") from error
    sheets: list[str] = []
    with _open_document(path, ".xlsx file", "with another program") as handle:
        for sheet in load_workbook(handle, read_only=True, data_only=True).worksheets:
            sheet.reset_dimensions()  # the size that a program wrote into the file may be wrong
            rows = [[_cell_text(value) for value in row] for row in sheet.iter_rows(values_only=True)]
            rows = [row for row in rows if any(row)]
            width = max((n for row in rows for n, cell in enumerate(row, start=1) if cell), default=0)
            lines = [f"| {' | '.join([*row, *[''] * width][:width])} |" for row in rows]
            if lines:
                sheets.append("\n".join([f"## {sheet.title}", lines[0], "| --- " * width + "|", *lines[1:]]))
    return read_markdown(clean_text("\n\n".join(sheets)))


def _cell_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return f"{value:.15g}"  # as Excel computes
    if isinstance(value, datetime):
        return value.isoformat(" ") if value.time() != time() else value.date().isoformat()
    return "" if value is None else " ".join(str(value).split()).replace("|", "\\|")


def _read_office(path: Path) -> FileText:
    """Return an office file as markitdown's Markdown."""
    try:
        from markitdown import MarkItDown
    except ImportError as error:
        raise missing_extra(f"markitdown (needed for {path.suffix.lower()} files)", "office") from error
    with _open_document(path, f"{path.suffix.lower()} file", "with another program") as _:
        converted = MarkItDown(enable_plugins=False).convert_local(path)
    markdown = clean_text(converted.markdown)
    read = read_markdown(
        _MARKUP_COMMENT.sub("", unescaped(markdown) if path.suffix.lower() == ".epub" else markdown).strip()
    )
    return FileText(read.text, clean_text(converted.title or "").strip() or read.title, blocks=read.blocks)
