"""All probes of a model, one after the other, and one HTML page about what they found."""

from __future__ import annotations

import base64
import inspect
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError, EvaluationError, UnsupportedModelError
from rag_posfix.evaluation.record import ExperimentRecord, Progress, silent, write_whole, writing_results
from rag_posfix.probing.base import Probe
from rag_posfix.probing.subject import Subject

PAGE = "probes.html"
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
img { max-width: 100%; background: #fff; } pre { white-space: pre-wrap; background: #f4f4f4; padding: .6rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .9rem; }
td, th { border: 1px solid #ddd; padding: .2rem .6rem; }
th { text-align: left; background: #f4f4f4; } .source { color: #555; font-size: .9rem; }
"""


@dataclass(frozen=True, slots=True, eq=False)
class ProbeSummary:
    """The results of all probes of a model.

    Attributes:
        facts: Of the model.
        records: Each probe's record by name.
        refused: Why a probe could not measure the model, or not with these parameters and questions, by name.
    """

    facts: Mapping[str, Any]
    records: Mapping[str, ExperimentRecord]
    refused: Mapping[str, str]


def run_probes(
    subject: Subject, probes: Sequence[Probe], out: Path, progress: Progress = silent
) -> tuple[ProbeSummary, Path]:
    """Run probes on one model, and write their records, their figures and a page to a folder.

    A probe that cannot measure this model, or not with its parameters and questions, is left out, and the page says
    why.

    Returns:
        The results, and the path of the page.

    Raises:
        EvaluationError: the folder cannot be written; told before the first probe runs.
    """
    path = out / PAGE
    with writing_results(path):  # in the loop it would look as if the first probe could not measure the model
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    records: dict[str, ExperimentRecord] = {}
    refused: dict[str, str] = {}
    for probe in probes:
        with progress(f"probe {probe.name}"):
            pass
        try:
            records[probe.name] = probe.run(subject, out=out, progress=progress)
        except (UnsupportedModelError, ConfigError, EvaluationError) as error:
            refused[probe.name] = str(error)
    summary = ProbeSummary(subject.facts(), records, refused)
    write_whole(path, [probe_page(summary, probes).encode()])
    return summary, path


def probe_page(summary: ProbeSummary, probes: Sequence[Probe]) -> str:
    """Return an HTML page about a model that loads nothing from elsewhere: style and figures are inside.

    Args:
        probes: The probes that ran, for their texts and tables.
    """
    name = escape(str(summary.facts["model"]))
    facts = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in summary.facts.items()
    )
    html = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        f'<meta name="viewport" content="width=device-width"><title>Probes of {name}</title>',
        f"<style>{STYLE}</style></head><body><h1>Probes of {name}</h1><table>{facts}</table>",
    ]
    for probe in probes:
        if probe.name in summary.records:
            html += _section(probe, summary.records[probe.name])
        else:
            html.append(f"<h2>{escape(probe.name)}</h2><p>Not measured: {escape(summary.refused[probe.name])}</p>")
    return "\n".join([*html, "</body></html>", ""])


def _section(probe: Probe, record: ExperimentRecord) -> list[str]:
    text = inspect.getdoc(type(probe)) or ""
    intro, _, details = text.partition("\nSource:")
    formula = details.partition("\nFormula:")[2].partition("\nDiffers")[0].partition("\nArgs")[0]
    html = [f"<h2>{escape(probe.name)}</h2>"]
    html += [f"<p>{escape(paragraph)}</p>" for paragraph in intro.strip().split("\n\n")]
    html.append(f'<p class="source">Source: {escape(probe.paper)}</p>')
    if formula.strip():
        html.append(f"<pre>{escape(inspect.cleandoc(formula))}</pre>")
    if "png" in record.files:
        encoded = base64.b64encode(record.files["png"].read_bytes()).decode()
        html.append(f'<img alt="{escape(probe.name)}" src="data:image/png;base64,{encoded}">')
    rows = probe.table(record.head)
    if rows:
        cells = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in rows[0])}</tr>"]
        cells += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:]]
        html.append(f"<table>{''.join(cells)}</table>")
    names = {str(path): path.name for path in record.files.values()}
    for line in probe.lines(record):
        for path, name in names.items():
            line = line.replace(path, name)
        html.append(f"<p>{escape(line)}</p>")
    settings = ", ".join(f"{key}={value}" for key, value in probe.parameters.items())
    html.append(f'<p class="source">Settings: {escape(settings)}</p>')
    return html
