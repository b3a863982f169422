"""Reads the text of a file by its suffix, with its blocks and headings. Knows nothing of passages or indexes.

Bytes are decoded by their mark, by what they state, as UTF-8, or in an encoding that is guessed and then reported.
Files that a library reads are read in another process.
"""

from __future__ import annotations

import codecs
import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from rag_posfix.errors import NotTextError, RagPosfixError, RetrievalError
from rag_posfix.registry import Registry
from rag_posfix.retrieval.ingest.html import read_html
from rag_posfix.retrieval.ingest.process import read_in_process
from rag_posfix.retrieval.ingest.structure import FileText, read_markdown, read_plain
from rag_posfix.text import clean_text

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


PARSED_SUFFIXES = (".docx", ".epub", ".htm", ".html", ".ipynb", ".pdf", ".pptx", ".xlsx")
"""Suffixes of files that libraries read."""

TEXT_SUFFIXES = (".md", ".txt", *PARSED_SUFFIXES)
"""Suffixes of text files, in upper or lower case."""

READERS: Registry[Callable[[Path], str]] = Registry("file reader")
"""Functions of plug-ins from a file to its text in Markdown, by the suffix of the file without its dot."""

_NAMES = {".pdf": "PDF", ".docx": "a Word file"}
_ADVICE = {".pdf": "without encryption", ".docx": "as .docx"}
_ARCHIVES = (".docx", ".epub", ".pptx", ".xlsx")
_MARKUP = (".xml", ".rels", ".xhtml", ".html", ".htm", ".opf", ".ncx", ".svg")

_MAX_RATIO, _MIN_UNPACKED = 100, 16 * 2**20
"""Unpacked bytes for each packed one, from 16 MiB on. Sheets of numbers have up to 30."""
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
        ConfigError: the extra that its type needs (``html``, ``pdf``, ``docx``, ``office``) is not installed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in TEXT_SUFFIXES and suffix.removeprefix(".") in READERS:
        return _read_with_plugin(path, READERS.get(suffix.removeprefix(".")))
    if suffix in PARSED_SUFFIXES:
        return read_in_process(path)
    text, note = decode_text(_read_bytes(path), str(path))
    text = _EMBEDDED.sub("", text)
    read = read_markdown(text) if suffix == ".md" else read_plain(text)
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
    if suffix in (".htm", ".html"):
        return partial(_read_page, source=str(path))
    if suffix == ".pdf":
        from rag_posfix.retrieval.ingest.pdf import read_pdf

        return read_pdf
    if suffix in (".epub", ".ipynb"):
        from rag_posfix.retrieval.ingest.extract import read_book

        return partial(read_book, suffix=suffix)
    from rag_posfix.retrieval.ingest import office, word

    of_type: dict[str, Callable[[BinaryIO], FileText]] = {
        ".docx": word.read_docx, ".pptx": office.read_slides, ".xlsx": office.read_workbook,
    }  # fmt: skip
    return lambda data: of_type[suffix](io.BytesIO(data))


def _read_page(data: bytes, source: str) -> FileText:
    text, note = decode_html(data, source)
    return replace(read_html(text), encoding_note=note)


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
        if unpacked > max(_MIN_UNPACKED, _MAX_RATIO * len(data)):
            raise ValueError(f"{len(data):,} bytes unpack to {unpacked:,}")
        if len(parts) > _MAX_PARTS:
            raise ValueError(f"an archive of {len(parts):,} parts")
        for part in (part for part in parts if part.filename.lower().endswith(_MARKUP)):
            with archive.open(part) as opened:
                content = opened.read() if part.filename.endswith(".opf") else opened.read(_SAMPLE_BYTES)
            if b"<!ENTITY" in content:
                raise ValueError(f"{part.filename} declares entities, which can stand for any amount of text")
            if (spine := content.count(b"<itemref") + content.count(b":itemref")) > len(parts):
                raise ValueError(f"its spine refers {spine:,} times to {len(parts)} parts")
