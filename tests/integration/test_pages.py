"""The examples of the hand-written pages run, and print what the pages say."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.support.pages import blocks, examples

pytestmark = pytest.mark.slow


@pytest.mark.weights
@pytest.mark.parametrize("page", ["evaluation.md", "frameworks.md", "index.md", "langchain.md", "prompts.md"])
def test_the_examples_of_a_page_print_what_it_says(page, tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAG_POSFIX_CACHE_DISK_BYTES", "0")
    if page == "evaluation.md":  # the names of columns, and that two positions score alike: true of any model
        monkeypatch.setenv("RAG_POSFIX_MODEL", str(tiny_model))
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


def test_the_two_changed_lines_of_a_chain_are_lines_of_the_program_below_them():
    (changes,) = [text for kind, text, _ in blocks("langchain.md") if kind == "diff"]
    added = [line[1:] for line in changes.splitlines() if line.startswith("+")]
    assert len(added) == 2
    program, _ = examples("langchain.md")[0]
    assert all(line in program.splitlines() for line in added)


def test_the_example_of_passages_prints_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, expected = next((code, text) for code, text in examples("retrieval.md") if "read_documents(" in code)
    exec(compile(code, "retrieval.md", "exec"), {})
    assert capsys.readouterr().out == expected
