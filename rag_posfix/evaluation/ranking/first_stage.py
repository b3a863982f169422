"""The first stage, which finds the candidates: an index over the collection, or a run that another system wrote."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from pydantic import ValidationError

from rag_posfix.contracts.generator import Retriever
from rag_posfix.errors import ConfigError, EvaluationError
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
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

__all__ = [
    "FIRST_STAGE",
    "FIRST_STAGES",
    "FirstStage",
    "candidates_of",
    "check_first_stage",
    "open_first_stage",
    "retrieve",
    "run_as_first_stage",
]

FIRST_STAGE = "first_stage"
"""What its run is called beside those of the rerankers."""

FIRST_STAGES = ("bm25", "dense", "hybrid")
_PARAMETERS = {"bm25": ("k1", "b"), "dense": (), "hybrid": ("fusion", "weights", "rank_constant", "candidates")}
_DOCUMENTS_PER_BATCH = 128
_BATCHES_PER_SAVE = 16


@dataclass(frozen=True, slots=True, eq=False)
class FirstStage:
    """Finds candidates.

    Attributes:
        name: What it is called in results.
        identity: Changes with its method, its parameters, its model and its documents.
        rank: Returns at most so many documents for a topic.
        searches: Whether that takes work worth keeping.
    """

    name: str
    identity: str
    rank: Callable[[Topic, int], Ranking]
    searches: bool = True


def check_first_stage(name: str, parameters: Mapping[str, Any]) -> None:
    """Check a first stage and its parameters: a typing error is told before anything is read.

    ``bm25`` takes ``k1`` and ``b``; ``hybrid`` takes these, ``fusion``, ``weights`` (of dense and BM25),
    ``rank_constant`` and ``candidates``; ``dense`` takes none.

    Args:
        name: Its name.
        parameters: Its own.

    Raises:
        ConfigError: an unknown name or parameter, or a value outside of what is allowed.
    """
    if name not in FIRST_STAGES:
        raise ConfigError(f"first stage {name!r} must be one of {', '.join(FIRST_STAGES)}, or the path of a TREC run")
    allowed = [*_PARAMETERS[name], *(_PARAMETERS["bm25"] if name == "hybrid" else ())]
    for key in parameters:
        if key not in allowed:
            raise ConfigError(f"first stage {name} has no parameter {key!r}. It takes: {', '.join(allowed) or 'none'}")
    if name == "dense":
        return
    from rag_posfix.retrieval.bm25 import BM25Retriever
    from rag_posfix.retrieval.hybrid import HybridRetriever
    from rag_posfix.retrieval.index.documents import DocumentTable

    try:
        bm25 = BM25Retriever(table=DocumentTable(), **_own(parameters, "bm25"))
        HybridRetriever(retrievers=[bm25, bm25], **_own(parameters, "hybrid"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"first stage {name}: {where}={first.get('input')!r}: {first['msg']}") from error


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
    name: str,
    parameters: Mapping[str, Any],
    collection: Collection,
    embeddings: Callable[[], Embeddings],
    folder: Path | None = None,
    progress: Progress = silent,
) -> FirstStage:
    """Return a first stage over the documents of a collection that have text.

    Args:
        name: One of ``FIRST_STAGES``.
        parameters: Its own, checked (see ``check_first_stage``).
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


def candidates_of(topics: Sequence[Topic], found: RankedTopics, collection: Collection) -> list[QueryCandidates]:
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
    batches = range(0, len(missing), _DOCUMENTS_PER_BATCH)
    with progress("embedding") as report:
        for number, start in enumerate(batches, start=1):
            store.add_documents(missing[start : start + _DOCUMENTS_PER_BATCH])
            report(len(store), len(documents))
            if index is not None and (number % _BATCHES_PER_SAVE == 0 or number == len(batches)):
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

    return BM25Retriever.from_documents(documents, **_own(parameters, "bm25"))


def _hybrid(dense: Retriever, documents: Sequence[Document], parameters: Mapping[str, Any]) -> Retriever:
    from rag_posfix.retrieval.hybrid import HybridRetriever

    return HybridRetriever(retrievers=[dense, _bm25(documents, parameters)], **_own(parameters, "hybrid"))


def _own(parameters: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name in _PARAMETERS[kind]}
