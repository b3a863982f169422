"""Documents and their vectors under the same keys: put in, taken out, and the nearest found.

Scores are computed per document, rounded to what floating point can tell apart, and ties are broken by id. Knows
nothing of embedding models or folders.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.index.documents import DocumentTable, Record
from rag_posfix.retrieval.index.filters import MetadataFilter
from rag_posfix.retrieval.index.vectors import IndexKind, VectorIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DocumentVectors"]

# The vector of one text differs by about 1e-7 with the batch that it was embedded in.
_SCORE_DECIMALS = 6


class DocumentVectors:
    """A table of documents and an index of their vectors that change together. Safe for use by several threads.

    Args:
        kind: As for ``VectorIndex``.
        table: The documents, if there are any yet.
        vectors: Their vectors, under the keys of the table.
    """

    def __init__(
        self, kind: IndexKind = "auto", table: DocumentTable | None = None, vectors: VectorIndex | None = None
    ) -> None:
        self.table = table if table is not None else DocumentTable()
        self.lock = threading.RLock()
        self._kind: IndexKind = kind
        self._vectors = vectors

    def put(self, records: Mapping[str, Record], rows: NDArray[np.float32]) -> list[Document]:
        """Add documents by id, in the place of those with their ids, and return the ones that were replaced.

        Args:
            records: What is added; owned by the table from then on.
            rows: A vector of length one for each.

        Raises:
            ConfigError: the documents are mapped from a file and cannot be changed.
            RetrievalError: the vectors are of another dimension than those before.
        """
        import numpy as np

        with self.lock:
            self.table.check_changeable()
            vectors = self._of_dimension(rows.shape[1])
            gone = self.remove([name for name in records if self.table.key_of(name) is not None])
            # Vectors first: a document that a reader finds in the table has its vector.
            first = self.table.next_key
            vectors.add(np.arange(first, first + len(records), dtype=np.int64), rows)
            self.table.put(records.values())
            return gone

    def remove(self, names: Sequence[str]) -> list[Document]:
        """Take out documents by id, each of which is in, and return them.

        Args:
            names: Their ids.

        Raises:
            ConfigError: the documents are mapped from a file and cannot be changed.
        """
        import numpy as np

        with self.lock:
            self.table.check_changeable()
            if not names or self._vectors is None:
                return []
            keys, gone = self.table.remove(names)
            self._vectors.remove(np.sort(np.asarray(keys, dtype=np.int64)))
            return gone

    def rows_of(self, names: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of documents that are in, one row per id.

        Args:
            names: Their ids.
        """
        import numpy as np

        with self.lock:
            keys = np.asarray([self.table.key_of(name) for name in names], dtype=np.int64)
            if self._vectors is None or not len(keys):
                return np.empty((0, 1), dtype=np.float32)
            return self._vectors.rows(keys)

    def nearest(
        self, query: NDArray[np.float32], k: int, chosen: MetadataFilter | None
    ) -> list[tuple[Document, float]]:
        """Return the ``k`` nearest documents, as they are kept, with their cosine, best first and ties by id.

        Args:
            query: One row of length one.
            k: At least 1.
            chosen: A checked filter; the nearest of what it lets through.

        Raises:
            RetrievalError: the question's vector is of another dimension than those of the documents.
        """
        with self.lock:
            if not len(self.table):
                return []
            vectors = self._of_dimension(query.shape[1])
            keys = vectors.candidates(query, k, None if chosen is None else self.table.matching(chosen))
            rows = vectors.rows(keys).astype("float64")
            # Row by row, not as a matrix product: that sums in an order that depends on where a row lies.
            scores = (rows * query.astype("float64")).sum(axis=1).round(_SCORE_DECIMALS).clip(-1.0, 1.0)
            records = self.table.records
            found = [(records[int(key)].document, float(score)) for key, score in zip(keys, scores, strict=True)]
            found.sort(key=lambda pair: (-pair[1], str(pair[0].id)))
            return found[:k]

    def compact(self) -> None:
        """Forget the vectors of documents that were taken out, where a graph still holds them.

        Raises:
            ConfigError: the documents are mapped from a file and cannot be changed.
        """
        with self.lock:
            self.table.check_changeable()
            if self._vectors is not None:
                self._vectors.rebuild()

    def stored(self, dimension: int) -> Any:
        """Return what faiss keeps, an empty index of ``dimension`` where no document was ever added."""
        with self.lock:
            return self._of_dimension(dimension).stored

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None where no document was ever added."""
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
