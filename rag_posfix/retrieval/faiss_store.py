"""A langchain vector store on faiss: search by cosine, saved as a folder.

The result of an exact search does not depend on the order in which documents were added. In a graph (see
``index.vector_index``) the returned documents may depend on it; their scores do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from rag_posfix.checked import check_type, checked_list
from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.parameters import shown
from rag_posfix.retrieval.base import check_count, cosine_relevance, packaged_similarity
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.index.documents import (
    DocumentTable,
    IndexEntry,
    MetadataFilter,
    check_filter,
    checked_documents,
    deep_copy,
    searchable_text,
    stored_copy,
)
from rag_posfix.retrieval.index.file_formats import (
    BM25Index,
    DocumentVectors,
    IndexKind,
    VectorIndex,
    check_kind,
    import_faiss,
    unit_rows,
)
from rag_posfix.retrieval.index.storage import IndexContents, IndexManifest, read_index, read_manifest, write_index
from rag_posfix.retrieval.ingest.ingest import Paths, read_documents
from rag_posfix.retrieval.ingest.passages import PassageSize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["DeleteListener", "FaissVectorStore"]

DeleteListener: TypeAlias = Callable[[Sequence[Document]], None]
"""Is called with documents that were deleted from a store or replaced in it."""


class FaissVectorStore(VectorStore):
    """Documents found by the cosine of their vector with the question's.

    Documents are copied when they are added and when they are returned. Adding a document under an id that exists
    replaces it; a document without an id gets a hash of its text and metadata. Searches take an option ``filter`` (see
    ``index.documents.MetadataFilter``) and find the nearest of the matching documents; they raise ConfigError for any
    other option or a number out of range, and RetrievalError if the embedding model does not fit the index. All
    methods may be called from any thread.

    Args:
        embeddings: Any langchain embedding model; its vectors need not have length one.
        kind: ``flat`` compares with every vector; ``hnsw`` searches a graph, which is approximate and fast among
            millions; ``auto`` is flat below 100,000 documents. See ``index.vector_index.VectorIndex``.
        contents: The initial documents and vectors; an empty store if None.

    Raises:
        ConfigError: faiss is not installed, or ``kind`` is none of the three.
    """

    evaluates_filters = True
    """Searches take a filter in the language of ``contracts.filters``."""

    def __init__(
        self, embeddings: Embeddings, *, kind: IndexKind = "auto", contents: DocumentVectors | None = None
    ) -> None:
        import_faiss()
        check_kind(kind)
        for method in ("embed_documents", "embed_query"):
            if not callable(getattr(embeddings, method, None)):
                raise ConfigError(f"embeddings={shown(embeddings)} must be a langchain embedding model")
        self._embeddings = embeddings
        self._contents = DocumentVectors(kind) if contents is None else contents
        self._delete_listeners: list[DeleteListener] = []
        self._calibrated: SimilarityRange | None = None

    @property
    def embeddings(self) -> Embeddings:
        """The embedding model."""
        return self._embeddings

    @property
    def similarity(self) -> SimilarityRange | None:
        """Between which similarities the judge decides: calibrated, or that of the packaged model, or None."""
        return self._calibrated or packaged_similarity(self._embeddings)

    @property
    def table(self) -> DocumentTable:
        """The documents, for reading; changes go through the store."""
        return self._contents.table

    def __len__(self) -> int:
        return len(self.table)

    def add_delete_listener(self, listener: DeleteListener) -> None:
        """Call ``listener`` with documents after they were deleted or replaced.

        A listener drops data that was derived from the documents, such as cached answers. Listeners are called in the
        order in which they were added, in the thread that changed the store, without its lock, with documents that are
        not copies, and never with none. An exception of a listener reaches that thread; the store stays changed.
        """
        self._delete_listeners.append(listener)

    def add_documents(self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Add documents, replacing stored documents with the same ids, and return their ids.

        Args:
            documents: The documents. The last of several with the same id is kept.
            ids: Ids in place of the documents' ids; None for a document keeps its own.
            **kwargs: Accepted for langchain's indexing helpers (``batch_size``) and not used.

        Raises:
            ConfigError: ``ids`` and ``documents`` differ in length, or the store was loaded with ``mmap``.
            RetrievalError: the embedding model returned unusable vectors.
        """
        documents = checked_documents(documents)
        if ids is not None:
            checked_list("ids", ids, str | None, "strings")
        if ids is not None and len(ids) != len(documents):
            raise ConfigError(f"{len(ids)} ids for {len(documents)} documents; pass one id per document")
        copies = [stored_copy(document, name) for document, name in zip_longest(documents, ids or ())]
        entries = {str(document.id): IndexEntry(document) for document in copies}
        if entries:
            rows = self.embed_texts([searchable_text(entry.document) for entry in entries.values()])
            self._notify(self._contents.put(entries, rows))
        return [str(document.id) for document in copies]

    def add_vectors(self, documents: Sequence[Document], vectors: ArrayLike) -> list[str]:
        """Add documents, each id once, with one row of vectors for each; return their ids.

        Stored documents with these ids are replaced. Vectors are from the store's embedding model and need not have
        length one.

        Raises:
            ConfigError: an id occurs twice, the numbers differ, or the store was loaded with ``mmap``.
            RetrievalError: the vectors are unusable.
        """
        entries = {str(document.id): IndexEntry(document) for document in map(stored_copy, documents)}
        if len(entries) != len(documents):
            raise ConfigError(f"{len(documents)} documents have {len(entries)} different ids; pass each id once")
        self.put_entries(entries, vectors)
        return list(entries)

    def put_entries(self, entries: dict[str, IndexEntry], vectors: ArrayLike) -> None:
        """Add documents by id, with clean text and without copying them, and a vector for each, as ``add_vectors``."""
        if entries:
            rows = unit_rows(vectors)
            if len(rows) != len(entries):
                raise ConfigError(f"{len(rows)} vectors for {len(entries)} documents; pass one vector per document")
            self._notify(self._contents.put(entries, rows))

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id, all of them if ``ids`` is None; an unknown id is no error.

        Raises:
            ConfigError: the store was loaded with ``mmap``.
        """
        with self._contents.lock:
            table = self.table
            stored = table.ids() if ids is None else [n for n in dict.fromkeys(ids) if table.key_of(n) is not None]
            removed = self._contents.remove(stored)
        self._notify(removed)
        return True

    def documents(self) -> list[Document]:
        """Return copies of all documents, in the order in which they were added."""
        with self._contents.lock:
            return [deep_copy(entry.document) for entry in self.table.entries.values()]

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return copies of the documents with these ids, in this order; unknown ids are left out."""
        with self._contents.lock:
            return [deep_copy(entry.document) for entry in map(self.table.entry_of, ids) if entry is not None]

    def vectors_of(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """Return the unit vectors of documents that are in the store, one row per id."""
        return self._contents.rows_of(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the ``k`` documents nearest to ``query``, best first."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """Return the ``k`` documents nearest to ``query`` with their cosine in [-1, 1], best first, ties by id."""
        metadata_filter = _checked_filter(k, kwargs)
        check_type("query", query, str, "text")
        if not len(self):
            return []
        return self._nearest(self._embeddings.embed_query(query), k, metadata_filter)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the ``k`` documents nearest to a vector, which need not have length one, best first."""
        metadata_filter = _checked_filter(k, kwargs)
        return [document for document, _ in self._nearest(embedding, k, metadata_filter)]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return ``k`` of the ``fetch_k`` nearest documents, chosen for relevance and variety.

        Maximal marginal relevance (Carbonell and Goldstein 1998), computed by langchain-core. The first document is
        the nearest. ``lambda_mult`` is the weight of relevance, 0 to 1; the rest is the weight of variety.
        """
        metadata_filter = _checked_filter(k, kwargs)
        check_type("query", query, str, "text")
        if not len(self):
            return []
        return self._varied(self._embeddings.embed_query(query), k, fetch_k, lambda_mult, metadata_filter)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Do what ``max_marginal_relevance_search`` does for a vector, which need not have length one."""
        return self._varied(embedding, k, fetch_k, lambda_mult, _checked_filter(k, kwargs))

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
        """Return a new store of ``texts``, with one of ``metadatas`` and ``ids`` per text."""
        store = cls(embedding, kind=kind)
        texts = checked_list("texts", texts, str, "strings")
        if metadatas is not None and len(checked_list("metadatas", metadatas, dict, "dicts")) != len(texts):
            raise ConfigError(f"{len(metadatas)} metadatas for {len(texts)} texts; pass one per text")
        if ids is not None:
            ids = checked_list("ids", ids, str | None, "strings")
        store.add_texts(texts, metadatas, ids=ids)
        return store

    @classmethod
    def from_files(
        cls,
        paths: Paths,
        embeddings: Embeddings,
        *,
        kind: IndexKind = "auto",
        size: PassageSize | None = None,
        splitter: BaseDocumentTransformer | None = None,
        fields: Iterable[str] = (),
        strict: bool = True,
    ) -> FaissVectorStore:
        """Return a new store with the passages of files and folders, which are read as by ``read_documents``.

        Raises:
            ConfigError: as by ``read_documents``.
            RetrievalError: as by ``read_documents``, or the embedding model returned unusable vectors.
        """
        documents = read_documents(paths, size=size, splitter=splitter, fields=fields, strict=strict)
        store = cls(embeddings, kind=kind)
        store.add_documents(documents)
        return store

    def compact(self) -> None:
        """Drop the vectors of deleted documents that a graph still holds. Cost: that of building the graph.

        Raises:
            ConfigError: the store was loaded with ``mmap``.
        """
        self._contents.compact()

    def save(self, folder: str | Path, *, bm25: BM25Index | None = None) -> IndexManifest:
        """Write the store to a folder that is new, empty or an index, which is replaced atomically.

        Args:
            bm25: Word statistics of the store's documents, in the order of their keys, to be saved with them.

        Raises:
            ConfigError: ``bm25`` is of another number of documents.
            RetrievalError: the folder holds something else, or writing failed.
        """
        with self._contents.lock:
            if bm25 is not None and len(bm25) != len(self):
                raise ConfigError(f"word statistics of {len(bm25)} documents do not fit a store of {len(self)}")
            dimension = self._contents.dimension or len(self._embeddings.embed_query("dimension"))
            identity = embedding_identity(self._embeddings)
            vectors = self._contents.stored(dimension)
            return write_index(
                Path(folder), IndexContents(vectors, self.table.entries, identity, bm25, self._calibrated)
            )

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
            kind: As for a new store. An index of another kind is searched as it is and converted when documents are
                added.
            mmap: Memory-map vectors, graph and documents: the system reads the parts that a search needs, and several
                processes share them in memory. The store cannot be changed, and the folder must not be deleted.
            verify: Compare the files with their checksums, which reads all of them. Without it only names and sizes
                are checked: use this only for files that nobody else can write, because a damaged graph aborts the
                process.

        Raises:
            ConfigError: faiss is not installed, or ``kind`` is none of the three.
            RetrievalError: the index is missing, damaged, of another program or version, or of another model.
        """
        import_faiss()
        check_kind(kind)
        check_type("folder", folder, str | Path, "the path of an index folder")
        read_manifest(Path(folder))  # errors before the embedding model is loaded
        saved = read_index(Path(folder), embedding_identity(embeddings), mmap=mmap, verify=verify)
        vectors = VectorIndex(saved.vectors.d, kind, stored=saved.vectors, removed=saved.removed())
        store = cls(embeddings, kind=kind, contents=DocumentVectors(kind, DocumentTable(saved.entries), vectors))
        store._calibrated = saved.similarity
        return store

    def save_local(self, folder_path: str | Path) -> None:
        """Do what ``save`` does, under the name of langchain's FAISS store."""
        self.save(folder_path)

    @classmethod
    def load_local(
        cls,
        folder_path: str | Path,
        embeddings: Embeddings,
        *,
        allow_dangerous_deserialization: bool = False,
        **options: Any,
    ) -> FaissVectorStore:
        """Do what ``load`` does, under the name of langchain's FAISS store. Folders of that store cannot be read.

        ``allow_dangerous_deserialization`` is accepted and not used: nothing is unpickled.
        """
        return cls.load(folder_path, embeddings, **options)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return cosine_relevance

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors of ``texts``. Equal texts are embedded once, so that their scores are exactly equal.

        Raises:
            RetrievalError: the embedding model returned unusable vectors.
        """
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        vectors = self._embeddings.embed_documents(list(rows))
        if len(vectors) != len(rows):
            raise RetrievalError(f"the embedding model returned {len(vectors)} vectors for {len(rows)} texts")
        return unit_rows(vectors)[[rows[text] for text in texts]]

    def _notify(self, removed: Sequence[Document]) -> None:
        if removed:
            for listener in self._delete_listeners:
                listener(removed)

    def _nearest(
        self, vector: list[float], k: int, metadata_filter: MetadataFilter | None
    ) -> list[tuple[Document, float]]:
        hits = self._contents.nearest(unit_rows([vector]), k, metadata_filter)
        return [(deep_copy(document), score) for document, score in hits]

    def _varied(
        self, vector: list[float], k: int, fetch_k: int, lambda_mult: float, metadata_filter: MetadataFilter | None
    ) -> list[Document]:
        from langchain_core.vectorstores.utils import maximal_marginal_relevance

        check_count("fetch_k", fetch_k)
        check_type("lambda_mult", lambda_mult, int | float, "from 0 (variety) to 1 (relevance)")
        if not 0 <= lambda_mult <= 1:
            raise ConfigError(f"lambda_mult={lambda_mult!r} must be from 0 (variety) to 1 (relevance)")
        documents = [document for document, _ in self._nearest(vector, max(k, fetch_k), metadata_filter)]
        if not documents:
            return []
        question = unit_rows([vector])
        if not question.any():  # it is as near to every document, and has no cosine
            return documents[:k]
        rows = self.vectors_of([str(document.id) for document in documents])
        chosen = maximal_marginal_relevance(question, list(rows), lambda_mult=lambda_mult, k=k)
        return [documents[index] for index in chosen]


def _checked_filter(k: int, options: dict[str, Any]) -> MetadataFilter | None:
    """Check the arguments of a search and return its filter."""
    check_count("k", k)
    unknown = sorted(set(options) - {"filter"})
    if unknown:
        raise ConfigError(f"search options not supported by this store: {', '.join(unknown)}; k and filter are")
    metadata_filter: MetadataFilter | None = options.get("filter")
    if metadata_filter is not None:
        check_filter(metadata_filter)
    return metadata_filter
