"""Documents under integer keys and string ids, in memory or read from a file as they are asked for.

Vectors and word statistics name documents by key; this is where a key becomes a document. Knows nothing of either.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.index.filters import MetadataFilter, allowed_values, fold
from rag_posfix.text import titled_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DocumentTable", "Record", "searchable_text"]


@dataclass(frozen=True, slots=True)
class Record:
    """A document, and the files that it was found in.

    Attributes:
        document: Has an id.
        files: As they were named when they were indexed; empty where the document came from no file.
    """

    document: Document
    files: tuple[str, ...] = ()


def searchable_text(document: Document) -> str:
    """Return the text that stands for a document in vectors and in word statistics: its title and its text."""
    return titled_text(document.metadata.get("title"), document.page_content)


class DocumentTable:
    """Documents by key and by id. Keys grow with every document that is added and are never used again.

    Documents are handed out as they are kept: whoever passes them on copies them. Methods may be called from any
    thread.

    Args:
        records: What it holds at first, by ascending key. A mapping that cannot be changed, such as documents that are
            read from a file as they are asked for, makes a table that cannot be changed.
    """

    def __init__(self, records: Mapping[int, Record] | None = None) -> None:
        self._records: Mapping[int, Record] = {} if records is None else records
        self._keys: dict[str, int] | None = None
        # Keys of the documents that have a value, by field and folded value; made when a filter first names a field.
        self._postings: dict[str, dict[Hashable, NDArray[np.int64]]] = {}
        self._lock = threading.RLock()
        self._revision = 0
        self._next_key = 1 + max(self._records, default=-1)

    @property
    def revision(self) -> int:
        """A number that is another one after every change."""
        return self._revision

    @property
    def next_key(self) -> int:
        """The key of the document that is added next."""
        return self._next_key

    @property
    def records(self) -> Mapping[int, Record]:
        """Everything by key, ascending; to be read under no change."""
        return self._records

    def __len__(self) -> int:
        return len(self._records)

    def document(self, key: int) -> Document | None:
        """Return the document under ``key``, or None where it is gone."""
        record = self._records.get(key)
        return None if record is None else record.document

    def key_of(self, name: str) -> int | None:
        """Return the key of the document with this id, or None."""
        return self._names().get(name)

    def names(self) -> list[str]:
        """Return all ids, in the order in which the documents were added."""
        return list(self._names())

    def snapshot(self) -> tuple[int, list[int], list[str]]:
        """Return the revision, the keys, and the searchable texts in the order of the keys."""
        with self._lock:
            texts = [searchable_text(record.document) for record in self._records.values()]
            return self._revision, list(self._records), texts

    def put(self, records: Iterable[Record]) -> list[int]:
        """Add documents whose ids are not in the table, and return their keys.

        Raises:
            ConfigError: the table cannot be changed.
        """
        with self._lock:
            owned, names = self._changeable(), self._names()
            keys = []
            for record in records:
                owned[self._next_key] = record
                names[str(record.document.id)] = self._next_key
                keys.append(self._next_key)
                self._next_key += 1
            self._changed()
            return keys

    def refresh(self, records: Iterable[Record]) -> None:
        """Put records in the place of those with their ids; the keys stay.

        Raises:
            ConfigError: the table cannot be changed.
        """
        with self._lock:
            owned, names = self._changeable(), self._names()
            for record in records:
                owned[names[str(record.document.id)]] = record
            self._changed()

    def remove(self, names: Sequence[str]) -> tuple[list[int], list[Document]]:
        """Take out documents that are in the table; return their keys and the documents.

        Raises:
            ConfigError: the table cannot be changed.
        """
        with self._lock:
            owned, known = self._changeable(), self._names()
            keys = [known.pop(name) for name in names]
            gone = [owned.pop(key).document for key in keys]
            self._changed()
            return keys, gone

    def matching(self, chosen: MetadataFilter) -> NDArray[np.int64]:
        """Return the keys of the documents that a filter lets through, ascending.

        A dict costs one pass over the documents the first time that a field is named, and a look-up afterwards; a
        function is called for every document every time.

        Args:
            chosen: A checked filter.
        """
        import numpy as np

        with self._lock:
            if callable(chosen):
                found = [key for key, r in self._records.items() if chosen(MappingProxyType(r.document.metadata))]
            else:
                columns = [self._with_value(field, value) for field, value in chosen.items()]
                if columns:
                    return functools.reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), columns)
                found = list(self._records)
            return np.asarray(found, dtype=np.int64)

    def _with_value(self, field: str, value: Any) -> NDArray[np.int64]:
        import numpy as np

        if field not in self._postings:
            keys: dict[Hashable, list[int]] = {}
            for key, record in self._records.items():
                if field in record.document.metadata:
                    keys.setdefault(fold(record.document.metadata[field]), []).append(key)
            self._postings[field] = {folded: np.asarray(found, dtype=np.int64) for folded, found in keys.items()}
        postings = self._postings[field]
        found = [postings[folded] for folded in allowed_values(value) if folded in postings]
        if len(found) == 1:
            return found[0]
        return np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)

    def _names(self) -> dict[str, int]:
        """Return keys by id; for documents in a file, that reads them all once."""
        with self._lock:
            if self._keys is None:
                self._keys = {str(record.document.id): key for key, record in self._records.items()}
            return self._keys

    def check_changeable(self) -> None:
        """Refuse changes to documents that are read from a file as they are asked for.

        Raises:
            ConfigError: the table cannot be changed.
        """
        self._changeable()

    def _changeable(self) -> dict[int, Record]:
        if not isinstance(self._records, dict):
            raise ConfigError(
                "this index was loaded with mmap=True and cannot be changed; load it without to add or delete"
            )
        return self._records

    def _changed(self) -> None:
        self._revision += 1
        self._postings.clear()
