"""The charts of a report, drawn as SVG: accuracy by position, and cost against quality.

A chart takes some kB in a page. A charting library would put its script into every page, 0.9 MB or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rag_posfix.errors import missing_extra
from rag_posfix.evaluation.statistics import mean, wilson_interval

MAX_CURVES = 8
_COLOURS = ("#c0483a", "#2e8b68", "#4f86b8", "#d98c1f", "#8a63b8", "#8a8a8a", "#2ca6a4", "#b8578a")
STYLE = (
    "svg { font: 12px system-ui, sans-serif; fill: #1c2430; } .grid { stroke: #d8dde3; } "
    ".level { stroke: #5a6472; stroke-dasharray: 3 3; } .line { fill: none; stroke: currentColor; stroke-width: 2.5 } "
    ".band { fill: currentColor; opacity: .13; } circle { fill: currentColor; } "
    + " ".join(f".c{number} {{ color: {colour}; }}" for number, colour in enumerate(_COLOURS))
)
"""Style sheet of the charts on white."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 280, 46, 14, 12, 42
_LINE = 18

Point = tuple[str, float, float, float]
"""Label of a position, value, and both ends of its interval."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: ``parts`` are SVG elements, ``legend`` names the colours in their order."""

    name: str
    title: str
    parts: Sequence[str]
    legend: Sequence[str]

    def html(self) -> str:
        """Return the chart for a page that has ``STYLE``; its legend is text of the page, readable on phones."""
        keys = [
            f'<li><span class="key c{number % MAX_CURVES}"></span>{escape(name)}</li>'
            for number, name in enumerate(self.legend)
        ]
        return f'{self._svg(_HEIGHT)}<ul class="legend">{"".join(keys)}</ul>'

    def svg(self) -> str:
        """Return the chart as a file of its own, with its legend below."""
        keys = [
            f'<circle class="c{number % MAX_CURVES}" cx="{_LEFT + 6}" cy="{_HEIGHT + _LINE * number + 8}" r="5"/>'
            f'<text x="{_LEFT + 18}" y="{_HEIGHT + _LINE * number + 12}">{escape(name)}</text>'
            for number, name in enumerate(self.legend)
        ]
        height = _HEIGHT + _LINE * len(keys)
        size = f' xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
        return self._svg(height, size, f"<style>{STYLE}</style>", *keys)

    def _svg(self, height: int, attributes: str = "", *more: str) -> str:
        title = escape(self.title)
        return (
            f'<svg{attributes} viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}"><title>{title}</title>'
            f"{''.join((*more, *self.parts))}</svg>"
        )


def png_of(svg: str) -> bytes:
    """Return an SVG as PNG on white, twice as large, with the font that matplotlib has.

    Raises:
        ConfigError: resvg_py or matplotlib (extra ``eval``) is not installed.
    """
    try:
        from matplotlib import get_data_path
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise missing_extra(str(error.name), "eval") from error
    font = Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
    return svg_to_bytes(
        svg_string=svg, background="white", zoom=2, skip_system_fonts=True, font_files=[str(font)],
        sans_serif_family="DejaVu Sans", font_family="DejaVu Sans",
    )  # fmt: skip


def draw_curve(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Chart | None:
    """Return the accuracy by position of the gold passage with Wilson's bands; None without such rows."""
    cells: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        position = row.get("gold_position")
        if position is not None and row.get("accuracy") is not None and "changed" not in row:
            label = "+".join(map(str, position)) if isinstance(position, list) else str(position)
            cells.setdefault(str(row["condition"]), {}).setdefault(label, []).append(float(row["accuracy"]))
    lines = {
        name: [
            (label, mean(values), *wilson_interval(round(sum(values)), len(values))) for label, values in by.items()
        ]
        for name, by in list(cells.items())[:MAX_CURVES]
    }
    if not lines or max(map(len, lines.values())) < 2:
        return None
    levels = {
        text: float(summary[name]["accuracy"])
        for text, names in (
            ("gold passage alone", ("ceiling", "gold_only")),
            ("no passages", ("floor", "closed_book")),
        )
        for name in names
        if isinstance(summary.get(name), dict) and summary[name].get("accuracy") is not None
    }
    return _line_chart(lines, levels)


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float) -> float:
    return _HEIGHT - _BOTTOM - value * (_HEIGHT - _TOP - _BOTTOM)


def _axes(label: str, ticks: Mapping[str, float]) -> list[str]:
    """Return the grid of values from 0 to 1, and label and ticks of the x axis."""
    parts = [f'<text x="{_x(0.5):.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>']
    parts += [
        f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(tick)}</text>'
        for tick, x in ticks.items()
    ]
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    return parts


def _line_chart(lines: Mapping[str, Sequence[Point]], levels: Mapping[str, float]) -> Chart:
    labels = [label for label, *_ in max(lines.values(), key=len)]
    places = {label: _x((index + 0.5) / len(labels)) for index, label in enumerate(labels)}
    parts = _axes("position of the gold passage, from 0", places)
    for text, value in levels.items():
        y = _y(value)
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for number, (name, points) in enumerate(lines.items()):
        top = [f"{places[label]:.1f},{_y(high):.1f}" for label, _, _, high in points]
        bottom = [f"{places[label]:.1f},{_y(low):.1f}" for label, _, low, _ in reversed(points)]
        middle = " ".join(f"{places[label]:.1f},{_y(value):.1f}" for label, value, *_ in points)
        parts.append(f'<polygon class="band c{number}" points="{" ".join(top + bottom)}"/>')
        parts.append(f'<polyline class="line c{number}" points="{middle}"/>')
        parts += [
            f'<circle class="c{number}" cx="{places[label]:.1f}" cy="{_y(value):.1f}" r="4"><title>{escape(name)}, '
            f"position {escape(label)}: {value:.2f} ({low:.2f} to {high:.2f})</title></circle>"
            for label, value, low, high in points
        ]
    return Chart("curve", "accuracy by position of the gold passage, 95 % bands", parts, list(lines))


def draw_cost(summary: Mapping[str, Any]) -> Chart | None:
    """Return quality against time to the first token; None without both."""
    measured = summary.get("measured")
    if not isinstance(measured, dict) or len(measured) < 2:
        return None
    costs = {name: float(values["ttft_ratio"]) for name, values in measured.items()}
    highest = 1.1 * max(costs.values())
    step = next((step for step in (0.2, 0.5, 1, 2, 5, 10) if highest / step <= 6), highest / 4)
    ticks = {f"{tick * step:g}": _x(tick * step / highest) for tick in range(int(highest / step) + 1)}
    parts = _axes("time to the first token, unmodified model = 1", ticks)
    legend = []
    for number, (name, values) in enumerate(measured.items()):
        label = f"{name}: {values['worst']:.2f} at {costs[name]:.1f}"
        parts.append(
            f'<circle class="c{number % MAX_CURVES}" cx="{_x(costs[name] / highest):.1f}" '
            f'cy="{_y(min(max(values["worst"], 0), 1)):.1f}" r="6"><title>{escape(label)}</title></circle>'
        )
        legend.append(label)
    what = "accuracy at the worst position" if summary.get("labels") else "share of questions with stable answers"
    return Chart("cost", f"{what} against cost", parts, legend)
