"""A picture of a reranking evaluation: each measure of each run with its interval, and quality against time."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rag_posfix.errors import missing_extra

__all__ = ["check_matplotlib", "draw_runs"]


def check_matplotlib() -> None:
    """Raise ConfigError where matplotlib is not installed, before any work is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra("matplotlib", "eval") from error


def draw_runs(runs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a PNG: bars of every measure with 95 % intervals, and the first measure against seconds per query.

    Args:
        runs: Label -> summary, the first stage first; ``ci95`` names the measures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measures = list(next(iter(runs.values()))["ci95"])
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    bars, costs = figure.subplots(1, 2, width_ratios=[2, 1])
    width = 0.8 / len(runs)
    for index, (label, found) in enumerate(runs.items()):
        places = [position + (index - (len(runs) - 1) / 2) * width for position in range(len(measures))]
        values = [found[name] for name in measures]
        low = [max(0.0, value - found["ci95"][name][0]) for name, value in zip(measures, values, strict=True)]
        high = [max(0.0, found["ci95"][name][1] - value) for name, value in zip(measures, values, strict=True)]
        bars.bar(places, values, width, yerr=[low, high], label=_plain(label), error_kw={"elinewidth": 0.8})
        costs.plot(found["seconds"], values[0], "o", label=_plain(label))
    bars.set_xticks(range(len(measures)), [_plain(name) for name in measures])
    bars.set_ylabel("mean over topics, 95 % interval")
    costs.set_xlabel("seconds per query")
    costs.set_ylabel(_plain(measures[0]))
    costs.margins(0.15)
    if all(found["seconds"] > 0 for found in runs.values()):
        costs.set_xscale("log")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    written = io.BytesIO()
    canvas.print_png(written, metadata={"Software": None})
    return written.getvalue()


def _plain(text: str) -> str:
    """Return text that matplotlib does not read as mathematics, and that shows in a legend."""
    return text.replace("$", r"\$").removeprefix("_")
