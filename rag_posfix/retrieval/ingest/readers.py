"""Reads the text of plain text, HTML and PDF files. Knows nothing of passages or indexes."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from rag_posfix.errors import RetrievalError, missing_extra
from rag_posfix.retrieval.ingest.html_text import decode_html, html_text
from rag_posfix.text import clean_text

__all__ = ["TEXT_SUFFIXES", "FileText", "decode_text", "read_text"]

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".htm", ".html", ".md", ".pdf", ".txt")
"""Suffixes of text files, in upper or lower case."""


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file; ``start`` and ``end`` in a passage's metadata are character offsets in it.

    Attributes:
        text: Plain text and Markdown unchanged; the extracted text of HTML and PDF.
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
    """Return the text of a ``.txt``, ``.md``, ``.html``, ``.htm`` or ``.pdf`` file.

    Undecodable bytes are replaced, with a warning in the log.

    Args:
        path: The file.

    Raises:
        RetrievalError: the file cannot be read, or is named ``.pdf`` and is not a readable PDF file.
        ConfigError: it is a PDF file, and the extra ``pdf`` is not installed.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".pdf":
            return _read_pdf(path)
        data = path.read_bytes()
    except OSError as error:
        raise RetrievalError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if path.suffix.lower() in (".htm", ".html"):
        source, problem = decode_html(data)
        if problem:
            logger.warning("%s: %s; replaced undecodable bytes", path, problem)
        title, text = html_text(clean_text(source))
        return FileText(clean_text(text), clean_text(title))  # again: character references can encode NUL
    return FileText(decode_text(data.removeprefix(b"\xef\xbb\xbf"), str(path)))


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
