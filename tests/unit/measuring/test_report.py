"""The page of a record: its command, the columns of its table, its charts, and what was not measured."""

from __future__ import annotations

import html
import json
import logging
import re
import sys
from xml.etree import ElementTree

import pytest

from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.measuring.report import MAX_CURVES, draw_cost, draw_curve, report_csv, report_page, write_report

COMMAND = """rag-posfix measure --index 'my </pre><script>alert(1)</script> index' --out "it's & so" """.strip()


def commands(page):
    return [html.unescape(text) for text in re.findall(r'<pre class="command">(.*?)</pre>', page, re.DOTALL)]


def test_the_page_shows_the_command_of_each_record_that_has_one_and_escapes_it():
    records = [ExperimentRecord({"kind": "measure", "command": COMMAND}), ExperimentRecord({"kind": "measure"})]
    page = report_page(records)
    assert commands(page) == [COMMAND]
    assert "<script" not in page


NUMBERS = {"worst": 0.25, "mean": 0.5, "best": 0.75, "second": 0.5, "well_formed": 1.0, "ttft_ratio": 1.0}


def headings(page):
    return re.findall(r'<th scope="col">(.*?)</th>', page)


def test_columns_have_titles_that_say_what_the_criterion_is():
    summary = {"measured": {"none": {**NUMBERS, "flip_rate": 0.4, "agreement": 0.8}}, "not_measured": {}}
    records = [
        ExperimentRecord({"kind": "measure", "summary": {**summary, "labels": labels}}) for labels in (True, False)
    ]
    assert headings(report_page(records[:1])) == [
        "pipeline variant", "worst position", "mean", "best position", "answers that change", "well-formed answers",
        "first token, times none",
    ]  # fmt: skip
    assert headings(report_page(records[1:])) == [
        "pipeline variant", "stable answers", "agreement with none", "well-formed answers", "first token, times none",
    ]  # fmt: skip
    assert "worst,mean,best,second" in report_csv(records)


def test_overconfidence_is_told_or_why_it_is_not_known():
    def row(summary):
        flips = dict.fromkeys(
            ("rate", "control", "answers", "difference", "p", "least_change", "n", "judged_rate"), 0.5
        )
        flips |= {name: [0.0, 1.0] for name in ("interval", "control_interval", "difference_interval")}
        page = report_page([ExperimentRecord({"kind": "measure", "summary": {"flips": flips, **summary}})])
        found = re.search(r'<th scope="row">overconfidence</th><td>(.*?)</td>', page)
        return found and found[1]

    measured = {"measured": {"none": {**NUMBERS, "overconfidence": 0.31}}, "labels": True}
    assert row(measured).startswith("+0.31: mean probability of an answer")
    unknown = {"measured": {"none": {**NUMBERS, "overconfidence": None}}, "labels": True}
    assert row(unknown).startswith("not measured: the server of the model")
    assert row({"measured": {"none": NUMBERS}, "labels": False}).startswith("not measured: it needs the accuracy")
    assert row({"measured": {"none": NUMBERS}, "labels": True}) is None  # a record of an earlier version


def test_the_page_says_what_reranker_order_and_method_of_each_name_do(monkeypatch):
    monkeypatch.setattr("rag_posfix.measuring.report.draw_cost", lambda _: None)
    table = dict.fromkeys(("none", "yes_no:top_n=3/reverse/none", "default", "of another version"), NUMBERS)
    page = report_page([ExperimentRecord({"kind": "measure", "summary": {"measured": table}})])
    meanings = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert list(meanings) == ["none (method)", "reverse (order)", "yes_no (reranker)", "default (method)"]
    assert meanings["default (method)"].startswith("Read the question once per passage")
    assert all(meanings.values())


def test_arrangements_that_were_not_measured_are_on_one_line_for_each_reason():
    skipped = {"default": "out of time", "repeat": "out of time", "sorted": "the model lacks it"}
    page = report_page([ExperimentRecord({"kind": "measure", "summary": {"not_measured": skipped}})])
    assert "Not measured, out of time: default, repeat." in page
    assert "Not measured, the model lacks it: sorted." in page


