"""One collection: documents and vectors in memory, a log of changes and an index on disk.

A change is appended to the log under the lock of the folder, after the changes that other processes appended were
read. When the log has grown as long as the index, the index is written anew and a new log begins (a checkpoint). A
log that is read on top of an index that has its changes already leaves the same documents, so a process may be killed
at any moment.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.cancellation import check_cancelled
from rag_posfix.errors import IndexBusyError, OverloadedError, RetrievalError
from rag_posfix.retrieval.dense import PassageRetriever
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.documents import IndexEntry, searchable_text, stored_copy
from rag_posfix.retrieval.index.folder_lock import locked
from rag_posfix_api.collections.header import Header, header_signature, log_of, read_header, write_header
from rag_posfix_api.http.errors import NotFoundError, StorageError, TooLargeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TEXTS_PER_STEP = 64
LOG_BYTES = 8 * 1024**2
"""A checkpoint is made when the log is longer than this, and than the index."""
WAIT_SECONDS = 30.0
"""How long a writer waits for another one."""

Removed = Callable[[Sequence[Document]], None]


@dataclass(frozen=True, slots=True)
class Put:
    """What became of documents that were added.

    Attributes:
        ids: Their ids, in order.
        added: Number of new ids.
        replaced: Number of known ids whose document changed.
        unchanged: Number of documents that were there already.
        documents: Number of documents of the collection then.
    """

    ids: tuple[str, ...]
    added: int
    replaced: int
    unchanged: int
    documents: int


@contextmanager
def collection_lock(folder: Path) -> Iterator[None]:
    """Be the only writer of a collection, over all threads and processes.

    Raises:
        OverloadedError: another writer did not end in time.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder, wait_seconds=WAIT_SECONDS))
        except IndexBusyError as error:
            raise OverloadedError("the collection is being changed by another request; try again later") from error
        yield


