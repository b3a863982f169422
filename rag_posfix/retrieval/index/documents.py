"""The documents of an index, under integer keys and string ids, and filters by their metadata.

Vectors and word statistics refer to documents by integer key.
"""

from __future__ import annotations

import copy
import functools
import json
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.text import clean_json, clean_text, content_hash, titled_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MetadataFilter: TypeAlias = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""``{"year": 1999, "kind": ["book", "map"]}``: every field has this value, or one of these; or a function of the
metadata. True is not 1, 1 is 1.0; a field that is missing matches nothing, not even None."""

_SCALARS = (str, int, float, bool, type(None))


def check_filter(metadata_filter: object) -> None:
    """Raise ConfigError for a filter that is neither a function nor a dict of names to values or lists of values."""
    if callable(metadata_filter):
        return
    if not isinstance(metadata_filter, Mapping):
        raise ConfigError(
            f"filter={metadata_filter!r} is a {type(metadata_filter).__name__}; pass a dict such as {{'year': 1999}} "
            "or {'kind': ['book', 'map']}, or a function of the metadata"
        )
    for field, value in metadata_filter.items():
        if not isinstance(field, str) or not all(isinstance(item, _SCALARS) for item in _listed(value)):
            raise ConfigError(
                f"filter {field!r}: {value!r} is not understood; give a string, number, boolean or None, or a list "
                "of those that are allowed; for anything else pass a function of the metadata"
            )


def _comparison_keys(value: Any) -> set[Hashable]:
    """Return a key for each value that a field of a filter allows; equal keys are values that count as equal.

    Booleans have keys of their own, because Python holds that True == 1; values that no filter can name have None.
    """
    return {
        ("boolean" if isinstance(item, bool) else "value", item) if isinstance(item, _SCALARS) else None
        for item in _listed(value)
    }


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple | set | frozenset) else [value]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A document with an id, and the paths of the files that it was read from, as they were passed for indexing."""

    document: Document
    files: tuple[str, ...] = ()


def stored_id(document: Document) -> str:
    """Return the id that a document is stored under: its own, or a hash of its text and metadata."""
    if document.id:
        return clean_text(str(document.id))
    metadata = sorted((str(key), repr(value)) for key, value in document.metadata.items())
    return content_hash(document.page_content, *(item for pair in metadata for item in pair))


def stored_copy(document: Document, document_id: str | None = None) -> Document:
    """Return the copy of a document that a store keeps: with clean text and metadata, and an id."""
    content, metadata = clean_json(document.page_content), clean_json(copy.deepcopy(document.metadata))
    named = Document(id=document_id or document.id, page_content=content, metadata=metadata)
    return named.model_copy(update={"id": stored_id(named)})


def document_json(document: Document, fields: Mapping[str, Any]) -> str:
    """Return fields of a document as JSON; RetrievalError if its metadata cannot be written so."""
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RetrievalError(
            f"document {document.id!r} has metadata that JSON cannot hold ({error}); "
            "keep to strings, finite numbers, booleans, None, lists and dictionaries"
        ) from error


def deep_copy(document: Document) -> Document:
    """Return a copy that shares no mutable object with ``document``."""
    return Document(id=document.id, page_content=document.page_content, metadata=copy.deepcopy(document.metadata))


def searchable_text(document: Document) -> str:
    """Return the text of a document that is embedded and whose words are counted: its title and its text."""
    return titled_text(document.metadata.get("title"), document.page_content)


