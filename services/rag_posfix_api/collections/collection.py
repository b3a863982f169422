"""One collection: its documents and vectors in memory, and in a SQLite file that several processes change.

A change is a transaction. Every call first reads the changes that were committed since the last call, also by this
process. Keys of documents ascend and are never used again, so new rows have larger keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.cancellation import check_cancelled
from rag_posfix.errors import IndexBusyError, OverloadedError, RetrievalError
from rag_posfix.retrieval.dense import PassageRetriever
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.document_file import DocumentFile
from rag_posfix.retrieval.index.documents import IndexEntry, searchable_text, stored_copy
from rag_posfix_api.collections.conversion import collection_file
from rag_posfix_api.http.errors import NotFoundError, StorageError, TooLargeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TEXTS_PER_STEP = 64
_ROWS_PER_STEP = 10_000
WAIT_SECONDS = 30.0
"""How long a writer waits for another one."""

Removed = Callable[[Sequence[Document]], None]


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of documents that were added.

    Attributes:
        ids: Their ids, in order.
        added: Number of new ids.
        replaced: Number of stored ids whose document changed.
        unchanged: Number of documents that were stored already.
        documents: Number of documents of the collection then.
    """

    ids: tuple[str, ...]
    added: int
    replaced: int
    unchanged: int
    documents: int


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing below ``folder`` into those that a request reports."""
    try:
        yield
    except IndexBusyError as error:
        raise OverloadedError("the collection is being changed by another request; try again later") from error
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no collection {folder.name!r}; create it first", param="name") from error
    except OSError as error:
        raise StorageError(f"cannot write to {str(folder)!r}: {error.strerror or error}") from error


def existing_file(folder: Path) -> Path:
    """Return the file of the collection in ``folder``; NotFoundError if there is none."""
    with storage_errors(folder):
        path = collection_file(folder)
        if path is None:
            raise FileNotFoundError(folder)
        return path


class Collection:
    """A collection, as this process sees it. Safe for several threads; each call sees the changes of other processes.

    All vectors are compared in a search. Methods raise NotFoundError if the collection was deleted; those of change
    also OverloadedError if another writer did not end in time, and StorageError if the change could not be written: it
    was then not made.

    Args:
        removed: Is called with documents that were deleted or replaced.
    """

    def __init__(self, folder: Path, embeddings: Embeddings, max_documents: int, removed: Removed) -> None:
        self.folder = folder
        self._embeddings = embeddings
        self._max_documents = max_documents
        self._removed = removed
        self._lock = threading.RLock()
        self._file: DocumentFile | None = None
        self._version: int | None = None
        self._last_key = -1
        self._store = FaissVectorStore(embeddings, kind="flat")

    def __len__(self) -> int:
        return len(self._current())

    def documents(self) -> list[Document]:
        """Return copies of all documents."""
        return self._current().documents()

    def search(self, question: str, k: int) -> list[Document]:
        """Return the ``k`` nearest documents with ``relevance_score`` in their metadata, best first."""
        return self.retriever(k).retrieve(question, k)

    def retriever(self, k: int) -> PassageRetriever:
        """Return a retriever of the documents as they are now; its ``invoke`` returns ``k`` passages."""
        return PassageRetriever(store=self._current(), k=k)

    def put(self, documents: Sequence[Document]) -> PutResult:
        """Add documents, replacing those with the same ids; return when that is on the disk.

        All of them are added, or none. Documents that are stored already are neither embedded nor written.

        Args:
            documents: One without an id gets a hash of its content. The last of several with one id counts.

        Raises:
            TooLargeError: the collection would hold too many documents.
        """
        copies = [stored_copy(document) for document in documents]
        entries = {str(document.id): IndexEntry(document) for document in copies}
        ids = tuple(str(document.id) for document in copies)
        vectors: dict[str, NDArray[np.float32]] = {}
        result = None
        while result is None:
            missing = self._texts_to_embed(self._current(), entries, vectors)
            for start in range(0, len(missing), _TEXTS_PER_STEP):
                check_cancelled()
                batch = missing[start : start + _TEXTS_PER_STEP]
                vectors.update(zip(batch, self._store.embed_texts(batch), strict=True))
            with self._transaction() as (file, store):
                if not self._texts_to_embed(store, entries, vectors):  # else another writer changed them meanwhile
                    result = self._write(file, store, entries, vectors, ids)
        self._current()
        return result

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents by id, and return how many there were, when that is on the disk."""
        with self._transaction() as (file, store):
            stored = [name for name in dict.fromkeys(ids) if store.table.key_of(name) is not None]
            if stored:
                file.remove(stored)
                file.set_facts({**file.facts(), "count": len(store) - len(stored)})
        self._current()
        return len(stored)

    def _texts_to_embed(
        self, store: FaissVectorStore, entries: Mapping[str, IndexEntry], vectors: Mapping[str, Any]
    ) -> list[str]:
        """Return the texts of ``entries`` whose vectors are neither stored under the same id nor in ``vectors``."""
        texts: dict[str, None] = {}
        for name, entry in entries.items():
            text, stored = searchable_text(entry.document), _stored(store, name)
            if text not in vectors and (stored is None or searchable_text(stored) != text):
                texts[text] = None
        return list(texts)

    def _write(
        self,
        file: DocumentFile,
        store: FaissVectorStore,
        entries: Mapping[str, IndexEntry],
        vectors: Mapping[str, NDArray[np.float32]],
        ids: tuple[str, ...],
    ) -> PutResult:
        changed = {name: entry for name, entry in entries.items() if _stored(store, name) != entry.document}
        added = sum(_stored(store, name) is None for name in changed)
        count = len(store) + added
        if count > self._max_documents:
            raise TooLargeError(
                f"the collection has {len(store)} documents and would have {count}, at most {self._max_documents} are "
                "allowed; delete some, or use another collection",
                param="documents",
            )
        if changed:
            facts = file.facts()
            rows = []
            for key, (name, entry) in enumerate(changed.items(), start=facts["next_key"]):
                vector = vectors.get(searchable_text(entry.document))
                vector = store.vectors_of([name])[0] if vector is None else vector
                rows.append((key, entry, vector.astype("<f4").tobytes()))
            file.remove(changed)
            file.insert(rows)
            file.set_facts({**facts, "count": count, "next_key": facts["next_key"] + len(rows)})
        return PutResult(ids, added, len(changed) - added, len(entries) - len(changed), count)

    @contextmanager
    def _transaction(self) -> Iterator[tuple[DocumentFile, FaissVectorStore]]:
        """Write alone, on a separate connection: readers in this process do not wait for its lock."""
        path = existing_file(self.folder)
        with storage_errors(self.folder):
            file = DocumentFile(path, wait_seconds=WAIT_SECONDS)
            try:
                with file.transaction():
                    store = self._current()
                    if self._file is None or self._file.path != path:
                        raise OverloadedError("the collection was created again meanwhile; try again later")
                    yield file, store
            finally:
                file.close()

    def _current(self) -> FaissVectorStore:
        """Return the store with all committed changes."""
        with self._lock, storage_errors(self.folder):
            path = existing_file(self.folder)  # has another name after the collection was created again
            if self._file is None or self._file.path != path:
                file = DocumentFile(path)
                embedding = file.facts()["embedding"]
                if embedding != embedding_identity(self._embeddings):
                    raise RetrievalError(
                        f"collection {str(self.folder)!r} was made with embedding model {embedding!r}; serve that "
                        "model, or create the collection again"
                    )
                self._file, self._version, self._last_key = file, None, -1
                self._store = FaissVectorStore(self._embeddings, kind="flat")  # a graph would be built at every start
                self._store.add_delete_listener(self._removed)
            version = self._file.data_version()
            if version != self._version:
                self._read_changes(self._file, self._store)
                self._version = version
            return self._store

    def _read_changes(self, file: DocumentFile, store: FaissVectorStore) -> None:
        import numpy as np

        with file.snapshot():
            count, rows = file.facts()["count"], file.rows(self._last_key)
            while batch := list(islice(rows, _ROWS_PER_STEP)):
                vectors = np.stack([np.frombuffer(vector or b"", dtype="<f4") for _, _, vector in batch])
                store.put_entries({str(entry.document.id): entry for _, entry, _ in batch}, vectors)
                self._last_key = batch[-1][0]
            if len(store) > count:
                stored = set(file.ids())
                store.delete([name for name in store.table.ids() if name not in stored])
            if len(store) != count:
                raise RetrievalError(f"{str(file.path)!r} is damaged: it has {len(store)} documents, not {count}")


def _stored(store: FaissVectorStore, name: str) -> Document | None:
    key = store.table.key_of(name)
    return None if key is None else store.table.document(key)
