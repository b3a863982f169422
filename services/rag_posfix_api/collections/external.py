"""Collections that are searched in a vector store which the operator runs.

The store has a copy of each passage: its text, its metadata, its vector, and the name of its collection in the field
``posfix_collection``. The file of the collection decides what is in the collection: a row has the id of the copy of
its passage. A copy that no row refers to is never returned, and an id is never used twice. A change sends new copies,
commits to the file, and deletes the copies that it replaced, so that readers see all of the change or none of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from rag_posfix.contracts.filters import combine_filters, parse_filter
from rag_posfix.contracts.retrieval import first_matching
from rag_posfix.errors import ConfigError, RagPosfixError, RetrievalError
from rag_posfix.retrieval.base import QuestionRetriever
from rag_posfix.retrieval.external_stores import ExternalRetriever, call_client, open_external, store_options
from rag_posfix.retrieval.faiss_store import DeleteListener
from rag_posfix.retrieval.index.document_file import StoredRow
from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry, deep_copy, searchable_text
from rag_posfix_api.http.errors import StorageError

SCOPE: Final = "posfix_collection"
"""The metadata field of a copy that names its collection."""

_ERASED_PER_SEARCH = 1000


class PassageStore:
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
        """Add copies of passages by id, all or none; raise StorageError if the store does not take them."""
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
                return StorageError(f"cannot delete from the vector store {self.identity}; it refused the deletion")
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
        return call_client(work, StorageError, problem, "check that it runs")


def open_passage_store(text: str, embeddings: Embeddings) -> PassageStore:
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
    store = PassageStore(f"{kind}:{options.get('collection') or options.get('index') or ''}", retriever, vectors)
    store.probe()
    return store


class ExternalPassages:
    """The passages of a collection, whose vectors are in a ``PassageStore``. Rows store the ids of their copies.

    Attributes:
        names: The ids of passages by the ids of their copies.
    """

    def __init__(self, store: PassageStore, scope: str, removed: DeleteListener) -> None:
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
