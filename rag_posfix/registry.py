"""A named collection of things that can be looked up, listed and added to.

It knows nothing of what it holds. Mitigations, orders, rerankers and cache backends each have one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rag_posfix.errors import ConfigError, UnknownNameError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name.

    Args:
        kind: What the things are, for error messages ("mitigation").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds what it decorates under ``name``.

        Raises:
            ConfigError: ``name`` is taken.
        """

        def add(entry: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is registered already; choose another name")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises:
            UnknownNameError: there is none; the message suggests the nearest names.
        """
        try:
            return self._entries[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.5)
            hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
            available = ", ".join(self.names())
            raise UnknownNameError(f"unknown {self.kind} {name!r}.{hint} Available: {available}") from None

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted."""
        return tuple(sorted(self._entries))

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield (name, entry) by name."""
        for name in self.names():
            yield name, self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries
