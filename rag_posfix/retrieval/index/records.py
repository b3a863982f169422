"""Documents as JSON records, the form they have in files. Knows nothing of vectors or folders."""

from __future__ import annotations

import copy
import json
from typing import Any, NoReturn

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.text import clean_text, content_hash

__all__ = ["clean_json", "copied", "document_id", "dump_record", "owned_document", "parse_json"]


def clean_json(value: Any) -> Any:
    """Return a copy of ``value`` in which every string, at any depth, went through ``clean_text``.

    Dictionaries and lists are copied; other values are kept as they are.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_json(key): clean_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_json(item) for item in value]
    return value


def document_id(document: Document) -> str:
    """Return the document's id, or one made from its text and metadata where it has none."""
    if document.id:
        return clean_text(str(document.id))
    metadata = sorted((str(key), repr(value)) for key, value in document.metadata.items())
    return content_hash(document.page_content, *(part for pair in metadata for part in pair))


def copied(document: Document) -> Document:
    """Return a copy that shares nothing with ``document`` that can be changed."""
    return Document(id=document.id, page_content=document.page_content, metadata=copy.deepcopy(document.metadata))


def owned_document(document: Document, name: str | None = None) -> Document:
    """Return a copy with clean text and an id: ``name``, else the document's, else one made from its content."""
    owned = copied(document)
    owned.page_content = clean_json(owned.page_content)
    owned.metadata = clean_json(owned.metadata)
    owned.id = name or owned.id
    owned.id = document_id(owned)
    return owned


def dump_record(record: dict[str, Any]) -> str:
    """Return ``record`` as one line of JSON.

    Raises:
        RetrievalError: a value has no JSON form.
    """
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RetrievalError(
            f"document {record.get('id')!r} has metadata that JSON cannot hold ({error}); "
            "keep to strings, finite numbers, booleans, None, lists and dictionaries"
        ) from error


def parse_json(line: str) -> Any:
    """Return what one line of JSON holds, with its strings cleaned.

    The standard library's parser is used because it reads lone surrogates, which we then replace; stricter
    parsers refuse the whole line.

    Raises:
        ValueError: the line is not JSON, or nests too deeply.
    """
    try:
        return clean_json(json.loads(line, parse_constant=_refuse_constant))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
