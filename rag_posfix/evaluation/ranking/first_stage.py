"""The first stage, which finds the candidates: a retriever over the collection, or a run of another system."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic, read_run
from rag_posfix.evaluation.ranking.rankings import (
    QueryCandidates,
    RankedTopics,
    Ranking,
    RankJournal,
    checked_ranking,
    rank_missing,
    relevance,
    retrieval_key,
)
from rag_posfix.evaluation.record import Progress, file_digest, silent
from rag_posfix.parameters import Integer, Number, NumberList, check_parameters
from rag_posfix.registry import Registry
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

FIRST_STAGE = "first_stage"
"""Label of its run among the runs of the rerankers."""

FIRST_STAGES: Registry[type] = Registry("first stage")
"""The retrievers that can be a first stage, by name; their classes hold the parameters."""

DOCUMENTS_PER_BATCH = 128
BATCHES_PER_SAVE = 16
_BM25_PARAMETERS = ("k1", "b")


@dataclass(frozen=True, slots=True, eq=False)
class FirstStage:
    """A retriever of candidates.

    Attributes:
        name: Its name in results.
        identity: Digest of its method, parameters, model and documents.
        rank_all: Yields (index, ranking), in any order, from topics and the maximum length of a ranking.
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
    """
    run = read_run(path)

    def rank_all(topics: Sequence[Topic], depth: int) -> Iterator[tuple[int, Ranking]]:
        for index, topic in enumerate(topics):
            pairs = run.get(topic.id, [])[:depth]
            yield index, Ranking(tuple(name for name, _ in pairs), tuple(score for _, score in pairs), 0.0)

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
        folder: Where an index of vectors is kept for later runs; None keeps it in memory.
    """
    documents = [document for document in collection.documents.values() if document.page_content.strip()]
    if not documents:
        raise EvaluationError("no document of the corpus has text; give another corpus")
    name, identity = FIRST_STAGES.resolve(spec.name), None
    retrievers: list[Retriever] = []
    if name != "bm25":
        from rag_posfix.retrieval.base import PassageRetriever
        from rag_posfix.retrieval.embeddings import embedding_identity

        model = embeddings()
        identity = embedding_identity(model)
        store = _open_vectors(documents, model, collection.digest, folder, progress)
        retrievers.append(PassageRetriever(store=store))
    if name != "dense":
        retrievers.append(_words_retriever(documents, spec.parameters))
    retriever = _retriever_of(retrievers, spec.parameters)

    def rank_all(topics: Sequence[Topic], depth: int) -> Iterator[tuple[int, Ranking]]:
        return enumerate(_rank_topic(retriever, name, topic, depth) for topic in topics)

    return FirstStage(name, _stage_identity(spec, collection, identity), rank_all)


def _stage_identity(spec: MethodSpec, collection: Collection, model: str | None) -> str:
    """Return the identity of a first stage that searches; ``model`` identifies the embedding model, if any."""
    identity = [FIRST_STAGES.resolve(spec.name), repr(sorted(spec.parameters.items())), collection.digest]
    return content_hash(*identity, *([] if model is None else [model]))


def _rank_topic(retriever: Retriever, name: str, topic: Topic, depth: int) -> Ranking:
    """Return at most ``depth`` documents for a topic; ``name`` is the first stage in messages."""
    started = time.perf_counter()
    documents = retriever.retrieve(topic.question, depth)
    seconds = time.perf_counter() - started
    return Ranking(*checked_ranking(name, topic.id, documents, documents), seconds)


def retrieve(
    stage: FirstStage, topics: Sequence[Topic], depth: int, journal: RankJournal, progress: Progress = silent
) -> RankedTopics:
    """Run the first stage, ``depth`` documents per topic, for every topic without a ranking in the journal."""

    def rank(missing: Sequence[int]) -> Iterable[tuple[int, Ranking]]:
        return stage.rank_all([topics[number] for number in missing], depth)

    ids = [topic.id for topic in topics]
    keys = [retrieval_key(stage.identity, topic.question, depth) for topic in topics]
    with progress("retrieving") as report:
        return rank_missing(FIRST_STAGE, ids, keys, rank, journal if stage.searches else RankJournal(), report)


def candidates_of(topics: Sequence[Topic], ranked: RankedTopics, collection: Collection) -> list[QueryCandidates]:
    """Return the input of rerankers: copies of the documents, in the order of the first stage, with its scores."""
    result = []
    for topic in topics:
        ranking = ranked.rankings[topic.id]
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


def _searched_texts(documents: Iterable[Document]) -> list[str]:
    """Return the texts (title and text) that are embedded and searched by words."""
    from rag_posfix.retrieval.index.documents import searchable_text, stored_copy

    return [searchable_text(stored_copy(document)) for document in documents]


def _open_vectors(
    documents: Sequence[Document], embeddings: Embeddings, digest: str, folder: Path | None, progress: Progress
) -> FaissVectorStore:
    """Return a store with the vectors of all documents, which is saved as they are made: an interrupt loses few.

    Args:
        digest: Hash of the collection, which names the saved store together with the model.
        folder: Where the store is kept for later runs; None keeps it in memory.
    """
    from rag_posfix.retrieval.embeddings import embedding_identity
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    digest = content_hash(embedding_identity(embeddings), digest)
    index = None if folder is None else folder / f"index-{digest[:16]}"
    if index is not None and index.is_dir():  # flat: candidates are the nearest, whatever the size of the collection
        store = FaissVectorStore.load(index, embeddings, kind="flat")
    else:
        store = FaissVectorStore(embeddings, kind="flat")
    stored = set(store.table.ids())
    # Texts of like length share a batch, which spares padding; with the id, batches are the same in every run.
    missing = sorted(
        (document for document in documents if str(document.id) not in stored),
        key=lambda document: (len(document.page_content), str(document.id)),
    )
    batches = [missing[start : start + DOCUMENTS_PER_BATCH] for start in range(0, len(missing), DOCUMENTS_PER_BATCH)]
    with progress("embedding") as report:
        for number, batch in enumerate(batches, start=1):
            store.add_vectors(batch, store.embed_texts(_searched_texts(batch)))
            report(len(store), len(documents))
            if index is not None and (number % BATCHES_PER_SAVE == 0 or number == len(batches)):
                index.parent.mkdir(parents=True, exist_ok=True)
                store.save(index)
    return store


def _words_retriever(documents: Sequence[Document], parameters: Mapping[str, Any]) -> Retriever:
    """Return a retriever by words; its documents have no text."""
    import numpy as np

    from rag_posfix.retrieval.bm25 import BM25Index, BM25Retriever
    from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry, stored_id

    given = {name: value for name in _BM25_PARAMETERS if (value := parameters.get(name)) is not None}
    counted = BM25Index.build(_searched_texts(documents), **given)
    table = DocumentTable()
    keys = table.add(IndexEntry(Document(id=stored_id(document), page_content="")) for document in documents)
    return BM25Retriever(table=table, k1=counted.k1, b=counted.b, counted=(np.asarray(keys, dtype=np.int64), counted))


def _retriever_of(retrievers: Sequence[Retriever], parameters: Mapping[str, Any]) -> Retriever:
    """Return the only retriever, or the fusion of one by embeddings and one by words."""
    if len(retrievers) == 1:
        return retrievers[0]
    from rag_posfix.retrieval.hybrid import HybridRetriever

    fusion = {name: v for name, v in parameters.items() if v is not None and name not in _BM25_PARAMETERS}
    return HybridRetriever(retrievers=retrievers, **fusion)
