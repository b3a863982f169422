"""A named collection of things that can be looked up, listed and added to.

It knows nothing of what it holds. Mitigations, orders, rerankers, first stages and cache backends each have one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.parameters import Parameter, check_fields, parameters_of, refused_by_pydantic, shown

__all__ = ["Registry", "Spec", "check_names"]

T = TypeVar("T")


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
    """Things of one kind by name.

    Args:
        kind: What the things are, for error messages ("mitigation").
        parts: Names of constructor arguments that are parts of the application, such as the served model, and no
            parameters that a user gives.
    """

    def __init__(self, kind: str, *, parts: Sequence[str] = ()) -> None:
        self.kind = kind
        self.parts = tuple(parts)
        self._entries: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str, *, aliases: Sequence[str] = ()) -> Callable[[T], T]:
        """Return a decorator that adds what it decorates under ``name``.

        Args:
            name: Its name: what results and cache keys hold.
            aliases: Other names that it is found by, such as the one in its paper.

        Raises:
            ConfigError: a name or an alias is taken.
        """

        def add(entry: T) -> T:
            for one in (name, *aliases):
                if one in self._entries or one in self._aliases:
                    raise ConfigError(f"{self.kind} {one!r} is registered already; choose another name")
            self._entries[name] = entry
            self._aliases.update(dict.fromkeys(aliases, name))
            return entry

        return add

    def resolve(self, name: str) -> str:
        """Return the name that ``name``, a name or an alias, stands for.

        Raises:
            UnknownNameError: it stands for none; the message suggests the nearest names.
        """
        if not isinstance(name, str):
            raise ConfigError(f"the name of a {self.kind} must be a string, got {shown(name)}")
        if name in self._entries:
            return name
        if name in self._aliases:
            return self._aliases[name]
        near = difflib.get_close_matches(name[:100], [*self._entries, *self._aliases], n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(map(self._told, near))}?" if near else ""
        raise UnknownNameError(
            f"unknown {self.kind} {shown(name)}.{hint} Available: {', '.join(self.names())}"
        ) from None

    def get(self, name: str) -> T:
        """Return the entry called ``name``, which may be an alias.

        Raises:
            UnknownNameError: there is none; the message suggests the nearest names.
        """
        return self._entries[self.resolve(name)]

    def parameters(self, name: str) -> Mapping[str, Parameter]:
        """Return the parameters of the class called ``name``, parts left out."""
        found = parameters_of(self.get(name))
        return {key: parameter for key, parameter in found.items() if key not in self.parts}

    def create(self, spec: Spec, parts: Mapping[str, Callable[[], Any]] | None = None) -> Any:
        """Return the method that ``spec`` asks for: checks its name, the names of its parameters and their values.

        For registries of classes, see ``rag_posfix.parameters``.

        Args:
            spec: Name and parameters.
            parts: Returns each of the registry's ``parts``; called for those that the class takes.

        Raises:
            UnknownNameError: no such name.
            ConfigError: an unknown parameter, or a value of another type or outside of its range.
        """
        entry: Any = self._checked(spec)
        taken = parameters_of(entry)
        made = {part: make() for part, make in (parts or {}).items() if part in taken}
        with refused_by_pydantic(self.resolve(spec.name)):
            return entry(**made, **spec.parameters)

    def check(self, spec: Spec) -> None:
        """Check what can be checked of ``spec`` without its parts: before a model is loaded.

        Raises:
            UnknownNameError: no such name.
            ConfigError: an unknown parameter, or a value of another type or outside of its range.
        """
        entry: Any = self._checked(spec)
        with refused_by_pydantic(self.resolve(spec.name)):
            if any(part in parameters_of(entry) for part in self.parts):
                check_fields(entry, spec.parameters)
            else:
                entry(**spec.parameters)

    def _checked(self, spec: Spec) -> T:
        """Return the entry, once the name and the names of the parameters are checked."""
        name = self.resolve(spec.name)
        check_names(f"{self.kind} {name}", spec.parameters, self.parameters(name))
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted, without aliases."""
        return tuple(sorted(self._entries))

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the other names of the entry called ``name``, sorted."""
        return tuple(sorted(alias for alias, target in self._aliases.items() if target == name))

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield (name, entry) by name."""
        for name in self.names():
            yield name, self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def _told(self, name: str) -> str:
        return f"{name!r} ({self._aliases[name]})" if name in self._aliases else repr(name)


def check_names(label: str, given: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    """Check the names of parameters.

    Args:
        label: What takes them, for messages.
        given: The parameters that were given, by name.
        allowed: The parameters that there are, by name.

    Raises:
        ConfigError: one is unknown; the message suggests the nearest.
    """
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key)[:100], allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{label} has no parameter {shown(key)}.{hint} It takes: {', '.join(allowed) or 'none'}")
