"""Precomputes the keys and values of the passages of an index, so that the first question about a passage is warm.

Also the protocol of the answer cache, and what drops the entries of removed documents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from langchain_core.documents import Document

from rag_posfix.assembly.documents import CheckedDocument, checked_document, content_key, document_id
from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, tokenize_passage, tokenize_prompt
from rag_posfix.contracts.generator import Generator, PassageKVStore
from rag_posfix.contracts.request import MitigationChoice, tenant_tags
from rag_posfix.errors import ConfigError


class AnswerCache(Protocol):
    """The answer cache. Methods do not raise if a tier fails: a failure is counted and is a miss."""

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored answer (JSON types only), or None."""
        ...

    def begin(self) -> object:
        """Open a computation, before its documents are found; it is open as long as something refers to the object."""
        ...

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Store an answer; ``document_ids`` are the documents it was made from.

        Not if one of them was deleted since an open computation began.
        """
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
        ids, keys = tenant_tags(salt, ids), tenant_tags(salt, keys)
    # A server's judgements of the passages have the keys as tags.
    n_answers = 0 if answers is None else answers.drop_documents([*ids, *keys])
    n_passages = 0 if passages is None else passages.drop(keys)
    return n_answers, n_passages


BATCH_PASSAGES = 16
"""Maximum number of passages in one batch."""

WRITE_TIMEOUT_SECONDS = 60.0
"""How long a batch may take to be written."""

_logger = logging.getLogger(__name__)


def precompute(
    engine: Generator,
    documents: Sequence[Document],
    mitigation: MitigationChoice,
    *,
    template: PromptTemplate | None = None,
    salt: str = "",
    progress: Callable[[int, int], None] | None = None,
    permit: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Compute each document's keys and values as in a prompt without history; return the number of computed tokens.

    A document whose entry is stored already costs one lookup. The order of the documents does not matter. If the store
    is too small for all documents, it holds the last ones, and a warning is logged. Open a computation of the store
    (``begin``) before the documents are read, so that nothing is stored of those that are deleted meanwhile.

    Args:
        documents: The documents. Skipped are documents without text, duplicates, and documents that exceed the context
            window, because a prompt contains them truncated.
        template: The prompt template; the default template if None.
        salt: As in ``GenerationRequest``.
        permit: Held while a batch is computed.

    Raises:
        ConfigError: the method's passages are not independent, or the engine has no store, or the store stores
            nothing.
        UnsupportedModelError: the method does not support the model.
    """
    chosen_template, store = template or PromptTemplate(), engine.passages
    prompt = tokenize_prompt(engine.encoder, chosen_template, "?")
    tokenized = (
        tokenize_passage(engine.encoder, chosen_template, document.text, title=document.title)
        for document in _remove_duplicates(documents)
    )
    passages = [passage for passage in tokenized if len(prompt) + len(passage) < engine.context_window]
    # Entries that do not fit into the write queue of the store would be lost.
    max_tokens = 0 if store is None else store.queue_bytes // engine.kv_bytes_per_token - len(prompt.prefix)
    old_stats = _tier_stats(store)
    tokens = done = 0
    for batch in _batches(passages, max_tokens):
        with permit():
            computed = engine.precompute(prompt.with_passages(batch), mitigation, salt)
        if store is not None and not store.flush(WRITE_TIMEOUT_SECONDS):
            raise ConfigError(
                f"the passage KV store did not write the computed entries within {WRITE_TIMEOUT_SECONDS:g} seconds; "
                "check its disk or Redis"
            )
        if computed and not tokens:  # the first that had to be written
            _check_stored(old_stats, _tier_stats(store))
        tokens, done = tokens + computed, done + len(batch)
        if progress is not None:
            progress(done, len(passages))
    if tokens:
        _warn_not_stored(old_stats, _tier_stats(store), len(passages))
    return tokens


def _remove_duplicates(documents: Sequence[Document]) -> list[CheckedDocument]:
    """Return the documents with text, one for each title and text.

    Assembly drops more duplicates: documents of equal text and different titles. A question may retrieve only one of
    them.
    """
    distinct: dict[str, CheckedDocument] = {}
    for index, document in enumerate(documents):
        checked = checked_document(document, index, with_relevance=False)
        if checked.text.strip():
            distinct.setdefault(checked.key, checked)
    return list(distinct.values())


def _batches(passages: Sequence[TokenizedPassage], max_tokens: int) -> Iterator[list[TokenizedPassage]]:
    """Yield ``passages`` in order, in lists of at most ``max_tokens`` tokens and ``BATCH_PASSAGES`` passages."""
    batch: list[TokenizedPassage] = []
    for passage in passages:
        if batch and (len(batch) == BATCH_PASSAGES or sum(map(len, batch)) + len(passage) > max_tokens):
            yield batch
            batch = []
        batch.append(passage)
    if batch:
        yield batch


def _tier_stats(store: PassageKVStore | None) -> Sequence[dict[str, Any]]:
    return [] if store is None else store.persistent_stats()


def _check_stored(old_stats: Sequence[dict[str, Any]], new_stats: Sequence[dict[str, Any]]) -> None:
    """Raise if no tier stored the written entries."""
    tiers = _count_errors(old_stats, new_stats)
    if not any(tier.get("entries") and not errors for tier, errors in tiers):
        raise ConfigError(
            f"the passage KV store kept none of the computed entries ({_format_errors(tiers)}); check its disk or "
            "Redis, and the size limits in the settings"
        )


def _warn_not_stored(
    old_stats: Sequence[dict[str, Any]], new_stats: Sequence[dict[str, Any]], n_passages: int
) -> None:
    """Log a warning if no tier can hold all computed entries."""
    tiers = _count_errors(old_stats, new_stats)
    if not any((tier.get("entries") or 0) >= n_passages and not errors for tier, errors in tiers):
        _logger.warning(
            "the passage KV store did not keep all of the %d computed passages (%s); raise its size limits in the "
            "settings, or precompute fewer passages",
            n_passages,
            _format_errors(tiers),
        )


def _count_errors(
    old_stats: Sequence[dict[str, Any]], new_stats: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], int]]:
    """Return the new statistics of each tier, with its number of errors since the old ones."""
    return [(new, new.get("errors", 1) - old.get("errors", 0)) for old, new in zip(old_stats, new_stats, strict=True)]


def _format_errors(tiers: Sequence[tuple[dict[str, Any], int]]) -> str:
    return ", ".join(f"{tier['name']}: {errors} errors, {tier.get('entries') or 0} entries" for tier, errors in tiers)
