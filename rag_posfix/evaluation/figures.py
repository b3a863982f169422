"""Figures of experiments: axes in one style, lines, bars and maps, and the figures of records, next to their files."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeVar

from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.evaluation.record import ExperimentRecord, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OTHER_COLORS = ("#1f6f54", "#33658a", "#f2a541", "#6a4c93", "#8a8a8a", "#a23b72", "#2ca6a4", "#5b4b2a")
COLORS = {"none": "#b3382c"}
NAMES = {"none": "unmodified model"}
CAPTIONS = {
    "positions": "The log-probability or the accuracy of the answers by position of the gold passage, by method; "
    "do not conclude from lines alone that methods differ, since they have no intervals.",
    "permutations": "The share of answers that change with the order of the passages, with 95 % intervals; do not "
    "conclude that a method whose answers never change answers right.",
    "rerank": "The measures of each run with 95 % intervals, and the first measure by time; do not conclude from "
    "intervals that overlap that runs are equal, since the tests compare them topic by topic.",
}
"""Of the figure of a record, by its kind: what one sees; do not conclude what."""
_LONG_NUMBER = re.compile(r"(?<![\d.#])[1-9]\d*\.\d{4,}")
"""Coordinates: their last digits depend on the processor. Scales of glyphs are below 1."""

_log = logging.getLogger(__name__)

Record = TypeVar("Record", bound=ExperimentRecord)


def with_figure(record: Record, draw: Callable[[Mapping[str, Any]], Figure], caption: str = "") -> Record:
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


def check_matplotlib() -> None:
    """Raise ConfigError where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise missing_extra("matplotlib", "eval") from error


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
    check_matplotlib()
    from matplotlib.figure import Figure

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


def draw_map(figure: Figure, axes: Any, values: Sequence[Sequence[float]], **options: Any) -> None:
    """Draw a matrix with its colour bar; rows upwards from the first.

    Args:
        options: Of matplotlib's ``imshow``.
    """
    image = axes.imshow(values, aspect="auto", origin="lower", **options)
    figure.colorbar(image, ax=axes, shrink=0.85)


def whiskers(measured: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """Return the distances of estimates to the ends of their intervals, as matplotlib's ``yerr`` takes them."""
    entries = list(measured)
    return [[abs(entry["value"] - entry["ci95"][end]) for entry in entries] for end in (0, 1)]


def draw_estimates(axes: Any, at: Any, measured: Any, *, across: bool = False, **style: Any) -> None:
    """Draw estimates with their intervals at places of x, or ``across`` at places of y."""
    entries = list(measured)
    values, style = [entry["value"] for entry in entries], {"fmt": "o", "markersize": 4, "capsize": 2, **style}
    places = list(at)
    x, y, error = (values, places, "xerr") if across else (places, values, "yerr")
    axes.errorbar(x, y, **{error: whiskers(entries)}, **style)


def draw_numbers(numbers: Mapping[str, Mapping[str, Any]], title: str, x: str, scale: str = "linear") -> Figure:
    """Return the figure of estimates with their intervals, one below the other; on a log scale none is below 1e-8."""
    return draw_by_model({"": numbers}, title, x, scale)


def draw_by_model(
    by_model: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str, x: str, scale: str = "linear"
) -> Figure:
    """Return the figure of the same estimates of several models: see ``draw_numbers``."""
    least = 1e-8 if scale == "log" else float("-inf")
    names = list(next(iter(by_model.values())))
    figure, (axes,) = new_column(1, 1.3 + (0.3 + 0.12 * len(by_model)) * len(names))
    for number, (model, numbers) in enumerate(by_model.items()):
        at = [index + 0.3 * (number - (len(by_model) - 1) / 2) for index in range(len(names))]
        entries = [
            {"value": max(entry["value"], least), "ci95": [max(end, least) for end in entry["ci95"]]}
            for entry in numbers.values()
        ]
        draw_estimates(axes, at, entries, across=True, color=OTHER_COLORS[1 + number % 7], label=model)
    axes.set_yticks(range(len(names)), [fill(name, 26) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale(scale)
    if scale == "linear":
        axes.locator_params(axis="x", nbins=4)
    finish_axes(axes, title, x, "", legend=len(by_model) > 1, columns=2)
    return figure


def draw_curves(panels: Mapping[str, tuple[Mapping[str, Sequence[float]], str, str]]) -> Figure:
    """Return a panel per title: its curves by label, over 0, 1 and so on, and the labels of x and y."""
    figure, every = new_column(len(panels))
    for axes, (title, (curves, x, y)) in zip(every, panels.items(), strict=True):
        for number, (label, values) in enumerate(curves.items()):
            axes.plot(values, label=label, linewidth=1.1, color=OTHER_COLORS[number % len(OTHER_COLORS)])
        finish_axes(axes, title, x, y, legend=len(curves) > 1, columns=2)
    return figure


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
        error = whiskers([{"value": scores["flip_rate"], "ci95": scores["flip_rate_ci95"]}])
        axes.barh(number, scores["flip_rate"], color=_color(name, number), xerr=error)
    axes.set_yticks(range(len(methods)), [NAMES.get(name, name) for name in reversed(methods)])
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of answers that change with the order of the passages, 95 % interval")
    axes.set_title(f"{head['model']}, {head['summary']['n']} questions", fontsize=10, loc="left")
    return figure


def draw_runs(head: Mapping[str, Any]) -> Figure:
    """Return the bars of a record of ``eval rerank``, and below them the first measure against time.

    Bars have 95 % intervals; ``ci95`` names the measures.
    """
    summary = head["summary"]
    runs = {"first_stage": summary["first_stage"], **summary["runs"]}
    measures = list(summary["first_stage"]["ci95"])
    figure, (bars, costs) = new_panels(2, (7.2, 7.2))
    width = 0.8 / len(runs)
    for index, (label, run) in enumerate(runs.items()):
        centres = [measure + (index - (len(runs) - 1) / 2) * width for measure in range(len(measures))]
        values = [run[name] for name in measures]
        error = whiskers({"value": run[name], "ci95": run["ci95"][name]} for name in measures)
        style = {"color": OTHER_COLORS[index % len(OTHER_COLORS)], "label": _plain(label)}
        bars.bar(centres, values, width, yerr=error, error_kw={"elinewidth": 0.8}, **style)
        costs.plot(run["seconds"], values[0], "o", **style)
    bars.set_xticks(range(len(measures)), [_plain(name) for name in measures])
    bars.set_ylabel("mean over topics, 95 % interval")
    costs.set_xlabel("seconds per query")
    costs.set_ylabel(_plain(measures[0]))
    costs.margins(0.15)
    if all(run["seconds"] > 0 for run in runs.values()):
        costs.set_xscale("log")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    return figure


def _plain(text: str) -> str:
    """Return the first 40 characters, so that matplotlib reads no mathematics and shows them in a legend."""
    shown = text if len(text) <= 40 else f"{text[:39]}…"
    return shown.replace("$", r"\$").removeprefix("_")


def _color(name: str, number: int) -> str:
    return COLORS.get(name, OTHER_COLORS[number % len(OTHER_COLORS)])
