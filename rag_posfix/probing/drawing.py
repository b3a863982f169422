"""What pictures of probes share: maps of layers by positions or heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_map(figure: Figure, axes: Any, values: Sequence[Sequence[float]], **options: Any) -> None:
    """Draw a matrix with its colour bar; rows upwards from the first.

    Args:
        options: Of matplotlib's ``imshow``.
    """
    shown = axes.imshow(values, aspect="auto", origin="lower", **options)
    figure.colorbar(shown, ax=axes, shrink=0.85)
