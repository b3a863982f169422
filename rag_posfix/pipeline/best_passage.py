"""The passage that is read alone: one that is far ahead of the others by similarity."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.retrieval import SimilarityRange
from rag_posfix.text import titled_text

FAR_AHEAD = 0.2
"""Lead in cosine, for the packaged embedding model. Where cosines are closer to each other, it is rarer."""


@dataclass(frozen=True, slots=True)
class BestPassage:
    """Finds the passage that a small model reads alone: it reads one passage well, and others lead it astray.

    A passage that copies the question is the most similar one whatever else it says: an entry of an FAQ, or a post of
    a forum. It is read alone if the rest of it is about the question too.

    Attributes:
        without_copies: Returns a text without the sentences that copy the question, its second argument.
        embeddings: The embedding model of the scores.
    """

    without_copies: Callable[[str, str], str]
    embeddings: Embeddings

    def alone(self, question: str, documents: Sequence[Document], similarity: SimilarityRange | None) -> bool:
        """Return whether the first of ``documents``, which have scores and are sorted by them, is read alone.

        Args:
            similarity: The range of the retriever; scores without a scale have no lead.
        """
        if similarity is None or similarity.low <= 0 or len(documents) < 2:
            return False
        first, second = (float(document.metadata.get("relevance_score") or 0.0) for document in documents[:2])
        if first - second < FAR_AHEAD or first < similarity.low:
            return False
        text = titled_text(documents[0].metadata.get("title"), documents[0].page_content).strip()
        rest = _without_words(self.without_copies(text, question), question).strip()
        return rest == text or (bool(rest) and self._cosine(question, rest) >= similarity.low)

    def _cosine(self, question: str, text: str) -> float:
        left, right = self.embeddings.embed_query(question), self.embeddings.embed_documents([text])[0]
        norms = math.hypot(*left) * math.hypot(*right)
        return sum(a * b for a, b in zip(left, right, strict=True)) / norms if norms else 0.0


def _without_words(text: str, question: str) -> str:
    """Return the text without the words of the question in a row: a short question copied."""
    words = map(re.escape, re.findall(r"\w+", question))
    return re.sub(r"\b" + r"\W+".join(words) + r"\b\W*", "", text, flags=re.IGNORECASE)
