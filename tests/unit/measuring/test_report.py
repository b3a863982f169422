"""The command on the page of a record."""

from __future__ import annotations

import html
import re

from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.measuring.report import report_page

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
