"""The report: one HTML file of one record or more that loads nothing from outside, its charts and table beside it.

The charts of a report, drawn by Altair: accuracy by position, and cost against quality.
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.evaluation.pages import html_page
from rag_posfix.evaluation.record import ExperimentRecord, write_whole
from rag_posfix.evaluation.statistics import mean, wilson_interval
from rag_posfix.measuring.comparison import compare_records
from rag_posfix.registry import Registry

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
    """A chart: its name in names of files, its title, what one sees and must not conclude, and what Altair draws."""

    name: str
    title: str
    caption: str
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
        level.mark_text(align="right", dy=-10, color="currentColor").encode(alt.XValue("width"), text="level:N"),
    )
    caption = (
        "Accuracy by position of the gold passage with 95 % bands; do not conclude from bands that overlap that lines "
        "are equal, since they answer the same questions."
    )
    return _finished("curve", "accuracy by position of the gold passage, 95 % bands", caption, chart)


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
        {"label": f"{name}: {values['worst']:.2f} at {values['ttft_ratio']:.1f}", "variant": name}
        | {"quality": float(values["worst"]), "time": float(values["ttft_ratio"])}
        for name, values in measured.items()
    ]
    chosen, legend = _legend("label", [point["label"] for point in points])
    times = alt.Scale(domain=[0, 1.1 * max(point["time"] for point in points)], nice=False)
    axis = alt.Axis(title="time to the first token, unmodified model = 1", tickCount=6)
    marks = alt.Chart(alt.Data(values=points), name="points").mark_circle(size=140).add_params(chosen)
    x, tooltip = alt.X("time:Q", scale=times, axis=axis), ["variant:N", *_numbers("quality", "time")]
    chart = alt.layer(marks.encode(x, _share("quality", what), tooltip=tooltip, **legend))
    caption = (
        f"Each pipeline variant by its {what} and its time to the first token; do not conclude that one is better "
        "than another on other questions, since the chart has no intervals."
    )
    return _finished("cost", f"{what} against cost", caption, chart)


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


def _finished(name: str, title: str, caption: str, chart: altair.LayerChart) -> Chart:
    sized = chart.properties(width=_WIDTH, height=_HEIGHT, description=title)
    return Chart(name, title, caption, sized.configure(**_CONFIG))


MAX_QUESTIONS = 200
"""Questions whose answers a report shows, those that change first."""
MAX_CHARACTERS = 1200
"""Characters of an answer in a report."""
_FACTS = ("model", "model_fingerprint", "dtype", "device", "template", "git", "at", "python", "machine")
_TITLES = {
    True: {"worst": "worst position", "mean": "mean", "best": "best position", "flip_rate": "answers that change"},
    False: {"worst": "stable answers", "agreement": "agreement with none"},
}
"""Columns of a measurement's page, with labels and without; CSV and LaTeX have every number by its name."""
_MORE_TITLES = {
    "well_formed": "well-formed answers",
    "overconfidence": "confidence minus accuracy",
    "recall_at_1": "gold passage ranked first",
    "ttft_ratio": "first token, times none",
}
_MEASURED = ("measured", "mitigations", "runs", "methods", "rerankers")
"""Where the summaries of measure, of eval and of bench have the numbers of each arrangement."""
_TEMPLATE = Path(__file__).parent / "report.html.jinja"
_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {character: f"\\{character}" for character in "&%$#_{}"}
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The charts of each record with the script that draws them in a page, or why there are none."""

    charts: Sequence[Sequence[Chart]]
    script: str = ""
    missing: str = ""


def write_report(records: Sequence[ExperimentRecord], page: Path) -> dict[str, Path]:
    """Write a report and, beside it, its table as CSV and LaTeX and each chart as SVG and PNG; return the files.

    Without Altair (extra ``report``) there are no charts; the page and a warning say how to get them.

    Args:
        page: The HTML file; the other files begin with its name.

    Raises:
        EvaluationError: a file cannot be written.
    """
    drawn = _drawn(records)
    if drawn.missing:
        _log.warning("%s", drawn.missing)
    files: dict[str, tuple[Path, bytes]] = {
        "report": (page, _page(records, drawn).encode()),
        "csv": (page.with_suffix(".csv"), report_csv(records).encode()),
        "tex": (page.with_suffix(".tex"), report_latex(records).encode()),
    }
    for number, charts in enumerate(drawn.charts, 1):
        for chart in charts:
            name = chart.name if len(records) == 1 else f"{number}-{chart.name}"
            for ending, draw in (("svg", chart.svg), ("png", chart.png)):
                try:
                    files[f"{name}.{ending}"] = (page.with_name(f"{page.stem}-{name}.{ending}"), draw())
                except (ValueError, RuntimeError) as error:  # what vl_convert raises
                    _log.warning("%s.%s was not written: %s", name, ending, _first_line(error))
    for path, content in files.values():
        write_whole(path, [content])
    return {name: path for name, (path, _) in files.items()}


def report_page(records: Sequence[ExperimentRecord]) -> str:
    """Return the HTML of a report; sections of records other than of measure have their summary as text too."""
    return _page(records, _drawn(records))


def _page(records: Sequence[ExperimentRecord], drawn: _Drawn) -> str:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise missing_extra("jinja2", "local") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    views = [_view(record, charts) for record, charts in zip(records, drawn.charts, strict=True)]
    body = template.render(
        records=views,
        percent=lambda share: f"{share:.0%}",
        missing=drawn.missing,
        compared=compare_records(records),
    )
    return html_page(views[0]["title"], [body], drawn.script)


def report_csv(records: Sequence[ExperimentRecord]) -> str:
    """Return the numbers of the arrangements of each record as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_joined_table(records))
    return text.getvalue()


