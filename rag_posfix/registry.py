"""Registry: entries by name: mitigations, orders, rerankers, ... of this package and of plug-ins (``plugins``).

Plug-ins: entries of registries in other packages, found by entry points, or in modules that a user names.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.parameters import Parameter, check_fields, convert_pydantic_errors, parameters_of, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


OWN_PACKAGE: Final = "rag-posfix"
_OF_FILE: Final = "rag_posfix_plugin_"
GROUPS: Final = {
    "mitigation": "rag_posfix.mitigations",
    "reranker": "rag_posfix.rerankers",
    "order": "rag_posfix.orders",
    "probe": "rag_posfix.probes",
    "encoding": "rag_posfix.encodings",
    "task": "rag_posfix.tasks",
    "file reader": "rag_posfix.readers",
    "cache backend": "rag_posfix.caches",
}
"""The group of entry points of each kind of entry."""

_REGISTRIES: Final = {
    "mitigation": ("rag_posfix.mitigations", "MITIGATIONS"),
    "reranker": ("rag_posfix.reranking", "RERANKERS"),
    "order": ("rag_posfix.assembly.orders", "ORDERS"),
    "probe": ("rag_posfix.lab.probing", "PROBES"),
    "encoding": ("rag_posfix.lab.encodings", "ENCODINGS"),
    "task": ("rag_posfix.lab.tasks", "TASKS"),
    "file reader": ("rag_posfix.retrieval.ingest.readers", "READERS"),
    "cache backend": ("rag_posfix.caching.tier", "TIERS"),
}
"""Module and name of the registry of each kind."""

LOCK: Final = threading.RLock()
"""Held while plug-ins are imported: they register themselves, in any thread."""


def entry_points_of(kind: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages for a kind of entry, by name, without importing any."""
    group = GROUPS.get(kind)
    if group is None:
        return ()
    from importlib.metadata import entry_points  # reads the metadata of every installed package

    return tuple(sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)))


def package_of(entry: EntryPoint) -> str:
    """Return the name of the package that has an entry point."""
    return entry.dist.name if entry.dist is not None else entry.module.partition(".")[0]


def package_of_module(module: str) -> str:
    """Return the package of a module by its name; of a file that was named as a plug-in, the name of the file."""
    top = module.partition(".")[0]
    if top.startswith(_OF_FILE):
        return f"{top.removeprefix(_OF_FILE).partition('_')[2]}.py"
    return OWN_PACKAGE if top == "rag_posfix" else top


def load_entry_point(point: EntryPoint) -> Any:
    """Return what an entry point names: a module, a class or a function.

    Raises:
        ConfigError: the code of the package fails.
    """
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(
            f"the plug-in {point.name!r} of the package {package_of(point)} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {' '.join(str(error).split())}; repair or uninstall the package"
        ) from error


def registry_of(kind: str) -> Registry[Any]:
    """Return the registry of a kind of entry, which is imported here."""
    module, attribute = _REGISTRIES[kind]
    registry: Registry[Any] = getattr(importlib.import_module(module), attribute)
    return registry


def check_method(kind: str, method: Any) -> None:
    """Check a method where it is named, before a model is loaded.

    Args:
        kind: ``mitigation``, ``order`` or ``reranker``.
        method: Its text, or a ``MethodSpec``. Files in the parameters are not read.

    Raises:
        UnknownNameError: no method of the kind has this name.
        ConfigError: an unknown parameter, or a value outside of its range.
    """
    registry = registry_of(kind)
    spec = registry.parse(method, kind)
    name, parameters = registry.expand(spec)
    entry = registry.get(name)
    from_files = {getattr(entry, "nested_methods", ""), *getattr(entry, "file_parameters", ())}
    if not from_files & parameters.keys() and (parameters or kind != "order"):  # a pipeline has defaults of orders
        registry.check(spec)


def plugin_entries(kind: str) -> list[tuple[str, Any, str]]:
    """Return name, entry and package of each plug-in of a kind, by name.

    The registry is imported only where a package, or a module that was imported, may have an entry in it.
    """
    if not entry_points_of(kind) and _REGISTRIES[kind][0] not in sys.modules:
        return []
    registry = registry_of(kind)
    entries = ((name, entry, registry.package(name)) for name, entry in registry.items())
    return [found for found in entries if found[2] != OWN_PACKAGE]


def import_modules(names: Iterable[str]) -> None:
    """Import modules whose code registers entries.

    Args:
        names: Modules by name, or files that end in ``.py``.

    Raises:
        ConfigError: a module does not exist, or its code fails.
    """
    for name in names:
        try:
            with LOCK:
                _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"the plug-in {name!r} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}; "
                "give a module that Python finds, or a file that ends in .py"
            ) from error


def _import_file(path: Path) -> None:
    """Import a file under a name of its own, once."""
    path = path.resolve()
    name = f"{_OF_FILE}{hashlib.blake2b(bytes(path), digest_size=4).hexdigest()}_{path.stem}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no loader for {str(path)!r}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


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
        parse: Reads a method of this kind as a text, for ``check_method``.
    """

    def __init__(
        self, kind: str, *, parts: Sequence[str] = (), parse: Callable[[Any, str], Spec] = lambda spec, kind: spec
    ) -> None:
        self.kind = kind
        self.parts = tuple(parts)
        self.parse = parse
        self._entries: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._presets: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._packages: dict[str, str] = {}
        self._loading = ""
        self._has_unread_plugins = True
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
