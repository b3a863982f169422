"""Figure and HTML page of a reranking evaluation. The page needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rag_posfix.errors import missing_extra

_MAX_QUERIES = 100
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "caption{text-align:left;font-weight:600}.scroll{overflow-x:auto}"
)


def check_matplotlib() -> None:
    """Raise ConfigError where matplotlib is not installed, before any work is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_extra("matplotlib", "eval") from error


def draw_runs(runs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a PNG: bars of every measure with 95 % intervals, and the first measure against seconds per query.

    ``runs`` are summaries by label, the first stage first; ``ci95`` names the measures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measures = list(next(iter(runs.values()))["ci95"])
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    bars, costs = figure.subplots(1, 2, width_ratios=[2, 1])
    width = 0.8 / len(runs)
    for index, (label, run) in enumerate(runs.items()):
        centres = [measure + (index - (len(runs) - 1) / 2) * width for measure in range(len(measures))]
        values = [run[name] for name in measures]
        low = [max(0.0, value - run["ci95"][name][0]) for name, value in zip(measures, values, strict=True)]
        high = [max(0.0, run["ci95"][name][1] - value) for name, value in zip(measures, values, strict=True)]
        bars.bar(centres, values, width, yerr=[low, high], label=_plain(label), error_kw={"elinewidth": 0.8})
        costs.plot(run["seconds"], values[0], "o", label=_plain(label))
    bars.set_xticks(range(len(measures)), [_plain(name) for name in measures])
    bars.set_ylabel("mean over topics, 95 % interval")
    costs.set_xlabel("seconds per query")
    costs.set_ylabel(_plain(measures[0]))
    costs.margins(0.15)
    if all(run["seconds"] > 0 for run in runs.values()):
        costs.set_xscale("log")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    content = io.BytesIO()
    canvas.print_png(content, metadata={"Software": None})
    return content.getvalue()


def _plain(text: str) -> str:
    """Return text that matplotlib does not read as mathematics, and that shows in a legend."""
    return text.replace("$", r"\$").removeprefix("_")


def render_page(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], figure: bytes) -> str:
    """Return the page of a record of ``evaluate_reranking``, with its figure as PNG."""
    summary = head["summary"]
    runs = {"first_stage": summary["first_stage"], **summary["runs"]}
    measures = list(summary["first_stage"]["ci95"])
    image = base64.b64encode(figure).decode("ascii")
    sections = [
        "<h1>Reranking evaluation</h1>",
        f"<p>{_text(head['at'])}: {summary['n']} topics of {_text(head['data']['corpus']['name'])}, "
        f"{_text(head['settings']['depth'])} candidates each from {_text(head['settings']['first_stage'])}.</p>",
        _runs_table(runs, measures),
        f'<p><img alt="Measures of each run, and quality against time" src="data:image/png;base64,{image}"></p>',
        _comparisons_table(summary["significance"]),
        _queries_table(rows, list(runs), measures[0]),
        _table("What the files hold", ["name", "value"], head["counts"].items()),
        _table("Settings", ["name", "value"], head["settings"].items()),
        _table("Versions", ["name", "value"], head["versions"].items()),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Reranking evaluation</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _runs_table(runs: Mapping[str, Mapping[str, Any]], measures: Sequence[str]) -> str:
    rows = []
    for label, run in runs.items():
        values = [f"{run[name]:.3f} ({run['ci95'][name][0]:.3f} to {run['ci95'][name][1]:.3f})" for name in measures]
        calls = "" if run["calls"] is None else f"{run['calls']:.1f}"
        rows.append([label, *values, f"{run['seconds']:.3f}", calls, f"{run['tokens_read']:.0f}"])
    head = ["run", *measures, "seconds per query", "calls", "tokens read"]
    return _table("Mean over topics (95 % interval)", head, rows)


def _comparisons_table(comparisons: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"{c['a']} against {c['b']}", c["measure"], f"{c['difference']:+.3f}",
            f"{c['ci95'][0]:+.3f} to {c['ci95'][1]:+.3f}", f"{c['p_randomisation']:.4f}", f"{c['p_t']:.4f}",
            f"{c['p_holm']:.4f}", f"{c['better']} / {c['worse']}",
        ]
        for c in comparisons
    ]  # fmt: skip
    head = ["runs", "measure", "difference", "95 % interval", "p", "p (t-test)", "p (Holm)", "better / worse"]
    return _table("Differences, queries paired; p by randomisation, then corrected over all pairs of runs", head, rows)


def _queries_table(rows: Iterable[Mapping[str, Any]], labels: Sequence[str], measure: str) -> str:
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(row["query"], {})[row["run"]] = row[measure]
    spread = sorted(values, key=lambda query: min(values[query].values()) - max(values[query].values()))
    cells = [[query, *(f"{values[query][name]:.3f}" for name in labels)] for query in spread[:_MAX_QUERIES]]
    title = f"{measure} per query, the {len(cells)} of {len(values)} queries on which runs differ most first"
    return _table(title, ["query", *labels], cells)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><caption>{_text(title)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _text(value: object) -> str:
    return escape(str(value))
