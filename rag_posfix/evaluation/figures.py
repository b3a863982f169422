"""Figures of experiments: axes in one style, and their files beside the record."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import ConfigError, EvaluationError, missing_extra
from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.evaluation.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OTHER_COLORS = ("#1f6f54", "#33658a", "#f2a541", "#6a4c93", "#8a8a8a", "#2ca6a4", "#a23b72", "#5b4b2a")
FORMATS = ("svg", "png")
_LONG_NUMBER = re.compile(r"(?<![\d.#])[1-9]\d*\.\d{4,}")
"""Coordinates, whose last digits depend on the processor; scales of glyphs are below 1."""

_log = logging.getLogger(__name__)


def with_picture(record: ExperimentRecord, draw: Callable[[Mapping[str, Any]], Figure]) -> ExperimentRecord:
    """Return the record with a picture beside its files, as SVG and PNG; as it is if it has no files.

    Without matplotlib (extra ``eval``) there is no picture, and a warning says how to get one.

    Raises:
        EvaluationError: a file cannot be written.
    """
    beside = record.files.get("record", record.files.get("profile"))
    if beside is None:
        return record
    try:
        figure = draw(record.head)
    except ConfigError as error:
        _log.warning("no picture was drawn: %s", error)
        return record
    return replace(record, files={**record.files, **save_figure(figure, beside)})


def save_figure(figure: Figure, record: Path) -> dict[str, Path]:
    """Write a figure as SVG and PNG beside a record, and return the paths by format.

    Raises:
        EvaluationError: a file cannot be written.
    """
    paths = {kind: record.with_suffix(f".{kind}") for kind in FORMATS}
    for kind, path in paths.items():
        try:
            write_whole(path, [_drawn(figure, kind)])
        except OSError as error:
            raise EvaluationError(
                f"cannot write a picture to {path.parent}: {error.strerror}; choose another --out"
            ) from error
    return paths


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG; equal figures give equal text, on any processor."""
    return _drawn(figure, "svg").decode()


def _drawn(figure: Figure, kind: str) -> bytes:
    from matplotlib import rc_context

    drawn = io.BytesIO()
    with rc_context({"svg.hashsalt": "rag_posfix"}):  # equal figures give equal bytes
        figure.savefig(drawn, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    if kind != "svg":
        return drawn.getvalue()
    return _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.3f}", drawn.getvalue().decode()).encode()


def new_axes(size: tuple[float, float]) -> tuple[Figure, Any]:
    """Return a figure with one pair of axes.

    Args:
        size: Width and height in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "eval") from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def new_row(count: int, size: tuple[float, float], *, share_y: bool = False) -> tuple[Figure, tuple[Any, ...]]:
    """Return a figure with axes side by side.

    Args:
        size: Width and height in inches.
        share_y: Whether all have one scale of y.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, only = new_axes(size)
    only.remove()
    axes = tuple(figure.subplots(1, count, sharey=share_y, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes
