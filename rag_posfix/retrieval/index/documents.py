"""The documents of an index, under integer keys and string ids; in memory, or read from a file on access.

Vectors and word statistics refer to documents by integer key. Knows nothing of either.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.index.filters import MetadataFilter, allowed_keys, comparison_key
from rag_posfix.text import clean_json, clean_text, content_hash, titled_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A document of an index, and the files that it was read from.

    Attributes:
        document: Has an id.
        files: Their paths as they were given for indexing; empty for a document that was not read from a file.
    """

    document: Document
    files: tuple[str, ...] = ()


def stored_id(document: Document) -> str:
    """Return the id that a document is stored under: its own, or a hash of its text and metadata."""
    if document.id:
        return clean_text(str(document.id))
    metadata = sorted((str(key), repr(value)) for key, value in document.metadata.items())
    return content_hash(document.page_content, *(part for pair in metadata for part in pair))


def stored_copy(document: Document, document_id: str | None = None) -> Document:
    """Return the copy of a document that a store keeps: with clean text and metadata, and an id.

    Args:
        document: The document; left untouched.
        document_id: Its id, in place of ``stored_id``.
    """
    content, metadata = clean_json(document.page_content), clean_json(copy.deepcopy(document.metadata))
    named = Document(id=document_id or document.id, page_content=content, metadata=metadata)
    return named.model_copy(update={"id": stored_id(named)})


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
            memory-mapped file, makes a table that cannot be changed.
    """

    def __init__(self, entries: Mapping[int, IndexEntry] | None = None) -> None:
        self._entries: Mapping[int, IndexEntry] = {} if entries is None else entries
        self._keys: dict[str, int] | None = None
        # For each field, the keys of the documents with each value (by comparison key); built on first use of a field.
        self._postings: dict[str, dict[Hashable, NDArray[np.int64]]] = {}
        self._lock = threading.RLock()
        self._revision = 0
        self._next_key = 1 + max(self._entries, default=-1)

    @property
    def revision(self) -> int:
        """A number that changes with every change of the table."""
        return self._revision

    @property
    def next_key(self) -> int:
        """The key of the document that is added next."""
        return self._next_key

    @property
    def entries(self) -> Mapping[int, IndexEntry]:
        """All entries by key, ascending. Not to be iterated while another thread changes the table."""
        return self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def document(self, key: int) -> Document | None:
        """Return the document under ``key``, or None if there is none any more."""
        entry = self._entries.get(key)
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
            texts = [searchable_text(entry.document) for entry in self._entries.values()]
            return self._revision, list(self._entries), texts

    def add(self, entries: Iterable[IndexEntry]) -> list[int]:
        """Add documents whose ids are not in the table, and return their keys.

        Raises:
            ConfigError: the table cannot be changed.
        """
        with self._lock:
            stored, keys_by_id = self._mutable_entries(), self._key_by_id()
            keys = []
            for entry in entries:
                stored[self._next_key] = entry
                keys_by_id[str(entry.document.id)] = self._next_key
                keys.append(self._next_key)
                self._next_key += 1
            self._mark_changed()
            return keys

    def replace(self, entries: Iterable[IndexEntry]) -> None:
        """Replace the entries with the same ids; their keys stay.

        Raises:
            ConfigError: the table cannot be changed.
        """
        with self._lock:
            stored, keys_by_id = self._mutable_entries(), self._key_by_id()
            for entry in entries:
                stored[keys_by_id[str(entry.document.id)]] = entry
            self._mark_changed()

    def remove(self, ids: Sequence[str]) -> tuple[list[int], list[Document]]:
        """Remove documents that are in the table; return their keys and the documents.

        Raises:
            ConfigError: the table cannot be changed.
        """
        with self._lock:
            stored, keys_by_id = self._mutable_entries(), self._key_by_id()
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
                found = [k for k, e in self._entries.items() if matches(MappingProxyType(e.document.metadata))]
            else:
                columns = [self._with_value(field, value) for field, value in metadata_filter.items()]
                if columns:
                    return functools.reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), columns)
                found = list(self._entries)
            return np.asarray(found, dtype=np.int64)

    def _with_value(self, field: str, value: Any) -> NDArray[np.int64]:
        """Return the keys of the documents whose ``field`` has an allowed value, ascending."""
        import numpy as np

        if field not in self._postings:
            keys: dict[Hashable, list[int]] = {}
            for key, entry in self._entries.items():
                if field in entry.document.metadata:
                    keys.setdefault(comparison_key(entry.document.metadata[field]), []).append(key)
            self._postings[field] = {value: np.asarray(found, dtype=np.int64) for value, found in keys.items()}
        postings = self._postings[field]
        found = [postings[key] for key in allowed_keys(value) if key in postings]
        if len(found) == 1:
            return found[0]
        return np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def _key_by_id(self) -> dict[str, int]:
        """Return keys by id; for memory-mapped documents, the first call reads all of them."""
        with self._lock:
            if self._keys is None:
                self._keys = {str(entry.document.id): key for key, entry in self._entries.items()}
            return self._keys

    def check_mutable(self) -> None:
        """Raise if the documents are memory-mapped.

        Raises:
            ConfigError: the table cannot be changed.
        """
        self._mutable_entries()

    def _mutable_entries(self) -> dict[int, IndexEntry]:
        if not isinstance(self._entries, dict):
            raise ConfigError(
                "this index was loaded with mmap=True and cannot be changed; load it without to add or delete"
            )
        return self._entries

    def _mark_changed(self) -> None:
        self._revision += 1
        self._postings.clear()
