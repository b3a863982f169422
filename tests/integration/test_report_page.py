"""The page of a measurement and of old records, in a real Chromium: no console error, nothing from outside."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="playwright is not installed; `pip install playwright`")

from benchmarks.keep_record import RESULTS
from rag_posfix.evaluation.record import read_record
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.measuring.measure import MeasureOptions, find_questions, measure
from rag_posfix.measuring.report import report_page, report_table
from tests.support.chromium import checked_page, chromium
from tests.support.measured import pipeline_of, texts
from tests.support.order_biased import OrderBiasedGenerator

MAX_BYTES = 1_500_000
OLD = sorted(path for path in RESULTS.glob("*.json") if path.name.startswith(("positions-litm", "permutations")))[:2]


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    pipeline = pipeline_of(OrderBiasedGenerator())
    asked, dropped = find_questions(pipeline, texts(12))
    folder = tmp_path_factory.mktemp("report")
    measure(pipeline, asked, dropped=dropped, out=folder, options=MeasureOptions())
    return folder / "report.html"


def test_both_answers_to_a_question_open_with_the_keyboard(browser, page_file):
    with checked_page(browser) as page:
        page.goto(page_file.as_uri())
        assert "changes" in page.locator(".verdict").first.inner_text()
        first = page.locator("details").first
        assert not first.locator("blockquote").first.is_visible()
        first.locator("summary").focus()
        page.keyboard.press("Enter")
        assert first.locator("blockquote").count() == 2
        assert first.locator("blockquote").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_scrolls_in_no_direction_but_down(browser, page_file, scheme):
    with checked_page(browser, viewport={"width": 360, "height": 740}, color_scheme=scheme) as page:
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_page_prints(browser, page_file):
    with checked_page(browser) as page:
        page.goto(page_file.as_uri())
        assert page.pdf()[:4] == b"%PDF"


def test_old_records_have_their_curves(browser, tmp_path):
    assert OLD
    records = [read_record(path) for path in OLD]
    text = report_page(records)
    assert len(text.encode()) < MAX_BYTES
    assert text.count("<h1>") == len(OLD)
    file = tmp_path / "old.html"
    file.write_text(text)
    with checked_page(browser) as page:
        page.goto(file.as_uri())
        assert page.locator("svg").count() >= 1
    assert report_table(records).startswith("model,arrangement,")


def test_answers_are_text_and_never_markup():
    class Hostile(FakeGenerator):
        def generate(self, request):
            from dataclasses import replace

            return replace(super().generate(request), text="<script>alert(1)</script>")

    from tests.support.toy_encoder import ToyEncoder

    pipeline = pipeline_of(Hostile(ToyEncoder()))
    asked, _ = find_questions(pipeline, texts(3))
    page = report_page([measure(pipeline, asked)])
    assert "<script" not in page
    assert "&lt;script&gt;" in page
