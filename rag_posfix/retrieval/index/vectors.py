"""Unit vectors under integer keys, and the nearest of them: exact, or through a graph where there are many.

Knows nothing of documents. Scores found here only choose candidates; whoever asks computes the ones that count from
``rows``, so that they do not depend on how a candidate was found.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from rag_posfix.errors import ConfigError, missing_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BUILD_WIDTH",
    "GRAPH_FROM",
    "NEIGHBOURS",
    "SEARCH_WIDTH",
    "IndexKind",
    "VectorIndex",
    "check_kind",
    "import_faiss",
]

logger = logging.getLogger(__name__)

IndexKind: TypeAlias = Literal["auto", "flat", "hnsw"]

GRAPH_FROM: Final = 100_000
"""Vectors from which on ``auto`` builds a graph: there an exact search takes some 10 ms for 384 dimensions."""

# The graph (Malkov and Yashunin, arXiv 1603.09320): M, efConstruction and efSearch of the paper.
NEIGHBOURS: Final = 16
BUILD_WIDTH: Final = 80
SEARCH_WIDTH: Final = 128

# Removed vectors stay in a graph as stepping stones; past this share of it, it is built anew without them.
_REBUILD_SHARE: Final = 0.25

# Where this many results are wanted, or this few vectors or this small a share of them is allowed, all are compared.
_WIDEST_WALK: Final = 1024
_EXACT_UNTIL: Final = 4096
_EXACT_SHARE: Final = 0.1

# Two scores that are nearer than this may be equal: faiss sums in single precision.
_TIE_WINDOW: Final = 1e-5


class VectorIndex:
    """Vectors of length one, searched by inner product, which is then the cosine.

    ``flat`` compares the question with every vector. ``hnsw`` walks a graph of near neighbours: a few milliseconds
    among millions, at the price of a neighbour missed now and then (most of all where many vectors are equal), of
    minutes to build, and of results that depend a little on the order in which vectors came. Up to 4096 vectors are
    compared with all the same. ``auto`` is flat below ``GRAPH_FROM`` vectors and a graph from there on, built by the
    call that gets there. faiss cannot take a vector out of a graph: a removed one is left out of results, and the
    graph is built anew when a quarter of it is removed (``rebuild`` does it at once). Until then its numbers are still
    in memory and in what is saved.

    Not safe for use by several threads at once.

    Args:
        dimension: Length of a vector.
        kind: ``auto``, ``flat`` or ``hnsw``.

    Raises:
        ConfigError: faiss is not installed, or ``kind`` is none of the three.
    """

    def __init__(self, dimension: int, kind: IndexKind = "auto") -> None:
        check_kind(kind)
        self.kind = kind
        self._removed: set[int] = set()
        self._faiss = _empty(dimension, graph=kind == "hnsw")
        self._keys: NDArray[np.int64] | None = None
        self._unremoved: Any = None

    @classmethod
    def over(cls, stored: Any, kind: IndexKind, removed: set[int]) -> VectorIndex:
        """Return an index over what faiss read from a file.

        Args:
            stored: An ``IndexIDMap2`` over ``IndexFlatIP`` or ``IndexHNSWFlat``.
            kind: As for a new one; what is stored as another kind is converted when it is next added to.
            removed: Keys in it that are not to be found.
        """
        index = cls(stored.d, kind)
        index._faiss, index._removed = stored, set(removed)
        return index

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._faiss.d)

    @property
    def is_graph(self) -> bool:
        """Whether a graph is searched."""
        return not isinstance(_inner(self._faiss), import_faiss().IndexFlat)

    @property
    def stored(self) -> Any:
        """The ``IndexIDMap2`` of faiss, removed vectors included."""
        return self._faiss

    def __len__(self) -> int:
        return int(self._faiss.ntotal) - len(self._removed)

    def add(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Add vectors under keys that are larger than all before."""
        if self.is_graph and self.kind == "flat":  # it was stored as a graph
            self._build(graph=False)
        elif not self.is_graph and self._wants_graph(len(self) + len(rows)):
            self._build(graph=True)
        self._faiss.add_with_ids(rows, keys)
        self._changed()

    def remove(self, keys: NDArray[np.int64]) -> None:
        """Take vectors out, each of which is in."""
        if not self.is_graph:
            self._faiss.remove_ids(keys)
            self._changed()
            return
        self._changed()
        self._removed.update(keys.tolist())
        if len(self._removed) > _REBUILD_SHARE * self._faiss.ntotal:
            self.rebuild()

    def rebuild(self) -> None:
        """Build anew without removed vectors; what fell far below ``GRAPH_FROM`` becomes flat again."""
        self._build(graph=self._wants_graph(2 * len(self)))

    def rows(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors under ``keys``, in this order."""
        found: NDArray[np.float32] = self._faiss.reconstruct_batch(keys)
        return found

    def candidates(
        self, query: NDArray[np.float32], k: int, allowed: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the keys of the best ``k`` and of everything that may tie with the last of them.

        Args:
            query: One row.
            k: At least 1.
            allowed: Keys that may be found, ascending; all if None. ``k`` of them are found if there are as many.
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
        inner, keys, chosen = _inner(self._faiss), self._stored_keys(), self._selector(allowed)
        if self.is_graph:
            if width <= _WIDEST_WALK and count > max(_EXACT_UNTIL, _EXACT_SHARE * len(keys)):
                how = faiss.SearchParametersHNSW(sel=chosen, efSearch=max(SEARCH_WIDTH, width))
                scores, rows = inner.search(query, width, params=how)
                if rows[0, -1] >= 0:
                    return scores[0], keys[rows[0]]
                # The walk ended before it met enough allowed vectors.
            inner = faiss.downcast_index(inner.storage)  # what a graph connects is a flat index
        how = None if chosen is None else faiss.SearchParameters(sel=chosen)
        scores, rows = inner.search(query, width, params=how)
        return scores[0], keys[rows[0]]

    def _selector(self, allowed: NDArray[np.int64] | None) -> Any:
        """Return what tells faiss which rows may be found, or None where all may."""
        import numpy as np

        if allowed is None and not self._removed:
            return None
        keys = self._stored_keys()
        if allowed is None:
            if self._unremoved is None:
                mask = np.ones(len(keys), dtype=bool)
                mask[np.searchsorted(keys, np.fromiter(self._removed, dtype=np.int64))] = False
                self._unremoved = _selector_of(mask)
            return self._unremoved
        mask = np.zeros(len(keys), dtype=bool)
        unbroken = keys[-1] - keys[0] + 1 == len(keys)  # as long as nothing was removed from it, and quicker
        mask[allowed - keys[0] if unbroken else np.searchsorted(keys, allowed)] = True
        return _selector_of(mask)

    def _stored_keys(self) -> NDArray[np.int64]:
        """Return the key of each row, ascending."""
        if self._keys is None:
            self._keys = import_faiss().vector_to_array(self._faiss.id_map)
        return self._keys

    def _changed(self) -> None:
        self._keys = self._unremoved = None

    def _wants_graph(self, count: int) -> bool:
        return self.kind == "hnsw" or (self.kind == "auto" and count >= GRAPH_FROM)

    def _build(self, *, graph: bool) -> None:
        import numpy as np

        keys = self._stored_keys()
        if self._removed:
            keys = keys[~np.isin(keys, np.fromiter(self._removed, dtype=np.int64))]
        if graph and len(keys) >= GRAPH_FROM:
            logger.info("building a graph of %s vectors; this takes minutes for each million", len(keys))
        built = _empty(self.dimension, graph=graph)
        if len(keys):
            built.add_with_ids(self._faiss.reconstruct_batch(keys), keys)
        self._faiss, self._removed = built, set()
        self._changed()


def check_kind(kind: object) -> None:
    """Refuse a kind of index that there is not.

    Raises:
        ConfigError: it is none of ``auto``, ``flat`` and ``hnsw``.
    """
    if kind not in get_args(IndexKind):
        raise ConfigError(f"kind={kind!r} of index; choose one of {', '.join(get_args(IndexKind))}")


def import_faiss() -> Any:
    """Return faiss.

    Raises:
        ConfigError: it is not installed.
    """
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


def _selector_of(mask: NDArray[np.bool_]) -> Any:
    import numpy as np

    return import_faiss().IDSelectorBitmap(np.packbits(mask, bitorder="little"))


def _inner(stored: Any) -> Any:
    return import_faiss().downcast_index(stored.index)
