"""A guard around a tier: whatever the tier raises is logged once and becomes a default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rag_posfix.caching.health import Health

__all__ = ["Guard"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Tier = TypeVar("_Tier", bound=_Named)
_T = TypeVar("_T")


class Guard(Generic[_Tier]):
    """Stands before a tier.

    Args:
        tier: What it guards.
        cache: What the tier is a part of, for the log.
    """

    def __init__(self, tier: _Tier, cache: str = "answer cache") -> None:
        self._tier = tier
        self.name = tier.name
        self._health = Health(f"the {self.name} tier", cache)

    def call(self, operation: Callable[[_Tier], _T], default: _T) -> _T:
        """Return what ``operation`` returns for the tier, or ``default`` if it raises."""
        try:
            result = operation(self._tier)
        except Exception as error:
            self._health.failed(error)
            return default
        self._health.worked()
        return result
