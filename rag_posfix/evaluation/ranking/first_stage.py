"""The first stage, which finds the candidates: a retriever over the collection, or a run of another system."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.data.trec import read_run
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.ranking.rankings import (
    QueryCandidates,
    RankedTopics,
    Ranking,
    RankJournal,
    checked_ranking,
    relevance,
    retrieval_key,
)
from rag_posfix.evaluation.ranking.stage_index import (
    EmbedBatches,
    count_words,
    documents_with_text,
    embedded,
    open_vectors,
    retriever_of,
    searched_texts,
    stored_ids,
    words_retriever,
)
from rag_posfix.evaluation.record import file_digest
from rag_posfix.parameters import Integer, Number, NumberList, check_parameters
from rag_posfix.registry import Registry
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FIRST_STAGE = "first_stage"
"""What its run is called beside those of the rerankers."""

FIRST_STAGES: Registry[type] = Registry("first stage")
"""The retrievers that can be a first stage, by name; their classes hold the parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class FirstStage:
    """A retriever of candidates, in this process or on a cluster.

    Attributes:
        name: Its name in results.
        identity: Digest of its method, parameters, model and documents.
        rank_all: Yields (index, ranking) of topics, in any order; a ranking has at most the given number of documents.
        searches: Whether it searches, so that its rankings are stored in the journal.
    """

    name: str
    identity: str
    rank_all: Callable[[Sequence[Topic], int], Iterable[tuple[int, Ranking]]]
    searches: bool = True


@FIRST_STAGES.register("bm25")
@dataclass(frozen=True, slots=True)
class BM25Stage:
    """Search by words, with BM25.

    Attributes:
        k1: Saturation of repeated words, 0 to 10.
        b: Normalisation by document length, 0 to 1.
    """

    k1: Annotated[float | None, Number(0, 10)] = None
    b: Annotated[float | None, Number(0, 1)] = None

    def __post_init__(self) -> None:
        check_parameters(self, "first stage bm25")


@FIRST_STAGES.register("dense")
@dataclass(frozen=True, slots=True)
class DenseStage:
    """Exact search by embeddings. Takes no parameters."""


@FIRST_STAGES.register("hybrid")
@dataclass(frozen=True, slots=True)
class HybridStage:
    """Search by embeddings and by words, the rankings fused.

    Attributes:
        fusion: ``rank`` (reciprocal ranks) or ``score``.
        weights: Weights of embeddings and of words, none negative, not both 0.
        rank_constant: Constant of the reciprocal ranks, 0 and above.
        candidates: Number of documents that each of the two retrieves, 1 or more.
        k1: As in ``bm25``.
        b: As in ``bm25``.
    """

    fusion: Literal["rank", "score"] | None = None
    weights: Annotated[tuple[float, ...] | None, NumberList(0, 1e6, min_length=2, max_length=2, nonzero=True)] = None
    rank_constant: Annotated[float | None, Number(0, 1e6)] = None
    candidates: Annotated[int | None, Integer(1)] = None
    k1: Annotated[float | None, Number(0, 10)] = None
    b: Annotated[float | None, Number(0, 1)] = None

    def __post_init__(self) -> None:
        check_parameters(self, "first stage hybrid")


def run_as_first_stage(path: Path) -> tuple[FirstStage, frozenset[str]]:
    """Return a first stage that reads a TREC run, and the documents that the run names.

    The score decides, ties as trec_eval orders them. Its seconds are 0: nothing was searched here.

    Raises:
        EvaluationError: the file is missing or malformed.
    """
    run = read_run(path)

    def rank_all(topics: Sequence[Topic], depth: int) -> Iterator[tuple[int, Ranking]]:
        for index, topic in enumerate(topics):
            found = run.get(topic.id, [])[:depth]
            yield index, Ranking(tuple(name for name, _ in found), tuple(score for _, score in found), 0.0)

    names = frozenset(name for ranked in run.values() for name, _ in ranked)
    return FirstStage(path.name, content_hash("run", file_digest(path)), rank_all, searches=False), names


