"""A file of prose to its text: plain, HTML or PDF. Knows nothing of passages or indexes."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_posfix.errors import RetrievalError, missing_extra
from rag_posfix.retrieval.ingest.html_text import decode_html, html_text
from rag_posfix.text import clean_text

__all__ = ["PROSE_SUFFIXES", "FileText", "decode_text", "read_text"]

logger = logging.getLogger(__name__)

PROSE_SUFFIXES = (".htm", ".html", ".md", ".pdf", ".txt")
"""What the name of a file of prose ends with, in any case."""


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file; ``start`` and ``end`` in a passage's metadata are places in it.

    Attributes:
        text: Plain and Markdown files as they are; HTML and PDF as text.
        title: What an HTML page calls itself, else empty. Titles in PDF files are too often names of templates.
        pages: Where in ``text`` each page of a PDF file begins.
    """

    text: str
    title: str = ""
    pages: tuple[int, ...] = ()

    def page_at(self, place: int) -> int | None:
        """Return the number of the page, from 1, that has the character at ``place``; None without pages."""
        return bisect_right(self.pages, place) or None


def read_text(path: str | Path) -> FileText:
    """Return the text of a ``.txt``, ``.md``, ``.html``, ``.htm`` or ``.pdf`` file.

    Bytes that cannot be read are replaced, with a warning in the log.

    Args:
        path: The file.

    Raises:
        RetrievalError: the file cannot be read, or is no PDF file though its name says so.
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
            logger.warning("%s: %s; replaced what could not be read", path, problem)
        title, text = html_text(clean_text(source))
        return FileText(clean_text(text), clean_text(title))  # character references name anything
    return FileText(decode_text(data.removeprefix(b"\xef\xbb\xbf"), str(path)))


def decode_text(data: bytes, place: str) -> str:
    """Return UTF-8 text that can be encoded again; what cannot be read is replaced, with a warning.

    Args:
        data: The bytes.
        place: Where they stand, for the warning.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        logger.warning("%s: not UTF-8 (%s); replaced what could not be read", place, error.reason)
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
            # Damaged files make pypdf fail in many ways, and the user needs to know which file it was.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RetrievalError(
                f"cannot read {str(path)!r} as PDF: {reason}; leave the file out, or save it anew without encryption"
            ) from error
    return _joined(texts)


def _joined(pages: list[str]) -> FileText:
    parts: list[str] = []
    starts: list[int] = []
    length = 0
    for page in pages:
        starts.append(length)
        part: Any = page.rstrip() + "\n\n"
        parts.append(part)
        length += len(part)
    return FileText("".join(parts), pages=tuple(starts))
