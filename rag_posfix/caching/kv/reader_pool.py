"""A pool of threads that read and verify several entries at once. Hashing and reading files release the GIL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_THREADS = 4


class ReaderPool:
    """Applies a function to several items at once. The threads start with the first use."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Return the results in the order of the items."""
        items = list(items)
        if len(items) < 2:
            return [function(item) for item in items]
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rag-posfix-reader")
            results = self._pool.map(function, items)
        return list(results)

    def close(self) -> None:
        """End the threads; another ``map`` starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
