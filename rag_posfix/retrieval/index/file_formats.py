"""The file formats of an index: vectors, documents and word statistics, each with a writer and a reader.

A reader raises ``ValueError`` for a malformed file, whatever the reason; ``storage`` turns it into the error that the
user sees. Knows nothing of manifests and folders; nothing is pickled.

Word statistics of a list of texts, and their BM25 scores for a question. Texts are referred to by row.

Vectors of length one under integer keys, exact or in an HNSW graph, and nearest-neighbour search of documents.

The search of vectors returns candidates only; scores are computed per document from their vectors, so that they do not
depend on the kind of index.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, RetrievalError, missing_extra
from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry, MetadataFilter, document_json
from rag_posfix.text import WORDS_VERSION, parse_json, split_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray


class BM25Index:
    """An inverted index with BM25 term scores, computed by bm25s.

    The score that each word contributes to each text is computed when the index is built; a query only sums
    (Lù, arXiv 2407.03618). The term scores form a sparse matrix in compressed form: words by texts.

    Formula: score(q, d) = sum over the words t of q of  idf(t) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|)),
        idf(t) = ln(1 + (N - n + 1/2) / (n + 1/2)) for N texts, n of which contain t: Lucene's variant (Kamphuis et
        al., "Which BM25 do you mean?", ECIR 2020), in single precision. A word that occurs twice in the question
        counts twice.

    Args:
        words: The row of each word in ``starts``.
        term_scores: The contribution of each word to each text that contains it, word by word.
        texts: The text that each term score belongs to.
        starts: The offset in ``term_scores`` at which each word begins, and the end of the last.
        k1: Term frequency saturation.
        words_version: The ``WORDS_VERSION`` that split the texts; the question must be split the same way.

    Raises:
        ConfigError: bm25s is not installed, or a parameter is outside of its range.
    """

    def __init__(
        self,
        words: dict[str, int],
        term_scores: NDArray[np.float32],
        texts: NDArray[np.int32],
        starts: NDArray[np.int64],
        count: int,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        words_version: int = WORDS_VERSION,
    ) -> None:
        check_bm25_parameters(k1, b)
        self.words_version = words_version
        self.words, self.term_scores, self.texts, self.starts = words, term_scores, texts, starts
        self.k1, self.b = k1, b
        self._count = count
        self._scorer = _new_scorer(k1, b)
        # bm25s has no constructor for computed term scores; its own loading sets these attributes, too.
        self._scorer.scores = {"data": term_scores, "indices": texts, "indptr": starts, "num_docs": count}
        self._scorer.nonoccurrence_array = None

    @classmethod
    def build(cls, texts: Iterable[str], *, k1: float = 0.9, b: float = 0.4) -> BM25Index:
        """Return the index of ``texts``, in the order of their rows. Cost: 3 s for 10,000 texts of 150 words.

        Raises:
            ConfigError: bm25s is not installed, or a parameter is outside of its range.
        """
        import numpy as np

        check_bm25_parameters(k1, b)
        split = [split_words(text) for text in texts]
        # Sorted, so that equal texts give equal files.
        words = {word: row for row, word in enumerate(sorted({word for text in split for word in text}))}
        if not words:
            term_scores, rows = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int32)
            return cls({}, term_scores, rows, np.zeros(1, dtype=np.int64), len(split), k1=k1, b=b)
        scorer = _new_scorer(k1, b)
        scorer.index(
            ([[words[word] for word in text] for text in split], words), create_empty_token=False, show_progress=False
        )
        term_scores = np.asarray(scorer.scores["data"], dtype=np.float32)
        rows = np.asarray(scorer.scores["indices"], dtype=np.int32)
        starts = np.asarray(scorer.scores["indptr"], dtype=np.int64)
        return cls(words, term_scores, rows, starts, len(split), k1=k1, b=b)

    def __len__(self) -> int:
        return self._count

    def scores(self, question: str) -> NDArray[np.float32]:
        """Return the score of every text, by row; a word that no text contains contributes nothing."""
        import numpy as np

        rows = [self.words[word] for word in split_words(question) if word in self.words]
        if not rows:
            return np.zeros(self._count, dtype=np.float32)
        try:
            scores: NDArray[np.float32] = self._scorer.get_scores_from_ids(rows)
        except (IndexError, ValueError) as error:  # memory-mapped statistics are not checked in full when read
            raise RetrievalError("the word statistics of the index are damaged; build the index again") from error
        return scores

    def bound(self, question: str) -> float:
        """Return an upper bound of all scores for ``question``: the sum of idf over its words, also unknown ones."""
        return math.fsum(self._idf(word) for word in split_words(question))

    def _idf(self, word: str) -> float:
        row = self.words.get(word)
        containing = 0 if row is None else int(self.starts[row + 1] - self.starts[row])
        return math.log1p((self._count - containing + 0.5) / (containing + 0.5))


def check_bm25_parameters(k1: float, b: float) -> None:
    """Raise ConfigError if k1 is negative or not finite, or b is not in [0, 1]."""
    if not (math.isfinite(k1) and k1 >= 0):
        raise ConfigError(f"BM25: k1={k1!r} must be a number >= 0; 0.9 is usual for passages")
    if not 0 <= b <= 1:
        raise ConfigError(f"BM25: b={b!r} must lie in [0, 1]; 0.4 is usual for passages")


def _new_scorer(k1: float, b: float) -> Any:
    level = logging.getLogger("bm25s").level
    first_time = "bm25s" not in sys.modules
    try:
        import bm25s
    except ImportError as error:
        raise missing_extra("bm25s", "local") from error
    if first_time:  # importing bm25s sets its log level to DEBUG, whatever the application chose
        logging.getLogger("bm25s").setLevel(level)
    return bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy", csc_backend="numpy")


def top_rows(scores: NDArray[np.float32], k: int) -> Sequence[int]:
    """Return the rows of the ``k`` largest positive scores and of all that tie with the last, in any order."""
    import numpy as np

    rows = np.flatnonzero(scores > 0)
    if len(rows) > k:
        values = scores[rows]
        rows = rows[values >= np.partition(values, len(values) - k)[len(values) - k]]
    positive: list[int] = rows.tolist()
    return positive


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


BM25_ROLES = ("bm25_words", "bm25_shares", "bm25_texts", "bm25_starts")
"""Roles of the files of word statistics: words and parameters as JSON, then three arrays of ``BM25Index`` (.npy)."""

_KEYS = 2**63
_MAGIC = b"\x93NUMPY"


def write_vectors(vectors: Any, path: Path) -> None:
    """Write a faiss index; OSError if it cannot be written."""
    try:
        import_faiss().write_index(vectors, str(path))
    except RuntimeError as error:
        raise OSError(f"faiss could not write the vectors: {str(error).splitlines()[0]}") from error


def read_vectors(path: Path, *, mapped: bool) -> Any:
    """Return an ``IndexIDMap2`` over a flat index or a graph; with ``mapped``, its numbers stay in the file."""
    faiss = import_faiss()
    try:
        with _bounded_by(faiss, path.stat().st_size):
            vectors = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"faiss cannot read {path.name}") from error
    if not isinstance(vectors, faiss.IndexIDMap2):
        raise ValueError(f"{path.name} holds a {type(vectors).__name__}, expected an IndexIDMap2")
    inner = faiss.downcast_index(vectors.index)
    kinds = (faiss.IndexFlat, faiss.IndexHNSWFlat)
    if not isinstance(inner, kinds) or inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{path.name} holds a {type(inner).__name__}, expected inner products, flat or as a graph")
    keys = faiss.vector_to_array(vectors.id_map)
    if not (vectors.ntotal == inner.ntotal == len(keys) and vectors.d == inner.d and (keys[1:] > keys[:-1]).all()):
        raise ValueError(f"{path.name} holds vectors that contradict their keys")
    return vectors


@contextmanager
def _bounded_by(faiss: Any, n_bytes: int) -> Iterator[None]:
    """Let faiss allocate no array larger than its file: a damaged length would take all memory."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):  # before faiss 1.14
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(n_bytes)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


