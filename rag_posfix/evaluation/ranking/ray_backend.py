"""Rankings on a Ray cluster: processes there search, or hold a reranker. Results equal those of one process.

Vectors are made once, in batches that are those of one process, and word statistics once; both are copied into Ray's
object store, from which every process takes them. Queries contain the texts of their candidates. The process that asks
loads no model and searches nothing; it keeps the journal and the vectors in its folder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.ranking.first_stage import (
    FIRST_STAGES,
    FirstStage,
    count_words,
    documents_with_text,
    embed_batch,
    open_vectors,
    rank_topic,
    retriever_of,
    searched_texts,
    stage_identity,
    stored_ids,
    vectors_retriever,
    words_retriever,
)
from rag_posfix.evaluation.ranking.rankings import (
    OpenedReranker,
    QueryCandidates,
    Ranker,
    Ranking,
    RerankerChoice,
    open_reranker,
    rerank_one,
)
from rag_posfix.evaluation.ray_workers import connect_ray, fetch, ray_workers
from rag_posfix.evaluation.record import Progress, silent
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rag_posfix.retrieval.bm25 import BM25Index

EmbeddingsOpener = Callable[[Settings], Embeddings]
RerankerOpener = Callable[[RerankerChoice, Settings], OpenedReranker]

TOPICS_PER_CALL = 16
QUERIES_PER_CALL = 4


@contextmanager
def ray_first_stage(
    spec: MethodSpec,
    collection: Collection,
    settings: Settings,
    workers: int,
    folder: Path | None = None,
    progress: Progress = silent,
    opener: EmbeddingsOpener | None = None,
) -> Iterator[FirstStage]:
    """Connect to Ray and yield a first stage that searches there; its processes end with the block.

    The index is made when the first topic is asked.

    Args:
        spec: A name in ``FIRST_STAGES`` and parameters, checked.
        workers: Processes that embed and search, each with one CPU. One that dies is started again with its call.
        folder: Where vectors are kept for later runs, in the process that asks; None does not keep them.
        opener: Makes the embedding model in a process; by ``settings`` if None.
    """
    documents = documents_with_text(collection)
    name = FIRST_STAGES.resolve(spec.name)
    arguments = (name, dict(spec.parameters), opener or _open_embeddings, settings)
    with ray_workers(_Searcher, arguments, workers) as pool:
        model = None if name == "bm25" else pool.call("identity")

        def embed(batches: Sequence[list[str]]) -> Iterator[tuple[int, NDArray[np.float32]]]:
            return pool.each("embed", [(texts,) for texts in batches])

        @functools.cache
        def index() -> _Index:
            ids = stored_ids(documents)
            vectors = None
            if model is not None:
                store = open_vectors(documents, _LoadedThere(model), collection.digest, embed, folder, progress)
                vectors = pool.put(store.vectors_of(ids))
            words = None if name == "dense" else pool.call_for_reference("count", searched_texts(documents))
            return _Index(pool.put(ids), vectors, words)

        def rank_all(topics: Sequence[Topic], depth: int) -> Iterator[tuple[int, Ranking]]:
            ungraded = [replace(topic, grades={}) for topic in topics]
            return pool.batches("search", ungraded, TOPICS_PER_CALL, index() if topics else None, depth)

        yield FirstStage(name, stage_identity(spec, collection, model), rank_all)


@dataclass(frozen=True, slots=True)
class _Index:
    """References to the ids of the documents, to a vector for each or None, and to their word statistics or None."""

    ids: Any
    vectors: Any
    words: Any


class _Searcher:
    """What a process on the cluster does. Models and index are loaded at the first call that needs them."""

    def __init__(self, name: str, parameters: dict[str, Any], opener: EmbeddingsOpener, settings: Settings) -> None:
        self._name = name
        self._parameters = parameters
        self._embeddings = functools.cache(lambda: opener(settings))
        self._retriever = functools.cache(self._open_retriever)

    def identity(self) -> str:
        from rag_posfix.retrieval.embeddings import embedding_identity

        return embedding_identity(self._embeddings())

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        return embed_batch(self._embeddings(), texts)

    def count(self, texts: list[str]) -> BM25Index:
        return count_words(texts, self._parameters)

    def search(self, topics: list[Topic], index: _Index, depth: int) -> list[Ranking]:
        retriever = self._retriever(index)
        return [rank_topic(retriever, self._name, topic, depth) for topic in topics]

    def _open_retriever(self, index: _Index) -> Retriever:
        ids, retrievers = fetch(index.ids), []
        if index.vectors is not None:
            retrievers.append(vectors_retriever(ids, fetch(index.vectors), self._embeddings()))
        if index.words is not None:
            retrievers.append(words_retriever(ids, fetch(index.words)))
        return retriever_of(retrievers, self._parameters)


class _LoadedThere(Embeddings):
    """Stands for the embedding model of the processes: it has its identity, and embeds nothing."""

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Raise: the model is not loaded in this process."""
        raise EvaluationError("the embedding model is loaded in processes of Ray and not in this one; leave --ray out")

    def embed_query(self, text: str) -> list[float]:
        """Raise: the model is not loaded in this process."""
        return self.embed_documents([text])[0]


@contextmanager
def ray_rankers(
    settings: Settings, workers: int, opener: RerankerOpener | None = None
) -> Iterator[Callable[[RerankerChoice], Ranker]]:
    """Connect to Ray and yield a function that makes rankers there.

    A ranker is used up before the next one is made: its processes end then, and at the end of the block.

    Args:
        workers: Processes that hold a reranker, each with one CPU. One that dies is started again with its call.
        opener: Makes a reranker in a process; by name from the registry if None.
    """
    with connect_ray(), ExitStack() as running:

        def ranker(choice: RerankerChoice) -> Ranker:
            running.close()
            arguments = (opener or _open_reranker, choice, settings)
            pool = running.enter_context(ray_workers(_Ranking, arguments, workers))
            rank_all = functools.partial(pool.batches, "rank", size=QUERIES_PER_CALL)
            # Asked of a process there: this one need not be able to load the model.
            return Ranker(choice.label, pool.call("identity"), rank_all)

        yield ranker


class _Ranking:
    """What a process on the cluster does. The reranker is made at the first call."""

    def __init__(self, opener: RerankerOpener, choice: RerankerChoice, settings: Settings) -> None:
        self._reranker = functools.cache(lambda: opener(choice, settings))

    def identity(self) -> str:
        return self._reranker().identity

    def rank(self, queries: Sequence[QueryCandidates]) -> list[Ranking]:
        return [rerank_one(self._reranker(), candidates) for candidates in queries]


def _open_reranker(choice: RerankerChoice, settings: Settings) -> OpenedReranker:
    from rag_posfix.pipeline.build import build_reranker_models

    return open_reranker(choice, build_reranker_models(settings))


def _open_embeddings(settings: Settings) -> Embeddings:
    from rag_posfix.pipeline.build import build_reranker_models

    return build_reranker_models(settings).embeddings()
