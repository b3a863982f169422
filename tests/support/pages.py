"""The examples of hand-written pages, and the source files that pages tell the reader to write."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(
    r"(?P<skipped><!-- not run: .*?-->\n)?(?:`(?P<file>[\w/-]+\.(?:py|md))`[^`]*?:\n\n)?"
    r"(?P<code>^ *```(?P<kind>\w+)\n.*?^ *```$)",
    re.DOTALL | re.MULTILINE,
)


def blocks(page: str) -> list[tuple[str, str, str | None]]:
    """Return kind, text and name of each code block of ``page`` that is to be run, in order.

    The name is the last path before the block, in a sentence such as "`rag_posfix/x.py`:"; the block then belongs into
    that file.
    """
    return [
        (found["kind"], "".join(dedent(found["code"]).splitlines(keepends=True)[1:-1]), found["file"])
        for found in _BLOCK.finditer((DOCS / page).read_text("utf-8"))
        if not found["skipped"]
    ]


def examples(page: str) -> list[tuple[str, str | None]]:
    """Return (code, what it prints, or None) of each Python example of ``page`` that is no file, in order."""
    whole = blocks(page)
    return [
        (text, following[1] if following[0] == "text" else None)
        for (kind, text, name), following in zip(whole, [*whole[1:], ("", "", None)], strict=False)
        if kind == "python" and name is None
    ]


def files(page: str) -> dict[str, str]:
    """Return the blocks of ``page`` that belong into files, by path."""
    return {name: text for kind, text, name in blocks(page) if kind in ("python", "markdown") and name is not None}


def write_files(page: str, root: Path) -> dict[str, str]:
    """Write the files of ``page`` below ``root``; return them by path.

    A file that is there already is edited: an import or an assignment replaces the one of the same module or name, a
    new import goes behind the last one, and a row of a table behind the last row of the same folder.
    """
    found = files(page)
    for name, text in found.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)  # one folder deep: a page says where a new folder goes
        edited = _edited if path.suffix == ".py" else _with_row
        path.write_text(edited(path.read_text("utf-8"), text) if path.exists() else text, "utf-8")
    return found


def _edited(source: str, block: str) -> str:
    for statement in ast.parse(block).body:
        lines = source.splitlines(keepends=True)
        body = ast.parse(source).body
        same = [old for old in body if _replaces(statement, old)]
        imports = [old for old in body if isinstance(old, ast.Import | ast.ImportFrom)]
        start, end = (same[0].lineno - 1, same[0].end_lineno) if same else (imports[-1].end_lineno,) * 2
        new = block.splitlines(keepends=True)[statement.lineno - 1 : statement.end_lineno]
        source = "".join([*lines[:start], *new, *lines[end:]])
    return source


def _with_row(source: str, row: str) -> str:
    folder = row[: row.rindex("/", 0, row.rindex("/"))]
    last = [line for line in source.splitlines(keepends=True) if line.startswith(folder)][-1]
    return source.replace(last, last + row)


def _replaces(new: ast.stmt, old: ast.stmt) -> bool:
    if isinstance(new, ast.ImportFrom) and isinstance(old, ast.ImportFrom):
        return new.module == old.module and {one.name for one in new.names} > {one.name for one in old.names}
    if isinstance(new, ast.Assign) and isinstance(old, ast.Assign):
        return ast.unparse(new.targets[0]) == ast.unparse(old.targets[0])
    return False
