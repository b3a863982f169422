"""Reranks the candidates of a first stage with several rerankers and measures each; every ranking is kept at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.data.trec import decreasing
from rag_posfix.evaluation.ranking.candidates import OpenedReranker, rerank_one
from rag_posfix.evaluation.ranking.first_stage import FirstStage, Progress, silent
from rag_posfix.evaluation.ranking.rankings import (
    Candidates,
    Ranking,
    RankJournal,
    relevance,
    rerank_key,
    retrieval_key,
)

__all__ = ["FIRST_STAGE", "RankedTopics", "Ranker", "candidates_of", "local_ranker", "rerank", "retrieve"]

FIRST_STAGE = "first_stage"


@dataclass(frozen=True, slots=True, eq=False)
class Ranker:
    """A reranker and where it runs.

    Attributes:
        label: Names it in results.
        identity: All that its rankings depend on besides the candidates.
        rank_all: Yields (index, ranking) of queries, in any order.
    """

    label: str
    identity: str
    rank_all: Callable[[Sequence[Candidates]], Iterable[tuple[int, Ranking]]]


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
        """Return scores as they are written and measured: falling within each query, queries with documents alone."""
        return {
            query: dict(zip(ranking.ids, decreasing(ranking.scores), strict=True))
            for query, ranking in self.rankings.items()
            if ranking.ids
        }


def local_ranker(opened: OpenedReranker) -> Ranker:
    """Return a ranker that asks a reranker of this process, one query after the other.

    Args:
        opened: The reranker.
    """

    def rank_all(queries: Sequence[Candidates]) -> Iterator[tuple[int, Ranking]]:
        for index, candidates in enumerate(queries):
            yield index, rerank_one(opened, candidates)

    return Ranker(opened.label, opened.identity, rank_all)


def retrieve(
    stage: FirstStage, topics: Sequence[Topic], depth: int, journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Ask the first stage about every topic, except where the journal knows the answer.

    Args:
        stage: The first stage.
        topics: What to ask.
        depth: Documents per topic.
        journal: Rankings of earlier runs, and where new ones go.
        progress: Shows how far it is.

    Raises:
        RetrievalError: the first stage failed.
    """
    rankings: dict[str, Ranking] = {}
    reused = set()
    with progress("retrieving") as report:
        for topic in topics:
            key = retrieval_key(stage.identity, topic.question, depth)
            known = journal.get(key) if stage.searches else None
            rankings[topic.id] = ranking = known or stage.rank(topic, depth)
            if known is not None:
                reused.add(topic.id)
            elif stage.searches:
                journal.add(key, ranking)
            report(len(rankings), len(topics))
    return RankedTopics(FIRST_STAGE, rankings, frozenset(reused))


def candidates_of(topics: Sequence[Topic], found: RankedTopics, collection: Collection) -> list[Candidates]:
    """Return what rerankers are given: copies of the documents, in the order of the first stage, with its scores.

    Args:
        topics: The topics.
        found: What the first stage found.
        collection: The documents.

    Raises:
        EvaluationError: the first stage names a document that the collection lacks.
    """
    result = []
    for topic in topics:
        ranking = found.rankings[topic.id]
        documents = []
        for name, score in zip(ranking.ids, relevance(ranking.scores), strict=True):
            if name not in collection.documents:
                raise EvaluationError(
                    f"the first stage ranks document {name!r} for query {topic.id!r}, but the corpus has no such "
                    "document; give the corpus that the run was made from"
                )
            document = collection.documents[name]
            documents.append(document.model_copy(update={"metadata": {**document.metadata, "relevance_score": score}}))
        result.append(Candidates(topic.id, topic.question, tuple(documents)))
    return result


def rerank(
    ranker: Ranker, queries: Sequence[Candidates], journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Rank the candidates of every query, except where the journal knows the ranking.

    A ranking goes to the journal as soon as it is known, so what an interrupt ends can be continued.

    Args:
        ranker: The reranker.
        queries: What to rank.
        journal: Rankings of earlier runs, and where new ones go.
        progress: Shows how far it is.

    Raises:
        EvaluationError: the reranker failed on a query.
    """
    keys = [rerank_key(ranker.identity, candidates) for candidates in queries]
    known = {index: found for index, key in enumerate(keys) if (found := journal.get(key)) is not None}
    reused = frozenset(queries[index].query for index in known)
    missing = [index for index in range(len(queries)) if index not in known]
    with progress(ranker.label) as report:
        report(len(known), len(queries))
        for position, ranking in ranker.rank_all([queries[index] for index in missing]):
            index = missing[position]
            journal.add(keys[index], ranking)
            known[index] = ranking
            report(len(known), len(queries))
    rankings = {candidates.query: known[index] for index, candidates in enumerate(queries)}
    return RankedTopics(ranker.label, rankings, reused)