def write_document_lines(entries: Mapping[int, IndexEntry], path: Path, offsets: Path) -> None:
    """Write documents as JSON lines to ``path``, and the key and byte offset of each line to ``offsets``.

    Raises:
        RetrievalError: the metadata of a document cannot be written as JSON.
    """
    import numpy as np

    rows: list[tuple[int, int]] = []
    offset = 0
    with path.open("wb") as handle:
        for key, entry in entries.items():
            rows.append((key, offset))
            offset += handle.write(_document_line(key, entry).encode() + b"\n")
    np.save(offsets, np.asarray(rows, dtype="<i8").reshape(-1, 2), allow_pickle=False)


def read_document_lines(path: Path) -> dict[int, IndexEntry]:
    """Return all documents by key, in the order of the file."""
    try:
        with path.open("rb") as handle:
            return dict(_parse_document(line) for line in handle)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} holds a line that is not a document") from error


def read_offsets(path: Path) -> NDArray[np.int64]:
    """Return key and byte offset of each document, one row per document; both columns ascend."""
    offsets = _load_array(path, mapped=False)
    shaped = offsets.ndim == 2 and offsets.shape[1] == 2 and offsets.dtype.str == "<i8"
    if not shaped or (offsets[1:] <= offsets[:-1]).any():
        raise ValueError(f"{path.name} holds no table of keys and byte offsets")
    return offsets


