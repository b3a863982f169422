"""Documents and their vectors under the same keys: add, remove, and nearest-neighbour search.

Scores are computed per document and rounded to the precision of the embeddings; ties are broken by id. Knows nothing
of embedding models or folders.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry
from rag_posfix.retrieval.index.filters import MetadataFilter
from rag_posfix.retrieval.index.vector_index import IndexKind, VectorIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The vector of one text differs by about 1e-7 with the batch that it was embedded in.
_SCORE_DECIMALS = 6


class DocumentVectors:
    """A document table and a vector index that change together. Safe for use by several threads.

    Args:
        kind: As for ``VectorIndex``.
        vectors: Their vectors, under the keys of the table.
    """

    def __init__(
        self, kind: IndexKind = "auto", table: DocumentTable | None = None, vectors: VectorIndex | None = None
    ) -> None:
        self.table = table if table is not None else DocumentTable()
        self.lock = threading.RLock()
        self._kind: IndexKind = kind
        self._vectors = vectors

    def put(self, entries: Mapping[str, IndexEntry], rows: NDArray[np.float32]) -> list[Document]:
        """Add documents by id, replacing those with the same ids, and return the replaced documents.

        Args:
            entries: The documents; the table owns them from then on.
            rows: A vector of length one for each.

        Raises:
            ConfigError: the documents are memory-mapped and cannot be changed.
            RetrievalError: the vectors are of another dimension than those before.
        """
        import numpy as np

        with self.lock:
            self.table.check_mutable()
            vectors = self._of_dimension(rows.shape[1])
            replaced = self.remove([name for name in entries if self.table.key_of(name) is not None])
            # Vectors first, so that every document that a concurrent reader finds in the table has its vector.
            first = self.table.next_key
            vectors.add(np.arange(first, first + len(entries), dtype=np.int64), rows)
            self.table.add(entries.values())
            return replaced

    def remove(self, ids: Sequence[str]) -> list[Document]:
        """Remove documents by id, each of which is in the table, and return them.

        Raises:
            ConfigError: the documents are memory-mapped and cannot be changed.
        """
        import numpy as np

        with self.lock:
            self.table.check_mutable()
            if not ids or self._vectors is None:
                return []
            keys, removed = self.table.remove(ids)
            self._vectors.remove(np.sort(np.asarray(keys, dtype=np.int64)))
            return removed

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of documents that are in the table, one row per id."""
        import numpy as np

        with self.lock:
            keys = np.asarray([self.table.key_of(name) for name in ids], dtype=np.int64)
            if self._vectors is None or not len(keys):
                return np.empty((0, 1), dtype=np.float32)
            return self._vectors.rows(keys)

    def nearest(
        self, query: NDArray[np.float32], k: int, metadata_filter: MetadataFilter | None
    ) -> list[tuple[Document, float]]:
        """Return the ``k`` nearest documents, not copied, with their cosine, best first and ties by id.

        Args:
            query: One row of length one.
            k: At least 1.
            metadata_filter: A checked filter: only matching documents are returned.

        Raises:
            RetrievalError: the question's vector is of another dimension than those of the documents.
        """
        with self.lock:
            if not len(self.table):
                return []
            vectors = self._of_dimension(query.shape[1])
            allowed = None if metadata_filter is None else self.table.matching(metadata_filter)
            keys = vectors.candidates(query, k, allowed)
            rows = vectors.rows(keys).astype("float64")
            # Row by row: a matrix product would sum in an order that depends on the row's position.
            scores = (rows * query.astype("float64")).sum(axis=1).round(_SCORE_DECIMALS).clip(-1.0, 1.0)
            entries = self.table.entries
            found = [(entries[int(key)].document, float(score)) for key, score in zip(keys, scores, strict=True)]
            found.sort(key=lambda pair: (-pair[1], str(pair[0].id)))
            return found[:k]

    def compact(self) -> None:
        """Drop the vectors of removed documents that a graph still holds.

        Raises:
            ConfigError: the documents are memory-mapped and cannot be changed.
        """
        with self.lock:
            self.table.check_mutable()
            if self._vectors is not None:
                self._vectors.rebuild()

    def stored(self, dimension: int) -> Any:
        """Return the faiss index; an empty one of ``dimension`` if no document was ever added."""
        with self.lock:
            return self._of_dimension(dimension).stored

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None if no document was ever added."""
        return None if self._vectors is None else self._vectors.dimension

    def _of_dimension(self, dimension: int) -> VectorIndex:
        if self._vectors is None:
            self._vectors = VectorIndex(dimension, self._kind)
        if dimension != self._vectors.dimension:
            raise RetrievalError(
                f"the embedding model returned vectors of dimension {dimension}, the index holds "
                f"{self._vectors.dimension}; use the model that the index was built with"
            )
        return self._vectors
