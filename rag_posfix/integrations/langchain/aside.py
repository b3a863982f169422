"""A generator that blocks, read without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from typing import TypeVar

__all__ = ["read_aside"]

T = TypeVar("T")


async def read_aside(pieces: Generator[T, None, None]) -> AsyncIterator[T]:
    """Yield what ``pieces`` yields; it runs in another thread, one step at a time, only when a piece is asked for.

    Args:
        pieces: Closed when the reader stops early, as soon as the step that runs has ended.
    """
    turn = threading.Lock()
    nothing = object()

    def step() -> T | object:
        with turn:
            return next(pieces, nothing)

    def close() -> None:
        with turn:  # a step that was cancelled runs on to its end
            pieces.close()

    try:
        while (piece := await asyncio.to_thread(step)) is not nothing:
            yield piece  # type: ignore[misc]  # not the mark
    finally:
        await asyncio.shield(asyncio.to_thread(close))
