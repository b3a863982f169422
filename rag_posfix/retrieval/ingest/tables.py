"""Reads documents from CSV files: one row is one document."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.ingest.json_lines import ID_FIELDS, TEXT_FIELDS
from rag_posfix.retrieval.ingest.readers import checked_text
from rag_posfix.text import clean_text, content_hash

TABLE_SUFFIXES = (".csv",)
"""Suffixes of tables, in upper or lower case."""

_SNIFFED_CHARACTERS = 8192
_DELIMITERS = ",;\t|"


def read_csv(file: Path) -> Iterator[tuple[Document, str]]:
    """Yield the document of each row with text, and its file and row for error messages.

    The first row has the names of the columns. A column ``text`` (or ``page_content``, ``contents``) is the text,
    ``id`` (or ``_id``) the id and ``title`` the title; other columns are metadata. Without such a column the text is
    one line ``name: value`` per column that is not empty. The delimiter is a comma, semicolon, tab or vertical bar.

    Args:
        file: Its name ends with ``.csv``.

    Raises:
        RetrievalError: the file is not text, has no names of columns or a name twice, or a row is malformed.
        OSError: the file cannot be read.
    """
    source = clean_text(str(file))
    text = checked_text(file.read_bytes(), source)
    rows = csv.reader(io.StringIO(text, newline=""), _dialect(text), strict=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        if len(set(names)) != len(names):
            raise RetrievalError(f"{source}: a column name occurs twice; make the names in the first row distinct")
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            place = f"{source}:{rows.line_num}"
            if len(row) > len(names):
                raise RetrievalError(f"{place}: {len(row)} cells, but the first row names {len(names)} columns")
            document = _document(dict(zip(names, row, strict=False)), source, rows.line_num)
            if document.page_content.strip():
                yield document, place
    except csv.Error as error:
        raise RetrievalError(f"{source}:{rows.line_num}: not CSV ({error}); save the table again as CSV") from error


def _dialect(text: str) -> type[csv.Dialect]:
    """Return comma-separated values with the delimiter of the first line."""
    first = text[:_SNIFFED_CHARACTERS].split("\n", 1)[0]
    found = max(_DELIMITERS, key=lambda one: (first.count(one), -_DELIMITERS.index(one)))

    class Found(csv.excel):
        delimiter = found

    return Found


def _document(row: dict[str, str], source: str, line: int) -> Document:
    column = next((name for name in TEXT_FIELDS if name in row), None)
    title = row.get("title", "").strip() if column else ""
    name = next((row[field].strip() for field in ID_FIELDS if column and row.get(field, "").strip()), "")
    if column is None:
        text = "\n".join(f"{key}: {value.strip()}" for key, value in row.items() if value.strip())
        metadata: dict[str, Any] = {}
    else:
        text = row[column].strip()
        metadata = {k: v for k, v in row.items() if k and k not in (column, "title", *ID_FIELDS) and v.strip()}
    metadata = {**metadata, "source": metadata.get("source", source), "row": line}
    if title:
        metadata["title"] = title
    return Document(id=name or content_hash(title, text), page_content=text, metadata=metadata)
