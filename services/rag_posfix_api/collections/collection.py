"""One collection: its documents and vectors in memory, and in a SQLite file that several processes change.

A change is a transaction. Every call first reads the changes that were committed since the last call, also by this
process. Keys of documents ascend and are never used again, so new rows have larger keys.

The passages of a collection in memory, and what is stored of each next to its text: a vector.

Collections that are searched in a vector store which the operator runs.

The store has a copy of each passage: its text, its metadata, its vector, and the name of its collection in the field
``posfix_collection``. The file of the collection decides what is in the collection: a row has the id of the copy of
its passage. A copy that no row refers to is never returned, and an id is never used twice. A change sends new copies,
commits to the file, and deletes the copies that it replaced, so that readers see all of the change or none of it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.retrieval import combine_filters, first_matching, parse_filter
from rag_posfix.errors import ConfigError, IndexBusyError, OverloadedError, RagPosfixError, RetrievalError
from rag_posfix.retrieval.base import PassageRetriever, QuestionRetriever
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.external_stores import ExternalRetriever, call_client, open_external, store_options
from rag_posfix.retrieval.faiss_store import DeleteListener, FaissVectorStore
from rag_posfix.retrieval.index.documents import (
    DocumentFile,
    DocumentTable,
    IndexEntry,
    StoredRow,
    deep_copy,
    searchable_text,
    stored_copy,
)
from rag_posfix.retrieval.ingest.passages import PassageSize, split_document
from rag_posfix_api.http.errors import RequestError, spec_of


class Passages(Protocol):
    """The passages of a collection, as they were committed to its file."""

    @property
    def table(self) -> DocumentTable: ...

    def delete(self, ids: list[str]) -> object: ...

    def put_rows(self, rows: Sequence[StoredRow]) -> None:
        """Add rows of the file, replacing those with the same ids."""

    def missing(self, entries: Mapping[str, IndexEntry], prepared: Mapping[str, bytes]) -> list[str]:
        """Return the keys of what ``prepare`` has to do before ``entries`` can be stored."""

    def prepare(self, keys: Sequence[str], entries: Mapping[str, IndexEntry]) -> dict[str, bytes]:
        """Return what rows store of the passages of some keys."""

    def row_bytes(self, entry: IndexEntry, prepared: Mapping[str, bytes]) -> bytes:
        """Return what the row of a new or changed passage stores next to its text."""

    def retriever(self, k: int) -> QuestionRetriever: ...


class EmbeddedPassages(FaissVectorStore):
    """Passages whose vectors are in the file and in memory. All of them are compared in a search; keys are texts."""

    def __init__(self, embeddings: Embeddings, removed: DeleteListener) -> None:
        super().__init__(embeddings, kind="flat")  # a graph would be built at every start
        self.add_delete_listener(removed)

    def put_rows(self, rows: Sequence[StoredRow]) -> None:
        import numpy as np

        vectors = np.stack([np.frombuffer(vector or b"", dtype="<f4") for _, _, vector in rows])
        self.put_entries({str(entry.document.id): entry for _, entry, _ in rows}, vectors)

    def missing(self, entries: Mapping[str, IndexEntry], prepared: Mapping[str, bytes]) -> list[str]:
        """Return the texts whose vectors are neither stored under the same id nor in ``prepared``."""
        texts: dict[str, None] = {}
        for name, entry in entries.items():
            text, stored = searchable_text(entry.document), self.table.entry_of(name)
            if text not in prepared and (stored is None or searchable_text(stored.document) != text):
                texts[text] = None
        return list(texts)

    def prepare(self, keys: Sequence[str], entries: Mapping[str, IndexEntry]) -> dict[str, bytes]:
        return {text: row.astype("<f4").tobytes() for text, row in zip(keys, self.embed_texts(keys), strict=True)}

    def row_bytes(self, entry: IndexEntry, prepared: Mapping[str, bytes]) -> bytes:
        vector = prepared.get(searchable_text(entry.document))
        return self.vectors_of([str(entry.document.id)])[0].astype("<f4").tobytes() if vector is None else vector

    def retriever(self, k: int) -> QuestionRetriever:
        return PassageRetriever(store=self, k=k)


def split_documents(
    documents: Sequence[Document], size: PassageSize, most: int, yield_to_waiters: Callable[[], None]
) -> dict[str, dict[str, IndexEntry]]:
    """Return the entries of each document by their ids: itself, or its passages if it is longer than a passage.

    Raises:
        RequestError: there are more than ``most`` passages.
    """
    entries: dict[str, dict[str, IndexEntry]] = {}
    for document in documents:
        yield_to_waiters()
        name, passages = str(document.id), split_document(document, size)
        if passages == [document]:
            entries[name] = {name: IndexEntry(document)}
        else:
            for passage in passages:
                passage.metadata.setdefault("document_id", name)
            entries[name] = {str(passage.id): IndexEntry(passage, (name,)) for passage in passages}
        if sum(map(len, entries.values())) > most:
            raise RequestError(
                f"the documents of the request are more than {most} passages, which a collection may have; send fewer "
                "or shorter documents",
                param="documents",
                code="request_too_large",
            )
    return entries


def check_ids(stored: Mapping[str, IndexEntry], entries: Mapping[str, IndexEntry]) -> None:
    """Raise RequestError if an id is that of a passage of one document, and of another document or its passage."""
    for name, entry in entries.items():
        other = stored.get(name)
        owners = {file for item in (entry, other) if item for file in item.files or (name,)}
        if other is not None and len(owners) > 1:
            raise RequestError(
                f"id {name!r} belongs to two of the documents {', '.join(map(repr, sorted(owners)))}, of which one is "
                f"stored as passages {name.rpartition('#')[0]}#1, #2, ...; choose another id",
                param="documents",
                code="already_exists",
            )


SCOPE: Final = "posfix_collection"
"""The metadata field of a copy that names its collection."""

_ERASED_PER_SEARCH = 1000


class ExternalStore:
    """A vector store that holds copies of passages.

    Attributes:
        identity: Its kind and its collection or index, which files of collections remember.
        retriever: Searches it, with filters.
    """

    def __init__(self, identity: str, retriever: QuestionRetriever, vectors: VectorStore) -> None:
        self.identity = identity
        self.retriever = retriever
        self._vectors = vectors

    def check(self) -> None:
        """Raise RetrievalError if the store cannot be reached; a plugin's store need not have a check."""
        check = getattr(self.retriever, "check", None)
        if callable(check):
            check()

    def add(self, scope: str, documents: Mapping[str, Document]) -> None:
        """Add copies of passages by id, all or none; raise RequestError if the store does not take them."""
        copies = [
            Document(page_content=searchable_text(document), metadata={**document.metadata, SCOPE: scope})
            for document in documents.values()
        ]
        try:
            self._call("add to", lambda: self._vectors.add_documents(copies, ids=list(documents)))
        except RagPosfixError:
            self.try_delete(list(documents))
            raise

    def try_delete(self, ids: list[str]) -> RagPosfixError | None:
        """Delete copies by id, and return the error if the store does not; an unknown id is no error."""
        try:
            if ids and self._call("delete from", lambda: self._vectors.delete(ids)) is False:
                return RequestError(
                    f"cannot delete from the vector store {self.identity}; it refused the deletion", code="not_stored"
                )
        except RagPosfixError as error:
            return error
        return None

    def erase(self, scope: str, ids: list[str]) -> None:
        """Delete the copies of a collection: those with known ids, and what killed processes left behind."""
        deleted: set[str] = set()
        rest = set(ids)
        while True:
            if (failure := self.try_delete(sorted(rest))) is not None:
                raise failure
            deleted |= rest
            hits = self.retriever.retrieve("passage", _ERASED_PER_SEARCH, {SCOPE: {"$eq": scope}})
            rest = {str(hit.id) for hit in hits} - deleted
            if not rest:
                return

    def probe(self) -> None:
        """Add a passage, find it, delete it; raise ConfigError if the store cannot do one of these."""
        self.check()
        scope, name, text = f"probe/{uuid.uuid4().hex}", str(uuid.uuid4()), "a passage of the check at start"

        def hits(value: str) -> list[str | None]:
            return [hit.id for hit in self.retriever.retrieve(text, 2, {SCOPE: {"$eq": value}})]

        self.add(scope, {name: Document(page_content=text)})
        added, others = hits(scope), hits(f"{scope}/other")
        failure = self.try_delete([name])
        if failure is not None or added != [name] or others or hits(scope):
            raise ConfigError(
                f"the vector store {self.identity} cannot hold collections: a passage that was added under an id must "
                f"be found by its metadata, and no longer after its deletion ({failure or 'it was not so'}); check "
                "the rights of the key and the ids of the store, or unset RAG_POSFIX_SERVICE_COLLECTION_STORE"
            )

    def _call(self, action: str, work: Callable[[], Any]) -> Any:
        problem = f"cannot {action} the vector store {self.identity}:"
        return call_client(work, partial(RequestError, code="not_stored"), problem, "check that it runs")


