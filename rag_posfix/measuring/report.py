"""The report: one HTML file of one record or more that loads nothing from outside, and a CSV of its table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rag_posfix.errors import missing_extra
from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.evaluation.statistics import mean, wilson_interval

MAX_QUESTIONS = 200
"""Questions whose answers a report shows, those that change first."""
MAX_CHARACTERS = 1200
"""Characters of an answer in a report."""
MAX_CURVES = 8
_FACTS = ("model", "model_fingerprint", "dtype", "device", "template", "git", "at", "python", "machine")
_TEMPLATE = Path(__file__).parent / "report.html.jinja"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 280, 46, 14, 12, 42

Point = tuple[str, float, float, float]
"""Label of a position, value, and both ends of its interval."""


def report_page(records: Sequence[ExperimentRecord]) -> str:
    """Return the HTML of a report; sections of records without a chart have their summary as text."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise missing_extra("jinja2", "local") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    return template.render(records=[_view(record) for record in records], percent=lambda share: f"{share:.0%}")


def report_table(records: Sequence[ExperimentRecord]) -> str:
    """Return the numbers of the arrangements of each record as CSV."""
    tables = [(str(record.head.get("model", "")), _table(record.head["summary"])) for record in records]
    columns = list(dict.fromkeys(name for _, (names, _) in tables for name in names))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["model", *columns], lineterminator="\n")
    writer.writeheader()
    for model, (names, rows) in tables:
        writer.writerows({"model": model, **dict(zip(names, row, strict=True))} for row in rows)
    return text.getvalue()


def _view(record: ExperimentRecord) -> dict[str, Any]:
    """Return what the template shows of a record."""
    head, summary = record.head, record.head.get("summary", {})
    verdict = summary.get("verdict", [])
    rows = list(record.rows)
    columns, table = _table(summary)
    flips = summary.get("flips")
    return {
        "title": f"{head.get('kind', 'record')}: {head.get('model', 'no model')}",
        "verdict": [verdict] if isinstance(verdict, str) else list(verdict),
        "flips": flips if isinstance(flips, dict) else None,
        "questions": _questions(rows),
        "curve": _curve(rows, summary),
        "cost": _cost(summary),
        "columns": columns,
        "table": [[_number(value) for value in row] for row in table],
        "dropped": summary.get("dropped", {}),
        "skipped": summary.get("not_measured", {}) if head.get("kind") == "measure" else {},
        "facts": [(name, head[name]) for name in _FACTS if head.get(name)],
        "data": head.get("data"),
        "versions": head.get("versions", {}),
        "settings": json.dumps(head.get("settings", {}), indent=1, default=str),
        "summary": "" if table else json.dumps(summary, indent=1, default=str)[:20_000],
    }


def _table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Return the numbers of each arrangement: columns, and rows that begin with its label."""
    measured = summary.get("measured", summary.get("mitigations", summary.get("runs")))
    if not isinstance(measured, dict) or not all(isinstance(values, dict) for values in measured.values()):
        return [], []
    names = [
        key
        for key in dict.fromkeys(key for values in measured.values() for key in values)
        if any(isinstance(values.get(key), int | float) for values in measured.values())
    ]
    rows = [[label, *(values.get(name) for name in names)] for label, values in measured.items()]
    return ["arrangement", *names], rows


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


def _curve(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Return the accuracy by position of the gold passage as SVG, with Wilson's bands; empty without such rows."""
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
        return ""
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


def _chart(parts: Sequence[str], title: str, legend: Sequence[str]) -> str:
    keys = [
        f'<li><span class="key c{number % MAX_CURVES}"></span>{escape(name)}</li>'
        for number, name in enumerate(legend)
    ]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f'{"".join(parts)}</svg><ul class="legend">{"".join(keys)}</ul>'
    )


def _line_chart(lines: Mapping[str, Sequence[Point]], levels: Mapping[str, float]) -> str:
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
    return _chart(parts, "accuracy by position of the gold passage, 95 % bands", list(lines))


def _cost(summary: Mapping[str, Any]) -> str:
    """Return quality against time to the first token as SVG; empty without both."""
    measured = summary.get("measured")
    if not isinstance(measured, dict) or len(measured) < 2:
        return ""
    costs = {name: float(values["ttft_ratio"]) for name, values in measured.items()}
    highest = 1.1 * max(costs.values())
    ticks = {f"{tick * highest / 4:.1f}": _x(tick / 4) for tick in range(5)}
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
    return _chart(parts, f"{what} against cost", legend)
