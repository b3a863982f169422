"""Pictures of answer experiments: log-probability by gold position, and answers that change with the order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {"none": "#b3382c"}
NAMES = {"none": "unmodified model"}


def draw_positions(
    head: Mapping[str, Any],
    *,
    title: str | None = None,
    names: Mapping[str, str] = NAMES,
    size: tuple[float, float] = (7.2, 3.6),
    bounds: bool = True,
) -> Figure:
    """Return the curves of a record of ``eval positions``: log-probability of the answer by gold position.

    Accuracy is drawn where log-probabilities were not measured.

    Args:
        title: Replaces the title, which names model, questions and data.
        names: Shown in the legend in place of a method's label.
        size: Width and height in inches.
        bounds: Draw the gold passage alone and the model without passages too.
    """
    summary = head["summary"]
    methods = summary["mitigations"]
    measure = "accuracy" if "not_measured" in summary else "log_probability"
    figure, axes = new_axes(size)
    labels = list(next(iter(methods.values()))["positions"])
    for number, (name, found) in enumerate(methods.items()):
        values = [scores[measure] for scores in found["positions"].values()]
        axes.plot(
            range(len(values)), values, marker="o", linewidth=2.2, color=_color(name, number),
            label=names.get(name, name),
        )  # fmt: skip
    for key, text in (("gold_only", "gold passage alone"), ("closed_book", "no passages")) if bounds else ():
        value = summary[key][measure]
        axes.axhline(value, color="#999999", linestyle=":", linewidth=1)
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8, "color": "#666666"}
        axes.text(1.02, value, text, **place)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel(f"position of the gold passage among {head['settings']['documents']}, from 0")
    axes.set_ylabel("accuracy" if measure == "accuracy" else "log-probability of the answer\nper token")
    data = head["data"]["name"] or "given questions"
    axes.set_title(title or f"{head['model']}, {summary['n']} questions of {data}", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_permutations(head: Mapping[str, Any]) -> Figure:
    """Return the bars of a record of ``eval permutations``: the share of answers that change with the order."""
    methods = head["summary"]["mitigations"]
    figure, axes = new_axes((7.2, 1.2 + 0.4 * len(methods)))
    for number, (name, found) in enumerate(reversed(methods.items())):
        low, high = found["flip_rate_ci95"]
        rate = found["flip_rate"]
        axes.barh(number, rate, color=_color(name, number), xerr=[[max(rate - low, 0)], [max(high - rate, 0)]])
    axes.set_yticks(range(len(methods)), [NAMES.get(name, name) for name in reversed(methods)])
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of answers that change with the order of the passages, 95 % interval")
    axes.set_title(f"{head['model']}, {head['summary']['n']} questions", fontsize=10, loc="left")
    return figure


def _color(name: str, number: int) -> str:
    return COLORS.get(name, OTHER_COLORS[number % len(OTHER_COLORS)])
