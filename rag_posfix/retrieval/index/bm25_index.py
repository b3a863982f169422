"""Word statistics of a list of texts, and their BM25 scores for a question. Texts are referred to by row."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import ConfigError, RetrievalError, missing_extra
from rag_posfix.text import WORDS_VERSION, split_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
