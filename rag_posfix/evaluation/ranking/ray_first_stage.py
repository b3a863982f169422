"""The first stage on a Ray cluster: processes there embed the documents, count their words and search.

Vectors are made once, in batches that are those of one process, and word statistics once; both are copied into Ray's
object store, from which every process takes them. The process that asks loads no model and searches nothing; it keeps
the journal and the vectors in its folder. Results equal those of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.ranking.first_stage import FIRST_STAGES, FirstStage, rank_topic, stage_identity
from rag_posfix.evaluation.ranking.rankings import Ranking
from rag_posfix.evaluation.ranking.stage_index import (
    count_words,
    documents_with_text,
    embedded,
    open_vectors,
    retriever_of,
    searched_texts,
    stored_ids,
    vectors_retriever,
    words_retriever,
)
from rag_posfix.evaluation.ray_cluster import connected, fetched
from rag_posfix.evaluation.ray_workers import RayWorkers, ray_workers
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rag_posfix.retrieval.bm25 import BM25Index

EmbeddingsOpener = Callable[[Settings], Embeddings]

TOPICS_PER_CALL = 16


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

    What it searches is made when the first topic is asked.

    Args:
        spec: A name in ``FIRST_STAGES`` and parameters, checked.
        settings: The embedding model; every process that needs it loads its own.
        workers: Processes that embed and search, each with one CPU. One that dies is started again with its call.
        folder: Where vectors are kept for later runs, in the process that asks; None does not keep them.
        opener: Makes the embedding model in a process; by ``settings`` if None.

    Raises:
        ConfigError: Ray is not installed.
        EvaluationError: no document has text, or the cluster cannot be reached or started, or a process failed.
    """
    documents = documents_with_text(collection)
    name = FIRST_STAGES.resolve(spec.name)
    with (
        connected() as ray,
        ray_workers(ray, _Searcher, (name, dict(spec.parameters), opener or _opened, settings), workers) as there,
    ):
        model = None if name == "bm25" else there.one("identity")

        @functools.cache
        def index() -> _Index:
            names = there.put(stored_ids(documents))
            vectors = None if model is None else _vectors(there, model, documents, collection.digest, folder, progress)
            words = None if name == "dense" else there.kept("count", searched_texts(documents))
            return _Index(names, vectors, words)

        def rank_all(topics: Sequence[Topic], depth: int) -> Iterator[tuple[int, Ranking]]:
            asked = [replace(topic, grades={}) for topic in topics]
            starts = range(0, len(asked), TOPICS_PER_CALL)
            calls = [(index(), asked[start : start + TOPICS_PER_CALL], depth) for start in starts]
            for number, rankings in there.each("search", calls):
                yield from enumerate(rankings, start=starts[number])

        yield FirstStage(name, stage_identity(spec, collection, model), rank_all)


@dataclass(frozen=True, slots=True)
class _Index:
    """References to what is searched.

    Attributes:
        names: To the ids of the documents.
        vectors: To a vector for each, or None.
        words: To their word statistics, or None.
    """

    names: Any
    vectors: Any
    words: Any


class _Searcher:
    """What a process on the cluster does. Models and index are loaded at the first call that needs them."""

    def __init__(self, name: str, parameters: dict[str, Any], opener: EmbeddingsOpener, settings: Settings) -> None:
        self._name = name
        self._parameters = parameters
        self._embeddings = functools.cache(lambda: opener(settings))
        self._retriever = functools.cache(self._opened_retriever)

    def identity(self) -> str:
        from rag_posfix.retrieval.embeddings import embedding_identity

        return embedding_identity(self._embeddings())

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        return embedded(self._embeddings(), texts)

    def count(self, texts: list[str]) -> BM25Index:
        return count_words(texts, self._parameters)

    def search(self, index: _Index, topics: list[Topic], depth: int) -> list[Ranking]:
        retriever = self._retriever(index)
        return [rank_topic(retriever, self._name, topic, depth) for topic in topics]

    def _opened_retriever(self, index: _Index) -> Retriever:
        names, retrievers = fetched(index.names), []
        if index.vectors is not None:
            retrievers.append(vectors_retriever(names, fetched(index.vectors), self._embeddings()))
        if index.words is not None:
            retrievers.append(words_retriever(names, fetched(index.words)))
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


def _vectors(
    there: RayWorkers, model: str, documents: Sequence[Document], digest: str, folder: Path | None, progress: Progress
) -> Any:
    """Return a reference to the vectors of ``documents``, in their order."""

    def embed(batches: Sequence[list[str]]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        return there.each("embed", [(texts,) for texts in batches])

    store = open_vectors(documents, _LoadedThere(model), digest, embed, folder, progress)
    return there.put(store.vectors_of(stored_ids(documents)))


def _opened(settings: Settings) -> Embeddings:
    from rag_posfix.pipeline.build import build_reranker_models

    return build_reranker_models(settings).embeddings()
