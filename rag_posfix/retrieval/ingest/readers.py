"""Reads the text of plain text, HTML, PDF and Word files. Knows nothing of passages or indexes."""

from __future__ import annotations

import codecs
import logging
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from rag_posfix.errors import NotTextError, RetrievalError, missing_extra
from rag_posfix.retrieval.ingest.html_text import decode_html, html_text
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
        title: The title of an HTML page, else empty. The title of a PDF file is often that of a template, so it is not
            used.
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


def checked_text(data: bytes, place: str) -> str:
    """Return the text of a whole file: UTF-8, or UTF-16 with a byte order mark; the mark is left out.

    Args:
        data: The bytes of the file.

    Raises:
        NotTextError: there is a NUL byte in the first 8 KiB, or too much of them is not UTF-8.
    """
    _check_text(data, place)
    if data.startswith(_UTF16_MARKS):
        return clean_text(data.decode("utf-16", "replace"))
    return decode_text(data.removeprefix(codecs.BOM_UTF8), place)


def _check_text(data: bytes, place: str, *, declared: bool = False) -> None:
    """Raise for bytes that are not text.

    Args:
        data: The bytes of the file.
        declared: The file may name its encoding itself, as HTML does.
    """
    sample = data[:_SAMPLE_BYTES]
    if sample.startswith(_UTF16_MARKS):
        return
    if b"\0" in sample:
        raise NotTextError(f"{place!r} is binary, not text; leave it out, or give the file its own suffix")
    decoded = sample.decode("utf-8", "replace")
    if not declared and decoded.count("\ufffd") > _UNDECODABLE_SHARE * len(decoded):
        raise NotTextError(f"{place!r} is not UTF-8 text; save it in UTF-8")


def decode_text(data: bytes, place: str) -> str:
    """Return bytes decoded as UTF-8; undecodable bytes are replaced, with a warning in the log.

    Args:
        data: The bytes.
        place: File, and line if any, for the warning.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        logger.warning("%s: not UTF-8 (%s); replaced undecodable bytes", place, error.reason)
        text = data.decode("utf-8", "replace")
    return clean_text(text)


def _read_pdf(path: Path) -> FileText:
    try:
        import pypdf
    except ImportError as error:
        raise missing_extra("pypdf (needed for PDF files)", "pdf") from error
    with path.open("rb") as handle:
        try:
            texts = [clean_text(page.extract_text()) for page in pypdf.PdfReader(handle).pages]
        except OSError:
            raise
        except Exception as error:
            # pypdf raises many types of errors for damaged files; the user gets one line with the file name.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RetrievalError(
                f"cannot read {str(path)!r} as PDF: {reason}; leave the file out, or save it again without encryption"
            ) from error
    return _joined(texts)


def _joined(pages: list[str]) -> FileText:
    parts: list[str] = []
    starts: list[int] = []
    length = 0
    for page in pages:
        starts.append(length)
        part = page.rstrip() + "\n\n"
        parts.append(part)
        length += len(part)
    return FileText("".join(parts), pages=tuple(starts))


def _read_docx(path: Path) -> str:
    """Return the paragraphs and the rows of tables of a Word file, in their order."""
    try:
        import docx
        from docx.table import Table
    except ImportError as error:
        raise missing_extra("python-docx (needed for Word files)", "docx") from error
    with path.open("rb") as handle:
        try:
            parts: list[str] = []
            for block in docx.Document(handle).iter_inner_content():
                if isinstance(block, Table):
                    rows = ("\t".join(cell.text for cell in row.cells) for row in block.rows)
                    parts.append("\n".join(rows))
                else:
                    parts.append(block.text)
        except OSError:
            raise
        except Exception as error:
            # python-docx, zipfile and lxml raise many types of errors for damaged files.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RetrievalError(
                f"cannot read {str(path)!r} as a Word file: {reason}; leave the file out, or save it again as .docx"
            ) from error
    return clean_text("\n\n".join(part for part in parts if part.strip()))
