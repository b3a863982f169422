"""Generated documentation is current, and its pictures show what the plans say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import docs.generate
from benchmarks.keep_record import RESULTS
from docs.charts import charts, draw_accuracy, fill_charts
from docs.first_screen import draw_first_screen, first_screen
from docs.generate import TABLE, expected, fill_tables
from docs.picture import COLOURS, draw, render, toy_layout, toy_plan
from docs.themes import COLOURS as PAIRS
from docs.themes import DARK_PAGE, INK, LIGHT_PAGE, themed
from rag_posfix.cli.measure import GOLD_POSITIONS, PASSAGES
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import read_head, read_record, save_record
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.plan.plan import AttentionOverride, HiddenScale, Plan, RowPlan


@pytest.fixture
def without_figures(monkeypatch):
    """Leave out the figures of records and the reference, which no record or plan of these tests changes."""
    monkeypatch.setattr(docs.generate, "pictures", lambda results: {})
    monkeypatch.setattr(docs.generate, "reference_pages", lambda path: {})


def stale(files):
    return [path.name for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]


@pytest.mark.slow
def test_generated_pages_and_tables_are_current():
    assert stale(expected()) == [], "run make docs"


def changed_results(folder):
    """Copy the heads of all records, one accuracy of one of them changed, and the rows that a page shows."""
    for path in (*RESULTS.glob("*.json"), RESULTS / "demo-24.jsonl.gz"):
        (folder / path.name).write_bytes(path.read_bytes())
    path = folder / "positions-litm-10-methods.json"
    head = json.loads(path.read_text("utf-8"))
    head["summary"]["mitigations"]["none"]["positions"]["4"]["accuracy"] += 0.01
    path.write_text(json.dumps(head), "utf-8")
    return folder


@pytest.mark.usefixtures("without_figures")
def test_a_table_that_differs_from_its_head_is_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(docs.generate, "RESULTS", changed_results(tmp_path))
    assert stale(expected()) == ["choosing-a-method.md"]


def test_a_table_that_was_edited_by_hand_is_written_anew():
    page = (docs.generate.ROOT / "docs" / "results-tables.md").read_text("utf-8")
    assert fill_tables(page) == page
    edited = page.replace("| .747 |", "| .757 |", 1)
    assert edited != page
    assert fill_tables(edited) == page


def test_every_mark_of_a_table_has_its_end():
    for path in (docs.generate.ROOT / "README.md", *(docs.generate.ROOT / "docs").glob("*.md")):
        text = path.read_text("utf-8")
        found = len(TABLE.findall(text))
        assert text.count("<!-- table:") == text.count("<!-- end of table -->") == found, path.name


def test_a_parameter_that_several_rerankers_share_is_described_once():
    page = docs.generate.rerankers()
    shared, _, own = page.partition("\n## attention_sorting\n")
    assert (shared.count("- `top_n` "), own.count("- `top_n` ")) == (1, 0)
    assert "- `rounds` (`3`): " in own


def test_a_record_that_is_missing_is_named():
    with pytest.raises(EvaluationError, match=r"absent\.json cannot be read"):
        fill_tables("<!-- table: absent -->\n<!-- end of table -->")


def squares(picture):
    """Return how many squares of the matrices are full, by colour, and how many are empty."""
    tags = [node.attrib for node in ElementTree.fromstring(picture) if node.tag.endswith("rect")]
    full = [tag["fill"] for tag in tags if (tag["width"], tag["height"]) == ("14", "14")]
    empty = [tag for tag in tags if (tag["width"], tag["height"]) == ("13", "13")]
    return {COLOURS.index(colour): full.count(colour) for colour in set(full)}, len(empty)


def dots(picture):
    """Return how high each dot stands, in pixels above the first one."""
    circles = [float(node.attrib["cy"]) for node in ElementTree.fromstring(picture) if node.tag.endswith("circle")]
    return [round(circles[0] - height, 1) for height in circles]


@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_a_picture_is_the_same_every_time_and_valid_xml(name):
    if toy_plan(name) is None:
        pytest.skip(f"{name} has no plan before something was measured")
    assert draw(name) == draw(name)
    assert ElementTree.fromstring(draw(name)).attrib["role"] == "img"


def test_the_unmodified_model_is_drawn_causal_and_in_a_line():
    # 15 tokens: 15 * 16 / 2 = 120 of 225 squares. A key at place k is seen by 15 - k tokens:
    # prefix 15 + 14; passage 1 13 + 12 + 11; passage 2 10 + 9 + 8 + 7; passage 3 6 + 5 + 4; suffix 3 + 2 + 1.
    assert squares(draw("none")) == ({0: 29, 1: 36, 2: 34, 3: 15, 4: 6}, 105)
    # 76 pixels for positions 0 to 14.
    assert dots(draw("none")) == [round(76 * position / 14, 1) for position in range(15)]


def test_parallel_windows_are_drawn_as_blocks_that_start_at_the_same_height():
    # Prefix tokens are seen by themselves and all after: 15 + 14. Passages see themselves, 6, 10 and 6 squares, and
    # are seen by the 3 suffix tokens, 9, 12 and 9. The suffix is causal: 6.
    assert squares(draw("parallel_windows")) == ({0: 29, 1: 15, 2: 22, 3: 15, 4: 6}, 225 - 87)
    # Positions 0 1, then 2 3 4, 2 3 4 5, 2 3 4, then 6 7 8, after the longest passage; 76 pixels for 8.
    positions = [0, 1, 2, 3, 4, 2, 3, 4, 5, 2, 3, 4, 6, 7, 8]
    assert dots(draw("parallel_windows")) == [76 * position / 8 for position in positions]


def test_every_row_of_an_ensemble_is_drawn_in_the_colour_of_its_passage():
    # Rows of 2 + n + 3 tokens, n = 3, 4, 3, 0, all causal. With 8 tokens the prefix has 8 + 7 squares, and so on.
    full, _ = squares(draw("context_experts"))
    assert full == {0: 15 + 17 + 15 + 9, 1: 6 + 5 + 4, 2: 7 + 6 + 5 + 4, 3: 6 + 5 + 4, 4: 4 * 6}
    assert "row 4 of 4" in draw("context_experts")


def test_at_most_four_rows_are_drawn_and_the_picture_says_so():
    plan = Plan(rows=(RowPlan(),) * 6, combine=lambda scores: (scores.log_probs[0], scores.question))
    picture = render("many", plan)
    assert "row 4 of 6" in picture
    assert "row 5 of 6" not in picture
    assert "The plan has 6 rows; the first 4 are drawn." in picture


class Everything(AttentionOverride):
    layers = range(2, 5)

    def __call__(self, given):
        raise NotImplementedError

    def visible(self, n_tokens):
        return torch.ones(n_tokens, n_tokens, dtype=torch.bool)


def test_attention_that_is_no_mask_is_drawn_as_it_says():
    picture = render("everything", Plan(rows=(RowPlan(attend=Everything()),)))
    assert sum(squares(picture)[0].values()) == 225
    assert "is computed by Everything in layers 2 to 4, not" in picture


def test_what_squares_and_dots_cannot_show_is_written_below():
    row = RowPlan(
        layer_scale=torch.tensor([1.0, 1.25, 1.5]),
        rope_base_factor=2.5,
        head_scale=lambda layer, query, key: None,
        hidden_scale=HiddenScale(7, -0.5, range(3, 9)),
    )
    picture = render("all", Plan(rows=(row,)))
    for note in (
        "Positions are divided by 1 to 1.5, depending on the layer.",
        "The base of the rotary encoding is multiplied by 2.5.",
        "Positions are divided by another number in each head",
        "hidden channel 7 is scaled by -0.5 in layers 3 to 8.",
    ):
        assert note in picture


def test_what_holds_for_some_rows_only_says_for_which():
    rows = (RowPlan(), RowPlan(rope_base_factor=2.0), RowPlan(rope_base_factor=2.0))
    picture = render("bases", Plan(rows=rows, combine=lambda scores: (scores.log_probs[0], scores.question)))
    assert "Row 2, 3: The base of the rotary encoding is multiplied by 2." in picture


@pytest.mark.usefixtures("without_figures")
def test_a_method_without_a_plan_before_measuring_gets_a_page_without_a_picture(monkeypatch):
    monkeypatch.setattr(docs.generate, "draw", lambda name: None)
    files = expected()
    assert not [path for path in files if path.suffix == ".svg" and path.parent.name == "methods"]
    assert not [path for path, text in files.items() if path.parent.name == "methods" and ".svg" in text]


def test_a_section_says_when_the_method_helps_and_hurts():
    page = (docs.generate.ROOT / "docs" / "methods" / "row-per-passage.md").read_text("utf-8")
    text = page[page.index("## context_experts") : page.index("## passage_answers")]
    helps, hurts = text.index("**Helps:** where one passage answers"), text.index("**Hurts:** where the answer")
    assert text.index("**Source:**") < helps < hurts < text.index("**Cost:**") < text.index("```")
    assert "](../results.md)" in text


def test_the_toy_prompt_is_the_one_that_the_pages_describe():
    layout = toy_layout()
    spans = (layout.prefix, *layout.passages, layout.suffix)
    assert [len(span) for span in spans] == [2, 3, 4, 3, 3]


def test_the_first_screen_shows_answers_of_the_demos_record():
    readme = (docs.generate.ROOT / "README.md").read_text("utf-8")
    assert first_screen() in readme
    figure = draw_first_screen()
    question = ElementTree.fromstring(figure)[0].text
    rows = [row for row in read_record(RESULTS / "demo-24.json").rows if row["question"] == question]
    answers = {(row["mitigation"], row["gold"]): row["answer"] for row in rows if row["gold"] != "last"}
    assert all(answer in figure and answer in first_screen() for answer in answers.values())
    assert answers["none", "first"] != answers["none", "middle"]
    assert len({answer for (method, _), answer in answers.items() if method != "none"}) == 1
    assert (figure.count("✓"), figure.count("✗")) == (3, 1)
    squares = [node.get("fill") != "none" for node in ElementTree.fromstring(figure) if node.tag.endswith("rect")]
    first, middle = squares[:PASSAGES], squares[PASSAGES:]
    assert (first.index(True), middle.index(True)) == (GOLD_POSITIONS["first"], GOLD_POSITIONS["middle"])
    assert (len(middle), squares.count(True)) == (PASSAGES, 2)


def test_the_first_28_lines_of_the_readme_say_what_it_is_for_whom_what_it_costs_and_where_it_fails():
    lines = (docs.generate.ROOT / "README.md").read_text("utf-8").splitlines()
    start = "\n".join(lines[:28])
    for words in (
        "Same documents, same question, same answer", "docs/images/first-screen.svg", "**Use it** if",
        "For a model behind an API only judging, reranking and ordering", "**Cost**",
        "**It does not help**", "HotpotQA .18 (.20 to .33)", "Qwen2.5-Coder-1.5B-Instruct", "make demo",
        "rag-posfix index YOUR_FILES", 'rag-posfix ask "Your question?"',
    ):  # fmt: skip
        assert words in " ".join(start.split()), words
    assert "log-probability" not in start
    assert start.count("```") == 2
    methods = "<!-- methods: generated"
    assert methods in "\n".join(lines[len(lines) // 2 :])


def luminance(colour):
    """Return the relative luminance of a colour, as the Web Content Accessibility Guidelines define it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_inks_and_lines_of_pictures_stand_out_on_light_and_on_dark_pages():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert all(contrast(ink, page) > 7 for ink, page in zip(INK, (LIGHT_PAGE, DARK_PAGE), strict=True))
    frames = {"#d9d9d9"}  # outlines of squares that are not seen
    for drawn, (light, dark) in PAIRS.items():
        if drawn not in frames:
            assert contrast(light, LIGHT_PAGE) > 3, drawn
            assert contrast(dark, DARK_PAGE) > 3, drawn