def open_external_store(text: str, embeddings: Embeddings) -> ExternalStore:
    """Return the store ``KIND:key=value,...`` of the settings, which then has shown what collections need.

    Raises:
        ConfigError: the setting is wrong, or the store cannot hold collections.
        RetrievalError: the store cannot be reached, or its vectors are of another model.
    """
    kind, _, rest = text.partition(":")
    try:
        retriever = open_external(text, embeddings, 10)
    except (ConfigError, RetrievalError) as error:
        raise type(error)(f"collection_store: {error}") from error
    vectors = getattr(retriever, "store", None)
    evaluates_filters = getattr(vectors, "evaluates_filters", False)
    if isinstance(retriever, ExternalRetriever):
        vectors, evaluates_filters = retriever.store.vectors, True
    if not (isinstance(retriever, QuestionRetriever) and isinstance(vectors, VectorStore) and evaluates_filters):
        raise ConfigError(
            f"the vector store {kind} cannot hold collections; a plugin must return a langchain VectorStore with the "
            "attribute evaluates_filters=True, whose searches take filters in the language of rag_posfix"
        )
    options = store_options(kind, rest)
    if kind == "milvus" and "metadata" not in options:
        raise ConfigError(
            "the vector store milvus holds collections in a JSON field alone, so that metadata cannot name the fields "
            "of the store; add metadata=FIELD"
        )
    store = ExternalStore(f"{kind}:{options.get('collection') or options.get('index') or ''}", retriever, vectors)
    store.probe()
    return store


