"""The page of a measurement and of old records, in a real Chromium: no console error, nothing from outside."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from PIL import Image

pytest.importorskip("playwright", reason="playwright is not installed; `pip install playwright`")

from benchmarks.keep_record import RESULTS
from rag_posfix.evaluation.record import ExperimentRecord, read_record
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.measuring.choice import find_questions
from rag_posfix.measuring.measure import MeasureOptions, measure
from rag_posfix.measuring.report import report_csv, report_latex, report_page, write_report
from tests.integration.chromium import checked_page, chromium, wait_for
from tests.support.measured import pipeline_of, texts
from tests.support.order_biased import OrderBiasedGenerator

pytestmark = pytest.mark.slow

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
        first = page.locator("details", has=page.locator("blockquote")).first
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
        wait_for(page, "document.querySelectorAll('.chart svg').length >= 1")
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
    assert "<script>alert" not in page
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
    files = write_report([RECORD, RECORD], tmp_path / "two.html")
    assert set(files) == {"report", "csv", "tex", "1-cost.svg", "1-cost.png", "2-cost.svg", "2-cost.png"}
    svg = ElementTree.fromstring(files["2-cost.svg"].read_bytes())
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    words = "".join(svg.itertext())
    assert "none: 0.25 at 1.0" in words
    assert "embedding:top_n=3/reverse/none:0.50 at 0.5" in words  # on two lines
    image = Image.open(io.BytesIO(files["2-cost.png"].read_bytes())).convert("RGB")
    assert image.width == 1280
    assert 560 < image.height < 800
    colours = {colour for _, colour in image.getcolors(10_000)}
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert {(0xC0, 0x48, 0x3A), (0x2E, 0x8B, 0x68)} <= colours  # the points of both arrangements
    assert len(colours) > 20  # letters with smooth edges
    assert files["1-cost.svg"].read_bytes() == files["2-cost.svg"].read_bytes()


HOSTILE = "</script><script>document.title = 'taken'</script><!--"
ROWS = [
    {"condition": name, "gold_position": position, "accuracy": float(number < 4 - position)}
    for name in ("none", HOSTILE)
    for position in range(3)
    for number in range(4)
]


@pytest.fixture(scope="module")
def charts_file(tmp_path_factory):
    measured = {**MEASURED, HOSTILE: {"worst": 1.0, "ttft_ratio": 2.0}}
    summary = {"measured": measured, "ceiling": {"accuracy": 0.9}, "floor": {"accuracy": 0.1}}
    record = ExperimentRecord({"kind": "measure", "summary": summary}, ROWS)
    return write_report([record], tmp_path_factory.mktemp("charts") / "report.html")["report"]


def shown(page, file):
    """Open a page and wait for both charts."""
    page.goto(file.as_uri())
    wait_for(page, "document.querySelectorAll('.chart svg').length === 2")
    return page.locator(".chart")


def test_a_page_with_charts_draws_every_point_and_says_what_each_chart_is(browser, charts_file):
    assert charts_file.stat().st_size < MAX_BYTES
    with checked_page(browser) as page:
        curve, cost = shown(page, charts_file).all()
        assert curve.locator(".points_marks path").count() == 6
        assert curve.locator("path[aria-roledescription='area mark']").count() == 2
        assert cost.locator(".points_marks path").count() == 3
        assert curve.get_attribute("aria-label") == "accuracy by position of the gold passage, 95 % bands"
        assert cost.get_attribute("aria-label") == "share of questions with stable answers against cost"
        assert {"gold passage alone", "no passages"} <= set(curve.locator("text").all_text_contents())
        assert page.locator(".vega-actions").count() == 0


def test_markup_in_a_name_is_text_in_the_page_and_in_the_charts(browser, charts_file):
    with checked_page(browser) as page:
        curve, _ = shown(page, charts_file).all()
        curve.locator(".points_marks path").last.hover()
        wait_for(page, "document.querySelector('#vg-tooltip-element.visible') !== null")
        tip = page.locator("#vg-tooltip-element")
        # Two of four are right at the last position: Wilson's interval is .5 -+ .35.
        assert tip.inner_text().split() == [
            "condition", *HOSTILE.split(), "position", "2", "accuracy", "0.50", "low", "0.15", "high", "0.85"
        ]  # fmt: skip
        assert page.title() == "measure: no model"
        assert page.locator("script").count() == 3  # two specifications and the one that draws


def test_the_policy_runs_the_script_of_the_charts_alone(browser, charts_file, tmp_path):
    text = charts_file.read_text()
    file = tmp_path / "changed.html"
    file.write_text(text.replace("</main>", "<script>document.title = 'taken'</script></main>"))
    opened = browser.new_page()
    shown(opened, file)
    assert opened.title() == "measure: no model"
    opened.close()
    policy = text.partition("Content-Security-Policy")[2].partition(">")[0]
    assert "unsafe-eval" not in policy
    assert "http" not in policy
