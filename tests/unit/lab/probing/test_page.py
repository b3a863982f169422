"""The page about probes: its example runs, and it names every probe and shows every figure that is kept."""

from __future__ import annotations

import contextlib
import io
import itertools
import re

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from benchmarks.keep_record import RESULTS
from docs.figure import draw_fine_tuning
from rag_posfix.evaluation.record import read_head
from rag_posfix.lab.contextual_maps import draw_maps
from rag_posfix.lab.experiment import draw_laboratory
from rag_posfix.lab.probing import PROBES
from tests.support.pages import DOCS, examples

PAGE = (DOCS / "probes.md").read_text("utf-8")
RESULTS_OF_LAB = (DOCS / "laboratory.md").read_text("utf-8")


def test_the_example_prints_what_the_page_says():
    ((code, expected),) = examples("probes.md")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "probes.md", "exec"), {})
    assert printed.getvalue() == expected


def test_the_table_and_the_sections_name_every_probe():
    assert set(re.findall(r"^\| \[`([\w-]+)`\]", PAGE, re.MULTILINE)) == set(PROBES.names())
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    for name in PROBES.names():
        assert any(name in heading.split() for heading in headings), name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("probe-*.json")), ids=lambda path: path.stem)
def test_a_record_that_is_kept_is_shown_with_its_picture(path):
    assert f"(images/{path.stem}.svg)" in PAGE
    assert f"read from: {path.stem}" in PAGE


RECORDS = [*sorted(RESULTS.glob("probe-*.json")), RESULTS / "lab-maps-few-positions.json"]
NAMED = re.compile(r"\b(channel|layer|head) (\d+)")
PAIRED = re.compile(r"head (\d+) of layer (\d+)")


def named(value, key=""):
    """Yield (kind, number) of every channel, layer and head that a record names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from ((kind, int(number)) for kind, number in NAMED.findall(name))
            if key == "similarity":  # by layer
                yield "layer", int(name)
            yield from named(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from named(inner, key)
    elif isinstance(value, int):
        yield key.removeprefix("spiral_"), value


def heads_of(value):
    """Yield (head, layer) of every head that a record names."""
    if isinstance(value, dict):
        if {"layer", "head"} <= value.keys():
            yield value["head"], value["layer"]
        for name, inner in value.items():
            yield from ((int(head), int(layer)) for layer, head in re.findall(r"^layer (\d+), head (\d+)$", name))
            yield from heads_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from heads_of(inner)


LABORATORY = [RESULTS / f"{name}.json" for name in re.findall(r"images/(lab-[\w-]+)\.svg", RESULTS_OF_LAB)]
OTHERS = {"lab-maps": draw_maps, "lab": draw_laboratory, "fine-tuning": draw_fine_tuning}


def figure_of(path):
    head = read_head(path)
    kind = head.get("kind", "probe-positional-dimensions")
    return head, OTHERS[kind](head) if kind in OTHERS else PROBES.get(kind.removeprefix("probe-"))().draw(head)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_channel_head_or_layer_that_a_picture_names_is_in_its_record(path):
    head, figure = figure_of(path)
    texts = [text.get_text() for text in figure.findobj(Text)]
    alt = re.findall(rf"!\[([^]]*)\]\(images/{path.stem}\.svg\)", PAGE)
    summary = head.get("summary", head)
    gates = summary.get("gates", [[]])  # of a map, by layer and head
    rows = {("layer", n) for n in range(len(gates))} | {("head", n) for n in range(len(gates[0]))}
    known = {*named(summary), *(rows if head.get("kind") == "lab-maps" else ())}
    for kind, number in NAMED.findall("\n".join([*texts, *alt])):
        assert (kind, int(number)) in known, f"{kind} {number} is not in {path.name}"
    if "channel" in head:  # the chosen one is shown, in a panel of its own
        assert any(text.startswith(f"chosen: channel {head['channel']} ") for text in texts)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("probe-*.json")), ids=lambda path: path.stem)
def test_a_channel_or_head_that_the_prose_names_is_in_the_record(path):
    (section,) = [part for part in re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE) if f"{path.stem}.svg" in part]
    summary = (head := read_head(path)).get("summary", head)
    prose = " ".join(section.partition("<!-- read from")[2].split())
    for number in re.findall(r"\bchannel (\d+)", prose):
        assert ("channel", int(number)) in set(named(summary)), f"channel {number} is not in {path.name}"
    for number, layer in PAIRED.findall(prose):
        assert (int(number), int(layer)) in set(heads_of(summary)), f"head {number} of layer {layer}: {path.name}"


DRAWN = dict.fromkeys((*RECORDS, *LABORATORY, RESULTS / "fine-tuning.json"))


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_letters_of_a_picture_are_inside_and_do_not_overlap(path):
    _, figure = figure_of(path)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert figure.get_figwidth() <= 5  # inches: on a phone its letters keep their size
    for axes in figure.axes:
        left = [text for text in axes.get_children() if isinstance(text, Text)]
        titles = [text for text in left if text.get_text() == axes.get_title(loc="left")]
        written = [axes.title, *titles[:1], axes.xaxis.label, axes.yaxis.label]
        ticks = [label for label in axes.get_xticklabels() if label.get_rotation() == 0]
        marks = [label.get_window_extent(canvas.get_renderer()) for label in ticks if label.get_text()]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(marks, 2)), path.stem
        boxes = [text.get_window_extent(canvas.get_renderer()) for text in written if text.get_text()]
        assert all(box.x0 >= -1 and box.x1 <= figure.bbox.width + 1 for box in boxes), [t.get_text() for t in written]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        if axes.get_legend() is not None:
            legend = axes.get_legend().get_window_extent(canvas.get_renderer())
            assert not any(legend.overlaps(box) for box in boxes)
            assert legend.x1 <= figure.bbox.width + 1
