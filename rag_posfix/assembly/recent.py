"""Which prompts were read lately, by the content of their passages: what the order ``cache_aware`` goes by."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from rag_posfix.errors import ConfigError

__all__ = ["RecentPrompts"]


class RecentPrompts:
    """Remembers the passages of recent prompts, in their order. Bounded; safe to share between threads.

    Args:
        most_scopes: Scopes remembered; the one used longest ago goes first.
        most_prompts: Prompts remembered in each scope; the oldest goes first.

    Raises:
        ConfigError: a bound is below 1.
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
            scope: Prompts of different scopes have nothing in common: other tenant, method or tokens before the
                passages.
        """
        with self._lock:
            return tuple(reversed(self._scopes.get(scope, ())))

    def add(self, scope: str, keys: Sequence[str]) -> None:
        """Remember a prompt as the newest of its scope.

        Args:
            scope: As in ``recent``.
            keys: A content hash of each passage, in the order of the prompt; none is not remembered.
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

    def forget(self, keys: Sequence[str]) -> None:
        """Forget every prompt with one of these passages.

        Args:
            keys: Content hashes of passages that are gone.
        """
        gone = set(keys)
        with self._lock:
            for prompts in self._scopes.values():
                for prompt in [prompt for prompt in prompts if gone.intersection(prompt)]:
                    del prompts[prompt]