BENCH = {
    "unmodified": {"ttft_s": 0.5},
    "methods": {"none": {"ttft_cold_ratio": 1.0, "together_ratio": None}, "default": {"ttft_cold_ratio": 1.5}},
    "refused": {"sorted": "the model lacks it"},
}
RERANKERS = {"rerankers": {"judge": {"places": {"0": {"recall@1": 1.0}}, "recall@1": {"mean": 0.75}, "seconds": 2.0}}}


@pytest.mark.parametrize(
    ("kind", "summary", "table"),
    [
        ("bench", BENCH, ["model,arrangement,ttft_cold_ratio", ",none,1.0", ",default,1.5"]),
        ("rerank-positions", RERANKERS, ["model,arrangement,recall@1 mean,seconds", ",judge,0.75,2.0"]),
    ],
)
def test_records_of_bench_and_of_rerankers_have_a_table_and_keep_their_summary(kind, summary, table):
    record = ExperimentRecord({"kind": kind, "summary": summary})
    assert report_csv([record]).splitlines() == table
    page = html.unescape(report_page([record]))
    assert headings(page) == table[0].split(",")[1:]
    assert json.dumps(summary, indent=1) in page


def spec(chart):
    return json.loads(chart.spec())


def ticks(svg, axis):
    """Return the labels of the axis whose description begins so."""
    described = next(one for one in svg.iter() if one.get("aria-label", "").startswith(axis))
    labels = next(one for one in described.iter() if "role-axis-label" in one.get("class", ""))
    return ["".join(text.itertext()) for text in labels]


@pytest.mark.slow
def test_ticks_on_the_chart_of_cost_are_round_numbers_and_shares_go_from_0_to_1():
    measured = {"none": {**NUMBERS, "ttft_ratio": 1.0}, "default": {**NUMBERS, "ttft_ratio": 2.2}}
    svg = ElementTree.fromstring(draw_cost({"measured": measured}).svg())
    assert ticks(svg, "X-axis titled 'time to the first token, unmodified model = 1'") == [
        "0.0", "0.5", "1.0", "1.5", "2.0"
    ]  # fmt: skip
    assert ticks(svg, "Y-axis titled 'share of questions with stable answers'") == [
        "0.0", "0.2", "0.4", "0.6", "0.8", "1.0"
    ]  # fmt: skip


def test_the_chart_of_cost_has_quality_and_time_of_each_arrangement_in_its_legend():
    measured = {"none": {**NUMBERS, "worst": 0.254}, "default": {**NUMBERS, "worst": 0.5, "ttft_ratio": 2.24}}
    chart = draw_cost({"measured": measured, "labels": True})
    (layer,) = spec(chart)["layer"]
    assert spec(chart)["data"]["values"] == [
        {"label": "none: 0.25 at 1.0", "variant": "none", "quality": 0.254, "time": 1.0},
        {"label": "default: 0.50 at 2.2", "variant": "default", "quality": 0.5, "time": 2.24},
    ]
    assert chart.title == "accuracy at the worst position against cost"
    assert layer["encoding"]["color"]["scale"] == {
        "domain": ["none: 0.25 at 1.0", "default: 0.50 at 2.2"], "range": ["#c0483a", "#2e8b68"]
    }  # fmt: skip
    assert layer["encoding"]["x"]["scale"]["domain"] == [0, pytest.approx(2.464)]


@pytest.mark.parametrize("summary", [{}, {"measured": {"none": NUMBERS}}, {"measured": [1, 2]}])
def test_without_two_arrangements_there_is_no_chart_of_cost(summary):
    assert draw_cost(summary) is None


def by_position(condition, **right):
    """Return rows: ``p0="110"`` are three questions with the gold passage at position 0, two of them right."""
    return [
        {"condition": condition, "gold_position": int(name[1:]), "accuracy": int(each)}
        for name, answers in right.items()
        for each in answers
    ]


