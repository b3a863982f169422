"""Reads PDF files, notebooks, OpenDocument and rich text with xberg, whose typed nodes become items."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import missing_extra
from rag_posfix.retrieval.ingest.html import read_html
from rag_posfix.retrieval.ingest.structure import FileText, Item, items_text, table_items

if TYPE_CHECKING:
    import xberg

_TYPES = {
    ".pdf": "application/pdf",
    ".ipynb": "application/x-ipynb+json",
    ".odt": "application/vnd.oasis.opendocument.text",
    ".rtf": "application/rtf",
}
_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORDS = ("text", "content", "title", "definition", "label")


def extract(data: bytes, suffix: str) -> xberg.ExtractedDocument:
    """Return what xberg finds in a file of a suffix in ``_TYPES``.

    Raises:
        ConfigError: xberg is not installed.
        RuntimeError: the file is damaged or encrypted.
    """
    try:
        import xberg
        from xberg.options import ContentFilterConfig, PageConfig
    except ImportError as error:
        extra = "pdf" if suffix == ".pdf" else "office"
        raise missing_extra(f"xberg (needed for {suffix} files)", extra) from error
    config = xberg.ExtractionConfig(
        use_cache=False,
        enable_quality_processing=False,
        disable_ocr=True,
        include_document_structure=True,
        escape_markdown=False,
        pages=PageConfig(extract_pages=True),
        content_filter=ContentFilterConfig(
            include_headers=True, include_footers=True, include_footnotes=True, strip_repeating_text=False
        ),
    )
    source = xberg.ExtractInput(kind="bytes", bytes=data, mime_type=_TYPES[suffix], filename=f"file{suffix}")
    result = asyncio.run(xberg.extract(source, config))
    if not result.results:
        raise RuntimeError("; ".join(str(error) for error in result.errors) or "nothing was found in it")
    return result.results[0]


def read_word_processor(data: bytes, suffix: str) -> FileText:
    """Return the text of an ``.odt`` or ``.rtf`` file.

    Raises:
        ConfigError: xberg is not installed.
    """
    return items_text(node_items(extract(data, suffix)))


def read_notebook(data: bytes) -> FileText:
    """Return a notebook with its printed results.

    Raises:
        ConfigError: xberg is not installed.
    """
    return items_text(node_items(extract(_notebook(json.loads(data)), ".ipynb")))


def _notebook(notebook: dict[str, Any]) -> bytes:
    """Return a notebook in version 4 of its format, with the words of each printed result as plain text."""
    sheets = notebook.get("worksheets") or [notebook]  # version 3
    cells = [cell for sheet in sheets for cell in sheet.get("cells", ())]
    for cell in cells:
        cell["source"] = _joined(cell.get("source", cell.pop("input", "")))
        if cell.get("cell_type") == "heading":
            cell |= {"cell_type": "markdown", "source": f"{'#' * cell.get('level', 1)} {cell['source']}"}
        for output in cell.get("outputs", ()):
            kind = {"pyout": "execute_result", "pyerr": "error"}.get(output["output_type"], output["output_type"])
            output |= {"output_type": kind, "name": output.get("stream", output.get("name", "stdout"))}
            if kind in ("execute_result", "display_data"):
                found = output.setdefault("data", {"text/plain": output.get("text", "")})
                shown = next(
                    (found[name] for name in ("text/markdown", "text/plain", "text/latex") if name in found), ""
                )
                if not shown and "text/html" in found:
                    shown = read_html(_joined(found["text/html"]).encode()).text
                output["data"] = {"text/plain": _joined(shown)}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}).encode()


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def node_items(found: xberg.ExtractedDocument) -> Iterator[Item]:
    """Yield the items of nodes. Groups repeat the headings below them; pictures have no words of their own."""
    nodes = found.document.nodes if found.document is not None else []
    numbers: dict[int, int] = {}
    ordered: set[int] = set()
    for index, node in enumerate(nodes):
        content = json.loads(str(node.content))
        kind, page = content.pop("node_type"), node.page or 0
        if kind == "list" and content.get("ordered"):
            ordered.add(index)
        if kind in ("group", "list", "image", "page_break", "slide"):
            continue
        if kind == "table":
            yield from table_items(_grid(content["grid"]), page)
            continue
        text = ": ".join(str(content[name]) for name in ("key", "term", *_WORDS) if content.get(name))
        text = _TERMINAL.sub("", text)
        if kind == "list_item":
            parent = -1 if node.parent is None else node.parent
            numbers[parent] = numbers.get(parent, 0) + 1
            yield Item("list", f"{numbers[parent]}. {text}" if parent in ordered else f"- {text}", page=page)
        elif kind in ("heading", "title"):
            yield Item("heading", text, content.get("level", 1), page)
        else:
            yield Item("code" if kind == "code" else "text", text, page=page)


def _grid(grid: dict[str, Any]) -> list[list[str]]:
    rows = [[""] * grid["cols"] for _ in range(grid["rows"])]
    for cell in grid["cells"]:
        for row in rows[cell["row"] : cell["row"] + cell["row_span"]]:
            width = len(row[cell["col"] : cell["col"] + cell["col_span"]])
            row[cell["col"] : cell["col"] + cell["col_span"]] = [cell["content"]] * width
    return rows
