"""Reads documents from JSON lines: our own fields, those of BEIR, and other common names."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.ingest.readers import decode_text
from rag_posfix.text import clean_text, content_hash, parse_json

logger = logging.getLogger(__name__)

JSON_LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
"""Suffixes of files of JSON lines, in upper or lower case."""

ID_FIELDS = ("id", "_id")
"""Fields with the id of a document, the first that is there."""

TEXT_FIELDS = ("text", "page_content", "contents")
"""Fields with the text of a document, the first that is there."""


def read_json_lines(file: Path) -> Iterator[tuple[Document, str]]:
    """Yield the document of each line with text, and its file and line number for error messages.

    Args:
        file: Its name ends with one of ``JSON_LINES_SUFFIXES``.

    Raises:
        RetrievalError: a line is malformed, or a ``.gz`` file is not compressed or damaged.
        OSError: the file cannot be read.
    """
    source = clean_text(str(file))
    without_text = 0
    for number, data in enumerate(_lines(file, source), start=1):
        place = f"{source}:{number}"
        line = decode_text(data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data, place)
        if not line.strip():
            continue
        document = _parse_line(line, source, place)
        if document.page_content.strip():
            yield document, place
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


def _parse_line(line: str, source: str, place: str) -> Document:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RetrievalError(f"{place}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise RetrievalError(f"{place}: a {type(record).__name__}, expected a JSON object with 'text'")
    text = next((record[field] for field in TEXT_FIELDS if record.get(field) is not None), None)
    if not isinstance(text, str):
        raise RetrievalError(f"{place}: no text; the object needs a string in one of {', '.join(TEXT_FIELDS)}")
    metadata = {"source": source, **_metadata(record, place)}
    name = next((record[field] for field in ID_FIELDS if record.get(field) not in (None, "")), None)
    if name is None:
        name = content_hash(str(metadata.get("title", "")), text)
    elif not isinstance(name, str | int) or isinstance(name, bool):
        raise RetrievalError(f"{place}: id {name!r} must be a string or an integer")
    return Document(id=str(name), page_content=text, metadata=metadata)


def _metadata(record: dict[str, Any], place: str) -> dict[str, Any]:
    metadata = record.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise RetrievalError(f"{place}: metadata is a {type(metadata).__name__}, expected an object")
    title = record.get("title")
    if title is None or title == "":
        return metadata
    if not isinstance(title, str):
        raise RetrievalError(f"{place}: title {title!r} must be a string")
    return {**metadata, "title": title}
