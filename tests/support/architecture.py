"""Reads source files and says which rules of the repository they break. `architecture_rules.py` holds the rules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCES = ("rag_posfix", "services")
SOURCE_ROOTS = ("services/",)
"""Folders that packages lie in without being part of their names."""


@dataclass(frozen=True)
class Import:
    """One imported name: ``from a.b import c`` is ``a.b.c``, ``import a.b`` is ``a.b``."""

    name: str
    line: int


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the repository, with slashes, and its text."""

    path: str
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def package(self) -> list[str]:
        """The package that relative imports start from."""
        return importable(self.path).split("/")[:-1]

    @cached_property
    def module(self) -> str:
        return importable(self.path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        """The folder."""
        return self.path.rpartition("/")[0]

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports())

    def _imports(self) -> Iterator[Import]:
        """Yield every import: at the top, in functions, under TYPE_CHECKING, and by a literal name at run time."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self.package[: len(self.package) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                yield from (Import(f"{module}.{alias.name}", node.lineno) for alias in node.names)
            elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield Import(first.value, node.lineno)


def importable(path: str) -> str:
    """Return ``path`` as seen from the folder that its package is imported from."""
    return next((path.removeprefix(root) for root in SOURCE_ROOTS if path.startswith(root)), path)


def read_sources(root: Path, folders: tuple[str, ...] = SOURCES) -> list[Source]:
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return [Source(file.relative_to(root).as_posix(), file.read_text("utf-8")) for file in files]


@dataclass(frozen=True)
class ImportRule:
    """Which imports files may hold.

    A pattern names a module and everything in it; ``*`` stands for any characters. ``=package`` is what a package's
    own ``__init__`` defines, not the modules inside.

    Attributes:
        why: The rule in words, for the failure message.
        files: The rule is about these files (patterns of paths; ``*`` crosses slashes).
        but: Files that it is not about.
        among: ``only`` judges the imports that match one of these; empty: all but the standard library.
        only: What these files may import, or None for no such limit.
        never: What these files may not import.
    """

    why: str
    files: tuple[str, ...]
    but: tuple[str, ...] = ()
    among: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()

    def violations(self, sources: list[Source]) -> list[str]:
        modules = frozenset(source.module for source in sources)
        return [
            f"{source.path}:{found.line}: imports {found.name}"
            for source in sources
            if matches_path(source.path, self.files) and not matches_path(source.path, self.but)
            for found in source.imports
            if self._forbids(found.name, modules)
        ]

    def _forbids(self, name: str, modules: frozenset[str]) -> bool:
        if any(covers(pattern, name, modules) for pattern in self.never):
            return True
        if self.only is None:
            return False
        if self.among:
            judged = any(covers(pattern, name, modules) for pattern in self.among)
        else:
            judged = name.split(".")[0] not in sys.stdlib_module_names
        return judged and not any(covers(pattern, name, modules) for pattern in self.only)


def matches_path(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def covers(pattern: str, name: str, modules: frozenset[str]) -> bool:
    """Whether ``name`` is the module ``pattern`` or is in it."""
    parts = name.split(".")
    if pattern.startswith("="):
        package = pattern[1:]
        inside = name.removeprefix(f"{package}.")
        return name == package or (inside != name and "." not in inside and name not in modules)
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for such an expression, and "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


@dataclass(frozen=True)
class CodeRule:
    """What code may not do. ``finds`` yields (line, what was found) for one syntax node."""

    why: str
    finds: Callable[[ast.AST], str]
    but: tuple[str, ...] = ()

    def violations(self, sources: list[Source]) -> list[str]:
        return [
            f"{source.path}:{getattr(node, 'lineno', 1)}: {found}"
            for source in sources
            if not matches_path(source.path, self.but)
            for node in ast.walk(source.tree)
            if (found := self.finds(node))
        ]


PICKLES = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve")


def reads_environment(node: ast.AST) -> str:
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    if isinstance(node, ast.Attribute) and dotted(node.value) == "os" and node.attr in names:
        return f"os.{node.attr}"
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return ", ".join(f"os.{alias.name}" for alias in node.names if alias.name in names)
    return ""


def unpickles(node: ast.AST) -> str:
    """Imports of pickle and its relatives, and the switches by which other libraries unpickle."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        return ", ".join(name for name in names if name.split(".")[0] in PICKLES)
    if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "allow_dangerous_deserialization"):
        return "" if is_constant(node.value, False) else f"{node.arg} other than False"
    if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
        safe = any(k.arg == "weights_only" and is_constant(k.value, True) for k in node.keywords)
        return "" if safe else "torch.load without weights_only=True"
    return ""


