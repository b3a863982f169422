"""Registry: entries by name: mitigations, orders, rerankers, ... of this package and of plug-ins (``plugins``)."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.parameters import (
    Parameter,
    check_fields,
    convert_pydantic_errors,
    parameters_of,
    shown,
)
from rag_posfix.plugins import LOCK, entry_points_of, load_entry_point, package_of, package_of_module

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Spec(Protocol):
    """A method by name, with its parameters (``contracts.method_spec.MethodSpec``)."""

    @property
    def name(self) -> str:
        """A name or an alias."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters by name."""
        ...


class Registry(Generic[T]):
    """Entries of one kind by name.

    Plug-ins of other packages are imported when entries are listed, or when a name is sought that no entry has.

    Args:
        kind: Kind of the entries, for error messages ("mitigation"), and for plug-ins (``plugins.GROUPS``).
        parts: Names of constructor arguments that the application supplies, such as the served model. They are not
            parameters of a user.
        has_plugins: Whether other packages add entries.
    """

    def __init__(self, kind: str, *, parts: Sequence[str] = (), has_plugins: bool = True) -> None:
        self.kind = kind
        self.parts = tuple(parts)
        self._entries: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._presets: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._packages: dict[str, str] = {}
        self._loading = ""
        self._has_unread_plugins = has_plugins
        self._failed: dict[str, str] = {}

    def register(
        self, name: str, *, aliases: Sequence[str] = (), presets: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Callable[[T], T]:
        """Return a decorator that registers a class or function under ``name``.

        Args:
            name: Name of the entry in results and cache keys.
            aliases: Other names of the entry, such as the one in its paper.
            presets: Names that stand for the entry with some parameters. A user may give such a name with other
                parameters, or the same with another value.

        Raises:
            ConfigError: the name, an alias or a preset is registered already.
        """

        def add(entry: T) -> T:
            for new in (name, *aliases, *(presets or {})):
                if self._is_registered(new):
                    raise ConfigError(f"{self.kind} {new!r} is registered already; choose another name")
            self._entries[name] = entry
            self._packages[name] = self._loading or package_of_module(getattr(entry, "__module__", __name__))
            self._aliases.update(dict.fromkeys(aliases, name))
            self._presets.update({preset: (name, dict(parameters)) for preset, parameters in (presets or {}).items()})
            return entry

        return add

    def presets(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the presets of the entry registered as ``name``, with their parameters."""
        return {preset: parameters for preset, (entry, parameters) in self._presets.items() if entry == name}

    def expand(self, spec: Spec) -> tuple[str, dict[str, Any]]:
        """Return name and parameters of ``spec``, without alias and preset."""
        name = self.resolve(spec.name)
        _, preset = self._presets.get(spec.name, (name, {}))
        return name, {**preset, **spec.parameters}

    def resolve(self, name: str) -> str:
        """Return the name of the entry with the name, alias or preset ``name``.

        Raises:
            UnknownNameError: no entry has it; the message suggests similar names and aliases.
        """
        if not isinstance(name, str):
            raise ConfigError(f"the name of a {self.kind} must be a string, got {shown(name)}")
        if not self._is_registered(name):
            self._load_plugins()
        if name in self._entries:
            return name
        if name in self._aliases:
            return self._aliases[name]
        if name in self._presets:
            return self._presets[name][0]
        if name in self._failed:
            raise ConfigError(self._failed[name])
        registered = [*self._entries, *self._aliases, *self._presets]
        near = difflib.get_close_matches(name[:100].lower(), registered, n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(map(self._suggestion, near))}?" if near else ""
        raise UnknownNameError(
            f"unknown {self.kind} {shown(name)}.{hint} Available: {', '.join(self.names())}"
        ) from None

    def get(self, name: str) -> T:
        """Return the entry with the name or alias ``name``."""
        return self._entries[self.resolve(name)]

    def parameters(self, name: str) -> Mapping[str, Parameter]:
        """Return the parameters of the class registered as ``name``, without ``parts``."""
        return {key: value for key, value in parameters_of(self.get(name)).items() if key not in self.parts}

    def create(self, spec: Spec, parts: Mapping[str, Callable[[], Any]] | None = None) -> Any:
        """Return an instance of the class that ``spec`` names, with checked parameters (``rag_posfix.parameters``).

        Args:
            parts: A function for each of the registry's ``parts``; called if the class takes that part.

        Raises:
            UnknownNameError: no such name.
            ConfigError: an unknown parameter, or a value of another type or outside of its range.
        """
        name, parameters = self._check_names(spec)
        entry: Any = self._entries[name]
        fields = parameters_of(entry)
        supplied = {field: create() for field, create in (parts or {}).items() if field in fields}
        with convert_pydantic_errors(name):
            return entry(**supplied, **parameters)

    def check(self, spec: Spec) -> None:
        """Check the name and the parameters of ``spec`` without creating ``parts``, so before a model is loaded.

        Raises:
            UnknownNameError: no such name.
            ConfigError: an unknown parameter, or a value of another type or outside of its range.
        """
        name, parameters = self._check_names(spec)
        entry: Any = self._entries[name]
        with convert_pydantic_errors(name):
            if any(field in parameters_of(entry) for field in self.parts):
                check_fields(entry, parameters)
            else:
                entry(**parameters)

    def _check_names(self, spec: Spec) -> tuple[str, dict[str, Any]]:
        """Return ``spec`` expanded, after a check of its name and the names of its parameters."""
        name, parameters = self.expand(spec)
        check_names(f"{self.kind} {name}", parameters, self.parameters(name))
        return name, parameters

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted, without aliases."""
        self._load_plugins()
        return tuple(sorted(self._entries))

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the aliases of the entry registered as ``name``, sorted."""
        return tuple(sorted(alias for alias, target in self._aliases.items() if target == name))

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield (name, entry) by name."""
        for name in self.names():
            yield name, self._entries[name]

    def package(self, name: str) -> str:
        """Return the package that has the entry registered as ``name``; of a file, the name of its module."""
        return self._packages[self.resolve(name)]

    def __contains__(self, name: object) -> bool:
        if not self._is_registered(name):
            self._load_plugins()
        return self._is_registered(name)

    def _is_registered(self, name: object) -> bool:
        return name in self._entries or name in self._aliases or name in self._presets

    def _load_plugins(self) -> None:
        """Import the plug-ins of this kind, once; one that registers nothing itself is registered by its name."""
        with LOCK:
            points = entry_points_of(self.kind) if self._has_unread_plugins else ()
            self._has_unread_plugins = False
            for point in points:
                self._loading = package_of(point)
                try:
                    entry = load_entry_point(point)
                    if callable(entry) and entry not in self._entries.values():
                        self.register(point.name)(entry)
                except ConfigError as error:
                    self._failed[point.name] = str(error)
                    _log.warning("%s", error)
                finally:
                    self._loading = ""

    def _suggestion(self, name: str) -> str:
        return repr(name) if name in self._entries else f"{name!r} ({self.resolve(name)})"


def check_names(label: str, names: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Raise for a name in ``names`` that is not ``allowed``, and suggest a similar one; ``label`` is their owner."""
    for key in names:
        if key not in allowed:
            near = difflib.get_close_matches(str(key)[:100], allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{label} has no parameter {shown(key)}.{hint} It takes: {', '.join(allowed) or 'none'}")
