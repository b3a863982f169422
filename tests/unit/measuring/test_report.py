"""The page of a record: its command, the columns of its table, and what was not measured."""

from __future__ import annotations

import html
import re

from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.measuring.charts import draw_cost
from rag_posfix.measuring.report import report_csv, report_page

COMMAND = """rag-posfix measure --index 'my </pre><script>alert(1)</script> index' --out "it's & so" """.strip()


def commands(page):
    return [html.unescape(text) for text in re.findall(r'<pre class="command">(.*?)</pre>', page, re.DOTALL)]


def test_the_page_shows_the_command_of_each_record_that_has_one_and_escapes_it():
    records = [ExperimentRecord({"kind": "measure", "command": COMMAND}), ExperimentRecord({"kind": "measure"})]
    page = report_page(records)
    assert commands(page) == [COMMAND]
    assert "<script" not in page


def test_records_without_a_command_show_none():
    assert commands(report_page([ExperimentRecord({"kind": "measure", "command": None})])) == []


NUMBERS = {"worst": 0.25, "mean": 0.5, "best": 0.75, "second": 0.5, "well_formed": 1.0, "ttft_ratio": 1.0}


def headings(page):
    return re.findall(r'<th scope="col">(.*?)</th>', page)


def test_columns_have_titles_that_say_what_the_criterion_is():
    summary = {"measured": {"none": {**NUMBERS, "flip_rate": 0.4, "agreement": 0.8}}, "not_measured": {}}
    records = [
        ExperimentRecord({"kind": "measure", "summary": {**summary, "labels": labels}}) for labels in (True, False)
    ]
    assert headings(report_page(records[:1])) == [
        "arrangement", "worst position", "mean", "best position", "answers that change", "well-formed answers",
        "first token, times none",
    ]  # fmt: skip
    assert headings(report_page(records[1:])) == [
        "arrangement", "stable answers", "agreement with none", "well-formed answers", "first token, times none",
    ]  # fmt: skip
    assert "worst,mean,best,second" in report_csv(records)


def test_arrangements_that_were_not_measured_are_on_one_line_for_each_reason():
    skipped = {"default": "out of time", "repeat": "out of time", "sorted": "the model lacks it"}
    page = report_page([ExperimentRecord({"kind": "measure", "summary": {"not_measured": skipped}})])
    assert "Not measured, out of time: default, repeat." in page
    assert "Not measured, the model lacks it: sorted." in page


def test_times_on_the_chart_of_cost_are_round_numbers():
    measured = {"none": {**NUMBERS, "ttft_ratio": 1.0}, "default": {**NUMBERS, "ttft_ratio": 2.2}}
    ticks = re.findall(r'text-anchor="middle">([\d.]+)<', draw_cost({"measured": measured}).svg())
    assert ticks == ["0", "0.5", "1", "1.5", "2"]
