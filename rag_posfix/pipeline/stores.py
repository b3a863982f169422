"""Protocols of the answer cache and the passage KV store, and dropping entries of removed documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from langchain_core.documents import Document

from rag_posfix.assembly.documents import content_key, document_id
from rag_posfix.contracts.request import own_tags


class AnswerCache(Protocol):
    """The answer cache. Methods do not raise if a tier fails: a failure is counted and is a miss."""

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored answer (JSON types only), or None."""
        ...

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Store an answer; ``document_ids`` are the documents it was made from."""
        ...

    def single_flight(self, key: str) -> AbstractContextManager[bool | None]:
        """Hold while computing ``key``, after a look-up found nothing; equal concurrent keys wait.

        The value says whether another call may have stored the answer since that look-up.
        """
        ...

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        """Drop every answer made from one of these documents."""
        ...

    def close(self) -> None:
        """Close files and connections; later lookups are misses."""
        ...


class PassageKVStore(Protocol):
    """The passage KV store, to drop entries and to check what was written. Methods do not raise if a tier fails.

    The methods of ``caching.kv.store.PassageStore`` that the pipeline needs; importing that class needs torch.
    """

    @property
    def queue_bytes(self) -> int:
        """Size limit of the write queue in bytes; entries beyond it are lost."""
        ...

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until the write queue is empty; return False after a timeout."""
        ...

    def persistent_stats(self) -> Sequence[dict[str, Any]]:
        """Return name, entries, bytes and errors of each tier on disk or in Redis; of all tiers if there is none."""
        ...

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry made from passages with one of these content keys."""
        ...

    def close(self) -> None:
        """Close files and connections; later lookups are misses."""
        ...


def invalidate(
    documents: Sequence[Document],
    answers: AnswerCache | None,
    passages: PassageKVStore | None,
    salt: str | None = None,
) -> tuple[int, int]:
    """Drop the answers made from removed documents, and the keys and values of their passages; return both counts.

    Args:
        salt: Drop the entries of this salt only; None drops the entries of all salts.
    """
    ids: Sequence[str] = [document_id(document) for document in documents]
    keys: Sequence[str] = [content_key(document) for document in documents]
    if salt:
        ids, keys = own_tags(salt, ids), own_tags(salt, keys)
    # A server's judgements of the passages have the keys as tags.
    n_answers = 0 if answers is None else answers.drop_documents([*ids, *keys])
    n_passages = 0 if passages is None else passages.drop(keys)
    return n_answers, n_passages
