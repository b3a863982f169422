"""What all rerankers share: reading documents, asynchronous calls, results. Knows no model."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field

from rag_posfix.assembly.documents import Candidate
from rag_posfix.errors import RerankingError
from rag_posfix.reranking.base import ranked_copies
from rag_posfix.reranking.candidates import Candidates, checked_question, read_candidates
from rag_posfix.reranking.deadline import in_thread

__all__ = ["Scored", "ScoringReranker"]


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of one document.

    Attributes:
        score: In [0, 1].
        raw: The method's own number, any finite one; None where the document was not read.
        details: What else there is to say.
    """

    score: float
    raw: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


class ScoringReranker(BaseDocumentCompressor):
    """Base of rerankers; one says how documents are scored, by ``_score``.

    Documents with equal title and text are read once and score the same. Documents without visible text are not read
    and score 0. Each copy says in ``metadata["reranking"]``: ``reranker``; ``raw_score``, or None with
    ``"read": False`` where it was not read; and what else the reranker has to say.

    Attributes:
        top_n: How many passages to return, all if None.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    name: ClassVar[str]

    top_n: int | None = Field(default=None, ge=1)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return scored copies of ``documents``, best first; equal scores keep the given order.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Not used; part of langchain's interface.

        Raises:
            ConfigError: the question is empty, or a document is malformed.
            PromptTooLongError: question and template leave no room for documents.
            RerankingError: the model cannot be used, or returned numbers that are not finite.
        """
        if not documents:
            return []
        question, candidates = checked_question(query), read_candidates(documents)
        scored: Sequence[Scored] = ()
        if candidates.distinct:
            with self._turn():
                scored = self._score(question, candidates.distinct)
        return self._ranked(documents, candidates, scored)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does in a worker thread; cancelled, it stops at its next step.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Not used; part of langchain's interface.
        """
        return await in_thread(functools.partial(self.compress_documents, documents, query, callbacks))

    @abstractmethod
    def _score(self, question: str, candidates: Sequence[Candidate]) -> Sequence[Scored]:
        """Return what becomes of each candidate: at least one, each with visible text, no two alike."""

    def _turn(self) -> AbstractContextManager[None]:
        """What is held while documents are scored."""
        return nullcontext()

    def _ranked(
        self, documents: Sequence[Document], candidates: Candidates, scored: Sequence[Scored]
    ) -> list[Document]:
        for one in scored:
            if one.raw is not None and not math.isfinite(one.raw):
                raise RerankingError(
                    f"{self.name}: the model returned a score of {one.raw}; check its weights and dtype"
                )
        found = {candidate.key: one for candidate, one in zip(candidates.distinct, scored, strict=True)}
        each = [found.get(key, Scored(0.0)) for key in candidates.keys]
        details = [_details(self.name, one) for one in each]
        return ranked_copies(documents, [one.score for one in each], self.top_n, details)


def _details(name: str, one: Scored) -> dict[str, Any]:
    unread = {"read": False} if one.raw is None else {}
    return {"reranker": name, "raw_score": one.raw, **unread, **one.details}
