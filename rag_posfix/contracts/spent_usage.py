"""Tokens that are spent on the current question apart from its answer, such as a server's judgements of passages.

langchain's interface of a reranker returns documents alone: what was spent is in a ``ContextVar``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from rag_posfix.contracts.request import Usage

_SPENT: ContextVar[list[Usage] | None] = ContextVar("rag_posfix_spent_usage", default=None)


@contextmanager
def collected_usage() -> Iterator[list[Usage]]:
    """Yield the list to which ``spend`` adds during the block."""
    spent: list[Usage] = []
    token = _SPENT.set(spent)
    try:
        yield spent
    finally:
        _SPENT.reset(token)


def spend(usage: Usage) -> None:
    """Add tokens to those of the current question; no-op outside of a question."""
    spent = _SPENT.get()
    if spent is not None:
        spent.append(usage)


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Return the sum of each count."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