class ExternalPassages:
    """The passages of a collection, whose vectors are in an ``ExternalStore``. Rows store the ids of their copies.

    Attributes:
        names: The ids of passages by the ids of their copies.
    """

    def __init__(self, store: ExternalStore, scope: str, removed: DeleteListener) -> None:
        self.table = DocumentTable()
        self._store = store
        self._scope = scope
        self._removed = removed
        self.names: dict[str, str] = {}
        self._copies: dict[str, str] = {}  # the reverse

    def delete(self, ids: list[str]) -> None:
        stored = [name for name in ids if name in self._copies]
        _, documents = self.table.remove(stored)
        for name in stored:
            del self.names[self._copies.pop(name)]
        if documents:
            self._removed(documents)

    def put_rows(self, rows: Sequence[StoredRow]) -> None:
        self.delete([str(entry.document.id) for _, entry, _ in rows])
        self.table.add(entry for _, entry, _ in rows)
        for _, entry, copy in rows:
            name, copy_id = str(entry.document.id), str(uuid.UUID(bytes=copy or b""))
            self._copies[name], self.names[copy_id] = copy_id, name

    def missing(self, entries: Mapping[str, IndexEntry], prepared: Mapping[str, bytes]) -> list[str]:
        """Return the ids of new and changed passages that have no copy yet."""
        return [name for name in entries if name not in prepared and self.table.entry_of(name) != entries[name]]

    def prepare(self, keys: Sequence[str], entries: Mapping[str, IndexEntry]) -> dict[str, bytes]:
        copies = {name: uuid.uuid4() for name in keys}
        self._store.add(self._scope, {str(copy): entries[name].document for name, copy in copies.items()})
        return {name: copy.bytes for name, copy in copies.items()}

    def row_bytes(self, entry: IndexEntry, prepared: Mapping[str, bytes]) -> bytes:
        return prepared[str(entry.document.id)]

    def copies_of(self, names: Iterable[str]) -> list[str]:
        """Return the ids of the copies of passages that are stored."""
        return [self._copies[name] for name in names if name in self._copies]

    def retriever(self, k: int) -> QuestionRetriever:
        source = self._store.retriever
        return _CollectionRetriever(
            passages=self, source=source, scope=self._scope, k=k, similarity=source.similarity_range()
        )

    def resolve(self, hit: Document) -> Document:
        """Return the passage whose copy was found, with its score; a copy that no passage refers to as it is."""
        entry = self.table.entry_of(self.names.get(str(hit.id), ""))
        if entry is None:
            return hit
        passage = deep_copy(entry.document)
        passage.metadata["relevance_score"] = hit.metadata["relevance_score"]
        return passage