def test_the_curve_has_accuracies_with_wilsons_bands_and_both_levels():
    rows = [*by_position("none", p0="1111", p4="1100", p9="0000"), *by_position("default", p0="1", p4="1")]
    rows += [{"condition": "none", "gold_position": 0, "accuracy": 0, "changed": True}, {"condition": "none"}]
    layers = spec(draw_curve(rows, {"gold_only": {"accuracy": 0.8}, "closed_book": {"accuracy": 0.1}}))["layer"]
    band, line, circle, rule, text = layers
    points = circle["data"]["values"]
    assert [(point["condition"], point["position"], point["accuracy"]) for point in points] == [
        ("none", "0", 1), ("none", "4", 0.5), ("none", "9", 0), ("default", "0", 1), ("default", "4", 1)
    ]  # fmt: skip
    # z squared is 3.8415. Four of four: from 4 / (4 + 3.8415) to 1; none of four: from 0 to 3.8415 / 7.8415; two of
    # four: .5 -+ 1.96 sqrt(.25 / 4 + 3.8415 / 64) / (1 + 3.8415 / 4) = .5 -+ .35; one of one: from 1 / 4.8415 to 1.
    ends = [(point["low"], point["high"]) for point in points]
    expected = [(0.5101, 1), (0.15, 0.85), (0, 0.4899), (0.2065, 1), (0.2065, 1)]
    assert ends == [pytest.approx(each, abs=1e-3) for each in expected]
    assert band["data"] == line["data"] == circle["data"]
    assert (band["encoding"]["y"]["field"], band["encoding"]["y2"]["field"]) == ("low", "high")
    assert circle["encoding"]["x"]["sort"] == ["0", "4", "9"]
    levels = [{"level": "gold passage alone", "accuracy": 0.8}, {"level": "no passages", "accuracy": 0.1}]
    assert rule["data"]["values"] == text["data"]["values"] == levels


def test_the_curve_keeps_the_order_of_positions_and_joins_several_gold_passages():
    rows = [{"condition": "none", "gold_position": place, "accuracy": 1} for place in (10, 9, [0, 3])]
    svg = ElementTree.fromstring(draw_curve(rows, {}).svg())
    assert ticks(svg, "X-axis titled 'position of the gold passage, from 0'") == ["10", "9", "0+3"]


def test_the_curve_has_the_first_eight_conditions():
    rows = [row for number in range(9) for row in by_position(f"number {number}", p0="1", p1="0")]
    values = spec(draw_curve(rows, {}))["layer"][2]["data"]["values"]
    assert list(dict.fromkeys(value["condition"] for value in values)) == [f"number {n}" for n in range(MAX_CURVES)]


@pytest.mark.parametrize("rows", [[], [{"condition": "none"}], by_position("none", p0="11")])
def test_without_two_positions_there_is_no_curve(rows):
    assert draw_curve(rows, {}) is None


TWO = {"measured": {"none": NUMBERS, "default": {**NUMBERS, "worst": 0.5}}}


@pytest.mark.slow
def test_the_script_is_in_the_page_once_for_all_charts_and_absent_without():
    rows = by_position("none", p0="11", p1="10")
    page = report_page([ExperimentRecord({"kind": "measure", "summary": TWO}, rows)] * 2)
    assert page.count('<script type="application/json">') == 4
    assert page.count("; do not conclude ") == 4
    assert page.count("<script>") == 1
    assert page.count("<noscript>") == 2  # one for each record
    assert len(page.encode()) < 1_500_000
    without = report_page([ExperimentRecord({"kind": "measure", "summary": {}}, rows[:2])])
    assert "script" not in without
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in without
    assert len(without) < 10_000


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_without_its_extra_a_report_is_written_without_charts_and_says_what_to_install(
    package, tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, package, None)
    record = ExperimentRecord({"kind": "measure", "model": "m", "summary": TWO})
    with caplog.at_level(logging.WARNING):
        files = write_report([record, record], tmp_path / "page.html")
    assert set(files) == {"report", "csv", "tex"}
    assert len(list(tmp_path.iterdir())) == 3
    (warning,) = caplog.messages
    assert warning.startswith(f"The report has no charts: {package} is not installed; ")
    assert "pip install '.[report]'" in warning
    page = html.unescape(files["report"].read_text())
    assert page.count(warning) == 1
    assert "script" not in page
    assert "m,default,0.5" in files["csv"].read_text()


@pytest.mark.slow
def test_a_chart_that_cannot_be_drawn_costs_its_file_alone(tmp_path, monkeypatch, caplog):
    import vl_convert

    def fail(*args, **options):
        raise ValueError("no font\nStack backtrace:")

    monkeypatch.setattr(vl_convert, "vegalite_to_png", fail)
    files = write_report([ExperimentRecord({"kind": "measure", "summary": TWO})], tmp_path / "page.html")
    assert set(files) == {"report", "csv", "tex", "cost.svg"}
    assert caplog.messages == ["cost.png was not written: no font"]
