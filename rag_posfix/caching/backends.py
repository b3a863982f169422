"""Backends of the caches: memory, disk, Redis. Each registers itself; one builder opens them as tiers.

Each cache has its own ``Backends``, because the values differ: bytes in the answer cache, tensors in the passage KV
store. ``docs/add-a-cache-backend.md`` describes how to add a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from rag_posfix.registry import Registry


class Locality(IntEnum):
    """The distance of a backend's entries. A cache looks up its tiers in this order."""

    PROCESS = 0
    """In the memory of this process."""
    MACHINE = 1
    """Shared by the processes of one machine, for example on its disk."""
    NETWORK = 2
    """On a server that several machines share."""


class _CanBeDisabled(Protocol):
    @property
    def enabled(self) -> bool: ...


_SettingsT = TypeVar("_SettingsT", bound=_CanBeDisabled)
_TierT = TypeVar("_TierT")
_Open: TypeAlias = Callable[[_SettingsT, Path], _TierT | None]


@dataclass(frozen=True, slots=True)
class _Backend(Generic[_SettingsT, _TierT]):
    locality: Locality
    open: _Open[_SettingsT, _TierT]


class Backends(Generic[_SettingsT, _TierT]):
    """The backends of one cache by name, and the builder of its tiers.

    Args:
        cache: The cache, for error messages ("answer cache").
    """

    def __init__(self, cache: str) -> None:
        self._registry = Registry[_Backend[_SettingsT, _TierT]](f"{cache} backend")

    def register(
        self, name: str, locality: Locality
    ) -> Callable[[_Open[_SettingsT, _TierT]], _Open[_SettingsT, _TierT]]:
        """Return a decorator that registers a backend.

        The decorated function takes the settings of the cache and the folder of this process's caches. It returns the
        tier, or None if the settings turn it off. It opens no file and connects to nothing; the tier does so at its
        first use.

        Raises:
            ConfigError: ``name`` is registered already.
        """

        def add(open_tier: _Open[_SettingsT, _TierT]) -> _Open[_SettingsT, _TierT]:
            self._registry.register(name)(_Backend(locality, open_tier))
            return open_tier

        return add

    def names(self) -> tuple[str, ...]:
        """Return the names in lookup order: by locality, then by name."""
        return tuple(sorted(self._registry.names(), key=lambda name: (self._registry.get(name).locality, name)))

    def open_tiers(self, settings: _SettingsT, cache_dir: Path) -> list[_TierT]:
        """Return the tiers that ``settings`` turn on, nearest first; none if the whole cache is turned off.

        Args:
            cache_dir: Folder of this process's caches; a backend that keeps files uses a folder of its own in it.

        Raises:
            CacheError: A setting is invalid.
            ConfigError: A package that a backend needs is not installed.
        """
        if not settings.enabled:
            return []
        opened = (self._registry.get(name).open(settings, cache_dir) for name in self.names())
        return [tier for tier in opened if tier is not None]