class DocumentTable:
    """Documents by key and by id. Keys ascend with every document that is added and are never used again.

    Returned documents are not copies. Methods may be called from any thread.

    Args:
        entries: The initial content, by ascending key. An immutable mapping, such as documents that stay in a
            memory-mapped file, makes a table whose methods of change raise ConfigError.
    """

    def __init__(self, entries: Mapping[int, IndexEntry] | None = None) -> None:
        self.entries: Mapping[int, IndexEntry] = {} if entries is None else entries
        """By key, ascending. Not to be iterated while another thread changes the table, nor to be changed."""
        self.revision = 0
        """Changes with every change of the table."""
        self.next_key = 1 + max(self.entries, default=-1)
        self._keys: dict[str, int] | None = None
        # For each field, the keys of the documents with each value (by comparison key); built on first use of a field.
        self._postings: dict[str, dict[Hashable, NDArray[np.int64]]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.entries)

    def document(self, key: int) -> Document | None:
        """Return the document under ``key``, or None if there is none any more."""
        entry = self.entries.get(key)
        return None if entry is None else entry.document

    def key_of(self, document_id: str) -> int | None:
        """Return the key of the document with this id, or None."""
        return self._key_by_id().get(document_id)

    def ids(self) -> list[str]:
        """Return all ids, in the order in which the documents were added."""
        return list(self._key_by_id())

    def snapshot(self) -> tuple[int, list[int], list[str]]:
        """Return the revision, the keys, and the searchable texts in the order of the keys."""
        with self._lock:
            texts = [searchable_text(entry.document) for entry in self.entries.values()]
            return self.revision, list(self.entries), texts

    def add(self, entries: Iterable[IndexEntry]) -> list[int]:
        """Add documents whose ids are not in the table, and return their keys."""
        with self._lock:
            stored, keys_by_id = self.mutable_entries(), self._key_by_id()
            first = self.next_key
            for entry in entries:
                stored[self.next_key] = entry
                keys_by_id[str(entry.document.id)] = self.next_key
                self.next_key += 1
            self._mark_changed()
            return list(range(first, self.next_key))

    def replace(self, entries: Iterable[IndexEntry]) -> None:
        """Replace the entries with the same ids; their keys stay."""
        with self._lock:
            stored, keys_by_id = self.mutable_entries(), self._key_by_id()
            for entry in entries:
                stored[keys_by_id[str(entry.document.id)]] = entry
            self._mark_changed()

    def remove(self, ids: Sequence[str]) -> tuple[list[int], list[Document]]:
        """Remove documents that are in the table; return their keys and the documents."""
        with self._lock:
            stored, keys_by_id = self.mutable_entries(), self._key_by_id()
            keys = [keys_by_id.pop(document_id) for document_id in ids]
            removed = [stored.pop(key).document for key in keys]
            self._mark_changed()
            return keys, removed

    def matching(self, metadata_filter: MetadataFilter) -> NDArray[np.int64]:
        """Return the keys of the documents that match a filter, ascending.

        Cost: with a dict, one pass over the documents when a field is first used, and a look-up afterwards; with a
        function, one call per document each time.
        """
        import numpy as np

        with self._lock:
            if callable(metadata_filter):
                matches = metadata_filter
                keys = [k for k, e in self.entries.items() if matches(MappingProxyType(e.document.metadata))]
                return np.asarray(keys, dtype=np.int64)
            columns = [self._with_value(field, value) for field, value in metadata_filter.items()]
            if not columns:
                return np.fromiter(self.entries, dtype=np.int64)
            return functools.reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), columns)

    def _with_value(self, field: str, value: Any) -> NDArray[np.int64]:
        """Return the keys of the documents whose ``field`` has an allowed value, ascending."""
        import numpy as np

        if field not in self._postings:
            keys: dict[Hashable, list[int]] = {}
            for key, entry in self.entries.items():
                if field in entry.document.metadata:
                    (stored,) = _comparison_keys([entry.document.metadata[field]])
                    keys.setdefault(stored, []).append(key)
            self._postings[field] = {stored: np.asarray(rows, dtype=np.int64) for stored, rows in keys.items()}
        postings = self._postings[field]
        columns = [postings[key] for key in _comparison_keys(value) if key in postings]
        if len(columns) == 1:
            return columns[0]
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *columns]))

    def _key_by_id(self) -> dict[str, int]:
        """Return keys by id; for memory-mapped documents, the first call reads all of them."""
        with self._lock:
            if self._keys is None:
                self._keys = {str(entry.document.id): key for key, entry in self.entries.items()}
            return self._keys

    def mutable_entries(self) -> dict[int, IndexEntry]:
        """Return the entries, or raise ConfigError if they are memory-mapped and cannot be changed."""
        if not isinstance(self.entries, dict):
            raise ConfigError(
                "this index was loaded with mmap=True and cannot be changed; load it without to add or delete"
            )
        return self.entries

    def _mark_changed(self) -> None:
        self.revision += 1
        self._postings.clear()
