"""Decimals of the documentation: each is a value of a record, or says where else it is from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.prose import MARK, NUMBER, main, problems, without_code
from rag_posfix.errors import EvaluationError

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_decimal_of_a_page_is_a_value_of_a_record(page):
    assert list(problems(page.read_text(encoding="utf-8"))) == []


def test_an_altered_decimal_is_noticed_on_every_page_that_has_one():
    altered = 0
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        prose = MARK.sub(lambda mark: re.sub(r"[^\n]", " ", mark[0]), without_code(page))
        if decimals := list(NUMBER.finditer(prose)):
            last = decimals[len(decimals) // 2].end() - 1  # the last digit of the decimal in the middle, plus 1
            wrong = page[:last] + str((int(page[last]) + 1) % 10) + page[last + 1 :]
            assert any(problems(wrong)), f"{path.name}: {decimals[len(decimals) // 2][0]}"
            altered += 1
    assert altered >= 10


@pytest.fixture
def results(tmp_path):
    runs = {"a": {"score": 0.25}, "b": {"score": -0.125}}
    group = {"score": {"value": 2.0, "ci95": [1.5, 2.49]}}
    summary = {"mean": 0.0625, "runs": runs, "shares": [0.1, 0.7], "groups": {"all - of three": group}}
    (tmp_path / "trial.json").write_text(json.dumps({"seed": 0.5, "summary": summary}))
    (tmp_path / "other.json").write_text(json.dumps({"summary": {"mean": 0.75}}))
    return tmp_path


def section(records, line, prose):
    return f"# Page\n\nPlain.\n\n## Findings\n\n<!-- read from: {records}\n{line}\n-->\n\n{prose}\n"


@pytest.mark.parametrize(
    ("decimals", "expression"),
    [
        (".25", "runs > a > score"),
        ("-.125", "runs > b > score"),
        (".1", "runs > b > score"),  # without a sign: the absolute value, as in "lower by .1"
        (".1 .7", "shares"),
        ("0.7", "shares > 1"),
        (".5", "head > seed"),
        ("6.25", "mean * 100"),
        (".0625", "runs > a > score + runs > b > score / 2"),  # (.25 - .125) / 2, from left to right
        ("2.0 1.5 2.5", "groups > * three > score"),
        (".8", "sum(shares)"),
        ("+.6", "max(shares) - min(shares)"),
        (".8", '"the paper"'),
    ],
)
def test_a_decimal_equals_its_expression_rounded_as_it_is_written(results, decimals, expression):
    assert list(problems(section("trial", f"{decimals} = {expression}", f"It is {decimals}."), results)) == []


@pytest.mark.parametrize(
    ("line", "prose", "message"),
    [
        (".25 = runs > a > score", "Nothing.", "'Findings': the mark lists .25, which the section does not have"),
        (".26 = runs > a > score", "It is .26.", "'Findings': .26 is 0.25 at runs > a > score"),
        ("-.25 = runs > a > score", "It is -.25.", "'Findings': -.25 is 0.25 at runs > a > score"),
        (".1 = shares", "It is .1.", "'Findings': .1 is 0.1 0.7 at shares"),
    ],
)
def test_a_decimal_that_is_not_its_value_is_told(results, line, prose, message):
    assert list(problems(section("trial", line, prose), results)) == [message]


def test_a_decimal_that_no_mark_lists_is_told_with_the_values_that_it_may_be(results):
    page = section("trial other", ".25 = trial: runs > a > score", "It is .25, then .25 and .75.")
    assert list(problems(page, results)) == [
        "'Findings': the mark does not say which value .25 is",
        "    .25 = trial: runs > a > score",
        "'Findings': the mark does not say which value .75 is",
        "    .75 = other: mean",
    ]


def test_code_links_versions_and_generated_parts_are_not_read(results):
    generated = "<!-- table: trial -->\n| .4 |\n<!-- end of table -->"
    assert list(problems(f"Python 3.11, `0.7`, [a](b.2)\n\n{generated}\n\n```\n# .9\n```\n", results)) == []
    assert len(list(problems("| .4 |\n", results))) == 1


@pytest.mark.parametrize("address", ["runs > z > score", "runs > a", "shares > first", "mean > a"])
def test_an_address_that_the_record_does_not_have_is_refused(results, address):
    with pytest.raises(EvaluationError, match=f"trial has no number at {address!r}"):
        list(problems(section("trial", f".5 = {address}", "It is .5."), results))


def test_the_command_exits_with_1_where_a_page_is_wrong(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("It is .5.\n", encoding="utf-8")
    assert main([str(page)]) == 1
    assert ".5" in capsys.readouterr().out
    page.write_text("It is half.\n", encoding="utf-8")
    assert main([str(page)]) == 0
    assert main([]) == 2
