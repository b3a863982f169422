"""A reranking evaluation as one HTML page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["render_page"]

_MOST_QUERIES = 100
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "caption{text-align:left;font-weight:600}.scroll{overflow-x:auto}"
)


def render_page(record: Mapping[str, Any], picture: bytes) -> str:
    """Return the page.

    Args:
        record: The record of the run: ``summary`` with ``first_stage``, ``runs`` and ``significance``, ``rows``,
            ``settings``, ``counts``, ``data``, ``at`` and ``versions``.
        picture: A PNG.
    """
    summary = record["summary"]
    runs = {"first_stage": summary["first_stage"], **summary["runs"]}
    measures = list(summary["first_stage"]["ci95"])
    image = base64.b64encode(picture).decode("ascii")
    parts = [
        "<h1>Reranking evaluation</h1>",
        f"<p>{_text(record['at'])}: {summary['n']} topics of {_text(record['data']['corpus']['name'])}, "
        f"{_text(record['settings']['depth'])} candidates each from {_text(record['settings']['first_stage'])}.</p>",
        _runs_table(runs, measures),
        f'<p><img alt="Measures of each run, and quality against time" src="data:image/png;base64,{image}"></p>',
        _comparisons_table(summary["significance"]),
        _queries_table(record["rows"], list(runs), measures[0]),
        _pairs_table("What the files hold", record["counts"]),
        _pairs_table("Settings", record["settings"]),
        _pairs_table("Versions", record["versions"]),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Reranking evaluation</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _runs_table(runs: Mapping[str, Mapping[str, Any]], measures: Sequence[str]) -> str:
    rows = []
    for label, found in runs.items():
        values = [
            f"{found[name]:.3f} ({found['ci95'][name][0]:.3f} to {found['ci95'][name][1]:.3f})" for name in measures
        ]
        calls = "" if found["calls"] is None else f"{found['calls']:.1f}"
        rows.append([label, *values, f"{found['seconds']:.3f}", calls, f"{found['tokens_read']:.0f}"])
    head = ["run", *measures, "seconds per query", "calls", "tokens read"]
    return _table("Mean over topics (95 % interval)", head, rows)


def _comparisons_table(found: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"{one['a']} against {one['b']}", one["measure"], f"{one['difference']:+.3f}",
            f"{one['ci95'][0]:+.3f} to {one['ci95'][1]:+.3f}", f"{one['p_randomisation']:.4f}", f"{one['p_t']:.4f}",
            f"{one['p_holm']:.4f}", f"{one['better']} / {one['worse']}",
        ]
        for one in found
    ]  # fmt: skip
    head = ["runs", "measure", "difference", "95 % interval", "p", "p (t-test)", "p (Holm)", "better / worse"]
    return _table("Differences, queries paired; p by randomisation, then corrected over all pairs of runs", head, rows)


def _queries_table(rows: Iterable[Mapping[str, Any]], labels: Sequence[str], measure: str) -> str:
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(row["query"], {})[row["run"]] = row[measure]
    spread = sorted(values, key=lambda query: min(values[query].values()) - max(values[query].values()))
    shown = spread[:_MOST_QUERIES]
    title = f"{measure} per query, the {len(shown)} of {len(values)} queries on which runs differ most first"
    return _table(
        title, ["query", *labels], [[query, *(f"{values[query][name]:.3f}" for name in labels)] for query in shown]
    )


def _pairs_table(title: str, pairs: Mapping[str, Any]) -> str:
    return _table(title, ["name", "value"], [[name, value] for name, value in pairs.items()])


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><caption>{_text(title)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _text(value: object) -> str:
    return escape(str(value))
