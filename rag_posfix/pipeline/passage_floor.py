"""Leaves out the retrieved passages that are not about the question. Knows neither embeddings nor models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from rag_posfix.checked import FloorChoice
from rag_posfix.contracts.request import salted
from rag_posfix.contracts.retrieval import Reranker, Retriever, SimilarityRange, rerank_indexed
from rag_posfix.pipeline.run import QuestionRun

LEAST_GAIN = 0.8
"""Nats per token of the question that a passage must gain. Chosen on half of the questions of the end-to-end gate."""

DETAILS = "reranking"


@dataclass(frozen=True, slots=True)
class PassageFloor:
    """Two tests of retrieved passages: similarity, and a judge where similarity does not decide.

    Attributes:
        judge: Returns the reranker whose ``raw_score`` is the gain of a passage in nats per token; None without one.
        least_gain: A judged passage with less is not read.
    """

    judge: Callable[[], Reranker | None] = lambda: None
    least_gain: float = LEAST_GAIN

    def similar(
        self, run: QuestionRun, retriever: Retriever, documents: Sequence[Document], choice: FloorChoice
    ) -> tuple[list[Document], bool]:
        """Return the passages that are similar enough, and whether the judge must decide about them."""
        range_of = getattr(retriever, "similarity_range", None)
        known: SimilarityRange | None = range_of() if callable(range_of) else None
        if choice == "off" or not documents or (known is None and choice == "auto"):
            return list(documents), False
        low = known.low if known is not None and choice == "auto" else float(choice)
        kept = [document for document in documents if _score(document) >= low]
        run.leave_out(documents, kept)
        return kept, known is None or max(map(_score, kept), default=0.0) < known.clear

    def judged(self, run: QuestionRun, documents: Sequence[Document]) -> list[Document]:
        """Return the passages that gain enough; all if there is no judge, or if it fails."""
        judge = self.judge() if documents else None
        if judge is None:
            return list(documents)
        with run.timed("judge"), salted(run.salt):
            ranked = rerank_indexed(judge, run.query.text, documents)
        gains: dict[int, Any] = {
            entry.index: (entry.document.metadata.get(DETAILS) or {}).get("raw_score") for entry in ranked
        }
        kept = [
            document
            for index, document in enumerate(documents)
            if not isinstance(gain := gains.get(index), float) or gain >= self.least_gain
        ]
        run.leave_out(documents, kept)
        return kept


def _score(document: Document) -> float:
    score = document.metadata.get("relevance_score")
    return float(score) if isinstance(score, int | float) else 1.0
