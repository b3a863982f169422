"""Warnings of the question that is being answered, in a ``ContextVar``: a step that falls back says so here.

langchain's interface of a reranker returns documents only, so that a reranker cannot return a warning with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WARNINGS: ContextVar[list[str] | None] = ContextVar("rag_posfix_warnings", default=None)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Yield the list to which ``warn`` adds during the block."""
    warnings: list[str] = []
    token = _WARNINGS.set(warnings)
    try:
        yield warnings
    finally:
        _WARNINGS.reset(token)


def warn(message: str) -> None:
    """Add a warning to the answer of the current question; no-op outside of a question."""
    warnings = _WARNINGS.get()
    if warnings is not None:
        warnings.append(message)
