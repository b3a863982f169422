"""Base class of probes, their registry, and 95 % intervals of what they measure, over prompts or strings.

A new probe is one file and one line in ``__init__.py``.

All probes of a model, one after the other, and one HTML page about what they found.
"""

from __future__ import annotations

import inspect
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from rag_posfix.contracts.method_spec import Parametrised
from rag_posfix.errors import ConfigError, EvaluationError, UnsupportedModelError
from rag_posfix.evaluation.figures import png_of, with_figure
from rag_posfix.evaluation.pages import html_figure, html_page, html_table
from rag_posfix.evaluation.record import (
    ExperimentRecord,
    Progress,
    environment,
    silent,
    write_record,
    write_whole,
    writing_results,
)
from rag_posfix.lab.probing.subject import Subject
from rag_posfix.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a probe measured.

    Attributes:
        summary: Of the record's head: JSON values by name.
        rows: Of the record: every observation.
    """

    summary: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, eq=False)
class ProfileRecord(ExperimentRecord):
    """A record whose head is the profile that a method reads.

    Attributes:
        printed: Entries of the head in ``to_json``, by their names there.
    """

    printed: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the path of the profile, and the printed entries."""
        files = {name: str(path) for name, path in self.files.items()}
        return {**files, **{name: self.head[key] for name, key in self.printed.items()}}

    def write_profile(self, out: Path | None, name: str) -> Self:
        """Return this record with its file, written to a folder; None writes nothing."""
        return self if out is None else replace(self, files={"profile": write_record(out, name, self.head)})


@dataclass(frozen=True)
class Probe(Parametrised, ABC):
    """A measurement of what a model does with positions, with its parameters as dataclass fields.

    Attributes:
        name: Registry name; with underscores, the name of the file.
        paper: Authors, year, title, URL: the section ``Source`` of the docstring.
        caption: One sentence: what one sees in the figure; do not conclude what.
        reads_text: Whether it needs a tokenizer, so a language model and not a small decoder.
        small: Parameters of ``probe all`` that differ from the defaults: shorter texts, as many of them.
    """

    caption: ClassVar[str] = ""
    reads_text: ClassVar[bool] = False
    small: ClassVar[Mapping[str, int]] = {}

    def check(self) -> None:
        """Check what the parameters name, such as a file, before a model is loaded."""

    @abstractmethod
    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Measure a model, and write the record and its figure to a folder; None writes nothing.

        The model stays as it is.
        """

    @abstractmethod
    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the figure of a record."""

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return what is printed of a record as rows of text, the headings first; none by default."""
        return ()

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return what is printed under the table: by default the summary's numbers and texts."""
        summary = record.head["summary"]
        return [
            f"{key}: {short(value)}" for key, value in summary.items() if not isinstance(value, dict | list | tuple)
        ]


@dataclass(frozen=True)
class MeasuredProbe(Probe):
    """A probe with a record of the result of ``measure``, the facts of the model and the settings."""

    @abstractmethod
    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Measure a model; see ``run``."""

    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Measure a model, and write the record and its figure; see ``Probe.run``."""
        result = self.measure(subject, progress)
        head = {
            "kind": f"probe-{self.name}",
            **subject.facts(),
            "settings": {
                name: str(value) if isinstance(value, Path) else value for name, value in self.parameters.items()
            },
            "source": self.paper,
            "summary": result.summary,
            "environment": environment(),
        }
        return with_figure(ExperimentRecord(head, result.rows).write(out), self.draw, self.caption)


PROBES: Registry[type[Probe]] = Registry("probe")


