"""The names that a package exports, as type checkers see them."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def seen_by_type_checkers(package: ModuleType) -> dict[str, str]:
    """Return the module that type checkers find each exported name in."""
    tree = ast.parse(Path(str(package.__file__)).read_text("utf-8"))
    return {
        alias.name: str(node.module)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
