"""Numbers in the prose of the documentation: each section says which records they were read from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import prose
from docs.prose import digest, main, problems, with_digests

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_prose_are_those_of_the_records_they_were_read_from(page):
    assert problems(page.read_text(encoding="utf-8")) == []


@pytest.fixture
def results(tmp_path):
    (tmp_path / "trial.json").write_text(json.dumps({"kind": "x", "at": "now", "summary": {"mean": 0.5}}))
    return tmp_path


def test_a_section_with_numbers_and_no_record_is_told(results):
    page = "# Page\n\nPlain.\n\n## Findings\n\nThe mean is .5, and `0.7` is code.\n\n| .9 | table |\n"
    assert problems(page, results) == ["'Findings' has .5, and does not say which record they are read from"]


def test_a_section_is_stale_once_its_record_has_other_values(results):
    page = with_digests("## Findings\n\n<!-- read from: trial -->\n\nThe mean is .5.\n", results)
    assert digest(["trial"], results) in page
    assert problems(page, results) == []
    (results / "trial.json").write_text(json.dumps({"kind": "x", "at": "later", "summary": {"mean": 0.5}}))
    assert problems(page, results) == []
    (results / "trial.json").write_text(json.dumps({"kind": "x", "at": "later", "summary": {"mean": 0.6}}))
    (told,) = problems(page, results)
    assert told == "'Findings' was written for other values of trial; read it again, then write digests"


def test_what_no_record_holds_is_said(results):
    assert problems("## Paper\n\n<!-- read from: no record -->\n\nThe paper has .7.\n", results) == []


def test_the_command_writes_digests(results, monkeypatch, capsys):
    monkeypatch.setattr(prose, "digest", lambda names, results: "0" * 8)
    page = results / "page.md"
    page.write_text("<!-- read from: trial -->\n", encoding="utf-8")
    assert main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == "<!-- read from: trial (00000000) -->\n"
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
