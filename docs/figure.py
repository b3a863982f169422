"""Draws accuracy-by-position curves as SVG from records of ``rag-posfix eval positions``.

The same record gives the same text, so that ``make docs`` can tell whether a picture is stale.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.keep_record import RESULTS
from rag_posfix.evaluation.record import read_head

COLORS = {"none": "#b3382c", "context_experts": "#1f6f54", "parallel_windows": "#8a8a8a"}
NAMES = {"none": "unmodified model"}


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """Return the text of each picture by its name in docs/images."""
    return {
        "positions.svg": curve(results / "positions-litm-10.json", "Lost-in-the-Middle questions"),
        "first-screen.svg": curve(
            results / "positions-xquad-5-methods.json", "XQuAD questions", ("none", "context_experts"), (5.2, 3.6)
        ),
    }


def curve(record: Path, data_name: str, methods: Sequence[str] = (), size: tuple[float, float] = (7.2, 3.4)) -> str:
    """Return the log-probability of the answer by the position of the gold passage, as SVG.

    Args:
        record: The head of a record of ``eval positions``.
        data_name: What the questions are called in the title.
        methods: The methods to draw; all of the record if empty.
        size: Width and height in inches.
    """
    data = read_head(record)
    summary = data["summary"]
    matplotlib.rcParams["svg.hashsalt"] = "rag_posfix"  # the same record gives the same file
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for name, found in summary["mitigations"].items():
        if methods and name not in methods:
            continue
        positions = [int(position) + 1 for position in found["positions"]]
        values = [scores["log_probability"] for scores in found["positions"].values()]
        color = COLORS.get(name, "#555577")
        axes.plot(positions, values, marker="o", linewidth=2.2, color=color, label=NAMES.get(name, name))
    if not methods:
        for key, text in (("gold_only", "the right passage alone"), ("closed_book", "no passages")):
            value = summary[key]["log_probability"]
            axes.axhline(value, color="#999999", linestyle=":", linewidth=1)
            axes.text(
                1.02, value, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="#666666"
            )
    documents = data["settings"]["documents"]
    axes.set_xticks(positions)
    axes.set_xlabel(f"position of the right passage among {documents}")
    axes.set_ylabel("log-probability of the answer\nper token")
    axes.set_title(f"{data['model']}, {summary['n']} {data_name}", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
