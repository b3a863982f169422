"""Pictures of the laboratory: bars by split, curves by place or by length, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes, new_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_laboratory(head: Mapping[str, Any]) -> Figure:
    """Return the figure of a record of ``lab run``.

    Tasks that measure by place have curves over the places, with axes for each split; perplexity has a curve over the
    splits; other tasks have bars by split. Bands and whiskers go from the lowest to the highest seed.
    """
    summary = head["summary"]
    if summary["by_place"]:
        return _draw_by_place(summary)
    figure, axes = new_axes((7.2, 3.8))
    found = summary["encodings"]
    if summary["metric"] == "perplexity":
        for number, (label, one) in enumerate(found.items()):
            _band(axes, label, number, list(one["splits"].values()))
        axes.set_xticks(range(len(summary["splits"])), list(summary["splits"].values()))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        _bars(axes, found, summary["splits"])
    axes.set_ylabel("error in %" if summary["metric"] == "error" else "perplexity")
    axes.set_title(_title(summary), fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _draw_by_place(summary: Mapping[str, Any]) -> Figure:
    """Draw the error by place, with axes for each split."""
    splits = summary["splits"]
    figure, row = new_row(len(splits), (9.6, 4.2), share_y=True)
    for axes, (split, text) in zip(row, splits.items(), strict=True):
        for number, (label, one) in enumerate(summary["encodings"].items()):
            _band(axes, label, number, one["splits"][split]["by_place"])
        axes.set_title(f"{split}: {text}", fontsize=10, loc="left")
        axes.set_xlabel("place of the pair that is asked for, from 0")
    row[0].set_ylabel("error in %")
    row[0].set_ylim(bottom=0)
    figure.suptitle(_title(summary), fontsize=10, x=0.02, ha="left")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure


def _title(summary: Mapping[str, Any]) -> str:
    seeds = "one seed" if summary["seeds"] == 1 else f"{summary['seeds']} seeds, lowest to highest"
    return f"{summary['task']}: {seeds}"


def _band(axes: Any, label: str, number: int, spreads: list[Mapping[str, float]]) -> None:
    """Draw means as a line, and the spread over seeds as a band."""
    at, colour = range(len(spreads)), _colour(number)
    axes.plot(at, [one["mean"] for one in spreads], marker="o", markersize=4, color=colour, label=label)
    low, high = ([one[key] for one in spreads] for key in ("low", "high"))
    axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)


def _bars(axes: Any, found: Mapping[str, Any], splits: Mapping[str, str]) -> None:
    """Draw a group of bars for each split, one bar per encoding."""
    width = 0.8 / len(found)
    for number, (label, one) in enumerate(found.items()):
        spreads = [one["splits"][split] for split in splits]
        centres = [place + (number - (len(found) - 1) / 2) * width for place in range(len(splits))]
        means = [spread["mean"] for spread in spreads]
        whiskers = [
            [mean - spread["low"] for mean, spread in zip(means, spreads, strict=True)],
            [spread["high"] - mean for mean, spread in zip(means, spreads, strict=True)],
        ]
        axes.bar(centres, means, width, yerr=whiskers, color=_colour(number), label=label, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(splits)), [f"{name}\n{text}" for name, text in splits.items()], fontsize=8)


def _colour(number: int) -> str:
    return OTHER_COLORS[number % len(OTHER_COLORS)]
