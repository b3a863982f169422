"""A question to the passages that share its words, best first, by BM25.

Needs no model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from pydantic import PrivateAttr

from rag_posfix.retrieval.base import QuestionRetriever, checked_question
from rag_posfix.retrieval.index.bm25_statistics import BM25Index, check_parameters, split_words, top_rows
from rag_posfix.retrieval.index.documents import DocumentTable, Record
from rag_posfix.retrieval.index.filters import check_filter
from rag_posfix.retrieval.index.reader import read_bm25, read_records
from rag_posfix.retrieval.index.records import copied, owned_document

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BM25Index", "BM25Retriever", "split_words"]


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Word statistics, of which revision of the table they are, and the key of each row."""

    revision: int
    keys: NDArray[np.int64]
    index: BM25Index


class BM25Retriever(QuestionRetriever):
    """Returns passages with ``id``, ``metadata["bm25_score"]`` and ``metadata["relevance_score"]``, best first.

    Passages that share no word with the question are not returned. Ties are broken by id. Title and text are searched
    together; see ``bm25_index`` for the formula and for what a word is.

    ``relevance_score`` is the BM25 score divided by a bound that no passage reaches, the idf of all words of the
    question: which part of the question's words, weighted by how rare they are, the passage has. It keeps the order of
    the scores, lies in [0, 1), can be compared between questions, and is small for a question about things that the
    passages never mention.

    Made by ``from_documents`` or ``load``. Statistics follow the documents: after a change they are counted anew when
    the next question comes, which takes some seconds for 10,000 passages. May be used by several threads.

    Attributes:
        table: Where the passages are.
        k: How many passages ``invoke`` returns where the call names no ``k``.
        k1: How slowly a repeated word stops adding to a score; the default is Anserini's for passages.
        b: How much long passages are held back; the default is Anserini's for passages.
        filter: Only passages whose metadata this lets through are returned; see ``filters.MetadataFilter``. The
            statistics are those of all passages.
    """

    table: DocumentTable
    k1: float = 0.9
    b: float = 0.4
    filter: Any = None

    _statistics: _Statistics | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def model_post_init(self, context: Any, /) -> None:
        """Check what pydantic does not, which then says so with its own ``ValidationError``, a ``ValueError``."""
        super().model_post_init(context)
        check_parameters(self.k1, self.b)
        if self.filter is not None:
            check_filter(self.filter)

    @classmethod
    def from_documents(cls, documents: Iterable[Document], **options: Any) -> BM25Retriever:
        """Return a retriever of ``documents``, which are copied.

        Args:
            documents: Of two with one id the later stays; one without an id gets one made from its content.
            **options: ``k``, ``k1``, ``b``, ``filter``.

        Raises:
            ConfigError: bm25s is not installed.
            ValidationError: an option is outside of what is allowed (pydantic's, a ``ValueError``).
        """
        owned = {str(document.id): Record(document) for document in map(owned_document, documents)}
        table = DocumentTable()
        table.put(owned.values())
        retriever = cls(table=table, **options)
        retriever.statistics()
        return retriever

    @classmethod
    def load(
        cls, folder: str | Path, *, table: DocumentTable | None = None, mmap: bool = False, verify: bool = True,
        **options: Any,
    ) -> BM25Retriever:  # fmt: skip
        """Return the retriever of an index; one without word statistics has them counted now. Needs no embeddings.

        Args:
            folder: What ``rag-posfix index`` or ``FaissVectorStore.save`` wrote.
            table: The documents, where a ``FaissVectorStore`` of the same index has read them already.
            mmap: As for ``FaissVectorStore.load``.
            verify: As for ``FaissVectorStore.load``.
            **options: ``k``, ``filter``; ``k1`` and ``b`` are those that the index was built with.

        Raises:
            RetrievalError: the index is missing, damaged or foreign.
            ConfigError: bm25s is not installed.
            ValidationError: an option is outside of what is allowed (pydantic's, a ``ValueError``).
        """
        import numpy as np

        folder = Path(folder)
        if table is None:
            table = DocumentTable(read_records(folder, mmap=mmap, verify=verify))
        found = read_bm25(folder, mmap=mmap, verify=verify)
        if found is None:
            retriever = cls(table=table, **options)
            retriever.statistics()
            return retriever
        keys, index = found
        retriever = cls(table=table, k1=index.k1, b=index.b, **options)
        if np.array_equal(keys, np.fromiter(table.records, dtype=np.int64)):
            retriever._statistics = _Statistics(table.revision, keys, index)
        return retriever

    def statistics(self) -> BM25Index:
        """Return the statistics of the passages as they are now, in the order of their keys."""
        return self._current().index

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents that share words with ``question``, best first.

        Args:
            question: Must hold a visible character.
            k: How many at most.

        Raises:
            ConfigError: the question is empty, or ``k`` is below 1.
        """
        import numpy as np

        question = checked_question(question, k)
        current = self._current()
        keys, index = current.keys, current.index
        scores = index.scores(question)
        if self.filter is not None:
            scores = np.where(np.isin(keys, self.table.matching(self.filter)), scores, 0)
        bound = index.bound(question)
        found = []
        for row in top_rows(scores, k):
            document = self.table.document(int(keys[row]))
            if document is not None:  # taken out by another thread since
                found.append((document, float(scores[row])))
        found.sort(key=lambda pair: (-pair[1], str(pair[0].id)))
        return [_scored(document, score, score / bound) for document, score in found[:k]]

    def _current(self) -> _Statistics:
        import numpy as np

        with self._lock:
            if self._statistics is None or self._statistics.revision != self.table.revision:
                revision, keys, texts = self.table.snapshot()
                index = BM25Index.build(texts, k1=self.k1, b=self.b)
                self._statistics = _Statistics(revision, np.asarray(keys, dtype=np.int64), index)
            return self._statistics


def _scored(document: Document, score: float, relevance: float) -> Document:
    found = copied(document)
    found.metadata.update(bm25_score=score, relevance_score=min(relevance, 1.0))
    return found
