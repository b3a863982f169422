"""Opens the retrievers that settings name: on an index, or on a vector store of another program."""

from __future__ import annotations

import os
from pathlib import Path

from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.base import UNDECIDED, as_retriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.dense import PassageRetriever
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from rag_posfix.retrieval.external_stores import is_external, open_external
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.followed_index import FollowedIndex
from rag_posfix.retrieval.hybrid import HybridRetriever
from rag_posfix.settings import Settings


def open_retrievers(
    settings: Settings, index: str | Path | None, retriever: object, embeddings: SentenceEmbeddings, *, follows: bool
) -> tuple[Retriever | None, dict[str, Retriever], list[FaissVectorStore]]:
    """Return the retriever of questions without a named index, those of named ones, and the stores that can change."""
    served, store = open_served_retriever(settings, index, retriever, embeddings, follows=follows)
    opened = {
        name: open_retriever(settings, folder, embeddings, follows=follows)
        for name, folder in settings.indexes.items()
    }
    stores = [store, *(extra for _, extra in opened.values())]
    return served, {name: extra for name, (extra, _) in opened.items()}, [each for each in stores if each is not None]


def open_served_retriever(
    settings: Settings, index: str | Path | None, retriever: object, embeddings: SentenceEmbeddings, *, follows: bool
) -> tuple[Retriever | None, FaissVectorStore | None]:
    """Return the retriever of questions without a named index, and its vector store; None if there is none."""
    if retriever is not None:
        if index is not None:
            raise ConfigError(f"index={str(index)!r} and a retriever are given; give one of them")
        return as_retriever(retriever), None
    folder = index if index is not None else settings.index
    if is_external(settings.retriever):
        return open_external(settings.retriever, embeddings, settings.k, index=folder), None
    return (None, None) if folder is None else open_retriever(settings, Path(folder), embeddings, follows=follows)


def open_retriever(
    settings: Settings, folder: Path, embeddings: SentenceEmbeddings, *, follows: bool = False, mmap: bool = False
) -> tuple[Retriever, FaissVectorStore | None]:
    """Return the retriever that the settings name, on an index, and its vector store if that can be changed.

    Args:
        follows: Return a ``FollowedIndex``, whose versions are memory-mapped.
        mmap: Memory-map vectors, documents and word statistics.
    """
    if follows:
        # Windows does not delete a mapped file: the index could not be replaced.
        mapped = os.name != "nt"
        return FollowedIndex(folder, lambda: open_retriever(settings, folder, embeddings, mmap=mapped)[0]), None
    if settings.retriever == "bm25":
        words = BM25Retriever.load(folder, k=settings.k, mmap=mmap)
        return words.model_copy(update={"similarity": UNDECIDED}), None
    store = FaissVectorStore.load(folder, embeddings, mmap=mmap)
    dense = PassageRetriever(store=store, k=settings.k)
    if settings.retriever != "hybrid":  # further indexes next to an external store too
        return dense, store
    words = BM25Retriever.load(folder, table=store.table, k=settings.k, mmap=mmap)
    return HybridRetriever(retrievers=[dense, words], k=settings.k, similarity=UNDECIDED), store
