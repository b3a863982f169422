"""A langchain vector store on faiss: search by cosine, kept on disk as a folder.

The result of an exact search does not depend on the order in which documents were added; through a graph (see
``vector_index``) the documents that are found may, and their scores still do not. Knows nothing of questions, ranks or
relevance beyond the cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.index.bm25_statistics import BM25Index
from rag_posfix.retrieval.index.document_vectors import DocumentVectors
from rag_posfix.retrieval.index.documents import DocumentTable, Record, searchable_text
from rag_posfix.retrieval.index.filters import MetadataFilter, check_filter
from rag_posfix.retrieval.index.manifest import IndexContents, IndexManifest, write_index
from rag_posfix.retrieval.index.reader import read_index
from rag_posfix.retrieval.index.records import copied, owned_document
from rag_posfix.retrieval.index.vectors import IndexKind, VectorIndex, check_kind, import_faiss
from rag_posfix.retrieval.vectors import cosine_relevance, unit_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["FaissVectorStore"]


class FaissVectorStore(VectorStore):
    """Documents found by the cosine of their vector with the question's.

    Documents are copied on the way in and on the way out. Adding a document under an id that exists replaces it;
    a document without an id gets one made from its text and metadata. All methods may be called from any thread.

    Args:
        embeddings: Any langchain embedding model; its vectors need not have length one.
        kind: ``flat`` compares with every vector; ``hnsw`` walks a graph, which is approximate and quick among
            millions; ``auto`` is flat below 100,000 documents. See ``vector_index.VectorIndex``.

    Attributes:
        on_delete: Called with documents that were deleted or replaced, so that what was derived from them can go too.

    Raises:
        ConfigError: faiss is not installed, or ``kind`` is none of the three.
    """

    def __init__(self, embeddings: Embeddings, *, kind: IndexKind = "auto") -> None:
        import_faiss()
        check_kind(kind)
        self._embeddings = embeddings
        self._held = DocumentVectors(kind)
        self.on_delete: Callable[[Sequence[Document]], None] | None = None

    @property
    def embeddings(self) -> Embeddings:
        """The embedding model."""
        return self._embeddings

    @property
    def table(self) -> DocumentTable:
        """The documents; to be read. Changes go through the store."""
        return self._held.table

    def __len__(self) -> int:
        return len(self._held.table)

    def add_documents(self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Add documents, replacing those whose id is known, and return their ids.

        Args:
            documents: What to add. Of two with one id the later stays.
            ids: Take precedence over the ids of the documents; None entries leave them in force.
            **kwargs: Accepted for langchain's indexing helpers (``batch_size``) and not used.

        Raises:
            ConfigError: ``ids`` and ``documents`` differ in length, or the store was loaded with ``mmap``.
            RetrievalError: the embedding model returned unusable vectors.
        """
        if ids is not None and len(ids) != len(documents):
            raise ConfigError(f"{len(ids)} ids for {len(documents)} documents; pass one id per document")
        added: dict[str, Document] = {}
        names: list[str] = []
        for position, document in enumerate(documents):
            owned = owned_document(document, ids[position] if ids else None)
            names.append(str(owned.id))
            added[str(owned.id)] = owned
        if added:
            rows = self.embed_texts([searchable_text(document) for document in added.values()])
            self._tell_deleted(self._held.put({name: Record(document) for name, document in added.items()}, rows))
        return names

    def add_vectors(self, documents: Sequence[Document], vectors: ArrayLike) -> list[str]:
        """Add documents whose vectors are known, replacing those whose id is known, and return their ids.

        Args:
            documents: What to add, each id once.
            vectors: One row per document, from the store's embedding model; need not have length one.

        Raises:
            ConfigError: an id stands twice, the numbers differ, or the store was loaded with ``mmap``.
            RetrievalError: the vectors are unusable.
        """
        owned = {str(document.id): Record(document) for document in (owned_document(given) for given in documents)}
        if len(owned) != len(documents):
            raise ConfigError(f"{len(documents)} documents have {len(owned)} different ids; pass each id once")
        self.put_records(owned, vectors)
        return list(owned)

    def put_records(self, records: dict[str, Record], vectors: ArrayLike) -> None:
        """Add what ``build_index`` read: records by id, which the store then owns, and their vectors.

        Args:
            records: Documents and the files they are from, with clean text.
            vectors: One row per record.

        Raises:
            ConfigError: the numbers differ, or the store was loaded with ``mmap``.
            RetrievalError: the vectors are unusable.
        """
        if records:
            rows = unit_rows(vectors)
            if len(rows) != len(records):
                raise ConfigError(f"{len(rows)} vectors for {len(records)} documents; pass one vector per document")
            self._tell_deleted(self._held.put(records, rows))

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id, all of them if ``ids`` is None; an id that is not known is no error.

        Args:
            ids: Which documents.
            **kwargs: Accepted for langchain and not used.

        Raises:
            ConfigError: the store was loaded with ``mmap``.
        """
        with self._held.lock:
            table = self.table
            names = table.names() if ids is None else [n for n in dict.fromkeys(ids) if table.key_of(n) is not None]
            gone = self._held.remove(names)
        self._tell_deleted(gone)
        return True

    def documents(self) -> list[Document]:
        """Return copies of all documents, in the order in which they were added."""
        with self._held.lock:
            return [copied(record.document) for record in self.table.records.values()]

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return copies of the documents with these ids, in this order; unknown ids are left out.

        Args:
            ids: Which documents.
        """
        with self._held.lock:
            keys = [key for key in map(self.table.key_of, ids) if key is not None]
            return [copied(self.table.records[key].document) for key in keys]

    def vectors_of(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """Return the unit vectors of documents that are in the store, one row per id.

        Args:
            ids: Which documents, each of them known.
        """
        return self._held.rows_of(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the ``k`` documents nearest to ``query``, best first.

        Args:
            query: Any text.
            k: How many at most.
            **kwargs: ``filter``: see ``filters.MetadataFilter``. Any other raises ConfigError.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """Return the ``k`` documents nearest to ``query`` with their cosine in [-1, 1], best first.

        A filter lets documents through; ``k`` of those are found where there are as many.

        Args:
            query: Any text.
            k: How many at most.
            **kwargs: ``filter``: see ``filters.MetadataFilter``. Any other raises ConfigError.

        Raises:
            ConfigError: ``k`` is below 1, or an option is not supported.
            RetrievalError: the embedding model does not fit the index.
        """
        chosen = _check_search(k, kwargs)
        if not len(self):
            return []
        return self._nearest(self._embeddings.embed_query(query), k, chosen)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the ``k`` documents nearest to a vector, best first.

        Args:
            embedding: Need not have length one.
            k: How many at most.
            **kwargs: ``filter``: see ``filters.MetadataFilter``. Any other raises ConfigError.
        """
        chosen = _check_search(k, kwargs)
        return [document for document, _ in self._nearest(embedding, k, chosen)]

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        kind: IndexKind = "auto",
        **kwargs: Any,
    ) -> FaissVectorStore:
        """Return a new store of ``texts``.

        Args:
            texts: What to add.
            embedding: The embedding model.
            metadatas: One per text.
            ids: One per text.
            kind: As for a new store.
            **kwargs: Accepted for langchain and not used.
        """
        store = cls(embedding, kind=kind)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def compact(self) -> None:
        """Forget the vectors of deleted documents at once, where a graph still holds them; takes as long as building.

        Raises:
            ConfigError: the store was loaded with ``mmap``.
        """
        self._held.compact()

    def save(self, folder: str | Path, *, bm25: BM25Index | None = None) -> IndexManifest:
        """Write the store to ``folder``, replacing an index that is there in one step.

        Args:
            folder: New, empty, or an index already.
            bm25: Word statistics of the store's documents, in the order of their keys, to be kept beside them.

        Raises:
            ConfigError: ``bm25`` is of another number of documents.
            RetrievalError: the folder holds something else, or writing failed.
        """
        with self._held.lock:
            if bm25 is not None and len(bm25) != len(self):
                raise ConfigError(f"word statistics of {len(bm25)} documents do not fit a store of {len(self)}")
            vectors = self._held.stored(self._held.dimension or len(self._embeddings.embed_query("dimension")))
            contents = IndexContents(vectors, self.table.records, embedding_identity(self._embeddings), bm25)
            return write_index(Path(folder), contents)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        embeddings: Embeddings,
        *,
        kind: IndexKind = "auto",
        mmap: bool = False,
        verify: bool = True,
    ) -> FaissVectorStore:
        """Return the store that was saved to ``folder``.

        Args:
            folder: What ``save`` wrote.
            embeddings: The model that the index was built with.
            kind: As for a new store; an index of another kind is searched as it is, and converted when it is added to.
            mmap: Leave vectors, graph and documents on disk and let the system read what a search touches; several
                processes then share one copy in memory. The store cannot be changed, and the folder must stay.
            verify: Compare the files with their checksums, which reads all of them. Without, only names and sizes are
                checked; do that with files that nobody else can write, because a damaged graph ends the process.

        Raises:
            RetrievalError: the index is missing, damaged, foreign, or was built with another model.
        """
        store = cls(embeddings, kind=kind)
        contents = read_index(Path(folder), embedding_identity(embeddings), mmap=mmap, verify=verify)
        vectors = VectorIndex.over(contents.vectors, kind, contents.removed())
        store._held = DocumentVectors(kind, DocumentTable(contents.records), vectors)
        return store

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return cosine_relevance

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors of ``texts``, each distinct one embedded once: equal texts then tie exactly.

        Args:
            texts: What to embed.

        Raises:
            RetrievalError: the embedding model returned unusable vectors.
        """
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        vectors = self._embeddings.embed_documents(list(rows))
        if len(vectors) != len(rows):
            raise RetrievalError(f"the embedding model returned {len(vectors)} vectors for {len(rows)} texts")
        return unit_rows(vectors)[[rows[text] for text in texts]]

    def _tell_deleted(self, gone: Sequence[Document]) -> None:
        if gone and self.on_delete is not None:
            self.on_delete(gone)

    def _nearest(self, vector: list[float], k: int, chosen: MetadataFilter | None) -> list[tuple[Document, float]]:
        return [(copied(document), score) for document, score in self._held.nearest(unit_rows([vector]), k, chosen)]


def _check_search(k: int, options: dict[str, Any]) -> MetadataFilter | None:
    if not isinstance(k, int) or k < 1:
        raise ConfigError(f"k={k!r} must be an integer >= 1")
    unknown = sorted(set(options) - {"filter"})
    if unknown:
        raise ConfigError(f"search options not supported by this store: {', '.join(unknown)}; k and filter are")
    chosen: MetadataFilter | None = options.get("filter")
    if chosen is not None:
        check_filter(chosen)
    return chosen
