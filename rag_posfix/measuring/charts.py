"""The charts of a report, drawn by Altair: accuracy by position, and cost against quality."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import missing_extra
from rag_posfix.evaluation.statistics import mean, wilson_interval

if TYPE_CHECKING:
    import altair

MAX_CURVES = 8
_COLOURS = ("#c0483a", "#2e8b68", "#4f86b8", "#d98c1f", "#8a63b8", "#8a8a8a", "#2ca6a4", "#b8578a")
_WIDTH, _HEIGHT = 640, 280
_INK = {f"{part}Color": "currentColor" for part in ("label", "title", "domain", "tick", "grid")}
_CONFIG: dict[str, Any] = {
    "font": "system-ui, sans-serif",
    "autosize": {"type": "fit-x", "contains": "padding"},
    "view": {"stroke": None},
    "axis": {**_INK, "gridOpacity": 0.15, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "legend": {"labelColor": "currentColor", "labelFontSize": 12},
}
"""Colours are those of the text around the chart, so that they follow a page from light to dark."""
_LINES = r"split(replace(datum.label, regexp('(?!.{1,34}$)(.{16,33}[:/ ]|.{34})', 'g'), '$1\n'), '\n')"
"""Label of the legend in lines that a phone is wide enough for, broken after a colon, slash or space."""
_DRAW = """
for (const place of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(place.previousElementSibling.textContent);
  vegaEmbed(place, spec, {actions: false, ast: true, renderer: "svg"});
}"""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its name in names of files, its title, and what Altair draws."""

    name: str
    title: str
    chart: altair.LayerChart

    def spec(self) -> str:
        """Return the chart as JSON for a page, as wide as its place there; no text in it ends a script."""
        spec = self.chart.properties(width="container").to_dict() | {"background": None}
        return json.dumps(spec).replace("<", r"\u003c")

    def svg(self) -> bytes:
        """Return the chart as SVG on white."""
        import vl_convert

        return vl_convert.vegalite_to_svg(self.chart.to_dict(), vl_version=_vega_lite()).encode()

    def png(self) -> bytes:
        """Return the chart as PNG on white, twice as large."""
        import vl_convert

        return vl_convert.vegalite_to_png(self.chart.to_dict(), vl_version=_vega_lite(), scale=2)


@cache
def page_script() -> str:
    """Return the JavaScript of a page with charts: Vega, and the call that draws each specification."""
    import vl_convert

    return vl_convert.javascript_bundle(_DRAW, vl_version=_vega_lite())


