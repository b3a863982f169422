"""A retriever that ranks passages by BM25. It needs no model."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from pydantic import Field, PrivateAttr

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.base import QuestionRetriever
from rag_posfix.retrieval.index.documents import (
    DocumentTable,
    IndexEntry,
    both_filters,
    check_filter,
    checked_documents,
    deep_copy,
    stored_copy,
)
from rag_posfix.retrieval.index.file_formats import BM25Index, check_bm25_parameters, top_rows
from rag_posfix.retrieval.index.storage import read_bm25, read_entries
from rag_posfix.text import WORDS_VERSION, split_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BM25Index", "BM25Retriever", "split_words"]


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Word statistics, the revision of the table that they were counted from, and the key of each row."""

    revision: int
    keys: NDArray[np.int64]
    index: BM25Index


class BM25Retriever(QuestionRetriever):
    """Returns passages with ``id``, ``metadata["bm25_score"]`` and ``metadata["relevance_score"]``, best first.

    Passages that share no word with the question are not returned. Ties are broken by id. Title and text are searched
    together; see ``index.bm25_index`` for the formula and the definition of a word.

    ``relevance_score`` is the BM25 score divided by its upper bound, the sum of the idf of all words of the question:
    the part of the question's words, weighted by idf, that the passage contains. It keeps the order of the scores,
    lies in [0, 1), and can be compared between questions. It is small for questions with words that no passage
    contains.

    Created by ``from_documents`` or ``load``. After a change of the documents, the next search counts the words again,
    which takes some seconds for 10,000 passages. May be used by several threads.

    Attributes:
        table: The passages.
        k: Number of passages that ``invoke`` returns if the call gives no ``k``.
        k1: Term frequency saturation; the default is Anserini's for passages.
        b: Length normalisation; the default is Anserini's for passages.
        filter: Only passages whose metadata matches are returned; see ``index.documents.MetadataFilter``. The word
            statistics are those of all passages.
        counted: Keys and word statistics that were saved with the passages; not used if the passages differ.
    """

    table: DocumentTable
    k1: float = 0.9
    b: float = 0.4
    filter: Any = None
    counted: Any = Field(default=None, exclude=True, repr=False)

    _statistics: _Statistics | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def model_post_init(self, context: Any, /) -> None:
        """Check the fields that pydantic does not; ``Checked`` takes the errors back from pydantic."""
        import numpy as np

        super().model_post_init(context)
        check_bm25_parameters(self.k1, self.b)
        if self.filter is not None:
            check_filter(self.filter)
        if self.counted is not None:
            keys, index = self.counted
            if np.array_equal(keys, np.fromiter(self.table.entries, dtype=np.int64)):
                self._statistics = _Statistics(self.table.revision, keys, index)

    @classmethod
    def from_documents(cls, documents: Iterable[Document], **options: Any) -> BM25Retriever:
        """Return a retriever of ``documents``, which are copied.

        Args:
            documents: The last of several with the same id is kept; one without an id gets a hash of its content.
            **options: ``k``, ``k1``, ``b``, ``filter``.

        Raises:
            ConfigError: bm25s is not installed, or an option is outside of its range.
        """
        entries = {
            str(document.id): IndexEntry(document) for document in map(stored_copy, checked_documents(documents))
        }
        table = DocumentTable()
        table.add(entries.values())
        retriever = cls(table=table, **options)
        retriever.statistics()
        return retriever

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        metadatas: Iterable[dict[str, Any]] | None = None,
        *,
        ids: Iterable[str | None] | None = None,
        **options: Any,
    ) -> BM25Retriever:
        """Return a retriever of ``texts``.

        Args:
            metadatas: One per text.
            ids: One per text; None for a text is a hash of its content.
            **options: As for ``from_documents``.

        Raises:
            ConfigError: there is not one of ``metadatas`` or ``ids`` per text, an option is outside of its range, or
                bm25s is not installed.
        """
        contents = list(texts)
        fields = [{} for _ in contents] if metadatas is None else list(metadatas)
        names = [None] * len(contents) if ids is None else list(ids)
        for option, values in (("metadatas", fields), ("ids", names)):
            if len(values) != len(contents):
                raise ConfigError(f"{len(values)} {option} for {len(contents)} texts; pass one per text")
        rows = zip(contents, fields, names, strict=True)
        documents = [Document(page_content=text, metadata=metadata, id=name) for text, metadata, name in rows]
        return cls.from_documents(documents, **options)

    @classmethod
    def load_local(cls, folder_path: str | Path, **options: Any) -> BM25Retriever:
        """Do what ``load`` does, under langchain's name for reading a folder."""
        return cls.load(folder_path, **options)

    @classmethod
    def load(
        cls, folder: str | Path, *, table: DocumentTable | None = None, mmap: bool = False, verify: bool = True,
        **options: Any,
    ) -> BM25Retriever:  # fmt: skip
        """Return the retriever of an index; words are counted now if its statistics miss or are older.

        It needs no embeddings.

        Args:
            table: The documents, if a ``FaissVectorStore`` of the same index has read them already.
            mmap: As for ``FaissVectorStore.load``; likewise ``verify``.
            **options: ``k``, ``filter``; ``k1`` and ``b`` are those that the index was built with.

        Raises:
            RetrievalError: the index is missing, damaged, or of another program or version.
            ConfigError: bm25s is not installed, or an option is outside of its range.
        """
        folder = Path(folder)
        if table is None:
            table = DocumentTable(read_entries(folder, mmap=mmap, verify=verify))
        counted = read_bm25(folder, mmap=mmap, verify=verify)
        if counted is not None:
            options = {"k1": counted[1].k1, "b": counted[1].b, **options}
            if counted[1].words_version == WORDS_VERSION:
                options["counted"] = counted
        retriever = cls(table=table, **options)
        retriever.statistics()
        return retriever

    def statistics(self) -> BM25Index:
        """Return the word statistics of the current passages, in the order of their keys."""
        return self._current().index

    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        import numpy as np

        current = self._current()
        keys, index = current.keys, current.index
        scores = index.scores(question)
        allowed = both_filters(self.filter, metadata_filter)
        if allowed is not None:
            scores = np.where(np.isin(keys, self.table.matching(allowed)), scores, 0)
        bound = index.bound(question)
        hits = []
        for row in top_rows(scores, k):
            document = self.table.document(int(keys[row]))
            if document is not None:  # not removed by another thread meanwhile
                hits.append((document, float(scores[row])))
        hits.sort(key=lambda hit: (-hit[1], str(hit[0].id)))
        documents = [deep_copy(document) for document, _ in hits[:k]]
        for document, (_, score) in zip(documents, hits, strict=False):
            document.metadata.update(bm25_score=score, relevance_score=min(score / bound, 1.0))
        return documents

    def _current(self) -> _Statistics:
        import numpy as np

        with self._lock:
            if self._statistics is None or self._statistics.revision != self.table.revision:
                revision, keys, texts = self.table.snapshot()
                index = BM25Index.build(texts, k1=self.k1, b=self.b)
                self._statistics = _Statistics(revision, np.asarray(keys, dtype=np.int64), index)
            return self._statistics
