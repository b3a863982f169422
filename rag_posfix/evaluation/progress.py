"""Progress callbacks of experiments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Called with the name of a step when it begins; returns a context whose value is called with (done, total)."""


def silent(_step: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Report nothing."""
    return nullcontext(lambda done, total: None)
