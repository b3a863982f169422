"""What pictures of probes share: several axes in a row, and maps of layers by positions or heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rag_posfix.evaluation.figures import new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_map", "new_row"]


def new_row(count: int, size: tuple[float, float]) -> tuple[Figure, tuple[Any, ...]]:
    """Return a figure with axes side by side.

    Args:
        count: How many, 2 or more.
        size: Width and height in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure, only = new_axes(size)
    only.remove()
    axes = tuple(figure.subplots(1, count))
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_map(figure: Figure, axes: Any, values: Sequence[Sequence[float]], **options: Any) -> None:
    """Draw a matrix with its colour bar; rows upwards from the first.

    Args:
        figure: The figure.
        axes: Where in it.
        values: Numbers, row by row.
        options: Of matplotlib's ``imshow``.
    """
    shown = axes.imshow(values, aspect="auto", origin="lower", **options)
    figure.colorbar(shown, ax=axes, shrink=0.85)
