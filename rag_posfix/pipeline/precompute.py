"""Precomputes the keys and values of the passages of an index, so that the first question about a passage is warm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.documents import Document

from rag_posfix.assembly.documents import CheckedDocument, checked_document
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.assembly.tokenization import TokenizedPassage, TokenizedPrompt, tokenize_passage, tokenize_prompt
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.pipeline.protocols import PassagePrecomputer, WritablePassages

BATCH_PASSAGES = 16
"""Passages that are read in one batch, at most."""

WRITE_TIMEOUT_SECONDS = 60.0
"""How long a batch may take to be written."""

_logger = logging.getLogger(__name__)


def precompute(
    engine: PassagePrecomputer,
    documents: Sequence[Document],
    mitigation: MitigationChoice,
    *,
    template: PromptTemplate | None = None,
    salt: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compute each document's keys and values as in a prompt without history; return the number of computed tokens.

    A document whose entry is stored already costs one lookup. The order of the documents does not matter. If the store
    is too small for all documents, it holds the last ones, and a warning is logged.

    Args:
        engine: A model with a passage KV store.
        documents: The documents. Skipped are documents without text, duplicates, and documents that exceed the context
            window, because a prompt contains them truncated.
        template: The prompt template; the default template if None.
        salt: As in ``GenerationRequest``.

    Raises:
        ConfigError: the method's passages are not independent, or the engine has no store, or the store stores
        nothing. UnsupportedModelError: the method does not support the model.
    """
    chosen = template or PromptTemplate()
    prompt = tokenize_prompt(engine.encoder, chosen, "?")
    tokenized = (tokenize_passage(engine.encoder, chosen, one.text, title=one.title) for one in _distinct(documents))
    passages = [one for one in tokenized if len(prompt) + len(one) < engine.context_window]
    before = _lasting(engine.passages)
    tokens = done = 0
    for some in _batches(passages, _max_tokens(engine, prompt)):
        read = engine.precompute(prompt.with_passages(some), mitigation, salt)
        _wait(engine.passages)
        if read and not tokens:  # the first that had to be written
            _check_kept(before, _lasting(engine.passages))
        tokens, done = tokens + read, done + len(some)
        if progress is not None:
            progress(done, len(passages))
    if tokens:
        _tell_lost(before, _lasting(engine.passages), len(passages))
    return tokens


def _distinct(documents: Sequence[Document]) -> list[CheckedDocument]:
    """Return the documents with text, one for each title and text.

    Assembly drops more duplicates: documents of equal text and different titles. A question may retrieve only one of
    them.
    """
    distinct: dict[str, CheckedDocument] = {}
    for index, document in enumerate(documents):
        one = checked_document(document, index, with_relevance=False)
        if one.text.strip():
            distinct.setdefault(one.key, one)
    return list(distinct.values())


def _max_tokens(engine: PassagePrecomputer, prompt: TokenizedPrompt) -> int:
    """Return the number of tokens whose entries fit into the write queue of the store; further ones would be lost."""
    if engine.passages is None:
        return 0
    return engine.passages.queue_bytes // engine.kv_bytes_per_token - len(prompt.prefix)


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


def _wait(store: WritablePassages | None) -> None:
    """Wait until the computed entries are written: entries that do not fit into the write queue would be lost."""
    if store is not None and not store.flush(WRITE_TIMEOUT_SECONDS):
        raise ConfigError(
            f"the passage store did not write what was read within {WRITE_TIMEOUT_SECONDS:g} seconds; check the disk "
            "or the Redis that it keeps passages in"
        )


def _lasting(store: WritablePassages | None) -> Sequence[dict[str, Any]]:
    return [] if store is None else store.lasting_stats()


def _check_kept(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> None:
    """Raise if no tier stored the written entries."""
    if not any(tier.get("entries") and not failed for tier, failed in zip(now, _failures(before, now), strict=True)):
        raise ConfigError(
            f"the passage store kept nothing of what was read ({_told(before, now)}); check the disk or the Redis "
            "that it keeps passages in, and the bounds in the settings"
        )


def _tell_lost(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], n_passages: int) -> None:
    """Log a warning if no tier can hold all computed entries."""
    failures = _failures(before, now)
    if not any(
        (tier.get("entries") or 0) >= n_passages and not failed for tier, failed in zip(now, failures, strict=True)
    ):
        _logger.warning(
            "the passage store did not keep all of the %d passages that were read (%s); raise its bounds in the "
            "settings, or read fewer passages ahead",
            n_passages,
            _told(before, now),
        )


def _failures(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[int]:
    """Return the number of errors of each tier since ``before``."""
    return [new.get("errors", 1) - old.get("errors", 0) for old, new in zip(before, now, strict=True)]


def _told(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    pairs = zip(now, _failures(before, now), strict=True)
    return ", ".join(f"{tier['name']}: {failed} errors, {tier.get('entries') or 0} entries" for tier, failed in pairs)
