"""Plug-ins: entries of registries in other packages, found by entry points, or in modules that a user names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rag_posfix.errors import ConfigError

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
    "probe": ("rag_posfix.probing", "PROBES"),
    "encoding": ("rag_posfix.encodings", "ENCODINGS"),
    "task": ("rag_posfix.laboratory.tasks", "TASKS"),
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


def plugin_entries(kind: str) -> list[tuple[str, Any, str]]:
    """Return name, entry and package of each plug-in of a kind, by name.

    The registry is imported only where a package, or a module that was imported, may have an entry in it.
    """
    module, attribute = _REGISTRIES[kind]
    if not entry_points_of(kind) and module not in sys.modules:
        return []
    registry = getattr(importlib.import_module(module), attribute)
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
