"""Source files of this repository as syntax trees."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One file: its path from the root of the repository, with slashes, and its text."""

    path: str
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


def read_sources(*folders: str, part: int = 0, parts: int = 1) -> list[Source]:
    """Read and parse the files below ``folders``, or one of ``parts`` of them: all of tests/ take some seconds."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))[part::parts]
    sources = [Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files]
    assert sources
    gc.disable()  # it would take half of the time
    try:
        assert all(source.tree for source in sources)
    finally:
        gc.enable()
    return sources


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for such an expression, and "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imported_names(node: ast.AST) -> list[str]:
    """Return what an import names: ``from a.b import c`` is ``a.b.c``, ``import a.b`` is ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (f"{node.module}." if node.module else "")
        return [base + alias.name for alias in node.names]
    return []