def report_latex(records: Sequence[ExperimentRecord]) -> str:
    """Return the table of ``report_csv`` as a LaTeX document that needs no package."""
    header, *rows = _joined_table(records)
    lines = [" & ".join(_number(cell).translate(_LATEX) for cell in row) + r" \\" for row in (header, *rows)]
    return "\n".join(
        [
            r"\documentclass[landscape]{article}", r"\begin{document}", r"\noindent\scriptsize",
            rf"\begin{{tabular}}{{ll{'r' * (len(header) - 2)}}}", r"\hline", lines[0], r"\hline", *lines[1:],
            r"\hline", r"\end{tabular}", r"\end{document}", "",
        ]
    )  # fmt: skip


def _joined_table(records: Sequence[ExperimentRecord]) -> list[list[Any]]:
    """Return the tables of all records as one: names of columns, then a row for each model and arrangement."""
    tables = [(str(record.head.get("model", "")), *_table(record.head.get("summary", {}))) for record in records]
    columns = list(dict.fromkeys(["arrangement", *(name for _, names, _ in tables for name in names)]))
    joined: list[list[Any]] = [["model", *columns]]
    for model, names, rows in tables:
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            joined.append([model, *(cells.get(name) for name in columns)])
    return joined


def _drawn(records: Sequence[ExperimentRecord]) -> _Drawn:
    try:
        charts = [
            [chart for chart in (draw_curve(record.rows, summary), draw_cost(summary)) if chart is not None]
            for record in records
            for summary in [record.head.get("summary", {})]
        ]
        return _Drawn(charts, page_script() if any(charts) else "")
    except (ValueError, RuntimeError) as error:  # a missing extra, and what Altair and vl_convert raise
        return _Drawn([()] * len(records), missing=f"The report has no charts: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _view(record: ExperimentRecord, charts: Sequence[Chart]) -> dict[str, Any]:
    """Return what the template shows of a record."""
    head, summary = record.head, record.head.get("summary", {})
    verdict = summary.get("verdict", [])
    rows = list(record.rows)
    columns, table = _table(summary)
    is_measure = head.get("kind") == "measure"
    if is_measure:
        columns, table = measured_table(summary)
    flips = summary.get("flips")
    return {
        "title": f"{head.get('kind', 'record')}: {head.get('model', 'no model')}",
        "verdict": [verdict] if isinstance(verdict, str) else list(verdict),
        "causes": summary["causes"]["text"] if is_measure and "causes" in summary else "",
        "flips": flips if isinstance(flips, dict) else None,
        "questions": _questions(rows),
        "charts": [(chart.title, chart.caption, chart.spec()) for chart in charts],
        "columns": columns,
        "table": [[_number(value) for value in row] for row in table],
        "dropped": summary.get("dropped", {}),
        "skipped": _by_reason(summary.get("not_measured", {})) if is_measure else {},
        "names": _meanings([row[0] for row in table]) if is_measure else {},
        "overconfidence": _overconfidence(summary) if is_measure else "",
        "facts": [(name, head[name]) for name in _FACTS if head.get(name)],
        "data": head.get("data"),
        "command": head.get("command"),
        "versions": head.get("versions", {}),
        "settings": json.dumps(head.get("settings", {}), indent=1, default=str),
        "summary": "" if table and is_measure else json.dumps(summary, indent=1, default=str)[:20_000],
    }


def _by_reason(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the arrangements that were not measured, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        reasons.setdefault(reason, []).append(name)
    return reasons


def _meanings(labels: Sequence[str]) -> dict[str, str]:
    """Return what each reranker, order and method of the arrangements does, by its name; nothing without torch."""
    try:
        from rag_posfix.assembly.orders import ORDERS
        from rag_posfix.evaluation.answers.experiment import parse_arrangement
        from rag_posfix.mitigations import MITIGATIONS
        from rag_posfix.reranking import RERANKERS
    except ImportError:
        return {}
    meanings: dict[str, str] = {}
    for label in labels:
        try:
            arrangement = parse_arrangement(label)
        except ConfigError:
            continue
        named: list[tuple[Registry[Any], str]] = [(MITIGATIONS, arrangement.mitigation.name)]
        if arrangement.label != arrangement.mitigation.label:
            named.append((ORDERS, arrangement.order.partition(":")[0]))
        if arrangement.reranker is not None:
            named.append((RERANKERS, arrangement.reranker.name))
        for registry, name in named:
            if name in registry:
                first, *_ = (inspect.getdoc(registry.get(name)) or "").split("\n")
                meanings.setdefault(f"{name} ({'method' if registry is MITIGATIONS else registry.kind})", first)
    return meanings


def _overconfidence(summary: Mapping[str, Any]) -> str:
    """Return by how much the unmodified model is surer than right, or why that is not known; empty in old records."""
    scores = summary.get("measured", {}).get("none", {})
    if not summary.get("labels"):
        return "not measured: it needs the accuracy, so questions with labels"
    if "overconfidence" not in scores:
        return ""
    if scores["overconfidence"] is None:
        return "not measured: the server of the model sends no log-probabilities of its answers"
    return (
        f"{scores['overconfidence']:+.2f}: mean probability of an answer's tokens minus accuracy (Guo et al. 2017, "
        "arXiv 1706.04599); above 0 the model is surer than right"
    )


def measured_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Return the titles of the columns of a measurement and a row for each arrangement, for page and terminal."""
    return _titled(*_table(summary), _TITLES[bool(summary.get("labels"))] | _MORE_TITLES)


def _titled(
    columns: Sequence[str], table: Sequence[Sequence[Any]], titles: Mapping[str, str]
) -> tuple[list[str], list[list[Any]]]:
    """Return the columns that have titles, in the order of these, under their titles."""
    shown = {columns.index(name): title for name, title in titles.items() if name in columns}
    return ["pipeline variant", *shown.values()], [[row[0], *(row[index] for index in shown)] for row in table]


def _table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Return the numbers of each arrangement: columns, and rows that begin with its label."""
    measured = next((summary[name] for name in _MEASURED if name in summary), None)
    if not isinstance(measured, dict) or not all(isinstance(values, dict) for values in measured.values()):
        return [], []
    numbers = {label: dict(_report_numbers(values)) for label, values in measured.items()}
    names = list(dict.fromkeys(name for values in numbers.values() for name in values))
    return ["arrangement", *names], [[label, *map(values.get, names)] for label, values in numbers.items()]


def _report_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of an arrangement by name; one of a part, as recall has, by the names of both."""
    for name, value in values.items():
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name} {part}", each) for part, each in value.items() if isinstance(each, int | float))


def _number(value: Any) -> str:
    if isinstance(value, list | dict) or value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _questions(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the questions of the unmodified model with the first answer and another one, those that change first."""
    answers: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "changed" in row and row.get("condition") == "none":
            answers.setdefault(str(row["question"]), []).append(row)
    questions = []
    for name, group in answers.items():
        in_orders = [row for row in group if row.get("kind", "order") == "order"]
        changed = next((row for row in in_orders if row["changed"]), None)
        other = changed or in_orders[-1]
        questions.append(
            {
                "text": group[0].get("asked") or name,
                "changed": changed is not None,
                "control": any(row["changed"] for row in group if row.get("kind") == "repeat"),
                "sides": [
                    {
                        "answer": str(row["answer"])[:MAX_CHARACTERS],
                        "order": ", ".join(str(rank + 1) for rank in row["order"]),
                        "passages": list(row.get("passages", ())),
                    }
                    for row in (in_orders[0], other)
                ],
            }
        )
    return sorted(questions, key=lambda question: not question["changed"])[:MAX_QUESTIONS]
