"""Draws docs/images/positions.svg from a result record of ``rag-posfix eval positions``.

python -m docs.figure benchmarks/results/positions-litm-10.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from rag_posfix.evaluation.record import read_head

OUT = Path(__file__).parent / "images" / "positions.svg"
COLORS = {"none": "#b3382c", "context_experts": "#1f6f54", "parallel_windows": "#8a8a8a"}
NAMES = {"none": "unmodified model"}


def draw(record: Path) -> None:
    data = read_head(record)
    summary = data["summary"]
    matplotlib.rcParams["svg.hashsalt"] = "rag_posfix"  # the same record gives the same file
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, found in summary["mitigations"].items():
        positions = [int(position) + 1 for position in found["positions"]]
        values = [scores["log_probability"] for scores in found["positions"].values()]
        color = COLORS.get(name, "#555577")
        axes.plot(positions, values, marker="o", linewidth=2.2, color=color, label=NAMES.get(name, name))
    for key, text in (("gold_only", "the right passage alone"), ("closed_book", "no passages")):
        value = summary[key]["log_probability"]
        axes.axhline(value, color="#999999", linestyle=":", linewidth=1)
        axes.text(1.02, value, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="#666666")
    documents = data["settings"]["documents"]
    axes.set_xticks(positions)
    axes.set_xlabel(f"position of the right passage among {documents}")
    axes.set_ylabel("log-probability of the answer\nper token")
    axes.set_title(f"{data['model']}, {summary['n']} Lost-in-the-Middle questions", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
