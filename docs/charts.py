"""One chart and one sentence for each data set of docs/results.md, from records of ``eval``.

They are between ``<!-- chart: RECORD... -->`` and ``<!-- end of chart -->``; ``make docs`` writes them. The chart is
called as its first record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.keep_record import RESULTS
from benchmarks.tables import DEFAULT, label, percent
from rag_posfix.evaluation.figures import COLORS, OTHER_COLORS, PANEL, draw_permutations, new_axes, new_panels, svg_of
from rag_posfix.evaluation.record import read_head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKED = re.compile(r"(<!-- chart: ([^>]+?) -->\n)(.*?)(<!-- end of chart -->)", re.DOTALL)
NAMES = {"none": "unmodified model", DEFAULT: "rag_posfix (default)"}
DEFAULT_COLOUR = OTHER_COLORS[1]


def fill_charts(text: str, results: Path = RESULTS) -> str:
    """Return a page with the charts and sentences between its marks."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{_chart(mark[2].split(), results)}\n\n{mark[4]}", text)


def charts(page: Path, results: Path = RESULTS) -> Iterator[tuple[str, str]]:
    """Yield the name in docs/images and the SVG of each chart of a page."""
    for mark in MARKED.finditer(page.read_text("utf-8")):
        names = mark[2].split()
        yield f"{names[0]}.svg", svg_of(_draw([read_head(results / f"{name}.json") for name in names]))


def _chart(names: Sequence[str], results: Path) -> str:
    heads = [read_head(results / f"{name}.json") for name in names]
    sentence = _sentence(heads)
    below = [f"\n\n{_shortfall(head)}" for head in heads if _has_default(head)]
    return f"{sentence}\n\n![{_shown(heads[0])}](images/{names[0]}.svg){''.join(below)}"


def _shown(head: Mapping[str, Any]) -> str:
    """Return what a chart shows; the sentence before it has the numbers."""
    if head["kind"] == "permutations":
        return "Share of answers that change, by method"
    return "Share of right answers by position" if _has_default(head) else "Log-probability by method"


def _draw(heads: Sequence[Mapping[str, Any]]) -> Figure:
    if heads[0]["kind"] == "permutations":
        return draw_permutations(heads[0])
    return draw_accuracy(heads) if _has_default(heads[0]) else _draw_ranges(heads[0])


def _has_default(head: Mapping[str, Any]) -> bool:
    return DEFAULT in head["summary"]["mitigations"]


def draw_accuracy(heads: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the share of correct answers by position, a panel per model, one below the other: phones are narrow."""
    figure, panels = new_panels(len(heads), (PANEL, 0.6 + 2.2 * len(heads)), share_y=True)
    for panel, head in zip(panels, heads, strict=True):
        for name, colour in (("none", COLORS["none"]), (DEFAULT, DEFAULT_COLOUR)):
            cells = head["summary"]["mitigations"][name]["positions"]
            values = [100 * cell["accuracy"] for cell in cells.values()]
            panel.plot(range(len(values)), values, marker="o", linewidth=2.2, color=colour, label=NAMES[name])
            panel.set_xticks(range(len(values)), list(cells))
        gold_only = 100 * head["summary"]["gold_only"]["accuracy"]
        panel.axhline(gold_only, color="#999999", linestyle=":", label="right passage alone")
        panel.set_title(head["model"], fontsize=10, loc="left")
        panel.set_ylabel("right answers, %")
    panels[0].set_ylim(bottom=0)  # after the last panel: it fixes the top of the shared axis
    panels[-1].set_xlabel(f"position of the right passage among {heads[0]['settings']['documents']}, from 0")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _draw_ranges(head: Mapping[str, Any]) -> Figure:
    """Return the lowest and the highest log-probability over the positions, for each method."""
    methods = sorted(head["summary"]["mitigations"].items(), key=lambda entry: entry[1]["worst_log_probability"])
    figure, axes = new_axes((5.6, 1.3 + 0.27 * len(methods)))
    for row, (name, result) in enumerate(methods):
        values = [cell["log_probability"] for cell in result["positions"].values()]
        colour = COLORS.get(name, DEFAULT_COLOUR)
        axes.plot([min(values), max(values)], [row, row], color=colour, linewidth=2.2, marker="o", markersize=4)
    axes.set_yticks(range(len(methods)), [NAMES.get(name, label(name).strip("`")) for name, _ in methods], fontsize=8)
    axes.set_xlabel("log-probability of the accepted answer,\nlowest and highest over the positions")
    axes.set_title(f"{head['model']}, {head['summary']['n']} questions", fontsize=10, loc="left")
    return figure


def _sentence(heads: Sequence[Mapping[str, Any]]) -> str:
    summary = heads[0]["summary"]
    methods = summary["mitigations"]
    if heads[0]["kind"] == "permutations":
        stable = [name for name, result in methods.items() if result["flip_rate"] == 0]
        return (
            f"The unmodified model changes {percent(methods['none']['flip_rate'])} of {summary['n']} answers when "
            f"the order of the passages changes; {len(stable)} of {len(methods) - 1} methods keep every answer."
        )
    if _has_default(heads[0]):
        return f"Right answers: {'; '.join(_right_answers(head) for head in heads)}."
    best = max(
        (name for name in methods if name != "none" and methods[name]["answers_that_change"] == 0),
        key=lambda name: methods[name]["worst_log_probability"],
    )
    unmodified = [cell["log_probability"] for cell in methods["none"]["positions"].values()]
    return (
        f"Of the order-invariant methods, `{best}` has the highest log-probability: "
        f"{methods[best]['worst_log_probability']:.2f}; the unmodified model has {min(unmodified):.2f} to "
        f"{max(unmodified):.2f}, by position."
    )


def _right_answers(head: Mapping[str, Any]) -> str:
    methods = head["summary"]["mitigations"]
    unmodified, default = (
        [cell["accuracy"] for cell in methods[name]["positions"].values()] for name in ("none", DEFAULT)
    )
    return (
        f"{head['model']} {100 * min(unmodified):.0f} to {percent(max(unmodified))} by position, "
        f"{percent(max(default))} with rag_posfix at every position"
    )


def _shortfall(head: Mapping[str, Any]) -> str:
    """Return where the default answers less often right than the unmodified model, or than a sorted plain prompt."""
    methods = {
        name: {place: cell["accuracy"] for place, cell in result["positions"].items()}
        for name, result in head["summary"]["mitigations"].items()
    }
    default = max(methods[DEFAULT].values())
    plain = {name: max(shares.values()) for name, shares in methods.items() if name.endswith("/none")}
    places = [f"{place} ({percent(share)})" for place, share in methods["none"].items() if share > default]
    prompts = [f"`{name}` ({percent(share)})" for name, share in plain.items() if share > default]
    better = [f"the unmodified model with the gold passage at position {', '.join(places)}"] if places else []
    better += [f"sorted plain prompts, {', '.join(prompts)}"] if prompts else []
    subject, share = f"{head['model']}, {head['summary']['n']} questions", percent(default)
    if better:
        return f"{subject}, right more often than the default ({share}): {'; '.join(better)}."
    others = "the unmodified model at every position" + (" and every sorted plain prompt" if plain else "")
    return f"{subject}: the default ({share}) is right at least as often as {others}."