def short(value: Any) -> str:
    """Return a value as text, numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


RESAMPLES = 1000
GROUPS = 8

Statistic = Callable[[Tensor], Tensor]
"""Means (..., *rest) -> values (...)."""


def bootstrap_means(values: Tensor, seed: int = 0) -> Tensor:
    """Return the means of ``RESAMPLES`` draws with replacement, (RESAMPLES, ...) float64.

    Shapes:
        values: (n, ...), a row per prompt or string.
    """
    count = values.shape[0]
    draws = torch.randint(0, count, (RESAMPLES, count), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(RESAMPLES, count, dtype=torch.float64)
    weights.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    means: Tensor = weights @ values.double().reshape(count, -1) / count
    return means.view(RESAMPLES, *values.shape[1:])


def estimate(values: Tensor, statistic: Statistic = lambda means: means) -> dict[str, Any]:
    """Return ``value``, ``ci95`` and ``n`` of a statistic of means; rows are resampled whole, so they stay paired.

    Shapes:
        values: (n, ...), n >= 1.
    """
    low, high = torch.nanquantile(statistic(bootstrap_means(values)), torch.tensor([0.025, 0.975]).double()).tolist()
    value = float(statistic(values.double().mean(dim=0, keepdim=True)))
    return {"value": value, "ci95": [low, high], "n": values.shape[0]}


def jackknife(value: float, without: Tensor) -> list[float]:
    """Return the interval of a value by its values without one group of strings each.

    It suits what is quadratic in means, such as a share of variance, of which draws with replacement are biased.

    Source: Efron and Tibshirani (1993), An Introduction to the Bootstrap, chapter 11.
    Formula: value +- 1.96 sqrt((G - 1) / G sum_g (value_g - mean)^2).

    Shapes:
        without: (G,), G >= 2.
    """
    spread = without.double().var(correction=0).item() * (without.shape[0] - 1)
    return [value - 1.96 * spread**0.5, value + 1.96 * spread**0.5]


@dataclass(frozen=True, slots=True, eq=False)
class StateSums:
    """Sums of the states of strings.

    Shapes:
        total: (L, T, width). squares: (L,), over positions and channels. contexts: (C, L, width), means over T.
    """

    total: Tensor
    squares: Tensor
    contexts: Tensor

    @classmethod
    def merged(cls, parts: Sequence[StateSums]) -> StateSums:
        """Return the sums of all strings of these parts."""
        return cls(
            torch.stack([part.total for part in parts]).sum(dim=0),
            torch.stack([part.squares for part in parts]).sum(dim=0),
            torch.cat([part.contexts for part in parts]),
        )

    @property
    def count(self) -> int:
        """Number of strings."""
        return self.contexts.shape[0]


def sums_by_group(states: Iterable[Tensor], skip: int = 0, groups: int = GROUPS) -> list[StateSums]:
    """Return the sums of up to so many groups of strings; the first ``skip`` positions are left out.

    Shapes:
        states: (L, T, width) each, one per string.
    """
    parts: list[StateSums] = []
    for number, state in enumerate(states):
        tail = state[:, skip:].double()
        part = StateSums(tail, tail.square().sum(dim=(1, 2)), tail.mean(dim=1)[None])
        if number < groups:
            parts.append(part)
        else:
            parts[number % groups] = StateSums.merged((parts[number % groups], part))
    return parts


def intervals_by_group(parts: Sequence[StateSums], statistics: Callable[[StateSums], Tensor]) -> list[list[float]]:
    """Return the interval of each statistic (``jackknife``).

    Shapes:
        statistics: sums -> (K,).
    """
    whole = statistics(StateSums.merged(parts))
    without = [statistics(StateSums.merged([*parts[:n], *parts[n + 1 :]])) for n in range(len(parts))]
    return [jackknife(float(value), left) for value, left in zip(whole, torch.stack(without, dim=1), strict=True)]


def shown(measured: Mapping[str, Any] | None, style: str = ".2f") -> str:
    """Return an estimate as text, by default with two decimals: bfloat16 resolves no third one."""
    if measured is None:
        return "none"
    value, low, high = (format(number, style) for number in (measured["value"], *measured["ci95"]))
    return f"{value} ({low} to {high})"


PAGE = "probes.html"


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
    """Return the page about a model: style and figures are inside.

    Args:
        probes: The probes that ran, for their texts and tables.
    """
    title = f"Probes of {summary.facts['model']}"
    facts = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in summary.facts.items()
    )
    html = [f"<h1>{escape(title)}</h1><table>{facts}</table>"]
    for probe in probes:
        if probe.name in summary.records:
            html += _section(probe, summary.records[probe.name])
        else:
            html.append(f"<h2>{escape(probe.name)}</h2><p>Not measured: {escape(summary.refused[probe.name])}</p>")
    return html_page(title, html)


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
        html.append(html_figure(png_of(probe.draw(record.head)), probe.name, probe.caption))
    rows = probe.table(record.head)
    if rows:
        html.append(html_table(rows))
    names = {str(path): path.name for path in record.files.values()}
    for line in probe.lines(record):
        for path, name in names.items():
            line = line.replace(path, name)
        html.append(f"<p>{escape(line)}</p>")
    settings = ", ".join(f"{key}={value}" for key, value in probe.parameters.items())
    html.append(f'<p class="source">Settings: {escape(settings)}</p>')
    return html
