"""Drops what other processes keep of documents that are gone from an index: answers, and keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from rag_posfix.assembly.documents import content_key, document_id
from rag_posfix.caching.answers.build import build_answer_cache
from rag_posfix.caching.kv.build import build_passage_store
from rag_posfix.settings import Settings

__all__ = ["forget"]


def forget(documents: Sequence[Document], settings: Settings) -> tuple[int, int]:
    """Drop answers made from ``documents``, and their passages, from the tiers on disk and in Redis.

    What running processes hold in memory stays until it expires or is evicted. A tier that fails is left as it is.

    Args:
        documents: What is gone.
        settings: Where answers and passages are kept.

    Returns:
        How many answers and how many passages there were.
    """
    if not documents:
        return 0, 0
    answers = passages = 0
    cache = build_answer_cache(settings.cache, settings.cache_dir)
    if cache is not None:
        try:
            answers = cache.drop_documents([document_id(document) for document in documents])
        finally:
            cache.close()
    kept = settings.passages
    if kept.outlives_the_process(settings.cache_dir):
        store = build_passage_store(kept, settings.cache_dir)
        if store is not None:
            try:
                passages = store.drop([content_key(document) for document in documents])
            finally:
                store.close()
    return answers, passages
