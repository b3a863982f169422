"""Reads the text of a file by its suffix, with its blocks and headings. Knows nothing of passages or indexes.

Files that a library reads are read in another process.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from rag_posfix.errors import RagPosfixError, RetrievalError
from rag_posfix.registry import Registry
from rag_posfix.retrieval.ingest.decoding import MAX_RATIO, MIN_UNPACKED, decode_text, without_embedded
from rag_posfix.retrieval.ingest.html import read_epub, read_html
from rag_posfix.retrieval.ingest.process import read_in_process
from rag_posfix.retrieval.ingest.structure import MARKUP_SUFFIXES, FileText, read_markdown, read_markup, read_plain
from rag_posfix.text import clean_text

_HTML_SUFFIXES = (".htm", ".html", ".xhtml")
_MARKDOWN_SUFFIXES = (".markdown", ".md", ".mdx")

PARSED_SUFFIXES = (
    ".docx", ".eml", ".epub", ".ipynb", ".odt", ".pdf", ".pptx", ".rtf", ".xlsm", ".xlsx", *_HTML_SUFFIXES,
)  # fmt: skip
"""Suffixes of files that libraries read."""

TEXT_SUFFIXES = (".text", ".txt", *MARKUP_SUFFIXES, *_MARKDOWN_SUFFIXES, *PARSED_SUFFIXES)
"""Suffixes of text files, in upper or lower case."""

READERS: Registry[Callable[[Path], str]] = Registry("file reader")
"""Functions of plug-ins from a file to its text in Markdown, by the suffix of the file without its dot."""

_NAMES = {".pdf": "PDF", ".docx": "a Word file"}
_ADVICE = {".pdf": "without encryption", ".docx": "as .docx"}
_ARCHIVES = (".docx", ".epub", ".odt", ".pptx", ".xlsm", ".xlsx")
_MARKUP = (".xml", ".rels", ".xhtml", ".html", ".htm", ".opf", ".ncx", ".svg")

_MAX_PARTS = 20_000
_MAX_CHARACTERS = 50_000_000


def read_text(path: str | Path) -> FileText:
    """Return the text of a file with one of ``TEXT_SUFFIXES``, and its headings and blocks.

    Text is UTF-8, or UTF-16 or UTF-32 with a byte order mark; the encoding of other text is guessed. Images within the
    text (``data:image/png;base64,...``) are left out.

    Limits: what a file with one of ``PARSED_SUFFIXES`` takes is limited: 60 seconds of processor time and 20 more for
    each MiB, 2 GiB of memory and 16 more bytes for each of its bytes, 50 million characters of text.

    Raises:
        RetrievalError: the file cannot be read, is not text, is named as another type, or is above a limit.
        ConfigError: the extra that its type needs (``pdf``, ``docx``, ``office``) is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in TEXT_SUFFIXES and suffix.removeprefix(".") in READERS:
        return _read_with_plugin(path, READERS.get(suffix.removeprefix(".")))
    if suffix in PARSED_SUFFIXES:
        return read_in_process(path)
    text, note = decode_text(_read_bytes(path), str(path))
    text = without_embedded(text)
    if suffix in MARKUP_SUFFIXES:
        read = read_markup(text, suffix)
    else:
        read = read_markdown(text) if suffix in _MARKDOWN_SUFFIXES else read_plain(text)
    return replace(read, encoding_note=note or read.encoding_note)


def _read_with_plugin(path: Path, read: Callable[[Path], str]) -> FileText:
    try:
        text = read(path)
    except RagPosfixError:
        raise
    except Exception as error:  # the user gets one line with the name of the file
        raise _not_read(path, error) from error
    if not isinstance(text, str):
        raise RetrievalError(
            f"cannot read {str(path)!r}: its file reader returned {type(text).__name__}, must be text in Markdown"
        )
    return read_markdown(clean_text(text))


def read_here(path: Path) -> FileText:
    """Return the text of a file with one of ``PARSED_SUFFIXES``, read in this process; otherwise as ``read_text``."""
    suffix, data = path.suffix.lower(), _read_bytes(path)
    try:
        if suffix in _ARCHIVES:
            _check_archive(data)
        read = _reader(path, suffix)(data)
        if len(read.text) > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS:,} characters of text")
    except (RagPosfixError, MemoryError):
        raise
    except Exception as error:  # libraries raise many types of errors; the user gets one line with its name
        raise _not_read(path, error) from error
    return read


def _not_read(path: Path, error: Exception) -> RetrievalError:
    suffix, reason = path.suffix.lower(), (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    reason = "it is encrypted" if "requires a password" in reason else reason.removeprefix("Parsing error: ")
    kind, advice = _NAMES.get(suffix, f"{suffix} file"), _ADVICE.get(suffix, "with another program")
    return RetrievalError(
        f"cannot read {str(path)!r} as {kind}: {reason}; leave the file out, or save it again {advice}"
    )


def _reader(path: Path, suffix: str) -> Callable[[bytes], FileText]:
    """Return the reader of a type. Its library is imported with the first file of that type."""
    if suffix in _HTML_SUFFIXES:
        return partial(read_html, source=str(path))
    if suffix == ".epub":
        return read_epub
    if suffix == ".pdf":
        from rag_posfix.retrieval.ingest.pdf import read_pdf

        return read_pdf
    if suffix == ".ipynb":
        from rag_posfix.retrieval.ingest.extract import read_notebook

        return read_notebook
    if suffix in (".odt", ".rtf"):
        from rag_posfix.retrieval.ingest.extract import read_word_processor

        return partial(read_word_processor, suffix=suffix)
    from rag_posfix.retrieval.ingest import office, word

    if suffix == ".eml":
        return office.read_mail
    of_type: dict[str, Callable[[BinaryIO], FileText]] = {
        ".docx": word.read_docx, ".pptx": office.read_slides, ".xlsm": office.read_workbook,
        ".xlsx": office.read_workbook,
    }  # fmt: skip
    return lambda data: of_type[suffix](io.BytesIO(data))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RetrievalError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _check_archive(data: bytes) -> None:
    """Raise for an archive that unpacks to far more than it is, or whose parts refer to more than there is."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = archive.infolist()
        unpacked = sum(part.file_size for part in parts)
        if unpacked > max(MIN_UNPACKED, MAX_RATIO * len(data)):
            raise ValueError(f"{len(data):,} bytes unpack to {unpacked:,}")
        if len(parts) > _MAX_PARTS:
            raise ValueError(f"an archive of {len(parts):,} parts")
        for part in (part for part in parts if part.filename.lower().endswith(_MARKUP)):
            with archive.open(part) as opened:
                content = opened.read() if part.filename.endswith(".opf") else opened.read(8192)
            if b"<!ENTITY" in content:
                raise ValueError(f"{part.filename} declares entities, which can stand for any amount of text")
            if (spine := content.count(b"<itemref") + content.count(b":itemref")) > len(parts):
                raise ValueError(f"its spine refers {spine:,} times to {len(parts)} parts")
