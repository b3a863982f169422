"""Generated documentation is current, and its pictures show what the plans say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import docs.generate
from benchmarks.keep_record import RESULTS
from docs.figure import pictures
from docs.first_screen import first_screen
from docs.generate import expected
from docs.picture import COLOURS, draw, render, toy_layout, toy_plan
from docs.tables import MARKED, fill_tables
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import read_record, save_record
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.plan.plan import AttentionOverride, HiddenScale, Plan, RowPlan


@pytest.fixture(scope="module")
def generated():
    """Every generated file. Drawing takes most of the time, so it is done once."""
    return expected()


@pytest.fixture
def without_figures(monkeypatch):
    """Leave out the figures of records and the reference, which no record or plan of these tests changes."""
    monkeypatch.setattr(docs.generate, "pictures", lambda results: {})
    monkeypatch.setattr(docs.generate, "reference_pages", lambda path: {})


def stale(files):
    return [path.name for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]


def test_generated_pages_and_tables_are_current(generated):
    assert stale(generated) == [], "run make docs"


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
    assert stale(expected()) == ["choosing-a-method.md", "results.md"]


def test_a_table_that_was_edited_by_hand_is_written_anew():
    page = (docs.generate.ROOT / "docs" / "reranking-results.md").read_text("utf-8")
    assert fill_tables(page) == page
    edited = page.replace("| .681 |", "| .691 |", 1)
    assert edited != page
    assert fill_tables(edited) == page


def test_every_mark_of_a_table_has_its_end():
    for path in (docs.generate.ROOT / "README.md", *(docs.generate.ROOT / "docs").glob("*.md")):
        text = path.read_text("utf-8")
        found = len(MARKED.findall(text))
        assert text.count("<!-- table:") == text.count("<!-- end of table -->") == found, path.name


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


def test_a_page_says_when_the_method_helps_and_hurts(generated):
    text = next(text for path, text in generated.items() if path.name == "context_experts.md")
    helps, hurts = text.index("**Helps:** where one passage answers"), text.index("**Hurts:** where the answer")
    assert text.index("## When it helps, when it hurts") < helps < hurts < text.index("## Source")
    assert "](../results.md)" in text


def test_the_toy_prompt_is_the_one_that_the_pages_describe():
    layout = toy_layout()
    spans = (layout.prefix, *layout.passages, layout.suffix)
    assert [len(span) for span in spans] == [2, 3, 4, 3, 3]


def test_the_first_screen_shows_answers_of_the_demos_record_and_the_curve():
    readme = (docs.generate.ROOT / "README.md").read_text("utf-8")
    shown = first_screen()
    assert shown in readme.split("```bash")[0]
    assert "docs/images/first-screen.svg" in readme.split("```bash")[0]
    question = shown.split("**")[1]
    rows = [row for row in read_record(RESULTS / "demo-24.json").rows if row["question"] == question]
    answers = {(row["mitigation"], row["gold"]): row["answer"] for row in rows if row["gold"] != "last"}
    assert all(answer in shown for answer in answers.values())
    assert answers["none", "first"] != answers["none", "middle"]
    assert len({answer for (method, _), answer in answers.items() if method != "none"}) == 1


def test_a_record_in_which_no_answer_changes_has_no_first_screen(tmp_path):
    record = read_record(RESULTS / "demo-24.json")
    save_record(tmp_path / "demo-24.json", record.head, [{**row, "right": True} for row in record.rows])
    with pytest.raises(EvaluationError, match="no question whose answer changes under none alone"):
        first_screen(tmp_path)


def test_a_picture_is_stale_if_its_record_changed(tmp_path, generated):
    changed_results(tmp_path)
    for path in tmp_path.glob("probe-*.json"):
        path.unlink()  # figures of records that are not changed take most of the time
    head = json.loads((tmp_path / "positions-xquad-5-default.json").read_text("utf-8"))
    head["summary"]["mitigations"]["none"]["positions"]["4"]["log_probability"] += 0.5
    (tmp_path / "positions-xquad-5-default.json").write_text(json.dumps(head), "utf-8")
    before = {path.name: text for path, text in generated.items()}
    changed = pictures(tmp_path)
    assert len(changed) > 3
    assert [name for name, picture in changed.items() if picture != before[name]] == ["first-screen.svg"]
