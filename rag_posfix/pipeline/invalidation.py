"""Invalidation: cached answers, keys and values of documents that were removed from an index are dropped."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from rag_posfix.assembly.documents import content_key, document_id
from rag_posfix.contracts.cache_salt import own_tags
from rag_posfix.pipeline.protocols import AnswerCache, DroppablePassages


def invalidate(
    documents: Sequence[Document],
    answers: AnswerCache | None,
    passages: DroppablePassages | None,
    salt: str | None = None,
) -> tuple[int, int]:
    """Drop the answers made from ``documents``, and the keys and values of their passages.

    Args:
        answers: The answer cache, or None.
        passages: The passage KV store, or None.
        salt: Drops the entries of this salt alone; those of all salts if None.

    Returns:
        Number of dropped answers, and of dropped passages.
    """
    ids: Sequence[str] = [document_id(document) for document in documents]
    keys: Sequence[str] = [content_key(document) for document in documents]
    if salt:
        ids, keys = own_tags(salt, ids), own_tags(salt, keys)
    n_answers = 0 if answers is None else answers.drop_documents(ids)
    n_passages = 0 if passages is None else passages.drop(keys)
    return n_answers, n_passages
