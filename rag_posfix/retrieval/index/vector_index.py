"""Vectors of length one under integer keys, exact or in an HNSW graph, and nearest-neighbour search of documents.

The search of vectors returns candidates only; scores are computed per document from their vectors, so that they do not
depend on the kind of index.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, RetrievalError, missing_extra
from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry, MetadataFilter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

logger = logging.getLogger(__name__)

IndexKind: TypeAlias = Literal["auto", "flat", "hnsw"]

GRAPH_FROM: Final = 100_000
"""Number of vectors from which on ``auto`` builds a graph: an exact search of 384 dimensions takes 10 ms there."""

# The graph (Malkov and Yashunin, arXiv 1603.09320): M, efConstruction and efSearch of the paper.
NEIGHBOURS: Final = 16
BUILD_WIDTH: Final = 80
SEARCH_WIDTH: Final = 128

# Removed vectors stay in a graph, because paths lead through them. Above this share, the graph is rebuilt.
_REBUILD_SHARE: Final = 0.25

EXACT_UNTIL: Final = 4096
"""A graph compares all vectors if at most so many are allowed."""

# A graph also compares all vectors if more results than this are wanted, or a smaller share of the vectors is allowed.
_WIDEST_WALK: Final = 1024
_EXACT_SHARE: Final = 0.1

# Scores closer than this may be equal: faiss sums in single precision.
_TIE_WINDOW: Final = 1e-5

# The vector of one text differs by about 1e-7 with the batch that it was embedded in.
_SCORE_DECIMALS: Final = 6


class VectorIndex:
    """Vectors of length one, searched by inner product, which is then the cosine.

    ``flat`` compares the query with every vector. ``hnsw`` searches a graph of near neighbours: a few milliseconds
    among millions of vectors. It may miss a neighbour (most often where many vectors are equal), takes minutes to
    build, and its results depend slightly on the order in which vectors were added. If no more than ``EXACT_UNTIL``
    vectors are allowed, all are compared in either kind. ``auto`` is flat below ``GRAPH_FROM`` vectors; the call that
    reaches this number builds a graph.

    faiss cannot remove a vector from a graph: a removed vector is excluded from results, and the graph is rebuilt when
    more than a quarter of its vectors are removed (``rebuild`` does it at once). Until then the removed vectors are
    still in memory and in saved files.

    Not safe for use by several threads at once.

    Args:
        kind: ``auto``, ``flat`` or ``hnsw``.
        stored: The initial vectors, as faiss read them from a file: an ``IndexIDMap2`` over ``IndexFlatIP`` or
            ``IndexHNSWFlat``, of this dimension. If it is of another kind than ``kind``, the next ``add`` converts it.
        removed: Keys in ``stored`` that must not be found.

    Raises:
        ConfigError: faiss is not installed, or ``kind`` is none of the three.
    """

    def __init__(
        self, dimension: int, kind: IndexKind = "auto", *, stored: Any = None, removed: Collection[int] = ()
    ) -> None:
        check_kind(kind)
        self.kind = kind
        self._removed = set(removed)
        self.stored = _empty(dimension, graph=kind == "hnsw") if stored is None else stored
        """The ``IndexIDMap2`` of faiss; a graph includes removed vectors."""
        self.dimension: int = self.stored.d
        self._keys: NDArray[np.int64] | None = None
        self._not_removed: Any = None

    @property
    def is_graph(self) -> bool:
        """Whether the vectors are stored as a graph."""
        return not isinstance(_inner(self.stored), import_faiss().IndexFlat)

    def __len__(self) -> int:
        return int(self.stored.ntotal) - len(self._removed)

    def add(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Add vectors under keys that are larger than all before."""
        if self.is_graph and self.kind == "flat":  # loaded from a file that holds a graph
            self._build(graph=False)
        elif not self.is_graph and self._wants_graph(len(self) + len(rows)):
            self._build(graph=True)
        self.stored.add_with_ids(rows, keys)
        self._mark_changed()

    def remove(self, keys: NDArray[np.int64]) -> None:
        """Remove vectors, each of which is in the index."""
        if not self.is_graph:
            self.stored.remove_ids(keys)
            self._mark_changed()
            return
        self._mark_changed()
        self._removed.update(keys.tolist())
        if len(self._removed) > _REBUILD_SHARE * self.stored.ntotal:
            self.rebuild()

    def rebuild(self) -> None:
        """Rebuild without removed vectors; ``auto`` becomes flat below half of ``GRAPH_FROM`` vectors."""
        self._build(graph=self._wants_graph(2 * len(self)))

    def rows(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors under ``keys``, in this order."""
        rows: NDArray[np.float32] = self.stored.reconstruct_batch(keys)
        return rows

    def candidates(
        self, query: NDArray[np.float32], k: int, allowed: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the keys of the best ``k`` vectors and of all that may tie with the last of them.

        Only the keys ``allowed`` (ascending; all if None) are returned, at least ``k`` if so many are allowed.
        """
        import numpy as np

        count = len(self) if allowed is None else len(allowed)
        if count == 0:
            return np.empty(0, dtype=np.int64)
        width = min(count, k + 16)
        while True:
            scores, keys = self._search(query, width, allowed, count)
            if width == count or scores[-1] < scores[k - 1] - _TIE_WINDOW:
                return keys
            width = min(count, width * 4)

    def _search(
        self, query: NDArray[np.float32], width: int, allowed: NDArray[np.int64] | None, count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        faiss = import_faiss()
        inner, keys, selector = _inner(self.stored), self._stored_keys(), self._selector(allowed)
        if self.is_graph:
            if width <= _WIDEST_WALK and count > max(EXACT_UNTIL, _EXACT_SHARE * len(keys)):
                params = faiss.SearchParametersHNSW(sel=selector, efSearch=max(SEARCH_WIDTH, width))
                scores, rows = inner.search(query, width, params=params)
                if rows[0, -1] >= 0:
                    return scores[0], keys[rows[0]]
                # The graph search ended before it found enough allowed vectors: compare all of them.
            inner = faiss.downcast_index(inner.storage)  # the vectors of a graph are stored in a flat index
        params = None if selector is None else faiss.SearchParameters(sel=selector)
        scores, rows = inner.search(query, width, params=params)
        return scores[0], keys[rows[0]]

    def _selector(self, allowed: NDArray[np.int64] | None) -> Any:
        """Return the faiss selector of the rows that may be found, or None if all may."""
        import numpy as np

        if allowed is None and not self._removed:
            return None
        keys = self._stored_keys()
        if allowed is None:
            if self._not_removed is None:
                mask = np.ones(len(keys), dtype=bool)
                mask[np.searchsorted(keys, np.fromiter(self._removed, dtype=np.int64))] = False
                self._not_removed = import_faiss().IDSelectorBitmap(np.packbits(mask, bitorder="little"))
            return self._not_removed
        mask = np.zeros(len(keys), dtype=bool)
        contiguous = keys[-1] - keys[0] + 1 == len(keys)  # until a vector is removed; saves the binary search
        mask[allowed - keys[0] if contiguous else np.searchsorted(keys, allowed)] = True
        return import_faiss().IDSelectorBitmap(np.packbits(mask, bitorder="little"))

    def _stored_keys(self) -> NDArray[np.int64]:
        """Return the key of each row, ascending."""
        if self._keys is None:
            self._keys = import_faiss().vector_to_array(self.stored.id_map)
        return self._keys

    def _mark_changed(self) -> None:
        self._keys = self._not_removed = None

    def _wants_graph(self, count: int) -> bool:
        return self.kind == "hnsw" or (self.kind == "auto" and count >= GRAPH_FROM)

    def _build(self, *, graph: bool) -> None:
        import numpy as np

        keys = self._stored_keys()
        if self._removed:
            keys = keys[~np.isin(keys, np.fromiter(self._removed, dtype=np.int64))]
        if graph and len(keys) >= GRAPH_FROM:
            logger.info("building a graph of %s vectors; this takes minutes for each million", len(keys))
        index = _empty(self.dimension, graph=graph)
        if len(keys):
            index.add_with_ids(self.stored.reconstruct_batch(keys), keys)
        self.stored, self._removed = index, set()
        self._mark_changed()


def check_kind(kind: object) -> None:
    """Raise ConfigError for an unknown kind of index."""
    if kind not in get_args(IndexKind):
        raise ConfigError(f"unknown index kind={kind!r}; choose one of {', '.join(get_args(IndexKind))}")


def import_faiss() -> Any:
    """Return faiss, or raise ConfigError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise missing_extra("faiss", "local") from error
    return faiss


def _empty(dimension: int, *, graph: bool) -> Any:
    faiss = import_faiss()
    if not graph:
        return faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
    index = faiss.IndexHNSWFlat(dimension, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD_WIDTH
    return faiss.IndexIDMap2(index)


def _inner(stored: Any) -> Any:
    return import_faiss().downcast_index(stored.index)


def unit_rows(vectors: ArrayLike) -> NDArray[np.float32]:
    """Return ``vectors`` as rows of length one; a zero vector stays zero, so its cosine with any vector is 0.

    Raises:
        RetrievalError: rows differ in length, are empty, or hold a value that is not finite.
    """
    import numpy as np

    try:
        rows = np.asarray(vectors, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RetrievalError(f"the embedding model returned vectors of unequal length ({error})") from error
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise RetrievalError(f"the embedding model returned an array of shape {rows.shape}; need one vector per text")
    if not np.isfinite(rows).all():
        raise RetrievalError("the embedding model returned a value that is not finite; check its weights and dtype")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)


class DocumentVectors:
    """A document table and a vector index under the same keys. Safe for use by several threads.

    Methods of change raise ConfigError if the documents are memory-mapped.
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

        The table owns the entries from then on; ``rows`` has a vector of length one for each.

        Raises:
            RetrievalError: the vectors are of another dimension than the stored vectors.
        """
        import numpy as np

        with self.lock:
            self.table.mutable_entries()
            vectors = self._of_dimension(rows.shape[1])
            replaced = self.remove([name for name in entries if self.table.key_of(name) is not None])
            # Vectors first, so that every document that a concurrent reader finds in the table has its vector.
            first = self.table.next_key
            vectors.add(np.arange(first, first + len(entries), dtype=np.int64), rows)
            self.table.add(entries.values())
            return replaced

    def remove(self, ids: Sequence[str]) -> list[Document]:
        """Remove documents by id, each of which is in the table, and return them."""
        import numpy as np

        with self.lock:
            self.table.mutable_entries()
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

        Raises:
            RetrievalError: the question's vector is of another dimension than the documents' vectors.
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
            hits = [(entries[int(key)].document, float(score)) for key, score in zip(keys, scores, strict=True)]
            hits.sort(key=lambda hit: (-hit[1], str(hit[0].id)))
            return hits[:k]

    def compact(self) -> None:
        """Drop the vectors of removed documents that a graph still holds."""
        with self.lock:
            self.table.mutable_entries()
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
