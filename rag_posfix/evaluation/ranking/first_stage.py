"""The first stage, which finds the candidates: a retriever over the collection, or a run of another system."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from langchain_core.documents import Document
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
from rag_posfix.evaluation.record import file_digest
from rag_posfix.parameters import Number, Numbers, Whole, check_parameters
from rag_posfix.registry import Registry
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

__all__ = [
    "FIRST_STAGE",
    "FIRST_STAGES",
    "FirstStage",
    "candidates_of",
    "open_first_stage",
    "retrieve",
    "run_as_first_stage",
]

FIRST_STAGE = "first_stage"
"""What its run is called beside those of the rerankers."""

FIRST_STAGES: Registry[type] = Registry("first stage")
"""The retrievers that can be a first stage, by name; their classes hold the parameters."""

DOCUMENTS_PER_BATCH = 128
BATCHES_PER_SAVE = 16


@dataclass(frozen=True, slots=True, eq=False)
class FirstStage:
    """Finds candidates.

    Attributes:
        name: Its name in results.
        identity: Digest of its method, parameters, model and documents.
        rank: Returns at most the given number of documents for a topic.
        searches: Whether it searches, so that its rankings are stored in the journal.
    """

    name: str
    identity: str
    rank: Callable[[Topic, int], Ranking]
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
    weights: Annotated[tuple[float, ...] | None, Numbers(0, 1e6, fewest=2, most=2, nonzero=True)] = None
    rank_constant: Annotated[float | None, Number(0, 1e6)] = None
    candidates: Annotated[int | None, Whole(1)] = None
    k1: Annotated[float | None, Number(0, 10)] = None
    b: Annotated[float | None, Number(0, 1)] = None

    def __post_init__(self) -> None:
        check_parameters(self, "first stage hybrid")


_BM25_PARAMETERS = ("k1", "b")


def run_as_first_stage(path: Path) -> tuple[FirstStage, frozenset[str]]:
    """Return a first stage that reads a TREC run, and the documents that the run names.

    The score decides, ties as trec_eval orders them. Its seconds are 0: nothing was searched here.

    Args:
        path: The run.

    Raises:
        EvaluationError: the file is missing or malformed.
    """
    run = read_run(path)

    def rank(topic: Topic, depth: int) -> Ranking:
        found = run.get(topic.id, [])[:depth]
        return Ranking(tuple(name for name, _ in found), tuple(score for _, score in found), 0.0)

    names = frozenset(name for ranked in run.values() for name, _ in ranked)
    return FirstStage(path.name, content_hash("run", file_digest(path)), rank, searches=False), names


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
        collection: The documents.
        embeddings: Returns the embedding model.
        folder: Where an index of vectors is kept for later runs; None keeps it in memory.
        progress: Shows how far the embedding of documents is.

    Raises:
        RetrievalError: the documents cannot be indexed.
        EvaluationError: no document has text.
    """
    documents = [document for document in collection.documents.values() if document.page_content.strip()]
    if not documents:
        raise EvaluationError("no document of the corpus has text; give another corpus")
    name, parameters = FIRST_STAGES.resolve(spec.name), spec.parameters
    made_from = [name, repr(sorted(parameters.items())), collection.digest]
    if name == "bm25":
        return _over(_bm25(documents, parameters), name, made_from)
    from rag_posfix.retrieval.embeddings import embedding_identity

    identity = embedding_identity(embeddings())
    index = None if folder is None else folder / f"index-{content_hash(identity, collection.digest)[:16]}"
    dense = _dense(documents, embeddings(), index, progress)
    retriever = dense if name == "dense" else _hybrid(dense, documents, parameters)
    return _over(retriever, name, [*made_from, identity])


def retrieve(
    stage: FirstStage, topics: Sequence[Topic], depth: int, journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Run the first stage for every topic without a ranking in the journal.

    Args:
        stage: The first stage.
        topics: The topics.
        depth: Number of documents per topic.
        journal: Stored rankings; new ones are added.
        progress: Progress callback (``evaluation.progress``).

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


def candidates_of(topics: Sequence[Topic], found: RankedTopics, collection: Collection) -> list[QueryCandidates]:
    """Return the input of rerankers: copies of the documents, in the order of the first stage, with its scores.

    Args:
        topics: The topics.
        found: The rankings of the first stage.
        collection: The documents.

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


def _over(retriever: Retriever, name: str, made_from: Sequence[str]) -> FirstStage:
    def rank(topic: Topic, depth: int) -> Ranking:
        started = time.perf_counter()
        found = retriever.retrieve(topic.question, depth)
        seconds = time.perf_counter() - started
        ids, scores = checked_ranking(name, topic.id, found, found)
        return Ranking(ids, scores, seconds)

    return FirstStage(name, content_hash(*made_from), rank)


def _dense(documents: Sequence[Document], embeddings: Embeddings, index: Path | None, progress: Progress) -> Retriever:
    """Return a retriever over vectors that are saved to ``index`` as they are made, so that an interrupt loses few."""
    from rag_posfix.retrieval.dense import PassageRetriever

    store = _store(index, embeddings)
    known = {str(document.id) for document in store.documents()}
    # Texts of like length share a batch, which spares padding; with the id, batches are the same in every run.
    missing = sorted(
        (document for document in documents if str(document.id) not in known),
        key=lambda document: (len(document.page_content), str(document.id)),
    )
    batches = range(0, len(missing), DOCUMENTS_PER_BATCH)
    with progress("embedding") as report:
        for number, start in enumerate(batches, start=1):
            store.add_documents(missing[start : start + DOCUMENTS_PER_BATCH])
            report(len(store), len(documents))
            if index is not None and (number % BATCHES_PER_SAVE == 0 or number == len(batches)):
                index.parent.mkdir(parents=True, exist_ok=True)
                store.save(index)
    return PassageRetriever(store=store)


def _store(index: Path | None, embeddings: Embeddings) -> FaissVectorStore:
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    if index is not None and index.is_dir():  # flat: candidates are the nearest, whatever the size of the collection
        return FaissVectorStore.load(index, embeddings, kind="flat")
    return FaissVectorStore(embeddings, kind="flat")


def _bm25(documents: Sequence[Document], parameters: Mapping[str, Any]) -> Retriever:
    from rag_posfix.retrieval.bm25 import BM25Retriever

    return BM25Retriever.from_documents(documents, **_bm25_parameters(parameters))


def _hybrid(dense: Retriever, documents: Sequence[Document], parameters: Mapping[str, Any]) -> Retriever:
    from rag_posfix.retrieval.hybrid import HybridRetriever

    own = {name: value for name, value in parameters.items() if name not in _BM25_PARAMETERS}
    return HybridRetriever(retrievers=[dense, _bm25(documents, parameters)], **own)


def _bm25_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name in _BM25_PARAMETERS}
