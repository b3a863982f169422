"""What is collected while a question is answered, such as tokens that are spent apart from its answer.

langchain's interface of a reranker returns documents alone: anything else is in a ``ContextVar``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

from rag_posfix.contracts.request import Usage

T = TypeVar("T")


class Collected(Generic[T]):
    """The values of one kind that are collected for the current question."""

    def __init__(self, name: str) -> None:
        self._values: ContextVar[list[T] | None] = ContextVar(name, default=None)

    @contextmanager
    def during(self) -> Iterator[list[T]]:
        """Yield the list to which ``add`` adds during the block."""
        values: list[T] = []
        token = self._values.set(values)
        try:
            yield values
        finally:
            self._values.reset(token)

    def add(self, value: T) -> None:
        """Add a value to those of the current question; no-op outside of a question."""
        values = self._values.get()
        if values is not None:
            values.append(value)


_SPENT = Collected[Usage]("rag_posfix_spent_usage")
collected_usage, spend = _SPENT.during, _SPENT.add


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Return the sum of each count."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
