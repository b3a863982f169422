"""The examples of hand-written pages."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(
    r"(?P<skipped><!-- not run: .*?-->\n)?(?:^ *`(?P<file>[\w/]+\.py)`:\n\n)?"
    r"(?P<code>^ *```(?P<kind>\w+)\n.*?^ *```$)",
    re.DOTALL | re.MULTILINE,
)


def blocks(page: str) -> list[tuple[str, str, str | None]]:
    """Return kind, text and name of each code block of ``page`` that is to be run, in order.

    The name is the path in a line such as "`rag_posfix/x.py`:" above the block, which is the content of that file.
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
