"""Figures of experiments: axes in one style, files next to the record, and the figures of answer experiments."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.evaluation.record import ExperimentRecord, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OTHER_COLORS = ("#1f6f54", "#33658a", "#f2a541", "#6a4c93", "#8a8a8a", "#a23b72", "#2ca6a4", "#5b4b2a")
COLORS = {"none": "#b3382c"}
NAMES = {"none": "unmodified model"}
_LONG_NUMBER = re.compile(r"(?<![\d.#])[1-9]\d*\.\d{4,}")
"""Coordinates: their last digits depend on the processor. Scales of glyphs are below 1."""

_log = logging.getLogger(__name__)


def with_figure(
    record: ExperimentRecord, draw: Callable[[Mapping[str, Any]], Figure], caption: str = ""
) -> ExperimentRecord:
    """Return the record with a figure next to its files, as SVG and PNG; as it is if it has no files.

    Without matplotlib (extra ``eval``) there is no figure, and a warning says how to get one.

    Args:
        caption: Drawn under the figure.
    """
    written = record.files.get("record", record.files.get("profile"))
    if written is None:
        return record
    try:
        figure = captioned(draw(record.head), caption)
    except ConfigError as error:
        _log.warning("no figure was drawn: %s", error)
        return record
    return replace(record, files={**record.files, **save_figure(figure, written)})


def captioned(figure: Figure, caption: str) -> Figure:
    """Return a figure with a sentence under it; an empty one leaves it as it is."""
    if caption:
        figure.supxlabel(
            fill(caption, int(16 * figure.get_figwidth())), fontsize=8, x=0.02, ha="left", color="#666666"
        )
    return figure


def save_figure(figure: Figure, record: Path) -> dict[str, Path]:
    """Write a figure as SVG and PNG next to a record, and return the paths by format."""
    paths = {kind: record.with_suffix(f".{kind}") for kind in ("svg", "png")}
    for kind, path in paths.items():
        write_whole(path, [_render(figure, kind)])
    return paths


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG; equal figures give equal text, on any processor."""
    return _render(figure, "svg").decode()


def png_of(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    return _render(figure, "png")


def _render(figure: Figure, kind: str) -> bytes:
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "rag_posfix"}):  # equal figures give equal bytes
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    if kind != "svg":
        return content.getvalue()
    return _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.3f}", content.getvalue().decode()).encode()


def new_axes(size: tuple[float, float]) -> tuple[Figure, Any]:
    """Return a figure of a size in inches with one pair of axes."""
    figure, (axes,) = new_panels(1, size)
    return figure, axes


def new_panels(count: int, size: tuple[float, float], *, share_y: bool = False) -> tuple[Figure, tuple[Any, ...]]:
    """Return a figure of a size in inches with axes above each other; ``share_y``: with one scale of y."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "eval") from error
    figure = Figure(figsize=size, layout="constrained")
    panels = tuple(figure.subplots(count, 1, sharey=share_y, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


PANEL = 4.8
"""Width of a panel in inches: at this width on a page its letters have the size of those around it, also on phones."""


def new_column(count: int, height: float = 2.9) -> tuple[Figure, tuple[Any, ...]]:
    """Return a figure with axes above each other, each ``PANEL`` wide and of a height in inches."""
    return new_panels(count, (PANEL, height * count))


def finish_axes(
    axes: Any, title: str, x: str, y: str, *, legend: bool = True, columns: int = 1, below: float = 36
) -> None:
    """Write the title, the labels of both axes and, with ``legend``, the legend ``below`` points under the axes."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        from matplotlib.transforms import ScaledTranslation

        under = axes.transAxes + ScaledTranslation(-0.4, -below / 72, axes.figure.dpi_scale_trans)
        style = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": under, "borderaxespad": 0}
        axes.legend(frameon=False, fontsize=9, ncols=columns, columnspacing=1.2, **style)


def draw_positions(
    head: Mapping[str, Any],
    *,
    title: str | None = None,
    names: Mapping[str, str] = NAMES,
    size: tuple[float, float] = (7.2, 3.6),
) -> Figure:
    """Return the curves of a record of ``eval positions``: log-probability of the answer by gold position.

    Accuracy is drawn where log-probabilities were not measured.

    Args:
        title: Replaces the title, which names model, questions and data.
        names: Shown in the legend in place of a method's label.
    """
    summary = head["summary"]
    methods = summary["mitigations"]
    measure = "accuracy" if "not_measured" in summary else "log_probability"
    figure, axes = new_axes(size)
    labels = list(next(iter(methods.values()))["positions"])
    for number, (name, scores) in enumerate(methods.items()):
        values = [at_position[measure] for at_position in scores["positions"].values()]
        axes.plot(
            range(len(values)), values, marker="o", linewidth=2.2, color=_color(name, number),
            label=names.get(name, name),
        )  # fmt: skip
    for key, text in (("gold_only", "gold passage alone"), ("closed_book", "no passages")):
        value = summary[key][measure]
        axes.axhline(value, color="#999999", linestyle=":", linewidth=1)
        style = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8, "color": "#666666"}
        axes.text(1.02, value, text, **style)
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
    for number, (name, scores) in enumerate(reversed(methods.items())):
        low, high = scores["flip_rate_ci95"]
        rate = scores["flip_rate"]
        axes.barh(number, rate, color=_color(name, number), xerr=[[max(rate - low, 0)], [max(high - rate, 0)]])
    axes.set_yticks(range(len(methods)), [NAMES.get(name, name) for name in reversed(methods)])
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of answers that change with the order of the passages, 95 % interval")
    axes.set_title(f"{head['model']}, {head['summary']['n']} questions", fontsize=10, loc="left")
    return figure


def _color(name: str, number: int) -> str:
    return COLORS.get(name, OTHER_COLORS[number % len(OTHER_COLORS)])