def test_every_picture_is_transparent_and_follows_the_colour_scheme():
    pictures = {path.name: path.read_text("utf-8") for path in (docs.generate.ROOT / "docs").rglob("*.svg")}
    assert len(pictures) > 40
    for name, picture in pictures.items():
        assert "prefers-color-scheme: dark" in picture, name
        assert "fill: #ffffff" not in picture, name
        assert 'fill="#ffffff"' not in picture, name


def test_a_colour_of_a_picture_is_replaced_on_both_pages():
    picture = themed(
        '<svg xmlns="http://www.w3.org/2000/svg"><path style="stroke: #33658a"/><g fill="#222222"/></svg>'
    )
    light, dark = picture.split("@media")
    assert '[style*="stroke: #33658a"]{stroke:#33658a!important}' in light
    assert '[style*="stroke: #33658a"]{stroke:#6fb1e0!important}' in dark
    assert '[fill="#222222"]{fill:#e6e6e6!important}' in dark


def test_a_chart_and_its_sentence_are_those_of_the_record():
    page = "<!-- chart: positions-xquad-5-default -->\n<!-- end of chart -->"
    filled = fill_charts(page)
    assert (
        "Right answers: SmolLM2-135M-Instruct 17 to 23 % by position, 28 % with rag_posfix at every position."
        in filled
    )
    assert "](images/positions-xquad-5-default.svg)" in filled
    assert fill_charts(filled) == filled


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            "positions-litm-20-default",
            "right more often than the default (17 %): the unmodified model with the gold passage at position 19 "
            "(18 %); sorted plain prompts, `embedding:top_n=3/reverse/none` (23 %).",
        ),
        (
            "positions-xquad-5-default",
            "the default (28 %) is right at least as often as the unmodified model at every position and every sorted "
            "plain prompt.",
        ),
        (
            "positions-gemma-litm-10-default",
            "the default (27 %) is right at least as often as the unmodified model at every position and every sorted "
            "plain prompt.\n",
        ),
    ],
)
def test_below_a_chart_is_where_the_default_is_below_the_model(record, sentence):
    assert sentence in fill_charts(f"<!-- chart: {record} -->\n<!-- end of chart -->")


