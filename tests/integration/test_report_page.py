"""The page of a measurement and of old records, in a real Chromium: no console error, nothing from outside."""

from __future__ import annotations

import io
import logging
import sys
from xml.etree import ElementTree

import pytest
from PIL import Image

pytest.importorskip("playwright", reason="playwright is not installed; `pip install playwright`")

from benchmarks.keep_record import RESULTS
from rag_posfix.evaluation.record import ExperimentRecord, read_record
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.measuring.charts import draw_cost, png_of
from rag_posfix.measuring.flips import find_questions
from rag_posfix.measuring.measure import MeasureOptions, measure
from rag_posfix.measuring.report import report_csv, report_latex, report_page, write_report
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
    assert report_csv(records).startswith("model,arrangement,")


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


MEASURED = {
    "none": {"worst": 0.25, "ttft_ratio": 1.0, "flip_rate": 0.75},
    "embedding:top_n=3/reverse/none": {"worst": 0.5, "ttft_ratio": 0.5},
}
RECORD = ExperimentRecord({"kind": "measure", "model": "50% & #1", "summary": {"measured": MEASURED}}, [])


def test_the_table_is_written_as_csv_and_as_a_latex_document_without_packages():
    assert report_csv([RECORD]).splitlines() == [
        "model,arrangement,worst,ttft_ratio,flip_rate",
        "50% & #1,none,0.25,1.0,0.75",
        "50% & #1,embedding:top_n=3/reverse/none,0.5,0.5,",
    ]
    lines = report_latex([RECORD]).splitlines()
    assert lines[0] == r"\documentclass[landscape]{article}"
    assert not any("usepackage" in line for line in lines)
    assert r"\begin{tabular}{llrrr}" in lines
    assert r"50\% \& \#1 & embedding:top\_n=3/reverse/none & 0.5 & 0.5 &  \\" in lines
    assert {line.replace(r"\&", "").count("&") for line in lines if line.endswith(r"\\")} == {4}


def test_charts_are_written_as_svg_and_png(tmp_path):
    pytest.importorskip("resvg_py", reason="resvg-py is not installed; `pip install resvg-py`")
    files = write_report([RECORD, RECORD], tmp_path / "two.html")
    assert set(files) == {"report", "csv", "tex", "1-cost.svg", "1-cost.png", "2-cost.svg", "2-cost.png"}
    svg = files["2-cost.svg"].read_text()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    image = Image.open(io.BytesIO(files["2-cost.png"].read_bytes())).convert("RGB")
    assert image.size == (1280, 632)  # twice 640 x 280, and two lines of the legend
    colours = {colour for _, colour in image.getcolors(10_000)}
    assert (255, 255, 255) in colours
    assert {(0xC0, 0x48, 0x3A), (0x2E, 0x8B, 0x68)} <= colours  # the points of both arrangements
    assert len(colours) > 20  # letters with smooth edges
    assert png_of(svg) == files["2-cost.png"].read_bytes()


def test_without_the_rasterizer_the_other_files_are_written_and_a_warning_says_what_to_install(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with caplog.at_level(logging.WARNING):
        files = write_report([RECORD], tmp_path / "page.html")
    assert set(files) == {"report", "csv", "tex", "cost.svg"}
    assert "cost.png was not written: resvg_py is not installed" in caplog.text
    assert "pip install '.[eval]'" in caplog.text


def test_a_chart_of_its_own_has_its_legend_and_colours_in_the_file():
    chart = draw_cost(RECORD.summary)
    assert "embedding:top_n=3/reverse/none: 0.50 at 0.5" in chart.svg()
    assert ".c1 { color: #2e8b68; }" in chart.svg()
    assert "var(" not in chart.svg()
