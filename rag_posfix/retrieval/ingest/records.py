"""Reads documents from records: each JSON line, and each row of a CSV file, is one document."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.ingest.readers import checked_text, decode_text
from rag_posfix.text import clean_text, content_hash, parse_json

logger = logging.getLogger(__name__)

JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
TABLE_SUFFIXES = (".csv",)

# The first field or column of these that exists counts: our names, BEIR's names, and other common names.
_ID_FIELDS = ("id", "_id")
_TEXT_FIELDS = ("text", "page_content", "contents")

_SNIFFED_CHARACTERS = 8192
_DELIMITERS = ",;\t|"


def read_json_lines(file: Path) -> Iterator[tuple[Document, str]]:
    """Yield the document of each line with text, and its file and line number for error messages.

    Raises:
        RetrievalError: a line is malformed, or a ``.gz`` file is not compressed or damaged.
        OSError: the file cannot be read.
    """
    source = clean_text(str(file))
    without_text = 0
    for number, data in enumerate(_lines(file, source), start=1):
        position = f"{source}:{number}"
        line = decode_text(data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data, position)
        if not line.strip():
            continue
        document = _parse_line(line, source, position)
        if document.page_content.strip():
            yield document, position
        else:
            without_text += 1
    if without_text:
        logger.warning("%s: left out %s documents without text", source, without_text)


def _lines(file: Path, source: str) -> Iterator[bytes]:
    if file.suffix.lower() != ".gz":
        with file.open("rb") as handle:
            yield from handle
        return
    try:
        with gzip.open(file) as unpacked:
            yield from unpacked
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RetrievalError(f"cannot unpack {source!r}: {error}; the file is cut off or not gzip") from error


def _parse_line(line: str, source: str, position: str) -> Document:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RetrievalError(f"{position}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise RetrievalError(f"{position}: a {type(record).__name__}, expected a JSON object with 'text'")
    text = next((record[field] for field in _TEXT_FIELDS if record.get(field) is not None), None)
    if not isinstance(text, str):
        raise RetrievalError(f"{position}: no text; the object needs a string in one of {', '.join(_TEXT_FIELDS)}")
    metadata, title = record.get("metadata") or {}, record.get("title")
    if not isinstance(metadata, dict):
        raise RetrievalError(f"{position}: metadata is a {type(metadata).__name__}, expected an object")
    metadata = {"source": source, **metadata}
    if title is not None and title != "":
        if not isinstance(title, str):
            raise RetrievalError(f"{position}: title {title!r} must be a string")
        metadata["title"] = title
    name = next((record[field] for field in _ID_FIELDS if record.get(field) not in (None, "")), None)
    if name is None:
        name = content_hash(str(metadata.get("title", "")), text)
    elif not isinstance(name, str | int) or isinstance(name, bool):
        raise RetrievalError(f"{position}: id {name!r} must be a string or an integer")
    return Document(id=str(name), page_content=text, metadata=metadata)


def read_csv(file: Path) -> Iterator[tuple[Document, str]]:
    """Yield the document of each row with text, and its file and row for error messages.

    The first row has the names of the columns. A column ``text`` (or ``page_content``, ``contents``) is the text,
    ``id`` (or ``_id``) the id and ``title`` the title; other columns are metadata. Without such a column the text is
    one line ``name: value`` per column that is not empty. The delimiter is a comma, semicolon, tab or vertical bar.

    Raises:
        RetrievalError: the file is not text, has no names of columns or a name twice, or a row is malformed.
        OSError: the file cannot be read.
    """
    source = clean_text(str(file))
    text = checked_text(file.read_bytes(), source)
    header = text[:_SNIFFED_CHARACTERS].split("\n", 1)[0]
    delimiter = max(_DELIMITERS, key=header.count)  # the first of several that are equally frequent
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        if len(set(names)) != len(names):
            raise RetrievalError(f"{source}: a column name occurs twice; make the names in the first row distinct")
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            position = f"{source}:{rows.line_num}"
            if len(row) > len(names):
                raise RetrievalError(f"{position}: {len(row)} cells, but the first row names {len(names)} columns")
            document = _row_document(dict(zip(names, row, strict=False)), source, rows.line_num)
            if document.page_content.strip():
                yield document, position
    except csv.Error as error:
        raise RetrievalError(f"{source}:{rows.line_num}: not CSV ({error}); save the table again as CSV") from error


def _row_document(row: dict[str, str], source: str, line: int) -> Document:
    column = next((name for name in _TEXT_FIELDS if name in row), None)
    title, name, metadata = "", "", dict[str, Any]()
    if column is None:
        text = "\n".join(f"{key}: {value.strip()}" for key, value in row.items() if value.strip())
    else:
        text, title = row[column].strip(), row.get("title", "").strip()
        name = next((row[field].strip() for field in _ID_FIELDS if row.get(field, "").strip()), "")
        metadata = {k: v for k, v in row.items() if k and k not in (column, "title", *_ID_FIELDS) and v.strip()}
    metadata = {**metadata, "source": metadata.get("source", source), "row": line}
    if title:
        metadata["title"] = title
    return Document(id=name or content_hash(title, text), page_content=text, metadata=metadata)
