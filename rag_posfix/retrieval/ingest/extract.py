"""Reads PDF files, notebooks, OpenDocument and rich text with xberg, whose typed nodes become items."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
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
_RTF_MARK = re.compile(rb"(?<!\\)((?:\\\\)*)\\([~_])")
_RTF_LABEL = re.compile(rb"\{\\(?:listtext|pntext)\b([^{}]*)\}\s*(\\pard)?")
_SAME_SIZE = 0.5
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
    if suffix == ".rtf":
        data = _readable_rtf(data)
    return items_text(node_items(extract(data, suffix)))


def _readable_rtf(data: bytes) -> bytes:
    """Return rich text with labels of list items, and spaces and hyphens that break no line, as xberg reads them."""
    data = _RTF_MARK.sub(lambda mark: mark[1] + (rb"\'20" if mark[2] == b"~" else rb"\'2d"), data)
    return _RTF_LABEL.sub(lambda label: (label[2] or b"") + b"{" + label[1].replace(rb"\pard", b"") + b"}", data)


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
    """Yield the items of nodes, heads of pages first where these are unknown.

    Groups repeat the headings below them, and rich text its heads of pages; pictures have no words of their own.
    """
    nodes = found.document.nodes if found.document is not None else []
    contents = [json.loads(str(node.content)) for node in nodes]
    edges = [not node.page and str(node.content_layer) in ("header", "footer") for node in nodes]
    words = {_letters(content) for content, is_edge in zip(contents, edges, strict=True) if not is_edge}
    first = _first_level(nodes, contents)
    numbers: dict[int, int] = {}
    ordered: set[int] = set()
    for index in sorted(range(len(nodes)), key=lambda index: not edges[index]):
        node, content = nodes[index], contents[index]
        kind, page = content.pop("node_type"), node.page or 0
        if kind == "list" and content.get("ordered"):
            ordered.add(index)
        if kind in ("group", "list", "image", "page_break", "slide") or (edges[index] and _letters(content) in words):
            continue
        if kind == "table":
            yield from table_items(_grid(content["grid"]), page)
            continue
        text = ": ".join(str(content[name]) for name in ("key", "term", *_WORDS) if content.get(name))
        text = _TERMINAL.sub("", text)
        is_bold = any("bold" in str(mark.kind) and mark.end - mark.start >= len(text) > 0 for mark in node.annotations)
        if kind == "list_item":
            parent = -1 if node.parent is None else node.parent
            numbers[parent] = numbers.get(parent, 0) + 1
            marker = (node.attributes or {}).get("list_marker", f"{numbers[parent]}." if parent in ordered else "-")
            yield Item("bold" if is_bold and marker[0].isalnum() else "list", f"{marker} {text}", page=page)
        elif kind in ("heading", "title"):
            level = content.get("level", 1)
            yield Item("heading", text, first if level == 1 else level, page)
        else:
            yield Item("code" if kind == "code" else "bold" if is_bold else "text", text, page=page)


def _letters(content: dict[str, Any]) -> str:
    return "".join(str(content.get("text", "")).split())


def _first_level(nodes: Sequence[Any], contents: Sequence[dict[str, Any]]) -> int:
    """Return the level of the first heading: that of the others, if these are in letters of its size."""
    sizes = [
        (content.get("level", 1), node.bbox.y1 - node.bbox.y0)
        for node, content in zip(nodes, contents, strict=True)
        if content["node_type"] == "heading" and node.bbox is not None
    ]
    others = [size for level, size in sizes if level == 2]
    return 2 if len(sizes) == len(others) + 1 and others and sizes[0][1] <= min(others) + _SAME_SIZE else 1


def _grid(grid: dict[str, Any]) -> list[list[str]]:
    rows = [[""] * grid["cols"] for _ in range(grid["rows"])]
    for cell in grid["cells"]:
        for row in rows[cell["row"] : cell["row"] + cell["row_span"]]:
            width = len(row[cell["col"] : cell["col"] + cell["col_span"]])
            row[cell["col"] : cell["col"] + cell["col_span"]] = [cell["content"]] * width
    return rows
