"""Opens the retrievers and the servers that settings name: indexes, vector stores, models and rerankers elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.cancellation import check_cancelled, remaining_seconds
from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import ConfigError
from rag_posfix.generation.remote.connection import Connection, ServerLimits, is_remote, parse_remote
from rag_posfix.generation.remote.generator import RemoteGenerator, open_remote
from rag_posfix.retrieval.base import UNDECIDED, PassageRetriever, as_retriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from rag_posfix.retrieval.external_stores import is_external, open_external
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from rag_posfix.retrieval.index.storage import read_one_version
from rag_posfix.retrieval.indexing import FollowedIndex
from rag_posfix.settings import RemoteSettings, Settings


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
        return FollowedIndex(folder, lambda: _read_retriever(settings, folder, embeddings, mmap=mapped)[0]), None
    return read_one_version(folder, lambda: _read_retriever(settings, folder, embeddings, mmap=mmap))[0]


def _read_retriever(
    settings: Settings, folder: Path, embeddings: SentenceEmbeddings, *, mmap: bool
) -> tuple[Retriever, FaissVectorStore | None]:
    if settings.retriever == "bm25":
        words = BM25Retriever.load(folder, k=settings.k, mmap=mmap)
        return words.model_copy(update={"similarity": UNDECIDED}), None
    store = FaissVectorStore.load(folder, embeddings, mmap=mmap)
    dense = PassageRetriever(store=store, k=settings.k)
    if settings.retriever not in ("auto", "hybrid"):  # further indexes next to an external store too
        return dense, store
    words = BM25Retriever.load(folder, table=store.table, k=settings.k, mmap=mmap)
    if settings.retriever == "auto":
        similarity = dense.similarity_range()
        return HybridRetriever(retrievers=[dense, words], fusion="fill", k=settings.k, similarity=similarity), store
    return HybridRetriever(retrievers=[dense, words], k=settings.k, similarity=UNDECIDED), store


def open_remote_generator(settings: Settings, cache: TieredAnswerCache | None = None) -> RemoteGenerator:
    """Return the generator of a remote ``settings.model``; ``cache`` keeps its judgements of passages.

    Raises:
        ConfigError: a setting splits or changes weights, which are on the server.
    """
    if settings.adapter is not None:
        raise ConfigError(f"an adapter changes weights in this process, and model={settings.model!r} is on a server")
    for name, is_set in (("tp", settings.tp != 1), ("device_map", settings.device_map is not None)):
        if is_set:
            raise ConfigError(f"{name} splits weights in this process, and model={settings.model!r} is on a server")
    return open_remote(
        settings.model,
        api_key=_key_of(settings),
        context_window=settings.remote.context_window,
        limits=_limits(settings),
        token_limit_field=settings.remote.max_tokens_field,
        check_cancelled=check_cancelled,
        remaining_seconds=remaining_seconds,
        judgements=cache,
    )


def remote_settings_of(settings: Settings, model: str) -> RemoteSettings:
    """Return ``settings.remote`` for another model: without the key if the served model is on another server."""
    if not is_remote(settings.model) or _servers(model) <= _servers(settings.model):
        return settings.remote
    return settings.remote.model_copy(update={"api_key": None})


def _servers(model: str) -> set[tuple[str, ...]]:
    """Return scheme and host of each server of a model; none of a model in this process."""
    return {urlsplit(url)[:2] for url in parse_remote(model).urls} if is_remote(model) else set()


def _key_of(settings: Settings) -> str | None:
    return None if settings.remote.api_key is None else settings.remote.api_key.get_secret_value()


def _limits(settings: Settings) -> ServerLimits:
    remote = settings.remote
    return ServerLimits(remote.connect_timeout_seconds, remote.timeout_seconds, remote.retries, remote.concurrency)


def connect_with(settings: Settings) -> Callable[[str], Connection]:
    """Return a function that connects to the server of a reranker; only the remote model's own server gets its key."""

    def connect(url: str) -> Connection:
        own = urlsplit(url)[:2] in _servers(settings.model)
        return Connection(
            url, _key_of(settings) if own else None, _limits(settings), check_cancelled, remaining_seconds
        )

    return connect