def test_every_data_set_of_the_results_has_a_chart_and_its_tables_in_the_appendix():
    page, tables = (
        (docs.generate.ROOT / "docs" / name).read_text("utf-8") for name in ("results.md", "results-tables.md")
    )
    charts_of_default = re.findall(r"<!-- chart: (positions-\S+-default) positions-gemma-\S+ -->", page)
    assert len(charts_of_default) == 5
    assert page.count("<!-- chart:") == 7
    assert "<!-- table:" not in page
    for record in charts_of_default:
        assert f"<!-- table: {record} as " in tables, record


def test_a_record_in_which_no_answer_changes_has_no_first_screen(tmp_path):
    record = read_record(RESULTS / "demo-24.json")
    save_record(tmp_path / "demo-24.json", record.head, [{**row, "right": True} for row in record.rows])
    with pytest.raises(EvaluationError, match="no question whose answer changes under none alone"):
        first_screen(tmp_path)


@pytest.mark.slow
def test_a_picture_is_stale_if_its_record_changed(tmp_path):
    changed, *others = ("positions-xquad-5-default", "positions-gemma-xquad-5-default", "permutations-xquad-3")
    for name in (changed, *others):
        (tmp_path / f"{name}.json").write_bytes((RESULTS / f"{name}.json").read_bytes())
    page, images = tmp_path / "results.md", docs.generate.ROOT / "docs" / "images"
    marks = (f"{changed} {others[0]}", others[1])
    page.write_text("".join(f"<!-- chart: {mark} -->\n<!-- end of chart -->\n" for mark in marks), "utf-8")

    def stale_charts():
        return stale({images / name: themed(chart) for name, chart in charts(page, tmp_path)})

    assert stale_charts() == []
    head = read_head(tmp_path / f"{changed}.json")
    head["summary"]["mitigations"]["none"]["positions"]["4"]["accuracy"] += 0.05
    (tmp_path / f"{changed}.json").write_text(json.dumps(head), "utf-8")
    assert stale_charts() == [f"{changed}.svg"]


def test_a_chart_of_two_models_shows_every_value_of_both():
    heads = [read_head(RESULTS / f"positions-{name}-default.json") for name in ("xquad-5", "gemma-xquad-5")]
    panels = draw_accuracy(heads).axes
    assert len(panels) == 2
    for panel in panels:
        low, high = panel.get_ylim()
        values = [value for line in panel.get_lines() for value in line.get_ydata()]
        assert low == 0
        assert max(values) <= high
