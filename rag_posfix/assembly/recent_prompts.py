"""The passages of recent prompts, which the order ``cache_aware`` reuses."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from rag_posfix.errors import ConfigError


class RecentPrompts:
    """Keeps the content keys of the passages of recent prompts, in prompt order. Safe to share between threads.

    Args:
        most_scopes: Maximum number of scopes; the least recently used is dropped.
        most_prompts: Maximum number of prompts per scope; the oldest is dropped.

    Raises:
        ConfigError: a maximum is below 1.
    """

    def __init__(self, *, most_scopes: int = 64, most_prompts: int = 32) -> None:
        if most_scopes < 1 or most_prompts < 1:
            raise ConfigError(f"most_scopes={most_scopes} and most_prompts={most_prompts} must be >= 1")
        self._most_scopes = most_scopes
        self._most_prompts = most_prompts
        self._scopes: OrderedDict[str, OrderedDict[tuple[str, ...], None]] = OrderedDict()
        self._lock = threading.Lock()

    def recent(self, scope: str) -> tuple[tuple[str, ...], ...]:
        """Return the prompts of a scope, the newest first.

        Args:
            scope: Prompts share keys and values only within a scope: the same tenant, method and tokens before the
                passages.
        """
        with self._lock:
            return tuple(reversed(self._scopes.get(scope, ())))

    def add(self, scope: str, keys: Sequence[str]) -> None:
        """Add a prompt as the newest of its scope.

        Args:
            scope: As in ``recent``.
            keys: A content hash of each passage, in prompt order. A prompt without passages is not added.
        """
        if not keys:
            return
        with self._lock:
            prompts = self._scopes.setdefault(scope, OrderedDict())
            self._scopes.move_to_end(scope)
            prompts[tuple(keys)] = None
            prompts.move_to_end(tuple(keys))
            if len(prompts) > self._most_prompts:
                prompts.popitem(last=False)
            if len(self._scopes) > self._most_scopes:
                self._scopes.popitem(last=False)

    def drop(self, keys: Sequence[str]) -> None:
        """Drop every prompt with one of these passages.

        Args:
            keys: Content hashes of passages that were deleted.
        """
        gone = set(keys)
        with self._lock:
            for prompts in self._scopes.values():
                for prompt in [prompt for prompt in prompts if gone.intersection(prompt)]:
                    del prompts[prompt]
