"""Puts a pipeline together from settings. The one place where concrete parts are chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.budget import PassageBudget
from rag_posfix.assembly.orders import create_order
from rag_posfix.caching.answers.build import build_answer_cache
from rag_posfix.caching.kv.build import build_passage_store
from rag_posfix.contracts.generator import Generator, Retriever
from rag_posfix.contracts.request import MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.load import load_engine, quiet_loading
from rag_posfix.generation.tensor_parallel.launch import load_parallel
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from rag_posfix.reranking.build import RerankerModels, build_reranker, parse_reranker
from rag_posfix.reranking.guarded import GuardedReranker
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.dense import PassageRetriever
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from rag_posfix.settings import Settings

__all__ = ["build_pipeline"]

DEFAULT_RERANKER = "embedding"


def build_pipeline(
    settings: Settings | None = None, *, index: str | Path | None = None, generator: Generator | None = None
) -> Pipeline:
    """Return a pipeline: model, embeddings, index, reranker and cache as ``settings`` say.

    Args:
        settings: What to run with; read from the environment if None.
        index: Folder of an index, in place of ``settings.index``. Without either, questions bring their documents.
        generator: Used in place of loading ``settings.model``.

    Raises:
        ConfigError: the model or a setting is at fault.
        RetrievalError: the index is damaged, foreign, or was built with other embeddings.
        UnsupportedModelError: the model cannot carry the seam.
    """
    chosen = settings or Settings()
    parse_reranker(chosen.reranker or DEFAULT_RERANKER)  # before the model, as the index below
    assembly = _assembly(chosen)
    embeddings = SentenceEmbeddings(chosen.embedding_model)
    folder = index if index is not None else chosen.index
    retriever, store = None, None
    if folder is not None:  # before the model: a wrong path is told at once
        retriever, store = _retriever(chosen, Path(folder), embeddings)
    engine, on_close = (generator, None) if generator is not None else _load(chosen)
    guarded = _reranker(chosen, embeddings, engine, on_close)
    passages, reader = None, engine.engine if isinstance(engine, BatchingGenerator) else engine
    if isinstance(reader, Engine) and reader.passages is None:  # a store that it has belongs to whoever gave it
        passages = reader.passages = build_passage_store(chosen.passages, chosen.cache_dir, reader.loaded.device)
    pipeline = Pipeline(
        engine,
        Assembler(engine.encoder, engine.context_window, **assembly),
        retriever=retriever,
        reranker=guarded,
        cache=build_answer_cache(chosen.cache, chosen.cache_dir) if chosen.cache.enabled else None,
        defaults=Defaults(
            mitigation=MitigationChoice(chosen.mitigation),
            order=chosen.order,
            k=chosen.k,
            sampling=Sampling(max_tokens=chosen.max_tokens),
            tenant=chosen.tenant,
        ),
        passages=passages,
        on_close=partial(_close, guarded, on_close),
        candidates=chosen.candidates if chosen.reranker is not None else 0,
    )
    if store is not None:
        store.add_delete_listener(pipeline.forget)
    return pipeline


def _reranker(
    settings: Settings, embeddings: Embeddings, engine: Generator, on_close: Callable[[], None] | None
) -> GuardedReranker:
    """Return the reranker that the settings ask for; if it cannot be made, what was loaded is closed."""
    try:
        name, parameters = parse_reranker(settings.reranker or DEFAULT_RERANKER)
        made = build_reranker(name, parameters, RerankerModels(lambda: embeddings, lambda: engine))
    except ConfigError:
        if on_close is not None:
            on_close()
        raise
    return GuardedReranker(reranker=made, deadline_seconds=settings.reranker_deadline_seconds)


def _close(guarded: GuardedReranker, on_close: Callable[[], None] | None) -> None:
    guarded.close()
    if on_close is not None:
        on_close()


def _retriever(
    settings: Settings, folder: Path, embeddings: SentenceEmbeddings
) -> tuple[Retriever, FaissVectorStore | None]:
    """Return the retriever that the settings ask for, and the vector store in it, where there is one."""
    if settings.retriever == "bm25":
        return BM25Retriever.load(folder, k=settings.k), None
    with quiet_loading():
        store = FaissVectorStore.load(folder, embeddings)
    dense = PassageRetriever(store=store, k=settings.k)
    if settings.retriever == "dense":
        return dense, store
    words = BM25Retriever.load(folder, table=store.table, k=settings.k)
    return HybridRetriever(retrievers=[dense, words], k=settings.k), store


def _assembly(settings: Settings) -> dict[str, Any]:
    """Return the assembler's rules, checked: what is wrong with them is told before a model is loaded."""
    parameters = {} if settings.profile is None else {"profile": {"file": str(settings.profile)}}
    create_order(settings.order, parameters)
    budget = PassageBudget(settings.passage_tokens, settings.passage_shrink, settings.overflow)
    return {"order_parameters": parameters, "budget": budget}


def _load(settings: Settings) -> tuple[Generator, Callable[[], None] | None]:
    """Return the generator that the settings ask for, and what ends it, where something must."""
    how: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "cache_dir": settings.cache_dir}
    if settings.tp == 1:
        return load_engine(settings.model, **how), None
    split = load_parallel(settings.model, tp=settings.tp, **how)
    return split, split.close