class _CollectionRetriever(QuestionRetriever):
    """Searches the copies of one collection, and returns its passages as the file of the collection has them."""

    passages: Any
    source: Any
    scope: str

    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        pushed = combine_filters({SCOPE: {"$eq": self.scope}}, metadata_filter)
        current = combine_filters({SCOPE: {"$exists": False}}, metadata_filter)  # of passages, see check_reserved

        def hits(width: int) -> list[Document]:
            found = [self.passages.resolve(hit) for hit in self.source.retrieve(question, width, pushed)]
            return sorted(found, key=lambda document: (-document.metadata["relevance_score"], str(document.id)))

        return first_matching(hits, k, parse_filter(current))


def sent_copies(prepared: Mapping[str, bytes]) -> list[str]:
    """Return the ids of copies that were sent to the store."""
    return [str(uuid.UUID(bytes=copy)) for copy in prepared.values()]


def check_reserved(documents: Iterable[Document]) -> None:
    """Raise ConfigError if a document has the metadata field that names the collection of a copy."""
    for document in documents:
        if SCOPE in document.metadata:
            raise ConfigError(
                f"document {document.id!r} has the metadata field {SCOPE!r}, which is reserved; rename it"
            )


_log = logging.getLogger(__name__)

_FILE = re.compile(r"documents-[^.]*\.sqlite")
_TEXTS_PER_STEP = 64
_ROWS_PER_STEP = 1000
WAIT_SECONDS = 30.0
"""How long a writer waits for another one."""

MAX_TEXT = 1_000_000
"""Characters of a document's text: nothing else is embedded while they are split."""
MAX_METADATA = 50_000
"""Characters of a document's metadata as JSON: a search returns the metadata of all that it finds."""
_MAX_COPIES = 16_000_000
"""Characters of metadata that one request stores: each passage has the metadata of its document."""

Removed = Callable[[Sequence[Document]], None]


def collection_file(folder: Path) -> Path | None:
    """Return the file of the collection in ``folder``; None if there is no collection.

    Its name has an id that is new whenever a collection is created, so that a process that has the file open sees that
    the collection was deleted and created again.

    Raises:
        OSError: the folder cannot be listed; whether there is a collection is then unknown.
        RetrievalError: there are several files.
    """
    files = sorted(filter(_FILE.fullmatch, file_names(folder)))
    if len(files) > 1:
        raise RetrievalError(
            f"collection {str(folder)!r} is damaged: it has {len(files)} files, {', '.join(files)}; move away those "
            "that are copies"
        )
    return folder / files[0] if files else None


