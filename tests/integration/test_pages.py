"""The examples of the hand-written pages run, and print what the pages say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import rag_posfix
import rag_posfix.generation.load
import rag_posfix.pipeline.build
from rag_posfix.generation.engine import Engine

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"(<!-- not run: .*?-->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def examples(page):
    """Return (code, what it prints, or None) of each Python example that is to be run, in order."""
    blocks = [(kind, text) for skipped, kind, text in BLOCK.findall((DOCS / page).read_text("utf-8")) if not skipped]
    found = []
    for index, (kind, text) in enumerate(blocks):
        if kind == "python":
            following = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
            found.append((text, following[1] if following[0] == "text" else None))
    return found


@pytest.mark.weights
@pytest.mark.parametrize("page", ["assembly.md", "evaluation.md", "langchain.md"])
def test_the_examples_of_a_page_print_what_it_says(page, engine, monkeypatch):
    def load(*_, **__):
        """Return an engine on the weights that are loaded already."""
        return Engine(engine.loaded, engine.encoder, engine.model_id, engine.fingerprint)

    for module in (rag_posfix, rag_posfix.pipeline.build, rag_posfix.generation.load):
        monkeypatch.setattr(module, "load_engine", load, raising=False)
    monkeypatch.setenv("RAG_POSFIX_CACHE_DISK_BYTES", "0")
    names = {}
    found = examples(page)
    assert len(found) > 1
    for code, expected in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        if expected is not None:
            assert printed.getvalue() == expected, code
    if "pipeline" in names:
        names["pipeline"].close()
