"""A retriever that asks several retrievers and fuses their rankings. Knows only the protocol ``Retriever``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice, zip_longest
from numbers import Real
from typing import Any, Literal

from langchain_core.documents import Document
from pydantic import Field

from rag_posfix.contracts.retrieval import Retriever, SearchQuery, retrieve_matching, retrieve_query
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import QuestionRetriever
from rag_posfix.retrieval.index.documents import deep_copy, stored_id

__all__ = ["HybridRetriever"]

FILLED = 0.3
"""Share of the passages that ``fusion="fill"`` takes from the retrievers after the first."""

_SCORES = frozenset({"relevance_score", "bm25_score"})
"""Metadata that a search adds to a document."""


class HybridRetriever(QuestionRetriever):
    """Returns the fused ranking of two or more retrievers, with ``relevance_score`` in [0, 1], ties by id.

    ``rank`` is reciprocal rank fusion. It uses ranks only, so the scores of the retrievers need no common scale. A
    passage that is first in all rankings has relevance 1, and relevance falls slowly: .86 for rank 10 in all rankings.
    ``score`` is the weighted mean of the scores after min-max normalisation per question and retriever. It keeps the
    differences between scores; the last candidate of each retriever gets 0 from it. See ``reciprocal_ranks``
    and ``weighted_scores`` for formulas and sources. ``fill`` returns the passages of the first retriever with its
    scores, the last three of ten replaced by the best of the others: names and numbers that embeddings miss. A passage
    beyond the candidates of the first has the score of its last candidate.

    A passage that several retrievers find keeps the metadata of the first of them, and gains the keys that only the
    others have, such as ``bm25_score``. Passages without an id are the same if their texts and metadata are equal, but
    for scores. ``retrieve`` asks the retrievers one after the other, ``aretrieve`` concurrently.

    Attributes:
        retrievers: Two or more, each with ``retrieve(question, k)``.
        fusion: ``rank``, ``score`` or ``fill``.
        weights: One per retriever, none negative, at least one positive; equal if None.
        rank_constant: The constant of reciprocal rank fusion, at least 0; the paper's is 60.
        candidates: Number of passages that each retriever is asked for; ``k`` if that is more.
        k: Number of passages that ``invoke`` returns if the call gives no ``k``.

    Raises:
        ConfigError: fewer than two retrievers, an object that is none, unusable weights, or another value outside of
            its range.
        RetrievalError: with ``score``, a retriever returned a passage without a finite ``relevance_score``.
    """

    retrievers: Sequence[Any]
    fusion: Literal["rank", "score", "fill"] = "rank"
    weights: Sequence[float] | None = None
    rank_constant: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    candidates: int = Field(default=100, ge=1)

    def model_post_init(self, context: Any, /) -> None:
        """Check the fields that pydantic does not; ``Checked`` takes the errors back from pydantic."""
        super().model_post_init(context)
        if len(self.retrievers) < 2:
            raise ConfigError(f"hybrid retrieval needs two or more retrievers, got {len(self.retrievers)}")
        for retriever in self.retrievers:
            if not isinstance(retriever, Retriever):
                raise ConfigError(
                    f"a {type(retriever).__name__} cannot be part of hybrid retrieval; it needs retrieve(question, k)"
                )
        weights = self._weights()
        usable = all(math.isfinite(weight) and weight >= 0 for weight in weights) and sum(weights) > 0
        if len(weights) != len(self.retrievers) or not usable:
            raise ConfigError(
                f"weights={weights!r} for {len(self.retrievers)} retrievers; give a number >= 0 for each, and one > 0"
            )

    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        return self.retrieve_query(SearchQuery(question), k, metadata_filter)

    def retrieve_query(self, query: SearchQuery, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        """Fuse what the retrievers return for the whole query: its weights are of scores, and fused ranks are none."""
        width = max(k, self.candidates)
        return self._fused([retrieve_query(each, query, width, metadata_filter) for each in self.retrievers], k)

    async def _asearch(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        width = max(k, self.candidates)
        calls = (
            retriever.aretrieve(question, width)
            if hasattr(retriever, "aretrieve") and not metadata_filter
            else asyncio.to_thread(retrieve_matching, retriever, question, width, metadata_filter)
            for retriever in self.retrievers
        )
        return self._fused(await asyncio.gather(*calls), k)

    def _weights(self) -> list[float]:
        return [1.0] * len(self.retrievers) if self.weights is None else [float(weight) for weight in self.weights]

    def _fused(self, results: Sequence[Sequence[Document]], k: int) -> list[Document]:
        rankings = [_by_id(documents) for documents in results]
        if self.fusion == "fill":
            return _filled(rankings, k)
        if self.fusion == "rank":
            fused = reciprocal_ranks([list(ranking) for ranking in rankings], self._weights(), self.rank_constant)
        else:
            scores = [{name: _score(document) for name, document in ranking.items()} for ranking in rankings]
            fused = weighted_scores(scores, self._weights())
        best = sorted(fused, key=lambda name: (-fused[name], name))[:k]
        return [_merged(name, rankings, fused[name]) for name in best]


def _filled(rankings: Sequence[Mapping[str, Document]], k: int) -> list[Document]:
    """Return ``k`` passages with the scores of the first ranking: its best, and FILLED of them from the others."""
    first, *others = rankings
    n_filled = math.floor(FILLED * k)
    names = dict.fromkeys(list(first)[: k - n_filled])
    by_rank = (name for rank in zip_longest(*others) for name in rank if name is not None)
    for name in chain(islice((name for name in by_rank if name not in names), n_filled), list(first)):
        if len(names) < k:
            names.setdefault(name)
    scores = {name: _score(document) for name, document in first.items()}
    last = min(scores.values(), default=0.0)
    best = sorted(names, key=lambda name: -scores.get(name, last))
    return [_merged(name, rankings, scores.get(name, last)) for name in best]


def _by_id(documents: Sequence[Document]) -> dict[str, Document]:
    """Return documents by id, best first; the best of several with the same id counts.

    The hash that stands for a missing id is that of the document before a search added its scores.
    """
    ranking: dict[str, Document] = {}
    for document in documents:
        metadata = {key: value for key, value in document.metadata.items() if key not in _SCORES}
        ranking.setdefault(stored_id(document.model_copy(update={"metadata": metadata})), document)
    return ranking


def _score(document: Document) -> float:
    score = document.metadata.get("relevance_score")
    if not isinstance(score, Real) or not math.isfinite(score):
        raise RetrievalError(
            f"a retriever returned document {document.id!r} with relevance_score={score!r}; fusion='score' needs a "
            "finite number from each retriever; give one, or use fusion='rank'"
        )
    return float(score)


def _merged(document_id: str, rankings: Sequence[Mapping[str, Document]], score: float) -> Document:
    """Return the document with this id, with the metadata of all copies; the first copy takes precedence."""
    copies = [ranking[document_id] for ranking in rankings if document_id in ranking]
    metadata: dict[str, Any] = {}
    for document in reversed(copies):
        metadata = {**metadata, **document.metadata}
    merged = Document(
        id=document_id, page_content=copies[0].page_content, metadata={**metadata, "relevance_score": score}
    )
    return deep_copy(merged)


def reciprocal_ranks(rankings: Sequence[Sequence[str]], weights: Sequence[float], constant: float) -> dict[str, float]:
    """Return the score of each id by reciprocal rank fusion, in [0, 1].

    Source: Cormack, Clarke and Büttcher, SIGIR 2009.
    Formula: score(d) = sum over the rankings i that contain d of  w_i / (c + rank_i(d)),  rank from 1, divided by
        its maximum, sum of w_i / (c + 1), which a document has that is first in all rankings. The paper has neither
        weights nor this division.

    Args:
        rankings: Ids, best first, each once per ranking.
        weights: One per ranking, none negative, at least one positive.
        constant: The paper's k, 60 there: the larger, the smaller the advantage of the first ranks.
    """
    largest = sum(weights) / (constant + 1)
    fused: dict[str, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, name in enumerate(ranking, start=1):
            fused[name] = fused.get(name, 0.0) + weight / (constant + rank)
    return {name: min(score / largest, 1.0) for name, score in fused.items()}


def weighted_scores(rankings: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Return the weighted mean of the scores of each id, in [0, 1], after ``min_max`` of each ranking.

    A document counts 0, the lowest score, in a ranking that does not contain it. Bruch, Gai and Ingber (arXiv
    2210.11934) compare such convex combinations with reciprocal rank fusion.

    Args:
        weights: One per ranking, none negative, at least one positive.
    """
    fused: dict[str, float] = {}
    for scores, weight in zip(rankings, weights, strict=True):
        for name, score in min_max(scores).items():
            fused[name] = fused.get(name, 0.0) + weight * score
    return {name: min(score / sum(weights), 1.0) for name, score in fused.items()}


def min_max(scores: Mapping[str, float]) -> dict[str, float]:
    """Return ``(s - min) / (max - min)`` for each score; 1 for each if all are equal."""
    if not scores:
        return {}
    low, high = min(scores.values()), max(scores.values())
    if low == high:
        return dict.fromkeys(scores, 1.0)
    return {name: (score - low) / (high - low) for name, score in scores.items()}
