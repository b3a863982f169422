"""A langchain vector store on faiss: exact search by cosine, kept on disk as a folder.

The result does not depend on the order in which documents were added: scores are computed per document, rounded
to what floating point can tell apart, and ties are broken by id. Knows nothing of questions, ranks or relevance
beyond the cosine.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from rag_posfix.errors import ConfigError, RetrievalError, missing_extra
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.index_files import IndexContents, IndexManifest, read_index, write_index
from rag_posfix.retrieval.records import clean_json, document_id
from rag_posfix.retrieval.vectors import cosine_relevance, unit_rows
from rag_posfix.text import titled_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FaissVectorStore"]

# The vector of one text differs by about 1e-7 with the batch that it was embedded in.
_SCORE_DECIMALS = 6
_TIE_WINDOW = 1e-5


class FaissVectorStore(VectorStore):
    """Documents found by the cosine of their vector with the question's.

    Documents are copied on the way in and on the way out. Adding a document under an id that exists replaces it;
    a document without an id gets one made from its text and metadata. All methods may be called from any thread.

    Args:
        embeddings: Any langchain embedding model; its vectors need not have length one.

    Attributes:
        on_delete: Called with documents that were deleted or replaced, so that what was derived from them can go too.

    Raises:
        ConfigError: faiss is not installed.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        _import_faiss()
        self._embeddings = embeddings
        self._lock = threading.RLock()
        self._vectors: Any = None
        self._documents: dict[int, Document] = {}
        self._keys: dict[str, int] = {}
        self._next_key = 0
        self.on_delete: Callable[[Sequence[Document]], None] | None = None

    @property
    def embeddings(self) -> Embeddings:
        """The embedding model."""
        return self._embeddings

    def __len__(self) -> int:
        return len(self._documents)

    def add_documents(self, documents: list[Document], *, ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Add documents, replacing those whose id is known, and return their ids.

        Args:
            documents: What to add. Of two with one id the later stays.
            ids: Take precedence over the ids of the documents; None entries leave them in force.
            **kwargs: Accepted for langchain's indexing helpers (``batch_size``) and not used.

        Raises:
            ConfigError: ``ids`` and ``documents`` differ in length.
            RetrievalError: the embedding model returned unusable vectors.
        """
        if ids is not None and len(ids) != len(documents):
            raise ConfigError(f"{len(ids)} ids for {len(documents)} documents; pass one id per document")
        added: dict[str, Document] = {}
        names: list[str] = []
        for position, document in enumerate(documents):
            owned = _owned(document, ids[position] if ids else None)
            names.append(str(owned.id))
            added[str(owned.id)] = owned
        if added:
            rows = self._embed([titled_text(d.metadata.get("title"), d.page_content) for d in added.values()])
            with self._lock:
                gone = self._replace(added, rows)
            self._tell_deleted(gone)
        return names

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id, all of them if ``ids`` is None; an id that is not known is no error.

        Args:
            ids: Which documents.
            **kwargs: Accepted for langchain and not used.
        """
        with self._lock:
            names = list(self._keys) if ids is None else [name for name in dict.fromkeys(ids) if name in self._keys]
            gone = self._forget(names) if names else []
        self._tell_deleted(gone)
        return True

    def documents(self) -> list[Document]:
        """Return copies of all documents, in the order in which they were added."""
        with self._lock:
            return [_copy(document) for document in self._documents.values()]

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return copies of the documents with these ids, in this order; unknown ids are left out.

        Args:
            ids: Which documents.
        """
        with self._lock:
            return [_copy(self._documents[self._keys[name]]) for name in ids if name in self._keys]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the ``k`` documents nearest to ``query``, best first.

        Args:
            query: Any text.
            k: How many at most.
            **kwargs: None is supported; any raises ConfigError.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """Return the ``k`` documents nearest to ``query`` with their cosine in [-1, 1], best first.

        Args:
            query: Any text.
            k: How many at most.
            **kwargs: None is supported; any raises ConfigError.

        Raises:
            ConfigError: ``k`` is below 1, or an option is not supported.
            RetrievalError: the embedding model does not fit the index.
        """
        _check_search(k, kwargs)
        if not self._documents:
            return []
        return self._nearest(unit_rows([self._embeddings.embed_query(query)]), k)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the ``k`` documents nearest to a vector, best first.

        Args:
            embedding: Need not have length one.
            k: How many at most.
            **kwargs: None is supported; any raises ConfigError.
        """
        _check_search(k, kwargs)
        return [document for document, _ in self._nearest(unit_rows([embedding]), k)]

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> FaissVectorStore:
        """Return a new store of ``texts``.

        Args:
            texts: What to add.
            embedding: The embedding model.
            metadatas: One per text.
            ids: One per text.
            **kwargs: Accepted for langchain and not used.
        """
        store = cls(embedding)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def save(self, folder: str | Path) -> IndexManifest:
        """Write the store to ``folder``, replacing an index that is there in one step.

        Args:
            folder: New, empty, or an index already.

        Raises:
            RetrievalError: the folder holds something else, or writing failed.
        """
        with self._lock:
            if self._vectors is None:
                self._vectors = _empty_index(len(self._embeddings.embed_query("dimension")))
            contents = IndexContents(self._vectors, self._documents, embedding_identity(self._embeddings))
            return write_index(Path(folder), contents)

    @classmethod
    def load(cls, folder: str | Path, embeddings: Embeddings) -> FaissVectorStore:
        """Return the store that was saved to ``folder``.

        Args:
            folder: What ``save`` wrote.
            embeddings: The model that the index was built with.

        Raises:
            RetrievalError: the index is missing, damaged, foreign, or was built with another model.
        """
        store = cls(embeddings)
        contents = read_index(Path(folder), embedding_identity(embeddings))
        store._vectors, store._documents = contents.vectors, contents.documents
        store._keys = {str(document.id): key for key, document in contents.documents.items()}
        store._next_key = max(contents.documents, default=-1) + 1
        return store

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return cosine_relevance

    def _embed(self, texts: list[str]) -> NDArray[np.float32]:
        """Embed each distinct text once: equal texts then tie exactly."""
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        vectors = self._embeddings.embed_documents(list(rows))
        if len(vectors) != len(rows):
            raise RetrievalError(f"the embedding model returned {len(vectors)} vectors for {len(rows)} texts")
        return unit_rows(vectors)[[rows[text] for text in texts]]

    def _tell_deleted(self, gone: Sequence[Document]) -> None:
        if gone and self.on_delete is not None:
            self.on_delete(gone)

    def _replace(self, added: dict[str, Document], rows: NDArray[np.float32]) -> list[Document]:
        import numpy as np

        if self._vectors is None:
            self._vectors = _empty_index(rows.shape[1])
        self._check_dimension(rows)
        gone = self._forget([name for name in added if name in self._keys])
        keys = range(self._next_key, self._next_key + len(added))
        self._vectors.add_with_ids(rows, np.fromiter(keys, dtype=np.int64))
        self._next_key = keys.stop
        self._keys.update(zip(added, keys, strict=True))
        self._documents.update(zip(keys, added.values(), strict=True))
        return gone

    def _forget(self, names: list[str]) -> list[Document]:
        import numpy as np

        keys = [self._keys.pop(name) for name in names]
        gone = [self._documents.pop(key) for key in keys]
        self._vectors.remove_ids(np.asarray(keys, dtype=np.int64))
        return gone

    def _nearest(self, query: NDArray[np.float32], k: int) -> list[tuple[Document, float]]:
        with self._lock:
            if not self._documents:
                return []
            self._check_dimension(query)
            keys = self._candidates(query, k)
            rows = self._vectors.reconstruct_batch(keys).astype("float64")
            # Row by row, not as a matrix product: that sums in an order that depends on where a row lies.
            scores = (rows * query.astype("float64")).sum(axis=1).round(_SCORE_DECIMALS).clip(-1.0, 1.0)
            found = [(self._documents[int(key)], float(score)) for key, score in zip(keys, scores, strict=True)]
            found.sort(key=lambda pair: (-pair[1], str(pair[0].id)))
            return [(_copy(document), score) for document, score in found[:k]]

    def _candidates(self, query: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Return the keys of the best ``k`` and of everything that ties with the last of them."""
        count = len(self._documents)
        width = min(count, k + 16)
        while True:
            scores, keys = self._vectors.search(query, width)
            if width == count or scores[0, width - 1] < scores[0, k - 1] - _TIE_WINDOW:
                nearest: NDArray[np.int64] = keys[0]
                return nearest
            width = min(count, width * 4)

    def _check_dimension(self, rows: NDArray[np.float32]) -> None:
        if rows.shape[1] != self._vectors.d:
            raise RetrievalError(
                f"the embedding model returned vectors of dimension {rows.shape[1]}, the index holds "
                f"{self._vectors.d}; use the model that the index was built with"
            )


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise missing_extra("faiss", "local") from error
    return faiss


def _empty_index(dimension: int) -> Any:
    faiss = _import_faiss()
    return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))


def _owned(document: Document, name: str | None) -> Document:
    owned = _copy(document)
    owned.page_content = clean_json(owned.page_content)
    owned.metadata = clean_json(owned.metadata)
    owned.id = name or owned.id
    owned.id = document_id(owned)
    return owned


def _copy(document: Document) -> Document:
    return Document(id=document.id, page_content=document.page_content, metadata=copy.deepcopy(document.metadata))


def _check_search(k: int, options: dict[str, Any]) -> None:
    if not isinstance(k, int) or k < 1:
        raise ConfigError(f"k={k!r} must be an integer >= 1")
    if options:
        raise ConfigError(f"search options not supported by this store: {', '.join(sorted(options))}; only k is")