class Collection:
    """A collection, as this process sees it. Safe for several threads; each call sees the changes of other processes.

    Args:
        removed: Is called with documents that were deleted or replaced.
    """

    def __init__(self, folder: Path, embeddings: Embeddings, max_documents: int, removed: Removed) -> None:
        self.folder = folder
        self._embeddings = embeddings
        self._max_documents = max_documents
        self._removed = removed
        self._lock = threading.RLock()
        self._seen: tuple[int, int, int] | None = None
        self._header: Header | None = None
        self._store = FaissVectorStore(embeddings)
        self._end = 0

    def __len__(self) -> int:
        return len(self._current())

    def documents(self) -> list[Document]:
        """Return copies of all documents."""
        return self._current().documents()

    def search(self, question: str, k: int) -> list[Document]:
        """Return the ``k`` nearest documents with ``relevance_score`` in their metadata, best first.

        Raises:
            NotFoundError: the collection was deleted.
        """
        return self.retriever(k).retrieve(question, k)

    def retriever(self, k: int) -> PassageRetriever:
        """Return a retriever of the documents as they are now.

        Args:
            k: Number of passages that ``invoke`` returns.
        """
        return PassageRetriever(store=self._current(), k=k)

    def put(self, documents: Sequence[Document]) -> Put:
        """Add documents, replacing those with the same ids; return when that is on the disk.

        All of them are added, or none. Documents that are there already are neither embedded nor written.

        Args:
            documents: One without an id gets a hash of its content. The last of several with one id counts.

        Raises:
            NotFoundError: the collection was deleted.
            TooLargeError: it would hold too many documents.
            OverloadedError: another writer did not end in time.
            StorageError: the change could not be written, and was not made.
        """
        copies = [stored_copy(document) for document in documents]
        entries = {str(document.id): IndexEntry(document) for document in copies}
        ids = tuple(str(document.id) for document in copies)
        rows: dict[str, NDArray[np.float32]] = {}
        while True:
            self._embed(self._texts_to_embed(self._current(), entries, rows), rows)
            with collection_lock(self.folder), self._lock:
                store = self._current()
                if not self._texts_to_embed(store, entries, rows):  # else another writer changed them meanwhile
                    return self._commit(store, entries, rows, ids)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents by id, and return how many there were, when that is on the disk.

        Raises:
            NotFoundError: the collection was deleted.
            OverloadedError: another writer did not end in time.
            StorageError: the change could not be written, and was not made.
        """
        with collection_lock(self.folder), self._lock:
            store = self._current()
            known = [name for name in dict.fromkeys(ids) if store.table.key_of(name) is not None]
            if known:
                self._append({"op": "delete", "ids": known})
                store.delete(known)
                self._after_change(store)
        return len(known)

    def _texts_to_embed(
        self, store: FaissVectorStore, entries: Mapping[str, IndexEntry], rows: Mapping[str, Any]
    ) -> list[str]:
        """Return the texts of ``entries`` whose vectors are neither in the store, under the same id, nor in rows."""
        texts: dict[str, None] = {}
        for name, entry in entries.items():
            text, before = searchable_text(entry.document), _stored(store, name)
            if text not in rows and (before is None or searchable_text(before) != text):
                texts[text] = None
        return list(texts)

    def _embed(self, texts: Sequence[str], rows: dict[str, NDArray[np.float32]]) -> None:
        for start in range(0, len(texts), _TEXTS_PER_STEP):
            check_cancelled()
            batch = texts[start : start + _TEXTS_PER_STEP]
            rows.update(zip(batch, self._store.embed_texts(batch), strict=True))

    def _commit(
        self,
        store: FaissVectorStore,
        entries: Mapping[str, IndexEntry],
        rows: Mapping[str, NDArray[np.float32]],
        ids: tuple[str, ...],
    ) -> Put:
        import numpy as np

        changed = {name: entry for name, entry in entries.items() if _stored(store, name) != entry.document}
        added = sum(_stored(store, name) is None for name in changed)
        if len(store) + added > self._max_documents:
            raise TooLargeError(
                f"the collection has {len(store)} documents and would have {len(store) + added}, at most "
                f"{self._max_documents} are allowed; delete some, or use another collection",
                param="documents",
            )
        if changed:
            vectors = np.stack([self._vector(store, name, entry, rows) for name, entry in changed.items()])
            self._append(_put_change(changed, vectors))
            store.put_entries(changed, vectors)
            self._after_change(store)
        return Put(ids, added, len(changed) - added, len(entries) - len(changed), len(store))

    def _vector(
        self, store: FaissVectorStore, name: str, entry: IndexEntry, rows: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        row = rows.get(searchable_text(entry.document))
        return store.vectors_of([name])[0] if row is None else row

    def _append(self, change: Mapping[str, Any]) -> None:
        try:
            self._end = log_of(self.folder, self._read()).append(change, self._end)
        except OSError as error:
            raise StorageError(f"cannot write to {str(self.folder)!r}: {error.strerror or error}") from error

    def _after_change(self, store: FaissVectorStore) -> None:
        with suppress(OSError):  # a number for lists of collections
            (self.folder / "count").write_text(str(len(store)), encoding="ascii")
        index = self.folder / "index"
        if self._end > LOG_BYTES and self._end > sum(file.stat().st_size for file in index.glob("*")):
            self._checkpoint(store)

    def _checkpoint(self, store: FaissVectorStore) -> None:
        """Write the index anew and begin a new log. The change is on the disk already, so a failure is not told."""
        header = self._read()
        following = header.model_copy(update={"generation": header.generation + 1})
        with suppress(OSError, RetrievalError):
            store.save(self.folder / "index")
            log_of(self.folder, following).create()
            write_header(self.folder, following)
            self._header, self._end, self._seen = following, 0, header_signature(self.folder)
            log_of(self.folder, header).remove()

    def _current(self) -> FaissVectorStore:
        """Return the store after reading what other processes changed.

        Raises:
            NotFoundError: the collection was deleted.
        """
        with self._lock:
            if header_signature(self.folder) == self._seen and self._header is not None:
                if log_of(self.folder, self._header).size > self._end:
                    self._apply(self._store, self._header)
                return self._store
        # Always the lock of the folder first: whoever changes the collection takes them in this order.
        with collection_lock(self.folder), self._lock:
            if header_signature(self.folder) != self._seen or self._header is None:
                self._load()
            return self._store

    def _load(self) -> None:
        seen = header_signature(self.folder)
        if seen is None:
            raise NotFoundError(f"there is no collection {self.folder.name!r}; create it first", param="name")
        header, index = read_header(self.folder), self.folder / "index"
        if header.embedding != embedding_identity(self._embeddings):
            raise RetrievalError(
                f"collection {str(self.folder)!r} was made with embedding model {header.embedding!r}; serve that "
                "model, or create the collection again"
            )
        if index.exists():
            store = FaissVectorStore.load(index, self._embeddings)
        else:
            store = FaissVectorStore(self._embeddings)
        self._seen, self._end = None, 0  # until all of it was read
        self._apply(store, header)
        store.add_delete_listener(self._removed)
        self._store, self._header, self._seen = store, header, seen

    def _apply(self, store: FaissVectorStore, header: Header) -> None:
        changes, end = log_of(self.folder, header).read(self._end)
        for change in changes:
            if change["op"] == "delete":
                store.delete(change["ids"])
            else:
                store.put_entries(*_read_put(change))
        self._end = end

    def _read(self) -> Header:
        if self._header is None:
            raise RetrievalError(f"the collection {str(self.folder)!r} has not been read")
        return self._header


def _stored(store: FaissVectorStore, name: str) -> Document | None:
    key = store.table.key_of(name)
    return None if key is None else store.table.document(key)


def _put_change(entries: Mapping[str, IndexEntry], vectors: NDArray[np.float32]) -> dict[str, Any]:
    documents = [
        {"id": name, "text": entry.document.page_content, "metadata": entry.document.metadata}
        for name, entry in entries.items()
    ]
    data = base64.b64encode(vectors.astype("<f4").tobytes()).decode("ascii")
    return {"op": "put", "documents": documents, "dimension": vectors.shape[1], "vectors": data}


def _read_put(change: Mapping[str, Any]) -> tuple[dict[str, IndexEntry], NDArray[np.float32]]:
    import numpy as np

    entries = {
        one["id"]: IndexEntry(Document(id=one["id"], page_content=one["text"], metadata=one["metadata"]))
        for one in change["documents"]
    }
    vectors = np.frombuffer(base64.b64decode(change["vectors"]), dtype="<f4").astype(np.float32)
    return entries, vectors.reshape(len(entries), change["dimension"])