def draw_curve(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Chart | None:
    """Return the accuracy by position of the gold passage with Wilson's bands; None without such rows.

    Raises:
        ConfigError: the extra ``report`` is not installed.
    """
    cells: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        position = row.get("gold_position")
        if position is not None and row.get("accuracy") is not None and "changed" not in row:
            label = "+".join(map(str, position)) if isinstance(position, list) else str(position)
            cells.setdefault(str(row["condition"]), {}).setdefault(label, []).append(float(row["accuracy"]))
    lines = dict(list(cells.items())[:MAX_CURVES])
    if not lines or max(map(len, lines.values())) < 2:
        return None
    points = []
    for name, by_position in lines.items():
        for label, values in by_position.items():
            low, high = wilson_interval(round(sum(values)), len(values))
            point = {"condition": name, "position": label, "accuracy": mean(values), "low": low, "high": high}
            points.append(point)
    levels = {
        text: float(summary[name]["accuracy"])
        for text, names in (
            ("gold passage alone", ("ceiling", "gold_only")),
            ("no passages", ("floor", "closed_book")),
        )
        for name in names
        if isinstance(summary.get(name), dict) and summary[name].get("accuracy") is not None
    }
    return _curve(points, [{"level": text, "accuracy": value} for text, value in levels.items()])


def _curve(points: Sequence[Mapping[str, Any]], levels: Sequence[Mapping[str, Any]]) -> Chart:
    alt = _altair()
    names = list(dict.fromkeys(point["condition"] for point in points))
    of_each = [[point["position"] for point in points if point["condition"] == name] for name in names]
    positions = list(dict.fromkeys(label for labels in sorted(of_each, key=len, reverse=True) for label in labels))
    axis = alt.Axis(title="position of the gold passage, from 0", labelAngle=0, labelOverlap=True)
    chosen, legend = _legend("condition", names)
    lines = alt.Chart(alt.Data(values=points)).encode(
        alt.X("position:O", sort=positions, axis=axis), _share("accuracy", "accuracy"), **legend
    )
    tooltip = ["condition:N", "position:O", *_numbers("accuracy", "low", "high")]
    level = alt.Chart(alt.Data(values=levels)).encode(_share("accuracy", "accuracy"))
    chart = alt.layer(
        lines.mark_area(fillOpacity=0.13).encode(_share("low", "accuracy"), alt.Y2("high:Q")),
        lines.mark_line(strokeWidth=2.5),
        lines.mark_circle(size=70).encode(tooltip=tooltip).properties(name="points").add_params(chosen),
        level.mark_rule(strokeDash=[3, 3], color="currentColor", opacity=0.7),
        level.mark_text(align="right", dy=-7, color="currentColor").encode(alt.XValue("width"), text="level:N"),
    )
    return _finished("curve", "accuracy by position of the gold passage, 95 % bands", chart)


def draw_cost(summary: Mapping[str, Any]) -> Chart | None:
    """Return quality against time to the first token; None without both.

    Raises:
        ConfigError: the extra ``report`` is not installed.
    """
    measured = summary.get("measured")
    if not isinstance(measured, dict) or len(measured) < 2:
        return None
    alt = _altair()
    what = "accuracy at the worst position" if summary.get("labels") else "share of questions with stable answers"
    points = [
        {"label": f"{name}: {values['worst']:.2f} at {values['ttft_ratio']:.1f}", "arrangement": name}
        | {"quality": float(values["worst"]), "time": float(values["ttft_ratio"])}
        for name, values in measured.items()
    ]
    chosen, legend = _legend("label", [point["label"] for point in points])
    times = alt.Scale(domain=[0, 1.1 * max(point["time"] for point in points)], nice=False)
    axis = alt.Axis(title="time to the first token, unmodified model = 1", tickCount=6)
    marks = alt.Chart(alt.Data(values=points), name="points").mark_circle(size=140).add_params(chosen)
    x, tooltip = alt.X("time:Q", scale=times, axis=axis), ["arrangement:N", *_numbers("quality", "time")]
    chart = alt.layer(marks.encode(x, _share("quality", what), tooltip=tooltip, **legend))
    return _finished("cost", f"{what} against cost", chart)


def _altair() -> ModuleType:
    """Return Altair, if what draws its charts is installed too."""
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise missing_extra(str(error.name), "report") from error
    return altair


def _vega_lite() -> str:
    """Return the version of Vega-Lite that Altair writes, as vl_convert takes it."""
    version: str = _altair().SCHEMA_VERSION
    return ".".join(version.removeprefix("v").split(".")[:2])


def _numbers(*fields: str) -> list[altair.Tooltip]:
    return [_altair().Tooltip(f"{field}:Q", format=".2f") for field in fields]


def _share(field: str, title: str) -> altair.Y:
    """Return a vertical axis from 0 to 1."""
    alt = _altair()
    axis = alt.Axis(title=title, values=[tenth / 10 for tenth in range(0, 11, 2)], format=".1f")
    share: altair.Y = alt.Y(f"{field}:Q", scale=alt.Scale(domain=[0, 1], clamp=True), axis=axis)
    return share


def _legend(field: str, names: Sequence[str]) -> tuple[altair.Parameter, dict[str, Any]]:
    """Return the choice that a click on the legend makes, and the encodings of colour and opacity that follow it."""
    alt = _altair()
    chosen = alt.selection_point(name="chosen", fields=[field], bind="legend")
    scale = alt.Scale(domain=names, range=[_COLOURS[number % len(_COLOURS)] for number in range(len(names))])
    legend = alt.Legend(
        title=None, orient="bottom", columns=1, symbolType="circle", labelLimit=0, labelExpr=_LINES, symbolOpacity=1
    )
    opacity = alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.15))
    return chosen, {"color": alt.Color(f"{field}:N", scale=scale, legend=legend), "opacity": opacity}


def _finished(name: str, title: str, chart: altair.LayerChart) -> Chart:
    return Chart(name, title, chart.properties(width=_WIDTH, height=_HEIGHT, description=title).configure(**_CONFIG))