def trusts_remote_code(node: ast.AST) -> str:
    if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
        return "" if is_constant(node.value, False) else "trust_remote_code other than False"
    if isinstance(node, ast.Dict) and any(is_constant(key, "trust_remote_code") for key in node.keys):
        return "a dictionary with trust_remote_code"
    return ""


def prints(node: ast.AST) -> str:
    return "print(...)" if isinstance(node, ast.Call) and dotted(node.func) == "print" else ""


def asserts(node: ast.AST) -> str:
    return "assert" if isinstance(node, ast.Assert) else ""


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value and type(node.value) is type(value)


def long_files(sources: list[Source], limit: int) -> list[str]:
    counts = ((source.path, len(source.text.splitlines())) for source in sources)
    return [f"{path}: {lines} lines" for path, lines in counts if lines > limit]


def long_functions(sources: list[Source], limit: int) -> list[str]:
    """Functions whose lines, without their docstring and decorators, are more than ``limit``."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := body_lines(node)) > limit:
                found.append(f"{source.path}:{node.lineno}: {node.name} has {lines} lines")
    return found


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def file_imports(sources: list[Source]) -> dict[str, list[tuple[str, int]]]:
    """Return for each path the paths that it imports, with the line of each import; itself left out."""
    by_module = {source.module: source.path for source in sources}
    graph: dict[str, list[tuple[str, int]]] = {}
    for source in sources:
        found = ((module_of(one.name, by_module), one.line) for one in source.imports)
        graph[source.path] = [(path, line) for path, line in found if path is not None and path != source.path]
    return graph


def reached(sources: list[Source], files: tuple[str, ...], but: tuple[str, ...] = ()) -> set[str]:
    """Return the paths that match ``files`` and all that they import, directly or through others; ``but`` left out."""
    graph = file_imports(sources)
    found: set[str] = set()
    waiting = [path for path in graph if matches_path(path, files)]
    while waiting:
        path = waiting.pop()
        if path not in found and path not in but:
            found.add(path)
            waiting.extend(imported for imported, _ in graph[path])
    return found


def module_of(name: str, by_module: dict[str, str]) -> str | None:
    """Return the path of the longest module that ``name`` begins with; None for other packages."""
    parts = name.split(".")
    return next((by_module[m] for n in range(len(parts), 0, -1) if (m := ".".join(parts[:n])) in by_module), None)


def cycle(graph: dict[str, list[tuple[str, int]]]) -> list[str]:
    """Return paths each of which imports the next, the first one again at the end; empty if there are none."""
    try:
        TopologicalSorter({path: [other for other, _ in imported] for path, imported in graph.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def upward_imports(sources: list[Source], rooms: list[str], but: tuple[str, ...] = ()) -> list[str]:
    """Return imports of a room by a room that stands above it in ``rooms``."""
    place = {room: number for number, room in enumerate(rooms)}
    room_of = {source.path: source.room for source in sources}
    return [
        f"{path}:{line}: imports {other}, which is in a room further down"
        for path, imported in file_imports(sources).items()
        if not matches_path(path, but)
        for other, line in imported
        if place[room_of[path]] < place[room_of[other]]
    ]