def open_first_stage(
    spec: MethodSpec,
    collection: Collection,
    embeddings: Callable[[], Embeddings],
    folder: Path | None = None,
    progress: Progress = silent,
) -> FirstStage:
    """Return a first stage over the documents of a collection that have text.

    Args:
        spec: A name in ``FIRST_STAGES`` and parameters, checked.
        embeddings: Returns the embedding model.
        folder: Where an index of vectors is kept for later runs; None keeps it in memory.

    Raises:
        RetrievalError: the documents cannot be indexed.
        EvaluationError: no document has text.
    """
    documents = documents_with_text(collection)
    name, identity = FIRST_STAGES.resolve(spec.name), None
    retrievers: list[Retriever] = []
    if name != "bm25":
        from rag_posfix.retrieval.dense import PassageRetriever
        from rag_posfix.retrieval.embeddings import embedding_identity

        model = embeddings()
        identity = embedding_identity(model)
        store = open_vectors(documents, model, collection.digest, _embedded_here(model), folder, progress)
        retrievers.append(PassageRetriever(store=store))
    if name != "dense":
        counted = count_words(searched_texts(documents), spec.parameters)
        retrievers.append(words_retriever(stored_ids(documents), counted))
    retriever = retriever_of(retrievers, spec.parameters)

    def rank_all(topics: Sequence[Topic], depth: int) -> Iterator[tuple[int, Ranking]]:
        for index, topic in enumerate(topics):
            yield index, rank_topic(retriever, name, topic, depth)

    return FirstStage(name, stage_identity(spec, collection, identity), rank_all)


def stage_identity(spec: MethodSpec, collection: Collection, model: str | None) -> str:
    """Return the identity of a first stage that searches.

    Args:
        spec: A name in ``FIRST_STAGES`` and parameters.
        model: Identity of the embedding model, None without one.
    """
    made_from = [FIRST_STAGES.resolve(spec.name), repr(sorted(spec.parameters.items())), collection.digest]
    return content_hash(*made_from, *([] if model is None else [model]))


def rank_topic(retriever: Retriever, name: str, topic: Topic, depth: int) -> Ranking:
    """Return at most ``depth`` documents for a topic.

    Args:
        name: Name of the first stage, for messages.

    Raises:
        RetrievalError: the documents cannot be searched.
        EvaluationError: the retriever returned a document twice or without a score.
    """
    started = time.perf_counter()
    found = retriever.retrieve(topic.question, depth)
    seconds = time.perf_counter() - started
    ids, scores = checked_ranking(name, topic.id, found, found)
    return Ranking(ids, scores, seconds)


def retrieve(
    stage: FirstStage, topics: Sequence[Topic], depth: int, journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Run the first stage for every topic without a ranking in the journal.

    Args:
        depth: Number of documents per topic.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        RetrievalError: the first stage failed.
    """
    keys = [retrieval_key(stage.identity, topic.question, depth) for topic in topics]
    known = (
        {}
        if not stage.searches
        else {index: found for index, key in enumerate(keys) if (found := journal.get(key)) is not None}
    )
    reused = frozenset(topics[index].id for index in known)
    missing = [index for index in range(len(topics)) if index not in known]
    with progress("retrieving") as report:
        for position, ranking in stage.rank_all([topics[index] for index in missing], depth):
            index = missing[position]
            if stage.searches:
                journal.add(keys[index], ranking)
            known[index] = ranking
            report(len(known), len(topics))
    rankings = {topic.id: known[index] for index, topic in enumerate(topics)}
    return RankedTopics(FIRST_STAGE, rankings, reused)


def candidates_of(topics: Sequence[Topic], found: RankedTopics, collection: Collection) -> list[QueryCandidates]:
    """Return the input of rerankers: copies of the documents, in the order of the first stage, with its scores.

    Args:
        found: The rankings of the first stage.

    Raises:
        EvaluationError: the first stage ranks a document that is not in the collection.
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
        result.append(QueryCandidates(topic.id, topic.question, tuple(documents)))
    return result


def _embedded_here(embeddings: Embeddings) -> EmbedBatches:
    def embed(batches: Sequence[list[str]]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        for index, texts in enumerate(batches):
            yield index, embedded(embeddings, texts)

    return embed
