"""Rankings of a first stage or a reranker, for one query and for all queries, and their journal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.trec import decreasing
from rag_posfix.evaluation.journal import LineJournal
from rag_posfix.text import content_hash

KEY_VERSION = 2
"""2: prompts have the tokens of the stock model."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents for one query, best first.

    Attributes:
        ids: Their ids.
        scores: Their scores, not increasing.
        seconds: Time to rank them.
        calls: Answers that the model was asked to write, where the reranker counts them (``generations``).
        forward_passes: Forward passes of the generator, 0 where there is none.
        tokens_read: Tokens in these, padding included.
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    seconds: float
    calls: int | None = None
    forward_passes: int = 0
    tokens_read: int = 0


_NAMES = {field.name for field in fields(Ranking)}


@dataclass(frozen=True, slots=True)
class QueryCandidates:
    """A query and the documents that are reranked for it.

    Attributes:
        query: The query's id.
        question: Its text.
        documents: As the first stage ordered them, with ``metadata["relevance_score"]`` in [0, 1] where it scores.
    """

    query: str
    question: str
    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankedTopics:
    """The rankings of one system.

    Attributes:
        label: Names it.
        rankings: By query id, in the order of the topics; a ranking may be empty.
        reused: Queries whose ranking an earlier run made.
    """

    label: str
    rankings: Mapping[str, Ranking]
    reused: frozenset[str]

    def run(self) -> dict[str, dict[str, float]]:
        """Return scores as written and measured: strictly decreasing within each query, without empty queries."""
        return {
            query: dict(zip(ranking.ids, decreasing(ranking.scores), strict=True))
            for query, ranking in self.rankings.items()
            if ranking.ids
        }


class RankJournal(LineJournal[Ranking]):
    """Rankings by key, in memory and, with a path, in a file that only grows (see ``LineJournal``).

    Args:
        path: The file; it and its folder are created with the first ranking. None: rankings are held in memory only.
        fresh: Start without the rankings of earlier runs. They stay in the file.

    Raises:
        EvaluationError: the file exists and cannot be read.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("ranking", _ranking, path, fresh=fresh)


def retrieval_key(identity: str, question: str, depth: int) -> str:
    """Return a digest of everything that a ranking of the first stage depends on.

    Args:
        identity: Digest of the first stage, its parameters and its documents.
        question: The query's text.
    """
    return content_hash(json.dumps([KEY_VERSION, "retrieve", identity, question, depth]))


def rerank_key(identity: str, candidates: QueryCandidates) -> str:
    """Return a digest of everything that a ranking of a reranker depends on.

    Args:
        identity: Digest of the reranker, its parameters and its model.
        candidates: The query, its documents, their order and their scores.
    """
    documents = [
        [d.id, d.metadata.get("title", ""), d.page_content, d.metadata.get("relevance_score")]
        for d in candidates.documents
    ]
    return content_hash(json.dumps([KEY_VERSION, "rerank", identity, candidates.question, documents]))


def checked_ranking(
    label: str, query: str, given: Sequence[Document], returned: Sequence[Document]
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return ids and scores of what a reranker returned, highest score first, equal scores as they were returned.

    Args:
        query: The query's id, for messages.

    Raises:
        EvaluationError: a document was not given or was returned twice, or its score is missing or not finite.
    """
    known = {document.id for document in given}
    scores: dict[str, float] = {}
    for document in returned:
        name = str(document.id)
        if document.id not in known or name in scores:
            what = "twice" if name in scores else "that it was not given"
            raise EvaluationError(f"{label} returned document {document.id!r} of query {query!r} {what}")
        score = (document.metadata or {}).get("relevance_score")
        if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
            raise EvaluationError(
                f"{label} scored document {name!r} of query {query!r} {score!r}; metadata['relevance_score'] must be "
                "a finite number"
            )
        scores[name] = float(score)
    ranked = sorted(scores.items(), key=lambda pair: -pair[1])
    return tuple(name for name, _ in ranked), tuple(score for _, score in ranked)


def relevance(scores: Sequence[float]) -> list[float]:
    """Return scores as relevance in [0, 1], which is what rerankers are given.

    Scores in [0, 1] stay. Others that are not negative are divided by the highest; with a negative one among them only
    the order is kept: 1, (n - 1) / n, ..., 1 / n.

    Args:
        scores: Of one query, from best to worst.
    """
    if all(0.0 <= score <= 1.0 for score in scores):
        return list(scores)
    if min(scores) >= 0.0:
        return [score / max(scores) for score in scores]
    return [1.0 - index / len(scores) for index in range(len(scores))]


def _ranking(row: Any) -> Ranking | None:
    ids, scores, seconds = row["ids"], row["scores"], row["seconds"]
    counts = [row["forward_passes"], row["tokens_read"], *([] if row["calls"] is None else [row["calls"]])]
    whole = (
        set(row) == _NAMES
        and len(ids) == len(scores)
        and all(isinstance(name, str) for name in ids)
        and all(isinstance(score, float) for score in (*scores, seconds))
        and all(isinstance(count, int) for count in counts)
    )
    return Ranking(**{**row, "ids": tuple(ids), "scores": tuple(scores)}) if whole else None