def is_collection(folder: Path) -> bool:
    """Return whether there is a collection in ``folder``; a folder that cannot be listed counts as one."""
    try:
        return any(_FILE.fullmatch(name) for name in file_names(folder))
    except OSError:
        return True


def file_names(folder: Path) -> list[str]:
    """Return the names in ``folder``, which need not exist. ``Path.glob`` and ``exists`` pass over other errors."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of documents that were added.

    Attributes:
        ids: Their ids, in order.
        added: Number of new ids.
        replaced: Number of stored ids whose document changed.
        unchanged: Number of documents that were stored already.
        documents: Number of documents of the collection then.
        passages: Number of its passages then; a document that fits into a passage is one.
        split: Ids of the documents that are longer than a passage, with their numbers of passages.
    """

    ids: tuple[str, ...]
    added: int
    replaced: int
    unchanged: int
    documents: int
    passages: int
    split: Mapping[str, int]


class CollectionFailures:
    """The collections whose file could not be written or read the last time. Safe to share between threads.

    Attributes:
        counts: Number of failures by action, ``write`` and ``read``.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.counts = {"write": 0, "read": 0}
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: dict[tuple[str, Path], tuple[float, str]] = {}

    @contextmanager
    def watch(self, action: str, folder: Path, *, lasting: bool = True) -> Iterator[None]:
        """Count a failure of the block, logged if it is the first in a row; success ends the row.

        Args:
            lasting: Whether the collection fails until a success; else each failure is counted and logged alone.
        """
        try:
            yield
        except (RequestError, RetrievalError) as error:
            if spec_of(error).status < 500:
                raise
            with self._lock:
                self.counts[action] += 1
                is_first = (action, folder) not in self._failing
                since = self._failing.get((action, folder), (self._clock(), ""))[0]
                if lasting:
                    self._failing[action, folder] = since, spec_of(error).code
            if is_first:
                _log.error("collection %s: %s failed: %s", folder, action, error)
            raise
        self._forget(action, folder)

    def forget(self, folder: Path) -> None:
        """Forget a collection that was deleted."""
        for action in self.counts:
            self._forget(action, folder)

    def describe(self) -> str | None:
        """Return how many collections fail, since when, and the last error, without their names; None without one."""
        lines = []
        with self._lock:
            for action in self.counts:
                failing = [failure for (name, _), failure in self._failing.items() if name == action]
                if failing:
                    since = datetime.fromtimestamp(min(failing)[0], UTC)
                    lines.append(
                        f"{action} of {len(failing)} collections fails since {since:%Y-%m-%dT%H:%M:%SZ} "
                        f"({failing[-1][1]})"
                    )
        return "; ".join(lines) or None

    def _forget(self, action: str, folder: Path) -> None:
        with self._lock:
            self._failing.pop((action, folder), None)


@contextmanager
def storage_errors(folder: Path, action: Literal["write", "read"] = "write") -> Iterator[None]:
    """Turn errors of files below ``folder`` into those that a request reports."""
    try:
        yield
    except IndexBusyError as error:
        raise OverloadedError("the collection is being changed by another request; try again later") from error
    except FileNotFoundError as error:
        raise RequestError(
            f"there is no collection {folder.name!r}; create it first", param="name", code="not_found"
        ) from error
    except OSError as error:
        code = "not_stored" if action == "write" else "not_read"
        raise RequestError(f"cannot {action} {str(folder)!r}: {error.strerror or error}", code=code) from error


def existing_file(folder: Path) -> Path:
    """Return the file of the collection in ``folder``; RequestError if there is none."""
    with storage_errors(folder, "read"):
        path = collection_file(folder)
        if path is None:
            raise FileNotFoundError(folder)
        return path


class Collection:
    """A collection, as this process sees it. Safe for several threads; each call sees the changes of other processes.

    A document that is longer than a passage is stored as its passages (``passages.split_document``), which are
    replaced and deleted together: ``files`` of their entries is the id of the document.

    Methods raise RequestError if the collection was deleted, or a change could not be written: it was then not made;
    those of change also OverloadedError if another writer did not end in time.

    Args:
        removed: Is called with documents that were deleted or replaced.
        failures: Counts failures of this collection.
        size: Upper limits of a passage.
        external: Searches the passages; None compares the vectors of all passages in memory.
    """

    def __init__(
        self,
        folder: Path,
        embeddings: Embeddings,
        max_documents: int,
        removed: Removed,
        failures: CollectionFailures,
        size: PassageSize,
        external: ExternalStore | None = None,
    ) -> None:
        self.folder = folder
        self._embeddings = embeddings
        self._max_documents = max_documents
        self._removed = removed
        self._failures = failures
        self._size = size
        self._external = external
        self._lock = threading.RLock()
        self._file: DocumentFile | None = None
        self._version: int | None = None
        self._last_key = -1
        self._store: Passages = EmbeddedPassages(embeddings, removed)
        self._passages: dict[str, list[str]] = {}  # ids of passages by the id of their document
        self._passages_of: tuple[Passages, int] | None = None

    def documents(self) -> list[Document]:
        """Return copies of all documents; a long one is several passages."""
        with self._lock:
            return [deep_copy(entry.document) for entry in self._current().table.entries.values()]

    def search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None = None) -> list[Document]:
        """Return the ``k`` nearest documents that match, with ``relevance_score`` in their metadata, best first."""
        return self.retriever(k).retrieve(question, k, metadata_filter)

    def retriever(self, k: int) -> QuestionRetriever:
        """Return a retriever of the documents as they are now; its ``invoke`` returns ``k`` passages."""
        return self._current().retriever(k)

    def put(self, documents: Sequence[Document], yield_to_waiters: Callable[[], None] = check_cancelled) -> PutResult:
        """Add documents, replacing those with the same ids; return when that is on the disk.

        All of them are added, or none. Documents that are stored already are neither embedded nor written.

        Args:
            documents: One without an id gets a hash of its content. The last of several with one id counts. A
                document that is longer than a passage becomes passages.
            yield_to_waiters: Is called before each step of embedding, so that others can embed too.

        Raises:
            RequestError: the collection would hold too many passages, the passages too much metadata, or an id is
                that of a passage of another document.
        """
        copies = [stored_copy(document) for document in documents]
        if self._external is not None:
            check_reserved(copies)
        ids = tuple(str(document.id) for document in copies)
        passages = split_documents(copies, self._size, self._max_documents, yield_to_waiters)
        size = sum(len(passages[str(each.id)]) * metadata_size(each.metadata) for each in copies)
        if size > _MAX_COPIES:
            raise RequestError(
                f"the metadata of the documents would be stored with each of their passages, {size} characters, at "
                f"most {_MAX_COPIES} are allowed; shorten the metadata, or send fewer or shorter documents",
                param="documents",
                code="request_too_large",
            )
        entries: dict[str, IndexEntry] = {}
        for document_entries in passages.values():
            check_ids(entries, document_entries)
            entries |= document_entries
        prepared: dict[str, bytes] = {}
        result = None
        try:
            while result is None:
                store = self._current()
                missing = store.missing(entries, prepared)
                for start in range(0, len(missing), _TEXTS_PER_STEP):
                    yield_to_waiters()
                    prepared |= store.prepare(missing[start : start + _TEXTS_PER_STEP], entries)
                with self._transaction() as (file, current):
                    # Else another writer changed them meanwhile, or the collection was created again.
                    if current is store and not store.missing(entries, prepared):
                        result = self._write(file, store, passages, prepared, ids)
                if current is not store:
                    self._settle(prepared)
                    prepared.clear()
            self._current()
        finally:
            self._settle(prepared)
        return result

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents by id, and return how many there were, when that is on the disk.

        A document can also be deleted on a full disk: its pages are then freed without being erased.
        """
        try:
            count = self._delete(ids)
        except RequestError as error:
            if error.code != "not_stored":
                raise
            count = self._delete(ids, erase=False)
        self._settle({})
        return count

    def erase(self, facts: Mapping[str, Any]) -> None:
        """Delete the copies of passages in an external store, before the folder of the collection is deleted.

        Args:
            facts: Those of its file; none if that is damaged.
        """
        name = facts.get("store")
        if self._external is not None and (not facts or name == self._external.identity):
            store = self._store
            known = store.copies_of(store.table.ids()) if isinstance(store, ExternalPassages) else []
            self._external.erase(self._scope(existing_file(self.folder)), [*known, *facts.get("stale", ())])
        elif name is not None:
            raise RequestError(
                f"collection {str(self.folder)!r} has passages in the store {name}; set "
                "RAG_POSFIX_SERVICE_COLLECTION_STORE as it was to delete them",
                code="not_stored",
            )

    def _delete(self, ids: Sequence[str], *, erase: bool = True) -> int:
        with self._transaction(erase=erase) as (file, store):
            stored = {name: rows for name in ids if (rows := self._rows_of(store, name))}
            if stored:
                names = [row for rows in stored.values() for row in rows]
                file.remove(names)
                facts = self._without(file.facts(), store, names)
                documents = facts.get("documents", len(store.table)) - len(stored)
                file.set_facts({**facts, "count": len(store.table) - len(names), "documents": documents})
        self._current()
        return len(stored)

    def _rows_of(self, store: Passages, document_id: str) -> list[str]:
        """Return the ids under which a document is stored: its own, or those of its passages."""
        with self._lock:
            if self._passages_of != (store, store.table.revision):
                self._passages = {}
                for passage in store.table.entries.values():
                    if passage.files:
                        self._passages.setdefault(passage.files[0], []).append(str(passage.document.id))
                self._passages_of = (store, store.table.revision)
            if document_id in self._passages:
                return self._passages[document_id]
            entry = store.table.entry_of(document_id)
            return [] if entry is None or entry.files else [document_id]

    def _write(
        self,
        file: DocumentFile,
        store: Passages,
        passages: Mapping[str, dict[str, IndexEntry]],
        prepared: Mapping[str, bytes],
        ids: tuple[str, ...],
    ) -> PutResult:
        table = store.table
        changed: dict[str, IndexEntry] = {}
        removed: list[str] = []
        added = replaced = 0
        for document_id, entries in passages.items():
            old = self._rows_of(store, document_id)
            check_ids({name: entry for name in entries if (entry := table.entry_of(name))}, entries)
            new = {name: entry for name, entry in entries.items() if table.entry_of(name) != entry}
            stale = [name for name in old if name not in entries]
            changed |= new
            removed += stale
            added += not old
            replaced += bool(old and (new or stale))
        facts = file.facts()
        count = len(table) + sum(table.entry_of(name) is None for name in changed) - len(removed)
        documents = facts.get("documents", len(table)) + added
        if count > self._max_documents:
            raise RequestError(
                f"the collection has {len(table)} passages and would have {count}, at most {self._max_documents} are "
                "allowed; delete some documents, or use another collection",
                param="documents",
                code="request_too_large",
            )
        if changed or removed:
            facts = self._without(facts, store, [*changed, *removed])
            file.remove([*changed, *removed])
            file.insert(
                (key, entry, store.row_bytes(entry, prepared))
                for key, entry in enumerate(changed.values(), start=facts["next_key"])
            )
            next_key = facts["next_key"] + len(changed)
            file.set_facts({**facts, "count": count, "documents": documents, "next_key": next_key})
        split = {document_id: len(entries) for document_id, entries in passages.items() if len(entries) > 1}
        unchanged = len(passages) - added - replaced
        return PutResult(ids, added, replaced, unchanged, documents, count, split)

    @contextmanager
    def _transaction(self, *, erase: bool = True) -> Iterator[tuple[DocumentFile, Passages]]:
        """Write alone, on a separate connection: readers in this process do not wait for its lock."""
        path = existing_file(self.folder)
        with self._failures.watch("write", self.folder), storage_errors(self.folder):
            file = DocumentFile(path, wait_seconds=WAIT_SECONDS)
            try:
                with file.transaction(erase=erase):
                    store = self._current()
                    if self._file is None or self._file.path != path:
                        raise OverloadedError("the collection was created again meanwhile; try again later")
                    yield file, store
            finally:
                file.close()

    def _current(self) -> Passages:
        """Return the store with all committed changes."""
        with self._lock, self._failures.watch("read", self.folder), storage_errors(self.folder, "read"):
            path = existing_file(self.folder)  # has another name after the collection was created again
            if self._file is None or self._file.path != path:
                file = DocumentFile(path)
                facts = file.facts()
                embedding, store_name = facts["embedding"], self._external and self._external.identity
                if facts.get("store") != store_name:
                    raise RetrievalError(
                        f"collection {str(self.folder)!r} is in the store {facts.get('store')}, not in {store_name} "
                        "(None is the service); set RAG_POSFIX_SERVICE_COLLECTION_STORE as it was, or create it again"
                    )
                if embedding != embedding_identity(self._embeddings):
                    raise RetrievalError(
                        f"collection {str(self.folder)!r} was made with embedding model {embedding!r}; serve that "
                        "model, or create the collection again"
                    )
                self._file, self._version, self._last_key = file, None, -1
                if self._external is None:
                    self._store = EmbeddedPassages(self._embeddings, self._removed)
                else:
                    self._store = ExternalPassages(self._external, self._scope(path), self._removed)
            version = self._file.data_version()
            if version != self._version:
                self._read_changes(self._file, self._store)
                self._version = version
            return self._store

    def _scope(self, path: Path) -> str:
        """Return the name of the collection in an external store: no two collections ever have the same."""
        return f"{self.folder.parent.name}/{self.folder.name}/{path.stem}"

    def _without(self, facts: dict[str, Any], store: Passages, names: list[str]) -> dict[str, Any]:
        """Return the facts after passages were deleted or replaced: an external store still has them then."""
        if not isinstance(store, ExternalPassages):
            return facts
        return {**facts, "stale": [*facts.get("stale", ()), *store.copies_of(names)]}

    def _settle(self, prepared: Mapping[str, bytes]) -> None:
        """Delete from an external store what no passage refers to after a change; repeat what failed before."""
        if self._external is None:
            return
        try:
            with self._transaction() as (file, store):
                facts = file.facts()
                names = cast("ExternalPassages", store).names
                stale = [*facts.get("stale", ()), *(copy for copy in sent_copies(prepared) if copy not in names)]
                failure = self._external.try_delete(stale)
                if stale or failure:
                    file.set_facts({**facts, "stale": stale if failure else []})
        except RequestError as error:
            if error.code != "not_found":
                raise  # else it was deleted meanwhile
            failure = self._external.try_delete(sent_copies(prepared))
        if failure is not None:
            raise failure

    def _read_changes(self, file: DocumentFile, store: Passages) -> None:
        table = store.table
        with file.snapshot():
            count, rows = file.facts()["count"], file.rows(self._last_key)
            while batch := list(islice(rows, _ROWS_PER_STEP)):
                store.put_rows(batch)
                self._last_key = batch[-1][0]
            if len(table) > count:
                stored = set(file.ids())
                store.delete([name for name in table.ids() if name not in stored])
            if len(table) != count:
                raise RetrievalError(f"{str(file.path)!r} is damaged: it has {len(table)} documents, not {count}")


def metadata_size(metadata: Mapping[str, Any]) -> int:
    """Return the characters of metadata as JSON."""
    return len(json.dumps(metadata, ensure_ascii=False, default=str))
