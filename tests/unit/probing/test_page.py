"""The page about probes: its example runs, and it names every probe and shows every figure that is kept."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from benchmarks.keep_record import RESULTS
from rag_posfix.probing import PROBES
from tests.support.pages import DOCS, examples

PAGE = (DOCS / "probes.md").read_text("utf-8")


def test_the_example_prints_what_the_page_says():
    ((code, expected),) = examples("probes.md")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "probes.md", "exec"), {})
    assert printed.getvalue() == expected


def test_the_table_and_the_sections_name_every_probe():
    assert set(re.findall(r"^\| \[`([\w-]+)`\]", PAGE, re.MULTILINE)) == set(PROBES.names())
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    for name in PROBES.names():
        assert any(name in heading.split() for heading in headings), name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("probe-*.json")), ids=lambda path: path.stem)
def test_a_record_that_is_kept_is_shown_with_its_picture(path):
    assert f"(images/{path.stem}.svg)" in PAGE
    assert f"read from: {path.stem}" in PAGE