class MappedDocuments(Mapping[int, IndexEntry]):
    """Documents by key that stay in a memory-mapped file of lines and are parsed on access."""

    def __init__(self, path: Path, offsets: NDArray[np.int64]) -> None:
        self._name = path.name
        self._keys, self._offsets = offsets[:, 0].copy(), offsets[:, 1].copy()
        with path.open("rb") as handle:  # an empty file cannot be mapped
            self._lines: Any = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if len(offsets) else b""

    def __getitem__(self, key: int) -> IndexEntry:
        row = int(self._keys.searchsorted(key))
        if row == len(self._keys) or self._keys[row] != key:
            raise KeyError(key)
        end = int(self._offsets[row + 1]) if row + 1 < len(self._offsets) else len(self._lines)
        try:
            stored_key, entry = _parse_document(self._lines[int(self._offsets[row]) : end])
            if stored_key != key:
                raise ValueError("another key")
        except (ValueError, KeyError, TypeError) as error:
            raise RetrievalError(
                f"{self._name} does not hold document {key} where its table says; build the index again"
            ) from error
        return entry

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys.tolist())

    def __len__(self) -> int:
        return len(self._keys)


def write_bm25_files(index: BM25Index, paths: Mapping[str, Path]) -> None:
    """Write word statistics, one file for each of ``BM25_ROLES``."""
    import numpy as np

    fields: dict[str, Any] = {"version": index.words_version, "k1": index.k1, "b": index.b, "count": len(index)}
    fields["words"] = list(index.words)
    paths["bm25_words"].write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
    arrays = (("bm25_shares", index.term_scores), ("bm25_texts", index.texts), ("bm25_starts", index.starts))
    for role, array in arrays:
        np.save(paths[role], array, allow_pickle=False)


def read_bm25_files(paths: Mapping[str, Path], *, mapped: bool) -> BM25Index:
    """Return word statistics that ``write_bm25_files`` wrote; with ``mapped``, the arrays stay in the files."""
    try:
        fields = json.loads(paths["bm25_words"].read_text(encoding="utf-8"))
        words = {str(word): row for row, word in enumerate(fields["words"])}
        k1, b, count = float(fields["k1"]), float(fields["b"]), int(fields["count"])
        version = int(fields.get("version", 1))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{paths['bm25_words'].name} holds no words") from error
    term_scores, texts, starts = (_load_array(paths[role], mapped=mapped) for role in BM25_ROLES[1:])
    if not (
        [array.dtype.str for array in (term_scores, texts, starts)] == ["<f4", "<i4", "<i8"]
        and (term_scores.ndim, texts.shape, starts.shape) == (1, term_scores.shape, (len(words) + 1,))
        and starts[0] == 0
        and starts[-1] == len(term_scores)
        and (starts[1:] >= starts[:-1]).all()
        # Not checked for mapped arrays, because it would read all of them.
        and (mapped or not len(texts) or (texts.min() >= 0 and texts.max() < count))
    ):
        raise ValueError("its word statistics contradict each other")
    return BM25Index(words, term_scores, texts, starts, count, k1=k1, b=b, words_version=version)


def _load_array(path: Path, *, mapped: bool) -> NDArray[Any]:
    import numpy as np

    try:
        with path.open("rb") as handle:
            if handle.read(len(_MAGIC)) != _MAGIC:  # numpy would read archives and pickles, too
                raise ValueError("no array")
        array: NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    # A hostile header makes numpy raise any of these.
    except (ValueError, EOFError, MemoryError, OverflowError, SyntaxError, TypeError, TokenError) as error:
        raise ValueError(f"{path.name} holds no array") from error
    return array


def _document_line(key: int, entry: IndexEntry) -> str:
    document = entry.document
    fields: dict[str, Any] = {
        "key": key, "id": document.id, "text": document.page_content, "metadata": document.metadata,
    }  # fmt: skip
    if entry.files:
        fields["files"] = list(entry.files)
    return document_json(document, fields)


def _parse_document(line: bytes) -> tuple[int, IndexEntry]:
    fields = parse_json(line.decode())
    key, files = fields["key"], fields.get("files", [])
    if not isinstance(key, int) or not 0 <= key < _KEYS or not isinstance(files, list):
        raise TypeError("key or files")
    document = Document(id=fields["id"], page_content=fields["text"], metadata=fields["metadata"])
    return key, IndexEntry(document, tuple(str(file) for file in files))
