"""Generated documentation is current."""

from __future__ import annotations

from docs.generate import expected


def test_generated_pages_and_the_method_table_are_current():
    stale = [str(path) for path, text in expected().items() if path.read_text("utf-8") != text]
    assert stale == [], "run make docs"
